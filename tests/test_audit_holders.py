"""Who holds a tensor, in words, for every place where Python can keep one."""

import collections
import functools
import threading
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
    tensor = made()
    storage, reference = tensor.untyped_storage()._cdata, TensorWeakRef(tensor)
    kept = [keep(tensor)]
    del tensor
    try:
        return holders.of(storage, reference)
    finally:
        kept.clear()


def test_a_local_of_a_running_function() -> None:
    saved: Any
    for saved, kind in (
        ([made()], "list "),
        ({"x": made()}, "dict "),
        (collections.deque([made()]), "deque "),
        ([{"x": (made(),)}], "list "),
        (made(), ""),
    ):
        tensor = saved
        while not isinstance(tensor, torch.Tensor):
            tensor = tensor["x"] if isinstance(tensor, dict) else tensor[0]
        storage, reference = tensor.untyped_storage()._cdata, TensorWeakRef(tensor)
        del tensor
        found = holders.of(storage, reference)
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
    assert search(lambda x: setattr(owner, "cache", x)) == f"attribute `cache` of {kind}"
    assert search(lambda x: setattr(owner, "cache", [x])) == f"list attribute `cache` of {kind}"
    array = search(lambda x: setattr(owner, "cache", x.detach().numpy()))
    assert array == f"NumPy array in attribute `cache` of {kind}"
    view = search(lambda x: setattr(owner, "cache", x.detach()[1:]))
    assert view == f"attribute `cache` of {kind}"


def test_a_slot() -> None:
    owner = Slots()
    assert search(lambda x: setattr(owner, "held", x)) == "attribute `held` of Slots"


def test_a_closure_and_a_default() -> None:
    owner = Probe()

    def in_closure(x: torch.Tensor) -> None:
        owner.cache = lambda: x

    def in_default(x: torch.Tensor) -> None:
        owner.cache = lambda y=x: y

    for keep, how in ((in_closure, "the closure of "), (in_default, "tuple in a default of ")):
        found = search(keep)
        assert found is not None
        assert found.startswith(f"{how}{HERE}:")


def test_a_partial() -> None:
    owner = Probe()
    found = search(lambda x: setattr(owner, "cache", functools.partial(print, x)))
    assert found is not None
    assert "print" in found


def test_a_graph_whose_backward_has_not_been() -> None:
    owner = Probe()
    found = search(lambda x: setattr(owner, "cache", (x * x).sum()))
    assert found == "the autograd graph of attribute `cache` of Probe"


def test_another_thread() -> None:
    tensor, release, ready = made(), threading.Event(), threading.Event()

    def work(held: torch.Tensor) -> None:
        ready.set()
        release.wait(60)

    thread = threading.Thread(target=work, args=(tensor,))
    storage, reference = tensor.untyped_storage()._cdata, TensorWeakRef(tensor)
    del tensor
    thread.start()
    ready.wait(60)
    found = holders.of(storage, reference)
    release.set()
    thread.join()
    assert found is not None
    assert "in a frame of " in found
    assert "work" in found or "run" in found


def test_torch_itself_is_nobody() -> None:
    class _RecvInfo:
        buffer: Any = None

    info = _RecvInfo()
    info.__class__.__qualname__ = "_RecvInfo"
    assert search(lambda x: setattr(info, "buffer", x)) is None


def test_nothing_that_it_looked_at_is_kept_alive() -> None:
    owner = Probe()
    tensor = owner.cache = made()
    storage, reference = tensor.untyped_storage()._cdata, TensorWeakRef(tensor)
    del tensor
    assert holders.of(storage, reference) is not None
    owner.cache = None
    assert reference() is None
