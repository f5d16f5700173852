"""Run a command as if it had been started by itself, and be there when it has ended."""

import contextlib
import os
import signal
import sys
from typing import Optional

# Sent to us by somebody, for the command. From a terminal it gets its own.
_PASSED_ON = {
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT")
}


def run(command: list[str]) -> int:
    """Run a command to its end, with our standard streams; signals reach it.

    Returns:
        How it ended, as ``os.waitpid`` has it.

    Raises:
        OSError: it cannot be started.
    """
    watched = {*_PASSED_ON, signal.SIGCHLD}
    # Where it is ignored, children vanish without a status.
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these two, and so would all that it starts.
    defaults = [signal.SIGPIPE, signal.SIGXFSZ]
    child = os.posix_spawnp(command[0], command, os.environ, setsigmask=before, setsigdef=defaults)
    while True:
        number, is_for_us_alone = _next(watched)
        if number == signal.SIGCHLD:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
        elif is_for_us_alone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)


def _next(watched: "set[signal.Signals]") -> tuple[int, bool]:
    """The next signal, and whether somebody sent it: a terminal sends to the command, too."""
    if hasattr(signal, "sigwaitinfo"):
        received = signal.sigwaitinfo(watched)
        return received.si_signo, received.si_code <= 0
    number = signal.sigwait(watched)
    return number, number != signal.SIGINT


def failure(status: int) -> Optional[str]:
    """How a command failed, in words; None if it did not."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        names = {one.value: one.name for one in signal.Signals}
        return f"was ended by {names.get(number, f'signal {number}')}"
    code = os.WEXITSTATUS(status)
    return f"ended with exit status {code}" if code else None


def end_like(status: int) -> int:
    """Exit status of a command that ended so; one that a signal ended, we follow."""
    if os.WIFEXITED(status):
        return os.WEXITSTATUS(status)
    number = os.WTERMSIG(status)
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(Exception):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler to reset
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    return 128 + number
