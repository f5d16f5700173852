"""A stage object of the installed torch, for what needs a retrieval and no process group."""

from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import stage as stage_module

from pp_hookfix import fresh


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
    """Do with the descriptor what ``_get_recv_ops`` does, which needs a process group.

    Returns:
        The buffer that the receive would be posted to.
    """
    recv_infos = stage.args_recv_info[0]
    fresh.allocate(stage, (recv_infos,), {})  # nothing, under another policy
    buffer: torch.Tensor = recv_infos[0].buffer
    return buffer
