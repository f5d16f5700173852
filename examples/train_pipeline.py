"""Train a small language model over pipeline stages and watch the gradients between them.

    torchrun --nproc-per-node 2 examples/train_pipeline.py [--keep-inputs]

A byte-level transformer learns the documentation that ships with Python. Each rank
holds one stage, on its GPU where there is one for each rank, else on the CPU. A
tensor hook on every stage's input collects the norm of the gradient that flows back
over that boundary, once per microbatch, as one does to look for vanishing or
exploding gradients. With ``--keep-inputs`` the stage keeps its inputs, too, and says how
far they are from those of step 1. Nothing here knows of pp_hookfix.
"""

import argparse
import os
import sys
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from tqdm import tqdm

CONTEXT = 64  # bytes that the model sees
WIDTH = 64
LAYERS = 4  # over all stages
ROWS = 8  # sequences of one microbatch
MICROBATCHES = 4


class LanguageModelStage(nn.Module):
    """The layers of one stage: bytes in at the first, logits out at the last."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        first, last = stage == 0, stage == stages - 1
        self.embed = nn.Embedding(256, WIDTH) if first else None
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02) if first else None
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(stage, LAYERS, stages)
        )
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)) if last else None
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        self.register_buffer("mask", mask, persistent=False)
        self.boundary_norms: list[float] = []
        """Of the gradients collected in this step at the stage's input."""
        self.kept_inputs: list[torch.Tensor] = []
        self.keeps_inputs = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x) + self.position
        elif x.requires_grad:
            x.register_hook(lambda grad: self.boundary_norms.append(grad.norm().item()))
            if self.keeps_inputs:
                self.kept_inputs.append(x.detach())
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return x if self.head is None else self.head(x)


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def make_stage(
    module: LanguageModelStage, rank: int, ranks: int, device: torch.device
) -> PipelineStage:
    hidden = torch.zeros(ROWS, CONTEXT, WIDTH, device=device, requires_grad=True)
    tokens = torch.zeros(ROWS, CONTEXT, dtype=torch.int64, device=device)
    logits = torch.zeros(ROWS, CONTEXT, 256, device=device, requires_grad=True)
    return PipelineStage(
        module,
        rank,
        ranks,
        device,
        input_args=tokens if rank == 0 else hidden,
        output_args=logits if rank == ranks - 1 else hidden,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="training steps (5)")
    parser.add_argument(
        "--keep-inputs",
        action="store_true",
        help="keep the stage's inputs, and say how far they are from those of step 1",
    )
    arguments = parser.parse_args()
    steps = arguments.steps
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2")

    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if not 2 <= ranks <= LAYERS:
        parser.error(
            f"a stage is one rank and takes at least one of {LAYERS} layers: 2 to {LAYERS}"
        )

    torch.manual_seed(rank)
    module = LanguageModelStage(rank, ranks).to(device)
    module.keeps_inputs = arguments.keep_inputs
    stage = make_stage(module, rank, ranks, device)
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    text = torch.tensor(list("\n".join(topics.values()).encode()))
    generator = torch.Generator().manual_seed(0)  # every rank draws the same
    last = rank == ranks - 1
    bar = tqdm(total=steps, disable=not last, unit="step", file=sys.stderr)
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - CONTEXT, (ROWS * MICROBATCHES,), generator=generator)
        window = text[starts[:, None] + torch.arange(CONTEXT + 1)].to(device)
        module.boundary_norms.clear()
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(window[:, :-1].contiguous())
        elif last:
            schedule.step(target=window[:, 1:], losses=losses)
        else:
            schedule.step()
        optimizer.step()

        collected = torch.tensor(
            [len(module.boundary_norms), sum(module.boundary_norms)],
            dtype=torch.float32,
            device=device,
        )
        by_rank = [torch.zeros_like(collected) for _ in range(ranks)]
        dist.all_gather(by_rank, collected)
        if last:
            boundaries = "; ".join(
                f"stage {index - 1}-{index}: {int(count)} gradients, norms add up to {total:.4f}"
                for index, (count, total) in enumerate(one.tolist() for one in by_rank)
                if index > 0
            )
            loss = sum(loss.item() for loss in losses) / len(losses)
            tqdm.write(f"step {step}  loss {loss:.4f}  {boundaries}")
            if arguments.keep_inputs:
                moved = module.kept_inputs[-1] - module.kept_inputs[MICROBATCHES - 1]
                tqdm.write(f"        input of stage {rank}: {moved.norm():.2f} from step 1")
        bar.update()
    bar.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
