"""The baseline that users wrote by hand: PR 185355's change, made to the installed stage.py.

Its one line, in the source of ``_retrieve_recv_activations`` (or, up to 2.11, of the
helper that it calls), in memory: hand out ``info.buffer.detach()`` instead of the buffer.
"""

import inspect
import textwrap
from typing import Any, Callable

from torch.distributed.pipelining import stage as stage_module

BASE = stage_module._PipelineStageBase
EDITS = [
    # 2.12 - 2.14
    (
        "_retrieve_recv_activations",
        "info.buffer.requires_grad_(effective_requires_grad)",
        "info.buffer.detach().requires_grad_(effective_requires_grad)",
    ),
    # 2.4 - 2.11
    (
        "_map_tensor_from_recv_info",
        "return info.buffer",
        "return info.buffer.detach().requires_grad_(info.buffer.requires_grad)",
    ),
]


def edited() -> tuple[str, Callable[..., Any]]:
    """Name and edited function of the method of ``_PipelineStageBase`` to replace.

    Raises:
        LookupError: the installed torch has neither line.
    """
    for name, line, replacement in EDITS:
        source = textwrap.dedent(inspect.getsource(vars(BASE)[name]))
        if source.count(line) == 1:
            namespace: dict[str, Any] = {}
            exec(source.replace(line, replacement), vars(stage_module), namespace)
            return name, namespace[name]
    raise LookupError("this torch's stage.py has no line that PR 185355 changes")
