"""``pp-hookfix audit`` against the truth: what stock torch really does in the same job.

The jobs run within one spawn (audit_scenarios.py), each on stock torch and under audit.
"""

from typing import Any

import audit_scenarios as scenarios
import pytest
import torch
from audit_scenarios import HABITS, MICROBATCHES, STEPS
from conftest import AFFECTED, spawned

from pp_hookfix.audit import report
from pp_hookfix.verification import schedules

pytestmark = pytest.mark.skipif(
    not AFFECTED, reason=f"torch {torch.__version__} has no persistent receive buffers"
)
KEPT = ("kept_inputs", "kept_gradients")

every_job = pytest.mark.parametrize(
    ("where", "habit"),
    [
        *((name, habit) for name in scenarios.SCHEDULES for habit in scenarios.of(name)),
        *(("traced", habit) for habit in scenarios.TRACED),
    ],
)


@pytest.fixture(scope="module", params=["gloo", "nccl"])
def seen(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    return spawned(scenarios.run, 2, request.param)


def of_job(seen: list[dict[str, Any]], where: str, habit: str) -> list[dict[str, Any]]:
    """What each rank saw of one job."""
    if f"{where}-{habit}" not in seen[0]:
        pytest.skip(f"this torch has no {where}")
    return [results[f"{where}-{habit}"] for results in seen]


def total(found: list[dict[str, Any]], key: str, number: str) -> int:
    return sum(one[number] for stage in found for one in stage[key])


@every_job
def test_it_trains_as_on_stock_torch(seen: list[dict[str, Any]], where: str, habit: str) -> None:
    assert [result["equal"] for result in of_job(seen, where, habit)] == [True, True]


@every_job
def test_hooks_are_those_that_stock_torch_fires(
    seen: list[dict[str, Any]], where: str, habit: str
) -> None:
    for result in of_job(seen, where, habit):
        hooks = [hook for stage in result["found"] for hook in stage["hooks"]]
        if HABITS[habit].hooks:
            assert total(result["found"], "hooks", "on_stock_in_last_step") == result["fired"]
            microbatches = schedules.microbatches_of(
                "GPipe" if where == "traced" else where, 2, MICROBATCHES
            )
            assert len(hooks) == len(result["receiving"])
            for hook in hooks:
                assert hook["per_step"] == HABITS[habit].hooks * microbatches
                file, _, rest = hook["where"].partition(":")
                assert file == scenarios.__file__
                assert rest.split(" ", 1)[1] == HABITS[habit].name  # type: ignore[attr-defined]
                with open(file) as source:
                    registers = source.readlines()[int(rest.split()[0]) - 1]
                assert "hook(" in registers
                assert hook["kind"].startswith("post") == HABITS[habit].post_accumulate
        else:
            assert hooks == []


@every_job
def test_kept_is_what_stock_torch_overwrites(
    seen: list[dict[str, Any]], where: str, habit: str
) -> None:
    for result in of_job(seen, where, habit):
        found = {key: total(result["found"], key, "count") for key in KEPT}
        assert sum(found.values()) == result["changed"]
        for key in KEPT:
            assert not found[key] or key == f"kept_{HABITS[habit].direction}s"  # type: ignore[attr-defined]
            for one in (one for stage in result["found"] for one in stage[key]):
                assert one["since_step"] == 1
                assert one["shape"] == [2, 8]
                assert "attribute `kept` of Job" in one["held_by"]


@every_job
def test_the_verdict(seen: list[dict[str, Any]], where: str, habit: str) -> None:
    stages = [stage for result in of_job(seen, where, habit) for stage in result["found"]]
    assert report._needs([], stages) == HABITS[habit].needs


@pytest.mark.parametrize("name", scenarios.SCHEDULES)
def test_memory_that_hooks_hold(seen: list[dict[str, Any]], name: str) -> None:
    for result in of_job(seen, name, "HooksHoldMemory"):
        for stage in result["found"]:
            if stage["stage"] in result["receiving"]:
                step = scenarios.HooksHoldMemory.pinned * schedules.microbatches_of(
                    name, 2, MICROBATCHES
                )
                assert stage["pinned_bytes_per_step"] == step
                (hook,) = stage["hooks"]
                # Stock torch hands a neighbour's output on the same rank over as it is.
                is_received = hook["on_stock_in_last_step"] > hook["per_step"]
                in_the_end = stage["pinned_bytes_on_stock_by_last_step"]
                assert in_the_end == (STEPS * step if is_received else in_the_end)
            else:
                assert stage["pinned_bytes_per_step"] == 0


def test_attributes(seen: list[dict[str, Any]]) -> None:
    for result in of_job(seen, "1F1B", "Attributes"):
        for stage in result["found"]:
            has = stage["stage"] in result["receiving"]
            assert stage["attributes"] == (["seen_in_step"] if has else [])


def test_on_four_ranks() -> None:
    for results in spawned(scenarios.run_on_four, 4, "gloo"):
        for job, result in results.items():
            assert result["equal"], job
            found = result["found"]
            assert sum(total(found, key, "count") for key in KEPT) == result["changed"], job
            assert total(found, "hooks", "on_stock_in_last_step") == result["fired"], job
            if job.endswith("-KeepsGradient"):
                receives = {stage["stage"] for stage in found if stage["kept_gradients"]}
                assert receives == set(result["sending"])
            if job.endswith("-KeepsInput"):
                receives = {stage["stage"] for stage in found if stage["kept_inputs"]}
                assert receives == set(result["receiving"])
