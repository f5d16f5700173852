"""What a training step costs under `pp-hookfix audit`, and that it does not grow.

    python benchmarks/audit.py [--steps N] [--json]

The stages of the benchmark of a 1F1B step (two ranks, 8 microbatches of 64 x 1024 floats,
three linear layers of 1024 per stage), with a hook on each input that takes the gradient's
norm and is never taken off, so that hooks pile up. Baseline: ``stock``, which is what the audit
runs. Each has stages of its own, and they take turns, step by step; the medians' ratio and the
spread of the steps, on the last stage's rank. Then audited steps alone, with hooks taken off:
how many objects Python's garbage collector knows in that rank after all of them, over how many
after a tenth of them.
"""

import gc
import os
import sys
from typing import Any

import step
import table
import torch

import pp_hookfix
from pp_hookfix import settings
from pp_hookfix.verification import ranks, schedules, training

VARIANTS = ("stock", "audit")


def switch(variant: str) -> None:
    pp_hookfix.disable()
    os.environ.pop(settings.AUDIT_VARIABLE, None)
    if variant == "audit":
        # As the command has it, but noted nowhere.
        os.environ[settings.AUDIT_VARIABLE] = "nowhere"
        pp_hookfix.enable()


class Job:
    """A stage of this rank, whose user collects norms."""

    def __init__(self, rank: ranks.Rank) -> None:
        self.rank = rank
        self.norms: list[torch.Tensor] = []
        self.handles: list[Any] = []
        stage = step.make_stage(rank)
        stage.submod.register_forward_pre_hook(self.meet)
        self.schedule = schedules.build("1F1B", [stage], step.MICROBATCHES, training.summed_error)

    def meet(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs[0].requires_grad:
            norms = self.norms
            self.handles.append(
                inputs[0].register_hook(lambda gradient: norms.append(gradient.norm()))
            )

    def train(self, x: torch.Tensor, target: torch.Tensor) -> float:
        self.norms.clear()
        return step.time_step(self.rank, self.schedule, x, target)

    def take_hooks_off(self) -> None:
        while self.handles:
            self.handles.pop().remove()


def time_steps(rank: ranks.Rank, steps: int) -> tuple[dict[str, list[float]], list[int]]:
    """Seconds of each step on this rank, by variant; and objects after steps under audit."""
    jobs = {variant: Job(rank) for variant in VARIANTS}
    x, target = torch.randn(2, step.ROWS * step.MICROBATCHES, step.WIDTH, device=rank.device)
    taken: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    objects = []
    with rank.time_limit("the steps"):
        for number in range(-2, steps):  # the first two warm up
            for variant, job in jobs.items():
                switch(variant)
                seconds = job.train(x, target)
                if number >= 0:
                    taken[variant].append(seconds)
        for number in range(1, steps + 1):
            jobs["audit"].take_hooks_off()
            jobs["audit"].train(x, target)
            if number in (steps // 10, steps):
                gc.collect()
                objects.append(len(gc.get_objects()))
    return taken, objects


def measure(steps: int = 100) -> list[table.Row]:
    """Rows of one run, as the last rank saw it."""
    outcome = ranks.start(time_steps, 2, "gloo", timeout=600, steps=steps)
    if outcome.exit_status:
        raise RuntimeError("\n".join(outcome.logs))
    taken, objects = outcome.results[1]
    before, after = objects
    grown = {
        "row": f"objects, {steps} steps over {steps // 10}",
        "median ms": "",
        "quartiles ms": "",
    }
    return [*table.timed(taken, "stock"), {**grown, "over stock": round(after / before, 4)}]


def main() -> int:
    parser = table.parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=100, help="steps per variant (100)")
    arguments = parser.parse_args()
    table.show(measure(arguments.steps), arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
