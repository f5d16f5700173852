"""NeMo Automodel's AutoPipeline on a small random Llama, on this rank: for run_clients.py.

torchrun --nproc-per-node 2 train_automodel.py FOLDER JSON
"""

import faulthandler
import json
import sys
from typing import Any, Optional

import torch
import without_a_gpu
from recorder import Recorder
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

without_a_gpu.step_round_automodel()

from nemo_automodel.components.distributed.pipelining.autopipeline import (  # noqa: E402
    AutoPipeline,
)
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

VOCABULARY, BATCH, MICROBATCHES = 128, 8, 8
# For each optimizer step, the length of each of the batches that it accumulates.
LENGTHS = [(16, 16), (24, 16), (24, 24), (16, 32), (32, 32)]
VALIDATED = {2: 24, 4: 16}
"""After which steps, and with sequences of which length."""


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def batch(length: int, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(VOCABULARY, (sequences, length + 1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Job:
    """A training loop as the framework's recipes have it."""

    def __init__(self, options: dict[str, Any]) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
        torch.manual_seed(3)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            use_cache=False,
        )
        self.pipeline = AutoPipeline(
            world_mesh=mesh,
            dp_axis_names=(),
            pp_schedule=options.get("schedule", "1f1b"),
            pp_microbatch_size=BATCH // MICROBATCHES,
            pp_batch_size=BATCH,
            layers_per_stage=options.get("layers_per_stage"),
            device=torch.device("cpu"),
            dtype=torch.float32,
            pp_seq_len=LENGTHS[0][0],
            pp_recv_buffer_pool="pool" in options,
            pp_recv_buffer_pool_slack=options.get("pool", 2),
        ).build(LlamaForCausalLM(config), loss_fn=loss_of)
        self.validation_microbatches = options.get("validation_microbatches", 4)
        self.modules = self.pipeline.parts
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in self.modules]
        self.recorder = Recorder()
        self.recorder.hook_inputs(self.pipeline.info.stages or [])

    def forward_backward(self, length: int) -> None:
        tokens, target = batch(length, BATCH)
        losses = self._losses()
        self.pipeline.update_seq_len(length)
        self.pipeline.step(tokens, target=None if losses is None else target, losses=losses)
        self._keep("loss", losses)

    def validate(self, length: int) -> None:
        """With fewer microbatches than a step has, where the schedule takes any number."""
        schedule: Any = self.pipeline.info.schedule
        tokens, target = batch(length, self.validation_microbatches * BATCH // MICROBATCHES)
        losses = self._losses()
        self.pipeline.update_seq_len(length)
        arguments = (tokens,) if self.pipeline.info.has_first_stage else ()
        schedule._n_microbatches = self.validation_microbatches
        with torch.no_grad():
            schedule.eval(*arguments, target=None if losses is None else target, losses=losses)
        schedule._n_microbatches = MICROBATCHES
        self._keep("validation loss", losses)

    def _losses(self) -> Optional[list[torch.Tensor]]:
        return [] if self.pipeline.info.has_last_stage else None

    def _keep(self, name: str, losses: Optional[list[torch.Tensor]]) -> None:
        for loss in losses or []:
            self.recorder.keep(name, loss)

    def train(self) -> None:
        for number, lengths in enumerate(LENGTHS, 1):
            for length in lengths:
                self.forward_backward(length)
            for part in self.modules:
                norm = nn.utils.clip_grad_norm_(part.parameters(), 1.0)
                self.recorder.keep("gradient norm", norm)
            self.recorder.step_begins(self.modules)
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if number in VALIDATED:
                self.validate(VALIDATED[number])


def main() -> None:
    folder, options = sys.argv[1], json.loads(sys.argv[2])
    faulthandler.dump_traceback_later(options["limit"], exit=True)
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    job = Job(options)
    if options.get("imports"):
        import pp_hookfix

        pp_hookfix.enable(options["imports"])
    job.train()
    job.recorder.write(folder, job.modules)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
