"""Put a policy's wrappers around torch's stage methods, and take them out again."""

import copy
import importlib.machinery
import importlib.util
import sys
from collections.abc import Container, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Callable, NamedTuple, Optional

try:
    import wrapt
except ModuleNotFoundError:
    # Under `pp-hookfix run` from an environment of its own: the one that is installed beside
    # us, and nothing else of what is.
    beside = importlib.machinery.PathFinder.find_spec("wrapt", [str(Path(__file__).parents[1])])
    if "wrapt" in sys.modules or beside is None or beside.loader is None:
        raise
    wrapt = sys.modules["wrapt"] = importlib.util.module_from_spec(beside)
    try:
        beside.loader.exec_module(wrapt)
    except BaseException:
        del sys.modules["wrapt"]  # as a failed import leaves nothing behind
        raise

from pp_hookfix.decision import stage_classes_with
from pp_hookfix.policies import ALL, Around, Refused

NOTHING = Around()


def _wrapper(
    on_failure: Callable[[Exception], None],
) -> tuple[Callable[..., Any], Callable[[Around], None]]:
    """A wrapper of one method for wrapt, and what sets what it does around the method."""
    before = after = None

    # A closure: it is called once per microbatch, and this is the cheapest that wrapt calls.
    def wrapper(
        wrapped: Callable[..., Any], stage: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if before is not None:
            try:
                before(stage, args, kwargs)
            except Refused:
                raise
            except Exception as error:
                on_failure(error)
        result = wrapped(*args, **kwargs)
        if after is None:
            return result
        try:
            return after(stage, result, args, kwargs)
        except Exception as error:
            on_failure(error)
            return result

    def does(around: Around) -> None:
        nonlocal before, after
        before, after = _function(around.before), _function(around.after)

    return wrapper, does


def _function(name: Optional[str]) -> Optional[Callable[..., Any]]:
    if name is None:
        return None
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(f"pp_hookfix.{module}"), function)  # type: ignore[no-any-return]


class BoundFunctionWrapper(wrapt.BoundFunctionWrapper):  # type: ignore[type-arg,unused-ignore]
    """The method as attribute of a stage, or of its class.

    It is pickled and copied as the function is that it wraps; wrapt's own refuse.
    """

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._self_instance is None:
            return self._self_parent.__reduce_ex__(protocol)
        return getattr, (self._self_instance, self.__name__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._self_instance is None:
            return self
        stage = copy.deepcopy(self._self_instance, memo)
        return self._self_parent.__get__(stage, type(stage))


class FunctionWrapper(wrapt.FunctionWrapper):  # type: ignore[type-arg,unused-ignore]
    """What stands in torch's class."""

    __bound_function_wrapper__ = BoundFunctionWrapper

    def __init__(self, wrapped: Any, wrapper: Any, owner: type) -> None:
        super().__init__(wrapped, wrapper)
        self._self_stage_class = owner

    def __reduce_ex__(self, protocol: Any) -> Any:
        return getattr, (self._self_stage_class, self.__name__)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self


class _InPlace(NamedTuple):
    method: Any  # FunctionWrapper: to type checkers, which see a descriptor, a bound one
    does: Callable[[Around], None]


# What stands in torch now, by the class and the method's name.
_in_place: dict[tuple[type, str], _InPlace] = {}
_active: Optional[str] = None


def load(policy: str) -> None:
    """Import what `apply` needs of a policy, and must not import while a lock is held."""
    for around in ALL[policy].methods.values():
        _function(around.before)
        _function(around.after)


def standing(stage_module: ModuleType) -> Iterator[tuple[str, Any, Any]]:
    """What stands now where the policy that is on wraps.

    Yields:
        The method as a person writes it, what it is, and what we put there (None: nothing).
    """
    if _active is None:
        return
    for name, around in ALL[_active].methods.items():
        classes = stage_classes_with(stage_module, name)
        if not classes and not around.is_optional:
            yield f"_PipelineStageBase.{name}", None, None
        for cls in classes:
            there = _in_place.get((cls, name))
            yield f"{cls.__name__}.{name}", vars(cls)[name], there and there.method


def apply(stage_module: ModuleType, policy: str, on_failure: Callable[[Exception], None]) -> None:
    """Make `policy` what the stage methods do, in place of any other policy.

    A wrapper of ours that is still there, outermost or beneath another
    package's, is used again, so that nothing is ever wrapped twice.

    Args:
        stage_module: ``torch.distributed.pipelining.stage``.
        policy: a key of ``policies.ALL``.
        on_failure: called with an exception of ours, once torch's own method
            has returned. The training step goes on with what torch returned.
    """
    global _active
    if policy != _active:
        revert(keep=ALL[policy].methods)
    for name, around in ALL[policy].methods.items():
        for cls in stage_classes_with(stage_module, name):
            there = _in_place.get((cls, name))
            if there is None or not _leads_to(vars(cls)[name], there.method):
                if there is not None:
                    there.does(NOTHING)  # should what hides it still call it
                wrapper, does = _wrapper(on_failure)
                there = _InPlace(FunctionWrapper(vars(cls)[name], wrapper, cls), does)
                setattr(cls, name, there.method)
                _in_place[cls, name] = there
            there.does(around)
    _active = policy


def revert(keep: Container[str] = ()) -> None:
    """Undo `apply`: the original function object where our wrapper is outermost.

    Where another package has wrapped ours since, theirs stays and ours does
    nothing more. Wrappers of the methods in `keep` stay, doing nothing.
    """
    global _active
    at_end = _active and _function(ALL[_active].at_end)
    for (cls, name), there in list(_in_place.items()):
        there.does(NOTHING)
        outermost = vars(cls).get(name) is there.method
        if outermost and name not in keep:
            setattr(cls, name, there.method.__wrapped__)
            del _in_place[cls, name]
    _active = None
    if at_end:
        at_end()


def _leads_to(method: Any, ours: Any) -> bool:
    """Whether `ours` is `method` or lies beneath it, as far as `__wrapped__` tells."""
    while method is not None and method is not ours:
        method = getattr(method, "__wrapped__", None)
    return method is ours
