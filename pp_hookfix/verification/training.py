"""Train a small pipeline on this rank and record what its hooks, losses and gradients were."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch
from torch.distributed.pipelining import PipelineStage

from pp_hookfix.verification import schedules

FEATURES = 8
ROWS = 2  # of one microbatch


@dataclass
class Record:
    """What one rank saw, by stage and step."""

    hooks: dict[int, list[int]] = field(default_factory=dict)
    """Times that hooks on the stage's input fired in each step."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """Per step: every microbatch's loss, shape (microbatches,); on the last stage's rank."""
    gradients: dict[str, list[torch.Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Per parameter and step: its gradient."""
    boundary: dict[tuple[int, int], list[torch.Tensor]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Per (stage, step): the gradient of each microbatch's input, in order of backward."""
    hooked: "list[InputHooks]" = field(default_factory=list)
    """The hooks of each stage."""


class InputHooks:
    """A user's hooks on the inputs of a stage: count, and collect the gradients.

    The forward pre-hook stands for the user's code that meets the input. It
    stays with the module; the backward hooks that it registers are what piles up.
    """

    def __init__(self, stage: Any, record: Record) -> None:
        self.stage_index: int = stage.stage_index
        self.step = -1
        self.counts = record.hooks.setdefault(self.stage_index, [])
        self.boundary = record.boundary
        record.hooked.append(self)
        # Before every other pre-hook, so that it meets what the stage was handed.
        self._handle = stage.submod.register_forward_pre_hook(self._meet, prepend=True)

    def begin_step(self) -> None:
        self.step += 1
        self.counts.append(0)

    def remove(self) -> None:
        self._handle.remove()

    def _meet(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        registered_in = self.step
        for tensor in inputs:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda grad: self._fired(grad, registered_in))

    def _fired(self, grad: torch.Tensor, registered_in: int) -> None:
        self.counts[-1] += 1
        # A hook left over from an earlier step reports the same gradient again.
        if registered_in == self.step:
            self.boundary[self.stage_index, self.step].append(grad.detach().clone())


def make_module() -> torch.nn.Module:
    """One stage's module: (rows, `FEATURES`) in and out."""
    return torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.Tanh())


def make_stages(
    name: str,
    rank: int,
    ranks: int,
    device: torch.device,
    infer_metadata: bool = False,
) -> list[Any]:
    """This rank's stages, the same at every call: each is seeded by its index.

    Args:
        name: a schedule, key of ``schedules.LAYOUTS``.
        rank: this rank.
        ranks: the world's size.
        device: where the modules and the receive buffers live.
        infer_metadata: give no example tensors, so that torch infers the
            shapes in step 1 (2.6 and later).
    """
    stages = []
    number = schedules.number_of_stages(name, ranks)
    for index in schedules.stages_of(name, rank, ranks):
        torch.manual_seed(index)
        examples: dict[str, Any] = {}
        if not infer_metadata:
            # From 2.12 the examples also tell whether a tensor carries a gradient.
            examples["input_args"] = torch.zeros(
                ROWS, FEATURES, device=device, requires_grad=index > 0
            )
            examples["output_args"] = torch.zeros(ROWS, FEATURES, device=device, requires_grad=True)
        stages.append(PipelineStage(make_module().to(device), index, number, device, **examples))
    return stages


def summed_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The loss of one microbatch, scalar."""
    return (output - target).square().sum()


def train(
    name: str,
    rank: int,
    ranks: int,
    device: torch.device,
    steps: int,
    microbatches: int,
    infer_metadata: bool = False,
    hooks: Optional[Callable[[Any, Record], InputHooks]] = InputHooks,
    between_steps: Optional[Callable[[int], None]] = None,
) -> Record:
    """Build a pipeline and train it for some steps, with hooks on every stage's input.

    Args:
        name: a schedule, key of ``schedules.LAYOUTS``.
        rank: this rank.
        ranks: the world's size.
        device: this rank's device.
        steps: optimizer steps.
        microbatches: microbatches per step, as the schedule takes them.
        infer_metadata: see `make_stages`.
        hooks: makes the hooks of one stage; None for no hooks.
        between_steps: called with the step's number before each step.
    """
    stages = make_stages(name, rank, ranks, device, infer_metadata=infer_metadata)
    schedule = schedules.build(name, stages, microbatches, summed_error)
    return run_steps(schedule, stages, steps, microbatches, device, hooks, between_steps)


def run_steps(
    schedule: Any,
    stages: list[Any],
    steps: int,
    microbatches: int,
    device: torch.device,
    hooks: Optional[Callable[[Any, Record], InputHooks]] = InputHooks,
    between_steps: Optional[Callable[[int], None]] = None,
) -> Record:
    """Train the stages of this rank; see `train`."""
    record = Record()
    if hooks is not None:
        for stage in stages:
            hooks(stage, record)
    parameters = {
        f"{stage.stage_index}.{name}": parameter
        for stage in stages
        for name, parameter in stage.submod.named_parameters()
    }
    optimizer = torch.optim.SGD(parameters.values(), lr=0.01)
    generator = torch.Generator().manual_seed(0)
    is_first = any(stage.is_first for stage in stages)
    is_last = any(stage.is_last for stage in stages)
    for step in range(steps):
        if between_steps is not None:
            between_steps(step)
        x, target = (
            torch.randn(ROWS * microbatches, FEATURES, generator=generator).to(device)
            for _ in range(2)
        )
        for hook in record.hooked:
            hook.begin_step()
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        schedule.step(
            *([x] if is_first else []),
            **({"target": target, "losses": losses} if is_last else {}),
        )
        if is_last:
            record.losses.append(torch.stack([loss.detach() for loss in losses]))
            losses.clear()  # each holds its microbatch's graph, and that the stage's input
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                record.gradients[name].append(parameter.grad.clone())
        optimizer.step()
    for hook in record.hooked:
        hook.remove()
    return record


def held_buffers(stage: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The receive buffers that a stage's descriptors hold now.

    Yields:
        ``args`` or ``grad``, and a buffer that has memory.
    """
    from pp_hookfix.fresh import NoBuffer

    for direction in ("args", "grad"):
        for recv_infos in getattr(stage, f"{direction}_recv_info").values():
            for info in recv_infos:
                buffer = getattr(info, "buffer", None)
                if buffer is not None and type(buffer) is not NoBuffer:
                    yield direction, buffer


def losses_equal(one: Record, other: Record) -> bool:
    """Whether every loss is the same to the last bit."""
    return _equal(one.losses, other.losses)


def gradients_equal(one: Record, other: Record) -> bool:
    """Whether every gradient, of parameters and at stage inputs, is the same to the last bit."""
    return _all_equal(one.gradients, other.gradients) and _all_equal(one.boundary, other.boundary)


def _all_equal(
    one: Mapping[Any, list[torch.Tensor]], other: Mapping[Any, list[torch.Tensor]]
) -> bool:
    return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
