"""The pipeline schedules of torch 2.4 - 2.15, and how each is laid out over ranks.

The names are there without torch, for the command's usage; `build` imports it.
"""

import inspect
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

if TYPE_CHECKING:
    import torch


class Layout(NamedTuple):
    """How a schedule spreads its stages."""

    stages_per_rank: int
    v_shaped: bool
    """Rank r holds stages r and (last - r), so that two neighbours share a rank."""


# FlexibleInterleaved1F1B: 2.5 alone. InterleavedZeroBubble: from 2.5.
# ZBVZeroBubble: from 2.6. DualPipeV: from 2.9.
LAYOUTS = {
    "GPipe": Layout(1, v_shaped=False),
    "1F1B": Layout(1, v_shaped=False),
    "Interleaved1F1B": Layout(2, v_shaped=False),
    "LoopedBFS": Layout(2, v_shaped=False),
    "FlexibleInterleaved1F1B": Layout(2, v_shaped=False),
    "InterleavedZeroBubble": Layout(2, v_shaped=False),
    "ZBVZeroBubble": Layout(2, v_shaped=True),
    "DualPipeV": Layout(2, v_shaped=True),
}


def available() -> list[str]:
    """Names of the schedules that the installed torch has."""
    from torch.distributed.pipelining import schedules as torch_schedules

    return [name for name in LAYOUTS if hasattr(torch_schedules, f"Schedule{name}")]


def number_of_stages(name: str, ranks: int) -> int:
    """Stages of the whole pipeline."""
    return LAYOUTS[name].stages_per_rank * ranks


def stages_of(name: str, rank: int, ranks: int) -> list[int]:
    """Indices of the stages that a rank holds, in ascending order."""
    if LAYOUTS[name].v_shaped:
        return [rank, number_of_stages(name, ranks) - 1 - rank]
    return [rank + ranks * chunk for chunk in range(LAYOUTS[name].stages_per_rank)]


def microbatches_of(name: str, ranks: int, wanted: int) -> int:
    """The smallest number from `wanted` on that the schedule takes.

    DualPipeV takes no fewer microbatches than stages; the interleaved
    schedules take a multiple of the ranks.
    """
    if name == "DualPipeV":
        return max(wanted, number_of_stages(name, ranks))
    if LAYOUTS[name].stages_per_rank > 1 and wanted > ranks:
        return -(-wanted // ranks) * ranks
    return wanted


def build(
    name: str, stages: list[Any], microbatches: int, loss_fn: "Callable[..., torch.Tensor]"
) -> Any:
    """A schedule of the installed torch over this rank's stages.

    Args:
        name: a key of `LAYOUTS` that `available` lists.
        stages: this rank's stages, in ascending order of their index.
        microbatches: microbatches per step.
        loss_fn: ``(output, target) -> loss``, of one microbatch.
    """
    from torch.distributed.pipelining import schedules as torch_schedules

    cls = getattr(torch_schedules, f"Schedule{name}")
    layout = LAYOUTS[name]
    if layout.stages_per_rank == 1:
        return cls(stages[0], microbatches, loss_fn=loss_fn)
    kwargs: dict[str, Any] = {}
    if layout.v_shaped:
        ranks = stages[0].group_size
        rank_of_stage = {
            stage: rank for rank in range(ranks) for stage in stages_of(name, rank, ranks)
        }
        for stage in stages:
            stage.stage_index_to_group_rank = rank_of_stage
        # 2.6 asks for what later releases work out by themselves, and infers metadata
        # from these two, which it sets as if no schedule were V-shaped.
        if "stage_index_to_group_rank" in inspect.signature(cls).parameters:
            kwargs["stage_index_to_group_rank"] = rank_of_stage
            for stage in stages:
                stage.prev_rank = rank_of_stage[(stage.stage_index - 1) % stage.num_stages]
                stage.next_rank = rank_of_stage[(stage.stage_index + 1) % stage.num_stages]
    return cls(stages, microbatches, loss_fn=loss_fn, **kwargs)
