"""Which torch releases have the fault, and whether the one here can be fixed.

The fault came with ``torch.distributed.pipelining`` (2.4) and ended when upstream
PR 196463 (2.15) gave each receive a buffer of its own.
"""

import inspect
import re
from collections.abc import Container
from types import ModuleType
from typing import Any, Callable, Literal, NamedTuple, Optional

from pp_hookfix.policies import ALL, AUDIT

# Affected: FIRST_AFFECTED <= torch < FIRST_FIXED. A version tells the two ends
# apart only for releases; see `decide` for nightly and vendor builds.
FIRST_AFFECTED = (2, 4)
FIRST_FIXED = (2, 15)

# Calls, one of which a wrapped method must take; the arguments of the others do not
# matter to us.
_CALLS: dict[str, list[tuple[str, ...]]] = {
    "_retrieve_recv_activations": [("self", "fwd_chunk_id")],
    "_retrieve_recv_grads": [("self", "bwd_chunk_id")],
    "_get_recv_ops": [("self", "recv_infos"), ("self", "recv_infos", "group")],  # 2.14: group
}


State = Literal["pending", "patched", "not-needed", "untried", "unsupported", "bypassed", "off"]


class Status(NamedTuple):
    """What pp_hookfix did, or will do, in this process."""

    state: State
    """``pending``, ``patched``, ``not-needed``, ``untried``, ``unsupported``, ``bypassed`` or
    ``off``."""
    reason: str
    """One sentence for a person."""
    torch_version: Optional[str]
    """``torch.__version__``, or None while torch is not imported."""
    policy: str
    """The policy asked for: a key of ``policies.ALL``, or ``off``."""


def decide(torch_version: str, stage_module: ModuleType, policy: str) -> Status:
    """Decide what to do with the stage module of this torch.

    Args:
        torch_version: ``torch.__version__``, local build label included.
        stage_module: ``torch.distributed.pipelining.stage``, fully imported.
        policy: a key of ``policies.ALL``.

    Returns:
        A status whose state is ``patched`` (meaning: patch it), ``not-needed``,
        ``untried`` or ``unsupported``.

    No version makes a torch need nothing: the module's own descriptors do, which give their
    buffer away (``_RecvInfo.take_buffer`` came with PR 196463). Nightly and vendor builds
    carry commits that their version does not tell, and a later release may do otherwise (PR
    196465 brings buffers back that are used again).
    """
    state, reason = _judge(torch_version, stage_module, policy)
    return Status(state, reason, torch_version, policy)


def _judge(torch_version: str, stage_module: ModuleType, policy: str) -> tuple[State, str]:
    """State and reason of the decision."""
    is_from_fixed = _is_release_from(FIRST_FIXED, torch_version)
    if hasattr(getattr(stage_module, "_RecvInfo", None), "take_buffer"):
        if is_from_fixed:
            return "not-needed", (
                f"torch {torch_version} allocates each receive buffer just in time "
                f"(as torch {dotted(FIRST_FIXED)} does): nothing is wrapped."
            )
        return "not-needed", (
            f"this build of torch {torch_version} already allocates each receive buffer "
            "just in time: nothing is wrapped."
        )
    if is_from_fixed:
        return "untried", (
            f"torch {torch_version} is left untouched and was not tried: its receive buffers are "
            f"not handed over as those of torch {dotted(FIRST_FIXED)} are. `pp-hookfix verify` "
            "tells whether hooks pile up on it."
        )
    missing = _missing(stage_module, policy)
    if missing:
        return "unsupported", (
            f"torch {torch_version} is left untouched and its stages keep their "
            f"receive buffers: policy {policy} needs {'; '.join(missing)}."
        )
    if policy == AUDIT:
        return "patched", (
            f"torch {torch_version} hands stages their persistent receive buffers, and "
            "`pp-hookfix audit` looks at what becomes of them: nothing is handed out instead."
        )
    return "patched", (
        f"torch {torch_version} would hand stages their persistent receive buffers; "
        f"each microbatch gets tensors of its own instead (policy {policy})."
    )


def stage_classes_with(stage_module: ModuleType, method: str) -> list[type]:
    """torch's stage classes that define a method themselves: the base, or its subclasses.

    The method that a stage runs is one of these, whichever release put it where.
    """
    return [
        cls
        for cls in vars(stage_module).values()
        if isinstance(cls, type)
        and issubclass(cls, stage_module._PipelineStageBase)
        and callable(vars(cls).get(method))
        and not getattr(vars(cls)[method], "__isabstractmethod__", False)
    ]


def _is_release_from(first: tuple[int, int], torch_version: str) -> bool:
    """Whether a version is `first` or later, its own pre-releases not counted."""
    parsed = re.match(r"(\d+)\.(\d+)(?:\.\d+)*[-_.]?(a|b|rc|dev)?", torch_version)
    if parsed is None:
        return False
    release = (int(parsed[1]), int(parsed[2]))
    return release > first or (release == first and parsed[3] is None)


def dotted(release: tuple[int, int]) -> str:
    """A release as a person writes it."""
    return ".".join(map(str, release))


def _missing(stage_module: ModuleType, policy: str) -> list[str]:
    """What `policy` relies on and this stage module does not have, in words."""
    missing = []
    base = getattr(stage_module, "_PipelineStageBase", None)
    if base is None:
        missing.append("a class _PipelineStageBase")
    else:
        for name, around in ALL[policy].methods.items():
            classes = stage_classes_with(stage_module, name)
            calls = _CALLS.get(name)
            if not classes and not around.is_optional:
                missing.append(f"a method _PipelineStageBase.{name}")
            elif calls and not all(_accepts(vars(cls)[name], calls) for cls in classes):
                missing.append(f"_PipelineStageBase.{name} to be called as ({', '.join(calls[0])})")
    recv_info = getattr(stage_module, "_RecvInfo", None)
    if recv_info is None or "buffer" not in _parameters(recv_info.__init__):
        missing.append("a descriptor _RecvInfo that is made with its buffer")
    return missing


def _accepts(method: Callable[..., Any], calls: list[tuple[str, ...]]) -> bool:
    for call in calls:
        try:
            inspect.signature(method).bind(*call)
        except (TypeError, ValueError):
            continue
        return True
    return False


def _parameters(method: Callable[..., Any]) -> Container[str]:
    try:
        return inspect.signature(method).parameters
    except (TypeError, ValueError):
        return ()
