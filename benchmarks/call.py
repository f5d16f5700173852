"""One retrieval of a received activation: stock torch, the hand edit, and each policy.

    python benchmarks/call.py [--rounds N] [--json]

Baseline: ``hand edit`` (hand_edit.py). Rounds of calls, interleaved; the median round.
"""

import importlib
import statistics
import sys
import time
from typing import Any

import hand_edit
import table
import torch

import pp_hookfix
from pp_hookfix import activation

stage_module = importlib.import_module(activation.STAGE_MODULE)
CALLS = 2000


def make_stage() -> Any:
    """A stage of the installed torch with one receive buffer of 1 MiB, without process groups."""
    stage = object.__new__(stage_module.PipelineStage)
    info = object.__new__(stage_module._RecvInfo)
    info.is_root_arg, info.input_name, info.source = False, "x", 0
    info.buffer = torch.zeros(256, 1024, requires_grad=True)
    if hasattr(stage_module, "_TensorMeta"):
        info.tensor_meta = stage_module._TensorMeta.from_tensor(info.buffer)
    stage.args_recv_info, stage.grad_recv_info = {0: (info,)}, {}
    stage.stage_index, stage._has_backward = 1, True
    stage.stage_index_to_group_rank = {0: 0, 1: 1}
    stage.device = torch.device("cpu")
    return stage


def seconds_per_call(stage: Any) -> float:
    retrieve = stage._retrieve_recv_activations
    start = time.perf_counter()
    for _ in range(CALLS):
        retrieve(0)
    return (time.perf_counter() - start) / CALLS


def measure(rounds: int = 60) -> list[table.Row]:
    """Rows of one interleaved run; ``fresh`` is left out, for its receive is part of it."""
    stage = make_stage()
    name, edited = hand_edit.edited()
    original = vars(hand_edit.BASE)[name]
    taken: dict[str, list[float]] = {"stock": [], "hand edit": [], "detach": [], "clone": []}
    for _ in range(rounds):
        pp_hookfix.disable()
        taken["stock"].append(seconds_per_call(stage))
        setattr(hand_edit.BASE, name, edited)
        taken["hand edit"].append(seconds_per_call(stage))
        setattr(hand_edit.BASE, name, original)
        for policy in ("detach", "clone"):
            pp_hookfix.enable(policy)
            taken[policy].append(seconds_per_call(stage))
    pp_hookfix.disable()
    baseline = statistics.median(taken["hand edit"])
    return [
        {
            "row": row,
            "median µs": round(1e6 * statistics.median(times), 2),
            "over hand edit, µs": round(1e6 * (statistics.median(times) - baseline), 2),
        }
        for row, times in taken.items()
    ]


def main() -> int:
    parser = table.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=60, help=f"of {CALLS} calls each (60)")
    arguments = parser.parse_args()
    pp_hookfix.disable()
    table.show(measure(arguments.rounds), arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
