"""How many references there are to a receive buffer, or to its memory: more, and it is kept."""

import sys
from typing import Any, NamedTuple

import torch

from pp_hookfix.audit import hooks, ownership


class References(NamedTuple):
    """By what refers."""

    python: int
    cpp: int
    """To the tensor, as graphs do which saved it for their backward."""
    storage: int
    """Of views, what was detached, arrays, memoryviews, ... and of a storage object."""

    def beyond(self, others: "References") -> "References":
        """How many more, each at least 0."""
        return References(*(max(one - other, 0) for one, other in zip(self, others)))

    def most(self, others: "References") -> "References":
        return References(*map(max, self, others))


class Owned(NamedTuple):
    """What some hooks or attributes of a buffer hold, and nobody else does."""

    references: int
    """To the buffer itself."""
    views: int
    """Tensors over its memory."""
    size: int
    """Bytes of other tensors."""
    holders: set[int]
    """The ``id`` of each object that holds."""

    def and_also(self, others: "Owned") -> "Owned":
        """Both; the sets are one, since there may be very many hooks."""
        self.holders.update(others.holders)
        return Owned(
            self.references + others.references,
            self.views + others.views,
            self.size + others.size,
            self.holders,
        )


def owned(tensor: torch.Tensor, roots: list[Any]) -> Owned:
    """Count what hooks, or the values of attributes, hold alone.

    Args:
        tensor: the buffer that they are on.
        roots: they themselves.
    """
    if not roots:
        return nothing()
    held = ownership.held_alone(roots)
    storage = _storage_of(tensor)
    others: dict[int, int] = {}
    views = 0
    for one in held.tensors:
        address = _storage_of(one)
        if address and address == storage:
            views += 1
        elif address:
            others[address] = one.untyped_storage().nbytes()
    return Owned(held.references[id(tensor)], views, sum(others.values()), held.holders)


def nothing() -> Owned:
    return Owned(0, 0, 0, set())


def to(tensor: torch.Tensor, alone: Owned) -> References:
    """Count them, but for those that go with the tensor's own hooks and attributes.

    Nor is the AccumulateGrad node counted, which refers to it: all that a loss which is kept
    has of an input is where to put its gradient.
    """
    try:
        storage: Any = tensor.untyped_storage()
        in_storage = torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)
    except (RuntimeError, NotImplementedError):  # it has none of its own
        storage, in_storage = None, 0
    node = hooks.accumulator(tensor)  # there is one, if there was not
    cpp = ownership.uses(tensor)
    found = References(
        sys.getrefcount(tensor) - _FROM_CPP * (cpp > 1) - alone.references,
        cpp - (node is not None),
        in_storage - alone.views,
    )
    del node
    return found


def _storage_of(tensor: Any) -> int:
    """The address of its storage; 0 where it has none of its own."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return 0


def _python_references_from_cpp() -> int:
    """One, in torch from 2.10 on, of a tensor that anything in C++ refers to, too."""
    tensor = torch.zeros(1, requires_grad=True)
    before = sys.getrefcount(tensor)
    node = hooks.accumulator(tensor)
    after = sys.getrefcount(tensor)
    del node
    return after - before


_FROM_CPP = _python_references_from_cpp()
