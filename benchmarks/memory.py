"""Receive buffers and peak memory against the number of microbatches.

    python benchmarks/memory.py [--torch-2.15 PYTHON] [--json]

Two ranks, each in a new process per row; activations of 1 MiB; 3 steps. `receive buffers`
are the bytes of all receive buffers that a rank holds, both directions, the most at any
receive or retrieval; `peak` is the process's peak resident memory over what it was before
the stages were built, the batch not counted, with an allocator that returns freed tensors
to the system at once (glibc's, by MALLOC_MMAP_THRESHOLD_). The larger of the two ranks.
Baseline: ``stock``. PYTHON is an interpreter with torch 2.15 and pp_hookfix, for the row
of that release.
"""

import json
import os
import resource
import subprocess
import sys
from typing import Any

import table
import torch
from torch.distributed.pipelining import PipelineStage

import pp_hookfix
from pp_hookfix.policies import POLICIES
from pp_hookfix.verification import ranks, schedules, training

MIB = 1 << 20
ROWS, WIDTH = 256, 1024  # 1 MiB of float32
STEPS = 3
SCHEDULES = ("1F1B", "Interleaved1F1B")
MICROBATCHES = (8, 32, 128)


class Scale(torch.nn.Module):
    """A stage that costs next to nothing to compute; the last one's output is small."""

    def __init__(self, last: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.weight
        return y.mean(1, keepdim=True) if self.last else y


def receive_buffer_bytes(stages: list[Any]) -> int:
    """Of the buffers that the stages' descriptors hold now, each storage once."""
    storages = {
        buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes()
        for stage in stages
        for _, buffer in training.held_buffers(stage)
    }
    return sum(storages.values())


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def train(rank: ranks.Rank, variant: str, name: str, microbatches: int) -> tuple[int, int]:
    """The most bytes in receive buffers, and the growth of peak memory."""
    pp_hookfix.disable()
    if variant in POLICIES:
        pp_hookfix.enable(variant)
    number = schedules.number_of_stages(name, rank.ranks)
    indices = schedules.stages_of(name, rank.rank, rank.ranks)
    batch = [torch.ones(ROWS * microbatches, WIDTH)] if indices[0] == 0 else []
    target = torch.ones(ROWS * microbatches, 1)
    before = peak_bytes()
    example = torch.zeros(ROWS, WIDTH)
    stages = []
    for index in indices:
        last = index == number - 1
        output = example[:, :1] if last else example
        stages.append(
            PipelineStage(
                Scale(last),
                index,
                number,
                rank.device,
                input_args=example.clone().requires_grad_(index > 0),
                output_args=output.clone().requires_grad_(),
            )
        )
    most = 0

    def sampled(method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal most
            result = method(*args, **kwargs)
            most = max(most, receive_buffer_bytes(stages))
            return result

        return call

    for stage in stages:
        for method in ("_get_recv_ops", "_retrieve_recv_activations", "_retrieve_recv_grads"):
            setattr(stage, method, sampled(getattr(stage, method)))
    schedule = schedules.build(name, stages, microbatches, training.summed_error)
    with rank.time_limit(f"{name}, {microbatches} microbatches, {variant}"):
        for _ in range(STEPS):
            last = indices[-1] == number - 1
            schedule.step(*batch, **({"target": target, "losses": []} if last else {}))
    return most, peak_bytes() - before


def measure_here(variants: list[str]) -> list[table.Row]:
    """Rows of the torch of this interpreter."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(64 << 10)  # of the ranks, which start below
    rows = []
    for name in SCHEDULES:
        for microbatches in MICROBATCHES:
            for variant in variants:
                outcome = ranks.start(
                    train,
                    2,
                    "gloo",
                    timeout=300,
                    variant=variant,
                    name=name,
                    microbatches=microbatches,
                )
                if outcome.exit_status:
                    raise RuntimeError("\n".join(outcome.logs))
                buffers, peaks = zip(*outcome.results)
                rows.append(
                    {
                        "schedule": name,
                        "microbatches": microbatches,
                        "row": variant,
                        "receive buffers MiB": round(max(buffers) / MIB, 1),
                        "peak MiB": round(max(peaks) / MIB, 1),
                    }
                )
                print(table.text(rows[-1:]).splitlines()[1], file=sys.stderr, flush=True)
    return rows


def measure(python_2_15: str = "") -> list[table.Row]:
    """All rows, by schedule and number of microbatches."""
    rows = measure_here(["stock", *POLICIES])
    if python_2_15:
        command = [python_2_15, __file__, "--json", "--variants", "torch 2.15"]
        rows += json.loads(subprocess.run(command, stdout=-1, check=True).stdout)
    rows.sort(key=lambda row: (row["schedule"], row["microbatches"]))
    stock = {
        (row["schedule"], row["microbatches"]): row["receive buffers MiB"]
        for row in rows
        if row["row"] == "stock"
    }
    for row in rows:
        baseline = stock[row["schedule"], row["microbatches"]]
        row["buffers over stock"] = round(row["receive buffers MiB"] / baseline, 3)
    return rows


def main() -> int:
    parser = table.parser(__doc__ or "")
    parser.add_argument("--torch-2.15", dest="python", default="", metavar="PYTHON")
    parser.add_argument("--variants", nargs="+", help="only these, without a baseline")
    arguments = parser.parse_args()
    rows = measure_here(arguments.variants) if arguments.variants else measure(arguments.python)
    table.show(rows, arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
