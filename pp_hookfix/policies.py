"""What a stage is handed in place of its persistent receive buffer.

Each policy names the methods of ``_PipelineStageBase`` that it wraps and, for
each, a wrapt wrapper ``(wrapped, stage, args, kwargs)``. A further policy is a
further entry of `POLICIES`, beside the one that is there.
"""

# Read at interpreter start for the policies' names: no import at module level.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    import torch

    Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]


def alias_activations(
    wrapped: "Callable[..., Any]", stage: "Any", args: "tuple[Any, ...]", kwargs: "dict[str, Any]"
) -> "Any":
    """Hand out a new tensor over each receive buffer's own storage.

    Wraps ``_retrieve_recv_activations(fwd_chunk_id)``. What torch returns and
    is not the microbatch's receive buffer itself (a DTensor built around it,
    ``None``) passes through as it is.
    """
    activations = wrapped(*args, **kwargs)
    recv_infos = stage.args_recv_info[_microbatch(*args, **kwargs)]
    return _replace(activations, recv_infos, _alias)


POLICIES: "dict[str, dict[str, Wrapper]]" = {
    "detach": {"_retrieve_recv_activations": alias_activations},
}
DEFAULT = "detach"


def _microbatch(fwd_chunk_id: int) -> int:
    return fwd_chunk_id


def _replace(
    handed_out: "Any",
    recv_infos: "Iterable[Any]",
    new: "Callable[[torch.Tensor], torch.Tensor]",
) -> "Any":
    """Put a new tensor in the place of each that is still a receive buffer."""
    buffers = [getattr(info, "buffer", None) for info in recv_infos]
    return type(handed_out)(
        [
            new(tensor)
            if tensor is not None and any(tensor is buffer for buffer in buffers)
            else tensor
            for tensor in handed_out
        ]
    )


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
