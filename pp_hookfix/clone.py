"""``clone``: a copy of the receive buffer, in both directions."""

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.weak import TensorWeakRef

from pp_hookfix.detach import alias_activations

# Gradients that were looked at before their backward, by stage and microbatch: weak references
# to an output of their forward, by which they are known, and to the copies handed out.
_looked_at: "WeakKeyDictionary[Any, dict[int, list[TensorWeakRef]]]" = WeakKeyDictionary()


def copy_activations(stage: Any, activations: Any, args: Any, kwargs: Any) -> Any:
    """After ``_retrieve_recv_activations(fwd_chunk_id)``."""
    (microbatch,) = args or kwargs.values()
    copied = _copied(stage, activations, stage.args_recv_info[microbatch])
    # What a neighbour on the same rank handed over: its `.grad` ends with the step, too.
    return alias_activations(stage, copied, args, kwargs)


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
        copied = _copied(stage, gradients, stage.grad_recv_info[microbatch])
    if forwarded is not None:
        looked_at[microbatch] = [
            TensorWeakRef(tensor) for tensor in (forwarded[0][0], *copied) if tensor is not None
        ]
    return type(gradients)(copied)


def _copied(stage: Any, tensors: Any, recv_infos: Iterable[Any]) -> Any:
    """A leaf with its own data for each that has the memory of a receive buffer.

    A DTensor that torch builds around one has. What a V schedule's neighbour on the
    same rank hands over is a new tensor each time, and no receive buffer.
    """
    rank_of_stage = stage.stage_index_to_group_rank
    memory = {
        info.buffer.data_ptr()
        for info in recv_infos
        if getattr(info, "buffer", None) is not None
        and rank_of_stage[info.source] != rank_of_stage[stage.stage_index]
    }
    return type(tensors)(
        # `clone` keeps the strides.
        [
            tensor.detach().clone().requires_grad_(tensor.requires_grad)
            if tensor is not None and getattr(tensor, "_local_tensor", tensor).data_ptr() in memory
            else tensor
            for tensor in tensors
        ]
    )
