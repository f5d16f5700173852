"""Tests that ask for two accelerators, as torch's own do, and end in every way there is."""

import time

import torch
import torch.distributed as dist
from pipelines import MICROBATCHES, pipeline
from torch.testing._internal.common_cuda import TEST_MULTIGPU
from torch.testing._internal.common_distributed import requires_nccl
from torch.testing._internal.common_utils import skip_but_pass_in_sandcastle_if

try:
    from torch.testing._internal.common_distributed import MultiProcContinuousTest
except ImportError:
    from torch.testing._internal.common_distributed import (
        MultiProcContinousTest as MultiProcContinuousTest,
    )

TWO_GPUS = skip_but_pass_in_sandcastle_if(not TEST_MULTIGPU, "NCCL test requires 2+ GPUs")


class StageTest(MultiProcContinuousTest):
    @classmethod
    def backend_str(cls) -> str:
        return "nccl"

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.rank)

    def hooks_by_step(self) -> "list[int]":
        """How many hooks on the inputs of this rank's stage fired in each of three steps."""
        module, step = pipeline(self.device, self.rank, self.world_size)
        fired: list[int] = []

        def count(_: torch.Tensor) -> None:
            fired[-1] += 1

        def hook(_: torch.nn.Module, inputs: "tuple[torch.Tensor]") -> None:
            if inputs[0].requires_grad:
                inputs[0].register_hook(count)

        module.register_forward_pre_hook(hook)
        for _ in range(3):
            fired.append(0)
            step()
        return fired

    @requires_nccl()
    @TWO_GPUS
    def test_a_trains(self) -> None:
        _, step = pipeline(self.device, self.rank, self.world_size)
        assert len(step()) == (MICROBATCHES if self.rank == self.world_size - 1 else 0)

    @requires_nccl()
    @TWO_GPUS
    def test_b_fails_always(self) -> None:
        assert self.world_size == 3, "two ranks are not three"

    @requires_nccl()
    @TWO_GPUS
    def test_c_hooks_pile_up(self) -> None:
        if self.rank == 1:
            assert self.hooks_by_step() == [4, 8, 12]
        else:
            self.hooks_by_step()

    @requires_nccl()
    @TWO_GPUS
    def test_d_hangs_always(self) -> None:
        while self.rank == 1:
            time.sleep(1)
        dist.barrier()

    @requires_nccl()
    @TWO_GPUS
    def test_e_trains(self) -> None:
        self.test_a_trains()
