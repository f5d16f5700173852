"""What the ranks of test_own_stages.py run: stages of a user's own, all within one spawn.

Each kind does with its receive descriptors what stock torch lets it do. It is mixed
into torch's stage class at run time, and trained under stock torch, under every
policy, and from each to each. What it saw on the way is compared as losses are.
"""

import abc
import copy
import pickle
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Callable, Optional

import torch
import torch.distributed as dist
from conftest import TORCH
from recv_buffer_scenarios import equal, switch

from pp_hookfix.policies import AUDIT, POLICIES
from pp_hookfix.verification import schedules, training
from pp_hookfix.verification.ranks import Rank
from pp_hookfix.verification.training import FEATURES, ROWS, InputHooks, Record

if TYPE_CHECKING:
    # What torch's stage class has is private, and untyped in some releases.
    from typing import Any as TorchsStage
else:
    TorchsStage = abc.ABC  # as torch's own: a stage's class may then be changed

MICROBATCHES = 4
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
# Policies by step: each after each other, and stock torch between.
SWITCHED = (None, "fresh", "fresh", None, "clone", "fresh", "detach", "fresh", "clone", "detach")
STEPS = len(SWITCHED)
Policies = Sequence[Optional[str]]


class Stage(TorchsStage):  # type: ignore[misc]
    """Mixed into torch's stage."""

    def own(self) -> None:
        """Before the schedule is built."""
        self.seen: list[torch.Tensor] = []
        self.step = 0

    args_recv_info: dict[int, Any]
    grad_recv_info: dict[int, Any]

    def see(self, tensor: torch.Tensor) -> None:
        self.seen.append(tensor.detach().clone())

    def begin_step(self, step: int, switch_policy: Callable[[], None]) -> None:
        self.step = step
        switch_policy()

    def received(self) -> Iterator[Any]:
        """The descriptors that receive, of both directions."""
        for by_microbatch in (self.args_recv_info, self.grad_recv_info):
            for recv_infos in by_microbatch.values():
                yield from receiving(recv_infos)


def receiving(recv_infos: Any) -> Iterator[Any]:
    """Those of a microbatch that are no inputs of the whole pipeline."""
    for info in recv_infos:
        if hasattr(info, "source") and not getattr(info, "is_root_arg", False):
            yield info


class LooksAtWhatItReceived(Stage):
    """Retrieves both before the schedule's own code does, as if it were an API."""

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        if not self.is_first:
            for tensor in self._retrieve_recv_activations(chunk):
                self.see(tensor)
        return super().forward_one_chunk(chunk, *args, **kwargs)

    def backward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        if not self.is_last:
            for tensor in self._retrieve_recv_grads(bwd_chunk_id=chunk):
                self.see(tensor)
        return super().backward_one_chunk(chunk, *args, **kwargs)


class ChangesWhatItReceived(Stage):
    """Changes buffers in place before they are retrieved, and gradients after."""

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            for info in receiving(self.args_recv_info[chunk]):
                info.buffer.mul_(0.5)
        return super().forward_one_chunk(chunk, *args, **kwargs)

    def _retrieve_recv_grads(self, chunk: int) -> Any:
        for info in receiving(self.grad_recv_info[chunk]):
            info.buffer.add_(0.25)
        gradients = super()._retrieve_recv_grads(chunk)
        for gradient in gradients:
            gradient.mul_(0.5)
        return gradients


class ChangesGradientsThatItLookedAt(Stage):
    """Retrieves the gradients, changes them in place, and lets the schedule's code go on."""

    def backward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        if not self.is_last:
            for gradient in self._retrieve_recv_grads(chunk):
                gradient.mul_(0.5)
        return super().backward_one_chunk(chunk, *args, **kwargs)


class ReceivesIntoAStore(Stage):
    """Sets a row of its own as the destination before each receive; computes from the store."""

    def own(self) -> None:
        super().own()
        self.store = torch.zeros(2, MICROBATCHES, ROWS, FEATURES, device=self.device)

    def set_destination(self, direction: int, chunk: int) -> None:
        by_microbatch = (self.args_recv_info, self.grad_recv_info)[direction]
        for info in receiving(by_microbatch.get(chunk, ())):
            info.buffer = self.store[direction, chunk]

    def get_fwd_recv_ops(self, chunk: int) -> Any:
        self.set_destination(0, chunk)
        return super().get_fwd_recv_ops(chunk)

    def get_bwd_recv_ops(self, chunk: int) -> Any:
        self.set_destination(1, chunk)
        return super().get_bwd_recv_ops(chunk)

    def _retrieve_recv_activations(self, chunk: int) -> Any:
        super()._retrieve_recv_activations(chunk)
        return (self.store[0, chunk].detach().requires_grad_(),)

    def _retrieve_recv_grads(self, chunk: int) -> Any:
        super()._retrieve_recv_grads(chunk)
        return (self.store[1, chunk],)


class HasSetItsStoreOnce(ReceivesIntoAStore):
    """The same, but set where the descriptors are made, and never again."""

    def get_fwd_recv_ops(self, chunk: int) -> Any:
        return super(ReceivesIntoAStore, self).get_fwd_recv_ops(chunk)

    def get_bwd_recv_ops(self, chunk: int) -> Any:
        return super(ReceivesIntoAStore, self).get_bwd_recv_ops(chunk)

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_forward_infra(*args, **kwargs)
        for chunk in range(MICROBATCHES):
            self.set_destination(0, chunk)
        return prepared

    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> Any:
        # Inside torch's own preparation, on every release.
        recv_infos = super()._create_grad_recv_info(*args, **kwargs)
        self.created = getattr(self, "created", -1) + 1
        for info in receiving(recv_infos):
            info.buffer = self.store[1, self.created % MICROBATCHES]
        return recv_infos


class KeepsTheBuffers(Stage):
    """Reads each buffer once, when the descriptors are made, and computes from what it read."""

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_forward_infra(*args, **kwargs)
        self.kept = {
            chunk: [info.buffer.detach() for info in receiving(recv_infos)]
            for chunk, recv_infos in self.args_recv_info.items()
        }
        return prepared

    def _retrieve_recv_activations(self, chunk: int) -> Any:
        super()._retrieve_recv_activations(chunk)
        return tuple(buffer.detach().requires_grad_() for buffer in self.kept[chunk])


class ComparesWithTheLastStep(Stage):
    """Reads what the last step left in a buffer before the next receive."""

    def get_fwd_recv_ops(self, chunk: int) -> Any:
        for info in receiving(self.args_recv_info[chunk]):
            left = info.buffer.detach().clone()
            if self.step > 0:
                self.see(left)
        return super().get_fwd_recv_ops(chunk)


class AsksTwice(Stage):
    """Asks for the receive operations twice and posts the first."""

    def get_fwd_recv_ops(self, chunk: int) -> Any:
        first = super().get_fwd_recv_ops(chunk)
        super().get_fwd_recv_ops(chunk)
        return first

    def get_bwd_recv_ops(self, chunk: int) -> Any:
        first = super().get_bwd_recv_ops(chunk)
        super().get_bwd_recv_ops(chunk)
        return first


class AsksOnce(Stage):
    """Asks for the receive operations in the first step and posts the same ever after."""

    def own(self) -> None:
        super().own()
        self.operations: dict[tuple[str, int], Any] = {}

    def get_fwd_recv_ops(self, chunk: int) -> Any:
        if ("fwd", chunk) not in self.operations:
            self.operations["fwd", chunk] = super().get_fwd_recv_ops(chunk)
        return self.operations["fwd", chunk]

    def get_bwd_recv_ops(self, chunk: int) -> Any:
        if ("bwd", chunk) not in self.operations:
            self.operations["bwd", chunk] = super().get_bwd_recv_ops(chunk)
        return self.operations["bwd", chunk]


class PostsItsOwn(Stage):
    """Builds the operations from the buffers itself."""

    def posts(self, recv_infos: Any) -> list[Any]:
        return [
            dist.P2POp(
                dist.irecv, info.buffer, self.stage_index_to_group_rank[info.source], self.group
            )
            for info in receiving(recv_infos)
        ]

    def get_fwd_recv_ops(self, chunk: int) -> Any:
        if TORCH < (2, 6):  # torch's own method does it there
            for info in receiving(self.args_recv_info[chunk]):
                info.buffer.requires_grad_()
        return self.posts(self.args_recv_info[chunk])

    def get_bwd_recv_ops(self, chunk: int) -> Any:
        return self.posts(self.grad_recv_info.get(chunk, ()))


class PostsItsOwnNowAndThen(PostsItsOwn):
    """The same in every other step, torch's own in the others."""

    def get_fwd_recv_ops(self, chunk: int) -> Any:
        if self.step % 2:
            return super().get_fwd_recv_ops(chunk)
        return super(PostsItsOwn, self).get_fwd_recv_ops(chunk)

    def get_bwd_recv_ops(self, chunk: int) -> Any:
        if self.step % 2:
            return super().get_bwd_recv_ops(chunk)
        return super(PostsItsOwn, self).get_bwd_recv_ops(chunk)


class Replays(Stage):
    """In every third step fills the buffers from what it logged the step before.

    Nothing is sent or received in such a step.
    """

    def own(self) -> None:
        super().own()
        self.log: dict[tuple[str, int], list[torch.Tensor]] = {}

    @property
    def replays(self) -> bool:
        return self.step % 3 == 2

    def fill(self, direction: str, chunk: int, recv_infos: Any) -> None:
        with torch.no_grad():
            for info, logged in zip(recv_infos, self.log[direction, chunk]):
                info.buffer.copy_(logged)

    def get_fwd_recv_ops(self, chunk: int) -> Any:
        if not self.replays or self.is_first:
            return super().get_fwd_recv_ops(chunk)
        self.fill("fwd", chunk, self.args_recv_info[chunk])
        return []

    def get_bwd_recv_ops(self, chunk: int) -> Any:
        if not self.replays or self.is_last:
            return super().get_bwd_recv_ops(chunk)
        self.fill("bwd", chunk, self.grad_recv_info[chunk])
        return []

    def get_fwd_send_ops(self, chunk: int) -> Any:
        return [] if self.replays else super().get_fwd_send_ops(chunk)

    def get_bwd_send_ops(self, chunk: int) -> Any:
        operations = super().get_bwd_send_ops(chunk)
        return [] if self.replays else operations

    def _retrieve_recv_activations(self, chunk: int) -> Any:
        activations = super()._retrieve_recv_activations(chunk)
        self.log["fwd", chunk] = [tensor.detach().clone() for tensor in activations]
        return activations

    def _retrieve_recv_grads(self, chunk: int) -> Any:
        gradients = super()._retrieve_recv_grads(chunk)
        self.log["bwd", chunk] = [tensor.detach().clone() for tensor in gradients]
        return gradients


class ReplaysFilledBetweenSteps(Replays):
    """The same, filled before the step begins."""

    def begin_step(self, step: int, switch_policy: Callable[[], None]) -> None:
        super().begin_step(step, switch_policy)
        if self.replays:
            for direction, by_microbatch in (
                ("fwd", self.args_recv_info),
                ("bwd", self.grad_recv_info),
            ):
                for chunk, recv_infos in by_microbatch.items():
                    if (direction, chunk) in self.log:
                        super().fill(direction, chunk, recv_infos)

    def fill(self, direction: str, chunk: int, recv_infos: Any) -> None:
        pass


class IsPutAside(Stage):
    """Its descriptors are elsewhere while the policy changes."""

    def begin_step(self, step: int, switch_policy: Callable[[], None]) -> None:
        away = dict(self.args_recv_info), dict(self.grad_recv_info)
        self.args_recv_info.clear()
        self.grad_recv_info.clear()
        super().begin_step(step, switch_policy)
        self.args_recv_info.update(away[0])
        self.grad_recv_info.update(away[1])


class Replaces(Stage):
    """Copies its descriptors between two steps, in a way of its own each time."""

    ways: tuple[Callable[[Any], Any], ...] = (
        copy.copy,
        copy.deepcopy,
        lambda info: pickle.loads(pickle.dumps(info)),
    )

    def begin_step(self, step: int, switch_policy: Callable[[], None]) -> None:
        super().begin_step(step, switch_policy)
        way = self.ways[step % len(self.ways)]
        for by_microbatch in (self.args_recv_info, self.grad_recv_info):
            for chunk, recv_infos in by_microbatch.items():
                by_microbatch[chunk] = tuple(map(way, recv_infos))


class IsPrinted(Stage):
    """Somebody looks at the descriptors' own words."""

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        for info in self.received():
            assert f"shape={torch.Size([ROWS, FEATURES])}" in repr(info)
        return super().forward_one_chunk(chunk, *args, **kwargs)


class DropsItsBuffers(Stage):
    """Holds a buffer from its receive to its retrieval alone, by itself; adds to gradients."""

    def own(self) -> None:
        super().own()
        self.nothing = torch.empty(0, device=self.device)

    def make_buffers(self, recv_infos: Any, carry: bool = False) -> None:
        for info in receiving(recv_infos):
            info.buffer = torch.empty(ROWS, FEATURES, device=self.device, requires_grad=carry)

    def drop_buffers(self, recv_infos: Any) -> None:
        for info in receiving(recv_infos):
            info.buffer = self.nothing

    def get_fwd_recv_ops(self, chunk: int) -> Any:
        # From 2.12 on the retrieval sets it.
        self.make_buffers(self.args_recv_info[chunk], carry=TORCH < (2, 12))
        return super().get_fwd_recv_ops(chunk)

    def get_bwd_recv_ops(self, chunk: int) -> Any:
        self.make_buffers(self.grad_recv_info.get(chunk, ()))
        return super().get_bwd_recv_ops(chunk)

    def _retrieve_recv_activations(self, chunk: int) -> Any:
        activations = super()._retrieve_recv_activations(chunk)
        self.drop_buffers(self.args_recv_info[chunk])
        return activations

    def _retrieve_recv_grads(self, chunk: int) -> Any:
        gradients = super()._retrieve_recv_grads(chunk)
        self.drop_buffers(self.grad_recv_info[chunk])
        for gradient in gradients:
            gradient.add_(0.25)
        return gradients


class SharesDescriptors(Stage):
    """A ring of two for all microbatches, as deep as 1F1B on two ranks needs."""

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_backward_infra(*args, **kwargs)
        for by_microbatch in (self.args_recv_info, self.grad_recv_info):
            for chunk in by_microbatch:
                by_microbatch[chunk] = by_microbatch[chunk % 2]
        return prepared


class SharesBuffers(Stage):
    """The same by the buffers, of which two microbatches have one."""

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_backward_infra(*args, **kwargs)
        for by_microbatch in (self.args_recv_info, self.grad_recv_info):
            for chunk, recv_infos in by_microbatch.items():
                pairs = zip(receiving(recv_infos), receiving(by_microbatch[chunk % 2]))
                for info, first in pairs:
                    info.buffer = first.buffer
        return prepared


class ReadsAfterItsForward(Stage):
    """Reads the buffer once more after the forward."""

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(chunk, *args, **kwargs)
        for info in receiving(self.args_recv_info[chunk]):
            self.see(info.buffer)
        return output


class IsCopied(Stage):
    """Somebody copies the whole stage between two steps, and trains on."""

    def begin_step(self, step: int, switch_policy: Callable[[], None]) -> None:
        super().begin_step(step, switch_policy)
        self.clear_runtime_states()  # outputs are no leaves, and cannot be copied
        # Nor can what the module's hooks hold, and it needs not be.
        copied = copy.deepcopy(self, {id(self.submod): self.submod})
        self.args_recv_info, self.grad_recv_info = copied.args_recv_info, copied.grad_recv_info


class ComputesFromTheBuffer(Stage):
    """Retrieves, and hands its module what the descriptors hold then."""

    def _retrieve_recv_activations(self, chunk: int) -> Any:
        super()._retrieve_recv_activations(chunk)
        return tuple(info.buffer for info in self.args_recv_info[chunk])

    def _retrieve_recv_grads(self, chunk: int) -> Any:
        super()._retrieve_recv_grads(chunk)
        return tuple(info.buffer for info in self.grad_recv_info[chunk])


class ReadsLate(Stage):
    """Begins in step 2 to read what the step before left."""

    def get_fwd_recv_ops(self, chunk: int) -> Any:
        if self.step >= 2:
            for info in receiving(self.args_recv_info[chunk]):
                self.see(info.buffer)
        return super().get_fwd_recv_ops(chunk)


class ReceivesNothing(Stage):
    """Neither posts nor fills in step 2: stock torch computes from what the last step left."""

    def get_fwd_recv_ops(self, chunk: int) -> Any:
        operations = super().get_fwd_recv_ops(chunk) if self.step < 2 else []
        return operations

    def get_fwd_send_ops(self, chunk: int) -> Any:
        return super().get_fwd_send_ops(chunk) if self.step < 2 else []


KINDS: dict[str, type[Stage]] = {
    kind.__name__: kind
    for kind in (
        *(Stage, LooksAtWhatItReceived, ChangesWhatItReceived, ChangesGradientsThatItLookedAt),
        *(ReceivesIntoAStore, HasSetItsStoreOnce, KeepsTheBuffers, ComparesWithTheLastStep),
        *(AsksTwice, AsksOnce, PostsItsOwn, PostsItsOwnNowAndThen, ReadsAfterItsForward),
        *(Replays, ReplaysFilledBetweenSteps, IsPutAside, Replaces, IsCopied, IsPrinted),
        *(DropsItsBuffers, SharesDescriptors, SharesBuffers),
        *(ComputesFromTheBuffer, ReadsLate, ReceivesNothing),
    )
}
# As deep as what 1F1B has in flight. Stock torch's hooks pile up within a step there, and up to
# 2.9 `.grad` too: what is to be trained as is stock torch without the ring, and without hooks.
RINGS = ("SharesDescriptors", "SharesBuffers")


def own_stages(rank: Rank, kind: type[Stage], name: str) -> list[Any]:
    stages = training.make_stages(name, rank.rank, rank.ranks, rank.device)
    for stage in stages:
        stage.__class__ = type(kind.__name__, (kind, type(stage)), {})
        stage.own()
    return stages


def train(
    rank: Rank, kind: type[Stage], name: str, by_step: Policies, hooks: Any = InputHooks
) -> tuple[Record, list[torch.Tensor]]:
    """Train stages of a kind; the record, and what they saw."""
    switch(by_step[0] or False)
    stages = own_stages(rank, kind, name)

    def begin(step: int) -> None:
        for stage in stages:
            stage.begin_step(step, lambda: switch(by_step[step] or False))

    schedule = schedules.build(name, stages, MICROBATCHES, training.summed_error)
    record = training.run_steps(
        schedule, stages, len(by_step), MICROBATCHES, rank.device, hooks, begin
    )
    return record, [tensor for stage in stages for tensor in stage.seen]


def runs(with_stock: bool = True) -> dict[str, Policies]:
    """Policies by step: stock torch, every policy, and all in turn."""
    by_step: dict[str, Policies] = {policy: (policy,) * STEPS for policy in (*POLICIES, AUDIT)}
    if with_stock:
        return {"stock": (None,) * STEPS, **by_step, "switched": SWITCHED}
    return {**by_step, "switched": tuple(policy or "detach" for policy in SWITCHED)}


def schedules_of(kind: str) -> tuple[str, ...]:
    return ("1F1B",) if kind in RINGS else SCHEDULES


def every_kind(rank: Rank, schedule: str) -> dict[str, Any]:
    """Kinds by policies in a schedule, compared with stock torch."""
    results: dict[str, Any] = {}
    for kind_name, kind in KINDS.items():
        for name in {schedule} & {*schedules_of(kind_name)}:
            hooks = None if kind_name in RINGS else InputHooks
            stock: Any = train(rank, Stage, name, (None,) * STEPS, None) if hooks is None else None
            for run_name, by_step in runs(with_stock=hooks is not None).items():
                with rank.time_limit(f"{kind_name}, {name}, {run_name}"):
                    record, seen = train(rank, kind, name, by_step, hooks)
                stock = stock or (record, seen)
                results[f"{kind_name}-{name}-{run_name}"] = {
                    **equal(stock[0], record),
                    "seen": same(stock[1], seen),
                    "sees": len(seen),
                    "hooks": record.hooks,
                }
    return results


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


# --- what is done with a pipeline of torch's own stages


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


def accumulation(rank: Rank, by_step: Policies) -> Optional[list[torch.Tensor]]:
    """Three pipeline steps per optimizer step."""
    pipeline = Pipeline(rank)
    for policy in by_step:
        for _ in range(3):
            switch(policy or False)
            pipeline.run(pipeline.schedule)
        pipeline.end_step()
    return pipeline.found


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


HABITS = (accumulation, fewer_microbatches, other_lengths, one_module_twice)


def every_habit(rank: Rank) -> dict[str, Any]:
    """What is equal to stock torch's, by habit and policies; None where torch cannot."""
    results: dict[str, Any] = {}
    for habit in HABITS:
        stock: Optional[list[torch.Tensor]] = None
        for name, by_step in runs().items():
            with rank.time_limit(f"{habit.__name__}, {name}"):
                found = habit(rank, by_step)
            stock = found if stock is None else stock
            results[f"{habit.__name__}-{name}"] = (
                None if stock is None or found is None else bool(found) and same(stock, found)
            )
    return results


# --- what cannot be as on stock torch under `fresh`, for nothing keeps what is gone


class IsReadBetweenSteps(Stage):
    """Somebody reads what the last step left, when it is over."""

    def begin_step(self, step: int, switch_policy: Callable[[], None]) -> None:
        super().begin_step(step, switch_policy)
        if step:
            for info in self.received():
                self.see(info.buffer)


def read(rank: Rank, policies: Sequence[str]) -> dict[str, Any]:
    """Train a stage that is read from outside, under stock torch and some policies."""
    found: dict[str, Any] = {}
    stock: Any = None
    for policy in (None, *policies):
        with rank.time_limit(f"read, {policy}"):
            record, seen = train(rank, IsReadBetweenSteps, "Interleaved1F1B", (policy,) * 4)
        stock = stock or (record, seen)
        found[str(policy)] = {**equal(stock[0], record), "seen": same(stock[1], seen)}
    return found
