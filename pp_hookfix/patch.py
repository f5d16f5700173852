"""Put a policy's wrappers around torch's stage methods, and take them out again."""

from collections.abc import Container
from types import ModuleType
from typing import Any, Callable, NamedTuple, Optional

import wrapt

from pp_hookfix.decision import stage_classes_with
from pp_hookfix.policies import POLICIES, Around

NOTHING = Around()


class _Wrapper:
    """A wrapt wrapper of one method, which does what `around` says, or nothing."""

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self.around = NOTHING
        self._on_failure = on_failure

    def __call__(
        self,
        wrapped: Callable[..., Any],
        stage: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        around = self.around
        if around.before is not None:
            around.before(stage, *args, **kwargs)
        result = wrapped(*args, **kwargs)
        if around.after is None:
            return result
        try:
            return around.after(stage, result, *args, **kwargs)
        except Exception as error:
            self._on_failure(error)
            return result


class _InPlace(NamedTuple):
    method: Any  # wrapt.FunctionWrapper, which newer wrapts type as generic
    wrapper: _Wrapper


# What stands in torch now, by the class and the method's name.
_in_place: dict[tuple[type, str], _InPlace] = {}
_active: Optional[str] = None


def put_in(stage_module: ModuleType, policy: str, on_failure: Callable[[Exception], None]) -> None:
    """Make `policy` what the stage methods do, in place of any other policy.

    A wrapper of ours that is still there, outermost or beneath another
    package's, is used again, so that nothing is ever wrapped twice.

    Args:
        stage_module: ``torch.distributed.pipelining.stage``.
        policy: a key of ``POLICIES``.
        on_failure: called with an exception of ours, once torch's own method
            has returned. The training step goes on with what torch returned.
    """
    global _active
    if policy != _active:
        take_out(keep=POLICIES[policy].methods)
    for name, around in POLICIES[policy].methods.items():
        for cls in stage_classes_with(stage_module, name):
            there = _in_place.get((cls, name))
            if there is None or not _leads_to(vars(cls)[name], there.method):
                if there is not None:
                    there.wrapper.around = NOTHING  # should what hides it still call it
                wrapper = _Wrapper(on_failure)
                there = _InPlace(wrapt.FunctionWrapper(vars(cls)[name], wrapper), wrapper)
                setattr(cls, name, there.method)
                _in_place[cls, name] = there
            there.wrapper.around = around
    _active = policy


def take_out(keep: Container[str] = ()) -> None:
    """Undo `put_in`: the original function object where our wrapper is outermost.

    Where another package has wrapped ours since, theirs stays and ours does
    nothing more. Wrappers of the methods in `keep` stay, doing nothing.
    """
    global _active
    for (cls, name), there in list(_in_place.items()):
        there.wrapper.around = NOTHING
        outermost = vars(cls).get(name) is there.method
        if outermost and name not in keep:
            setattr(cls, name, there.method.__wrapped__)
            del _in_place[cls, name]
    if _active is not None:
        POLICIES[_active].leave()
        _active = None


def _leads_to(method: Any, ours: Any) -> bool:
    """Whether `ours` is `method` or lies beneath it, as far as `__wrapped__` tells."""
    while method is not None and method is not ours:
        method = getattr(method, "__wrapped__", None)
    return method is ours
