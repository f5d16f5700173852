"""What is true now: looked up in torch each time that somebody asks."""

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from pp_hookfix import activation
from pp_hookfix.decision import Status


def status() -> Status:
    """See ``pp_hookfix.status``."""
    if activation._policy == "off":
        return Status("off", activation._why_off, activation.torch_version(), "off")
    stage_module = activation.loaded_stage_module()
    if stage_module is None:
        return Status(
            "pending",
            "torch.distributed.pipelining is not imported yet: the decision falls when it is.",
            activation.torch_version(),
            activation._policy,
        )
    if activation._status is None or activation._decided_on is not stage_module:
        activation.on_stage_module(stage_module)
    decided = activation._status
    assert decided is not None  # on_stage_module decides or fails
    if decided.state != "patched":
        return decided
    from pp_hookfix import patch

    for where, method, ours in patch.standing(stage_module):
        if ours is None or not _reaches(method, ours):
            return decided._replace(
                state="bypassed",
                reason=f"on torch {decided.torch_version} the fix is not in force: {where} is "
                f"{_named(method)}, which does not call pp_hookfix's (policy {decided.policy}). "
                "pp_hookfix.enable() puts it in again.",
            )
    fresh = sys.modules.get("pp_hookfix.fresh")
    if decided.policy == "fresh" and fresh is not None and fresh.served_by_copies:
        kinds = "; ".join(sorted(fresh.served_by_copies))
        return decided._replace(reason=f"{decided.reason} Served by copies, as by clone: {kinds}.")
    return decided


def _reaches(method: Any, ours: Any) -> bool:
    """Whether a function that stands in a stage class can be calling `ours`.

    It is `ours`, or holds it: as ``__wrapped__``, in its closure, defaults or attributes, by
    a name of its module that it uses, and so on, beneath any number of wrappers.
    """
    seen: set[int] = set()
    found = [method]
    while found and len(seen) < 10_000:
        one = found.pop()
        if one is ours:
            return True
        if id(one) not in seen:
            seen.add(id(one))
            found += _held_by(one)
    return False


def _held_by(one: Any) -> Iterator[Any]:
    # By the exact type: a proxy's class seems to be that of what it wraps.
    kind = type(one)
    if kind is types.FunctionType:
        yield from map(_content, one.__closure__ or ())
        yield from one.__defaults__ or ()
        yield from (one.__kwdefaults__ or {}).values()
        yield from vars(one).values()
        yield from (one.__globals__[name] for name in _names(one.__code__) & set(one.__globals__))
    elif kind is types.MethodType:
        yield from (one.__func__, one.__self__)
    elif issubclass(kind, functools.partial):
        yield from (one.func, *one.args, *one.keywords.values())
    elif kind in (list, tuple, set, frozenset):
        yield from one
    elif kind is dict:
        yield from one.values()
    elif not issubclass(kind, (type, types.ModuleType)):
        # An object that can be called, or one of wrapt's, bound or not.
        yield from (getattr(one, name, None) for name in ("__wrapped__", "_self_parent"))
        yield from getattr(one, "__dict__", {}).values()
        yield vars(kind).get("__call__")


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _names(code: types.CodeType) -> set[str]:
    """Names that the code uses, that of functions inside it, too."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _named(method: Any) -> str:
    if method is None:
        return "gone"
    code = getattr(method, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    module, name = getattr(method, "__module__", ""), getattr(method, "__qualname__", repr(method))
    return f"{module}.{name}{where}"
