"""Who holds a tensor, in words: what the ways of audit_ways.py do not meet."""

import functools
from typing import Any, Callable, Optional

import pytest
import torch
from torch.utils.weak import TensorWeakRef

from pp_hookfix.audit import holders

SAVED: list[Any] = []
HERE = __file__


class Probe:
    def __init__(self) -> None:
        self.cache: Any = None


class Slots:
    __slots__ = ("held",)

    held: Any


def made() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def search(keep: Callable[[torch.Tensor], Any]) -> Optional[str]:
    """Who holds a tensor besides a descriptor of torch's."""
    info = _RecvInfo()
    info.buffer = made()
    kept = [keep(info.buffer)]
    try:
        return holders.of(info.buffer, in_graph=True, but={id(kept)})
    finally:
        kept.clear()


class _RecvInfo:
    buffer: Any = None


def test_a_local_of_a_running_function() -> None:
    saved: Any
    for saved, kind in (([0], "list "), ({"x": 0}, "dict "), ([{"x": (0,)}], "list ")):

        def keep(x: torch.Tensor, saved: Any = saved) -> None:
            if isinstance(saved, dict):
                saved["x"] = x
            elif saved == [0]:
                saved[0] = x
            else:
                saved[0]["x"] = (x,)

        found = search(keep)
        del keep
        assert found is not None
        assert found.startswith(f"{kind}`saved` in a frame of {HERE}:")
        assert found.endswith("test_a_local_of_a_running_function")


def test_a_global() -> None:
    try:
        assert search(SAVED.append) == f"list `SAVED` of module {__name__} ({HERE})"
    finally:
        SAVED.clear()


@pytest.mark.parametrize("owner", [Probe(), torch.nn.Linear(1, 1)])
def test_an_attribute(owner: Any) -> None:
    kind = type(owner).__name__

    def cached(value: Callable[[torch.Tensor], Any]) -> Optional[str]:
        return search(lambda x: setattr(owner, "cache", value(x)))

    assert cached(lambda x: x) == f"attribute `cache` of {kind}"
    assert cached(lambda x: [x]) == f"list attribute `cache` of {kind}"
    assert cached(lambda x: x.detach()[1:]) == f"attribute `cache` of {kind}"
    assert cached(lambda x: x.detach().numpy()) == f"attribute `cache` of {kind}"
    partial = cached(lambda x: functools.partial(print, x))
    assert partial == f"partial of print in attribute `cache` of {kind}"
    graph = cached(lambda x: (x * x).sum())
    if hasattr(torch._C._autograd.SavedTensor, "unpack_hook"):
        assert graph == f"the autograd graph of attribute `cache` of {kind}"
    else:
        assert graph == holders.UNKNOWN
    owner.cache = None


def test_a_slot() -> None:
    owner = Slots()
    assert search(lambda x: setattr(owner, "held", x)) == "attribute `held` of Slots"


def test_a_graph_whose_backward_is_over_is_nobody() -> None:
    owner = Probe()

    def spend(x: torch.Tensor) -> None:
        owner.cache = (x * x).sum()
        owner.cache.backward()

    assert search(spend) == holders.UNKNOWN


def test_an_unpack_hook_of_the_users_is_not_run() -> None:
    owner = Probe()
    ran: list[torch.Tensor] = []

    def unpack(saved: torch.Tensor) -> torch.Tensor:
        ran.append(saved)
        return saved

    def keep(x: torch.Tensor) -> None:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            owner.cache = (x * x).sum()

    assert search(keep) == holders.UNKNOWN
    assert ran == []


def test_torch_itself_is_nobody() -> None:
    other = _RecvInfo()
    assert search(lambda x: setattr(other, "buffer", x)) is None


def test_nothing_that_it_looked_at_is_kept_alive() -> None:
    owner = Probe()
    owner.cache = [made()]
    gone = TensorWeakRef(owner.cache[0])
    found = holders.of(owner.cache[0], in_graph=True, but=set())
    assert found == "list attribute `cache` of Probe"
    owner.cache = None
    assert gone() is None
