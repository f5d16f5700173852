"""``pp-hookfix audit`` against the truth: what stock torch really does in the same job.

The jobs run within one spawn (audit_jobs.py), each way of audit_ways.py on stock torch, under
audit and under each policy.
"""

from collections.abc import Iterator
from typing import Any

import audit_jobs as jobs
import audit_ways
import pytest
import torch
from audit_jobs import MICROBATCHES, STEPS
from audit_ways import POST, WAYS
from conftest import AFFECTED, BACKENDS, TORCH, full, once, spawned

from pp_hookfix.audit import report
from pp_hookfix.policies import AUDIT, POLICIES
from pp_hookfix.verification import schedules

pytestmark = pytest.mark.skipif(
    not AFFECTED, reason=f"torch {torch.__version__} has no persistent receive buffers"
)
KEPT = {"input": "kept_inputs", "gradient": "kept_gradients"}
# From torch 2.10 on, whether what a graph has saved would run a hook of the user's.
TELLS_OF_UNPACK_HOOKS = hasattr(torch._C._autograd.SavedTensor, "unpack_hook")
# What counts on a tensor's identity, or on the fault, does otherwise where each step has a
# tensor of its own, as on torch 2.15.
RELIES_ON_THE_FAULT = ("registers_in_the_first_step", "registers_once_for_each_tensor")


def has_buffers_anew(name: str) -> bool:
    """Whether torch makes the receive buffers again between steps: then nothing piles up."""
    return "evaluates between" in WAYS[name].options and TORCH >= (2, 12)


def every_job(test: Any) -> Any:
    """By backend, schedule and way: those of 1F1B by default."""
    matrix = [
        *((schedule, way) for schedule in jobs.SCHEDULES for way in jobs.of(schedule)),
        *(("traced", way) for way in jobs.TRACED),
    ]
    params = [pytest.param(*job, marks=() if job[0] == "1F1B" else full) for job in matrix]
    of_each = pytest.mark.parametrize(("where", "name"), params)
    return pytest.mark.parametrize("backend", BACKENDS)(of_each(test))


@once
def seen(backend: str, where: str) -> list[dict[str, Any]]:
    """What each of two ranks saw of every way."""
    return spawned(jobs.run, 2, backend, where=where)


def of_job(backend: str, where: str, name: str) -> list[dict[str, Any]]:
    """What each rank saw of one job."""
    if name not in seen(backend, where)[0]:
        pytest.skip(f"this torch has no {where}")
    return [results[name] for results in seen(backend, where)]


def microbatches_of(where: str) -> int:
    return schedules.microbatches_of("GPipe" if where == "traced" else where, 2, MICROBATCHES)


def stages(results: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What was found at each stage, with what was seen by its rank."""
    for result in results:
        for found in result["found"]:
            yield found, result


@every_job
def test_it_is_the_job_of_stock_torch(backend: str, where: str, name: str) -> None:
    for result in of_job(backend, where, name):
        assert result["state"] == "patched", "nothing of the audit's has failed"
        audited = dict(result[AUDIT])
        assert audited.pop("equal"), "losses and gradients"
        assert audited == result["stock"]


@every_job
def test_hooks_are_those_that_stock_torch_fires(backend: str, where: str, name: str) -> None:
    way = WAYS[name]
    for found, result in stages(of_job(backend, where, name)):
        stays = found["stage"] in result["receiving"] and not has_buffers_anew(name)
        if not way.hooks or not stays:
            assert found["hooks"] == []
            continue
        (hook,) = found["hooks"]
        assert hook["on_stock_in_last_step"] == result["stock"]["fired"][found["stage"]][-1]
        assert hook["per_step"] == way.hooks * microbatches_of(where)
        assert (hook["kind"], hook["changes_gradient"]) == (way.kind, way.changes)
        place, _, function = hook["where"].partition(" ")
        assert function == way.name
        file, _, line = place.rpartition(":")
        assert file == audit_ways.__file__
        with open(file, encoding="utf-8") as source:
            assert "hook(" in source.readlines()[int(line) - 1]


@every_job
def test_kept_is_what_stock_torch_overwrites(backend: str, where: str, name: str) -> None:
    way = WAYS[name]
    for found, result in stages(of_job(backend, where, name)):
        direction = ["receiving", "sending"][way.kept == "gradient"]
        # Stages that are handed a neighbour's own tensor keep that.
        overwritten = result["stock"]["changed"][found["stage"]]
        assert overwritten == (
            (STEPS - 1) * microbatches_of(where)
            if way.needs == "clone or fresh" and found["stage"] in result[direction]
            else 0
        )
        assert sum(one["count"] for key in KEPT.values() for one in found[key]) == overwritten
        for one in found[KEPT[way.kept]]:
            assert (one["since_step"], one["shape"]) == (1, [2, 8])
            for words in way.held_by:
                if words.startswith("the autograd graph of") and not TELLS_OF_UNPACK_HOOKS:
                    words = "something that Python does not show"
                assert words in one["held_by"]
            assert " at 0x" not in one["held_by"]


@every_job
def test_the_verdict(backend: str, where: str, name: str) -> None:
    way = WAYS[name]
    found = [{"run": 1, **one} for one, _ in stages(of_job(backend, where, name))]
    needs = "nothing" if has_buffers_anew(name) else way.needs
    assert report._needs([], found) == (None if needs == "unknown" else needs)
    said = " ".join(words for one in found for words in one["not_looked_at"])
    assert bool(said) == bool(way.not_looked_at)
    assert way.not_looked_at in said


@every_job
def test_attributes(backend: str, where: str, name: str) -> None:
    for found, result in stages(of_job(backend, where, name)):
        has = WAYS[name].attributes if found["stage"] in result["receiving"] else ()
        assert found["attributes"] == sorted(has)


@every_job
@pytest.mark.parametrize("policy", POLICIES)
def test_every_way_ends_with_its_step(backend: str, where: str, name: str, policy: str) -> None:
    """What the verdict promises, of each policy."""
    way = WAYS[name]
    for result in of_job(backend, where, name):
        under = result[policy]
        assert under["equal"] or way.changes
        assert set(under["met"].values()) <= {0}
        for stage, changed in under["changed"].items():
            stays = policy == "detach" and way.needs == "clone or fresh"
            assert changed == (result["stock"]["changed"][stage] if stays else 0)
        if name not in RELIES_ON_THE_FAULT:
            for stage, fired in under["fired"].items():
                # As many as were put on; in the first step that is so on stock torch, too.
                assert fired == [result["stock"]["fired"][stage][0]] * STEPS


@every_job
def test_memory_that_hooks_hold(backend: str, where: str, name: str) -> None:
    for found, result in stages(of_job(backend, where, name)):
        if name != "holds_memory":
            assert found["pinned_bytes_per_step"] == 0
            continue
        step = 1000 * microbatches_of(where) if found["stage"] in result["receiving"] else 0
        assert found["pinned_bytes_per_step"] == step
        assert found["pinned_bytes_on_stock_by_last_step"] == STEPS * step


def test_the_rows_are_different() -> None:
    """So that a way which is added is one that was not there."""
    assert {way.kind for way in WAYS.values()} >= {POST, audit_ways.NODE, audit_ways.NODE_BEFORE}
    assert len({way.do for way in WAYS.values()}) == len(WAYS)


@full
def test_on_four_ranks() -> None:
    for results in spawned(jobs.run_on_four, 4, "gloo"):
        for job, result in results.items():
            assert result[AUDIT]["equal"], job
            for found in result["found"]:
                stage = found["stage"]
                kept = sum(one["count"] for key in KEPT.values() for one in found[key])
                assert kept == result["stock"]["changed"][stage], job
                fired = sum(hook["on_stock_in_last_step"] for hook in found["hooks"])
                assert fired == result["stock"]["fired"][stage][-1], job
