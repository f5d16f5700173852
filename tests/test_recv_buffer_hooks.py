"""The regression test: what piles up on stage inputs without the fix, and does not with it.

All scenarios of one backend and number of ranks run within one spawn
(recv_buffer_scenarios.py); the tests assert on what its ranks saw.
"""

from typing import Any

import pytest
import recv_buffer_scenarios as scenarios
import torch
from conftest import AFFECTED, BACKENDS_AND_RANKS, TORCH, spawned

from pp_hookfix.verification import schedules

STEPS = scenarios.STEPS
# These compute an input's gradient apart from the weights', with
# torch.autograd.grad, which accumulates nothing: post-accumulate hooks then
# never fire (DualPipeV: for some microbatches), and torch sets `.grad` itself.
SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble")


@pytest.fixture(scope="module", params=BACKENDS_AND_RANKS)
def seen(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank of a backend and number of ranks saw."""
    backend, ranks = request.param
    return spawned(scenarios.run, ranks, backend)


def stages(seen: list[dict[str, Any]], pipeline: str) -> list[tuple[int, int, Any, Any]]:
    """(stage, microbatches, leaks without, leaks with) of every stage but the first."""
    return [
        (int(stage), of_rank["microbatches"], leaks, of_rank["with"][stage])
        for of_rank in (results["every_schedule"][pipeline] for results in seen)
        for stage, leaks in of_rank["without"].items()
    ]


def fed_by_its_own_rank(name: str, stage: int, ranks: int) -> bool:
    """The stage at a V schedule's turn, where it is handed a new tensor each time."""
    return scenarios.hands_over(name) and stage == ranks


def piled_up(per_step: int) -> list[int]:
    return [per_step * step for step in range(1, STEPS + 1)]


every_pipeline = pytest.mark.parametrize(
    ("name", "frontend"),
    [(name, frontend) for name in schedules.available() for frontend in scenarios.FRONTENDS],
)


@every_pipeline
def test_tensor_hooks(seen: list[dict[str, Any]], name: str, frontend: str) -> None:
    # Metadata inference runs the module once more, with and without the fix.
    once_more = int(frontend == "inferred" and TORCH >= (2, 12))
    found = stages(seen, f"{name}-{frontend}")
    assert len(found) == schedules.number_of_stages(name, len(seen)) - 1
    for stage, microbatches, without, fixed in found:
        constant = [microbatches] * STEPS
        constant[0] += once_more
        pile = piled_up(microbatches)
        pile[0] += once_more
        leaks = AFFECTED and not fed_by_its_own_rank(name, stage, len(seen))
        assert without["register_hook"] == (pile if leaks else constant)
        assert fixed["register_hook"] == constant


@every_pipeline
def test_post_accumulate_grad_hooks(seen: list[dict[str, Any]], name: str, frontend: str) -> None:
    for stage, microbatches, without, fixed in stages(seen, f"{name}-{frontend}"):
        per_step = fixed["register_post_accumulate_grad_hook"][0]
        if name in SPLIT_BACKWARD:
            assert per_step == 0
        elif name == "DualPipeV":
            assert 0 < per_step < microbatches
        else:
            assert per_step == microbatches
        leaks = AFFECTED and not fed_by_its_own_rank(name, stage, len(seen))
        assert without["register_post_accumulate_grad_hook"] == (
            piled_up(per_step) if leaks else [per_step] * STEPS
        )
        assert fixed["register_post_accumulate_grad_hook"] == [per_step] * STEPS


@every_pipeline
def test_attributes(seen: list[dict[str, Any]], name: str, frontend: str) -> None:
    for stage, microbatches, without, fixed in stages(seen, f"{name}-{frontend}"):
        leaks = AFFECTED and not fed_by_its_own_rank(name, stage, len(seen))
        assert without["attribute"] == [0, *[microbatches * leaks] * (STEPS - 1)]
        assert fixed["attribute"] == [0] * STEPS


@every_pipeline
def test_grad_left_on_the_receive_buffer(
    seen: list[dict[str, Any]], name: str, frontend: str
) -> None:
    for _, microbatches, without, fixed in stages(seen, f"{name}-{frontend}"):
        if AFFECTED and name in SPLIT_BACKWARD:
            assert without["grad"] == [microbatches] * STEPS
        assert fixed["grad"] == [0] * STEPS


@every_pipeline
def test_losses_and_gradients_are_those_of_stock_torch(
    seen: list[dict[str, Any]], name: str, frontend: str
) -> None:
    for results in seen:
        assert results["every_schedule"][f"{name}-{frontend}"]["equal"] == {
            "losses": True,
            "gradients": True,
        }


@pytest.mark.parametrize("name", schedules.available())
def test_nothing_changes_where_nobody_hooks(seen: list[dict[str, Any]], name: str) -> None:
    for results in seen:
        assert results["without_hooks"][name] == {"losses": True, "gradients": True}


def test_switching_between_steps(seen: list[dict[str, Any]]) -> None:
    for rank, results in enumerate(seen[1:], 1):
        # Stock, stock, fixed, fixed, stock: the hooks of the stock steps stay on the buffer.
        expected = [4, 8, 4, 4, 12] if AFFECTED else [4] * 5
        assert results["switched_between_steps"] == expected, rank


@pytest.mark.parametrize("scenario", ["frozen", "compiled", "checkpointed", "ddp", "fully_shard"])
def test_wrapped_stages(seen: list[dict[str, Any]], scenario: str) -> None:
    if scenario not in seen[0]:
        pytest.skip("2 x 2 ranks: runs with 4 ranks; fully_shard on the CPU from torch 2.7 on")
    for results in seen:
        result = results[scenario]
        assert result["equal"] == {"losses": True, "gradients": True}
        if result["stage"] > 0:
            assert result["without"] == (piled_up(4) if AFFECTED else [4] * STEPS)
            assert result["with"] == [4] * STEPS
        # Only the frozen last stage trains nothing.
        frozen = scenario == "frozen" and result["stage"] == len(seen) - 1
        assert bool(result["trained"]) != frozen


def test_compiled_stage_is_compiled_in_the_first_step_alone(seen: list[dict[str, Any]]) -> None:
    for results in seen:
        assert results["compiled"]["graphs"] == [1] * STEPS


@pytest.mark.parametrize(("scenario", "per_step"), [("two_inputs", 8), ("integer_input", 4)])
def test_several_inputs(seen: list[dict[str, Any]], scenario: str, per_step: int) -> None:
    if scenario not in seen[0]:
        pytest.skip("two stages: runs with 2 ranks; an integer passes from torch 2.13 on")
    result = seen[1][scenario]
    assert result["without"] == (piled_up(per_step) if AFFECTED else [per_step] * STEPS)
    assert result["with"] == [per_step] * STEPS
    assert all(
        results[scenario]["equal"] == {"losses": True, "gradients": True} for results in seen
    )


def test_what_a_hook_holds_is_freed_after_its_step(seen: list[dict[str, Any]]) -> None:
    for results in seen[1:]:
        without, fixed = results["freed"]["without"], results["freed"]["with"]
        # Up to 2.7 torch itself holds a middle stage's outputs until the next step.
        assert fixed in ([0] * STEPS, [4] * STEPS if TORCH < (2, 8) else [0] * STEPS)
        assert without == (piled_up(4) if AFFECTED else [0] * STEPS)


def test_train_eval_no_grad_inference_mode_train(seen: list[dict[str, Any]]) -> None:
    if seen[0]["modes"] is None:
        pytest.skip(f"torch {torch.__version__} has no schedule.eval()")
    for results in seen:
        assert results["modes"]["equal"]
    for results in seen[1:]:
        # eval() runs in grad mode and calls no backward; the buffers of 2.9 - 2.11 keep
        # requiring grad, those of later releases are made anew when the mode changes.
        assert results["modes"]["with"] == [4, 0, 0, 0, 4, 4]
