"""Faults that stock torch has over Gloo, and how this harness steps round them.

They keep a pipeline from running on the CPU at all and have nothing to do with
receive buffers. Only ranks that verify or test something call this; the fix
never does. By release:

- 2.4 - 2.7: ``schedules._batch_p2p`` keeps only the last ``Work`` of a batch, so
  1F1B and the interleaved schedules hang (mended in 2.8, upstream PR 152938).
  Here: wait for every ``Work``.
- Any: a stage that sends to its own rank, which NCCL can and Gloo answers with "Pair is
  not connected". ZBVZeroBubble does so up to 2.9 in each step, and later a schedule of
  one's own may. Here: such a pair is a copy.
- 2.9: the handshake between neighbours sends an int64 into a float32 buffer, and
  Gloo aborts the process. From 2.10: the handshake of the V schedules sends to
  its own rank (from 2.12 only that of traced stages). Here: no handshake, which
  Gloo does not need.
"""

from collections.abc import Sequence
from typing import Any, Optional

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


_exchange = dist.batch_isend_irecv


def _batch_isend_irecv(p2p_ops: list[Any]) -> list[Any]:
    own = [op for op in p2p_ops if op.peer == dist.get_rank()]
    sends = [op for op in own if op.op is dist.isend]
    receives = [op for op in own if op.op is dist.irecv]
    if len(sends) != len(receives):
        raise RuntimeError("a batch sends to its own rank what it does not receive there")
    for send, receive in zip(sends, receives):
        # By `.data`: as unseen by autograd as what a backend writes.
        receive.tensor.data.copy_(send.tensor.data)
    others = [op for op in p2p_ops if op.peer != dist.get_rank()]
    return _exchange(others) if others else []


def step_round() -> None:
    """Change torch in this process so that its schedules run over Gloo."""
    setattr(dist, "batch_isend_irecv", _batch_isend_irecv)  # noqa: B010
    if _RELEASE < (2, 8):
        setattr(torch_schedules, "_batch_p2p", _batch_p2p)  # noqa: B010
    if _RELEASE >= (2, 9):
        base = torch_stage._PipelineStageBase
        setattr(base, "_get_init_p2p_neighbors_ops", lambda self: [])  # noqa: B010
