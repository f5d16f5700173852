"""Compare training without and with the fix, schedule by schedule, and report as it goes."""

import json
from typing import Any, Optional

import torch
import torch.distributed as dist

import pp_hookfix
from pp_hookfix.policies import DEFAULT
from pp_hookfix.verification import schedules, training
from pp_hookfix.verification.ranks import CannotRun, Rank


def verify(
    rank: Rank,
    steps: int,
    microbatches: int,
    names: Optional[list[str]],
    as_json: bool,
) -> int:
    """Verify on this rank, together with all others; rank 0 prints.

    Args:
        rank: this rank, its process group initialized.
        steps: optimizer steps per run.
        microbatches: microbatches per step, where the schedule takes that number.
        names: schedules; None for all that this torch has.
        as_json: print one JSON object at the end instead of lines.

    Returns:
        The exit status, the same on every rank: 0 if, with the fix or on a
        torch that needs none, hooks are constant and losses and gradients are
        those of stock torch; else 1.

    Raises:
        CannotRun: this torch has no such schedule.
    """
    has = schedules.available()
    lacking = [name for name in names or [] if name not in has]
    if lacking:
        raise CannotRun(
            f"torch {torch.__version__} has no schedule {lacking[0]}: it has {', '.join(has)}"
        )
    pp_hookfix.enable()
    status = pp_hookfix.status()
    lines = _Lines(rank, quiet=as_json)
    lines.print(
        f"torch {torch.__version__}, {rank.backend}, {rank.ranks} ranks, "
        f"{microbatches} microbatches, {steps} steps"
    )
    lines.print(f"{status.state}: {status.reason}\n")
    lines.print("hooks fired in each step, at the stage where most fired")
    lines.row("schedule", "without", f"with {DEFAULT}", "losses", "gradients")
    reports = []
    for name in names or has:
        with rank.time_limit(name):
            report = _verify_schedule(rank, name, steps, microbatches)
        reports.append(report)
        lines.row(
            name,
            _counts(report["hooks_without"]),
            _counts(report["hooks_with"]),
            "equal" if report["losses_equal"] else "DIFFER",
            "equal" if report["gradients_equal"] else "DIFFER",
            note=(
                f"{report['microbatches']} microbatches: the fewest from {microbatches} on "
                "that it takes"
                if report["microbatches"] != microbatches
                else ""
            ),
        )
    ok = all(report["ok"] for report in reports)
    if as_json and rank.rank == 0:
        document = {
            "ok": ok,
            "status": status._asdict(),
            "backend": rank.backend,
            "ranks": rank.ranks,
            "steps": steps,
            "schedules": reports,
        }
        print(json.dumps(document), file=rank.out)
    lines.print("\n" + _verdict(reports, status.state))
    return 0 if ok else 1


def _verify_schedule(rank: Rank, name: str, steps: int, microbatches: int) -> dict[str, Any]:
    microbatches = schedules.microbatches_of(name, rank.ranks, microbatches)
    runs = []
    for switch in (pp_hookfix.disable, pp_hookfix.enable):
        switch()
        runs.append(training.train(name, rank.rank, rank.ranks, rank.device, steps, microbatches))
    without, with_fix = runs
    seen: list[Any] = [None] * rank.ranks
    dist.all_gather_object(
        seen,
        (
            without.hooks,
            with_fix.hooks,
            training.losses_equal(without, with_fix),
            training.gradients_equal(without, with_fix),
        ),
    )
    hooks_without, hooks_with = (
        {
            str(stage): counts
            for stage, counts in sorted(item for of_rank in seen for item in of_rank[run].items())
            if stage > 0  # the first stage receives nothing
        }
        for run in (0, 1)
    )
    losses_equal = all(of_rank[2] for of_rank in seen)
    gradients_equal = all(of_rank[3] for of_rank in seen)
    constant = all(counts == [microbatches] * steps for counts in hooks_with.values())
    return {
        "schedule": name,
        "microbatches": microbatches,
        "hooks_without": hooks_without,
        "hooks_with": hooks_with,
        "hooks_constant": constant,
        "losses_equal": losses_equal,
        "gradients_equal": gradients_equal,
        "ok": constant and losses_equal and gradients_equal,
    }


def _counts(hooks: dict[str, list[int]]) -> str:
    return " ".join(map(str, max(hooks.values(), key=sum, default=[])))


def _verdict(reports: list[dict[str, Any]], state: str) -> str:
    failed = [report["schedule"] for report in reports if not report["ok"]]
    if not failed:
        return (
            "OK: hooks fire once per microbatch and step, "
            "and losses and gradients are equal to the last bit."
        )
    return f"FAILED ({state}): {', '.join(failed)}."


class _Lines:
    def __init__(self, rank: Rank, quiet: bool) -> None:
        self._out = None if quiet or rank.rank != 0 else rank.out

    def print(self, line: str) -> None:
        if self._out is not None:
            print(line, file=self._out, flush=True)

    def row(self, *columns: str, note: str = "") -> None:
        widths = (24, 24, 24, 8, 0)
        cells = (column.ljust(width) for column, width in zip(columns, widths))
        self.print(" ".join(cells).rstrip() + (f"  ({note})" if note else ""))
