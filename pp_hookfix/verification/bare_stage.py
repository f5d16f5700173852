"""A stage object of the installed torch, for what needs a retrieval and no process group."""

from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import stage as stage_module


def make(buffer: torch.Tensor) -> Any:
    """A second stage with one input, whose receive buffer of microbatch 0 is `buffer`.

    It has what a retrieval reads, in every affected release, and nothing else.
    """
    info: Any = object.__new__(stage_module._RecvInfo)
    info.is_root_arg, info.input_name, info.source, info.buffer = False, "x", 0, buffer
    if hasattr(stage_module, "_TensorMeta"):  # 2.12 and later
        info.tensor_meta = stage_module._TensorMeta.from_tensor(buffer)
    stage: Any = object.__new__(PipelineStage)
    stage.args_recv_info, stage.grad_recv_info = {0: (info,)}, {}
    stage.stage_index, stage._has_backward = 1, True
    stage.stage_index_to_group_rank = {0: 0, 1: 1}
    stage.device = torch.device("cpu")
    return stage


def post(stage: Any) -> torch.Tensor:
    """Do with the descriptor what ``_get_recv_ops`` does, which needs a process group: read it.

    Returns:
        The buffer that the receive would be posted to.
    """
    buffer: torch.Tensor = _READ["_get_recv_ops"](stage.args_recv_info[0][0])
    return buffer


# As code of torch's stage module, by which the policy `fresh` knows it.
_READ: dict[str, Any] = {}
exec("def _get_recv_ops(info): return info.buffer", {"__name__": stage_module.__name__}, _READ)
