"""What a stage is handed, looked at from one hand-out to the next: torch is as it is meanwhile.

Stock torch hands a stage the same tensor in each step, its receive buffer. So all that this
module needs to know is there to be seen. What is on the tensor when it is handed out again was
left there; hooks that are called for a later hand-out than they were put on for fire again;
and if there are more references to it, or to its memory, when the next receive writes there
than there were before, somebody keeps it.

Nothing is put on the tensor, and nothing is handed out in its place: a guard in a user's code
finds what it finds without the audit.
"""

import contextlib
import gc
import weakref
from collections import Counter
from dataclasses import asdict
from typing import Any, Optional

import torch

from pp_hookfix.audit import holders, hooks, process_record, references, registrations, stages
from pp_hookfix.audit.hooks import Place, Witness
from pp_hookfix.audit.references import Owned, References


class Buffer:
    """A receive buffer, and what is known of it since it was first handed out."""

    def __init__(self, tensor: torch.Tensor, stage: stages.Stage) -> None:
        self.stage = stage
        self.direction = ""
        self.last: tuple[int, int] = (0, 0)  # the period and microbatch of its last hand-out
        self.has_received = False  # since then
        self.grad: Any = None  # that it had then
        self.hooks = hooks.Known()
        self.is_counted = False  # what was called in this hand-out's backward
        self.first: dict[str, Any] = {}  # what was on it when it was first handed out
        # What its hooks hold alone, those that were put on before this hand-out.
        self._owned, self._owned_before = references.nothing(), 0
        self._most: dict[str, References] = {}  # by the moment at which they are counted
        key = id(tensor)

        def gone(reference: Any) -> None:
            # All that was put on it goes with it.
            if _buffers.get(key) is self:
                del _buffers[key]
            self.stage.pinned -= self._owned.size

        self.tensor = weakref.ref(tensor, gone)

    # --- hooks

    def look(self, tensor: torch.Tensor) -> dict[str, dict[int, Any]]:
        """Know the hooks that are on it now, which are returned as torch has them."""
        before = self.hooks.new.copy()
        found, is_less = self.hooks.look(tensor)
        self.stage.put_on += self.hooks.new - before
        if is_less:
            # What the others hold may be theirs alone now.
            self.stage.pinned -= self._owned.size
            self._owned, self._owned_before = references.nothing(), 0
        return found

    def witnesses(self, tensor: torch.Tensor) -> list[Witness]:
        """See what hooks are called, until each of them ends."""
        return [Witness(*found, self.hooks) for found in self.look(tensor).items()]

    def count_calls(self, witnesses: list[Witness]) -> None:
        self.is_counted = True
        for witness in witnesses:
            calls = witness.end()
            self._count(witness.places, witness.earlier, calls)
            self.stage.changing |= witness.changing

    def count_calls_unseen(self, tensor: torch.Tensor) -> None:
        """Of a backward that was not torch's: a gradient has come, and with it the calls."""
        if not self.is_counted and tensor.grad is not None and tensor.grad is not self.grad:
            self.is_counted = True
            self._count(self.hooks.places, self.hooks.places - self.hooks.new, 1)
            self.stage.unseen |= self.hooks.places.keys()

    def _count(self, places: Counter[Place], earlier: Counter[Place], calls: int) -> None:
        for place, number in places.items():
            self.stage.fired[place] += number * calls
        for place, number in earlier.items():
            self.stage.again[place] += number * calls

    # --- references

    def owned(self, tensor: torch.Tensor) -> Owned:
        """What its hooks and attributes hold alone, once the code that put them on is over."""
        by_hand_out = self.hooks.by_hand_out(hooks.by_kind(tensor), self._owned_before)
        for hand_out, some in by_hand_out.items():
            owned = references.owned(tensor, some)
            self._owned = self._owned.and_also(owned)
            self.stage.note_pinned(owned.size, is_news=hand_out == self.hooks.hand_out)
        self._owned_before = self.hooks.hand_out + 1
        by_hand_out.clear()
        return self._owned.and_also(references.owned(tensor, list(vars(tensor).values())))

    def count_references(self, tensor: torch.Tensor, moment: str) -> None:
        """Before it is written to again: does anybody hold what it was handed out with?"""
        owned = self.owned(tensor)
        now = references.to(tensor, owned)
        most = self._most.setdefault(moment, now)
        more = now.beyond(most)
        if not any(more) or not self.hooks.hand_out:
            return
        like = (self.stage.index, self.direction, tuple(tensor.shape), more)
        held_by, times = _holders.get(like, (None, 0))
        # A cycle that the collector has not met yet keeps nothing; look again now and then.
        if held_by is None and times & (times - 1) == 0:
            gc.collect()
            now = references.to(tensor, owned)
            more = now.beyond(most)
            if any(more):
                held_by = holders.of(tensor, bool(more.cpp or more.storage), owned.holders)
        _holders[like] = held_by, times + 1
        if held_by is not None:
            self.stage.note_kept(self.direction, tuple(tensor.shape), held_by)
            self._most[moment] = now.most(most)


_buffers: dict[int, Buffer] = {}
# Of inputs that were handed out in this step, by stage and microbatch; and of the backward
# that is running, what is seen of its hooks.
_inputs: dict[tuple[stages.Stage, int], list[Buffer]] = {}
_witnesses: dict[tuple[stages.Stage, int], list[tuple[Buffer, list[Witness]]]] = {}
# Who holds, by what the holding looks like; and how often that was met.
_holders: dict[Any, tuple[Optional[str], int]] = {}

registrations.note()


def _buffer_of(tensor: torch.Tensor, stage: stages.Stage) -> Buffer:
    buffer = _buffers.get(id(tensor))
    if buffer is None or buffer.tensor() is not tensor:
        buffer = _buffers[id(tensor)] = Buffer(tensor, stage)
    return buffer


# --- around torch's methods


def end_step(stage: Any, args: Any, kwargs: Any) -> None:
    """Before ``clear_runtime_states()``, which schedules call as each step begins."""
    seen = stages.of(stage)
    seen.is_cleared_by_schedule = True
    _end_step(seen)


def begin_step(stage: Any, result: Any, args: Any, kwargs: Any) -> Any:
    """After ``clear_runtime_states()``."""
    process_record.grow(document)
    stages.of(stage).begin_step(bool(stage.has_backward) and torch.is_grad_enabled())
    return result


def before_receive(stage: Any, args: Any, kwargs: Any) -> None:
    """Before ``_get_recv_ops(recv_infos[, group])``: from here on, torch writes."""
    seen = stages.of(stage)
    recv_infos = args[0] if args else kwargs["recv_infos"]
    is_input = any(recv_infos is infos for infos in stage.args_recv_info.values())
    for info in recv_infos:
        tensor = getattr(info, "buffer", None)
        if isinstance(tensor, torch.Tensor):
            buffer = _buffer_of(tensor, seen)
            if is_input and tensor.grad is not None:
                # Left to the next microbatch that has this buffer.
                seen.attributes.add(".grad")
            buffer.count_references(tensor, "receive")
            buffer.has_received = True
            seen.posted.add("input" if is_input else "gradient")


def hand_out_activations(stage: Any, activations: Any, args: Any, kwargs: Any) -> Any:
    """After ``_retrieve_recv_activations(fwd_chunk_id)``."""
    (microbatch,) = args or kwargs.values()
    _hand_out(stage, "input", stage.args_recv_info[microbatch], microbatch)
    return activations


def hand_out_gradients(stage: Any, gradients: Any, args: Any, kwargs: Any) -> Any:
    """After ``_retrieve_recv_grads(bwd_chunk_id)``."""
    (microbatch,) = args or kwargs.values()
    _hand_out(stage, "gradient", stage.grad_recv_info[microbatch], microbatch)
    return gradients


def begin_backward(stage: Any, args: Any, kwargs: Any) -> None:
    """Before ``backward_one_chunk(bwd_chunk_id, ...)``."""
    key = (stages.of(stage), args[0] if args else kwargs["bwd_chunk_id"])
    _witnesses[key] = []
    for buffer in _inputs.get(key, ()):
        tensor = buffer.tensor()
        if tensor is not None and not buffer.is_counted:
            _witnesses[key].append((buffer, buffer.witnesses(tensor)))


def end_backward(stage: Any, result: Any, args: Any, kwargs: Any) -> Any:
    """After it."""
    key = (stages.of(stage), args[0] if args else kwargs["bwd_chunk_id"])
    for buffer, witnesses in _witnesses.pop(key, ()):
        buffer.count_calls(witnesses)
    return result


# --- what they do


def _hand_out(stage: Any, direction: str, infos: Any, microbatch: int) -> None:
    seen = stages.of(stage)
    for info in infos:
        tensor = getattr(info, "buffer", None)
        if not isinstance(tensor, torch.Tensor) or getattr(info, "is_root_arg", False):
            continue
        seen.handed.add(direction)
        buffer = _buffer_of(tensor, seen)
        buffer.stage, buffer.direction = seen, direction
        if buffer.last == (seen.period, microbatch):
            if seen.is_cleared_by_schedule:
                continue  # somebody looks at it once more
            _end_step(seen)
            seen.begin_step(is_training=torch.is_grad_enabled())
        _look_at_what_is_left(buffer, tensor)
        buffer.hooks.begin_hand_out()
        buffer.last = (seen.period, microbatch)
        buffer.has_received = buffer.is_counted = False
        buffer.grad = tensor.grad
        if direction == "input":
            _inputs.setdefault((seen, microbatch), []).append(buffer)


def _look_at_what_is_left(buffer: Buffer, tensor: torch.Tensor) -> None:
    """When a buffer is handed out again: by whom it is held, and what is on it."""
    buffer.look(tensor)
    if not buffer.has_received:  # by torch's means
        buffer.count_references(tensor, "hand-out")
    state = _state(tensor)
    if not buffer.hooks.hand_out:
        buffer.first = state
        return
    buffer.stage.left += buffer.hooks.places
    changed = {name for name, value in state.items() if buffer.first.get(name) != value}
    if changed & {"shared"}:
        buffer.stage.not_looked_at.add(
            f"the memory of a stage's {buffer.direction} is shared with other processes"
        )
    if buffer.direction == "input":
        buffer.stage.attributes |= changed - {"shared"}


def _state(tensor: torch.Tensor) -> dict[str, Any]:
    """What a user can leave on a tensor, besides hooks, with something to compare it by."""
    state: dict[str, Any] = {
        name: True
        for name in vars(tensor)
        if not name.startswith("_dynamo_")  # torch.compile marks tensors
    }
    state["shared"] = tensor.is_shared()
    state[".names"] = getattr(tensor, "names", None)  # gone in 2.13
    state[".__class__"] = type(tensor)
    return state


def _end_step(seen: stages.Stage) -> None:
    """What has been called by now, and is there to be called in the next step."""
    for key, buffers in list(_inputs.items()):
        if key[0] is seen:
            del _inputs[key]
            for buffer in buffers:
                tensor = buffer.tensor()
                if tensor is not None:
                    buffer.look(tensor)
                    buffer.count_calls_unseen(tensor)
    seen.end_step()


# --- what was seen


def end() -> None:
    """When the process ends; nobody overwrites what is kept of the last step."""
    for seen in stages.every():
        _end_step(seen)
    for buffer in list(_buffers.values()):
        tensor = buffer.tensor()
        if tensor is not None:
            with contextlib.suppress(Exception):
                buffer.owned(tensor)


def forget() -> None:
    """What a process saw from which this one was forked."""
    stages.forget()
    for remembered in (_buffers, _inputs, _witnesses, _holders):
        remembered.clear()


def document() -> list[dict[str, Any]]:
    """Of each stage of this process, as ``--json`` has it, with its steps."""
    return [asdict(seen.findings()) for seen in stages.every() if seen.step]
