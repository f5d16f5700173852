"""What the ranks of test_own_stages.py run: every kind and every habit, within one spawn each.

Trained on stock torch, under every policy and the audit, and from each to each.
"""

from collections.abc import Sequence
from typing import Any, Optional

import torch
from own_stage_kinds import KINDS, MICROBATCHES, IsReadBetweenSteps, Kind, Stage
from pipeline_habits import HABITS, Policies
from recv_buffer_scenarios import equal, switch

from pp_hookfix.policies import AUDIT, POLICIES
from pp_hookfix.verification import schedules, training
from pp_hookfix.verification.ranks import Rank
from pp_hookfix.verification.training import InputHooks, Record

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B")
# Policies by step: each after each other, and stock torch between.
SWITCHED = (None, "fresh", "fresh", None, "clone", "fresh", "detach", "fresh", "clone", "detach")
STEPS = len(SWITCHED)


def own_stages(rank: Rank, kind: type[Stage], name: str) -> list[Any]:
    stages = training.make_stages(name, rank.rank, rank.ranks, rank.device)
    for stage in stages:
        stage.__class__ = type(kind.__name__, (kind, type(stage)), {})
        stage.own()
    return stages


def train(
    rank: Rank, kind: type[Stage], name: str, by_step: Policies, hooks: Any = InputHooks
) -> tuple[Record, list[torch.Tensor]]:
    """Train stages of a kind; the record, and what they saw."""
    switch(by_step[0] or False)
    stages = own_stages(rank, kind, name)

    def begin(step: int) -> None:
        for stage in stages:
            stage.begin_step(step, lambda: switch(by_step[step] or False))

    schedule = schedules.build(name, stages, MICROBATCHES, training.summed_error)
    record = training.run_steps(
        schedule, stages, len(by_step), MICROBATCHES, rank.device, hooks, begin
    )
    return record, [tensor for stage in stages for tensor in stage.seen]


def runs(with_stock: bool = True) -> dict[str, Policies]:
    """Policies by step: stock torch, every policy, and all in turn."""
    by_step: dict[str, Policies] = {policy: (policy,) * STEPS for policy in (*POLICIES, AUDIT)}
    if with_stock:
        return {"stock": (None,) * STEPS, **by_step, "switched": SWITCHED}
    return {**by_step, "switched": tuple(policy or "detach" for policy in SWITCHED)}


def schedules_of(kind: Kind) -> tuple[str, ...]:
    return ("1F1B",) if kind.shares else SCHEDULES


def every_kind(rank: Rank, schedule: str) -> dict[str, Any]:
    """Kinds by policies in a schedule, compared with stock torch."""
    results: dict[str, Any] = {}
    for kind_name, kind in KINDS.items():
        for name in {schedule} & {*schedules_of(kind)}:
            hooks = None if kind.shares else InputHooks
            stock: Any = train(rank, Stage, name, (None,) * STEPS, None) if hooks is None else None
            for run_name, by_step in runs(with_stock=hooks is not None).items():
                with rank.time_limit(f"{kind_name}, {name}, {run_name}"):
                    record, seen = train(rank, kind.stage, name, by_step, hooks)
                stock = stock or (record, seen)
                results[f"{kind_name}-{name}-{run_name}"] = {
                    **equal(stock[0], record),
                    "seen": same(stock[1], seen),
                    "sees": len(seen),
                    "hooks": record.hooks,
                }
    return results


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def every_habit(rank: Rank) -> dict[str, Any]:
    """What is equal to stock torch's, by habit and policies; None where torch cannot."""
    results: dict[str, Any] = {}
    for habit in HABITS:
        stock: Optional[list[torch.Tensor]] = None
        for name, by_step in runs().items():
            with rank.time_limit(f"{habit.__name__}, {name}"):
                found = habit(rank, by_step)
            stock = found if stock is None else stock
            results[f"{habit.__name__}-{name}"] = (
                None if stock is None or found is None else bool(found) and same(stock, found)
            )
    return results


def read(rank: Rank, policies: Sequence[str]) -> dict[str, Any]:
    """Train a stage that is read from outside, under stock torch and some policies."""
    found: dict[str, Any] = {}
    stock: Any = None
    for policy in (None, *policies):
        with rank.time_limit(f"read, {policy}"):
            record, seen = train(rank, IsReadBetweenSteps, "Interleaved1F1B", (policy,) * 4)
        stock = stock or (record, seen)
        found[str(policy)] = {**equal(stock[0], record), "seen": same(stock[1], seen)}
    return found
