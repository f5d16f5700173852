"""Where hooks are registered: the line of the user's code, by the number of the handle.

torch makes a ``RemovableHandle`` for every hook, on a tensor as on a graph's node, and nothing
else tells who asked for it.
"""

import contextlib
import functools
import os
import sys
from typing import Any

from torch.utils.hooks import RemovableHandle

# Module hooks get handles, too, and are never asked for: the oldest make way.
_MOST = 100_000
_lines: dict[int, str] = {}


def note() -> None:
    """Note every registration from now on; once in a process."""
    cls: Any = RemovableHandle
    made = cls.__init__

    @functools.wraps(made)
    def __init__(handle: Any, *args: Any, **kwargs: Any) -> None:
        made(handle, *args, **kwargs)
        with contextlib.suppress(Exception):  # the hook is registered, whatever it is called
            _lines[handle.id] = _users_line(sys._getframe(1))
            if len(_lines) > _MOST:
                del _lines[next(iter(_lines))]

    if not hasattr(made, "__wrapped__"):
        cls.__init__ = __init__


def line_of(handle: int) -> str:
    """``file:line`` of the code that registered a hook; ``torch`` where torch itself did."""
    return _lines.get(handle, "an unknown line")


def _users_line(frame: Any) -> str:
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "pp_hookfix"):
            return f"{os.path.abspath(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"
