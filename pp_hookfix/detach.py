"""``detach``: a new tensor over the receive buffer's own storage."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def alias_activations(stage: Any, activations: Any, args: Any, kwargs: Any) -> Any:
    """After ``_retrieve_recv_activations(fwd_chunk_id)``."""
    (microbatch,) = args or kwargs.values()
    recv_infos = stage.args_recv_info[microbatch]
    # Once per microbatch, in microseconds: loops that call little.
    handed_out = []
    for tensor in activations:
        for info in recv_infos:
            if tensor is not None and tensor is getattr(info, "buffer", info):
                tensor = alias(tensor)
                break
        handed_out.append(tensor)
    return type(activations)(handed_out)


def alias(buffer: "torch.Tensor") -> "torch.Tensor":
    """A leaf of its own over the buffer's storage: no hooks, no ``.grad``.

    Not ``buffer.view(...)``: a view of a buffer that requires grad is no leaf,
    and the gradient that the schedule looks for on the activation would land
    on the buffer.
    """
    try:
        return buffer.detach().requires_grad_(buffer.requires_grad)
    except RuntimeError:
        if not buffer.is_inference():
            raise
        # Outside inference mode such a tensor's alias may not be made to require grad.
        import torch

        with torch.inference_mode():
            return buffer.detach().requires_grad_(buffer.requires_grad)
