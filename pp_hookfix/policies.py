"""What a stage is handed in place of its persistent receive buffer: three policies.

============================================== ======== ======= =======
what a stage gets                               detach   clone   fresh
============================================== ======== ======= =======
hooks, ``.grad``, attributes end with the step  yes      yes     yes
no data copy                                    yes      no      yes
the receive buffer keeps its memory             yes      yes     no
an input kept across steps stays what it was    no       yes     yes
a received gradient that is kept stays, too     no       yes     yes
receive buffers alive                           all      all     in flight
============================================== ======== ======= =======

A policy names the methods of torch's stages that it wraps and, for each, what it does
`before` the method, with its arguments, and `after` it, with what it returned.
"""

# Read at interpreter start for the policies' names: no import at module level.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any, Optional
    from weakref import WeakSet

    import torch


# --- detach: a new tensor over the receive buffer's own storage


def alias_activations(stage: "Any", activations: "Any", fwd_chunk_id: int) -> "Any":
    """After ``_retrieve_recv_activations``."""
    return _replace(activations, stage.args_recv_info[fwd_chunk_id], _is, _alias)


# --- clone: a copy of the receive buffer, in both directions


def copy_activations(stage: "Any", activations: "Any", fwd_chunk_id: int) -> "Any":
    """After ``_retrieve_recv_activations``."""
    recv_infos = stage.args_recv_info[fwd_chunk_id]
    copied = _replace(activations, _from_other_ranks(stage, recv_infos), _lies_on, _copy)
    # What a neighbour on the same rank handed over: its `.grad` ends with the step, too.
    return _replace(copied, recv_infos, _is, _alias)


def copy_gradients(stage: "Any", gradients: "Any", bwd_chunk_id: int) -> "Any":
    """After ``_retrieve_recv_grads``."""
    recv_infos = stage.grad_recv_info[bwd_chunk_id]
    return _replace(gradients, _from_other_ranks(stage, recv_infos), _lies_on, _copy)


# --- fresh: a receive buffer from its receive to its retrieval, as torch 2.15 has it
#
# At all other times a descriptor holds a plan: a tensor on the meta device that
# remembers size, stride, dtype and whether a gradient is required, has no memory,
# and lets torch's own code read and reset it as it does a buffer.


def plan_buffers(stage: "Any", result: "Any", *args: "Any", **kwargs: "Any") -> "Any":
    """After ``_prepare_forward_infra`` and ``_prepare_backward_infra``, which make buffers."""
    _planned_stages().add(stage)
    _plan(_all_recv_infos(stage))
    return result


def allocate_buffers(
    stage: "Any", recv_infos: "Iterable[Any]", *args: "Any", **kwargs: "Any"
) -> None:
    """Before ``_get_recv_ops``, which posts a microbatch's receives."""
    _planned_stages().add(stage)  # built before this policy was enabled
    for info in _with_buffer(recv_infos):
        info.buffer = _empty(info.buffer, stage.device)


def check_activations(stage: "Any", fwd_chunk_id: int) -> None:
    """Before ``_retrieve_recv_activations``.

    Raises:
        RuntimeError: nothing was received for this microbatch, or it was
            retrieved already; torch 2.15 raises then, too.
    """
    if any(info.buffer.is_meta for info in _with_buffer(stage.args_recv_info[fwd_chunk_id])):
        raise RuntimeError(
            f"pp_hookfix: stage {stage.stage_index} has no received activation for microbatch "
            f"{fwd_chunk_id} to retrieve: under the policy fresh a receive can be retrieved "
            "once. Use PP_HOOKFIX=detach or clone."
        )


def give_activations(stage: "Any", activations: "Any", fwd_chunk_id: int) -> "Any":
    """After ``_retrieve_recv_activations``."""
    _plan(stage.args_recv_info[fwd_chunk_id])
    return activations


def zero_gradients(stage: "Any", bwd_chunk_id: int) -> None:
    """Before ``_retrieve_recv_grads``.

    Where a stage of the same rank had no gradient to hand over, torch 2.13 and
    later zero the buffer that is there: here, the plan.
    """
    for info in _with_buffer(stage.grad_recv_info[bwd_chunk_id]):
        if info.buffer.is_meta:
            info.buffer = _empty(info.buffer, stage.device).zero_()


def give_gradients(stage: "Any", gradients: "Any", bwd_chunk_id: int) -> "Any":
    """After ``_retrieve_recv_grads``."""
    _plan(stage.grad_recv_info[bwd_chunk_id])
    return gradients


def return_buffers() -> None:
    """When ``fresh`` ends: stages that were planned get real buffers again."""
    for stage in _planned_stages():
        for info in _all_recv_infos(stage):
            if info.buffer.is_meta:
                info.buffer = _empty(info.buffer, stage.device)
    _planned_stages().clear()


# --- the table


class Around:
    """What happens around one method: ``before(stage, *args)``, ``after(stage, result, *args)``."""

    __slots__ = ("after", "before")

    def __init__(
        self,
        before: "Optional[Callable[..., None]]" = None,
        after: "Optional[Callable[..., Any]]" = None,
    ) -> None:
        self.before = before
        self.after = after


class Policy:
    """What to wrap, by the method's name, and what to do when the policy ends."""

    __slots__ = ("leave", "methods")

    def __init__(
        self, methods: "dict[str, Around]", leave: "Callable[[], None]" = lambda: None
    ) -> None:
        self.methods = methods
        self.leave = leave


POLICIES = {
    "detach": Policy(
        {"_retrieve_recv_activations": Around(after=alias_activations)},
    ),
    "clone": Policy(
        {
            "_retrieve_recv_activations": Around(after=copy_activations),
            "_retrieve_recv_grads": Around(after=copy_gradients),
        },
    ),
    "fresh": Policy(
        {
            "_prepare_forward_infra": Around(after=plan_buffers),
            "_prepare_backward_infra": Around(after=plan_buffers),
            "_get_recv_ops": Around(before=allocate_buffers),
            "_retrieve_recv_activations": Around(check_activations, give_activations),
            "_retrieve_recv_grads": Around(zero_gradients, give_gradients),
        },
        leave=return_buffers,
    ),
}
DEFAULT = "detach"


# --- one tensor


def _is(tensor: "torch.Tensor", buffer: "torch.Tensor") -> bool:
    """Whether torch handed out the receive buffer itself."""
    return tensor is buffer


def _lies_on(tensor: "torch.Tensor", buffer: "torch.Tensor") -> bool:
    """Whether what torch handed out has the receive buffer's memory: a DTensor may, too."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.data_ptr() == buffer.data_ptr()


def _alias(buffer: "torch.Tensor") -> "torch.Tensor":
    """A leaf of its own over the buffer's storage: no hooks, no ``.grad``.

    Not ``buffer.view(...)``: a view of a buffer that requires grad is no leaf,
    and the gradient that the schedule looks for on the activation would land
    on the buffer.
    """
    if buffer.is_inference():
        # Outside inference mode such a tensor's alias may not be made to require grad.
        import torch

        with torch.inference_mode():
            return buffer.detach().requires_grad_(buffer.requires_grad)
    return buffer.detach().requires_grad_(buffer.requires_grad)


def _copy(buffer: "torch.Tensor") -> "torch.Tensor":
    """A leaf with the buffer's data, in the buffer's own layout (`clone` keeps strides)."""
    return buffer.detach().clone().requires_grad_(buffer.requires_grad)


def _empty(plan: "torch.Tensor", device: "torch.device | str") -> "torch.Tensor":
    """A tensor of its own as `plan` has it; on the meta device, a plan."""
    import torch

    return torch.empty_strided(
        plan.size(),
        plan.stride(),
        dtype=plan.dtype,
        device=device,
        requires_grad=plan.requires_grad,
    )


# --- torch's receive descriptors


def _with_buffer(recv_infos: "Iterable[Any]") -> "Iterator[Any]":
    """Those that receive: not the pipeline's own inputs, nor gradients that do not exist."""
    for info in recv_infos:
        if getattr(info, "buffer", None) is not None:
            yield info


def _all_recv_infos(stage: "Any") -> "Iterator[Any]":
    for by_microbatch in (stage.args_recv_info, stage.grad_recv_info):
        for recv_infos in by_microbatch.values():
            yield from _with_buffer(recv_infos)


def _plan(recv_infos: "Iterable[Any]") -> None:
    """Let the descriptors go of their buffers, and remember what those were like."""
    for info in _with_buffer(recv_infos):
        info.buffer = _empty(info.buffer, "meta")


def _from_other_ranks(stage: "Any", recv_infos: "Iterable[Any]") -> "list[Any]":
    """Without what a V schedule's neighbour on the same rank hands over: a new tensor each time."""
    rank_of_stage = stage.stage_index_to_group_rank
    return [
        info
        for info in _with_buffer(recv_infos)
        if rank_of_stage[info.source] != rank_of_stage[stage.stage_index]
    ]


def _replace(
    handed_out: "Any",
    recv_infos: "Iterable[Any]",
    matches: "Callable[[torch.Tensor, torch.Tensor], bool]",
    new: "Callable[[torch.Tensor], torch.Tensor]",
) -> "Any":
    """Put a new tensor in the place of each that matches one of the receive buffers.

    All else that a stage is handed, None among it, stays as it is.
    """
    # Loops rather than comprehensions: this runs once per microbatch, in microseconds.
    new_tensors = []
    for tensor in handed_out:
        if tensor is not None:
            for info in recv_infos:
                buffer = getattr(info, "buffer", None)
                if buffer is not None and matches(tensor, buffer):
                    tensor = new(tensor)
                    break
        new_tensors.append(tensor)
    return type(handed_out)(new_tensors)


_planned: "Optional[WeakSet[Any]]" = None


def _planned_stages() -> "WeakSet[Any]":
    """Stages whose descriptors may hold plans."""
    global _planned
    if _planned is None:
        import weakref

        _planned = weakref.WeakSet()
    return _planned
