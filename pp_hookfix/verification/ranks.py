"""Run a function on every rank: in processes of our own, or in those of torchrun.

A hang never outlives its time limit: the rank that hangs says what it was
doing, shows the stacks of its threads and ends, and the others end with it.

torch's elastic launcher was tried in the place of `start`. It ends the others at the first
failure, before they have shown what they hang in; it redirects their standard output, which
`verify` reports on as it goes; it takes over the signal handlers of the process that asks; and
it logs a traceback where a line is due. What it would save is the loop in `_wait`.
"""

import contextlib
import datetime
import faulthandler
import functools
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, NamedTuple, Optional, TextIO

RANK_FAILED = 3
"""Exit status of a rank that raised or hung (usage errors: 2; a verdict: 0 or 1)."""


class CannotRun(Exception):
    """What was asked for cannot be run here; the message is one line for the user."""


class Rank(NamedTuple):
    """What one rank knows of itself."""

    rank: int
    ranks: int
    backend: str
    """``gloo`` or ``nccl``; "auto" is resolved before a rank sees it."""
    device: Any
    """torch.device."""
    out: TextIO
    """The real standard output. torch and Gloo, which print there, print elsewhere."""
    time_limit: "Callable[[str], contextlib.AbstractContextManager[None]]"
    """``with time_limit("1F1B, step 3"):`` ends the process when the block hangs."""


class Outcome(NamedTuple):
    """How the ranks that we started ended."""

    exit_status: int
    """Of the first rank that failed; 0 when none did."""
    results: list[Any]
    """What the function returned on each rank; None where it returned nothing or failed."""
    logs: list[str]
    """What each rank, torch and Gloo printed; stacks after a hang."""


def started_by_torchrun() -> bool:
    """Whether this process is one of several ranks already."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start(
    function: Callable[..., Any],
    ranks: int,
    backend: str = "auto",
    timeout: float = 60,
    **options: Any,
) -> Outcome:
    """Run ``function(rank, **options)`` in `ranks` new processes and wait for them.

    Args:
        function: importable by its name; it gets a `Rank` with a process group
            initialized, and its result must be picklable.
        ranks: number of processes.
        backend: ``gloo``, ``nccl`` or ``auto``: nccl where there is a GPU for each rank.
        timeout: seconds, the limit of each `Rank.time_limit` block.
        options: passed to the function.

    Raises:
        CannotRun: too few GPUs for nccl, or what a rank raised as such.
    """
    backend = _resolved(backend, ranks)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="pp_hookfix-") as folder:
        processes = [
            context.Process(
                target=_run_started,
                args=(function, rank, ranks, backend, timeout, options, folder),
                daemon=True,
            )
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        exit_status = _wait(processes)
        cannot_run = _read(folder, "cannot-run")
        if cannot_run is not None:
            raise CannotRun(cannot_run.decode())
        results = [
            None if result is None else pickle.loads(result)
            for result in (_read(folder, f"result-{rank}") for rank in range(ranks))
        ]
        logs = [
            (_read(folder, f"log-{rank}") or b"").decode(errors="replace") for rank in range(ranks)
        ]
    return Outcome(exit_status, results, logs)


def _read(folder: str, name: str) -> Optional[bytes]:
    path = Path(folder, name)
    return path.read_bytes() if path.exists() else None


def run_here(
    function: Callable[..., Any], backend: str = "auto", timeout: float = 60, **options: Any
) -> Any:
    """Run ``function(rank, **options)`` in this process, a rank that torchrun started."""
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    backend = _resolved(backend, local_ranks)
    return _run(
        function, rank, ranks, local_rank, backend, timeout, options, out, sys.stderr, "env://"
    )


def gathered(rank: Rank, value: Any) -> list[Any]:
    """A small picklable value of every rank, on every rank.

    Not ``all_gather_object``, which needs a numpy that torch does not install.
    """
    import torch
    import torch.distributed as dist

    mine = torch.tensor(list(pickle.dumps(value)), dtype=torch.uint8, device=rank.device)
    length = torch.tensor([len(mine)], device=rank.device)
    lengths = [torch.zeros_like(length) for _ in range(rank.ranks)]
    dist.all_gather(lengths, length)
    longest = int(max(lengths))
    padded = torch.cat([mine, mine.new_zeros(longest - len(mine))])
    all_padded = [torch.zeros_like(padded) for _ in range(rank.ranks)]
    dist.all_gather(all_padded, padded)
    return [
        pickle.loads(bytes(one[: int(length)].tolist())) for one, length in zip(all_padded, lengths)
    ]


def _resolved(backend: str, local_ranks: int) -> str:
    """``gloo`` or ``nccl`` for the ranks of one machine; see `start`."""
    import torch
    import torch.distributed as dist

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if backend == "auto":
        return "nccl" if gpus >= local_ranks and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and gpus < local_ranks:
        raise CannotRun(
            f"--backend nccl needs a GPU for each of the {local_ranks} ranks and {gpus} are "
            "visible: use fewer --ranks or --backend gloo"
        )
    return backend


def _wait(processes: list[Any]) -> int:
    """Wait for all; as soon as one fails, end the others. The status of that one."""
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                # Those that hang for the same reason have a moment to say so.
                for other in running.values():
                    other.join(1)
                    other.kill()
                    other.join()
                return process.exitcode if process.exitcode > 0 else RANK_FAILED
    return 0


def _run_started(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    backend: str,
    timeout: float,
    options: dict[str, Any],
    folder: str,
) -> None:
    out = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    hangs = os.fdopen(os.dup(2), "w", buffering=1, encoding="utf-8")
    log = os.open(os.path.join(folder, f"log-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        result = _run(
            function,
            rank,
            ranks,
            rank,
            backend,
            timeout,
            options,
            out,
            hangs,
            f"file://{folder}/rendezvous",
        )
        Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    except CannotRun as error:
        Path(folder, "cannot-run").write_text(str(error), encoding="utf-8")
        sys.exit(2)
    except Exception:
        traceback.print_exc()
        sys.exit(RANK_FAILED)


@contextlib.contextmanager
def _time_limit(
    what: str, *, rank: int, ranks: int, timeout: float, hangs: TextIO
) -> Iterator[None]:
    def hung() -> None:
        print(
            f"pp-hookfix: {what} hung on rank {rank} of {ranks}: not done after {timeout:g} s "
            "(--timeout)",
            file=hangs,
        )
        faulthandler.dump_traceback(file=sys.stderr)
        os._exit(RANK_FAILED)

    timer = threading.Timer(timeout, hung)
    timer.daemon = True
    timer.start()
    # Should the interpreter itself be stuck, the timer cannot run; this can.
    faulthandler.dump_traceback_later(timeout + 5, exit=True, file=sys.stderr)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()


def _run(
    function: Callable[..., Any],
    rank: int,
    ranks: int,
    local_rank: int,
    backend: str,
    timeout: float,
    options: dict[str, Any],
    out: TextIO,
    hangs: TextIO,
    rendezvous: str,
) -> Any:
    import torch
    import torch.distributed as dist

    from pp_hookfix.verification import gloo_faults

    time_limit = functools.partial(
        _time_limit, rank=rank, ranks=ranks, timeout=timeout, hangs=hangs
    )
    if backend == "nccl":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        gloo_faults.step_round()
    # Several ranks share the cores of one machine.
    torch.set_num_threads(1)
    with time_limit("the rendezvous"):
        dist.init_process_group(
            backend,
            init_method=rendezvous,
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=2 * timeout),
        )
    result = function(Rank(rank, ranks, backend, device, out, time_limit), **options)
    with time_limit("the end of the process group"):
        dist.barrier()
        dist.destroy_process_group()
    return result
