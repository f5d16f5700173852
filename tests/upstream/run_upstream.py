"""Run torch's own pipelining tests, without and with the plugin; fail on what it breaks.

    python tests/upstream/run_upstream.py TREE [FILE ...] [-k EXPRESSION] [--limit SECONDS]

TREE is a torch source tree of the release that is installed here; FILEs are test
files in it, by default all of test/distributed/pipelining. They are copied into a
temporary folder, nothing is written into the tree. With two GPUs they run as they
are; without, Gloo and the CPU are put in the place of what asks for accelerators
(upstream_on_gloo.py). First each test runs on stock torch; then those that passed
run under `pp-hookfix run`. Exit status: 0 when all of them pass again, 1 when not, or
when none passed without, 2 when it cannot be run.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, Optional

import upstream_on_gloo

PIPELINING = Path("test", "distributed", "pipelining")
CONFTEST = Path(__file__).with_name("upstream_conftest.py")
RANKS = 2
START = 300  # seconds, until pytest has imported torch and the tests
WITH = [sys.executable, "-m", "pp_hookfix", "run"]


class Outcome(NamedTuple):
    """How one test ended: ``passed``, ``skipped``, ``failed``, ``hung`` or ``crashed``."""

    outcome: str
    why: str


class File(NamedTuple):
    """A test file's copy, and how it is run."""

    path: Path
    on_gloo: bool
    rank_by_rank: bool
    """Whether each rank is a pytest of its own, as torch's test classes up to 2.7 have it."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="run_upstream.py", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("tree", type=Path, metavar="TREE", help="a torch source tree")
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help=f"in the tree; default: all of {PIPELINING}"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests that match, as in pytest")
    parser.add_argument(
        "--limit", type=float, default=120, metavar="SECONDS", help="for each test (120)"
    )
    arguments = parser.parse_intermixed_args()
    for module in ("torch", "pytest", "expecttest", "numpy"):
        if importlib.util.find_spec(module) is None:
            parser.error(f"torch's tests need {module}, which is not installed: pip install it")
    sources = [arguments.tree / name for name in arguments.files] or sorted(
        (arguments.tree / PIPELINING).glob("test_*.py")
    )
    if not sources:
        parser.error(f"{arguments.tree} has no {PIPELINING}/test_*.py: give a torch source tree")
    missing = [str(source) for source in sources if not source.is_file()]
    if missing:
        parser.error(f"no such test file: {missing[0]}")

    import torch

    print(f"torch {torch.__version__}; tests of torch {version_of(arguments.tree) or 'unknown'}")
    enough_gpus = torch.cuda.device_count() >= RANKS
    work = Path(tempfile.mkdtemp(prefix="pp_hookfix-upstream-"))
    try:
        files = [copy(source, work, enough_gpus) for source in sources]
        shutil.copy(CONFTEST, work / "conftest.py")
        (work / "pytest.ini").write_text("[pytest]\n")
        return compare(files, Runner(work, arguments.k, arguments.limit, enough_gpus))
    finally:
        shutil.rmtree(work, ignore_errors=True)


def version_of(tree: Path) -> Optional[str]:
    """What a torch source tree says of itself, like ``2.13.0`` or ``2.14.0a0``."""
    file = tree / "version.txt"
    return file.read_text().strip() if file.is_file() else None


def copy(source: Path, work: Path, enough_gpus: bool) -> File:
    """A test file in the work folder, with all that lies beside it."""
    from torch.testing._internal import common_distributed

    folder = work / source.parent.name
    if not folder.exists():
        shutil.copytree(source.parent, folder)
    text = source.read_text()
    on_gloo = not enough_gpus and upstream_on_gloo.asks_for_accelerators(text)
    path = folder / source.name
    if on_gloo:
        # What this Python cannot parse, pytest reports.
        with contextlib.suppress(SyntaxError):
            path.write_text(upstream_on_gloo.on_gloo(text))
    # The spelling is upstream's, up to 2.8.
    base = getattr(common_distributed, "MultiProcContinousTest", None)
    return File(
        path, on_gloo, rank_by_rank=hasattr(base, "run_rank") and "MultiProcContinousTest" in text
    )


class Runner:
    """Runs tests of a file until each has an outcome of its own."""

    def __init__(
        self, work: Path, expression: Optional[str], limit: float, enough_gpus: bool
    ) -> None:
        self.work = work
        self.select = ["-k", expression] if expression else []
        self.limit = limit
        # Else the last line of a failure is that hint.
        self.environment = {**os.environ, "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
        if not enough_gpus:
            self.environment["CUDA_VISIBLE_DEVICES"] = ""
        self.states: set[str] = set()
        """What the plugin said of itself, at the end of the runs with it."""

    def outcomes(
        self, file: File, fixed: bool, tests: Optional[list[str]] = None
    ) -> dict[str, Outcome]:
        """Each test's outcome. What did not pass once another had failed runs again.

        torch skips the rest of a class after a failure, and what the failed test
        leaves (a broken connection, a dead rank) fails those after it.
        """
        outcomes: dict[str, Outcome] = {}
        left = tests if tests is not None else [str(file.path.relative_to(self.work))]
        while left:
            collected, ended = self._once(file, fixed, left)
            failed = False
            for test, outcome in ended.items():
                if not failed or outcome.outcome == "passed":
                    outcomes[test] = outcome
                failed = failed or outcome.outcome not in ("passed", "skipped")
            if not ended:
                outcomes.update({test: Outcome("crashed", "pytest ended") for test in left})
                break
            left = [test for test in collected if test not in outcomes]
        return outcomes

    def _once(
        self, file: File, fixed: bool, tests: list[str]
    ) -> tuple[list[str], dict[str, Outcome]]:
        """The tests there are, and the outcomes of those that ended, in their order."""
        folder = Path(tempfile.mkdtemp(dir=self.work))
        ranks = RANKS if file.rank_by_rank else 1
        logs = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
        command = [sys.executable, "-m", "pytest", "--tb=native", "-p", "no:cacheprovider"]
        command += [*self.select, *tests]
        # What lies beside a test is imported as by a script, also where that is a package.
        path = [str(file.path.parent), os.environ.get("PYTHONPATH", "")]
        shared = {**self.environment, "PYTHONPATH": os.pathsep.join(filter(None, path))}
        if not fixed:
            shared["PP_HOOKFIX"] = "off"
        if file.rank_by_rank or file.on_gloo:
            shared["UPSTREAM_RANKS"] = str(RANKS)
        processes = []
        for rank, log in enumerate(logs):
            log.touch()
            environment = {**shared, "UPSTREAM_OUTCOMES": str(log)}
            if file.rank_by_rank:
                environment["UPSTREAM_RANK"] = str(rank)
            with open(log.with_suffix(".txt"), "w") as output:
                processes.append(
                    subprocess.Popen(
                        [*WITH, *command] if fixed else command,
                        cwd=self.work,
                        env=environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        hung = self._wait(processes, logs)
        collected: list[str] = []
        by_rank = []
        for log in logs:
            tests_here, ended, states = self._read(log, hung, file)
            collected = collected or tests_here
            if fixed:
                self.states |= states
            by_rank.append(ended)
        if not any(by_rank):  # pytest itself has failed, in a way that a person must see
            printed = "".join(log.with_suffix(".txt").read_text()[-4000:] for log in logs)
            sys.stderr.write(f"\n{printed}")
        return collected, {
            test: max((ended[test] for ended in by_rank if test in ended), key=_badness)
            for test in dict.fromkeys(test for ended in by_rank for test in ended)
        }

    def _wait(self, processes: "list[subprocess.Popen[bytes]]", logs: list[Path]) -> bool:
        """Whether nothing was written for too long; no process is left when it returns."""
        sizes, since, hung = [-1] * len(logs), time.monotonic(), False
        try:
            while not hung and any(process.poll() is None for process in processes):
                time.sleep(0.2)
                now = [log.stat().st_size for log in logs]
                if now != sizes:
                    sizes, since = now, time.monotonic()
                hung = time.monotonic() - since > (self.limit if all(sizes) else START)
        finally:
            for process in processes:
                # Its ranks too, which a test may have left.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return hung

    def _read(
        self, log: Path, was_hung: bool, file: File
    ) -> tuple[list[str], dict[str, Outcome], set[str]]:
        collected: list[str] = []
        states: set[str] = set()
        ended: dict[str, Outcome] = {}
        started: Optional[str] = None
        for line in log.read_text().splitlines():
            entry: dict[str, Any] = json.loads(line)
            if "cannot_collect" in entry:
                ended[file.path.name] = Outcome("failed", entry["cannot_collect"])
            if "collected" in entry:
                collected = entry["collected"]
            if "started" in entry:
                started = entry["started"]
            if "finished" in entry:
                ended[entry["finished"]], started = Outcome(entry["outcome"], entry["why"]), None
            if "state" in entry:
                states.add(entry["state"])
        if started is not None:
            hung, crashed = f"no outcome in {self.limit:g} s", "its process ended in it"
            ended[started] = Outcome("hung", hung) if was_hung else Outcome("crashed", crashed)
        return collected, ended, states


def _badness(outcome: Outcome) -> int:
    return ["passed", "skipped", "failed", "crashed", "hung"].index(outcome.outcome)


def compare(files: list[File], runner: Runner) -> int:
    """Run every file without and with; print both; the exit status."""
    broken: dict[str, Outcome] = {}
    compared = 0
    for file in files:
        where = "Gloo on the CPU" if file.on_gloo else "as it is"
        print(f"{file.path.name} ({where}): without ... ", end="", flush=True)
        stock = runner.outcomes(file, fixed=False)
        passed = [test for test, outcome in stock.items() if outcome.outcome == "passed"]
        print(f"{len(passed)} of {len(stock)} passed; with ... ", end="", flush=True)
        fixed = runner.outcomes(file, fixed=True, tests=passed)
        no_outcome = Outcome("failed", "; ".join(outcome.why for outcome in fixed.values()))
        ended = {test: fixed.get(test, no_outcome) for test in passed}
        lost = {test: outcome for test, outcome in ended.items() if outcome.outcome != "passed"}
        print(f"{len(passed) - len(lost)} passed", flush=True)
        for test, outcome in stock.items():
            if outcome.outcome != "passed":
                print(f"  not compared, {outcome.outcome} without: {test}: {outcome.why}")
        compared += len(passed)
        broken.update(lost)
    print(f"pp_hookfix was {', '.join(sorted(runner.states)) or 'never asked'}")
    for test, outcome in broken.items():
        print(f"BROKEN, passed without, {outcome.outcome} with: {test}: {outcome.why}")
    if not compared:
        print("Nothing was compared: no test passed without the plugin.")
        return 1
    # Pending is a file that never imports pipelining.
    if not runner.states - {"pending"} or runner.states & {"off", "unsupported"}:
        print("That is no run with the plugin: see `pp-hookfix status` for why.")
        return 1
    print(f"{compared} tests passed without the plugin, {compared - len(broken)} of them with it.")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
