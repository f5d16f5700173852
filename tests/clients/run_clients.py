"""Train the real frameworks without the plugin and under each policy, and record what differs.

    python tests/clients/run_clients.py WHEEL [CASE ...] [--policy NAME] [--venvs FOLDER]

Each framework is taken from the package index into an environment of its own, 5 to 8 GB,
which is removed afterwards (`--venvs` keeps it). A case is trained by the framework's own
trainer or pipeline, on Gloo and the CPU (without_a_gpu.py), with a hook on the input of every
stage: once without the plugin, then under each policy. Losses, gradient norms, gradients in
each step and parameters at the end must be the same to the last bit, and in each step no more
hooks may fire than were registered in it. A framework's own unit tests are a case too: all
that pass without must pass under each policy.

A run of every case goes into docs/clients.json, as each case ends, and docs/clients.md is
made from it. Exit status: 0 when everything was as it must be, 1 when not, 2 when it cannot run.
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, Optional
from xml.etree import ElementTree

import clients_table

from pp_hookfix.policies import POLICIES

HERE = Path(__file__).parent
INSTALL, LIMIT = 1800, 900  # seconds


class Client(NamedTuple):
    """What is installed together."""

    package: str
    torch: str
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.package.replace('==', ' ')}, torch {self.torch}"

    def slug(self) -> str:
        """As a folder's name."""
        return f"{self.package}-torch-{self.torch}".replace("==", "-")


class Case(NamedTuple):
    """One training, or one run of a client's own tests."""

    name: str
    client: Client
    driver: str
    """A file beside this one, or modules of the client's tests."""
    options: dict[str, Any] = {}  # noqa: RUF012
    ranks: int = 2
    imports_itself: bool = False
    """Whether the driver imports the plugin, after the stages are made."""
    fails_on_stock: bool = False
    """A fault of the framework or of torch: nothing to compare, and no failure of this run."""

    @property
    def is_unit_tests(self) -> bool:
        return not self.driver.endswith(".py")


TITAN = Client("torchtitan==0.3.0", "2.14.1", ("pytest", "expecttest"))
# It imports triton, which a CPU build of torch does not bring.
TITAN_2_13 = Client("torchtitan==0.3.0", "2.13.0", ("triton",))
AUTOMODEL = Client("nemo-automodel==0.7.0", "2.13.0")
LENGTHS = "1F1B, changing lengths, validation with fewer microbatches"
UNIT_TESTS = "torchtitan.experiments.graph_trainer.tests"


def titan(name: str, client: Client = TITAN, ranks: int = 2, **options: Any) -> Case:
    return Case(name, client, "train_torchtitan.py", options, ranks)


def automodel(name: str, imports_itself: bool = False, **options: Any) -> Case:
    return Case(name, AUTOMODEL, "train_automodel.py", options, 2, imports_itself)


CASES = [
    titan(
        "1F1B, selective checkpointing, accumulation, validation between",
        schedule="1F1B",
        checkpointing="selective",
        accumulation=2,
        validation=True,
    ),
    titan("Interleaved1F1B, full checkpointing", schedule="Interleaved1F1B", checkpointing="full"),
    titan("InterleavedZeroBubble", schedule="InterleavedZeroBubble"),
    titan("ZBVZeroBubble", schedule="ZBVZeroBubble"),
    titan(
        "ZBVZeroBubble, selective checkpointing",
        schedule="ZBVZeroBubble",
        checkpointing="selective",
    )._replace(fails_on_stock=True),
    titan("Interleaved1F1B, PP 2 x TP 2", schedule="Interleaved1F1B", tensor_parallel=2, ranks=4),
    titan("graph_pp: Interleaved1F1B", schedule="Interleaved1F1B", graph_pp=True),
    Case("graph_pp: its unit tests", TITAN, f"{UNIT_TESTS}.test_graph_pp_runner"),
    titan("Interleaved1F1B", TITAN_2_13, schedule="Interleaved1F1B"),
    automodel(LENGTHS),
    automodel(f"{LENGTHS}, buffer pool", pool=2),
    automodel(f"{LENGTHS}, plugin after the stages", imports_itself=True),
    automodel(f"{LENGTHS}, plugin after the stages and the pool", imports_itself=True, pool=2),
    automodel(
        "Interleaved1F1B, changing lengths, validation",
        schedule="interleaved1f1b",
        layers_per_stage=1,
        validation_microbatches=8,
    ),
]


class DidNotRun(Exception):
    """A run ended with no result; the message is why, in a line."""


def install(client: Client, wheel: str, folder: Path) -> Path:
    """The python of an environment with the client and the plugin in it."""
    python = folder / "bin" / "python"
    if python.exists():
        packages = ["--force-reinstall", "--no-deps", wheel]
    else:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        packages = [f"torch=={client.torch}", client.package, *client.also, wheel]
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir", *packages]
    subprocess.run(command, check=True, timeout=INSTALL)
    return python


def run(case: Case, policy: Optional[str], python: Path) -> list[dict[str, Any]]:
    """What each rank wrote, without the plugin (None) or under a policy.

    Raises:
        DidNotRun: it failed or hung.
    """
    folder = Path(tempfile.mkdtemp(prefix="pp_hookfix-client-"))
    options = {**case.options, "limit": LIMIT}
    with_plugin = [str(python), "-m", "pp_hookfix", "run", "--policy", str(policy)]
    if policy is None or case.imports_itself:
        with_plugin = []
        options["imports"] = policy if case.imports_itself else None
    if case.is_unit_tests:
        # Not this project's configuration, below which nox has its temporary files.
        (folder / "pytest.ini").write_text("[pytest]\n")
        command = [str(python), "-m", "pytest", "-c", "pytest.ini", "-p", "no:cacheprovider"]
        command += ["--pyargs", case.driver, f"--junitxml={folder / 'junit.xml'}"]
    else:
        command = [str(python), "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(case.ranks)]
        command += [str(HERE / case.driver), str(folder), json.dumps(options)]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("PP_HOOKFIX")
    }
    environment.update(HF_HOME=str(folder / "hf"), HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    log = folder / "log.txt"
    try:
        with log.open("w") as output:
            process = subprocess.Popen(
                [*with_plugin, *command],
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                # A rank that hangs shows its stacks and ends before this does.
                exit_status = process.wait(timeout=LIMIT + 60)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        if case.is_unit_tests:
            return [tests_of(folder / "junit.xml")]
        if exit_status:
            raise DidNotRun(last_error(log.read_text()))
        return [
            json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(case.ranks)
        ]
    except subprocess.TimeoutExpired:
        raise DidNotRun(f"not done after {LIMIT + 60} s") from None
    except Exception:
        sys.stderr.write(f"\n{log.read_text()[-6000:]}\n")
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def tests_of(report: Path) -> dict[str, Any]:
    """As of a rank that keeps what passed."""
    if not report.exists():
        raise DidNotRun("pytest wrote no report")
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    passed = [one for one in cases if not any(child.tag in ENDED_BADLY for child in one)]
    if not passed:
        raise DidNotRun("no test passed")
    names = [[f"{one.attrib['classname']}::{one.attrib['name']}", "passed"] for one in passed]
    return {"kept": names, "hooks": {}, "plugin": None}


ENDED_BADLY = ("failure", "error", "skipped")


def last_error(log: str) -> str:
    """The line that a person looks for in a log: what hung, or the first exception's message."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    hung = [line for line in lines if line.startswith("Timeout (")]
    raised = [match[2] for match in map(EXCEPTION.match, lines) if match]
    return (hung + raised + lines[-1:] + ["it printed nothing"])[0]


EXCEPTION = re.compile(r"(\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception)(?:: .*)?)$")


def compare(case: Case, python: Path, policies: list[str]) -> dict[str, Any]:
    """The case without the plugin and under each policy."""
    entry: dict[str, Any] = {
        "client": str(case.client),
        "ranks": case.ranks,
        "ran": datetime.date.today().isoformat(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    print("without ... ", end="", flush=True)
    try:
        stock = run(case, None, python)
    except DidNotRun as error:
        print(f"not compared: {error}", flush=True)
        return {**entry, "not_compared": str(error)}
    entry["unit"] = "tests" if case.is_unit_tests else "values"
    entry["compared"] = sum(len(rank["kept"]) for rank in stock)
    entry["without"] = {"hooks": most_fired(stock)}
    entry["policies"] = {}
    for policy in policies:
        print(f"{policy} ... ", end="", flush=True)
        entry["policies"][policy] = under(case, policy, python, stock)
    print("ok" if is_ok(case, entry) else "DIFFERS", flush=True)
    return entry


def under(case: Case, policy: str, python: Path, stock: list[dict[str, Any]]) -> dict[str, Any]:
    try:
        ranks = run(case, policy, python)
    except DidNotRun as error:
        return {"failed": str(error)}
    return result_of(ranks, stock, policy, case.is_unit_tests)


def result_of(
    ranks: list[dict[str, Any]], stock: list[dict[str, Any]], policy: str, unit_tests: bool
) -> dict[str, Any]:
    """What differs between a run under a policy and the one without the plugin."""
    differs = [
        f"rank {number}: {name}"
        for number, (ours, theirs) in enumerate(zip(ranks, stock))
        for name in differences(ours["kept"], theirs["kept"], in_order=not unit_tests)
    ]
    states = [rank["plugin"] for rank in ranks]
    if not unit_tests and set(states) != {f"patched {policy}"}:
        differs.append(f"the plugin was {states[0]}")
    if any(registered != fired for rank in ranks for registered, fired in rank["hooks"].values()):
        differs.append("hooks pile up, or are lost")
    return {"hooks": most_fired(ranks), "differs": differs[:20]}


def differences(ours: list[Any], theirs: list[Any], in_order: bool) -> list[str]:
    """Names of what is not the same; lists of other lengths differ, too."""
    if not in_order:
        return [name for name, _ in theirs if name not in dict(ours)]
    found = [theirs_one[0] for our_one, theirs_one in zip(ours, theirs) if our_one != theirs_one]
    if len(ours) != len(theirs):
        found.append(f"{len(theirs)} values without the plugin, {len(ours)} with it")
    return found


def most_fired(ranks: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Of the stage where most hooks fired: how many were registered in each step, and fired."""
    stages = [stage for rank in ranks for stage in rank["hooks"].values()]
    registered, fired = max(stages, key=lambda stage: sum(stage[1]), default=([], []))
    return {"registered": registered, "fired": fired}


def is_ok(case: Case, entry: dict[str, Any]) -> bool:
    """It was compared, and under every policy nothing differs."""
    if "not_compared" in entry:
        return case.fails_on_stock
    return all(result.get("differs") == [] for result in entry["policies"].values())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="run_clients.py", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("wheel", help="the plugin's built wheel")
    parser.add_argument("cases", nargs="*", metavar="CASE", help="part of a case's name or client")
    parser.add_argument("--policy", action="append", choices=POLICIES, help="may be repeated")
    parser.add_argument("--venvs", type=Path, metavar="FOLDER", help="keep the environments here")
    arguments = parser.parse_args()
    chosen = [
        case
        for case in CASES
        if not arguments.cases
        or any(word in f"{case.client}: {case.name}" for word in arguments.cases)
    ]
    if not chosen:
        names = "\n".join(f"  {case.client}: {case.name}" for case in CASES)
        parser.error(f"no case matches {' '.join(arguments.cases)}; there are\n{names}")
    ok = True
    for client in dict.fromkeys(case.client for case in chosen):
        folder = arguments.venvs or Path(tempfile.mkdtemp(prefix="pp_hookfix-client-"))
        print(f"{client}: install ...", flush=True)
        try:
            python = install(client, arguments.wheel, folder.resolve() / client.slug())
            for case in chosen:
                if case.client == client:
                    print(f"{case.name}: ", end="", flush=True)
                    entry = compare(case, python, arguments.policy or list(POLICIES))
                    ok = ok and is_ok(case, entry)
                    if not arguments.policy:
                        clients_table.add(f"{client}: {case.name}", entry)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            print(f"{client} is not installed, its cases did not run: {error}", file=sys.stderr)
            ok = False
        finally:
            if not arguments.venvs:
                shutil.rmtree(folder, ignore_errors=True)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
