"""In the place of a real framework, for the tests of run_clients.py: a pipeline of two ranks.

`options` say how it misbehaves: it ``raises``, or its gradients are others ``under`` a policy.
"""

import json
import sys

import torch
from recorder import Recorder
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICROBATCHES, STEPS = 4, 3


def main() -> None:
    folder, options = sys.argv[1], json.loads(sys.argv[2])
    if "raises" in options:
        raise ValueError(options["raises"])
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    torch.manual_seed(rank)
    module = nn.Linear(3, 3)
    # From 2.12 the examples also tell whether a tensor carries a gradient.
    received = torch.zeros(1, 3, requires_grad=rank > 0)
    handed_on = torch.zeros(1, 3, requires_grad=True)
    stage = PipelineStage(
        module, rank, 2, torch.device("cpu"), input_args=received, output_args=handed_on
    )
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    recorder = Recorder()
    recorder.hook_inputs([stage])
    if options.get("imports"):
        import pp_hookfix

        pp_hookfix.enable(options["imports"])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(STEPS):
        batch = torch.randn(MICROBATCHES, 3)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(batch)
        else:
            schedule.step(target=batch, losses=losses)
        for loss in losses:
            recorder.keep("loss", loss)
        plugin = sys.modules.get("pp_hookfix")
        if rank == 1 and plugin and plugin.status().policy == options.get("under"):
            module.weight.grad[0, 0] *= 1 + 1e-6  # type: ignore[index]
        recorder.step_begins([module])
        optimizer.step()
        optimizer.zero_grad()
    recorder.write(folder, [module])
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
