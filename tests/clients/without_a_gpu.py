"""What stands in the way of a framework on a machine without a GPU, and is not pipelining.

All of it is stepped round here, before the framework is imported, and nothing else: neither the
frameworks' stages, schedules and steps, nor torch's, but for the two on torch 2.13 below, which
say so.
"""

import inspect
from typing import Any, Optional

import torch
from torch.distributed.pipelining import schedules


def step_round_torchtitan() -> None:
    """Everything that torchtitan 0.3.0 asks of a GPU, answered by the CPU."""
    # It takes "cuda" where torch names no accelerator.
    torch._utils._get_available_device_type = lambda: "cpu"
    # It goes to a barrier's device_ids, which wants a number.
    torch.cpu.current_device = lambda: 0  # type: ignore[assignment, return-value]
    from torchtitan.components import metrics

    metrics.DeviceMemoryMonitor = NoMemoryMonitor
    step_round_older_torch()


class NoMemoryMonitor:
    """In the place of torchtitan's, which asks torch.cuda for the peak of GPU memory."""

    device_name = "CPU"
    device_capacity_gib = 0.0

    def __init__(self, *arguments: Any) -> None:
        from torchtitan.components.metrics import DeviceMemStats

        self.stats = DeviceMemStats(0.0, 0.0, 0.0, 0.0, 0, 0)

    def get_peak_stats(self) -> Any:
        return self.stats

    def reset_peak_stats(self) -> None:
        pass


def step_round_automodel() -> None:
    """nemo_automodel 0.7.0 waits for the GPU once its neighbours have shaken hands."""
    torch.cuda.synchronize = lambda device=None: None


def step_round_older_torch() -> None:
    """What torchtitan 0.3.0 asks of torch 2.14 and torch 2.13 does not have yet.

    Batches that were split before they come to a schedule, which splits a whole one in the same
    way; and the name of what sets a group's timeout.
    """
    if not hasattr(torch.distributed, "set_timeout"):
        dist: Any = torch.distributed
        dist.set_timeout = dist.distributed_c10d._set_pg_timeout
    multi: Any = schedules.PipelineScheduleMulti
    if "arg_mbs" in inspect.signature(multi.step).parameters:
        return
    step = multi.step

    def step_of_split(
        self: Any,
        *,
        arg_mbs: Optional[list[Any]],
        kwarg_mbs: list[dict[str, torch.Tensor]],
        target_mbs: Optional[list[torch.Tensor]],
        **options: Any,
    ) -> Any:
        arguments = [torch.cat(parts) for parts in zip(*(arg_mbs or []))]
        named = {name: torch.cat([one[name] for one in kwarg_mbs]) for name in kwarg_mbs[0]}
        target = torch.cat(target_mbs) if target_mbs else None
        return step(self, *arguments, target=target, **options, **named)

    multi.step = step_of_split
