"""``clone``: a copy of the receive buffer, in both directions."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.weak import TensorWeakRef

# Gradients that were looked at before their backward, by stage and microbatch: weak references
# to an output of their forward, by which they are known, and to the copies handed out.
_looked_at: "WeakKeyDictionary[Any, dict[int, list[TensorWeakRef]]]" = WeakKeyDictionary()


def copy_activations(stage: Any, activations: Any, args: Any, kwargs: Any) -> Any:
    """After ``_retrieve_recv_activations(fwd_chunk_id)``."""
    (microbatch,) = args or kwargs.values()
    return _copied(activations, stage.args_recv_info[microbatch])


def copy_gradients(stage: Any, gradients: Any, args: Any, kwargs: Any) -> Any:
    """After ``_retrieve_recv_grads(bwd_chunk_id)``.

    Who looks at the gradients before ``backward_one_chunk`` does may change them in
    place, and that is to reach the backward: it gets the same copy.
    """
    (microbatch,) = args or kwargs.values()
    looked_at = _looked_at.setdefault(stage, {})
    alive = [reference() for reference in looked_at.pop(microbatch, ())]
    # torch's own backward takes the microbatch out of this cache before it retrieves.
    forwarded = stage.fwd_cache.get(microbatch)
    if (
        alive
        and all(tensor is not None for tensor in alive)
        and (forwarded is None or forwarded[0][0] is alive[0])
    ):
        copies = iter(alive[1:])
        copied = [None if gradient is None else next(copies) for gradient in gradients]
    else:
        copied = _copied(gradients, stage.grad_recv_info[microbatch])
    if forwarded is not None:
        looked_at[microbatch] = [
            TensorWeakRef(tensor) for tensor in (forwarded[0][0], *copied) if tensor is not None
        ]
    return type(gradients)(copied)


def _copied(tensors: Any, recv_infos: Iterable[Any]) -> Any:
    """A leaf with its own data for each that has the memory of a receive buffer.

    A DTensor that torch builds around one has. So has what a V schedule's neighbour on the
    same rank hands over: a new tensor each time where the schedule's runtime does it, but from
    2.13 on zeroed in place where a gradient is missing; and a schedule that sends to its own
    rank (ZBVZeroBubble up to 2.9) receives it into the same buffer again.
    """
    buffers = [getattr(info, "buffer", None) for info in recv_infos]
    memory = {_address(buffer) for buffer in buffers if buffer is not None}
    return type(tensors)(
        # `clone` keeps the strides.
        [
            tensor.detach().clone().requires_grad_(tensor.requires_grad)
            if tensor is not None and _address(tensor) in memory
            else tensor
            for tensor in tensors
        ]
    )


def _address(tensor: Any) -> int:
    address: int = getattr(tensor, "_local_tensor", tensor).data_ptr()
    return address
