"""What is done with a pipeline of torch's own stages: each habit is one function and its row.

It trains with the policies that it is given, by step, and returns all that its steps came to;
None where torch cannot.
"""

from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch
from conftest import TORCH
from recv_buffer_scenarios import switch

from pp_hookfix.verification import schedules, training
from pp_hookfix.verification.ranks import Rank
from pp_hookfix.verification.training import FEATURES, InputHooks

MICROBATCHES = 4
Policies = Sequence[Optional[str]]
Habit = Callable[[Rank, Policies], Optional[list[torch.Tensor]]]
HABITS: list[Habit] = []


def habit(function: Habit) -> Habit:
    """The row of a habit."""
    HABITS.append(function)
    return function


class Pipeline:
    """One stage per rank, 1F1B, and all that its steps came to."""

    def __init__(self, rank: Rank, infer_metadata: bool = False) -> None:
        self.rank = rank
        (self.stage,) = training.make_stages(
            "1F1B", rank.rank, rank.ranks, rank.device, infer_metadata=infer_metadata
        )
        self.schedule = schedules.build("1F1B", [self.stage], MICROBATCHES, training.summed_error)
        self.generator = torch.Generator().manual_seed(0)
        self.found: list[torch.Tensor] = []

    def run(self, schedule: Any, mode: str = "step", microbatches: int = 4, rows: int = 2) -> None:
        x, target = (
            torch.randn(rows * microbatches, FEATURES, generator=self.generator).to(
                self.rank.device
            )
            for _ in range(2)
        )
        losses: list[torch.Tensor] = []
        getattr(schedule, mode)(
            *([x] if self.stage.is_first else []),
            **({"target": target, "losses": losses} if self.stage.is_last else {}),
        )
        self.found += [loss.detach() for loss in losses]

    def end_step(self) -> None:
        for parameter in self.stage.submod.parameters():
            self.found.append(parameter.grad.clone())
            with torch.no_grad():
                parameter -= 0.01 * parameter.grad
            parameter.grad = None


@habit
def accumulation(rank: Rank, by_step: Policies) -> Optional[list[torch.Tensor]]:
    """Three pipeline steps per optimizer step."""
    pipeline = Pipeline(rank)
    for policy in by_step:
        for _ in range(3):
            switch(policy or False)
            pipeline.run(pipeline.schedule)
        pipeline.end_step()
    return pipeline.found


@habit
def fewer_microbatches(rank: Rank, by_step: Policies) -> Optional[list[torch.Tensor]]:
    """Validation with half the microbatches between steps, by a schedule of its own (2.9 on)."""
    pipeline = Pipeline(rank)
    if not hasattr(pipeline.schedule, "eval"):
        return None
    validation = schedules.build("GPipe", [pipeline.stage], 2, training.summed_error)
    for policy in by_step:
        switch(policy or False)
        pipeline.run(pipeline.schedule)
        pipeline.end_step()
        with torch.no_grad():
            pipeline.run(validation, "eval", microbatches=2)
        reset(pipeline.stage, pipeline.schedule, validation)
    return pipeline.found


@habit
def other_lengths(rank: Rank, by_step: Policies) -> Optional[list[torch.Tensor]]:
    """Microbatches of other lengths, for which descriptors are thrown away (2.6 on)."""
    if TORCH < (2, 6):
        return None
    pipeline = Pipeline(rank, infer_metadata=True)
    for step, policy in enumerate(by_step):
        switch(policy or False)
        if step % 2 == 0:
            reset(pipeline.stage, pipeline.schedule)
        for _ in range(2):
            pipeline.run(pipeline.schedule, rows=2 + step // 2)
        pipeline.end_step()
    return pipeline.found


def reset(stage: Any, *of_schedules: Any) -> None:
    """Have torch infer the shapes and make the descriptors anew, as NeMo Automodel does."""
    for name in ("_stage_meta", "_user_meta"):
        metadata = getattr(stage, name, None)
        if metadata is not None:
            for of in ("inputs", "outputs", "input_grads", "output_grads"):
                setattr(metadata, of, None)
    for name in ("_outputs_meta", "inputs_meta", "_inference_mode", "grad_send_info"):
        if hasattr(stage, name):
            setattr(stage, name, None)
    stage.args_recv_info, stage.grad_recv_info = {}, {}
    for schedule in of_schedules:
        for name in (
            *("_stage_initialized", "_stage_forward_initialized", "_stage_backward_initialized"),
        ):
            if hasattr(schedule, name):
                setattr(schedule, name, False)


@habit
def one_module_twice(rank: Rank, by_step: Policies) -> Optional[list[torch.Tensor]]:
    """Both stages of a rank run the same module."""
    switch(by_step[0] or False)
    stages = training.make_stages("Interleaved1F1B", rank.rank, rank.ranks, rank.device)
    for stage in stages:
        stage.submod = stages[0].submod
    schedule = schedules.build("Interleaved1F1B", stages, MICROBATCHES, training.summed_error)
    record = training.run_steps(
        *(schedule, stages, len(by_step), MICROBATCHES, rank.device, InputHooks),
        lambda step: switch(by_step[step] or False),
    )
    return record.losses + [
        tensor
        for tensors in (*record.gradients.values(), *record.boundary.values())
        for tensor in tensors
    ]
