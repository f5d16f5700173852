"""Jobs as people write them, run on a rank: on stock torch, under audit, and under each policy.

What a user does is one of audit_ways.py. The truth is read off stock torch: hooks that were
called in each step, tensors that were kept and whose data changed since, attributes that were
met again.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, Callable, Optional

import numpy as np
import torch
from audit_ways import WAYS, Way
from conftest import TORCH
from recv_buffer_scenarios import Layers, hands_over, switch
from torch import nn
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline

import pp_hookfix
from pp_hookfix.audit import hand_outs
from pp_hookfix.policies import AUDIT, POLICIES
from pp_hookfix.verification import ranks, schedules, training

STEPS = 4
MICROBATCHES = 4
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")


class Fired(list[Any]):
    """What hooks of one step were called with."""


class Job:
    """What a job keeps for itself at one stage, and what is counted of it."""

    container: Any
    lists: Any
    local: Any
    queue: Any
    context: Any

    def __init__(self) -> None:
        self.step = self.microbatch = self.met = 0
        self.fired = Fired()
        self.by_step: list[int] = []
        self.kept: list[tuple[Any, torch.Tensor]] = []  # with what it was when it was kept
        self.elsewhere: list[tuple[Callable[[], Any], torch.Tensor]] = []
        self.keeps_losses = False
        self.losses: list[torch.Tensor] = []
        self.other: list[Any] = []
        self.calls: list[Any] = []
        self.ids: set[int] = set()
        self.handles: dict[int, Any] = {}
        self.array = np.empty(STEPS * MICROBATCHES, dtype=object)

    @property
    def number(self) -> int:
        """Of the hand-out, among all."""
        return self.step * MICROBATCHES + self.microbatch

    def count(self, *held: Any) -> None:
        self.fired.append(None)

    def counted(self, value: float) -> float:
        self.count()
        return value

    def count_gradient(self, gradient: Any) -> None:
        self.count()

    def meets(self, is_there: bool) -> None:
        self.met += is_there

    def keep(self, held: Any, tensor: torch.Tensor) -> None:
        self.kept.append((held, tensor.detach().clone()))

    def keep_elsewhere(self, get: Callable[[], Any], tensor: torch.Tensor) -> None:
        """It is kept already, where `get` finds it in the end."""
        self.elsewhere.append((get, tensor.detach().clone()))

    def end_step(self) -> None:
        self.by_step.append(len(self.fired))
        self.fired.clear()

    def changed(self) -> int:
        kept = [*self.kept, *((get(), was) for get, was in self.elsewhere)]
        return sum(not torch.equal(_tensor(held, was), was) for held, was in kept)


def _tensor(held: Any, like: torch.Tensor) -> torch.Tensor:
    if isinstance(held, torch.UntypedStorage):
        return torch.empty(0).set_(held).view_as(like)
    if not isinstance(held, torch.Tensor):
        return torch.from_numpy(np.asarray(held))
    if held.grad_fn is not None and hasattr(held.grad_fn, "_saved_self"):
        held = held.grad_fn._saved_self
    tensor: torch.Tensor = held.detach()
    return tensor


class Stage(nn.Module):
    """A stage's module whose user does what the way says."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.body = training.make_module()
        self.way, self.job = way, Job()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        received = x.requires_grad or "infers" in self.way.options
        if self.way.on == "input" and received:
            self.way.do(self.job, x)
        if self.way.on == "module" and received:
            y: torch.Tensor = self.way.do(self.job, self.body, x)
        else:
            y = self.body(x)
        if self.way.on == "output" and y.requires_grad:
            self.way.do(self.job, y)
        self.job.microbatch += 1
        return y


class Result:
    """One job on one rank, for the test to compare."""

    def __init__(self) -> None:
        self.fired: dict[int, list[int]] = {}  # in each step, by stage
        self.changed: dict[int, int] = {}
        self.met: dict[int, int] = {}
        self.numbers: list[torch.Tensor] = []

    def counts(self) -> dict[str, Any]:
        return {"fired": self.fired, "changed": self.changed, "met": self.met}


def of(name: str) -> list[str]:
    """The ways that are tried in a schedule: 1F1B has all."""
    is_split = schedules.LAYOUTS[name].v_shaped
    return [
        way
        for way, row in WAYS.items()
        if row.since <= TORCH
        and TORCH not in row.fails_on
        and (name == "GPipe" if "infers" in row.options else name == "1F1B" or row.everywhere)
        and (row.runs_split or not is_split)
    ]


TRACED = ("does_nothing", "registers_a_lambda", "keeps_the_input", "keeps_the_gradient")
ON_FOUR = ("registers_a_lambda", "keeps_the_input", "keeps_the_gradient", "keeps_the_losses")
# As a policy and the audit see it, with what stock torch does.
RUNS = (AUDIT, *POLICIES)


def run(rank: ranks.Rank, where: str) -> dict[str, Any]:
    """Every way in a schedule, or through the traced front end; none where torch has it not."""
    results = {}
    traced = where == "traced"
    for way in TRACED if traced else of(where) if where in schedules.available() else ():
        with rank.time_limit(f"{where}, {way}"):
            results[way] = (
                compared(rank, "GPipe", WAYS[way], traced_stages)
                if traced
                else compared(rank, where, WAYS[way])
            )
    return results


def run_on_four(rank: ranks.Rank) -> dict[str, dict[str, Any]]:
    """Some ways where stages lie between two others."""
    results = {}
    for name in ("1F1B", "Interleaved1F1B"):
        for way in ON_FOUR:
            with rank.time_limit(f"{name}, {way}"):
                results[f"{name}-{way}"] = compared(rank, name, WAYS[way])
    return results


def compared(
    rank: ranks.Rank, name: str, way: Way, stages: Optional[Callable[..., Any]] = None
) -> dict[str, Any]:
    """The truth of stock torch, what the audit found in the same job, and the policies."""
    switch(False)
    stock = train(rank, name, way, stages)
    by_rank = schedules.stages_of(name, rank.rank, rank.ranks)
    number = schedules.number_of_stages(name, rank.ranks)
    result: dict[str, Any] = {
        "stock": stock.counts(),
        "receiving": [
            stage
            for stage in by_rank
            if stage > 0 and not (hands_over(name) and stage - 1 in by_rank)
        ],
        "sending": [
            stage
            for stage in by_rank
            if stage < number - 1 and not (hands_over(name) and stage + 1 in by_rank)
        ],
    }
    with audit():
        audited = train(rank, name, way, stages)
        hand_outs.end()
        result["found"], result["state"] = hand_outs.document(), pp_hookfix.status().state
    for policy, trained in [
        (AUDIT, audited),
        *((policy, under(policy, rank, name, way, stages)) for policy in POLICIES),
    ]:
        result[policy] = {
            **trained.counts(),
            "equal": len(stock.numbers) == len(trained.numbers)
            and all(map(torch.equal, stock.numbers, trained.numbers)),
        }
    return result


def under(policy: str, *job: Any) -> Result:
    switch(policy)
    try:
        return train(*job)
    finally:
        switch(False)


@contextlib.contextmanager
def audit() -> Iterator[None]:
    """Under audit, as the command's processes are."""
    hand_outs.forget()
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


def manual_stages(rank: ranks.Rank, name: str, way: Way) -> dict[Any, Job]:
    """This rank's stages, with the jobs of their modules."""
    stages = {}
    number = schedules.number_of_stages(name, rank.ranks)
    for index in schedules.stages_of(name, rank.rank, rank.ranks):
        torch.manual_seed(index)
        example = torch.zeros(training.ROWS, training.FEATURES, device=rank.device)
        module = Stage(way).to(rank.device)
        replicated = nn.parallel.DistributedDataParallel
        stage = PipelineStage(
            replicated(module, process_group=alone(rank)) if "in DDP" in way.options else module,
            index,
            number,
            rank.device,
            input_args=example.clone().requires_grad_(index > 0),
            output_args=example.clone().requires_grad_(),
        )
        stages[stage] = module.job
    return stages


def traced_stages(rank: ranks.Rank, name: str, way: Way) -> dict[Any, Job]:
    """Of the traced front end; what the user does is in a forward pre-hook."""
    torch.manual_seed(0)
    number = schedules.number_of_stages(name, rank.ranks)
    split = {f"layers.{index}": SplitPoint.BEGINNING for index in range(1, number)}
    example = torch.zeros(training.ROWS, training.FEATURES)
    pipe = pipeline(Layers(number), mb_args=(example,), split_spec=split)
    (index,) = schedules.stages_of(name, rank.rank, rank.ranks)
    stage, job = pipe.build_stage(index, rank.device), Job()
    if way.on == "input" and index > 0:
        stage.submod.register_forward_pre_hook(lambda _, inputs: way.do(job, inputs[0]))
    if way.on == "output":
        stage.submod.register_forward_hook(lambda _, __, output: way.do(job, output))
    return {stage: job}


def train(
    rank: ranks.Rank, name: str, way: Way, make: Optional[Callable[..., Any]] = None
) -> Result:
    result = Result()
    stages = (make or manual_stages)(rank, name, way)
    microbatches = schedules.microbatches_of(name, rank.ranks, MICROBATCHES)
    infers = "infers" in way.options
    loss_fn: Any = None if infers else training.summed_error
    schedule = schedules.build(name, list(stages), microbatches, loss_fn)
    parameters = [one for stage in stages for one in stage.submod.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    generator = torch.Generator().manual_seed(0)
    is_first = any(stage.is_first for stage in stages)
    is_last = any(stage.is_last for stage in stages)
    for step in range(STEPS):
        x, target = torch.randn(
            2, training.ROWS * microbatches, training.FEATURES, generator=generator
        ).to(rank.device)
        losses: list[Any] = []
        inputs = [x] if is_first else []
        labels: dict[str, Any] = {}
        if is_last and not infers:
            labels = {"target": target, "losses": losses}
        for job in stages.values():
            job.step, job.microbatch = step, 0
        if "evaluates between" in way.options and step and hasattr(schedule, "eval"):
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
        for job in stages.values():
            job.end_step()
            if job.keeps_losses:
                job.losses += losses
            way.after(job)
        del losses, labels, output
    for stage, job in stages.items():
        result.fired[stage.stage_index] = job.by_step
        result.changed[stage.stage_index] = job.changed()
        result.met[stage.stage_index] = job.met
        way.at_end()
    return result
