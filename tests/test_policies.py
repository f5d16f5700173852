"""The three policies: every cell of the table in pp_hookfix/policies.py, on every schedule."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

import policy_scenarios as scenarios
import pytest
import torch
from conftest import AFFECTED, BACKENDS_AND_RANKS, TORCH, spawned
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from recv_buffer_scenarios import FRONTENDS

from pp_hookfix.policies import POLICIES
from pp_hookfix.verification import ranks as ranks_module
from pp_hookfix.verification import schedules

STEPS = scenarios.STEPS
EQUAL = {"losses": True, "gradients": True}
every_schedule = pytest.mark.parametrize("name", schedules.available())
every_policy = pytest.mark.parametrize("policy", list(POLICIES))
affected = pytest.mark.skipif(
    not AFFECTED, reason=f"torch {torch.__version__} has no persistent receive buffers"
)


@pytest.fixture(scope="module", params=BACKENDS_AND_RANKS)
def seen(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank of a backend and number of ranks saw."""
    backend, ranks = request.param
    return spawned(scenarios.run, ranks, backend)


def stages(seen: list[dict[str, Any]], name: str, policy: Any) -> list[dict[str, Any]]:
    """What became of every stage of a schedule, in the order of their indices."""
    by_index = {
        index: {
            **stage,
            "microbatches": results["every_policy"][f"{name}-{policy}"]["microbatches"],
        }
        for results in seen
        for index, stage in results["every_policy"][f"{name}-{policy}"]["stages"].items()
    }
    assert len(by_index) == schedules.number_of_stages(name, len(seen))
    return [by_index[index] for index in sorted(by_index)]


@every_schedule
def test_fresh_takes_all_that_torchs_own_stages_are_handed(
    seen: list[dict[str, Any]], name: str
) -> None:
    for results in seen:
        assert results["every_policy"][f"{name}-copies"] == []


@every_schedule
@every_policy
def test_hooks_end_with_their_step(seen: list[dict[str, Any]], name: str, policy: str) -> None:
    for stage in stages(seen, name, policy)[1:]:
        assert stage["hooks"] == [stage["microbatches"]] * STEPS


@every_schedule
@every_policy
def test_losses_and_gradients_are_those_of_stock_torch(
    seen: list[dict[str, Any]], name: str, policy: str
) -> None:
    for results in seen:
        assert results["every_policy"][f"{name}-{policy}"]["equal"] == EQUAL


@pytest.mark.parametrize("policy", ["clone", "fresh"])
@pytest.mark.parametrize(
    ("name", "frontend"),
    [(name, frontend) for name in schedules.available() for frontend in FRONTENDS],
)
def test_every_front_end(seen: list[dict[str, Any]], name: str, frontend: str, policy: str) -> None:
    once_more = int(frontend == "inferred" and TORCH >= (2, 12))
    for results in seen:
        result = results["every_frontend"][f"{name}-{frontend}-{policy}"]
        assert result["equal"] == EQUAL
        steps = 5
        for leaks in result["leaks"].values():
            constant = [result["microbatches"]] * steps
            constant[0] += once_more
            assert leaks["register_hook"] == constant
            assert leaks["attribute"] == [0] * steps
            assert leaks["grad"] == [0] * steps


def moved(stage: dict[str, Any]) -> int:
    """Inputs that arrived at a stage over the process group, in all steps."""
    return 0 if stage["turn"][0] else stage["inputs"]


@affected
@every_schedule
@every_policy
def test_data_copies(seen: list[dict[str, Any]], name: str, policy: str) -> None:
    for stage in stages(seen, name, policy)[1:]:
        if policy == "clone":
            # What a neighbour on the same rank hands over is not copied, nor received.
            assert stage["handed_out_of_posted"] == 0
        else:
            assert stage["handed_out_of_posted"] == moved(stage)


@affected
@every_schedule
@every_policy
def test_memory_of_the_receive_buffers(seen: list[dict[str, Any]], name: str, policy: str) -> None:
    for index, stage in enumerate(found := stages(seen, name, policy)):
        from_previous = index > 0 and not stage["turn"][0]
        from_next = index < len(found) - 1 and not stage["turn"][1]
        buffers = stage["microbatches"] * (from_previous + from_next)
        assert stage["receives"] == buffers * STEPS
        if policy == "fresh":
            # Everything is kept here, so no address can come a second time.
            assert stage["posted_addresses"] == stage["receives"]
            assert stage["alive_is_in_flight"]
            assert stage["alive"][1] == stage["most_in_flight"]
        else:
            assert stage["posted_addresses"] == buffers
            assert stage["alive"] == (buffers, buffers)


@every_schedule
@every_policy
@pytest.mark.parametrize("kept", ["inputs", "gradients", "retained"])
def test_what_is_kept_across_steps(
    seen: list[dict[str, Any]], name: str, policy: str, kept: str
) -> None:
    for index, stage in enumerate(found := stages(seen, name, policy)):
        other = index - 1 if kept == "inputs" else index + 1
        assert stage[kept] == (stage["microbatches"] * STEPS if 0 <= other < len(found) else 0)
        received = bool(stage[kept]) and not stage["turn"][0 if kept == "inputs" else 1]
        # What retain_grad() keeps is a copy of torch's own.
        if AFFECTED and policy == "detach" and received and kept != "retained":
            assert stage[f"{kept}_overwritten"] == stage["microbatches"] * (STEPS - 1)
        else:
            assert stage[f"{kept}_overwritten"] == 0


@affected
@every_schedule
def test_stock_torch_overwrites_what_is_kept(seen: list[dict[str, Any]], name: str) -> None:
    for index, stage in enumerate(found := stages(seen, name, None)):
        all_but_the_last_step = stage["microbatches"] * (STEPS - 1)
        if index > 0 and not stage["turn"][0]:
            assert stage["inputs_overwritten"] == all_but_the_last_step
            assert stage["hooks"] == [stage["microbatches"] * (step + 1) for step in range(STEPS)]
        if index < len(found) - 1 and not stage["turn"][1]:
            assert stage["gradients_overwritten"] == all_but_the_last_step


@every_policy
def test_dtensors_between_stages(seen: list[dict[str, Any]], policy: str) -> None:
    if seen[0]["dtensor_boundaries"] is None:
        pytest.skip("DTensors pass between stages from torch 2.12 on")
    for results in seen:
        assert results["dtensor_boundaries"][policy]["equal"] == EQUAL
    for results in seen[1:]:
        assert results["dtensor_boundaries"][policy]["kept"] == 4 * STEPS
        overwritten = 4 * (STEPS - 1) if AFFECTED and policy == "detach" else 0
        assert results["dtensor_boundaries"][policy]["overwritten"] == overwritten


@pytest.mark.skipif(not AFFECTED, reason="no persistent receive buffers")
def test_dtensors_that_are_kept_are_seen_by_the_audit(seen: list[dict[str, Any]]) -> None:
    if seen[0]["dtensor_boundaries"] is None:
        pytest.skip("DTensors pass between stages from torch 2.12 on")
    for results in seen:
        audited = results["dtensor_boundaries"]["audit"]
        assert audited["equal"] == EQUAL
        (stage,) = audited["found"]
        found = sum(one["count"] for one in stage["kept_inputs"])
        assert found == results["dtensor_boundaries"]["None"]["overwritten"]
        assert found == (4 * (STEPS - 1) if stage["stage"] > 0 else 0)
        assert stage["hooks"] == stage["kept_gradients"] == stage["attributes"] == []


@every_policy
def test_gradients_that_do_not_exist(seen: list[dict[str, Any]], policy: str) -> None:
    if seen[0]["missing_gradients"] is None:
        pytest.skip("a missing gradient is a zero one from torch 2.13 on")
    for results in seen:
        found = results["missing_gradients"][policy]
        assert found["equal"] == EQUAL
        # Zeroed in place, in every other step, where they are not handed over.
        assert found["overwritten"] == (
            found["kept"] // 2 if AFFECTED and policy == "detach" else 0
        )
    assert seen[-1]["missing_gradients"][policy]["kept"] == scenarios.MICROBATCHES * STEPS


def test_every_policy_after_every_other(seen: list[dict[str, Any]]) -> None:
    for results in seen:
        assert set(map(str, results["switched_in_use"].values())) == {str(EQUAL)}


# --- any sequence of what a user may do


@pytest.fixture(scope="module")
def run_program(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[list[Any]], list[Any]]]:
    """Runs a program on two ranks that stay up; see policy_scenarios.serve."""
    folder = tmp_path_factory.mktemp("programs")
    outcomes: list[ranks_module.Outcome] = []

    def start() -> None:
        outcomes.append(
            ranks_module.start(scenarios.serve, 2, "gloo", timeout=60, folder=str(folder))
        )

    thread = threading.Thread(target=start)
    thread.start()
    asked = 0

    def ask(steps: Any) -> int:
        nonlocal asked
        part = folder / f"{asked}.part"
        part.write_text(json.dumps(steps))
        part.rename(folder / f"{asked}.json")
        asked += 1
        return asked - 1

    def run(steps: list[Any]) -> list[Any]:
        number = ask(steps)
        answers = [Path(folder, f"{number}-{rank}.json") for rank in range(2)]
        while not all(answer.exists() for answer in answers):
            if not thread.is_alive():
                pytest.fail("\n".join(outcomes[0].logs), pytrace=False)
            time.sleep(0.002)
        return [json.loads(answer.read_text()) for answer in answers]

    yield run
    ask(None)
    thread.join(120)


ACTIONS = st.one_of(
    st.just(("train", "")),
    st.tuples(st.just("policy"), st.sampled_from([*POLICIES, "off"])),
    st.tuples(st.just("hooks"), st.sampled_from(["on", "off"])),
    *(
        [st.tuples(st.just("eval"), st.sampled_from(["", "no_grad", "inference_mode"]))]
        if TORCH >= (2, 9)
        else []
    ),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(ACTIONS, min_size=1, max_size=12))
def test_gradients_are_stocks_whatever_a_user_does(
    run_program: Callable[[list[Any]], list[Any]], actions: list[tuple[str, str]]
) -> None:
    steps = list(as_stock_torch_can([("train", ""), *actions, ("train", "")]))
    first, second = run_program(steps)
    assert first["equal"]
    assert second["equal"]
    assert len(second["counts"]) == trained_with_hooks(steps)
    if not AFFECTED:
        assert set(second["counts"]) <= {4}
        return
    # Once per microbatch in every step under a policy. Under stock torch in between, hooks
    # pile up on the receive buffers, and may be met there again by stock torch alone.
    policies_of_hooked_steps = list(hooked_steps(steps))
    for policy, count in zip(policies_of_hooked_steps, second["counts"]):
        if policy != "off":
            assert count == 4


def as_stock_torch_can(steps: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Without what stock torch fails at.

    Its receive buffers are made when the mode changes, in inference mode if that
    is on then; an eval in grad mode cannot use them before the next training step.
    """
    made_in_inference_mode = False
    for action, argument in steps:
        if action == "train":
            made_in_inference_mode = False
        elif action == "eval" and argument == "inference_mode":
            made_in_inference_mode = True
        elif action == "eval" and argument == "" and made_in_inference_mode:
            yield action, "no_grad"
            continue
        yield action, argument


def hooked_steps(steps: list[tuple[str, str]]) -> Iterator[str]:
    policy, hooked = "off", False
    for action, argument in steps:
        if action == "policy":
            policy = argument
        elif action == "hooks":
            hooked = argument == "on"
        elif action == "train" and hooked:
            yield policy


def trained_with_hooks(steps: list[tuple[str, str]]) -> int:
    return len(list(hooked_steps(steps)))
