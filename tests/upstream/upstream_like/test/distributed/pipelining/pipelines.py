"""What the test files of this tree share: a small pipeline, one stage for each rank."""

from typing import Callable

import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICROBATCHES, SAMPLES, WIDTH = 4, 2, 8


def pipeline(
    device: torch.device, rank: int, ranks: int
) -> "tuple[torch.nn.Module, Callable[[], list[torch.Tensor]]]":
    """A stage's module on its rank, and a training step that returns the losses."""
    torch.manual_seed(rank)
    module = torch.nn.Linear(WIDTH, WIDTH).to(device)
    samples = torch.ones(SAMPLES, WIDTH, device=device, requires_grad=rank > 0)
    stage = PipelineStage(
        module, rank, ranks, device, input_args=samples, output_args=module(samples)
    )
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=torch.nn.functional.mse_loss)

    def step() -> "list[torch.Tensor]":
        losses: list[torch.Tensor] = []
        batch = torch.ones(MICROBATCHES * SAMPLES, WIDTH, device=device)
        target = torch.zeros_like(batch) if rank == ranks - 1 else None
        schedule.step(*([batch] if rank == 0 else []), target=target, losses=losses)
        return losses

    return module, step
