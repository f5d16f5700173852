"""Try every way in with every tool that starts Python processes; write docs/ways-in.json and .md.

    python tests/ways_in/try_ways_in.py WHEEL

The tools are the real ones, installed into environments of their own; torch is the
stand-in, since only what is patched is looked at. Each cell is a process and a child of it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Callable, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
import environments
import evidence
import stand_in

PAGE = Path(__file__).parents[2] / "docs" / "ways-in.md"
BEGIN, END = "<!-- as tried by nox -s ways_in -->\n", "<!-- end -->\n"
WAYS = ("import", "run", "activate", "autowrapt")
TOOLS = ("ddtrace", "coverage", "opentelemetry-distro", "pex", "shiv", "uv", "pipx")

TRAIN = """\
import os, subprocess, sys

def main():
    if os.environ["WAY"] == "import":
        import pp_hookfix
    import torch.distributed.pipelining.stage as stage
    method = vars(stage._PipelineStageBase)["_retrieve_recv_activations"]
    print("fixed" if hasattr(method, "__wrapped__") else "not", flush=True)
    if "CHILD" not in os.environ:
        os.environ["CHILD"] = "1"
        flags = os.environ.get("FLAGS", "").split()
        subprocess.run([sys.executable, *flags, sys.argv[0]], check=True)

if __name__ == "__main__":
    main()
"""


class Row(NamedTuple):
    """One tool, image or flag."""

    name: str
    python: Path
    command: Callable[[list[str]], list[str]]
    """What starts the training, given what `pp-hookfix run` is to put in (nothing, else)."""
    ways: tuple[str, ...] = WAYS
    flags: str = ""
    run: tuple[str, ...] = ()
    """How `pp-hookfix run` itself is started, where that is what the row is about."""


def tried(row: Row, way: str, folder: Path) -> str:
    """``yes``, ``no``, or ``no: its children``."""
    if way not in row.ways:
        return "-"
    ours = [str(row.python), "-m", "pp_hookfix"]
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "CHILD")}
    env = {
        **kept,
        "PATH": f"{row.python.parent}{os.pathsep}{kept['PATH']}",
        "WAY": way,
        "FLAGS": row.flags,
        "COVERAGE_FILE": str(folder / "coverage"),
        "DD_TRACE_ENABLED": "false",
        "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
        **{f"OTEL_{kind}_EXPORTER": "none" for kind in ("TRACES", "METRICS", "LOGS")},
        **({"AUTOWRAPT_BOOTSTRAP": "pp_hookfix"} if way == "autowrapt" else {}),
    }
    if way == "activate":
        subprocess.run([*ours, "activate"], check=True, capture_output=True, cwd=folder)
    ran = subprocess.run(
        row.command([*(row.run or ours), "run"] if way == "run" else []),
        capture_output=True,
        text=True,
        check=False,
        env=env,
        cwd=folder,
        timeout=600,
    )
    if way == "activate":
        subprocess.run([*ours, "deactivate"], check=True, capture_output=True, cwd=folder)
    said = [line for line in ran.stdout.splitlines() if line in ("fixed", "not")]
    if len(said) != 2:
        raise RuntimeError(f"{row.name}, {way}: {ran.stdout}\n{ran.stderr}")
    if said == ["fixed", "fixed"]:
        return "yes"
    return "no: its children" if said[0] == "fixed" else "no"


def rows(wheel: str, folder: Path) -> list[Row]:
    """Make the environments, and what is tried in them."""
    python = environments.make(sys.executable, folder / "environment")
    plain = environments.make(sys.executable, folder / "without")
    tools = environments.make(sys.executable, folder / "tools")
    pip = [sys.executable, "-m", "pip", "--python"]
    install = ["install", "--quiet", "--no-cache-dir"]
    in_environment = ("ddtrace", "coverage", "opentelemetry-distro")
    subprocess.run([*pip, str(python), *install, f"{wheel}[auto]", *in_environment], check=True)
    others = [tool for tool in TOOLS if tool not in in_environment]
    subprocess.run([*pip, str(tools), *install, *others], check=True)
    for one in (python, plain):
        stand_in.make(environments.site_packages(one))
    script = str(folder / "train.py")
    sources = stand_in.make(folder / "sources")
    for path in (Path(script), sources / "train.py"):
        path.write_text(TRAIN)
    here, there = python.parent, tools.parent
    pex, shiv = str(folder / "train.pex"), str(folder / "train.pyz")
    subprocess.run(
        [str(there / "pex"), wheel, "-D", str(sources), "-e", "train:main", "-o", pex], check=True
    )
    packed = folder / "packed"
    subprocess.run([*pip, str(tools), *install, "--target", str(packed), wheel], check=True)
    subprocess.run(["cp", "-r", *map(str, sources.iterdir()), str(packed)], check=True)
    subprocess.run(
        [str(there / "shiv"), "--site-packages", str(packed), "-e", "train:main", "-o", shiv],
        check=True,
    )
    train = [str(python), script]
    found = [
        Row("a virtual environment", python, lambda run: [*run, *train]),
        *(
            Row(f"`python {flag}`", python, start_with(python, flag, script), flags=flag)
            for flag in ("-P", "-E", "-I")
            if sys.version_info >= (3, 11) or flag != "-P"
        ),
        *(
            Row(f"`{tool}`, `run` {where} it", python, command)
            for tool, words in (
                ("ddtrace-run", [str(here / "ddtrace-run")]),
                ("opentelemetry-instrument", [str(here / "opentelemetry-instrument")]),
            )
            for where, command in (
                ("inside", lambda run, words=words: [*words, *run, *train]),
                ("around", lambda run, words=words: [*run, *words, *train]),
            )
        ),
        Row(
            "`coverage run`, `run` inside it",
            python,
            lambda run: [str(here / "coverage"), "run", *run[1:], *(train if run else [script])],
        ),
        Row(
            "`coverage run`, `run` around it",
            python,
            lambda run: [*run, str(here / "coverage"), "run", script],
        ),
        Row("a PEX file that has pp-hookfix", python, lambda run: [*run, str(python), pex]),
        Row("a shiv file that has pp-hookfix", python, lambda run: [*run, str(python), shiv]),
    ]
    distributions = environments.distributions_python()
    if distributions is not None:
        its = environments.make(distributions, folder / "distribution", "pp_hookfix", "wrapt")
        stand_in.make(environments.site_packages(its))
        version = f"Debian's or Ubuntu's Python ({its.resolve().name})"
        ways = ("import", "run", "activate")
        found.append(Row(version, its, start_with(its, "", script), ways))
    for name, run in (
        ("`uvx pp-hookfix run`, nothing installed", (str(there / "uvx"), "--from", wheel)),
        ("`pipx run pp-hookfix run`", (str(there / "pipx"), "run", "--spec", wheel)),
    ):
        started = (*run, "pp-hookfix")
        found.append(Row(name, plain, start_with(plain, "", script), ("run",), run=started))
    for number, other in enumerate(environments.other_pythons()):
        its = environments.make(other, folder / f"other-{number}")
        stand_in.make(environments.site_packages(its))
        version = f"`run` from another environment, CPython {its.resolve().name[6:]} trains"
        ours = (str(python), "-m", "pp_hookfix")
        found.append(Row(version, its, start_with(its, "", script), ("run",), run=ours))
    return found


def start_with(python: Path, flag: str, script: str) -> Callable[[list[str]], list[str]]:
    return lambda run: [*run, str(python), *flag.split(), script]


def write(record: dict[str, Any], code: str = "") -> None:
    """The table in docs/ways-in.md, held to the package's code (default: that which is here)."""
    code = code or evidence.fingerprint()
    table = f"| | {' | '.join(f'`{way}`' for way in WAYS)} |\n|{'---|' * (len(WAYS) + 1)}\n"
    for name, entry in record.items():
        cells = [name + evidence.age(entry, code), *map(entry["ways"].get, WAYS)]
        table += f"| {' | '.join(cells)} |\n"
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1].split("\n<!-- of the code")[0]
    page = before + BEGIN + table + END + after.rstrip("\n") + "\n" + evidence.foot(code)
    PAGE.write_text(page, encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheel", help="the built wheel")
    wheel = str(Path(parser.parse_args().wheel).resolve())
    record: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pp_hookfix-ways-") as name:
        folder = Path(name)
        for row in rows(wheel, folder):
            cells = {way: tried(row, way, folder) for way in WAYS}
            record[row.name] = {**evidence.stamp(), "ways": cells}
            print(f"{row.name}: {', '.join(cells.values())}", flush=True)
    PAGE.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    write(record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
