"""Compare training without and with the fix, schedule by schedule, and report as it goes."""

import json
from typing import Any, Optional

import torch

import pp_hookfix
from pp_hookfix.verification import schedules, training
from pp_hookfix.verification.ranks import CannotRun, Rank, gathered


def verify(
    rank: Rank,
    steps: int,
    microbatches: int,
    names: Optional[list[str]],
    policies: list[str],
    as_json: bool,
) -> int:
    """Verify on this rank, together with all others; rank 0 prints.

    Args:
        rank: this rank, its process group initialized.
        steps: optimizer steps per run.
        microbatches: microbatches per step, where the schedule takes that number.
        names: schedules; None for all that this torch has.
        policies: keys of ``POLICIES``, each compared with stock torch.
        as_json: print one JSON object at the end instead of lines.

    Returns:
        The exit status, the same on every rank: 0 if, under each policy or on a
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
    lines = _Lines(rank, quiet=as_json)
    lines.print(
        f"torch {torch.__version__}, {rank.backend}, {rank.ranks} ranks, "
        f"{microbatches} microbatches, {steps} steps"
    )
    statuses = {}
    for policy in policies:
        pp_hookfix.enable(policy)
        statuses[policy] = pp_hookfix.status()
        lines.print(f"{policy}: {statuses[policy].state}: {statuses[policy].reason}")
    lines.print("\nhooks fired in each step, at the stage where most fired")
    lines.row("schedule", "without", *policies, "losses", "gradients")
    reports = []
    for name in names or has:
        with rank.time_limit(name):
            report = _verify_schedule(rank, name, steps, microbatches, policies)
        reports.append(report)
        results = report["policies"].values()
        lines.row(
            name,
            _counts(report["hooks"]),
            *(_counts(result["hooks"]) for result in results),
            "equal" if all(result["losses_equal"] for result in results) else "DIFFER",
            "equal" if all(result["gradients_equal"] for result in results) else "DIFFER",
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
            "torch_version": torch.__version__,
            "policies": {policy: status._asdict() for policy, status in statuses.items()},
            "backend": rank.backend,
            "ranks": rank.ranks,
            "steps": steps,
            "schedules": reports,
        }
        print(json.dumps(document), file=rank.out)
    lines.print("\n" + _verdict(reports, statuses))
    return 0 if ok else 1


def _verify_schedule(
    rank: Rank, name: str, steps: int, microbatches: int, policies: list[str]
) -> dict[str, Any]:
    microbatches = schedules.microbatches_of(name, rank.ranks, microbatches)

    def train() -> training.Record:
        return training.train(name, rank.rank, rank.ranks, rank.device, steps, microbatches)

    pp_hookfix.disable()
    stock = train()
    report: dict[str, Any] = {
        "schedule": name,
        "microbatches": microbatches,
        "hooks": _of_all_stages(rank, stock.hooks),
        "policies": {},
    }
    for policy in policies:
        pp_hookfix.enable(policy)
        mended = train()
        hooks = _of_all_stages(rank, mended.hooks)
        result = {
            "hooks": hooks,
            "hooks_constant": all(counts == [microbatches] * steps for counts in hooks.values()),
            "losses_equal": _on_all_ranks(rank, training.losses_equal(stock, mended)),
            "gradients_equal": _on_all_ranks(rank, training.gradients_equal(stock, mended)),
        }
        report["policies"][policy] = {**result, "ok": all(result.values())}
    report["ok"] = all(result["ok"] for result in report["policies"].values())
    return report


def _of_all_stages(rank: Rank, hooks: dict[int, list[int]]) -> dict[str, list[int]]:
    """Counts of every stage but the first, which receives nothing."""
    by_stage = {
        stage: counts for of_rank in gathered(rank, hooks) for stage, counts in of_rank.items()
    }
    return {str(stage): by_stage[stage] for stage in sorted(by_stage) if stage > 0}


def _on_all_ranks(rank: Rank, holds: bool) -> bool:
    return all(gathered(rank, holds))


def _counts(hooks: dict[str, list[int]]) -> str:
    return " ".join(map(str, max(hooks.values(), key=sum, default=[])))


def _verdict(reports: list[dict[str, Any]], statuses: dict[str, Any]) -> str:
    failed = [
        f"{report['schedule']} ({policy}, {statuses[policy].state})"
        for report in reports
        for policy, result in report["policies"].items()
        if not result["ok"]
    ]
    if not failed:
        return (
            "OK: hooks fire once per microbatch and step, "
            "and losses and gradients are equal to the last bit."
        )
    return f"FAILED: {', '.join(failed)}."


class _Lines:
    def __init__(self, rank: Rank, quiet: bool) -> None:
        self._out = None if quiet or rank.rank != 0 else rank.out

    def print(self, line: str) -> None:
        if self._out is not None:
            print(line, file=self._out, flush=True)

    def row(self, *columns: str, note: str = "") -> None:
        cells = [columns[0].ljust(24), *(column.ljust(16) for column in columns[1:-2])]
        cells += [columns[-2].ljust(8), columns[-1]]
        self.print(" ".join(cells).rstrip() + (f"  ({note})" if note else ""))
