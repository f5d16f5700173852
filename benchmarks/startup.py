"""What the fix costs an interpreter that does nothing: whole processes, interleaved.

    python benchmarks/startup.py [--rounds N] [--json]

Rows, against the baseline ``bare``:

- ``bare``: a new virtual environment's interpreter, ``-c pass``;
- ``run``: the same one, in the environment that ``pp-hookfix run`` makes;
- ``activate``: another one, in which pp_hookfix lies and ``pp-hookfix activate`` was run;
- ``autowrapt, idle`` and ``autowrapt``: the interpreter that runs this script, if
  autowrapt is installed there, without and with ``AUTOWRAPT_BOOTSTRAP=pp_hookfix``.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Mapping
from pathlib import Path

import table

import pp_hookfix

# Compiled modules are written: an installed package has them.
NOT_INHERITED = ("PYTHONPATH", "PP_HOOKFIX", "AUTOWRAPT_BOOTSTRAP", "PYTHONDONTWRITEBYTECODE")


def environment_of_run(python: str) -> dict[str, str]:
    """The environment variables of a command under ``pp-hookfix run``."""
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    command = [sys.executable, "-m", "pp_hookfix", "run", python, "-c", show]
    environment: dict[str, str] = json.loads(subprocess.check_output(command, text=True))
    return environment


def new_environment(folder: Path) -> str:
    """Its interpreter."""
    venv.create(folder, symlinks=True)
    return str(folder / "bin" / "python")


def seconds(python: str, environment: Mapping[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run([python, "-c", "pass"], env=environment, check=True)
    return time.perf_counter() - start


def time_processes(rounds: int) -> dict[str, list[float]]:
    """Seconds of each whole process, by row; one of each row per round."""
    inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    os.environ.clear()
    os.environ.update(inherited)
    with tempfile.TemporaryDirectory() as folder:
        python, activated = (new_environment(Path(folder, name)) for name in ("bare", "activate"))
        (packages,) = Path(folder, "activate").glob("lib/python*/site-packages")
        shutil.copytree(Path(pp_hookfix.__file__).parent, packages / "pp_hookfix")
        activate = [activated, "-m", "pp_hookfix", "activate"]
        subprocess.run(activate, check=True, capture_output=True, cwd=folder)
        rows: dict[str, tuple[str, Mapping[str, str]]] = {
            "bare": (python, inherited),
            "run": (python, environment_of_run(python)),
            "activate": (activated, inherited),
        }
        if importlib.util.find_spec("autowrapt") is not None:
            rows["autowrapt, idle"] = sys.executable, inherited
            rows["autowrapt"] = sys.executable, {**inherited, "AUTOWRAPT_BOOTSTRAP": "pp_hookfix"}
        taken: dict[str, list[float]] = {name: [] for name in rows}
        for name in rows:  # compiles what is not compiled yet
            seconds(*rows[name])
        for _ in range(rounds):
            for name in rows:
                taken[name].append(seconds(*rows[name]))
    return taken


def measure(rounds: int = 100) -> list[table.Row]:
    """Rows of one interleaved run."""
    return table.timed(time_processes(rounds), "bare")


def main() -> int:
    parser = table.parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=100, help="processes per row (100)")
    arguments = parser.parse_args()
    table.show(measure(arguments.rounds), arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
