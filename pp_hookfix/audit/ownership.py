"""What a tensor's hooks and attributes hold, and nobody else does: it goes when they go."""

import functools
import gc
import sys
import types
from collections import Counter, deque
from typing import Any, NamedTuple

import torch

# Objects that are looked at, the nearest first, and that a container may have: hooks that lead
# to more hold what is somebody else's.
_MOST = 100
_FOLLOWED = (
    *(types.FunctionType, types.CellType, types.MethodType, functools.partial),
    *(list, tuple, set, frozenset, dict),
)


class Held(NamedTuple):
    """What is held by nothing but the hooks and attributes that were asked about."""

    tensors: list[torch.Tensor]
    references: "Counter[int]"
    """From there to any object, by its ``id``."""
    holders: set[int]
    """The ``id`` of each function, cell, list, ... that holds it."""


def held_alone(roots: list[Any]) -> Held:
    """Tell what only `roots` hold, as Python's collector tells garbage: by counting references.

    Args:
        roots: hooks and attributes' values; each is in one dictionary of torch's, and in this
            list.
    """
    lone = object()
    found: dict[int, Any] = {id(lone): lone}
    del lone
    held_by: dict[int, list[int]] = {}
    waiting = deque(roots)
    while waiting and len(found) < _MOST:
        one = waiting.popleft()
        if id(one) not in found:
            found[id(one)] = one
            held = _held_by(one)
            held_by[id(one)] = list(map(id, held))
            waiting += held
    one, held = None, []
    waiting.clear()
    references = Counter(key for keys in held_by.values() for key in keys)
    # Each root is in its dictionary, and in the list.
    references.update([id(root) for root in roots for _ in range(2)])
    excess = {key: sys.getrefcount(one) - references[key] for key, one in found.items()}
    of_lone = next(iter(excess.values()))
    not_theirs = [
        key
        for key, one in found.items()
        if excess[key] > of_lone or (isinstance(one, torch.Tensor) and uses(one) > 1)
    ]
    theirs = set(held_by)
    while not_theirs:
        key = not_theirs.pop()
        if key in theirs:
            theirs.discard(key)
            not_theirs += held_by[key]
    return Held(
        [found[key] for key in theirs if isinstance(found[key], torch.Tensor)],
        Counter(held for key in theirs for held in held_by[key])
        + Counter(id(root) for root in roots),
        theirs,
    )


def _held_by(one: Any) -> list[Any]:
    """What it refers to, of what is followed further."""
    kind = type(one)
    if issubclass(kind, torch.Tensor):
        return []
    if kind.__name__ == "ndarray":  # which the collector does not know
        return [] if one.base is None else [one.base]
    if hasattr(kind, "__len__") and kind in _FOLLOWED and len(one) > _MOST:
        return []
    names: tuple[Any, ...] = ()
    if kind is types.FunctionType:
        names = (one.__globals__, getattr(one, "__builtins__", None))
    return [
        held
        for held in gc.get_referents(one)
        if _is_followed(type(held), kind) and not any(held is others for others in names)
    ]


def _is_followed(kind: type, held_by: type) -> bool:
    """By the exact type: a proxy's class seems to be that of what it stands for."""
    if held_by is types.MethodType:
        return not issubclass(kind, torch.nn.Module)
    return issubclass(kind, (*_FOLLOWED, torch.Tensor)) or kind.__name__ == "ndarray"


def uses(tensor: Any) -> int:
    """References to it in C++, of which Python as a whole has one."""
    return int(tensor._use_count())
