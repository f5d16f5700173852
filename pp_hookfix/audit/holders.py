"""Who holds a tensor, as well as the garbage collector can tell."""

import functools
import gc
import os
import sys
import types
from collections.abc import Iterator
from typing import Any, Optional

import torch

_DEPTH = 8  # containers within containers
_NODES = 20_000  # of a graph
UNKNOWN = "something that Python's garbage collector does not know"


def of(storage: int, reference: Any) -> Optional[str]:
    """Say in words who keeps memory alive.

    Args:
        storage: the address of a storage, as ``untyped_storage()._cdata`` is.
        reference: a weak reference to the tensor that a stage was handed, which need not live.

    Returns:
        For example ``list `saved` in a frame of /job/train.py:31 main``; None where torch
        itself does, and nobody else.
    """
    search = _Search()
    try:
        said = _said(search, storage, reference) or UNKNOWN
    finally:
        # It holds every object, itself among them.
        search.objects.clear()
        search.tensors.clear()
    # torch hands a gradient on between stages of one rank, which may be what it received.
    return None if said == "attribute `buffer` of _RecvInfo" else said


def _said(search: "_Search", storage: int, reference: Any) -> Optional[str]:
    tensors = [one for one in search.tensors if _storage_of(one) == storage]
    said = search.who(tensors)
    if said is None:
        arrays = list(search.arrays_over(tensors))
        said = search.who(arrays)
        if said is not None:
            said = f"NumPy array in {said}"
    if said is None:
        said = search.graph_of(reference())
    return said


def _storage_of(tensor: torch.Tensor) -> Optional[int]:
    try:
        address: int = tensor.untyped_storage()._cdata
    except Exception:  # a tensor of another kind: fake, sparse, functional, ...
        return None
    return address


class _Search:
    """One look over all objects of the process."""

    def __init__(self) -> None:
        self.objects = gc.get_objects()
        # By the exact type: a proxy's class seems to be that of what it stands for.
        self.tensors = [one for one in self.objects if issubclass(type(one), torch.Tensor)]
        self.named = dict(_locals_of_frames())
        self.ours = {id(self.objects), id(self.tensors), id(self.named), id(self.__dict__)}

    def who(self, found: list[Any]) -> Optional[str]:
        """Who holds any of `found`; the first that has a name, torch's own last."""
        # No generators here: what one looks at, it holds.
        self.ours.add(id(found))
        of_torch = None
        for one in found:
            said = self._holder(one, _DEPTH, set())
            if said is not None and "torch/" not in said:
                return said
            of_torch = of_torch or said
        return of_torch

    def _holder(self, held: Any, depth: int, seen: set[int]) -> Optional[str]:
        if id(held) in self.named:
            return self.named[id(held)]
        if depth == 0 or id(held) in seen:
            return None
        seen.add(id(held))
        referrers = gc.get_referrers(held)
        self.ours.add(id(referrers))
        unnamed = None
        for one in referrers:
            if id(one) in self.ours or isinstance(one, types.FrameType):
                continue
            said = self._as_holder(one, held, depth, seen)
            if said is not None and "torch/" not in said:
                return said
            unnamed = unnamed or said
        return unnamed

    def _as_holder(self, one: Any, held: Any, depth: int, seen: set[int]) -> Optional[str]:
        kind = type(one)
        if kind is dict:
            return self._as_dictionary(one, held, depth, seen)
        if kind in (list, tuple, set, frozenset) or hasattr(kind, "popleft"):
            return _within(kind.__name__, self._holder(one, depth - 1, seen))
        if kind is types.CellType:
            for function in gc.get_referrers(one):
                if type(function) is tuple:
                    for owner in gc.get_referrers(function):
                        if isinstance(owner, types.FunctionType):
                            return f"the closure of {_place(owner.__code__)}"
            return None
        if kind is types.FunctionType:
            return f"a default of {_place(one.__code__)}"
        if issubclass(kind, torch.Tensor):
            return self._holder(one, depth - 1, seen)  # a DTensor around it
        if kind is types.MethodType or kind is functools.partial:
            return f"{kind.__name__} of {getattr(one, '__name__', None) or one.func}"
        name = _attribute(one, held)
        if name is not None:
            return f"attribute `{name}` of {kind.__qualname__}"
        if kind is types.GeneratorType:
            return f"a generator, {_place(one.gi_code)}"
        return None

    def _as_dictionary(self, one: Any, held: Any, depth: int, seen: set[int]) -> Optional[str]:
        name = next((key for key, value in one.items() if value is held), None)
        for owner in gc.get_referrers(one):
            if isinstance(owner, types.ModuleType) and vars(owner) is one:
                return f"`{name}` of module {owner.__name__}{_file_of(owner)}"
            if getattr(owner, "__dict__", None) is one and not isinstance(owner, type):
                return f"attribute `{name}` of {type(owner).__qualname__}"
        if one.get("__name__") is not None and "__builtins__" in one:  # a script's, under exec
            return f"`{name}` of {one['__name__']}"
        return _within("dict", self._holder(one, depth - 1, seen))

    def arrays_over(self, tensors: list[torch.Tensor]) -> Iterator[Any]:
        """NumPy arrays, which the collector does not know, but what refers to them it does."""
        wanted = {id(tensor) for tensor in tensors}
        candidates = list(self.named_values())
        for one in self.objects:
            candidates += [
                value for value in gc.get_referents(one) if type(value).__name__ == "ndarray"
            ]
        self.ours.add(id(candidates))
        for one in candidates:
            base = one
            while type(base).__name__ == "ndarray":
                base = base.base
                if id(base) in wanted:
                    yield one

    def named_values(self) -> Iterator[Any]:
        for frame in _frames():
            yield from dict(frame.f_locals).values()

    def graph_of(self, tensor: Optional[torch.Tensor]) -> str:
        """The graph that has `tensor` as a leaf, by what it was computed for."""
        for root in self.tensors:
            try:
                node = root.grad_fn
            except Exception:
                continue
            if node is not None and tensor is not None and _leads_to(node, tensor):
                said = self.who([root])
                return f"the autograd graph of {said}" if said else "an autograd graph"
            if tensor is not None and root.grad is tensor:
                said = self.who([root])
                return f"`.grad` of {said}" if said else "a `.grad`"
        return "an autograd graph that is still alive, or another library's C++"


def _leads_to(node: Any, leaf: torch.Tensor) -> bool:
    seen: set[Any] = set()
    found = [node]
    while found and len(seen) < _NODES:
        one = found.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        if getattr(one, "variable", None) is leaf:
            return True
        found += [following for following, _ in one.next_functions]
    return False


def _frames() -> Iterator[types.FrameType]:
    for thread in sys._current_frames().values():
        frame: Optional[types.FrameType] = thread
        while frame is not None:
            if frame.f_globals.get("__name__", "").partition(".")[0] != "pp_hookfix":
                yield frame
            frame = frame.f_back


def _locals_of_frames() -> Iterator[tuple[int, str]]:
    """What running functions hold: since Python 3.11 the collector does not see it."""
    # The outermost last: a name of the user's own script goes before torch's.
    for frame in _frames():
        code = frame.f_code
        if code.co_name == "<module>":
            where = f"in module {frame.f_globals.get('__name__')} ({code.co_filename})"
        else:
            where = f"in a frame of {_place(code)}"
        for name, value in dict(frame.f_locals).items():
            if not isinstance(value, (int, str, type(None), types.ModuleType)):
                kind = type(value).__name__ + " "
                is_container = isinstance(value, (list, tuple, set, dict)) or hasattr(
                    value, "popleft"
                )
                yield id(value), f"{kind if is_container else ''}`{name}` {where}"


def _within(kind: str, within: Optional[str]) -> Optional[str]:
    """A container, by the name of what holds it; of several, the outermost is told."""
    containers = ("list ", "tuple ", "set ", "dict ", "deque ", "OrderedDict ")
    if within is None or within.startswith(containers):
        return within
    return f"{kind} in {within}" if within.startswith(("the ", "a ")) else f"{kind} {within}"


def _attribute(owner: Any, held: Any) -> Optional[str]:
    names = list(getattr(owner, "__dict__", {}))
    for kind in type(owner).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    for name in names:
        try:
            if object.__getattribute__(owner, name) is held:
                return str(name)
        except AttributeError:
            continue
    return None


def _file_of(module: types.ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return f" ({os.path.abspath(file)})" if file else ""


def _place(code: types.CodeType) -> str:
    name = getattr(code, "co_qualname", code.co_name)
    return f"{os.path.abspath(code.co_filename)}:{code.co_firstlineno} {name}"
