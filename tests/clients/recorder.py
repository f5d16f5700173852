"""What a client's training did, on each rank: to be compared with another run's."""

import functools
import hashlib
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Recorder:
    """Collects losses, gradients and hooks of a run, and writes them for each rank."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, str]] = []
        # By stage, for each step: hooks that fired, and hooks that were registered.
        self.fired: dict[int, list[int]] = defaultdict(lambda: [0])
        self.hooked: dict[int, list[int]] = defaultdict(lambda: [0])

    def keep(self, name: str, value: Any) -> None:
        """A number or a tensor that must be the same to the last bit in each run."""
        if isinstance(value, DTensor):
            value = value.to_local()
        tensor = torch.as_tensor(value).detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        kind = f"{tuple(tensor.shape)} {tensor.dtype}"
        self.kept.append((name, f"{kind} {hashlib.sha256(data).hexdigest()[:24]}"))

    def hook_inputs(self, stages: list[Any]) -> None:
        """From now on each microbatch puts a hook on each stage's input, as a user's would."""
        for stage in stages:
            register = functools.partial(self._register, stage.stage_index)
            stage.submod.register_forward_pre_hook(register)

    def _register(self, stage_index: int, module: nn.Module, inputs: Any) -> None:
        for tensor in inputs:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(functools.partial(self._count, stage_index))
                self.hooked[stage_index][-1] += 1

    def _count(self, stage_index: int, gradient: torch.Tensor) -> None:
        self.fired[stage_index][-1] += 1

    def mark_inputs(self, stages: list[Any]) -> None:
        """As `hook_inputs`, for stages whose graphs autograd does not run: no hook would fire.

        Each retrieval leaves a mark on what it hands out, and counts those that it finds there.
        """
        for stage in stages:
            stage._retrieve_recv_activations = functools.partial(self._marked, stage)

    def _marked(self, stage: Any, chunk: int) -> Any:
        # The class's, whenever asked: the plugin may come later.
        activations = type(stage)._retrieve_recv_activations(stage, chunk)
        for tensor in activations:
            tensor.marks = getattr(tensor, "marks", 0) + 1
            self.fired[stage.stage_index][-1] += tensor.marks
            self.hooked[stage.stage_index][-1] += 1
        return activations

    def step_begins(self, modules: list[nn.Module]) -> None:
        """Right before the optimizer's step: all gradients, and hooks are counted anew."""
        for number, module in enumerate(modules):
            for name, parameter in module.named_parameters():
                if parameter.grad is not None:
                    self.keep(f"gradient {number} {name}", parameter.grad)
        for counts in (*self.fired.values(), *self.hooked.values()):
            counts.append(0)

    def write(self, folder: str, modules: list[nn.Module]) -> None:
        """At the end: all parameters, and what the plugin says of itself, where it is."""
        for number, module in enumerate(modules):
            for name, parameter in module.named_parameters():
                self.keep(f"parameter {number} {name}", parameter)
        # Only where it came in by itself: a run without the plugin is one without it.
        plugin = sys.modules.get("pp_hookfix")
        status = plugin.status() if plugin else None
        hooks = sorted(self.hooked.items())
        record = {
            "kept": self.kept,
            "hooks": {stage: [hooked[:-1], self.fired[stage][:-1]] for stage, hooked in hooks},
            "plugin": status and f"{status.state} {status.policy}",
        }
        rank = torch.distributed.get_rank()
        Path(folder, f"rank-{rank}.json").write_text(json.dumps(record))
