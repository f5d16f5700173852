"""One retrieval of a received activation: stock torch, the hand edit, and each policy.

    python benchmarks/call.py [--rounds N] [--json]

Baseline: ``hand edit`` (hand_edit.py). Rounds of calls, interleaved; the median round.
"""

import statistics
import sys
import time
from typing import Any

import hand_edit
import table
import torch

import pp_hookfix
from pp_hookfix.verification import bare_stage

CALLS = 2000


def seconds_per_call(stage: Any) -> float:
    retrieve = stage._retrieve_recv_activations
    start = time.perf_counter()
    for _ in range(CALLS):
        retrieve(0)
    return (time.perf_counter() - start) / CALLS


def measure(rounds: int = 60) -> list[table.Row]:
    """Rows of one interleaved run; ``fresh`` is left out, for its receive is part of it."""
    stage = bare_stage.make(torch.zeros(256, 1024, requires_grad=True))  # 1 MiB
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
