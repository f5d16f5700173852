"""What the ranks of test_policies.py run, all within one spawn."""

import functools
import itertools
import json
import time
from pathlib import Path
from typing import Any, Optional

import recv_buffer_scenarios as scenarios
import torch
from conftest import TORCH
from recv_buffer_scenarios import FRONTENDS, Traced, leaks, seeded_module, switch

import pp_hookfix
from pp_hookfix import fresh
from pp_hookfix.audit import hand_outs
from pp_hookfix.policies import AUDIT, POLICIES
from pp_hookfix.verification import schedules, training
from pp_hookfix.verification.ranks import Rank
from pp_hookfix.verification.training import FEATURES, ROWS, InputHooks, Record

STEPS = 4
MICROBATCHES = 4


class Watch(InputHooks):
    """Keeps what a user might keep, and watches the stage's receive buffers.

    The stage's own methods are wrapped on the object, around whatever is patched
    into the class.
    """

    def __init__(self, stage: Any, record: Record, hands_over: bool = True) -> None:
        super().__init__(stage, record)
        self.stage = stage
        self.hands_over = hands_over
        self.inputs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.retained: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.posted: list[int] = []  # addresses that receives were posted to
        self.handed_out: list[int] = []  # addresses of the stage's inputs
        self.alive: list[int] = []  # receive buffers with memory, at each receive and retrieval
        self.in_flight: list[int] = []  # what 2.15 would hold then
        self._flying = 0
        self._outputs: list[torch.Tensor] = []
        stage.submod.register_forward_hook(self._made_output)
        get_recv_ops = stage._get_recv_ops
        retrieve_activations = stage._retrieve_recv_activations
        retrieve_grads = stage._retrieve_recv_grads

        def receive(*args: Any, **kwargs: Any) -> Any:
            ops = get_recv_ops(*args, **kwargs)
            self.posted += [op.tensor.data_ptr() for op in ops]
            self._sample(len(ops))
            return ops

        def retrieve(original: Any, neighbour: int, chunk: int) -> Any:
            handed_out = original(chunk)
            self._sample(0 if self._turns(neighbour) else -len(handed_out))
            return handed_out

        stage._get_recv_ops = receive
        stage._retrieve_recv_activations = lambda chunk: retrieve(retrieve_activations, -1, chunk)
        stage._retrieve_recv_grads = lambda chunk: retrieve(retrieve_grads, 1, chunk)

    def _sample(self, change: int) -> None:
        self._flying += change
        self.in_flight.append(self._flying)
        self.alive.append(
            sum(
                not self._turns({"args": -1, "grad": 1}[direction])
                for direction, _ in training.held_buffers(self.stage)
            )
        )

    def _turns(self, neighbour: int) -> bool:
        """Whether the stage before (-1) or after (1) hands over on this rank."""
        ranks: dict[int, int] = self.stage.stage_index_to_group_rank
        index = self.stage.stage_index
        return self.hands_over and ranks.get(index + neighbour) == ranks[index]

    def _meet(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        super()._meet(module, inputs)
        if self.stage_index > 0:
            self.inputs += [(tensor, tensor.detach().clone()) for tensor in inputs]
            self.handed_out += [tensor.data_ptr() for tensor in inputs]

    def _made_output(self, module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if not self.stage.is_last:
            output.register_hook(lambda grad: self.gradients.append((grad, grad.clone())))
            output.retain_grad()
            self._outputs.append(output)

    def begin_step(self) -> None:
        super().begin_step()
        self._end_step()

    def _end_step(self) -> None:
        self.retained += [
            (output.grad, output.grad.clone())
            for output in self._outputs
            if output.grad is not None
        ]
        self._outputs.clear()

    def remove(self) -> None:
        self._end_step()
        super().remove()


def overwritten(kept: list[tuple[torch.Tensor, torch.Tensor]]) -> int:
    return sum(not torch.equal(tensor, copy) for tensor, copy in kept)


def watched(rank: Rank, name: str, policy: Optional[str], stock: Record) -> dict[str, Any]:
    """Train under a policy and keep everything; what became of it, by stage."""
    switch(policy or False)
    microbatches = schedules.microbatches_of(name, rank.ranks, 4)
    stages = training.make_stages(name, rank.rank, rank.ranks, rank.device)
    schedule = schedules.build(name, stages, microbatches, training.summed_error)
    watch_stage = functools.partial(Watch, hands_over=scenarios.hands_over(name))
    record = training.run_steps(schedule, stages, STEPS, microbatches, rank.device, watch_stage)
    return {
        "microbatches": microbatches,
        "equal": scenarios.equal(stock, record),
        "stages": {
            watch.stage_index: {
                "hooks": watch.counts,
                "inputs": len(watch.inputs),
                "inputs_overwritten": overwritten(watch.inputs),
                "gradients": len(watch.gradients),
                "gradients_overwritten": overwritten(watch.gradients),
                "retained": len(watch.retained),
                "retained_overwritten": overwritten(watch.retained),
                "posted_addresses": len(set(watch.posted)),
                "receives": len(watch.posted),
                "handed_out_of_posted": sum(
                    address in set(watch.posted) for address in watch.handed_out
                ),
                "alive": (min(watch.alive, default=0), max(watch.alive, default=0)),
                "alive_is_in_flight": watch.alive == watch.in_flight,
                "most_in_flight": max(watch.in_flight, default=0),
                "turn": [watch._turns(-1), watch._turns(1)],
            }
            for watch in record.hooked
            if isinstance(watch, Watch)
        },
    }


def every_policy(rank: Rank) -> dict[str, Any]:
    """Every schedule under stock torch and every policy, with everything kept."""
    results: dict[str, Any] = {}
    for name in schedules.available():
        microbatches = schedules.microbatches_of(name, rank.ranks, 4)
        with rank.time_limit(f"{name}, watched"):
            switch(False)
            stock = training.train(name, rank.rank, rank.ranks, rank.device, STEPS, microbatches)
            fresh.served_by_copies.clear()
            for policy in (None, *POLICIES):
                results[f"{name}-{policy}"] = watched(rank, name, policy, stock)
            results[f"{name}-copies"] = sorted(fresh.served_by_copies)
    return results


def every_frontend(rank: Rank) -> dict[str, Any]:
    """The leaks of the regression test under the other policies, each front end."""
    results: dict[str, Any] = {}
    traced = Traced(rank)
    for name in schedules.available():
        for frontend in FRONTENDS:
            with rank.time_limit(f"{name}, {frontend}"):
                stock, _ = leaks(rank, traced, name, frontend, False)
                for policy in ("clone", "fresh"):
                    record, found = leaks(rank, traced, name, frontend, policy)
                    results[f"{name}-{frontend}-{policy}"] = {
                        "microbatches": schedules.microbatches_of(name, rank.ranks, 4),
                        "leaks": found,
                        "equal": scenarios.equal(stock, record),
                    }
    return results


class SendsDTensor(torch.nn.Module):
    """A stage's module whose output is a DTensor, replicated over a mesh of this rank alone."""

    def __init__(self, module: torch.nn.Module, mesh: Any, last: bool) -> None:
        super().__init__()
        self.inner, self.mesh, self.last = module, mesh, last

    def forward(self, x: Any) -> Any:
        from torch.distributed.tensor import DTensor, Replicate

        if isinstance(x, DTensor):
            x = x.to_local()
        y = self.inner(x)
        return y if self.last else DTensor.from_local(y, self.mesh, [Replicate()], run_check=False)


def dtensor_boundaries(rank: Rank) -> Optional[dict[str, Any]]:
    """Stages that pass DTensors on (2.12 and later), under stock torch, every policy, and audit."""
    if TORCH < (2, 12):
        return None
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import PipelineStage

    mesh = init_device_mesh(rank.device.type, (rank.ranks, 1), mesh_dim_names=("pp", "tp"))["tp"]
    results: dict[str, Any] = {}
    stock: Optional[Record] = None
    for policy in (None, *POLICIES, AUDIT):
        switch(policy or False)
        hand_outs.forget()
        module = SendsDTensor(
            seeded_module(rank, rank.rank), mesh, last=rank.rank == rank.ranks - 1
        )
        stage = PipelineStage(
            module, rank.rank, rank.ranks, rank.device, get_mesh=lambda names, layout: mesh
        )
        schedule = schedules.build("1F1B", [stage], 4, training.summed_error)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []

        def keep(
            module: torch.nn.Module,
            inputs: tuple[Any, ...],
            kept: list[tuple[torch.Tensor, torch.Tensor]] = kept,
        ) -> None:
            if hasattr(inputs[0], "to_local"):
                local = inputs[0]._local_tensor
                kept.append((local, local.detach().clone()))

        stage.submod.register_forward_pre_hook(keep)
        record = training.run_steps(schedule, [stage], STEPS, 4, rank.device, hooks=None)
        stock = stock or record
        # Metadata inference runs the module once more, on memory of its own.
        del kept[: len(kept) - STEPS * 4]
        results[str(policy)] = {
            "kept": len(kept),
            "overwritten": overwritten(kept),
            "equal": scenarios.equal(stock, record),
            "found": hand_outs.document(),
        }
    return results


class NoGradientBack(torch.nn.Module):
    """Gives its input no gradient in every other microbatch."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.inner = module
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        without = self.calls // MICROBATCHES % 2
        self.calls += 1
        return self.inner(x.detach() if without else x)  # type: ignore[no-any-return]


def _keep_gradient(kept: Any, module: Any, inputs: Any, output: torch.Tensor) -> None:
    output.register_hook(lambda gradient: kept.append((gradient, gradient.clone())))


def missing_gradients(rank: Rank) -> Optional[dict[str, Any]]:
    """A V schedule's turn hands no gradient over in every other step (2.13 and later).

    The stage before it keeps those that it was handed.
    """
    if TORCH < (2, 13):
        return None
    results: dict[str, Any] = {}
    stock: Optional[Record] = None
    for policy in (None, *POLICIES):
        switch(policy or False)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        keep = functools.partial(_keep_gradient, kept)
        stages = training.make_stages("ZBVZeroBubble", rank.rank, rank.ranks, rank.device)
        for stage in stages:
            if stage.stage_index == rank.ranks:
                stage.submod = NoGradientBack(stage.submod)
            if stage.stage_index == rank.ranks - 1:
                stage.submod.register_forward_hook(keep)
        schedule = schedules.build("ZBVZeroBubble", stages, MICROBATCHES, training.summed_error)
        record = training.run_steps(schedule, stages, STEPS, MICROBATCHES, rank.device, hooks=None)
        stock = stock or record
        results[str(policy)] = {
            "equal": scenarios.equal(stock, record),
            "kept": len(kept),
            "overwritten": overwritten(kept),
        }
    return results


def switched_in_use(rank: Rank) -> dict[str, Any]:
    """Every policy after every other between two steps of the same stages."""
    order: list[Optional[str]] = [None, "fresh", None, "clone", "fresh", "detach", "fresh"]
    order += ["clone", "detach", "clone", None, "detach", None]
    results = {}
    for name in ("GPipe", "1F1B", "Interleaved1F1B"):
        switch(False)
        stock = training.train(name, rank.rank, rank.ranks, rank.device, len(order), 4, hooks=None)
        record = training.train(
            name,
            rank.rank,
            rank.ranks,
            rank.device,
            len(order),
            4,
            hooks=None,
            between_steps=lambda step: switch(order[step] or False),
        )
        results[name] = scenarios.equal(stock, record)
    return results


def program(rank: Rank, steps: list[tuple[str, str]]) -> dict[str, Any]:
    """Run a sequence of steps as a user might, and the same under stock torch.

    Each step is (action, argument): ``train`` and ``eval`` run the schedule
    (``eval`` in the named grad mode), ``policy`` switches, ``hooks`` turns the
    user's hooks on or off.
    """
    runs = []
    for follow_policies in (False, True):
        pp_hookfix.disable()
        stage = scenarios.one_stage(rank, seeded_module(rank, rank.rank))
        schedule = schedules.build("GPipe", [stage], 4, training.summed_error)
        first, last = rank.rank == 0, rank.rank == rank.ranks - 1
        optimizer = torch.optim.SGD(stage.submod.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(0)
        record = Record()
        hooks: Optional[InputHooks] = None
        gradients: list[torch.Tensor] = []
        counts: list[int] = []
        for action, argument in steps:
            if action == "policy":
                if follow_policies:
                    switch(False if argument == "off" else argument)
                continue
            if action == "hooks":
                if hooks is not None:
                    hooks.remove()
                hooks = InputHooks(stage, record) if argument == "on" else None
                continue
            x, target = (
                torch.randn(4 * ROWS, FEATURES, generator=generator).to(rank.device)
                for _ in range(2)
            )
            if hooks is not None:
                hooks.begin_step()
            run = schedule.step if action == "train" else schedule.eval
            modes: dict[str, Any] = {
                "no_grad": torch.no_grad,
                "inference_mode": torch.inference_mode,
            }
            with modes.get(argument, torch.enable_grad)():
                optimizer.zero_grad()
                run(
                    *([x] if first else []),
                    **({"target": target, "losses": []} if last else {}),
                )
            if action == "train":
                gradients += [
                    parameter.grad.clone()
                    for parameter in stage.submod.parameters()
                    if parameter.grad is not None
                ]
                optimizer.step()
                if hooks is not None and rank.rank > 0:
                    counts.append(hooks.counts[-1])
        if hooks is not None:
            hooks.remove()
        runs.append((gradients, counts))
    (stock, _), (mended, counts) = runs
    return {
        "equal": len(stock) == len(mended) and all(map(torch.equal, stock, mended)),
        "counts": counts,
    }


def serve(rank: Rank, folder: str) -> None:
    """Run programs that a test drops into a folder, one after the other, until one is null."""
    for number in itertools.count():
        request = Path(folder, f"{number}.json")
        while not request.exists():
            time.sleep(0.002)
        steps = json.loads(request.read_text())
        if steps is None:
            return
        with rank.time_limit(f"the program {steps}"):
            result = program(rank, steps)
        answer = Path(folder, f"{number}-{rank.rank}.json")
        answer.with_suffix(".part").write_text(json.dumps(result))
        answer.with_suffix(".part").rename(answer)


def run(rank: Rank) -> dict[str, Any]:
    """Every scenario."""
    results: dict[str, Any] = {
        "every_policy": every_policy(rank),
        "every_frontend": every_frontend(rank),
    }
    for scenario in (dtensor_boundaries, missing_gradients, switched_in_use):
        with rank.time_limit(scenario.__name__):
            results[scenario.__name__] = scenario(rank)
    return results
