"""Faults that stock torch has over Gloo, and how this harness steps round them.

They keep a pipeline from running on the CPU at all and have nothing to do with
receive buffers. Only ranks that verify or test something call this; the fix
never does. By release:

- 2.4 - 2.7: ``schedules._batch_p2p`` keeps only the last ``Work`` of a batch, so
  1F1B and the interleaved schedules hang (mended in 2.8, upstream PR 152938).
  Here: wait for every ``Work``.
- 2.6 - 2.9: ZBVZeroBubble sends to its own rank in each step, which Gloo cannot.
  Here: ``_PipelineScheduleRuntime`` runs the same order and hands over locally.
- 2.9: the handshake between neighbours sends an int64 into a float32 buffer, and
  Gloo aborts the process. From 2.10: the handshake of the V schedules sends to
  its own rank (from 2.12 only that of traced stages). Here: no handshake, which
  Gloo does not need.
"""

from collections.abc import Sequence
from typing import Any, Callable, Optional

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining import stage as torch_stage

_RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


class _Works:
    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _batch_p2p(p2p_ops: list[Any], desc: Optional[str] = None) -> Optional[_Works]:
    return _Works(dist.batch_isend_irecv(p2p_ops)) if p2p_ops else None


def step_round() -> None:
    """Change torch in this process so that its schedules run over Gloo."""
    if _RELEASE < (2, 8):
        setattr(torch_schedules, "_batch_p2p", _batch_p2p)  # noqa: B010
    if _RELEASE >= (2, 9):
        base = torch_stage._PipelineStageBase
        setattr(base, "_get_init_p2p_neighbors_ops", lambda self: [])  # noqa: B010


def runnable(
    schedule: Any, stages: list[Any], microbatches: int, loss_fn: Callable[..., torch.Tensor]
) -> Any:
    """The schedule itself, or torch's runtime loaded with its order where Gloo needs that."""
    if not (
        (2, 6) <= _RELEASE < (2, 10)
        and type(schedule).__name__ == "ScheduleZBVZeroBubble"
        and dist.get_backend() == "gloo"
    ):
        return schedule
    runtime = torch_schedules._PipelineScheduleRuntime(stages, microbatches, loss_fn=loss_fn)
    load = getattr(runtime, "_load_actions", None) or runtime._prepare_schedule_with_comms
    load(schedule.pipeline_order)
    return runtime
