"""``fresh``: a receive buffer from its receive to its retrieval, as torch 2.15 has it.

A descriptor (``_RecvInfo``) of which this policy is in charge is of a subclass, whose
``buffer`` is a property and knows whether there is one:

- Where torch posts a receive, the buffer is made. Retrieval hands it out, and the descriptor
  keeps a plan: a tensor on the meta device with the size, stride, dtype and ``requires_grad``
  of the next one, which also does for ``clear_runtime_states``.
- On stock torch a buffer stays where it is, and whoever reads, sets or fills it may rely on
  that. So whoever does, other than torch's own stage module, has it from then on: the
  descriptor becomes torch's ordinary one again, for good, and its stage is handed aliases of
  that buffer, as under ``detach``.

The descriptors go on by themselves wherever somebody puts them, and after the policy ended.

One thing that stock torch can show is gone here: what was received earlier, given away and
freed since. Whoever reads it gets an `_Unwritten` buffer, to fill or to receive into.
"""

import copy
import functools
import sys
from types import FrameType
from typing import Any

import torch
from torch.distributed.pipelining import stage as stage_module
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef

from pp_hookfix.detach import alias
from pp_hookfix.policies import Refused

# Functions of torch's stage module that read a buffer in order to receive or write into it.
_FILLING = ("_get_recv_ops", "get_fwd_recv_ops", "set_local_bwd_input")
# Left on descriptors that somebody else relies on.
_RELIED_ON = "_pp_hookfix_relied_on"
# What we know of a descriptor that we are in charge of, in its ``__dict__`` beside the buffer.
_STATE: dict[str, Any] = {
    "device": None,
    "is_ours": False,  # the buffer, to give away
    "given": None,  # a weak reference to what was handed out last
    "given_in_this_step": False,
    "given_as": "",  # in words
    "shown": None,  # the `_Unwritten` tensor over the buffer that somebody has
}


# --- around torch's methods


def let_go(stage: Any, result: Any, args: Any, kwargs: Any) -> Any:
    """After ``_prepare_forward_infra`` and ``_prepare_backward_infra``, which make buffers."""
    for by_microbatch in (stage.args_recv_info, stage.grad_recv_info):
        for recv_infos in by_microbatch.values():
            for info in recv_infos:
                if _is_torchs(info) and _is_nobody_elses(vars(info)):
                    _take_charge(info, stage, is_ours=True)
                    vars(info)["buffer"] = _plan(vars(info)["buffer"])
    return result


def check_activations(stage: Any, args: Any, kwargs: Any) -> None:
    """Before ``_retrieve_recv_activations(fwd_chunk_id)``.

    Raises:
        Refused: nothing was received for this microbatch, or what was is freed.
    """
    (microbatch,) = args or kwargs.values()
    _check(stage, stage.args_recv_info[microbatch], f"activation for microbatch {microbatch}")


def check_gradients(stage: Any, args: Any, kwargs: Any) -> None:
    """Before ``_retrieve_recv_grads(bwd_chunk_id)``.

    Raises:
        Refused: nothing was received for this microbatch, or what was is freed.
    """
    (microbatch,) = args or kwargs.values()
    _check(stage, stage.grad_recv_info[microbatch], f"gradient for microbatch {microbatch}")


def give_activations(stage: Any, activations: Any, args: Any, kwargs: Any) -> Any:
    """After ``_retrieve_recv_activations(fwd_chunk_id)``."""
    (microbatch,) = args or kwargs.values()
    handed_out = []
    for tensor, info in zip(activations, stage.args_recv_info[microbatch]):
        if not _give(stage, info, tensor, microbatch) and tensor is _held(info):
            tensor = alias(tensor)
        handed_out.append(tensor)
    return type(activations)(handed_out)


def give_gradients(stage: Any, gradients: Any, args: Any, kwargs: Any) -> Any:
    """After ``_retrieve_recv_grads(bwd_chunk_id)``."""
    (microbatch,) = args or kwargs.values()
    for tensor, info in zip(gradients, stage.grad_recv_info[microbatch]):
        _give(stage, info, tensor, microbatch)
    return gradients


def _check(stage: Any, recv_infos: Any, what: str) -> None:
    for info in recv_infos:
        if not _is_in_charge(info):
            continue
        state = vars(info)
        given = _given(state) if state["buffer"].is_meta else state["buffer"]
        if given is None or (state["shown"] is not None and _is_untouched(given)):
            raise Refused(
                f"pp_hookfix: stage {stage.stage_index} has no received {what} to retrieve: "
                "under the policy fresh a receive can be retrieved once, and again while "
                "what was handed out is alive. Use PP_HOOKFIX=detach or clone."
            )
        if state["shown"] is not None or (
            # Kept since an earlier step by somebody who receives into it by himself.
            state["buffer"].is_meta and not state["given_in_this_step"]
        ):
            _rely_on(info, given)
        state["buffer"] = given


def _give(stage: Any, info: Any, handed_out: Any, microbatch: int) -> bool:
    """Let the stage have the descriptor's buffer; False where that is not ours to give."""
    if _is_torchs(info):  # made before the policy came: the next receive tells (`_read`)
        _take_charge(info, stage, is_ours=False)
    state = vars(info)
    if not _is_in_charge(info) or not state["is_ours"] or state["buffer"].is_meta:
        return False
    # A DTensor that torch builds has the buffer's memory, but not the tensor object.
    given = handed_out if hasattr(handed_out, "_local_tensor") else state["buffer"]
    state.update(
        buffer=_plan(state["buffer"]),
        given=TensorWeakRef(given),
        given_in_this_step=True,
        given_as=f"stage {stage.stage_index}'s receive buffer for microbatch {microbatch}",
    )
    return True


# --- a descriptor that the policy is in charge of


@functools.cache
def _receive_class(torchs: Any) -> type:
    """The subclass of torch's descriptor class."""

    class Receive(torchs):  # type: ignore[misc]
        @property
        def buffer(self) -> Any:
            return _read(self, sys._getframe(1))

        @buffer.setter
        def buffer(self: Any, tensor: Any) -> None:
            # On the same rank a V schedule hands over: a receive like any other.
            if _is_torchs_own(self, sys._getframe(1)):
                vars(self).update(buffer=tensor, is_ours=True, shown=None)
            else:
                _rely_on(self, tensor)

        def __repr__(self: Any) -> str:
            shown: Any = object.__new__(torchs)
            vars(shown).update(vars(self))
            return repr(shown)

        def __deepcopy__(self, memo: dict[int, Any]) -> Any:
            state = {**vars(self), "shown": None}
            given = _given(state)
            if given is not None:
                state["buffer"] = given  # as stock torch's would still hold it
            if state["given"] is not None:
                state["given"] = _nothing
            copied: Any = object.__new__(type(self))
            memo[id(self)] = copied
            vars(copied).update(copy.deepcopy(state, memo))
            return copied

        def __reduce_ex__(self, protocol: Any) -> Any:
            # Of a pickle, and of a shallow copy, which shares the buffer.
            _rely_on(self, _plain(self.buffer))
            return self.__reduce_ex__(protocol)

    return Receive


def _take_charge(info: Any, stage: Any, is_ours: bool) -> None:
    """Be in charge of a descriptor, whose buffer is ours to give or may be somebody else's."""
    vars(info).update({**_STATE, "device": stage.device, "is_ours": is_ours})
    torchs: Any = type(info)
    info.__class__ = _receive_class(torchs)


def _rely_on(info: Any, buffer: Any) -> None:
    """Make it torch's ordinary descriptor with this buffer, which stays."""
    if _is_in_charge(info):
        if vars(info)["shown"] is not None and buffer is vars(info)["buffer"]:
            buffer.requires_grad_(vars(info)["shown"].requires_grad)
        info.__class__ = type(info).__bases__[0]
        for name in _STATE:
            del vars(info)[name]
    vars(info)[_RELIED_ON] = True
    info.buffer = buffer


def _read(info: Any, frame: FrameType) -> Any:
    """The buffer of a descriptor that we are in charge of, as the code of `frame` reads it."""
    state = vars(info)
    reader = frame.f_code.co_name if _is_torchs_own(info, frame) else None
    if reader == "clear_runtime_states":
        state["given_in_this_step"] = False
    elif reader in _FILLING:
        if not state["is_ours"] and _is_nobody_elses(state):
            # A new one: what was put on that one ends with it.
            state.update(is_ours=True, buffer=_plan(state["buffer"]))
        if state["buffer"].is_meta:
            state["buffer"] = _empty(state["buffer"], state["device"])
    elif reader is None or state["buffer"].is_meta:
        return _show(info)
    if state["shown"] is not None:
        _rely_on(info, state["buffer"])
    return vars(info)["buffer"]


def _show(info: Any) -> Any:
    """The buffer, for somebody who may rely on it from now on."""
    state = vars(info)
    if state["shown"] is not None:
        return state["shown"]
    if not state["buffer"].is_meta:
        buffer = state["buffer"]
    elif (buffer := _given(state)) is None:
        buffer = _empty(state["buffer"], state["device"])
        if state["given"] is not None and buffer.numel():
            state.update(buffer=buffer, shown=_unwritten(buffer, state["given_as"]))
            return state["shown"]
    elif not state["given_in_this_step"]:
        buffer.grad = None  # as `clear_runtime_states` would have left it
    _rely_on(info, buffer)
    return buffer


def _held(info: Any) -> Any:
    return vars(info)["buffer"] if _is_in_charge(info) else getattr(info, "buffer", None)


def _is_in_charge(info: Any) -> bool:
    return isinstance(vars(type(info)).get("buffer"), property)


def _is_torchs(info: Any) -> bool:
    """Whether it is torch's ordinary descriptor, with a buffer that nobody is known to rely on."""
    return (
        type(info) is stage_module._RecvInfo
        and info.buffer is not None
        and not info.buffer.is_meta
        and not hasattr(info, _RELIED_ON)
    )


def _is_torchs_own(info: Any, frame: FrameType) -> bool:
    """Whether code of torch's stage module, or of the policies beside this one, is at work."""
    name: str = frame.f_globals.get("__name__", "")
    torchs: type = type(info).__bases__[0]
    return name == torchs.__module__ or name.startswith("pp_hookfix.")


# --- a buffer in which nothing is


class _Unwritten(torch.Tensor):
    """A buffer whose content is gone: to write to and to receive into, not to compute with.

    Every bit of it is set until somebody writes to it, by whatever means.
    """

    gone = ""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: "dict[str, Any] | None" = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if name not in _LOOKS and name not in _VIEWS:
                read = {key: value for key, value in kwargs.items() if key != "out"}
                for leaf in tree_leaves((args[name in _OVERWRITES :], read)):
                    if isinstance(leaf, _Unwritten) and _is_untouched(leaf):
                        raise Refused(leaf.gone)
            result = func(*args, **kwargs)
            if name in _VIEWS and type(result) is torch.Tensor:
                return result.as_subclass(cls)
        return result


_LOOKS = frozenset(
    (
        *("__set__", "__len__", "__hash__", "__repr__", "size", "stride", "dim", "numel"),
        *("nelement", "element_size", "storage_offset", "data_ptr", "untyped_storage"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_pinned", "is_inference"),
        *("get_device", "requires_grad_", "register_hook"),
    )
)
_VIEWS = frozenset(
    (
        *("__get__", "detach", "view", "view_as", "narrow", "select", "transpose", "permute", "t"),
        *("squeeze", "unsqueeze", "as_strided", "__getitem__"),
    )
)
# Their first argument.
_OVERWRITES = frozenset(
    (
        *("copy_", "zero_", "fill_", "set_", "resize_", "normal_", "uniform_", "__setitem__"),
        *("irecv", "recv"),
    )
)


def _unwritten(buffer: torch.Tensor, given_as: str) -> torch.Tensor:
    """Another tensor over the memory of `buffer`, which it overwrites."""
    gone = (
        f"pp_hookfix: {given_as} was read, but what it had received was given away and is freed: "
        "under the policy fresh nothing keeps it. Use PP_HOOKFIX=detach or clone."
    )
    _bytes(buffer).fill_(0xFF)
    kind: Any = type(_Unwritten.__name__, (_Unwritten,), {"gone": gone})
    unwritten: torch.Tensor = kind._make_subclass(kind, buffer.detach(), buffer.requires_grad)
    return unwritten


def _is_untouched(buffer: torch.Tensor) -> bool:
    return bool((_bytes(buffer) == 0xFF).all()) and buffer.untyped_storage().nbytes() > 0


def _plain(buffer: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return alias(buffer) if isinstance(buffer, _Unwritten) else buffer


# --- tensors


def _given(state: dict[str, Any]) -> Any:
    """The tensor that was handed out last, while it lives; a DTensor's own, local one."""
    given = None if state["given"] is None else state["given"]()
    return getattr(given, "_local_tensor", given)


def _nothing() -> None:
    """In the place of a weak reference: something was given, and is not there."""


def _plan(buffer: torch.Tensor) -> torch.Tensor:
    return _empty(buffer, "meta")


def _empty(like: torch.Tensor, device: "torch.device | str") -> torch.Tensor:
    return torch.empty_strided(
        like.size(),
        like.stride(),
        dtype=like.dtype,
        device=device,
        requires_grad=like.requires_grad,
    )


def _bytes(buffer: torch.Tensor) -> torch.Tensor:
    """All the memory that the tensor lies on."""
    return torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())


def _is_nobody_elses(holder: dict[str, Any]) -> bool:
    """Whether ``holder["buffer"]`` is all that refers to that tensor and to its memory.

    Then nobody can tell whether the next receive lands there.
    """
    return _references(holder) == _references({"buffer": torch.empty(1)})


def _references(holder: dict[str, Any]) -> tuple[int, int]:
    """To the tensor, and to its memory. How many a lone one has differs by release."""
    storage = holder["buffer"].untyped_storage()
    return sys.getrefcount(holder["buffer"]), torch._C._storage_Use_Count(storage._cdata)
