"""What this process saw, written to a file as it grows, for the command that waits."""

# `begin` runs at interpreter start, under the command alone; json is imported when there is
# something to write.
import atexit
import contextlib
import os
import sys
import time
from typing import Any, Callable, Optional

from pp_hookfix import activation, settings

_SECONDS = 0.5  # between two writings, once there were
_AT_ONCE = 30  # so that a job which is killed early has left something
_folder = ""
_began = 0.0
_pid = 0
_launch: "tuple[int, str]" = 0, ""
_rank: "Optional[int]" = None
_written, _times = 0.0, 0
_document: "Optional[Callable[[], list[dict[str, Any]]]]" = None


def begin() -> None:
    """Note that this process is there, and write what it saw when it ends."""
    global _folder
    _folder = os.environ[settings.AUDIT_VARIABLE]
    _be_new()
    with contextlib.suppress(OSError), open(_file(), "x", encoding="utf-8"):
        pass
    atexit.register(end)
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forked)


def _be_new() -> None:
    global _began, _pid, _launch
    _began, _pid = time.time(), os.getpid()
    _launch = os.getppid(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "")


def _file() -> str:
    return os.path.join(_folder, f"{_pid}-{_began:.6f}")


def _forked() -> None:
    """A forked rank has a record of its own; what its parent saw is its parent's."""
    global _document
    _be_new()
    _document = None
    hand_outs = sys.modules.get("pp_hookfix.audit.hand_outs")
    if hand_outs is not None:
        hand_outs.forget()


def grow(document: "Callable[[], list[dict[str, Any]]]") -> None:
    """Write again, now and then. Called as each step begins."""
    global _document
    if _document is None:
        # What multiprocessing forks ends without `atexit`.
        multiprocessing = sys.modules.get("multiprocessing.util")
        if multiprocessing is not None:
            multiprocessing.Finalize(None, end, exitpriority=0)
    _document = document
    if _times < _AT_ONCE or time.monotonic() - _written > _SECONDS:
        _write()


def end() -> None:
    """The last word; what goes wrong is nobody's business at the end of a job."""
    with contextlib.suppress(Exception):
        hand_outs = sys.modules.get("pp_hookfix.audit.hand_outs")
        if hand_outs is not None:
            hand_outs.end()
        # Nothing of a worker that was forked and saw nothing itself.
        if activation.torch_version() is not None and (_document or os.path.exists(_file())):
            _write(has_ended=True)


def _write(has_ended: bool = False) -> None:
    global _written, _times
    if not _folder:
        return
    import json

    from pp_hookfix import current_status

    status = current_status.status()
    text = json.dumps(
        {
            "began": _began,
            "rank": _rank_by_now(),
            "launch": _launch,
            "torch_version": status.torch_version,
            "state": status.state,
            "reason": status.reason,
            "times_off": activation._times_off,
            "has_ended": has_ended,
            "stages": [] if _document is None else _document(),
        }
    )
    # Renamed into place: whoever reads sees the one or the other.
    with contextlib.suppress(OSError):
        with open(f"{_file()}.new", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{_file()}.new", _file())
    _written, _times = time.monotonic(), _times + 1


def _rank_by_now() -> "Optional[int]":
    # The job may have destroyed its process group by the time that it ends.
    global _rank
    distributed = sys.modules.get("torch.distributed")
    with contextlib.suppress(Exception):
        if distributed is not None and distributed.is_initialized():
            _rank = int(distributed.get_rank())
        elif _rank is None:
            _rank = int(os.environ["RANK"])
    return _rank
