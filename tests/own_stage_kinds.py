"""Stages of a user's own: each does with its descriptors what stock torch lets it do.

A kind is one class and its row. It is mixed into torch's stage class at run time
(own_stage_runs.py); what it saw on the way is compared as losses are.
"""

import abc
import copy
import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import torch
import torch.distributed as dist
from conftest import TORCH

from pp_hookfix.verification.training import FEATURES, ROWS

if TYPE_CHECKING:
    # What torch's stage class has is private, and untyped in some releases.
    from typing import Any as TorchsStage
else:
    TorchsStage = abc.ABC  # as torch's own: a stage's class may then be changed

MICROBATCHES = 4


class Kind(NamedTuple):
    """A row."""

    stage: "type[Stage]"
    sees: bool
    """Whether it looks at tensors, which are then those of stock torch."""
    shares: bool
    """Microbatches share buffers, as deep a ring as 1F1B on two ranks needs. Stock torch's hooks
    pile up within a step there, and up to 2.9 `.grad` too: what is to be trained as is stock torch
    without the ring, and without hooks."""
    is_in_reach: bool
    """Whether it computes with what it is handed."""


KINDS: dict[str, Kind] = {}


def kind(
    sees: bool = False, shares: bool = False, is_in_reach: bool = True
) -> "Callable[[type[Stage]], type[Stage]]":
    """The row of a kind."""

    def add(stage: "type[Stage]") -> "type[Stage]":
        KINDS[stage.__name__] = Kind(stage, sees, shares, is_in_reach)
        return stage

    return add


@kind()
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


@kind(sees=True)
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


@kind()
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


@kind()
class ChangesGradientsThatItLookedAt(Stage):
    """Retrieves the gradients, changes them in place, and lets the schedule's code go on."""

    def backward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        if not self.is_last:
            for gradient in self._retrieve_recv_grads(chunk):
                gradient.mul_(0.5)
        return super().backward_one_chunk(chunk, *args, **kwargs)


@kind()
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


@kind()
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


@kind()
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


@kind(sees=True)
class ComparesWithTheLastStep(Stage):
    """Reads what the last step left in a buffer before the next receive."""

    def get_fwd_recv_ops(self, chunk: int) -> Any:
        for info in receiving(self.args_recv_info[chunk]):
            left = info.buffer.detach().clone()
            if self.step > 0:
                self.see(left)
        return super().get_fwd_recv_ops(chunk)


@kind()
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


@kind()
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


@kind()
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


@kind()
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


@kind()
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


@kind()
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


@kind()
class IsPutAside(Stage):
    """Its descriptors are elsewhere while the policy changes."""

    def begin_step(self, step: int, switch_policy: Callable[[], None]) -> None:
        away = dict(self.args_recv_info), dict(self.grad_recv_info)
        self.args_recv_info.clear()
        self.grad_recv_info.clear()
        super().begin_step(step, switch_policy)
        self.args_recv_info.update(away[0])
        self.grad_recv_info.update(away[1])


@kind()
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


@kind()
class IsPrinted(Stage):
    """Somebody looks at the descriptors' own words."""

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        for info in self.received():
            assert f"shape={torch.Size([ROWS, FEATURES])}" in repr(info)
        return super().forward_one_chunk(chunk, *args, **kwargs)


@kind()
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


@kind(shares=True)
class SharesDescriptors(Stage):
    """A ring of two for all microbatches, as deep as 1F1B on two ranks needs."""

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_backward_infra(*args, **kwargs)
        for by_microbatch in (self.args_recv_info, self.grad_recv_info):
            for chunk in by_microbatch:
                by_microbatch[chunk] = by_microbatch[chunk % 2]
        return prepared


@kind(shares=True)
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


@kind(sees=True)
class ReadsAfterItsForward(Stage):
    """Reads the buffer once more after the forward."""

    def forward_one_chunk(self, chunk: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(chunk, *args, **kwargs)
        for info in receiving(self.args_recv_info[chunk]):
            self.see(info.buffer)
        return output


@kind()
class IsCopied(Stage):
    """Somebody copies the whole stage between two steps, and trains on."""

    def begin_step(self, step: int, switch_policy: Callable[[], None]) -> None:
        super().begin_step(step, switch_policy)
        self.clear_runtime_states()  # outputs are no leaves, and cannot be copied
        # Nor can what the module's hooks hold, and it needs not be.
        copied = copy.deepcopy(self, {id(self.submod): self.submod})
        self.args_recv_info, self.grad_recv_info = copied.args_recv_info, copied.grad_recv_info


@kind(is_in_reach=False)
class ComputesFromTheBuffer(Stage):
    """Retrieves, and hands its module what the descriptors hold then."""

    def _retrieve_recv_activations(self, chunk: int) -> Any:
        super()._retrieve_recv_activations(chunk)
        return tuple(info.buffer for info in self.args_recv_info[chunk])

    def _retrieve_recv_grads(self, chunk: int) -> Any:
        super()._retrieve_recv_grads(chunk)
        return tuple(info.buffer for info in self.grad_recv_info[chunk])


@kind(sees=True)
class ReadsLate(Stage):
    """Begins in step 2 to read what the step before left."""

    def get_fwd_recv_ops(self, chunk: int) -> Any:
        if self.step >= 2:
            for info in receiving(self.args_recv_info[chunk]):
                self.see(info.buffer)
        return super().get_fwd_recv_ops(chunk)


@kind()
class ReceivesNothing(Stage):
    """Neither posts nor fills in step 2: stock torch computes from what the last step left."""

    def get_fwd_recv_ops(self, chunk: int) -> Any:
        operations = super().get_fwd_recv_ops(chunk) if self.step < 2 else []
        return operations

    def get_fwd_send_ops(self, chunk: int) -> Any:
        return super().get_fwd_send_ops(chunk) if self.step < 2 else []


# --- not of `KINDS`: under `fresh`, nothing keeps what is gone


class IsReadBetweenSteps(Stage):
    """Somebody reads what the last step left, when it is over."""

    def begin_step(self, step: int, switch_policy: Callable[[], None]) -> None:
        super().begin_step(step, switch_policy)
        if step:
            for info in self.received():
                self.see(info.buffer)
