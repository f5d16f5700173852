"""A cheap hook per microbatch over many steps: stock torch's grow, the fix's do not.

    python benchmarks/growth.py [--steps N] [--json]

Two ranks, GPipe, 16 microbatches, small stages; the hook takes the gradient's norm. Ten
steps without hooks warm up. Processor time of the last stage's rank, which two ranks that
wait for each other do not blur as they do wall time. Medians of the first 20 steps, which
are each row's own baseline, and of the last 20; hooks are those that fired in the last step
on the last stage's input.
"""

import statistics
import sys
import time
from typing import Any

import table
import torch

from pp_hookfix.policies import POLICIES
from pp_hookfix.verification import ranks, schedules, training

MICROBATCHES, WARM_UP = 16, 10


def time_steps(rank: ranks.Rank, variant: str, steps: int) -> tuple[list[float], int]:
    """Processor seconds of each step on this rank, and the hooks fired in the last."""
    import pp_hookfix

    pp_hookfix.disable()
    if variant != "stock":
        pp_hookfix.enable(variant)
    stages = training.make_stages("GPipe", rank.rank, rank.ranks, rank.device)
    schedule = schedules.build("GPipe", stages, MICROBATCHES, training.summed_error)
    norms: list[torch.Tensor] = []

    def meet(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs[0].requires_grad and len(ended) > WARM_UP:
            inputs[0].register_hook(lambda grad: norms.append(grad.norm()))

    stages[0].submod.register_forward_pre_hook(meet)
    ended: list[float] = []

    def between(step: int) -> None:
        norms.clear()
        torch.distributed.barrier()
        ended.append(time.process_time())

    with rank.time_limit(f"{steps} steps, {variant}"):
        training.run_steps(
            schedule,
            stages,
            WARM_UP + steps,
            MICROBATCHES,
            rank.device,
            hooks=None,
            between_steps=between,
        )
        torch.distributed.barrier()
    ended.append(time.process_time())
    taken = [later - earlier for earlier, later in zip(ended, ended[1:])]
    return taken[WARM_UP:], len(norms)


def measure(steps: int = 200) -> list[table.Row]:
    """One row per variant, each in new processes."""
    rows = []
    for variant in ("stock", *POLICIES):
        outcome = ranks.start(time_steps, 2, "gloo", timeout=600, variant=variant, steps=steps)
        if outcome.exit_status:
            raise RuntimeError("\n".join(outcome.logs))
        taken, fired = outcome.results[1]
        early, late = statistics.median(taken[:20]), statistics.median(taken[-20:])
        rows.append(
            {
                "row": variant,
                "first 20 steps, ms": round(1e3 * early, 2),
                "last 20 steps, ms": round(1e3 * late, 2),
                "last over first": round(late / early, 2),
                f"hooks in step {steps}": fired,
            }
        )
    return rows


def main() -> int:
    parser = table.parser(__doc__ or "")
    parser.add_argument("--steps", type=int, default=200, help="training steps (200)")
    arguments = parser.parse_args()
    table.show(measure(arguments.steps), arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
