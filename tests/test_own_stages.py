"""Stages of a user's own train as on stock torch under every policy, or get the one error.

All that is to be as on stock torch runs within one spawn (own_stage_runs.py). A rank
that gets the error takes the others with it, so that is a spawn of its own.
"""

from typing import Any

import own_stage_runs as runs
import pytest
import torch
from conftest import AFFECTED, BACKENDS, TORCH, full, once, spawned
from own_stage_kinds import KINDS, MICROBATCHES
from pipeline_habits import HABITS

from pp_hookfix.policies import AUDIT, POLICIES
from pp_hookfix.verification import ranks

RUNS = [*POLICIES, AUDIT, "switched"]

pytestmark = pytest.mark.skipif(
    not AFFECTED, reason=f"torch {torch.__version__} has no persistent receive buffers"
)


@once
def seen(backend: str, schedule: str) -> list[dict[str, Any]]:
    """What each of two ranks saw of every kind in a schedule."""
    return spawned(runs.every_kind, 2, backend, schedule=schedule)


@once
def seen_of_habits(backend: str) -> list[dict[str, Any]]:
    return spawned(runs.every_habit, 2, backend)


every_backend = pytest.mark.parametrize("backend", BACKENDS)
every_kind = pytest.mark.parametrize(
    ("kind", "schedule"),
    [
        pytest.param(kind, schedule, marks=() if schedule == "1F1B" else full)
        for kind in KINDS
        for schedule in runs.schedules_of(KINDS[kind])
    ],
)


@every_backend
@every_kind
@pytest.mark.parametrize("run", RUNS)
def test_every_kind_trains_as_on_stock_torch(
    backend: str, kind: str, schedule: str, run: str
) -> None:
    if KINDS[kind].shares and run == AUDIT and TORCH < (2, 10):
        pytest.skip(
            "what the audit runs is stock torch, whose gradients are wrong in a ring to 2.9"
        )
    for results in seen(backend, schedule):
        result = results[f"{kind}-{schedule}-{run}"]
        assert (result["losses"], result["gradients"], result["seen"]) == (True, True, True)


@every_backend
@every_kind
def test_what_it_saw_was_something(backend: str, kind: str, schedule: str) -> None:
    sees = sum(results[f"{kind}-{schedule}-fresh"]["sees"] for results in seen(backend, schedule))
    assert bool(sees) == KINDS[kind].sees


@every_backend
@every_kind
@pytest.mark.parametrize("policy", POLICIES)
def test_hooks_end_with_their_step_whoever_else_has_the_buffers(
    backend: str, kind: str, schedule: str, policy: str
) -> None:
    if KINDS[kind].shares or not KINDS[kind].is_in_reach:
        return
    for results in seen(backend, schedule):
        for stage, hooks in results[f"{kind}-{schedule}-{policy}"]["hooks"].items():
            if stage > 0:
                assert hooks == [MICROBATCHES] * runs.STEPS
        stock = results[f"Stage-{schedule}-stock"]["hooks"]
        assert all(
            hooks[-1] == MICROBATCHES * runs.STEPS for stage, hooks in stock.items() if stage > 0
        )


@every_backend
@pytest.mark.parametrize("habit", [habit.__name__ for habit in HABITS])
@pytest.mark.parametrize("run", RUNS)
def test_what_is_done_with_a_pipeline(backend: str, habit: str, run: str) -> None:
    for results in seen_of_habits(backend):
        if results[f"{habit}-{run}"] is None:
            pytest.skip("fewer_microbatches: eval() from torch 2.9 on; other_lengths: from 2.6 on")
        assert results[f"{habit}-{run}"] is True


def test_what_is_gone_under_fresh_alone() -> None:
    """Reading what the last step left, from outside of the stage's own class."""
    found = spawned(runs.read, 2, "gloo", policies=["detach", "clone"])
    same = {"losses": True, "gradients": True, "seen": True}
    assert found == [{"None": same, "detach": same, "clone": same}] * 2


def test_what_is_gone_is_named() -> None:
    outcome = ranks.start(runs.read, 2, "gloo", timeout=60, policies=["fresh"])
    assert outcome.exit_status == ranks.RANK_FAILED
    errors = [line for log in outcome.logs for line in log.splitlines() if "Refused: " in line]
    assert errors
    for error in errors:
        assert error.startswith("pp_hookfix.policies.Refused: pp_hookfix: a stage's receive buffer")
        assert "under the policy fresh " in error
        assert error.endswith("Use PP_HOOKFIX=detach or clone.")
