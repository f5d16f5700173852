"""torchtitan's own Trainer and llama3 debugmodel, on this rank: for run_clients.py.

torchrun --nproc-per-node 2 train_torchtitan.py FOLDER JSON
"""

import faulthandler
import json
import os
import sys
from pathlib import Path
from typing import Any

import without_a_gpu

without_a_gpu.step_round_torchtitan()

from recorder import Recorder  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402

WORDS = [f"word{number}" for number in range(500)]
CHECKPOINTING = {"none": None, "selective": SelectiveAC, "full": FullAC}


def assets(folder: Path) -> None:
    """A tokenizer and a text: the wheel has none."""
    folder.mkdir()
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "<s>", "</s>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    text = folder / "text"
    text.mkdir()
    lines = (
        " ".join(WORDS[(line * line + 7 * place) % len(WORDS)] for place in range(50 + line % 40))
        for line in range(400)
    )
    (text / "train.json").write_text("".join(json.dumps({"text": one}) + "\n" for one in lines))


def configured(case: dict[str, Any], folder: Path) -> Any:
    """The debugmodel's configuration, small enough for a CPU."""
    if case.get("graph_pp"):
        from torchtitan.experiments.graph_trainer.llama3 import config_registry

        config = config_registry.graph_trainer_llama3_debugmodel_sdpa()
        config.compile.mode = "aot_fx_trace"
        # They compile with Triton, which takes a GPU.
        config.compile.enable_passes = False
    else:
        from torchtitan.experiments.graph_trainer.common_utils import (
            build_decoder_config_for_backend,
        )
        from torchtitan.models.llama3 import config_registry, llama3_configs

        config = config_registry.llama3_debugmodel()
        # FlexAttention has no backward on the CPU: that of torchtitan's own tests.
        config.model_spec.model = build_decoder_config_for_backend(
            llama3_configs["debugmodel"], "sdpa"
        )
    config.hf_assets_path = str(folder)
    config.dump_folder = str(folder / "dump")
    config.debug.seed = 5
    config.debug.deterministic = True
    config.training.steps = 5
    config.training.seq_len = 64
    config.training.local_batch_size = 4
    config.training.global_batch_size = 4 * case.get("accumulation", 1)
    config.training.disable_cuda_graphs = True
    config.dataloader.dataset_path = str(folder / "text")
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = case["schedule"]
    config.parallelism.pipeline_parallel_microbatch_size = 1
    config.parallelism.tensor_parallel_degree = case.get("tensor_parallel", 1)
    config.checkpoint.enable = False
    config.validator.enable = case.get("validation", False)
    config.validator.freq, config.validator.steps = 2, 1
    config.validator.dataloader.dataset = "c4_test"
    config.validator.dataloader.dataset_path = str(folder / "text")
    checkpointing = CHECKPOINTING[case.get("checkpointing", "none")]
    config.activation_checkpoint = checkpointing and checkpointing.Config()
    return config


def main() -> None:
    folder, case = sys.argv[1], json.loads(sys.argv[2])
    faulthandler.dump_traceback_later(case["limit"], exit=True)
    of_rank = Path(folder, f"assets-{os.environ['RANK']}")
    assets(of_rank)
    config = configured(case, of_rank)
    trainer = config.build()
    recorder = Recorder()
    schedule = trainer.pp_schedule
    if case.get("graph_pp"):
        recorder.mark_inputs(schedule.schedule._stages)
    else:
        recorder.hook_inputs(getattr(schedule, "_stages", None) or [schedule._stage])
    metrics, optimizers = trainer.metrics_processor, trainer.optimizers
    log, log_validation, step = metrics.log, metrics.log_validation, optimizers.step

    def recorded_step(*arguments: Any, **options: Any) -> None:
        recorder.step_begins(trainer.model_parts)
        step(*arguments, **options)

    def recorded_log(number: int, loss: float, most: float, norm: float, **options: Any) -> None:
        recorder.keep("loss", loss)
        recorder.keep("gradient norm", norm)
        log(number, loss, most, norm, **options)

    def recorded_validation(loss: float, *arguments: Any, **options: Any) -> None:
        recorder.keep("validation loss", loss)
        log_validation(loss, *arguments, **options)

    optimizers.step, metrics.log = recorded_step, recorded_log
    metrics.log_validation = recorded_validation
    trainer.train()
    recorder.write(folder, trainer.model_parts)
    trainer.close()


if __name__ == "__main__":
    main()
