"""One retrieval of a received activation: stock torch, the hand edits, and each policy.

    python benchmarks/call.py [--rounds N] [--json]

Baseline: ``hand edit`` (hand_edit.py). ``bare wrapt`` is the same edit through a
``wrapt.FunctionWrapper`` and nothing else, which is the limit for a fix on wrapt. Rounds of
calls, interleaved; the median round. ``fresh`` includes the posting of its receive, without
which there is nothing to retrieve; ``stock, posted`` is stock torch's with that.
"""

import statistics
import sys
import time
from collections import defaultdict
from typing import Any, Callable

import hand_edit
import table
import torch
import wrapt

import pp_hookfix
from pp_hookfix import fresh
from pp_hookfix.policies import POLICIES
from pp_hookfix.verification import bare_stage

CALLS = 2000
RETRIEVAL: str = "_retrieve_recv_activations"


def seconds_per_call(stage: Any, posted: bool = False) -> float:
    """Of one retrieval; of the posting of its receive, too, where that is `posted`."""
    retrieve, post = stage._retrieve_recv_activations, bare_stage.post
    start = time.perf_counter()
    for _ in range(CALLS):
        if posted:
            post(stage)
        retrieve(0)
    return (time.perf_counter() - start) / CALLS


def bare(
    wrapped: Callable[..., Any], stage: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The hand edit as a wrapper."""
    return tuple(
        [
            tensor.detach().requires_grad_(tensor.requires_grad)
            for tensor in wrapped(*args, **kwargs)
        ]
    )


def measure(rounds: int = 60) -> list[table.Row]:
    """Rows of one interleaved run."""
    stage = bare_stage.make(torch.zeros(256, 1024, requires_grad=True))  # 1 MiB
    name, edited = hand_edit.edited()
    original = vars(hand_edit.BASE)[name]
    retrieval = vars(hand_edit.BASE)[RETRIEVAL]
    taken: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        pp_hookfix.disable()
        taken["stock"].append(seconds_per_call(stage))
        taken["stock, posted"].append(seconds_per_call(stage, posted=True))
        setattr(hand_edit.BASE, name, edited)
        taken["hand edit"].append(seconds_per_call(stage))
        setattr(hand_edit.BASE, name, original)
        wrapper = wrapt.FunctionWrapper(retrieval, bare)
        setattr(hand_edit.BASE, RETRIEVAL, wrapper)
        taken["bare wrapt"].append(seconds_per_call(stage))
        setattr(hand_edit.BASE, RETRIEVAL, retrieval)
        for policy in POLICIES:
            pp_hookfix.enable(policy)
            if policy == "fresh":
                fresh.take_charge(stage, None, (), {})
            taken[policy].append(seconds_per_call(stage, posted=policy == "fresh"))
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
