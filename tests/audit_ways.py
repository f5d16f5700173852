"""Every way that torch has to put something on a stage's input, and to keep it or its memory.

A way is one function and its row: what a user's module does with its input (or, by `on`, with
its output, or after a step), and what the audit is to say of it. What stock torch does is not
written here: it is measured in the same job (audit_jobs.py).
"""

import collections
import contextvars
import functools
import queue
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import torch
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook, saved_tensors_hooks
from torch.utils import dlpack
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from audit_jobs import Job

TENSOR, POST, NODE, NODE_BEFORE = (
    "tensor hook",
    "post-accumulate-grad hook",
    "hook on its AccumulateGrad node",
    "pre-hook on its AccumulateGrad node",
)


@dataclass
class Way:
    """What a user does, and what the audit says."""

    do: Callable[..., Any]
    needs: str = "nothing"
    on: str = "input"
    """What `do(job, ...)` gets: the ``input``, the ``output``, or nothing (``module``, which is
    around the module's forward; ``step``, after each)."""
    hooks: int = 0
    """Of one place, that each microbatch puts on; those of two kinds have a row each."""
    name: str = ""
    """The function that is called in the end; default: a lambda of `do`."""
    kind: str = TENSOR
    changes: bool = False
    """Whether they change the gradient, so that stock torch trains wrongly."""
    attributes: tuple[str, ...] = ()
    held_by: tuple[str, ...] = ()
    """Words that name who keeps it."""
    kept: str = "input"
    not_looked_at: str = ""
    after: Callable[["Job"], Any] = lambda job: None
    at_end: Callable[[], Any] = lambda: None
    everywhere: bool = False
    """In every schedule, not in 1F1B alone."""
    runs_split: bool = True
    """Where the backward is split into inputs and weights."""
    since: tuple[int, int] = (2, 4)
    """The first torch on which what it does does not hang on when the collector runs."""
    fails_on: tuple[tuple[int, int], ...] = ()
    """Releases of which stock torch cannot train it."""
    options: set[str] = field(default_factory=set)
    """``infers``, ``evaluates between``, ``in DDP``."""

    def __post_init__(self) -> None:
        self.name = self.name or f"{self.do.__name__}.<locals>.<lambda>"


WAYS: dict[str, Way] = {}


def way(**row: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The row of a way."""

    def add(do: Callable[..., Any]) -> Callable[..., Any]:
        WAYS[do.__name__] = Way(do, **row)
        return do

    return add


hook = functools.partial(way, needs="detach", hooks=1)
keeps = functools.partial(way, needs="clone or fresh", held_by=("attribute `kept` of Job",))


class Probe:
    """A callable object, as a hook; and one to have attributes."""

    saved: list[torch.Tensor] = []  # noqa: RUF012

    def __init__(self, job: "Job", held: Any = None) -> None:
        self.job, self.held = job, held

    def __call__(self, gradient: Any) -> None:
        self.job.count()

    def method(self, gradient: Any) -> None:
        self.job.count()


# --- hooks


@hook(everywhere=True)
def registers_a_lambda(job: "Job", x: torch.Tensor) -> None:
    x.register_hook(lambda gradient: job.count())


@hook(name="Job.count_gradient")
def registers_a_partial(job: "Job", x: torch.Tensor) -> None:
    x.register_hook(functools.partial(type(job).count_gradient, job))


@hook(name="Probe.method")
def registers_a_method(job: "Job", x: torch.Tensor) -> None:
    x.register_hook(Probe(job).method)


@hook(name="Probe.__call__")
def registers_an_object(job: "Job", x: torch.Tensor) -> None:
    x.register_hook(Probe(job))


@hook(name="Fired.append")
def registers_a_method_of_a_builtin(job: "Job", x: torch.Tensor) -> None:
    x.register_hook(job.fired.append)


@hook(hooks=2)
def registers_twice(job: "Job", x: torch.Tensor) -> None:
    for _ in range(2):
        x.register_hook(lambda gradient: job.count())


@hook(kind=POST, everywhere=True)
def registers_post_accumulate(job: "Job", x: torch.Tensor) -> None:
    x.register_post_accumulate_grad_hook(lambda leaf: job.count())


@hook()
def registers_a_multi_grad_hook(job: "Job", x: torch.Tensor) -> None:
    register_multi_grad_hook([x], lambda gradients: job.count())


@hook()
def registers_a_multi_grad_hook_for_any(job: "Job", x: torch.Tensor) -> None:
    register_multi_grad_hook([x], lambda gradient: job.count(), mode="any")


@hook(kind=NODE)
def registers_on_the_node_and_keeps_it(job: "Job", x: torch.Tensor) -> None:
    node: Any = get_gradient_edge(x).node
    node.register_hook(lambda *gradients: job.count())
    job.other.append(node)


@hook(kind=NODE_BEFORE)
def registers_before_the_node_and_keeps_it(job: "Job", x: torch.Tensor) -> None:
    node = get_gradient_edge(x).node
    node.register_prehook(lambda gradients: job.count())
    job.other.append(node)


@hook(kind=NODE, everywhere=True)
def registers_on_the_node_by_expand_as(job: "Job", x: torch.Tensor) -> None:
    node: Any = x.expand_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *gradients: job.count())
    job.other.append(node)


@hook(kind=NODE, attributes=("node",))
def keeps_the_node_as_attribute(job: "Job", x: torch.Tensor) -> None:
    node: Any = x.expand_as(x).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(lambda *gradients: job.count())
    x.node = node  # type: ignore[attr-defined]


@way(since=(2, 6))
def registers_on_the_node_alone(job: "Job", x: torch.Tensor) -> None:
    """Which is gone before the forward uses the input.

    Up to 2.5 a cycle of torch's own has it, until the garbage collector comes.
    """
    get_gradient_edge(x).node.register_hook(lambda *gradients: job.count())


@hook()
def registers_in_the_first_step(job: "Job", x: torch.Tensor) -> None:
    """And relies on stock torch's fault."""
    if job.step == 0:
        x.register_hook(lambda gradient: job.count())


@hook()
def registers_unless_there_are_hooks(job: "Job", x: torch.Tensor) -> None:
    if not x._backward_hooks:
        x.register_hook(lambda gradient: job.count())


@hook(attributes=("has_hook",))
def registers_unless_there_is_an_attribute(job: "Job", x: torch.Tensor) -> None:
    if not hasattr(x, "has_hook"):
        x.has_hook = True  # type: ignore[attr-defined]
        x.register_hook(lambda gradient: job.count())


@hook()
def registers_once_for_each_tensor(job: "Job", x: torch.Tensor) -> None:
    if id(x) not in job.ids:
        job.ids.add(id(x))
        x.register_hook(lambda gradient: job.count())


@way(after=lambda job: [job.other.pop().remove() for _ in list(job.other)])
def removes_after_the_step(job: "Job", x: torch.Tensor) -> None:
    job.other.append(x.register_hook(job.count_gradient))


@way()
def removes_in_the_next_forward(job: "Job", x: torch.Tensor) -> None:
    """Late, but before stock torch calls them again."""
    old = job.handles.pop(job.microbatch, None)
    if old is not None:
        old.remove()
    job.handles[job.microbatch] = x.register_hook(job.count_gradient)


def _removes_those_of_the_last_step(job: "Job") -> None:
    for step, handle in job.other:
        if step < job.step:
            handle.remove()
    job.other = [(step, handle) for step, handle in job.other if step == job.step]


@hook(name="Job.count_gradient", after=_removes_those_of_the_last_step)
def removes_after_the_next_step(job: "Job", x: torch.Tensor) -> None:
    job.other.append((job.step, x.register_hook(job.count_gradient)))


@way()
def removes_itself_when_called(job: "Job", x: torch.Tensor) -> None:
    def once(gradient: torch.Tensor) -> None:
        job.count()
        handle.remove()

    handle = x.register_hook(once)


@hook(changes=True)
def halves_the_gradient(job: "Job", x: torch.Tensor) -> None:
    x.register_hook(lambda gradient: gradient * job.counted(0.5))


@hook(changes=True, kind=POST, name="halves_it_in_place.<locals>.halve", runs_split=False)
def halves_it_in_place(job: "Job", x: torch.Tensor) -> None:
    def halve(leaf: torch.Tensor) -> None:
        job.count()
        leaf.grad.mul_(0.5)  # type: ignore[union-attr]

    x.register_post_accumulate_grad_hook(halve)


@hook(name="holds_memory.<locals>.<lambda>", everywhere=True)
def holds_memory(job: "Job", x: torch.Tensor) -> None:
    """1000 bytes of its own, and the input that it is on."""
    held = torch.zeros(1000, dtype=torch.uint8)
    x.register_hook(lambda gradient: job.count(len(held), x))


@hook()
def holds_a_view_and_an_array(job: "Job", x: torch.Tensor) -> None:
    view, array = x.detach(), x.detach().numpy()
    x.register_hook(lambda gradient: job.count(len(view), len(array)))


@hook()
def holds_the_input_and_the_losses_are_kept(job: "Job", x: torch.Tensor) -> None:
    job.keeps_losses = True
    x.register_hook(lambda gradient: job.count(x))


@way()
def retains_its_gradient(job: "Job", x: torch.Tensor) -> None:
    x.retain_grad()


# --- attributes


@way(needs="detach", attributes=("seen_in_step",))
def leaves_an_attribute(job: "Job", x: torch.Tensor) -> None:
    job.meets(hasattr(x, "seen_in_step"))
    x.seen_in_step = job.step  # type: ignore[attr-defined]


@way(needs="detach", attributes=("copy",))
def leaves_a_view_as_attribute(job: "Job", x: torch.Tensor) -> None:
    job.meets(hasattr(x, "copy"))
    x.copy = x.detach()  # type: ignore[attr-defined]


class Named(torch.Tensor):
    """A subclass, with state of its own."""


# torch 2.6 detaches a stage's outputs in place, which those of a subclass do not let it.
@way(needs="detach", attributes=(".__class__", "state"), fails_on=((2, 6),))
def gives_it_another_class(job: "Job", x: torch.Tensor) -> None:
    job.meets(type(x) is Named)
    x.__class__ = Named
    x.state = job.step  # type: ignore[attr-defined]


@way()
def takes_it_as_a_subclass(job: "Job", x: torch.Tensor) -> None:
    named = x.as_subclass(Named)
    job.meets(hasattr(named, "state"))
    named.state = job.step  # type: ignore[attr-defined]


# --- kept


@keeps(everywhere=True)
def keeps_the_input(job: "Job", x: torch.Tensor) -> None:
    job.keep(x, x)


@keeps()
def keeps_what_is_detached(job: "Job", x: torch.Tensor) -> None:
    job.keep(x.detach(), x)


@keeps()
def keeps_a_view(job: "Job", x: torch.Tensor) -> None:
    job.keep(x[:1], x[:1])


@keeps()
def keeps_an_array(job: "Job", x: torch.Tensor) -> None:
    job.keep(x.detach().numpy(), x)


@keeps()
def keeps_a_memoryview(job: "Job", x: torch.Tensor) -> None:
    array: Any = x.detach().numpy()
    job.keep(memoryview(array), x)


@keeps()
def keeps_what_came_by_dlpack(job: "Job", x: torch.Tensor) -> None:
    job.keep(np.from_dlpack(x.detach()), x)


@keeps(held_by=("something that Python does not show",))
def keeps_a_dlpack_capsule(job: "Job", x: torch.Tensor) -> None:
    capsule = torch._C._to_dlpack(x.detach())
    job.keep_elsewhere(lambda: dlpack.from_dlpack(capsule), x)


@keeps()
def keeps_its_storage(job: "Job", x: torch.Tensor) -> None:
    job.keep(x.untyped_storage(), x)


@keeps(held_by=("NumPy object array attribute `array` of Job",))
def keeps_it_in_an_object_array(job: "Job", x: torch.Tensor) -> None:
    index = job.number
    job.keep_elsewhere(lambda: job.array[index], x)
    job.array[index] = x


class Pair(collections.namedtuple("Pair", "step x")):
    """A named tuple's subclass."""


class Attributes(dict):  # type: ignore[type-arg]
    """A dictionary's subclass."""


def _into(container: Any, word: str) -> None:
    """A way that keeps the input in a container that the job has as an attribute."""

    def keep(job: "Job", x: torch.Tensor) -> None:
        if not hasattr(job, "container"):
            job.container = container()
        index = job.number
        put, get = _ACCESS[container]
        put(job.container, index, x)
        job.keep_elsewhere(lambda: get(job.container, index), x)

    keep.__name__ = f"keeps_it_in_{word}"
    keeps(held_by=("attribute `container` of Job",))(keep)


_ACCESS: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {
    collections.deque: (lambda c, i, x: c.append(x), lambda c, i: c[i]),
    collections.OrderedDict: (lambda c, i, x: c.__setitem__(i, x), lambda c, i: c[i]),
    Attributes: (lambda c, i, x: c.__setitem__(i, x), lambda c, i: c[i]),
    list: (lambda c, i, x: c.append(Pair(i, x)), lambda c, i: c[i].x),
    dict: (lambda c, i, x: c.__setitem__(i, [{"x": (x,)}]), lambda c, i: c[i][0]["x"][0]),
}
for _container, _word in (
    (collections.deque, "a_deque"),
    (collections.OrderedDict, "an_ordered_dict"),
    (Attributes, "a_subclass_of_dict"),
    (list, "named_tuples"),
    (dict, "containers_in_containers"),
):
    _into(_container, _word)


@keeps(held_by=("defaultdict attribute `lists` of Job",))
def keeps_it_in_a_defaultdict(job: "Job", x: torch.Tensor) -> None:
    if not hasattr(job, "lists"):
        job.lists = collections.defaultdict(list)
    job.lists[job.step].append(x)
    step, at = job.step, len(job.lists[job.step]) - 1
    job.keep_elsewhere(lambda: job.lists[step][at], x)


@keeps(held_by=("attribute `saved` of class Probe",), at_end=lambda: Probe.saved.clear())
def keeps_it_as_attribute_of_a_class(job: "Job", x: torch.Tensor) -> None:
    saved = Probe.saved
    index = len(saved)
    saved.append(x)
    job.keep_elsewhere(lambda: saved[index], x)


@keeps(held_by=("SimpleQueue attribute `queue` of Job",))
def keeps_it_in_a_queue(job: "Job", x: torch.Tensor) -> None:
    if not hasattr(job, "queue"):
        job.queue = queue.SimpleQueue()
    job.queue.put(x)
    job.keep_elsewhere(lambda: job.queue.get(), x)


@keeps(held_by=("list attribute `calls` of Job",))
def keeps_it_in_a_partial(job: "Job", x: torch.Tensor) -> None:
    index = len(job.calls)
    job.calls.append(functools.partial(print, x))
    job.keep_elsewhere(lambda: job.calls[index].args[0], x)


@keeps(held_by=("the closure of", "audit_ways.py", "keeps_it_in_a_closure.<locals>.<lambda>"))
def keeps_it_in_a_closure(job: "Job", x: torch.Tensor) -> None:
    index = len(job.calls)
    job.calls.append(lambda: x)
    job.keep_elsewhere(lambda: job.calls[index](), x)


@keeps(held_by=("a default of", "audit_ways.py"))
def keeps_it_in_a_default(job: "Job", x: torch.Tensor) -> None:
    index = len(job.calls)
    job.calls.append(lambda held=x: held)
    job.keep_elsewhere(lambda: job.calls[index](), x)


@keeps(held_by=("attribute `held` of threading.local",))
def keeps_it_in_a_thread_local(job: "Job", x: torch.Tensor) -> None:
    if not hasattr(job, "local"):
        job.local = threading.local()
        job.local.held = []
    index = len(job.local.held)
    job.local.held.append(x)
    job.keep_elsewhere(lambda: job.local.held[index], x)


@keeps(held_by=("`held` in a frame of", "audit_ways.py", "wait"))
def keeps_it_in_a_frame_of_a_thread(job: "Job", x: torch.Tensor) -> None:
    release, found = threading.Event(), []

    def wait(held: torch.Tensor) -> None:
        release.wait(120)
        found.append(held)

    thread = threading.Thread(target=wait, args=(x,), daemon=True)
    thread.start()

    def end() -> Any:
        release.set()
        thread.join(120)
        return found.pop()

    job.keep_elsewhere(end, x)


@keeps(held_by=("a coroutine", "audit_ways.py", "wait"))
def keeps_it_in_a_coroutine(job: "Job", x: torch.Tensor) -> None:
    async def wait(held: torch.Tensor) -> torch.Tensor:
        await Once()
        return held

    coroutine = wait(x)
    coroutine.send(None)
    job.other.append(coroutine)

    def end() -> Any:
        try:
            coroutine.send(None)
        except StopIteration as stop:
            return stop.value

    job.keep_elsewhere(end, x)


class Once:
    """Awaited once."""

    def __await__(self) -> Generator[Any, Any, Any]:
        yield


@keeps(held_by=("a generator", "audit_ways.py", "hold"))
def keeps_it_in_a_generator(job: "Job", x: torch.Tensor) -> None:
    def hold(held: torch.Tensor) -> Iterator[Any]:
        yield None
        yield held

    generator = hold(x)
    next(generator)
    job.other.append(generator)
    job.keep_elsewhere(lambda: next(generator), x)


@keeps(held_by=("`held` in a traceback's frame of", "audit_ways.py", "fails"))
def keeps_it_in_a_traceback(job: "Job", x: torch.Tensor) -> None:
    def fails(held: torch.Tensor) -> None:
        raise ValueError

    try:
        fails(x)
    except ValueError as error:
        # Its own frame, this one, has the input too.
        error.__traceback__ = error.__traceback__.tb_next  # type: ignore[union-attr]
        traceback = error.__traceback__
        job.other.append(error)
    job.keep_elsewhere(lambda: traceback.tb_frame.f_locals["held"], x)  # type: ignore[union-attr]


@keeps(held_by=("Context attribute `context` of Job"))
def keeps_it_in_a_context(job: "Job", x: torch.Tensor) -> None:
    if not hasattr(job, "context"):
        job.context = contextvars.Context()
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar(f"held{job.number}")
    job.context.run(variable.set, x)
    job.keep_elsewhere(lambda: job.context[variable], x)


class Saves(torch.autograd.Function):
    """A function of the user's, which keeps its input by itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.x = x
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * 2


@keeps(held_by=("attribute `x` of SavesBackward",))
def keeps_it_in_a_function_of_its_own(job: "Job", x: torch.Tensor) -> None:
    saves: Any = Saves
    y = saves.apply(x).sum()
    job.other.append(y)
    job.keep_elsewhere(lambda: y.grad_fn.next_functions[0][0].x, x)


@keeps(held_by=("the autograd graph of list attribute `kept` of Job",), everywhere=True)
def keeps_it_in_a_graph(job: "Job", x: torch.Tensor) -> None:
    """A norm that is not detached: its graph saved the input."""
    job.keep(x.norm(), x)


@keeps(hooks=1)
def keeps_it_and_registers(job: "Job", x: torch.Tensor) -> None:
    job.keep(x, x)
    x.register_hook(lambda gradient: job.count())


@keeps(hooks=1)
def keeps_it_by_a_hook_in_a_list(job: "Job", x: torch.Tensor) -> None:
    """The hook's closure has the list in which the input is kept."""
    kept = job.kept
    job.keep(x, x)
    x.register_hook(lambda gradient: job.count(len(kept), x))


@keeps(on="output", kept="gradient", everywhere=True)
def keeps_the_gradient(job: "Job", y: torch.Tensor) -> None:
    y.register_hook(lambda gradient: job.keep(gradient, gradient))


@keeps(options={"infers"})
def infers_and_keeps_the_input(job: "Job", x: torch.Tensor) -> None:
    job.keep(x, x)


@way(needs="unknown", not_looked_at="shared with other processes")
def shares_its_memory(job: "Job", x: torch.Tensor) -> None:
    x.share_memory_()


# --- nothing to be told of


@way()
def does_nothing(job: "Job", x: torch.Tensor) -> None:
    pass


@way()
def keeps_copies(job: "Job", x: torch.Tensor) -> None:
    job.keep(x.detach().clone(), x)


@way(after=lambda job: job.other.clear())
def drops_in_time(job: "Job", x: torch.Tensor) -> None:
    job.other += [x, x.detach(), x[:1], x.norm(), x.detach().numpy()]


@way()
def logs_norms(job: "Job", x: torch.Tensor) -> None:
    job.other += [x.detach().norm(), x.norm().item()]


@way(everywhere=True)
def keeps_the_losses(job: "Job", x: torch.Tensor) -> None:
    """For the whole run, as they come: not detached."""
    job.keeps_losses = True


@way()
def spends_a_cycle(job: "Job", x: torch.Tensor) -> None:
    """What is in a cycle lives until the collector comes, and nobody keeps it."""
    cycle: list[Any] = [x]
    cycle.append(cycle)


@way(on="module", runs_split=False)
def checkpoints(job: "Job", module: Any, x: torch.Tensor) -> Any:
    return checkpoint(module, x, use_reentrant=False)


@way(on="module", runs_split=False)
def checkpoints_reentrant(job: "Job", module: Any, x: torch.Tensor) -> Any:
    return checkpoint(module, x, use_reentrant=True)


@way(on="module")
def saves_by_hooks_of_its_own(job: "Job", module: Any, x: torch.Tensor) -> Any:
    with saved_tensors_hooks(lambda saved: (saved,), lambda packed: packed[0]):
        return module(x)


@way(on="module", runs_split=False)
def compiles(job: "Job", module: Any, x: torch.Tensor) -> Any:
    """With the compiler's front end, which is what meets the input."""
    compiled: Any = torch.compile(module, backend="eager")
    return compiled(x)


@way(on="module", runs_split=False, needs="detach", hooks=1)
def registers_and_checkpoints(job: "Job", module: Any, x: torch.Tensor) -> Any:
    x.register_hook(lambda gradient: job.count())
    return checkpoint(module, x, use_reentrant=False)


@way(options={"in DDP"}, runs_split=False)
def is_replicated(job: "Job", x: torch.Tensor) -> None:
    """By a group of each rank alone."""


@way(options={"infers"})
def infers_only(job: "Job", x: torch.Tensor) -> None:
    """No loss, no gradients."""


@way(options={"evaluates between"}, runs_split=False)
def evaluates_between(job: "Job", x: torch.Tensor) -> None:
    """`eval()` between steps (torch 2.9 and later)."""


@hook(options={"evaluates between"}, runs_split=False)
def registers_and_evaluates_between(job: "Job", x: torch.Tensor) -> None:
    x.register_hook(lambda gradient: job.count())
