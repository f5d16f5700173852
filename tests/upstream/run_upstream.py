"""Run torch's own pipelining tests, without the plugin and under each policy.

    python tests/upstream/run_upstream.py TREE [FILE ...] [--policy NAME] [--record]
                                          [-k EXPRESSION] [--limit SECONDS]

TREE is a torch source tree of the release that is installed here; FILEs are test
files in it, by default all of test/distributed/pipelining. They are copied into a
temporary folder, nothing is written into the tree. With two GPUs they run as they
are; without, Gloo and the CPU are put in the place of what asks for accelerators
(upstream_on_gloo.py), and the faults of stock torch over Gloo are stepped round.

First each test runs on stock torch; then those that passed run under `pp-hookfix run
--policy`, for each policy. What hangs is run once more by itself before it counts. Each
outcome is written down as it falls, so that an interrupted run goes on where it was;
those of stock torch are learned once, and those under a policy once for each state of
the plugin's code. `--record` writes docs/upstream.json and docs/upstream.md.

Exit status: 0 when all that passed without pass under every policy, 1 when not, or when
none passed without, 2 when it cannot be run.
"""

import argparse
import contextlib
import hashlib
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
import upstream_table

PIPELINING = Path("test", "distributed", "pipelining")
CONFTEST = Path(__file__).with_name("upstream_conftest.py")
RANKS = 2
# Below a test file, for each rank, which may import no more than that.
STEP_ROUND = """
from pp_hookfix.verification import gloo_faults as _gloo_faults
_gloo_faults.step_round()
"""
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
    for module in ("torch", "pytest", "expecttest", "numpy", "pp_hookfix"):
        if importlib.util.find_spec(module) is None:
            parser.error(f"torch's tests need {module}, which is not installed: pip install it")
    from pp_hookfix.policies import POLICIES

    parser.add_argument("tree", type=Path, metavar="TREE", help="a torch source tree")
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help=f"in the tree; default: all of {PIPELINING}"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="only tests that match, as in pytest")
    parser.add_argument(
        "--limit", type=float, default=120, metavar="SECONDS", help="for each test (120)"
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=list(POLICIES),
        metavar="NAME",
        help=f"may be repeated; default: all ({', '.join(POLICIES)})",
    )
    parser.add_argument(
        "--record", action="store_true", help="write docs/upstream.json and docs/upstream.md"
    )
    parser.add_argument(
        "--anew", action="store_true", help="forget what an earlier run has written down"
    )
    arguments = parser.parse_intermixed_args()
    if arguments.record and (arguments.files or arguments.k or arguments.policy):
        parser.error("--record is of the whole tree and every policy: no FILE, -k or --policy")
    sources = [arguments.tree / name for name in arguments.files] or sorted(
        (arguments.tree / PIPELINING).glob("test_*.py")
    )
    if not sources:
        parser.error(f"{arguments.tree} has no {PIPELINING}/test_*.py: give a torch source tree")
    missing = [str(source) for source in sources if not source.is_file()]
    if missing:
        parser.error(f"no such test file: {missing[0]}")

    import torch

    version = version_of(arguments.tree) or "unknown"
    print(f"torch {torch.__version__}; tests of torch {version}")
    enough_gpus = torch.cuda.device_count() >= RANKS
    state = State(arguments.tree, enough_gpus)
    if arguments.anew:
        state.forget()
    work = Path(tempfile.mkdtemp(prefix="pp_hookfix-upstream-"))
    try:
        files = [copy(source, work, enough_gpus) for source in sources]
        shutil.copy(CONFTEST, work / "conftest.py")
        (work / "pytest.ini").write_text("[pytest]\n")
        runner = Runner(work, arguments.k, arguments.limit, enough_gpus, state)
        entry = compare(files, runner, arguments.policy or list(POLICIES))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    if arguments.record:
        where = "as they are" if enough_gpus else "Gloo on the CPU"
        upstream_table.add(torch.__version__, {"tree": version, "where": where, **entry})
    return verdict(entry, runner)


class State:
    """What was learned of each test, kept from run to run beside the temporary files."""

    def __init__(self, tree: Path, enough_gpus: bool) -> None:
        import torch

        import pp_hookfix
        from pp_hookfix.verification import gloo_faults

        # What is put in the place of what decides how a test ends on stock torch, too.
        harness = [*map(Path, (gloo_faults.__file__, upstream_on_gloo.__file__)), CONFTEST]
        tests = _digest([*sorted((tree / PIPELINING).glob("*.py")), *harness])
        key = f"{torch.__version__}-{tests}-{enough_gpus}"
        self.code = _digest(sorted(Path(pp_hookfix.__file__).parent.rglob("*.py")))
        self.path = Path(tempfile.gettempdir(), f"pp_hookfix-upstream-{key}.json")
        self.known: dict[str, dict[str, Any]] = {}
        self.collected: dict[str, list[str]] = {}
        """The tests of a file, as far as they are selected."""
        with contextlib.suppress(OSError, ValueError):
            self.known, self.collected = json.loads(self.path.read_text())

    def of(self, policy: Optional[str], file: str) -> dict[str, "Outcome"]:
        """By test: how it ended without the plugin (None), or under a policy."""
        known = self.known.get(self._key(policy, file), {})
        return {test: Outcome(*outcome) for test, outcome in known.items()}

    def learn(self, policy: Optional[str], file: str, outcomes: dict[str, "Outcome"]) -> None:
        self.known.setdefault(self._key(policy, file), {}).update(outcomes)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps([self.known, self.collected]))
        os.replace(new, self.path)

    def forget(self) -> None:
        self.known.clear()
        self.collected.clear()

    def _key(self, policy: Optional[str], file: str) -> str:
        return f"stock {file}" if policy is None else f"{policy} {self.code} {file}"


def _digest(files: list[Path]) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


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
            path.write_text(upstream_on_gloo.on_gloo(text) + STEP_ROUND)
    # The spelling is upstream's, up to 2.8.
    base = getattr(common_distributed, "MultiProcContinousTest", None)
    return File(
        path, on_gloo, rank_by_rank=hasattr(base, "run_rank") and "MultiProcContinousTest" in text
    )


class Runner:
    """Runs tests of a file until each has an outcome of its own."""

    def __init__(
        self,
        work: Path,
        expression: Optional[str],
        limit: float,
        enough_gpus: bool,
        state: State,
    ) -> None:
        self.work = work
        self.state = state
        self.select = ["-k", expression] if expression else []
        self.limit = limit
        # Else the last line of a failure is that hint.
        self.environment = {**os.environ, "PYTORCH_PRINT_REPRO_ON_FAILURE": "0"}
        # Ranks share the cores of one machine, as under torchrun, which sets the same.
        self.environment.setdefault("OMP_NUM_THREADS", "1")
        if not enough_gpus:
            self.environment["CUDA_VISIBLE_DEVICES"] = ""
        self.states: set[str] = set()
        """What the plugin said of itself, at the end of the runs with it."""

    def outcomes(
        self, file: File, policy: Optional[str], tests: Optional[list[str]] = None
    ) -> dict[str, Outcome]:
        """Each test's outcome, without the plugin (None) or under a policy.

        What did not pass once another had failed runs again: torch skips the rest of a
        class after a failure, and what the failed test leaves (a broken connection, a
        dead rank) fails those after it. What hung runs again by itself.
        """
        name = file.path.name
        known = self.state.of(policy, name)
        wanted = tests
        if wanted is None:
            whole = [str(file.path.relative_to(self.work))]
            wanted = self.state.collected.get(self._selected(name), whole)
        outcomes = {test: known[test] for test in wanted if test in known}
        left = [test for test in wanted if test not in known]
        while left:
            collected, ended = self._once(file, policy, left)
            if tests is None and ended:
                self.state.collected.setdefault(self._selected(name), collected)
            new: dict[str, Outcome] = {}
            failed = False
            for test, outcome in ended.items():
                if not failed or outcome.outcome == "passed":
                    new[test] = outcome
                failed = failed or outcome.outcome not in ("passed", "skipped")
            for test, outcome in new.items():
                if outcome.outcome == "hung":
                    new[test] = self._once(file, policy, [test])[1].get(test, outcome)
            if not ended:
                new = {test: Outcome("crashed", "pytest ended") for test in left}
            outcomes.update(new)
            self.state.learn(policy, name, new)
            left = [test for test in collected if test not in outcomes] if ended else []
        return outcomes

    def _selected(self, name: str) -> str:
        return " ".join([name, *self.select])

    def _once(
        self, file: File, policy: Optional[str], tests: list[str]
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
        if policy is None:
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
                        [*WITH, "--policy", policy, *command] if policy else command,
                        cwd=self.work,
                        env=environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        try:
            hung = self._wait(processes, logs)
        except KeyboardInterrupt:
            _, ended = self._ended(file, policy, logs, hung=False)
            done = {
                test: one for test, one in ended.items() if one.outcome in ("passed", "skipped")
            }
            self.state.learn(policy, file.path.name, done)
            raise
        collected, ended = self._ended(file, policy, logs, hung)
        if not ended:  # pytest itself has failed, in a way that a person must see
            printed = "".join(log.with_suffix(".txt").read_text()[-4000:] for log in logs)
            sys.stderr.write(f"\n{printed}")
        return collected, ended

    def _ended(
        self, file: File, policy: Optional[str], logs: list[Path], hung: bool
    ) -> tuple[list[str], dict[str, Outcome]]:
        """The tests there are, and the worst outcome of each over the ranks."""
        collected: list[str] = []
        by_rank = []
        for log in logs:
            tests_here, ended, states = self._read(log, hung, file)
            collected = collected or tests_here
            if policy is not None:
                self.states |= states
            by_rank.append(ended)
        return collected, {
            test: max((ended[test] for ended in by_rank if test in ended), key=_badness)
            for test in dict.fromkeys(test for ended in by_rank for test in ended)
        }

    def _wait(self, processes: "list[subprocess.Popen[bytes]]", logs: list[Path]) -> bool:
        """Whether nothing was written for too long; no process is left when it returns."""
        sizes, since, hung, shown = [-1] * len(logs), time.monotonic(), False, 0
        try:
            while not hung and any(process.poll() is None for process in processes):
                time.sleep(0.2)
                now = [log.stat().st_size for log in logs]
                if now != sizes:
                    sizes, since = now, time.monotonic()
                    ended = logs[0].read_text().count('"finished"')
                    print("." * (ended - shown), end="", flush=True)
                    shown = ended
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


def compare(files: list[File], runner: Runner, policies: list[str]) -> dict[str, Any]:
    """Run every file without and under each policy, and print both.

    Returns:
        ``tests``, ``passed`` without, ``policies`` (how many of them passed under each),
        ``not_compared`` and ``broken`` (by test: how it ended, and why).
    """
    tests, passed_by_policy = 0, dict.fromkeys(policies, 0)
    passed_without: list[str] = []
    not_compared: dict[str, str] = {}
    broken: dict[str, str] = {}
    for file in files:
        where = "Gloo on the CPU" if file.on_gloo else "as it is"
        print(f"{file.path.name} ({where})\n  without ", end="", flush=True)
        stock = runner.outcomes(file, None)
        passed = [test for test, outcome in stock.items() if outcome.outcome == "passed"]
        print(f" {len(passed)} of {len(stock)} passed", flush=True)
        tests += len(stock)
        passed_without += passed
        for policy in policies:
            print(f"  {policy} ", end="", flush=True)
            ended = runner.outcomes(file, policy, passed)
            no_outcome = Outcome("failed", "; ".join(outcome.why for outcome in ended.values()))
            lost = {test: ended.get(test, no_outcome) for test in passed}
            lost = {test: one for test, one in lost.items() if one.outcome != "passed"}
            print(f" {len(passed) - len(lost)} of {len(passed)} passed", flush=True)
            passed_by_policy[policy] += len(passed) - len(lost)
            for test, outcome in lost.items():
                broken[f"{policy}: {test}"] = f"{outcome.outcome}: {outcome.why}"
        for test, outcome in stock.items():
            if outcome.outcome != "passed":
                print(f"  not compared, {outcome.outcome} without: {test}: {outcome.why}")
                not_compared[test] = f"{outcome.outcome}: {outcome.why}"
    return {
        "tests": tests,
        "passed": len(passed_without),
        "policies": passed_by_policy,
        "not_compared": not_compared,
        "broken": broken,
    }


def verdict(entry: dict[str, Any], runner: Runner) -> int:
    """Print it; the exit status."""
    if runner.states:
        print(f"pp_hookfix was {', '.join(sorted(runner.states))}")
    for test, how in entry["broken"].items():
        print(f"BROKEN, passed without: {test}: {how}")
    if not entry["passed"]:
        print("Nothing was compared: no test passed without the plugin.")
        return 1
    # Pending is a file that never imports pipelining. All may have been known.
    if runner.states and (
        not runner.states - {"pending"} or runner.states & {"off", "unsupported"}
    ):
        print("That is no run with the plugin: see `pp-hookfix status` for why.")
        return 1
    counts = ", ".join(f"{number} under {policy}" for policy, number in entry["policies"].items())
    print(f"{entry['passed']} tests passed without the plugin; of them, {counts}.")
    return 1 if entry["broken"] else 0


if __name__ == "__main__":
    sys.exit(main())
