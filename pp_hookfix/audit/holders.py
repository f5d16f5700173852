"""Who holds a tensor, in words by which a person finds it."""

import contextlib
import functools
import gc
import os
import sys
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

import torch

_DEPTH = 12  # containers within containers
_NODES = 20_000  # of a graph
UNKNOWN = "something that Python does not show"


class Holder(NamedTuple):
    """A place that has a name, and the container there in which the tensor is."""

    place: str
    container: str = ""

    def __str__(self) -> str:
        is_phrase = self.place.startswith(("the ", "a ")) or " of " in self.container
        joint = " in " if is_phrase else " "
        return f"{self.container}{joint}{self.place}" if self.container else self.place


def of(tensor: torch.Tensor, in_graph: bool, but: set[int]) -> Optional[str]:
    """Say in words who keeps a tensor or its memory.

    Args:
        tensor: a receive buffer, which a stage was handed.
        in_graph: whether it can be one that saved it for its backward.
        but: the ``id`` of objects that are known to hold it.

    Returns:
        For example ``list `saved` in a frame of /job/train.py:31 main``; None where torch's
        own receive descriptors do, and nobody else.
    """
    search = _Search(but)
    try:
        return search.said_of(tensor, in_graph)
    finally:
        # It holds every object, itself among them.
        vars(search).clear()


class _Search:
    """One look over all objects of the process."""

    def __init__(self, but: set[int]) -> None:
        self.objects = gc.get_objects()
        # By the exact type: a proxy's class seems to be that of what it stands for.
        self.tensors = [one for one in self.objects if issubclass(type(one), torch.Tensor)]
        self.descriptors = [one for one in self.objects if type(one).__name__ == "_RecvInfo"]
        self.locals = dict(_locals_of_frames())
        self.arrays: list[Any] = []
        self.ours = {*but, *map(id, self.descriptors), *map(id, map(vars, self.descriptors))}
        self.ours |= {id(vars(self)), *map(id, vars(self).values())}

    def said_of(self, tensor: torch.Tensor, in_graph: bool) -> Optional[str]:
        memory = tensor.untyped_storage()
        over = [one for one in self.tensors if _storage_of(one) == memory._cdata]
        over += [one for one in self.objects if one is memory]
        found = self.holder_of_any(over)
        if found is None:
            self._look_into_arrays()
            over += [one for one in self.arrays if _is_over(one, memory)]
            found = self.holder_of_any(over)
        if found is not None:
            return str(found)
        if in_graph and (said := self._graph_over(memory._cdata)) is not None:
            return said
        is_handed_on = sum(getattr(one, "buffer", None) is tensor for one in self.descriptors) > 1
        return None if is_handed_on else UNKNOWN

    def holder_of_any(self, found: list[Any]) -> Optional[Holder]:
        """Who holds any of `found`: a user's code before torch's."""
        # No generators here: what one looks at, it holds.
        self.ours.add(id(found))
        return _best([self._holder(one, _DEPTH, set()) for one in found])

    def _holder(self, held: Any, depth: int, seen: set[int]) -> Optional[Holder]:
        if id(held) in self.locals:
            return self.locals[id(held)]
        if depth == 0 or id(held) in seen:
            return None
        seen.add(id(held))
        referrers = [one for one in self.arrays if _is_in_array(held, one)]
        # What a name or a container has comes before a method that is bound to it.
        referrers += sorted(gc.get_referrers(held), key=_is_method)
        self.ours.add(id(referrers))
        holders = []
        for one in referrers:
            if id(one) not in self.ours:
                holders.append(self._as_holder(one, held, depth, seen))
                if _best(holders[-1:]) is not None and not _is_poor(holders[-1]):
                    break
        return _best(holders)

    def _as_holder(self, one: Any, held: Any, depth: int, seen: set[int]) -> Optional[Holder]:
        """As what `one` holds it, and who has `one`."""
        kind = type(one)
        if kind is types.FrameType:
            return _of_ended_frame(one, held)
        if kind is types.CellType:
            return _of_closure(one)
        if kind is types.FunctionType:
            return Holder(f"a default of {_place(one.__code__)}")
        for attribute, what in _SUSPENDED.items():
            if hasattr(kind, attribute):
                return Holder(f"a {what}, {_place(getattr(one, attribute))}")
        if issubclass(kind, dict):
            named = self._of_names(one, held, depth, seen)
        else:
            name = _attribute(one, held)
            named = Holder(f"attribute `{name}` of {kind.__qualname__}") if name else None
        if named is not None:
            return named
        within = self._holder(one, depth - 1, seen)
        if within is None or within.container or issubclass(kind, torch.Tensor):
            return within  # of several containers, the outermost is told
        return Holder(within.place, _word(one))

    def _of_names(self, one: Any, held: Any, depth: int, seen: set[int]) -> Optional[Holder]:
        """Of a dictionary that is a module's, an object's or a class's."""
        name: Any = next((key for key, value in one.items() if value is held), None)
        for owner in gc.get_referrers(one):
            if isinstance(owner, types.ModuleType) and vars(owner) is one:
                return Holder(f"`{name}` of module {owner.__name__}{_file_of(owner)}")
            if isinstance(owner, type) and vars(owner).get(name) is held:
                module = sys.modules.get(owner.__module__)
                return Holder(f"attribute `{name}` of class {owner.__qualname__}{_file_of(module)}")
            if getattr(owner, "__dict__", None) is one and not isinstance(owner, type):
                return Holder(f"attribute `{name}` of {type(owner).__qualname__}")
            # A threading.local has a dictionary of its own for each thread, by thread.
            for local in gc.get_referrers(owner) if type(owner) is dict else ():
                if isinstance(local, threading.local):
                    within = self._holder(local, depth - 1, seen)
                    return Holder(
                        f"attribute `{name}` of threading.local {within.place if within else ''}"
                    )
        if one.get("__name__") is not None and "__builtins__" in one:  # a script's, under exec
            return Holder(f"`{name}` of {one['__name__']}")
        return None

    def _look_into_arrays(self) -> None:
        """NumPy's, which the collector does not know, but what refers to them it does."""
        found = [value for frame in _frames() for value in dict(frame.f_locals).values()]
        for one in self.objects:
            found += [value for value in gc.get_referents(one) if _is_array(value)]
        self.arrays += {id(one): one for one in found if _is_array(one)}.values()
        found.clear()

    def _graph_over(self, storage: int) -> Optional[str]:
        """A graph whose backward has not been, and that saved the tensor, by what it is of."""
        for root in self.tensors:
            with contextlib.suppress(Exception):
                if root.grad_fn is not None and _saves(root.grad_fn, storage):
                    found = self.holder_of_any([root])
                    return f"the autograd graph of {found}" if found else "an autograd graph"
        return None


_SUSPENDED = {"gi_code": "generator", "cr_code": "coroutine", "ag_code": "async generator"}


def _is_poor(holder: Optional[Holder]) -> bool:
    """Whether another one, if there is one, is rather to be named: it is torch's own."""
    return holder is None or f"{os.sep}torch{os.sep}" in holder.place


def _best(holders: list[Optional[Holder]]) -> Optional[Holder]:
    of_torch = None
    for one in holders:
        if not _is_poor(one):
            return one
        of_torch = of_torch or one
    return of_torch


def _of_ended_frame(frame: Any, held: Any) -> Optional[Holder]:
    """Of a function that has ended, and whose frame an exception's traceback has."""
    names = [name for name, value in dict(frame.f_locals).items() if value is held]
    has_traceback = any(type(one) is types.TracebackType for one in gc.get_referrers(frame))
    if not names or not has_traceback:
        return None
    return Holder(f"`{names[0]}` in a traceback's frame of {_place(frame.f_code)}")


def _of_closure(cell: Any) -> Optional[Holder]:
    for closure in gc.get_referrers(cell):
        if type(closure) is tuple:
            for owner in gc.get_referrers(closure):
                if isinstance(owner, types.FunctionType):
                    return Holder(f"the closure of {_place(owner.__code__)}")
    return None


def _saves(node: Any, storage: int) -> bool:
    """Whether a graph has the memory saved for a backward that has not been.

    torch up to 2.9 does not tell which of them would run a hook of the user's.
    """
    seen: set[Any] = set()
    found = [node]
    while found and len(seen) < _NODES:
        one = found.pop()
        if one is None or one in seen:
            continue
        seen.add(one)
        for name in dir(type(one)):
            if not name.startswith("_raw_saved_"):
                continue
            if getattr(getattr(one, name), "unpack_hook", _storage_of) is None:
                with contextlib.suppress(RuntimeError):  # its backward is over
                    if _storage_of(getattr(one, name.replace("_raw", ""))) == storage:
                        return True
        found += [following for following, _ in one.next_functions]
    return False


def _storage_of(one: Any) -> Optional[int]:
    try:
        return int(getattr(one, "untyped_storage", lambda: one)()._cdata)
    except Exception:  # a tensor of another kind: fake, sparse, functional, ...
        return None


def _is_method(one: Any) -> bool:
    return isinstance(one, (types.MethodType, types.BuiltinMethodType))


def _is_array(one: Any) -> bool:
    return type(one).__name__ == "ndarray"


def _is_in_array(held: Any, array: Any) -> bool:
    return bool(array.dtype.hasobject) and any(one is held for one in array.ravel().tolist())


def _is_over(array: Any, memory: torch.UntypedStorage) -> bool:
    begin, is_here = memory.data_ptr(), memory.device.type == "cpu"
    return is_here and begin <= array.ctypes.data < begin + memory.nbytes()


def _word(one: Any) -> str:
    """A container, as it is called."""
    if isinstance(one, functools.partial):
        code = getattr(one.func, "__code__", None)
        name = getattr(one.func, "__qualname__", type(one.func).__qualname__)
        return f"partial of {name}" if code is None else f"partial of {_place(code)}"
    if isinstance(one, types.MethodType):
        return f"method {one.__name__} of {type(one.__self__).__qualname__}"
    if _is_array(one):
        return "NumPy object array" if one.dtype.hasobject else "NumPy array"
    return type(one).__name__.replace("managedbuffer", "memoryview")


def _frames() -> Iterator[types.FrameType]:
    for thread in sys._current_frames().values():
        frame: Optional[types.FrameType] = thread
        while frame is not None:
            if frame.f_globals.get("__name__", "").partition(".")[0] != "pp_hookfix":
                yield frame
            frame = frame.f_back


def _locals_of_frames() -> Iterator[tuple[int, Holder]]:
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
                word = "" if isinstance(value, torch.Tensor) else _word(value)
                yield id(value), Holder(f"`{name}` {where}", word)


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


def _file_of(module: Optional[types.ModuleType]) -> str:
    file = getattr(module, "__file__", None)
    return f" ({os.path.abspath(file)})" if file else ""


def _place(code: types.CodeType) -> str:
    name = getattr(code, "co_qualname", code.co_name)
    return f"{os.path.abspath(code.co_filename)}:{code.co_firstlineno} {name}"
