"""``fresh``: a receive buffer from its receive to its retrieval, as torch 2.15 has it.

A receive allocates the buffer of its descriptor (``_RecvInfo``), and a retrieval takes it. Between
the two retrievals there is a `NoBuffer` in its place, a tensor without memory that knows what to
allocate. Computing with it, or reading what is gone, is an error that names the policy.

That is for stages that do with their descriptors what torch's own classes do. A stage that
overrides a method of theirs may rely on buffers that stay, so it is served as by ``clone``; and
so is one that was prepared before the policy came, and a descriptor whose buffer somebody has
set. `served_by_copies` has them, for ``status()``, and the log says each once.
"""

import gc
import logging
from typing import Any

import torch
from torch.distributed.pipelining import stage as stage_module

from pp_hookfix import clone
from pp_hookfix.policies import Refused

# What we leave on a descriptor that we are in charge of: its `NoBuffer`, and what was allocated
# in its place and is not taken yet.
_NO_BUFFER, _ALLOCATED = "_pp_hookfix_no_buffer", "_pp_hookfix_allocated"

served_by_copies: set[str] = set()
"""Kinds of stages, in words."""


class NoBuffer(torch.Tensor):
    """In the place of a receive buffer that is not there, with what to allocate.

    torch's stage module clears its ``.grad``, sets its ``requires_grad`` and prints its size.
    """

    grad = None
    like: tuple[Any, ...] = ()
    """Size, stride, dtype, ``requires_grad`` and device."""

    def requires_grad_(self, requires_grad: bool = True) -> "NoBuffer":
        self.like = (*self.like[:3], requires_grad, self.like[4])
        return self

    def size(self) -> Any:  # type: ignore[override]
        return self.like[0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Refused(
            "pp_hookfix: a stage's receive buffer was used while it has none: under the policy "
            "fresh there is one from a receive until its retrieval. "
            "Use PP_HOOKFIX=detach or clone."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _no_buffer(*self.like)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _no_buffer, self.like


def _no_buffer(*like: Any) -> Any:
    made: Any = torch.Tensor._make_subclass(NoBuffer, torch.empty(0, device="meta"))
    made.like = like
    return made


def _allocated(no_buffer: NoBuffer) -> torch.Tensor:
    size, stride, dtype, requires_grad, device = no_buffer.like
    return torch.empty_strided(
        size, stride, dtype=dtype, device=device, requires_grad=requires_grad
    )


# --- around torch's methods


def take_charge(stage: Any, result: Any, args: Any, kwargs: Any) -> Any:
    """After ``_prepare_forward_infra`` and ``_prepare_backward_infra``, which make buffers."""
    overridden = _overridden(type(stage))
    for by_microbatch in (stage.args_recv_info, stage.grad_recv_info):
        for recv_infos in by_microbatch.values():
            for info in recv_infos:
                buffer = getattr(info, "buffer", None)
                if buffer is None or _NO_BUFFER in vars(info):
                    continue
                if overridden:
                    _tell_of_copies(f"{type(stage).__qualname__}, which overrides {overridden[0]}")
                    return result
                layout = buffer.size(), buffer.stride(), buffer.dtype
                like = (*layout, buffer.requires_grad, buffer.device)
                vars(info)[_NO_BUFFER] = info.buffer = _no_buffer(*like)
    return result


def allocate(stage: Any, args: Any, kwargs: Any) -> None:
    """Before ``_get_recv_ops(recv_infos[, group])``."""
    _allocate(args[0] if args else kwargs["recv_infos"])


def allocate_for_missing(stage: Any, args: Any, kwargs: Any) -> None:
    """Before ``set_local_bwd_input(next_stage_bwd_outputs, mb_index)``.

    From torch 2.13 on it zeroes the buffer in place where a gradient is missing.
    """
    outputs = args[0] if args else kwargs["next_stage_bwd_outputs"]
    if any(output is None for output in outputs):
        _allocate(stage.grad_recv_info[_second_of(args, kwargs)])


def own_activations(stage: Any, result: Any, args: Any, kwargs: Any) -> Any:
    """After ``set_local_fwd_input(prev_stage_outputs, mb_index)``: torch has set the buffers."""
    _own(stage.args_recv_info[_second_of(args, kwargs)])
    return result


def own_gradients(stage: Any, result: Any, args: Any, kwargs: Any) -> Any:
    """After ``set_local_bwd_input(next_stage_bwd_outputs, mb_index)``."""
    _own(stage.grad_recv_info[_second_of(args, kwargs)])
    return result


def check_activations(stage: Any, args: Any, kwargs: Any) -> None:
    """Before ``_retrieve_recv_activations(fwd_chunk_id)``.

    Raises:
        Refused: nothing was received for this microbatch.
    """
    (microbatch,) = args or kwargs.values()
    _check(stage, stage.args_recv_info[microbatch], f"activation for microbatch {microbatch}")


def check_gradients(stage: Any, args: Any, kwargs: Any) -> None:
    """Before ``_retrieve_recv_grads(bwd_chunk_id)``.

    Raises:
        Refused: nothing was received for this microbatch.
    """
    (microbatch,) = args or kwargs.values()
    _check(stage, stage.grad_recv_info[microbatch], f"gradient for microbatch {microbatch}")


def take_activations(stage: Any, activations: Any, args: Any, kwargs: Any) -> Any:
    """After ``_retrieve_recv_activations(fwd_chunk_id)``."""
    (microbatch,) = args or kwargs.values()
    if _take(stage, stage.args_recv_info[microbatch]):
        return activations
    return clone.copy_activations(stage, activations, args, kwargs)


def take_gradients(stage: Any, gradients: Any, args: Any, kwargs: Any) -> Any:
    """After ``_retrieve_recv_grads(bwd_chunk_id)``."""
    (microbatch,) = args or kwargs.values()
    if _take(stage, stage.grad_recv_info[microbatch]):
        return gradients
    return clone.copy_gradients(stage, gradients, args, kwargs)


def release() -> None:
    """When the policy ends: give every descriptor a buffer, wherever somebody has put it."""
    for info in gc.get_objects():
        if (
            issubclass(type(info), stage_module._RecvInfo)
            and vars(info).pop(_NO_BUFFER, None) is not None
        ):
            vars(info).pop(_ALLOCATED, None)
            if type(info.buffer) is NoBuffer:
                info.buffer = _allocated(info.buffer)


# --- the descriptors of a microbatch


def _second_of(args: Any, kwargs: Any) -> int:
    """The microbatch of ``set_local_fwd_input`` and ``set_local_bwd_input``."""
    return int(args[1] if len(args) > 1 else kwargs["mb_index"])


def _allocate(recv_infos: Any) -> None:
    for info in recv_infos:
        if type(getattr(info, "buffer", None)) is NoBuffer:
            vars(info)[_ALLOCATED] = info.buffer = _allocated(info.buffer)


def _own(recv_infos: Any) -> None:
    for info in recv_infos:
        if _NO_BUFFER in vars(info) and type(info.buffer) is not NoBuffer:
            vars(info)[_ALLOCATED] = info.buffer


def _check(stage: Any, recv_infos: Any, what: str) -> None:
    if any(type(getattr(info, "buffer", None)) is NoBuffer for info in recv_infos):
        raise Refused(
            f"pp_hookfix: stage {stage.stage_index} has no received {what} to retrieve: "
            "under the policy fresh a receive can be retrieved once. "
            "Use PP_HOOKFIX=detach or clone."
        )


def _take(stage: Any, recv_infos: Any) -> bool:
    """Take the buffers out of their descriptors; False where one is not ours to take."""
    for info in recv_infos:
        buffer = getattr(info, "buffer", None)
        if buffer is not None and vars(info).get(_ALLOCATED) is not buffer:
            is_set = _NO_BUFFER in vars(info)
            why = "whose buffers are set by others" if is_set else "prepared before this policy"
            if is_set or not _overridden(type(stage)):
                _tell_of_copies(f"{type(stage).__qualname__}, {why}")
            return False
    for info in recv_infos:
        if vars(info).pop(_ALLOCATED, None) is not None:
            info.buffer = vars(info)[_NO_BUFFER]
    return True


def _overridden(kind: type) -> list[str]:
    """torch's methods that a user's class of stages has its own of."""
    order = kind.__mro__
    torchs = next(cls for cls in order if cls.__module__ == stage_module.__name__)
    return [
        name
        for cls in order[: order.index(torchs)]
        for name in vars(cls)
        if not name.startswith("__") and callable(getattr(torchs, name, None))
    ]


def _tell_of_copies(kind: str) -> None:
    if kind not in served_by_copies:
        served_by_copies.add(kind)
        logging.getLogger("pp_hookfix").warning("policy fresh serves by copies: %s", kind)
