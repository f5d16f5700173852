"""A 1F1B training step of realistic stage sizes: the fix against the hand edit.

    python benchmarks/step.py [--steps N] [--json]

Two ranks, 8 microbatches of 64 x 1024 floats, three linear layers of 1024 per stage.
Baseline: ``hand edit`` (hand_edit.py). The variants take turns, step by step, in the
same processes and on the same stages; the medians' ratio and the spread of the steps.
"""

import sys
import time
from typing import Any

import hand_edit
import table
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

import pp_hookfix
from pp_hookfix.verification import ranks, schedules, training

WIDTH, ROWS, MICROBATCHES = 1024, 64, 8
VARIANTS = ("stock", "hand edit", "detach", "clone", "fresh")


def make_stage(rank: ranks.Rank) -> Any:
    torch.manual_seed(rank.rank)
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    example = torch.zeros(ROWS, WIDTH, device=rank.device)
    return PipelineStage(
        nn.Sequential(*layers).to(rank.device),
        rank.rank,
        rank.ranks,
        rank.device,
        input_args=example.clone().requires_grad_(rank.rank > 0),
        output_args=example.clone().requires_grad_(),
    )


def time_steps(rank: ranks.Rank, steps: int) -> dict[str, list[float]]:
    """Seconds of each step on this rank, by variant."""
    name, edited = hand_edit.edited()
    original = vars(hand_edit.BASE)[name]
    stage = make_stage(rank)
    schedule = schedules.build("1F1B", [stage], MICROBATCHES, training.summed_error)
    x, target = torch.randn(2, ROWS * MICROBATCHES, WIDTH, device=rank.device)
    taken: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with rank.time_limit("the steps"):
        for step in range(-2, steps):  # the first two warm up
            for variant in VARIANTS:
                pp_hookfix.disable()
                setattr(hand_edit.BASE, name, original)
                if variant == "hand edit":
                    setattr(hand_edit.BASE, name, edited)
                elif variant != "stock":
                    pp_hookfix.enable(variant)
                seconds = time_step(rank, schedule, x, target)
                if step >= 0:
                    taken[variant].append(seconds)
    return taken


def time_step(rank: ranks.Rank, schedule: Any, x: torch.Tensor, target: torch.Tensor) -> float:
    """Seconds of one step of both ranks."""
    torch.distributed.barrier()
    start = time.perf_counter()
    if rank.rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=target, losses=[])
    torch.distributed.barrier()
    return time.perf_counter() - start


def measure(steps: int = 40) -> list[table.Row]:
    """Rows of one run, as rank 0 saw it."""
    outcome = ranks.start(time_steps, 2, "gloo", timeout=600, steps=steps)
    if outcome.exit_status:
        raise RuntimeError("\n".join(outcome.logs))
    taken: dict[str, list[float]] = outcome.results[0]
    return table.timed(taken, "hand edit")


def main() -> int:
    parser = table.parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=40, help="steps per variant (40)")
    arguments = parser.parse_args()
    table.show(measure(arguments.steps), arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
