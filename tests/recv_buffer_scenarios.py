"""What the ranks of test_recv_buffer_hooks.py run, all within one spawn.

Each scenario returns plain numbers and booleans of its own rank; the test
process asserts on them. Scenarios that only differ in whether the fix is on
take `fixed`, and `compare` runs them both ways.
"""

import contextlib
import gc
import inspect
import os
import weakref
from typing import Any, Callable, Optional, Union

import torch
import torch.distributed as dist
from conftest import TORCH
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline
from torch.utils.checkpoint import checkpoint

import pp_hookfix
from pp_hookfix.policies import AUDIT
from pp_hookfix.settings import AUDIT_VARIABLE
from pp_hookfix.verification import schedules, training
from pp_hookfix.verification.ranks import Rank
from pp_hookfix.verification.training import FEATURES, ROWS, InputHooks, Record

STEPS = 5
FRONTENDS = ["manual", "inferred", "traced"]
if inspect.signature(PipelineStage).parameters["input_args"].default is inspect.Parameter.empty:
    FRONTENDS.remove("inferred")  # 2.4 and 2.5 want example tensors


def hands_over(name: str) -> bool:
    """Whether neighbours on one rank hand each other tensors, and send nothing to themselves.

    ZBVZeroBubble sends to its own rank up to torch 2.9.
    """
    sends = name == "ZBVZeroBubble" and TORCH < (2, 10)
    return schedules.LAYOUTS[name].v_shaped and not sends


def switch(fixed: Union[bool, str]) -> None:
    """For what follows: stock torch (False), the default policy (True), or a policy by name."""
    os.environ.pop(AUDIT_VARIABLE, None)
    if fixed == AUDIT:
        # As in the command's processes, but noted nowhere.
        os.environ[AUDIT_VARIABLE] = "nowhere"
        pp_hookfix.enable()
    elif fixed:
        pp_hookfix.enable("detach" if fixed is True else str(fixed))
    else:
        pp_hookfix.disable()


class LeakProbe(InputHooks):
    """Counts, per step, all that a stage input still carries from earlier microbatches."""

    def __init__(self, stage: Any, record: Record) -> None:
        super().__init__(stage, record)
        self._stage = stage
        self.accumulated: list[int] = []
        self.attributes: list[int] = []
        self.grads_on_buffers: list[int] = []

    def begin_step(self) -> None:
        if self.step >= 0:
            self.grads_on_buffers.append(self._grads_on_buffers())
        super().begin_step()
        self.accumulated.append(0)
        self.attributes.append(0)

    def remove(self) -> None:
        self.grads_on_buffers.append(self._grads_on_buffers())
        super().remove()

    def _grads_on_buffers(self) -> int:
        return sum(
            direction == "args" and buffer.grad is not None
            for direction, buffer in training.held_buffers(self._stage)
        )

    def _meet(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        super()._meet(module, inputs)
        for tensor in inputs:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(self._accumulated)
                self.attributes[-1] += hasattr(tensor, "seen_before")
                tensor.seen_before = True  # type: ignore[attr-defined]

    def _accumulated(self, tensor: torch.Tensor) -> None:
        self.accumulated[-1] += 1


class Layer(torch.nn.Module):
    """No ``Sequential``: torch 2.5 and 2.6 lose its modules' names as they trace."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(FEATURES, FEATURES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Layers(torch.nn.Module):
    """A whole model for the traced front end: one layer per stage."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Traced:
    """Pipelines of the traced front end, traced once per number of stages."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._pipes: dict[int, tuple[Any, list[dict[str, torch.Tensor]]]] = {}

    def stages(self, name: str) -> list[Any]:
        number = schedules.number_of_stages(name, self._rank.ranks)
        if number not in self._pipes:
            torch.manual_seed(0)
            pipe = pipeline(
                Layers(number),
                mb_args=(torch.zeros(ROWS, FEATURES),),
                split_spec={f"layers.{i}": SplitPoint.BEGINNING for i in range(1, number)},
            )
            initial = [
                {key: value.clone() for key, value in pipe.get_stage_module(i).state_dict().items()}
                for i in range(number)
            ]
            self._pipes[number] = pipe, initial
        pipe, initial = self._pipes[number]
        stages = []
        for index in schedules.stages_of(name, self._rank.rank, self._rank.ranks):
            pipe.get_stage_module(index).load_state_dict(initial[index])
            stages.append(pipe.build_stage(index, self._rank.device))
        return stages


def leaks(
    rank: Rank, traced: Traced, name: str, frontend: str, fixed: Union[bool, str]
) -> tuple[Record, dict[str, Any]]:
    """Train with every kind of leak on every stage's input; count what piles up."""
    switch(fixed)
    microbatches = schedules.microbatches_of(name, rank.ranks, 4)
    if frontend == "traced":
        stages = traced.stages(name)
    else:
        stages = training.make_stages(
            name, rank.rank, rank.ranks, rank.device, infer_metadata=frontend == "inferred"
        )
    schedule = schedules.build(name, stages, microbatches, training.summed_error)
    record = training.run_steps(schedule, stages, STEPS, microbatches, rank.device, LeakProbe)
    if frontend == "inferred":
        # From 2.12 metadata inference runs the module once more, on uninitialized
        # memory: the first gradient of step 1 is of that run.
        for (_, step), gradients in record.boundary.items():
            if step == 0:
                del gradients[:-microbatches]
    return record, {
        str(probe.stage_index): {
            "register_hook": probe.counts,
            "register_post_accumulate_grad_hook": probe.accumulated,
            "attribute": probe.attributes,
            "grad": probe.grads_on_buffers,
        }
        for probe in record.hooked
        if isinstance(probe, LeakProbe) and probe.stage_index > 0
    }


def equal(one: Record, other: Record) -> dict[str, bool]:
    return {
        "losses": training.losses_equal(one, other),
        "gradients": training.gradients_equal(one, other),
    }


def every_schedule(rank: Rank) -> dict[str, Any]:
    """Every schedule, both ways, each front end: leaks and equality with stock torch."""
    results: dict[str, Any] = {}
    traced = Traced(rank)
    for name in schedules.available():
        for frontend in FRONTENDS:
            with rank.time_limit(f"{name}, {frontend}"):
                stock, without = leaks(rank, traced, name, frontend, fixed=False)
                mended, with_fix = leaks(rank, traced, name, frontend, fixed=True)
            results[f"{name}-{frontend}"] = {
                "microbatches": schedules.microbatches_of(name, rank.ranks, 4),
                "without": without,
                "with": with_fix,
                "equal": equal(stock, mended),
            }
    return results


def equality_without_hooks(rank: Rank) -> dict[str, Any]:
    """Stock torch against the fix with no hook anywhere."""
    results = {}
    for name in schedules.available():
        microbatches = schedules.microbatches_of(name, rank.ranks, 4)
        records = []
        with rank.time_limit(f"{name} without hooks"):
            for fixed in (False, True):
                switch(fixed)
                records.append(
                    training.train(
                        name, rank.rank, rank.ranks, rank.device, STEPS, microbatches, hooks=None
                    )
                )
        results[name] = equal(*records)
    return results


def switched_between_steps(rank: Rank) -> list[int]:
    """Stock for two steps, the fix for two, stock for one: hooks on the last stage's input."""
    switch(False)

    def between(step: int) -> None:
        if step == 2:
            pp_hookfix.enable()
        if step == 4:
            pp_hookfix.disable()

    record = training.train("1F1B", rank.rank, rank.ranks, rank.device, 5, 4, between_steps=between)
    return record.hooks[rank.rank]


def one_stage(
    rank: Rank, module: torch.nn.Module, group: Any = None, index: Optional[int] = None
) -> Any:
    """This rank's stage around a ready module, with example tensors."""
    index = rank.rank if index is None else index
    examples = [
        torch.zeros(ROWS, FEATURES, device=rank.device, requires_grad=carries)
        for carries in (index > 0, True)
    ]
    return PipelineStage(
        module,
        index,
        dist.get_world_size(group),
        rank.device,
        input_args=examples[0],
        output_args=examples[1],
        group=group,
    )


def seeded_module(rank: Rank, index: int) -> torch.nn.Module:
    torch.manual_seed(index)
    return training.make_module().to(rank.device)


def both_ways(
    rank: Rank,
    wrap: Callable[[torch.nn.Module], Any],
    group: Any = None,
    steps: int = STEPS,
) -> dict[str, Any]:
    """1F1B with each stage's module wrapped in something; counts and equality."""
    index = dist.get_rank(group)
    records = []
    for fixed in (False, True):
        switch(fixed)
        stage = one_stage(rank, wrap(seeded_module(rank, index)), group, index)
        schedule = schedules.build("1F1B", [stage], 4, training.summed_error)
        records.append(training.run_steps(schedule, [stage], steps, 4, rank.device))
    return {
        "stage": index,
        "without": records[0].hooks[index],
        "with": records[1].hooks[index],
        "equal": equal(*records),
        "trained": sorted(records[1].gradients),
    }


def frozen_last_stage(rank: Rank) -> dict[str, Any]:
    """The last stage's parameters need no gradient; its input does."""

    def freeze(module: torch.nn.Module) -> torch.nn.Module:
        return module.requires_grad_(rank.rank < rank.ranks - 1)

    return both_ways(rank, freeze)


class Compiled(torch.nn.Module):
    """Keeps the compiled module inside, so that hooks on the input stay outside of it."""

    def __init__(self, module: torch.nn.Module, backend: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = torch.compile(module, backend=backend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


def compiled(rank: Rank) -> dict[str, Any]:
    """A stage under torch.compile: graphs compiled by the end of each step, with the fix."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        graphs.append(1)
        return graph.forward

    result = both_ways(rank, lambda module: Compiled(module, backend))
    torch._dynamo.reset()
    graphs.clear()
    by_step: list[int] = []
    switch(True)
    stage = one_stage(rank, Compiled(seeded_module(rank, rank.rank), backend))
    schedule = schedules.build("1F1B", [stage], 4, training.summed_error)
    training.run_steps(
        schedule,
        [stage],
        STEPS,
        4,
        rank.device,
        between_steps=lambda step: by_step.append(len(graphs)),
    )
    return {**result, "graphs": [*by_step[1:], len(graphs)]}


class Checkpointed(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def freed_closures(rank: Rank, fixed: bool) -> list[int]:
    """Per step: how many of the large tensors that hooks' closures held are still alive."""
    switch(fixed)
    held: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    index = rank.rank
    stage = one_stage(rank, seeded_module(rank, index))

    def meet(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs[0].requires_grad:
            large = torch.zeros(1 << 20)
            held.append(weakref.ref(large))
            inputs[0].register_hook(lambda grad: None if large is None else grad)

    stage.submod.register_forward_pre_hook(meet)

    def between(step: int) -> None:
        if step:
            gc.collect()
            alive.append(sum(reference() is not None for reference in held))

    schedule = schedules.build("1F1B", [stage], 4, training.summed_error)
    training.run_steps(
        schedule, [stage], STEPS + 1, 4, rank.device, hooks=None, between_steps=between
    )
    return alive


class TwoOutputs(torch.nn.Module):
    """First stage: hands over a float and an integer tensor."""

    def __init__(self, module: torch.nn.Module, second: torch.dtype) -> None:
        super().__init__()
        self.inner = module
        self.second = second

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.inner(x)
        return y, (y.detach() * 8).to(self.second) if not self.second.is_floating_point else y * 2


class TwoInputs(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.inner = module

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.inner(x + y.to(x.dtype))  # type: ignore[no-any-return]


def two_inputs(rank: Rank, second: torch.dtype) -> dict[str, Any]:
    """The last of two stages takes two tensors."""
    first = rank.rank == 0
    records: list[Record] = []
    for fixed in (False, True):
        switch(fixed)
        plain = torch.zeros(ROWS, FEATURES, device=rank.device)
        pair = (
            plain.clone().requires_grad_(),
            plain.to(second).requires_grad_(second.is_floating_point),
        )
        module = seeded_module(rank, rank.rank)
        stage = PipelineStage(
            TwoOutputs(module, second) if first else TwoInputs(module),
            rank.rank,
            2,
            rank.device,
            input_args=plain if first else pair,
            output_args=pair if first else plain.clone().requires_grad_(),
        )
        schedule = schedules.build("GPipe", [stage], 4, training.summed_error)
        records.append(training.run_steps(schedule, [stage], STEPS, 4, rank.device))
    return {
        "without": records[0].hooks[rank.rank],
        "with": records[1].hooks[rank.rank],
        "equal": equal(*records),
    }


def modes(rank: Rank) -> Optional[dict[str, Any]]:
    """Train, eval, eval in no_grad, eval in inference_mode, train; None before 2.9."""
    outputs: list[list[torch.Tensor]] = []
    counts: list[list[int]] = []
    for fixed in (False, True):
        switch(fixed)
        stage = one_stage(rank, seeded_module(rank, rank.rank))
        schedule = schedules.build("GPipe", [stage], 4, training.summed_error)
        if not hasattr(schedule, "eval"):
            return None
        record = Record()
        hooks = InputHooks(stage, record)
        torch.manual_seed(0)
        x, target = torch.randn(2, 4 * ROWS, FEATURES).to(rank.device)
        first, last = rank.rank == 0, rank.rank == rank.ranks - 1
        out: list[torch.Tensor] = []
        for mode in ("train", "eval", "no_grad", "inference_mode", "train", "train"):
            hooks.begin_step()
            context: Any = {
                "no_grad": torch.no_grad,
                "inference_mode": torch.inference_mode,
            }.get(mode, contextlib.nullcontext)()
            losses: list[torch.Tensor] = []
            with context:
                y = (schedule.step if mode == "train" else schedule.eval)(
                    *([x] if first else []),
                    **({"target": target, "losses": losses} if last else {}),
                )
            if last:
                out += [y.detach().clone(), torch.stack([loss.detach() for loss in losses])]
        out += [parameter.grad for parameter in stage.submod.parameters()]
        outputs.append(out)
        counts.append(record.hooks[rank.rank])
        hooks.remove()
    return {
        "without": counts[0],
        "with": counts[1],
        "equal": len(outputs[0]) == len(outputs[1]) and all(map(torch.equal, *outputs)),
    }


def data_parallel(rank: Rank) -> dict[str, Any]:
    """2 x 2 ranks: two pipeline stages, each DDP or fully_shard over two ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh(rank.device.type, (2, 2), mesh_dim_names=("pp", "dp"))
    pp_group, dp_group = mesh["pp"].get_group(), mesh["dp"].get_group()
    with rank.time_limit("DDP"):
        results = {
            "ddp": both_ways(
                rank,
                lambda module: DistributedDataParallel(module, process_group=dp_group),
                pp_group,
            )
        }
    # On the CPU, 2.6 still asks for an event of a stream; before, it is no public name.
    if TORCH < (2, 6) or (TORCH < (2, 7) and rank.device.type == "cpu"):
        return results
    from torch.distributed.fsdp import fully_shard

    with rank.time_limit("fully_shard"):
        results["fully_shard"] = both_ways(
            rank, lambda module: fully_shard(module, mesh=mesh["dp"]), pp_group
        )
    return results


def run(rank: Rank) -> dict[str, Any]:
    """Every scenario that this number of ranks can run."""
    results: dict[str, Any] = {"every_schedule": every_schedule(rank)}
    results["without_hooks"] = equality_without_hooks(rank)
    scenarios: dict[str, Callable[[], Any]] = {
        "switched_between_steps": lambda: switched_between_steps(rank),
        "frozen": lambda: frozen_last_stage(rank),
        "compiled": lambda: compiled(rank),
        "checkpointed": lambda: both_ways(rank, Checkpointed),
        "freed": lambda: {
            "without": freed_closures(rank, False),
            "with": freed_closures(rank, True),
        },
        "modes": lambda: modes(rank),
    }
    if rank.ranks == 2:
        scenarios["two_inputs"] = lambda: two_inputs(rank, torch.float32)
        # Before 2.13 torch asks for a gradient of every tensor that stages pass on.
        if TORCH >= (2, 13):
            scenarios["integer_input"] = lambda: two_inputs(rank, torch.int64)
    for name, scenario in scenarios.items():
        with rank.time_limit(name):
            results[name] = scenario()
    if rank.ranks == 4:
        results.update(data_parallel(rank))
    return results
