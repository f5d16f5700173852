"""What several test modules share."""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

# A tree that run_upstream.py is tried on: its tests end in every way there is.
collect_ignore = ["upstream/upstream_like"]
# What several of the folders beside this file share lies here.
sys.path.insert(0, os.path.dirname(__file__))

try:
    import torch
except ImportError:  # the torch-free tests run wherever a CPython is
    torch = None  # type: ignore[assignment]
    TORCH: tuple[int, ...] = (0, 0)
    collect_ignore += [
        "upstream/test_run_upstream.py",
        "test_recv_buffer_hooks.py",
        "test_patch.py",
        "test_policies.py",
        "test_own_stages.py",
        "test_command.py",
        "ways_in/test_ways_in_torch.py",
        "test_audit.py",
        "test_audit_command.py",
        "test_audit_holders.py",
        "test_nccl.py",
    ]
else:
    TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

# Of the whole matrix, which `pytest -m ""` and `nox -s tests_in_full` run.
full = pytest.mark.full
GPUS = 0 if torch is None else torch.cuda.device_count()
# NCCL takes a GPU for each rank; test_nccl.py says so where there are too few.
BACKENDS = ["gloo", *(["nccl"] if GPUS >= 2 else [])]
BACKENDS_AND_RANKS = [
    pytest.param((backend, ranks), id=f"{backend}-{ranks}", marks=full if ranks > 2 else ())
    for backend in BACKENDS
    for ranks in (2, 4)
    if backend == "gloo" or ranks <= GPUS
]

ELSEWHERE = tempfile.mkdtemp(prefix="pp_hookfix-elsewhere-")
atexit.register(shutil.rmtree, ELSEWHERE, ignore_errors=True)


# The longest modules, which would else be alone at the end with one worker.
LONGEST = ("test_run_upstream.py", "test_audit.py", "test_command.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


# Measured, not asked of the code under test: docs of upstream PR 196463.
AFFECTED = (2, 4) <= TORCH < (2, 15)


def spawned(function: Callable[..., Any], ranks: int, backend: str, **options: Any) -> list[Any]:
    """Results of a function on every rank; fails with the ranks' logs."""
    from pp_hookfix.verification.ranks import start

    outcome = start(function, ranks, backend, timeout=120, **options)
    if outcome.exit_status:
        logs = "\n".join(f"--- rank {rank}\n{log}" for rank, log in enumerate(outcome.logs))
        pytest.fail(f"ranks ended with {outcome.exit_status}\n{logs}", pytrace=False)
    return outcome.results


def once(spawn: Callable[..., Any]) -> Callable[..., Any]:
    """Cached by its arguments, a failure too: not every test of a module is to wait for a hang."""
    outcomes: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(spawn)
    def cached(*arguments: Any) -> Any:
        if arguments not in outcomes:
            try:
                outcomes[arguments] = spawn(*arguments)
            except BaseException as failure:
                outcomes[arguments] = failure
        if isinstance(outcomes[arguments], BaseException):
            raise outcomes[arguments]
        return outcomes[arguments]

    return cached


def python(
    *arguments: str,
    cwd: Optional[Path] = None,
    timeout: float = 120,
    env: Optional[Mapping[str, Optional[str]]] = None,
) -> "subprocess.CompletedProcess[str]":
    """Run this interpreter in a new process; `env` adds to the environment, None removes.

    It starts away from the checkout, which would come before the installed package.
    """
    environment = {key: value for key, value in os.environ.items() if key != "PP_HOOKFIX"}
    for key, value in (env or {}).items():
        if value is None:
            environment.pop(key, None)
        else:
            environment[key] = value
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd or ELSEWHERE,
        env=environment,
        check=False,
    )
