"""Jobs as people write them, run on a rank: on stock torch, which is counted, and under audit.

Each habit is what a user's module does with its input, or the job with what comes out. The
truth is read off stock torch: hooks that fired in the last step, tensors that were kept and
whose data changed since, gradients that differ.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch
from recv_buffer_scenarios import Layers, switch
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.utils.checkpoint import checkpoint

from pp_hookfix.audit import watch
from pp_hookfix.policies import AUDIT
from pp_hookfix.verification import ranks, schedules, training

STEPS = 4
MICROBATCHES = 4
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")


class Job:
    """What a job keeps for itself, and what is counted of it."""

    def __init__(self) -> None:
        self.step = 0
        self.fired: list[int] = []
        self.kept: list[tuple[Any, torch.Tensor]] = []  # with what it was when it was kept
        self.losses: list[torch.Tensor] = []
        self.other: list[Any] = []

    def count(self, gradient: torch.Tensor) -> None:
        self.fired[-1] += 1

    def keep(self, held: Any, tensor: torch.Tensor) -> None:
        self.kept.append((held, tensor.detach().clone()))

    def changed(self) -> int:
        return sum(not torch.equal(_tensor(held), was) for held, was in self.kept)


def _tensor(held: Any) -> torch.Tensor:
    if isinstance(held, torch.Tensor):
        if held.grad_fn is not None and hasattr(held.grad_fn, "_saved_self"):
            saved: torch.Tensor = held.grad_fn._saved_self
            return saved.detach()
        return held.detach()
    return torch.from_numpy(held)


class Probe:
    """A callable object, as a hook."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, gradient: torch.Tensor) -> None:
        self.job.count(gradient)

    def method(self, gradient: torch.Tensor) -> None:
        self.job.count(gradient)


class Stage(nn.Module):
    """A stage's module whose user does what `habit` says."""

    def __init__(self, habit: "Habit", job: Job) -> None:
        super().__init__()
        self.body = training.make_module()
        self.habit = habit
        self.job = job

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.habit.on_input(self.job, x)
        y: torch.Tensor = self.habit.body(self.body, x)
        if y.requires_grad:
            self.habit.on_output(self.job, y)
        return y


class Habit:
    """Does nothing: what others do is what they override."""

    needs = "nothing"
    hooks = 0  # that each microbatch registers, at a stage that receives
    post_accumulate = False
    runs_split = True  # where the backward is split into inputs and weights

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        pass

    def on_output(self, job: Job, y: torch.Tensor) -> None:
        pass

    def body(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module(x)  # type: ignore[no-any-return]

    def after_step(self, job: Job, output: Optional[torch.Tensor], losses: list[Any]) -> None:
        pass


# --- hooks


class Hooks(Habit):
    """Registers a lambda."""

    needs = "detach"
    hooks = 1
    name = "Hooks.on_input.<locals>.<lambda>"

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        if x.requires_grad:
            x.register_hook(lambda gradient: job.count(gradient))


class HooksPartial(Hooks):
    name = "Job.count"

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        if x.requires_grad:
            x.register_hook(functools.partial(Job.count, job))


class HooksMethod(Hooks):
    name = "Probe.method"

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        if x.requires_grad:
            x.register_hook(Probe(job).method)


class HooksObject(Hooks):
    name = "Probe.__call__"

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        if x.requires_grad:
            x.register_hook(Probe(job))


class HooksAppend(Hooks):
    """A method of a builtin; it keeps what the backward computed, which is nobody's buffer."""

    name = "list.append"

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        if x.requires_grad:
            x.register_hook(job.other.append)


class HooksTwice(Hooks):
    hooks = 2

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        for _ in range(2):
            super().on_input(job, x)


class HooksInFirstStep(Hooks):
    """Relies on stock torch's fault: registers once, and would go on collecting."""

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        if job.step == 0:
            super().on_input(job, x)


class HooksPostAccumulate(Hooks):
    name = "HooksPostAccumulate.on_input.<locals>.<lambda>"
    post_accumulate = True

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        if x.requires_grad:
            x.register_post_accumulate_grad_hook(lambda leaf: job.count(leaf))


class HooksHoldMemory(Hooks):
    """Each holds 1000 bytes of its own, and the input that it is on."""

    name = "HooksHoldMemory.on_input.<locals>.<lambda>"
    pinned = 1000

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        held = torch.zeros(self.pinned, dtype=torch.uint8)
        if x.requires_grad:
            x.register_hook(lambda gradient: job.count(gradient[: len(held) + len(x)]))


class HooksRemovedInTime(Hooks):
    needs = "nothing"
    hooks = 0

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        if x.requires_grad:
            job.other.append(x.register_hook(job.count))

    def after_step(self, job: Job, output: Any, losses: list[Any]) -> None:
        while job.other:
            job.other.pop().remove()


class HooksRemovedInNextStep(HooksRemovedInTime):
    """Removed late, but before stock torch would fire them again."""

    needs = "detach"
    hooks = 1
    name = "Job.count"

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        if x.requires_grad:
            old = getattr(x, "handle", None)
            del old
            job.other.append((job.step, x.register_hook(job.count)))

    def after_step(self, job: Job, output: Any, losses: list[Any]) -> None:
        for step, handle in job.other:
            if step < job.step:
                handle.remove()
        job.other = [(step, handle) for step, handle in job.other if step == job.step]


class Attributes(Habit):
    needs = "detach"

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        x.seen_in_step = job.step  # type: ignore[attr-defined]


# --- kept


class KeepsInput(Habit):
    needs = "clone or fresh"
    direction = "input"

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        job.keep(self.part(x), x if self.part(x) is x else self.part_of_copy(x))

    def part(self, x: torch.Tensor) -> Any:
        return x

    def part_of_copy(self, x: torch.Tensor) -> torch.Tensor:
        return _tensor(self.part(x))


class KeepsDetached(KeepsInput):
    def part(self, x: torch.Tensor) -> Any:
        return x.detach()


class KeepsView(KeepsInput):
    def part(self, x: torch.Tensor) -> Any:
        return x[:1]


class KeepsArray(KeepsInput):
    def part(self, x: torch.Tensor) -> Any:
        return x.detach().numpy()


class KeepsInGraph(KeepsInput):
    """A norm that is not detached: its graph saved the input."""

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        if x.requires_grad:
            job.keep(x.norm(), x)


class KeepsInputAndHooks(KeepsInput):
    hooks = 1
    name = "KeepsInputAndHooks.on_input.<locals>.<lambda>"

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        super().on_input(job, x)
        if x.requires_grad:
            x.register_hook(lambda gradient: job.count(gradient))


class KeepsGradient(Habit):
    needs = "clone or fresh"
    direction = "gradient"

    def on_output(self, job: Job, y: torch.Tensor) -> None:
        y.register_hook(lambda gradient: job.keep(gradient, gradient))


# --- nothing to be told of


class KeepsCopies(Habit):
    def on_input(self, job: Job, x: torch.Tensor) -> None:
        job.keep(x.detach().clone(), x)


class DropsInTime(Habit):
    def on_input(self, job: Job, x: torch.Tensor) -> None:
        job.other += [x, x.detach(), x[:1], x.norm()]

    def after_step(self, job: Job, output: Any, losses: list[Any]) -> None:
        job.other.clear()


class LogsNorms(Habit):
    def on_input(self, job: Job, x: torch.Tensor) -> None:
        job.other += [x.detach().norm(), x.norm().item()]


class KeepsLosses(Habit):
    """For the whole run, as they come: not detached."""

    def after_step(self, job: Job, output: Any, losses: list[Any]) -> None:
        job.other += [output, *losses]


class Checkpoints(Habit):
    runs_split = False

    def body(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(module, x, use_reentrant=False)  # type: ignore[no-any-return]


class CheckpointsReentrant(Habit):
    runs_split = False

    def body(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(module, x, use_reentrant=True)  # type: ignore[no-any-return]


class SpendsACycle(Habit):
    """What is in a cycle lives until the collector comes, and nobody keeps it."""

    def on_input(self, job: Job, x: torch.Tensor) -> None:
        cycle: list[Any] = [x]
        cycle.append(cycle)


class Compiles(Habit):
    """With the compiler's front end, which is what meets the input."""

    runs_split = False

    def body(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.compile(module, backend="eager")(x)  # type: ignore[no-any-return]


class InDDP(Habit):
    """Replicated by a group of each rank alone."""

    runs_split = False


class InfersOnly(Habit):
    """No loss, no gradients."""


class InfersOnlyAndKeepsInput(InfersOnly, KeepsInput):
    """Kept inputs are overwritten there, too."""


class EvaluatesBetween(Habit):
    """`eval()` between steps (torch 2.9 and later)."""

    runs_split = False


class HooksAndEvaluatesBetween(EvaluatesBetween, Hooks):
    name = "Hooks.on_input.<locals>.<lambda>"


HABITS = {
    habit.__name__: habit
    for habit in [
        *(Habit, Hooks, HooksPartial, HooksMethod, HooksObject, HooksAppend, HooksTwice),
        *(HooksInFirstStep, HooksPostAccumulate, HooksHoldMemory, HooksRemovedInTime),
        *(HooksRemovedInNextStep, Attributes),
        *(KeepsInput, KeepsDetached, KeepsView, KeepsArray, KeepsInGraph, KeepsInputAndHooks),
        *(KeepsGradient, KeepsCopies, DropsInTime, LogsNorms, KeepsLosses, SpendsACycle),
        *(InfersOnly, InfersOnlyAndKeepsInput, Checkpoints, CheckpointsReentrant, Compiles),
        *(InDDP, EvaluatesBetween, HooksAndEvaluatesBetween),
    ]
}


class Result:
    """One job on one rank, for the test to compare."""

    def __init__(self) -> None:
        self.fired = self.changed = 0
        self.numbers: list[torch.Tensor] = []
        self.found: list[dict[str, Any]] = []


# In the other schedules than 1F1B, which has all.
SOME = (
    *("Hooks", "HooksPostAccumulate", "HooksHoldMemory", "KeepsInput", "KeepsInGraph"),
    *("KeepsGradient", "KeepsLosses", "HooksAndEvaluatesBetween"),
)


def of(name: str) -> list[str]:
    """The habits that are tried in a schedule."""
    if name == "GPipe":  # which alone needs no loss
        return [*SOME, "InfersOnly", "InfersOnlyAndKeepsInput"]
    habits = [one for one in HABITS if not one.startswith("Infers")] if name == "1F1B" else SOME
    is_split = schedules.LAYOUTS[name].v_shaped
    return [habit for habit in habits if HABITS[habit].runs_split or not is_split]


def run(rank: ranks.Rank) -> dict[str, dict[str, Any]]:
    """Every habit in the schedules that this torch has, without and under audit."""
    results = {}
    for name in SCHEDULES:
        for habit in of(name) if name in schedules.available() else ():
            with rank.time_limit(f"{name}, {habit}"):
                results[f"{name}-{habit}"] = compared(rank, name, HABITS[habit])
    for habit in TRACED:
        with rank.time_limit(f"traced, {habit}"):
            results[f"traced-{habit}"] = compared(rank, "GPipe", HABITS[habit], traced_stages)
    return results


TRACED = ("Habit", "Hooks", "KeepsInput", "KeepsGradient")


def run_on_four(rank: ranks.Rank) -> dict[str, dict[str, Any]]:
    """Some habits where stages lie between two others."""
    results = {}
    for name in ("1F1B", "Interleaved1F1B"):
        for habit in ("Hooks", "KeepsInput", "KeepsGradient", "KeepsLosses"):
            with rank.time_limit(f"{name}, {habit}"):
                results[f"{name}-{habit}"] = compared(rank, name, HABITS[habit])
    return results


def compared(
    rank: ranks.Rank, name: str, habit: type[Habit], stages: Optional[Callable[..., Any]] = None
) -> dict[str, Any]:
    """The truth of stock torch, and what the audit found in the same job."""
    switch(False)
    stock = train(rank, name, habit(), stages)
    with audit():
        audited = train(rank, name, habit(), stages)
        watch.end()
        found = watch.document()
    by_rank = schedules.stages_of(name, rank.rank, rank.ranks)
    number = schedules.number_of_stages(name, rank.ranks)
    return {
        "fired": stock.fired,
        "changed": stock.changed,
        "equal": len(stock.numbers) == len(audited.numbers)
        and all(map(torch.equal, stock.numbers, audited.numbers)),
        "found": found,
        "receiving": [stage for stage in by_rank if stage > 0],
        "sending": [stage for stage in by_rank if stage < number - 1],
    }


@contextlib.contextmanager
def audit() -> Iterator[None]:
    """The fix under audit, as the command's processes have it."""
    watch.forget()
    switch(AUDIT)
    try:
        yield
    finally:
        switch(False)


@functools.cache
def alone(rank: ranks.Rank) -> Any:
    """A process group of this rank."""
    groups = [torch.distributed.new_group([other]) for other in range(rank.ranks)]
    return groups[rank.rank]


def manual_stages(rank: ranks.Rank, name: str, habit: Habit, job: Job) -> list[Any]:
    stages = []
    number = schedules.number_of_stages(name, rank.ranks)
    for index in schedules.stages_of(name, rank.rank, rank.ranks):
        torch.manual_seed(index)
        example = torch.zeros(training.ROWS, training.FEATURES, device=rank.device)
        module: nn.Module = Stage(habit, job).to(rank.device)
        if isinstance(habit, InDDP):
            module = nn.parallel.DistributedDataParallel(module, process_group=alone(rank))
        stages.append(
            PipelineStage(
                module,
                index,
                number,
                rank.device,
                input_args=example.clone().requires_grad_(index > 0),
                output_args=example.clone().requires_grad_(),
            )
        )
    return stages


def traced_stages(rank: ranks.Rank, name: str, habit: Habit, job: Job) -> list[Any]:
    """Of the traced front end; what the user does is in a forward pre-hook."""
    torch.manual_seed(0)
    number = schedules.number_of_stages(name, rank.ranks)
    split = {f"layers.{index}": SplitPoint.BEGINNING for index in range(1, number)}
    example = torch.zeros(training.ROWS, training.FEATURES)
    pipe = pipeline(Layers(number), mb_args=(example,), split_spec=split)
    stages = []
    for index in schedules.stages_of(name, rank.rank, rank.ranks):
        stage = pipe.build_stage(index, rank.device)
        stage.submod.register_forward_pre_hook(lambda _, inputs: habit.on_input(job, inputs[0]))
        stage.submod.register_forward_hook(lambda _, __, output: habit.on_output(job, output))
        stages.append(stage)
    return stages


def train(
    rank: ranks.Rank, name: str, habit: Habit, make: Optional[Callable[..., Any]] = None
) -> Result:
    job, result = Job(), Result()
    stages = (make or manual_stages)(rank, name, habit, job)
    microbatches = schedules.microbatches_of(name, rank.ranks, MICROBATCHES)
    infers = isinstance(habit, InfersOnly)
    loss_fn: Any = None if infers else training.summed_error
    schedule = schedules.build(name, stages, microbatches, loss_fn)
    parameters = [one for stage in stages for one in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    generator = torch.Generator().manual_seed(0)
    is_first = any(stage.is_first for stage in stages)
    is_last = any(stage.is_last for stage in stages)
    for job.step in range(STEPS):
        x, target = torch.randn(
            2, training.ROWS * microbatches, training.FEATURES, generator=generator
        ).to(rank.device)
        losses: list[Any] = []
        inputs = [x] if is_first else []
        labels: dict[str, Any] = {}
        if is_last and not infers:
            labels = {"target": target, "losses": losses}
        job.fired.append(0)
        if isinstance(habit, EvaluatesBetween) and job.step and hasattr(schedule, "eval"):
            with torch.no_grad():
                schedule.eval(*inputs, **labels)
            losses.clear()
        optimizer.zero_grad()
        with torch.set_grad_enabled(not infers):
            output = schedule.step(*inputs, **labels)
        if infers and is_last:
            result.numbers.append(output)
        result.numbers += [loss.detach().clone() for loss in losses]
        result.numbers += [one.grad.clone() for one in parameters if one.grad is not None]
        optimizer.step()
        if isinstance(habit, HooksAppend):
            job.fired[-1] = len(job.other)
            job.other.clear()
        habit.after_step(job, output, losses)
        del losses, labels, output
    result.fired = job.fired[-1]
    result.changed = job.changed()
    return result
