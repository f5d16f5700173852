"""Which torch is patched, which needs nothing, and which is left alone with a warning."""

import inspect
import re
import types
from pathlib import Path
from typing import Any, get_args

import pytest
import stand_in

import pp_hookfix
from pp_hookfix.decision import State, Status, decide
from pp_hookfix.policies import POLICIES

PERSISTENT = stand_in.STAGE
JUST_IN_TIME = """
class _RecvInfo:
    def __init__(self, input_name, source, tensor_meta, *, is_root_arg=False):
        self.buffer = None

    def take_buffer(self):
        buffer, self.buffer = self.buffer, None
        return buffer


class _PipelineStageBase:
    def _retrieve_recv_activations(self, fwd_chunk_id):
        return tuple(info.take_buffer() for info in self.args_recv_info[fwd_chunk_id])
"""
AFFECTED_RELEASES = [
    *("2.4.0", "2.4.1", "2.5.0", "2.5.1", "2.6.0", "2.7.0", "2.7.1", "2.8.0", "2.9.0", "2.9.1"),
    *("2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1"),
]
# The constructor as the releases have them.
RECV_INFO_2_12 = "def __init__(self, input_name, source, buffer, tensor_meta, *, is_root_arg=False)"


def module(source: str) -> types.ModuleType:
    made = types.ModuleType("torch.distributed.pipelining.stage")
    exec(source, made.__dict__)
    return made


@pytest.mark.parametrize(
    ("version", "source", "state"),
    [
        *((version, PERSISTENT, "patched") for version in AFFECTED_RELEASES),
        ("2.13.0+cpu", PERSISTENT, "patched"),
        ("2.14.1+rocm7.0", PERSISTENT, "patched"),
        ("2.9.0a0+145a3a7bda.nv25.09", PERSISTENT, "patched"),
        ("2.9.0a0+145a3a7bda.nv25.09", JUST_IN_TIME, "not-needed"),
        ("2.14.1+vendor.backport", JUST_IN_TIME, "not-needed"),
        ("2.15.0.dev20260801", PERSISTENT, "patched"),
        ("2.15.0.dev20260801", JUST_IN_TIME, "not-needed"),
        ("2.15.0.dev20260801+cu130", PERSISTENT, "patched"),
        ("2.15.0a0+git1234567", PERSISTENT, "patched"),
        ("2.15.0a0+git1234567", JUST_IN_TIME, "not-needed"),
        ("2.15.0rc1", PERSISTENT, "patched"),
        ("2.15.0rc1", JUST_IN_TIME, "not-needed"),
        ("2.15.0-rc1", PERSISTENT, "patched"),
        ("2.15.0", JUST_IN_TIME, "not-needed"),
        ("2.15.0+cu132", JUST_IN_TIME, "not-needed"),
        ("2.15.0.post1", JUST_IN_TIME, "not-needed"),
        ("2.16.0", JUST_IN_TIME, "not-needed"),
        ("2.16.0.dev20270101", JUST_IN_TIME, "not-needed"),
        # From 2.15 on nothing is wrapped, and nothing is called cured unseen.
        ("2.15.0", PERSISTENT, "untried"),
        ("2.15.0+vendor", "", "untried"),
        ("2.16.0", PERSISTENT, "untried"),
        ("2.16.0a0+git1234567", PERSISTENT, "untried"),
        ("3.0.0", "class _PipelineStageBase: pass", "untried"),
        # No pipelining existed; should a vendor have carried it back, it is looked at.
        ("2.3.1", PERSISTENT, "patched"),
        ("2.3.1", "", "unsupported"),
        # A version that is none decides nothing: the module does.
        ("unknown", PERSISTENT, "patched"),
        ("unknown", JUST_IN_TIME, "not-needed"),
    ],
)
def test_every_release(version: str, source: str, state: str) -> None:
    status = decide(version, module(source), "detach")
    assert status.state == state
    assert version in status.reason
    assert status.torch_version == version
    assert status.policy == "detach"


def test_a_release_that_was_not_tried_says_how_to_try_it() -> None:
    reason = decide("2.16.0", module(PERSISTENT), "detach").reason
    assert "left untouched" in reason
    assert "was not tried" in reason
    assert "`pp-hookfix verify`" in reason


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def __init__(self, input_name, source, buffer)", RECV_INFO_2_12),
        ("(self, fwd_chunk_id)", "(self, fwd_chunk_id, *, validate=False)"),
        ("(self, fwd_chunk_id)", "(self, *args, **kwargs)"),
    ],
)
def test_harmless_differences_are_patched(old: str, new: str) -> None:
    assert old in PERSISTENT
    assert decide("2.13.0", module(PERSISTENT.replace(old, new)), "detach").state == "patched"


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ("_PipelineStageBase", "_StageBase", "a class _PipelineStageBase"),
        (
            "_retrieve_recv_activations",
            "_take_recv_activations",
            "a method _PipelineStageBase._retrieve_recv_activations",
        ),
        (
            "(self, fwd_chunk_id)",
            "(self, fwd_chunk_id, recv_infos)",
            "_PipelineStageBase._retrieve_recv_activations to be called as (self, fwd_chunk_id)",
        ),
        (
            "(self, fwd_chunk_id)",
            "(self)",
            "_PipelineStageBase._retrieve_recv_activations to be called as (self, fwd_chunk_id)",
        ),
        ("_RecvInfo", "_Descriptor", "a descriptor _RecvInfo that is made with its buffer"),
        (
            "source, buffer):\n        self.buffer = buffer",
            "source, storage):\n        self.storage = storage",
            "a descriptor _RecvInfo that is made with its buffer",
        ),
    ],
)
def test_drifted_internals_are_unsupported(old: str, new: str, missing: str) -> None:
    assert old in PERSISTENT
    status = decide("2.14.1", module(PERSISTENT.replace(old, new)), "detach")
    assert status.state == "unsupported"
    assert "2.14.1" in status.reason
    assert missing in status.reason


FRESH = (
    PERSISTENT
    + """
    def _prepare_forward_infra(self, num_microbatches): ...


class _Base(_PipelineStageBase):
    def _prepare_backward_infra(self, num_microbatches): ...

    def _get_recv_ops(self, recv_infos, group): ...

    def _retrieve_recv_grads(self, bwd_chunk_id): ...
"""
)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_is_patched_where_its_methods_are(policy: str) -> None:
    status = decide("2.14.1", module(FRESH), policy)
    assert (status.state, status.policy) == ("patched", policy)


@pytest.mark.parametrize(
    ("policy", "method"),
    [
        (policy, method)
        for policy in POLICIES
        for method, around in POLICIES[policy].methods.items()
        if not around.is_optional
    ],
)
def test_a_policy_is_unsupported_where_a_method_of_its_is_gone(policy: str, method: str) -> None:
    status = decide("2.14.1", module(FRESH.replace(method, "_gone")), policy)
    assert status.state == "unsupported"
    assert f"a method _PipelineStageBase.{method}" in status.reason
    assert f"policy {policy}" in status.reason
    # The others do not need it.
    for other in POLICIES:
        if method not in POLICIES[other].methods:
            assert (
                decide("2.14.1", module(FRESH.replace(method, "_gone")), other).state == "patched"
            )


def test_a_method_that_takes_other_arguments_is_unsupported() -> None:
    source = FRESH.replace("(self, bwd_chunk_id)", "(self, bwd_chunk_id, recv_infos)")
    assert decide("2.14.1", module(source), "clone").state == "unsupported"
    source = FRESH.replace("(self, recv_infos, group)", "(self)")
    assert decide("2.14.1", module(source), "fresh").state == "unsupported"
    assert decide("2.14.1", module(source), "clone").state == "patched"


def test_status_is_immutable() -> None:
    status: Any = decide("2.13.0", module(PERSISTENT), "detach")
    with pytest.raises(AttributeError):
        status.state = "off"


def test_the_states_are_told_alike_everywhere() -> None:
    states = set(get_args(State))
    source = inspect.getsource(Status)
    assert set(re.findall(r"``([a-z-]+)``", source.partition("reason: str")[0])) == states
    assert set(re.findall(r"``([a-z-]+)``", pp_hookfix.status.__doc__ or "")) - {"state"} >= states
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    told = readme.partition("has the `state` (")[2].partition(")")[0]
    assert set(re.findall(r"`([a-z-]+)`", told)) == states
