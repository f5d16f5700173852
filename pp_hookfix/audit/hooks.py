"""The hooks on a tensor, by every way that torch has to put one there, and which of them fire.

``torch.autograd.graph.register_multi_grad_hook`` registers tensor hooks. ``retain_grad`` does
nothing on a leaf, and saved-tensor hooks go with their graph.
"""

import contextlib
import functools
from collections import Counter
from types import CodeType
from typing import Any, NamedTuple

import torch
import wrapt

from pp_hookfix.audit import registrations

TENSOR = "tensor hook"
POST_ACCUMULATE = "post-accumulate-grad hook"
NODE = "hook on its AccumulateGrad node"
NODE_BEFORE = "pre-hook on its AccumulateGrad node"


class Place(NamedTuple):
    """Where the user's code registers a hook."""

    kind: str
    where: str
    """``file:line function``: the line that registers, and the function that is registered."""


def by_kind(tensor: torch.Tensor) -> dict[str, dict[int, Any]]:
    """torch's own dictionaries of the hooks on a tensor, by handle; those that have any."""
    found = {
        TENSOR: tensor._backward_hooks,
        POST_ACCUMULATE: getattr(tensor, "_post_accumulate_grad_hooks", None),
    }
    node = accumulator(tensor)
    if node is not None:
        found[NODE] = _hooks_of(node.register_hook)
        found[NODE_BEFORE] = _hooks_of(node.register_prehook)
    return {kind: hooks for kind, hooks in found.items() if hooks}


def accumulator(tensor: torch.Tensor) -> Any:
    """Where a leaf's gradient is accumulated: torch makes the node anew unless somebody has it."""
    if not tensor.requires_grad or not tensor.is_leaf or tensor.is_inference():
        return None
    with torch.inference_mode(False), torch.enable_grad():
        return tensor.view_as(tensor).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def _hooks_of(register: Any) -> Any:
    # A node shows its hooks to the handle of one alone.
    handle = register(_nothing)
    hooks = handle.hooks_dict_ref()
    handle.remove()
    return hooks


def _nothing(*gradients: Any) -> None:
    pass


def place_of(kind: str, handle: int, hook: Any) -> Place:
    """Where a hook was registered, and what it calls in the end."""
    name = "?"
    with contextlib.suppress(Exception):  # of strange callables
        name = _name(hook)
    return Place(kind, f"{registrations.line_of(handle)} {name}")


def _name(hook: Any) -> str:
    for _ in range(20):  # what answers to every name has no end
        if isinstance(hook, functools.partial):
            hook = hook.func
        elif hasattr(hook, "__wrapped__"):
            hook = hook.__wrapped__
        elif getattr(hook, "__module__", None) == torch.autograd.graph.__name__:
            # A multi-grad hook has the user's function in its closure.
            closed = dict(zip(hook.__code__.co_freevars, hook.__closure__))
            hook = closed["fn"].cell_contents
        else:
            break
    code = getattr(hook, "__code__", None)
    if isinstance(code, CodeType) or isinstance(hook, type):
        return str(hook.__qualname__)
    owner = getattr(hook, "__self__", None)
    if owner is not None and hasattr(hook, "__name__"):  # a method of a builtin: `list.append`
        return f"{type(owner).__name__}.{hook.__name__}"
    return f"{type(hook).__qualname__}.__call__"


class Known:
    """The hooks on one tensor, as they were last seen: what is new is looked at, once."""

    def __init__(self) -> None:
        self.hand_out = 0
        self.places: Counter[Place] = Counter()
        """How many of each place there are."""
        self.new: Counter[Place] = Counter()
        """Of these, put on since the last hand-out."""
        self.new_handles: set[int] = set()
        self._known: dict[str, dict[int, tuple[Place, int]]] = {}  # with the hand-out

    def begin_hand_out(self) -> None:
        self.hand_out += 1
        self.new.clear()
        self.new_handles.clear()

    def look(self, tensor: torch.Tensor) -> "tuple[dict[str, dict[int, Any]], bool]":
        """See what is there now: as torch has it, and whether anything was taken off."""
        found = by_kind(tensor)
        is_less = False
        for kind in {*found, *self._known}:
            there, known = found.get(kind, {}), self._known.setdefault(kind, {})
            # Handles count upwards, and torch keeps their order.
            new = []
            for handle in reversed(there):
                if handle in known:
                    break
                new.append(handle)
            for handle in reversed(new):
                place = place_of(kind, handle, there[handle])
                known[handle] = place, self.hand_out
                self.places[place] += 1
                self.new[place] += 1
                self.new_handles.add(handle)
            if len(known) > len(there):
                is_less = True
                for handle in known.keys() - there.keys():
                    place, hand_out = known.pop(handle)
                    self.places[place] -= 1
                    if hand_out == self.hand_out:
                        self.new[place] -= 1
        return found, is_less

    def place(self, kind: str, handle: int) -> Place:
        return self._known[kind][handle][0]

    def by_hand_out(self, found: dict[str, dict[int, Any]], since: int) -> dict[int, list[Any]]:
        """Hooks by the hand-out, from `since` on, for which they were put on."""
        hooks: dict[int, list[Any]] = {}
        for kind, there in found.items():
            for handle in reversed(there):
                hand_out = self._known[kind][handle][1]
                if hand_out < since:
                    break
                hooks.setdefault(hand_out, []).append(there[handle])
        return hooks


class Witness:
    """What the hooks of one dictionary are seen to do in a backward.

    torch calls all that are in a dictionary, or none. So some of them tell, which are called
    through wrapt's proxies meanwhile: these are equal to what they stand for.
    """

    def __init__(self, kind: str, hooks: dict[int, Any], known: Known) -> None:
        self._hooks = hooks
        self.places = Counter({place: n for place, n in known.places.items() if place.kind == kind})
        """Those that are there as it begins."""
        self.earlier = self.places - known.new
        """Of these, put on for an earlier hand-out."""
        self._calls: Counter[int] = Counter()
        self.changing: set[Place] = set()
        """Of hooks that returned a gradient, or changed one in place."""
        self._proxies: dict[int, Any] = {}
        for handle in known.new_handles & hooks.keys() or {next(reversed(hooks))}:
            watched = functools.partial(self._call, handle, known.place(kind, handle))
            proxy: Any = wrapt.FunctionWrapper(hooks[handle], watched)
            self._proxies[handle] = hooks[handle] = proxy

    def _call(
        self, handle: int, place: Place, hook: Any, instance: Any, args: Any, kwargs: Any
    ) -> Any:
        before = _versions(args)
        result = hook(*args, **kwargs)
        self._calls[handle] += 1
        if result is not None or _versions(args) != before:
            self.changing.add(place)
        return result

    def end(self) -> int:
        """Put the hooks themselves back; how often they were called."""
        for handle, proxy in self._proxies.items():
            if handle in self._hooks and self._hooks[handle] is proxy:
                self._hooks[handle] = proxy.__wrapped__
        self._proxies.clear()  # which refer to us
        return max(self._calls.values(), default=0)


def _versions(args: Any) -> list[Any]:
    """What differs when a gradient among a hook's arguments is changed in place."""
    found: list[Any] = []
    for one in args:
        if isinstance(one, tuple):
            found += _versions(one)
        elif isinstance(one, torch.Tensor) and not one.is_inference():
            found.append(one._version)
            if one.is_leaf and one.grad is not None:  # what a post-accumulate hook is given
                found += [id(one.grad), one.grad._version]
    return found
