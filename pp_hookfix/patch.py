"""Put a policy's wrappers around torch's stage methods, and take them out again."""

from collections.abc import Container
from types import ModuleType
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

import wrapt

from pp_hookfix.decision import stage_classes_with
from pp_hookfix.policies import POLICIES

if TYPE_CHECKING:
    from pp_hookfix.policies import Wrapper


class _Around:
    """What happens around one wrapped method: nothing, while `does` is None."""

    def __init__(self, on_failure: Callable[[Exception], None]) -> None:
        self.does: Optional[Wrapper] = None
        self._on_failure = on_failure

    def __call__(
        self,
        wrapped: Callable[..., Any],
        stage: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        does = self.does
        if does is None:
            return wrapped(*args, **kwargs)
        results = []

        def call_torch(*args: Any, **kwargs: Any) -> Any:
            results.append(wrapped(*args, **kwargs))
            return results[0]

        try:
            return does(call_torch, stage, args, kwargs)
        except Exception as error:
            if not results:
                raise  # torch's own: the wrapped method did not return
            self._on_failure(error)
            return results[0]


class _InPlace(NamedTuple):
    wrapper: Any  # wrapt.FunctionWrapper, which newer wrapts type as generic
    around: _Around


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
        take_out(keep=POLICIES[policy].wrappers)
    for name, does in POLICIES[policy].wrappers.items():
        for cls in stage_classes_with(stage_module, name):
            there = _in_place.get((cls, name))
            if there is None or not _leads_to(vars(cls)[name], there.wrapper):
                if there is not None:
                    there.around.does = None  # should a wrapper that hides it still call it
                around = _Around(on_failure)
                there = _InPlace(wrapt.FunctionWrapper(vars(cls)[name], around), around)
                setattr(cls, name, there.wrapper)
                _in_place[cls, name] = there
            there.around.does = does
    _active = policy


def take_out(keep: Container[str] = ()) -> None:
    """Undo `put_in`: the original function object where our wrapper is outermost.

    Where another package has wrapped ours since, theirs stays and ours does
    nothing more. Wrappers of the methods in `keep` stay, doing nothing.
    """
    global _active
    for (cls, name), there in list(_in_place.items()):
        there.around.does = None
        outermost = vars(cls).get(name) is there.wrapper
        if outermost and name not in keep:
            setattr(cls, name, there.wrapper.__wrapped__)
            del _in_place[cls, name]
    if _active is not None:
        POLICIES[_active].leave()
        _active = None


def _leads_to(method: Any, wrapper: Any) -> bool:
    """Whether `wrapper` is `method` or lies beneath it, as far as `__wrapped__` tells."""
    while method is not None and method is not wrapper:
        method = getattr(method, "__wrapped__", None)
    return method is wrapper
