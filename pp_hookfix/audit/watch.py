"""What is put on stage inputs and kept of them, and what stock torch would make of it.

Stock torch hands a stage the same tensor object in each step: its receive buffer. Here each
hand-out is a tensor of its own, as under ``detach``, so that training goes on as it is and
what one hand-out leaves behind can be told from what the next one does. It is held until the
next receive into its buffer, exactly as long as stock torch would hold it, and looked at then.

Its storage is its own, too, over the buffer's memory. So whatever still uses that memory (the
tensor, a view, ``.detach()``, a NumPy array, a saved tensor of a graph) keeps that storage
alive, and nothing else does.
"""

import contextlib
import functools
import gc
import os
import sys
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterator
from types import CodeType
from typing import Any, NamedTuple, Optional

import torch
from torch.utils import dlpack
from torch.utils.weak import TensorWeakRef

from pp_hookfix.audit import holders, notes
from pp_hookfix.detach import alias

TENSOR, POST_ACCUMULATE = "tensor hook", "post-accumulate-grad hook"


class Place(NamedTuple):
    """Where the user's code registers a hook."""

    kind: str
    where: str
    """``file:line function``: the line that registers, and the function that is registered."""


class Stage:
    """What was seen of one stage."""

    def __init__(self, stage: Any) -> None:
        self.rank = _rank()
        self.index: int = stage.stage_index
        self.trained = self.evaluated = 0  # steps
        self.period = 0  # counts both
        self.is_cleared_by_schedule = False
        self.handed_out: list[HandOut] = []  # in this step
        self.left_in_step: Counter[Place] = Counter()
        self.most_left: dict[Place, int] = {}
        """The most hooks that one step left behind."""
        self.fired: Counter[Place] = Counter()
        """Hooks that stock torch would have fired in the last training step."""
        self.attributes: set[str] = set()
        # Bytes that hooks hold: by period, all by now, and of that on buffers that are gone.
        self.pinned_in_step: dict[int, int] = {}
        self.most_pinned_in_step = self.pinned = self.most_pinned = self.pinned_by_gone = 0
        self.is_blind = False  # to who keeps what
        self.kept: dict[tuple[str, tuple[int, ...], str], list[int]] = {}
        """By direction, shape and holder: how many, and since which step."""

    @property
    def step(self) -> int:
        return self.trained or self.evaluated

    def end_step(self) -> None:
        for one in self.handed_out:
            _look(one)
            if one.tensor is not None:
                one.tensor.grad = None  # as torch does to the buffer
        self.handed_out.clear()
        self.note_left()
        self.pinned -= self.pinned_by_gone
        self.pinned_by_gone = 0

    def begin_step(self, is_training: bool) -> None:
        self.period += 1
        if is_training:
            self.trained += 1
            self.fired.clear()
        else:
            self.evaluated += 1

    def note_left(self) -> None:
        for place, number in self.left_in_step.items():
            self.most_left[place] = max(number, self.most_left.get(place, 0))
        self.left_in_step.clear()

    def note_pinned(self, period: int, size: int) -> None:
        self.pinned_in_step[period] = self.pinned_in_step.get(period, 0) + size
        self.most_pinned_in_step = max(self.most_pinned_in_step, self.pinned_in_step[period])
        self.pinned += size
        self.most_pinned = max(self.most_pinned, self.pinned)
        while len(self.pinned_in_step) > 2:
            del self.pinned_in_step[min(self.pinned_in_step)]


class Buffer:
    """A receive buffer, with what stock torch would have left on it by now."""

    def __init__(self, tensor: torch.Tensor, stage: Stage) -> None:
        self.stage = stage
        self.last: Optional[HandOut] = None
        self.left: Counter[Place] = Counter()
        self.pinned = 0  # bytes
        # Of earlier hand-outs: registries whose handles somebody keeps, and may use to
        # remove a hook.
        self.registries: list[Hooks] = []
        key = id(tensor)

        def gone(reference: Any) -> None:
            # As on stock torch, all that was put on it goes with it.
            if _buffers.get(key) is self:
                del _buffers[key]
            with contextlib.suppress(Exception):
                _let_go(self, is_overwritten=False)
                self.stage.pinned_by_gone += self.pinned

        self.tensor = weakref.ref(tensor, gone)


class HandOut:
    """A tensor that a stage was handed: an activation, or a gradient that it received."""

    def __init__(self, buffer: Buffer, direction: str, microbatch: int) -> None:
        self.buffer = buffer
        self.direction = direction
        self.microbatch = microbatch
        self.period = buffer.stage.period
        self.step = buffer.stage.step
        self.is_looked_at = False
        self.hooks: list[Hooks] = []
        self.fired = False
        self.shape: tuple[int, ...] = ()
        self.tensor: Optional[torch.Tensor] = None
        self.storage = 0
        self.memory: Any = None
        """A weak reference to what lives as long as that storage."""


class Hooks(OrderedDict[int, Any]):
    """The hooks of one kind on a hand-out, as torch keeps them; it knows who registered them."""

    def __init__(self, kind: str, one: HandOut) -> None:
        super().__init__()
        self.kind = kind
        self.places: dict[int, Place] = {}
        self.one = one
        super().__setitem__(-1, _Counts(self.places, kind, one))

    def __setitem__(self, key: int, hook: Any) -> None:
        super().__setitem__(key, hook)
        where = "unknown"
        with contextlib.suppress(Exception):  # of strange callables; the hook is registered
            where = _registered_at(hook)
        self.places[key] = Place(self.kind, where)

    def __delitem__(self, key: int) -> None:
        super().__delitem__(key)
        place = self.places.pop(key, None)
        if place is not None and self.one.is_looked_at:
            self.one.buffer.left[place] -= 1

    def users(self) -> list[Any]:
        return [self[key] for key in self.places]

    def retire(self) -> None:
        """Drop the hooks, once they cannot fire any more; know their handles still."""
        for key in self:
            super().__setitem__(key, None)


class _Counts:
    """Our own hook on each hand-out: counts what stock torch would have fired."""

    # Pickling a tensor warns of hooks that lack it.
    __torch_unserializable__ = True
    __slots__ = ("kind", "one", "places")

    def __init__(self, places: dict[int, Place], kind: str, one: HandOut) -> None:
        self.places, self.kind, self.one = places, kind, one

    def __call__(self, gradient: Any) -> None:
        one, fired = self.one, self.one.buffer.stage.fired
        one.fired = True
        for place, number in one.buffer.left.items():
            if place.kind == self.kind:
                fired[place] += number
        if not one.is_looked_at:
            fired.update(self.places.values())


_stages: "weakref.WeakKeyDictionary[Any, Stage]" = weakref.WeakKeyDictionary()
_seen: list[Stage] = []
_buffers: dict[int, Buffer] = {}
# Who holds, by what the holding looks like; and how often that was met.
_holders: dict[Any, tuple[Optional[str], int]] = {}


# --- around torch's methods


def begin_step(stage: Any, result: Any, args: Any, kwargs: Any) -> Any:
    """After ``clear_runtime_states()``, which schedules call as each step begins."""
    seen = _stage(stage)
    seen.is_cleared_by_schedule = True
    seen.end_step()
    notes.grow(document)
    seen.begin_step(bool(stage.has_backward) and torch.is_grad_enabled())
    return result


def before_receive(stage: Any, args: Any, kwargs: Any) -> None:
    """Before ``_get_recv_ops(recv_infos[, group])``: from here on, stock torch writes."""
    for info in args[0] if args else kwargs["recv_infos"]:
        buffer = _buffers.get(id(getattr(info, "buffer", None)))
        if buffer is not None:
            _let_go(buffer)


def hand_out_activations(stage: Any, activations: Any, args: Any, kwargs: Any) -> Any:
    """After ``_retrieve_recv_activations(fwd_chunk_id)``."""
    (microbatch,) = args or kwargs.values()
    infos = stage.args_recv_info[microbatch]
    return _hand_out(stage, "input", activations, infos, microbatch)


def hand_out_gradients(stage: Any, gradients: Any, args: Any, kwargs: Any) -> Any:
    """After ``_retrieve_recv_grads(bwd_chunk_id)``."""
    (microbatch,) = args or kwargs.values()
    infos = stage.grad_recv_info[microbatch]
    return _hand_out(stage, "gradient", gradients, infos, microbatch)


def _hand_out(stage: Any, direction: str, tensors: Any, infos: Any, microbatch: int) -> Any:
    seen = _stage(stage)
    return type(tensors)(
        [
            _handed(seen, direction, tensor, getattr(info, "buffer", None), microbatch)
            for tensor, info in zip(tensors, infos)
        ]
    )


def _stage(stage: Any) -> Stage:
    seen = _stages.get(stage)
    if seen is None:
        seen = _stages[stage] = Stage(stage)
        _seen.append(seen)
    return seen


def _rank() -> int:
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK") or 0)


def _handed(stage: Stage, direction: str, tensor: Any, memory: Any, microbatch: int) -> Any:
    """What a stage gets for `tensor`, which has the memory of a receive buffer, or is it."""
    # A DTensor that torch builds around the buffer is a new object each time; its memory is not.
    inner = getattr(tensor, "_local_tensor", None)
    if memory is None or not (
        tensor is memory or (inner is not None and inner.data_ptr() == memory.data_ptr())
    ):
        return tensor
    buffer = _buffers.get(id(memory))
    if buffer is None or buffer.tensor() is not memory:
        buffer = _buffers[id(memory)] = Buffer(memory, stage)
    buffer.stage = stage
    one = buffer.last
    if one is None or (one.period, one.microbatch) != (stage.period, microbatch):
        _let_go(buffer)  # received by somebody's own means
        if not stage.is_cleared_by_schedule and any(
            (other.direction, other.microbatch) == (direction, microbatch)
            for other in stage.handed_out
        ):
            stage.end_step()
            stage.begin_step(is_training=torch.is_grad_enabled())
        one = buffer.last = HandOut(buffer, direction, microbatch)
        stage.handed_out.append(one)
        source = memory if inner is None else inner
        one.shape = tuple(source.shape)
        try:
            one.tensor = _own(source, one)
        except (RuntimeError, BufferError):  # a device that lends no memory
            one.tensor = alias(source)
            stage.is_blind = True
        if inner is None:
            _watch_hooks(one)
    if inner is None:
        return one.tensor
    tensor._local_tensor = one.tensor
    return tensor


def _watch_hooks(one: HandOut) -> None:
    tensor: Any = one.tensor
    one.hooks = [Hooks(TENSOR, one), Hooks(POST_ACCUMULATE, one)]
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = one.hooks


def _own(buffer: torch.Tensor, one: HandOut) -> torch.Tensor:
    """A tensor like `buffer`, over the same memory, with a storage of its own."""
    with torch.inference_mode(buffer.is_inference()):
        whole = torch.empty(0, dtype=torch.uint8, device=buffer.device)
        whole.set_(buffer.untyped_storage())
        if whole.numel() == 0:
            return alias(buffer)
        # What the capsule holds lives as long as the storage that is made of it.
        storage = dlpack.from_dlpack(torch._C._to_dlpack(whole)).untyped_storage()
        own = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        own.set_(storage, buffer.storage_offset(), buffer.size(), buffer.stride())
        own.requires_grad_(buffer.requires_grad)
    one.storage, one.memory = storage._cdata, TensorWeakRef(whole)
    return own


# --- looking


def _look(one: HandOut) -> None:
    """At what was put on it; once, when its step is over."""
    if one.is_looked_at or one.tensor is None:
        return
    one.is_looked_at = True
    stage = one.buffer.stage
    for hooks in one.hooks:
        one.buffer.left.update(hooks.places.values())
        stage.left_in_step.update(hooks.places.values())
    if one.direction == "input":
        # torch.compile marks tensors.
        names = vars(one.tensor)
        stage.attributes.update(name for name in names if not name.startswith("_dynamo_"))


def _let_go(buffer: Buffer, is_overwritten: bool = True) -> None:
    """Before the next receive into it, or at its end: look, let go, and see what stays."""
    one, buffer.last = buffer.last, None
    if one is None or one.tensor is None:
        return
    _look(one)
    stage = buffer.stage
    if is_overwritten and one.direction == "input" and one.tensor.grad is not None:
        stage.attributes.add(".grad")
    pinned, from_hooks = _held_by_hooks(one)
    # A hook that holds the input which it is on is a cycle, and no one keeping it.
    only_hooks = one.fired and from_hooks and _references(one) == _LONE + from_hooks
    tensor = TensorWeakRef(one.tensor)
    one.tensor = None
    if only_hooks or tensor() is None:
        for hooks in one.hooks:
            hooks.retire()
    buffer.registries = [
        hooks for hooks in [*buffer.registries, *one.hooks] if weakref.getweakrefcount(hooks)
    ]
    freed = sum(size for reference, size in pinned if reference() is None)
    if freed:
        buffer.pinned += freed
        stage.note_pinned(one.period, freed)
    one.hooks = []
    if is_overwritten and one.memory is not None and one.memory() is not None:
        _note_kept(one, tensor)


def _references(one: HandOut) -> int:
    return sys.getrefcount(one.tensor)


def _held_by_hooks(one: HandOut) -> "tuple[list[tuple[TensorWeakRef, int]], int]":
    """The tensors in the closures of its hooks, with their bytes; and how often itself is."""
    pinned, itself, storages = [], 0, {one.storage}
    for tensor in _in_closures([hook for hooks in one.hooks for hook in hooks.users()]):
        if tensor is one.tensor:
            itself += 1
            continue
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # of no memory of its own
            continue
        if storage._cdata not in storages:
            storages.add(storage._cdata)
            pinned.append((TensorWeakRef(tensor), storage.nbytes()))
    return pinned, itself


def _in_closures(found: list[Any]) -> Iterator[torch.Tensor]:
    """Each reference to a tensor that functions hold, as far as it is theirs alone."""
    seen = set()
    hooks = {id(hook) for hook in found}
    while found:
        one = found.pop()
        if issubclass(type(one), torch.Tensor):
            yield one
            continue
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, (list, tuple, set, frozenset)):
            found += one
        elif isinstance(one, dict):
            found += one.values()
        elif isinstance(one, functools.partial):
            found += [one.func, one.args, one.keywords]
        elif hasattr(one, "__code__"):
            found += list(one.__closure__ or ())
            found += [one.__defaults__ or (), one.__kwdefaults__ or {}]
        elif type(one).__name__ == "cell":
            with contextlib.suppress(ValueError):  # not filled yet
                found.append(one.cell_contents)
        elif id(one) in hooks and not isinstance(one, torch.nn.Module):
            # An object that is called; what a bound method is bound to lives by itself.
            found.append(getattr(one, "__dict__", {}))


def _note_kept(one: HandOut, tensor: TensorWeakRef) -> None:
    looks = _holding(one, tensor)
    if looks == _harmless():
        return
    stage = one.buffer.stage
    like = (stage.index, one.direction, one.shape, looks, one.fired)
    held_by, times = _holders.get(like, (None, 0))
    # A cycle that the collector has not met yet keeps nothing; look again now and then.
    if held_by is None and times & (times - 1) == 0:
        gc.collect()
        if one.memory() is not None:
            held_by = holders.of(one.storage, tensor)
    _holders[like] = held_by, times + 1
    if held_by is not None:
        key = (one.direction, one.shape, held_by)
        stage.kept.setdefault(key, [0, max(one.step, 1)])[0] += 1


def _holding(one: HandOut, reference: TensorWeakRef) -> tuple[int, ...]:
    """What the references to a hand-out, which we let go of, look like."""
    uses = torch._C._storage_Use_Count(one.storage)
    tensor: Any = reference()
    if tensor is None:
        return (uses,)
    from_python, from_all = sys.getrefcount(tensor), tensor._use_count()
    if tensor.requires_grad and tensor.is_leaf:
        # One more with it, unless a graph had it already.
        node = torch.autograd.graph.get_gradient_edge(tensor).node
        with_node = tensor._use_count()
        del node
        return uses, from_python, from_all, with_node
    return uses, from_python, from_all


@functools.cache
def _harmless() -> tuple[int, ...]:
    """What it looks like where nothing but a graph whose backward is over refers to one.

    A loss that is kept has one; of the input it has no more than where to put a gradient.
    """
    one = HandOut.__new__(HandOut)
    with torch.inference_mode(False), torch.enable_grad():
        reference, loss = _kept_by_graph(one)
        looks = _holding(one, reference)
        del loss
    return looks


def _kept_by_graph(one: HandOut) -> tuple[TensorWeakRef, torch.Tensor]:
    tensor = _own(torch.zeros(2, requires_grad=True), one)
    loss = (tensor * 2).sum()
    loss.backward()
    return TensorWeakRef(tensor), loss


def _lone_references() -> int:
    one = HandOut.__new__(HandOut)
    one.tensor = torch.zeros(1)
    return _references(one)


_LONE = _lone_references()


# --- who registers


def _registered_at(hook: Any) -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "pp_hookfix"):
            return f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno} {_name(hook)}"
        frame = frame.f_back
    return f"torch {_name(hook)}"


def _name(hook: Any) -> str:
    """Of the function that is called in the end."""
    for _ in range(20):  # what answers to every name has no end
        if isinstance(hook, functools.partial):
            hook = hook.func
        elif hasattr(hook, "__wrapped__"):
            hook = hook.__wrapped__
        else:
            break
    code = getattr(hook, "__code__", None)
    if isinstance(code, CodeType) or isinstance(hook, type):
        return str(hook.__qualname__)
    owner = getattr(hook, "__self__", None)
    if owner is not None and hasattr(hook, "__name__"):  # a method of a builtin: `list.append`
        return f"{type(owner).__name__}.{hook.__name__}"
    return f"{type(hook).__qualname__}.__call__"


# --- what was seen


def end() -> None:
    """What the last step left is looked at when the process ends."""
    for buffer in list(_buffers.values()):
        _let_go(buffer, is_overwritten=False)
    for stage in _seen:
        stage.note_left()


def forget() -> None:
    """What a process saw from which this one was forked."""
    for remembered in (_seen, _stages, _buffers, _holders):
        remembered.clear()


def document() -> list[dict[str, Any]]:
    """Of each stage of this process, as ``--json`` has it, with its steps."""
    return [_document_of(stage) for stage in _seen if stage.step]


def _document_of(stage: Stage) -> dict[str, Any]:
    most = {
        place: max(stage.most_left.get(place, 0), stage.left_in_step[place])
        for place in [*stage.most_left, *stage.left_in_step]
    }
    return {
        "rank": stage.rank,
        "stage": stage.index,
        "steps": stage.step,
        "is_blind": stage.is_blind,
        "hooks": [
            {
                "where": place.where,
                "kind": place.kind,
                "per_step": number,
                "on_stock_in_last_step": stage.fired[place],
            }
            for place, number in most.items()
        ],
        "attributes": sorted(stage.attributes),
        "pinned_bytes_per_step": stage.most_pinned_in_step,
        "pinned_bytes_on_stock_by_last_step": stage.most_pinned,
        "kept_inputs": _kept(stage, "input"),
        "kept_gradients": _kept(stage, "gradient"),
    }


def _kept(stage: Stage, direction: str) -> list[dict[str, Any]]:
    return [
        {"count": count, "shape": list(shape), "since_step": since, "held_by": held_by}
        for (way, shape, held_by), (count, since) in stage.kept.items()
        if way == direction
    ]
