"""``pp-hookfix activate``, ``deactivate`` and what ``status`` says of a new Python."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import environments
import pytest
import stand_in

DISTRIBUTIONS = environments.distributions_python()
FILE = "pp_hookfix_activate.pth"
REPORT = """
import sys
print("pp_hookfix" in sys.modules)
import torch.distributed.pipelining.stage as stage
print(type(vars(stage._PipelineStageBase)["_retrieve_recv_activations"]).__name__)
"""


class Environment:
    """A virtual environment with pp_hookfix, wrapt and the stand-in for torch."""

    def __init__(
        self,
        python: str,
        folder: Path,
        packages: tuple[str, ...] = ("pp_hookfix", "wrapt"),
        options: tuple[str, ...] = (),
    ) -> None:
        self.distributions = python == DISTRIBUTIONS
        self.python = environments.make(python, folder, *packages, options=options)
        self.packages = environments.site_packages(self.python)
        stand_in.make(self.packages)
        self.elsewhere = folder.parent

    def run(self, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        names = ("PYTHONPATH", "PP_HOOKFIX", "AUTOWRAPT_BOOTSTRAP")
        inherited = {key: value for key, value in os.environ.items() if key not in names}
        return subprocess.run(
            [str(self.python), *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.elsewhere,
            env={**inherited, **env},
        )

    def command(self, *arguments: str, **env: str) -> "subprocess.CompletedProcess[str]":
        return self.run("-m", "pp_hookfix", *arguments, **env)

    def new_python(self, **env: str) -> dict[str, Any]:
        result = self.command("status", "--json", **env)
        assert result.returncode == 0, result.stderr
        new: dict[str, Any] = json.loads(result.stdout)["new_python"]
        return new


@pytest.fixture(
    params=[
        pytest.param(sys.executable, id="this Python"),
        pytest.param(
            DISTRIBUTIONS,
            id="a distribution's",
            marks=pytest.mark.skipif(
                DISTRIBUTIONS is None,
                reason="no /usr/bin/python3 whose standard library has a sitecustomize",
            ),
        ),
    ]
)
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    return Environment(request.param, tmp_path / "environment")


def test_a_sitecustomize_that_python_does_not_run_is_told(environment: Environment) -> None:
    (environment.packages / "sitecustomize.py").write_text("import pp_hookfix\n")
    new = environment.new_python()
    told = environment.command("status").stdout
    hidden = str(environment.packages / "sitecustomize.py")
    if environment.distributions:
        assert (new["active"], new["by"], new["hidden_sitecustomize"]) == (False, None, hidden)
        assert f"{hidden} is not run: Python runs {new['sitecustomize']} in its place." in told
        assert "not active in a new Python" in told
        assert environment.run("-c", REPORT).stdout == "False\nfunction\n"
    else:
        assert (new["by"], new["hidden_sitecustomize"]) == (hidden, None)
        assert environment.run("-c", REPORT).stdout == "True\nFunctionWrapper\n"


def test_activate_and_deactivate(environment: Environment) -> None:
    assert environment.new_python()["active"] is False
    assert environment.run("-c", REPORT).stdout == "False\nfunction\n"
    before = set(environment.packages.iterdir())
    for _ in range(2):
        result = environment.command("activate")
        assert (result.returncode, result.stderr) == (0, "")
        assert str(environment.packages / FILE) in result.stdout
        assert "`pp-hookfix deactivate` removes it" in result.stdout
        assert set(environment.packages.iterdir()) - before == {environment.packages / FILE}
    new = environment.new_python()
    assert (new["active"], new["policy"]) == (True, "detach")
    assert new["by"] == str(environment.packages / FILE)
    for flags in ((), ("-I",), ("-E",)):
        result = environment.run(*flags, "-c", REPORT)
        assert (result.stdout, result.stderr) == ("True\nFunctionWrapper\n", "")
    assert environment.run("-c", "import sys; print('wrapt' in sys.modules)").stdout == "False\n"
    # Idempotent with every other way in.
    assert environment.run("-c", "import pp_hookfix" + REPORT).stdout == "True\nFunctionWrapper\n"
    result = environment.command("deactivate")
    assert (result.returncode, result.stderr) == (0, "")
    assert "is removed" in result.stdout
    assert environment.run("-c", REPORT).stdout == "False\nfunction\n"
    assert "nothing to undo" in environment.command("deactivate").stdout
    assert set(environment.packages.iterdir()) == before


def test_the_variable_rules(environment: Environment) -> None:
    environment.command("activate")
    assert environment.run("-c", REPORT, PP_HOOKFIX="off").stdout == "True\nfunction\n"
    new = environment.new_python(PP_HOOKFIX="off")
    assert (new["active"], new["policy"]) == (False, "off")
    told = environment.command("status", PP_HOOKFIX="off").stdout
    assert "off in a new Python" in told
    assert "PP_HOOKFIX='off'" in told
    assert environment.new_python(PP_HOOKFIX="clone")["policy"] == "clone"
    result = environment.run("-c", REPORT, PP_HOOKFIX="detatch")
    assert result.stdout == "True\nfunction\n"
    assert result.stderr.startswith("pp_hookfix: PP_HOOKFIX='detatch'")
    assert len(result.stderr.splitlines()) == 1
    # Activated while it is off: written all the same.
    environment.command("deactivate")
    assert environment.command("activate", PP_HOOKFIX="off").returncode == 0
    assert environment.run("-c", REPORT).stdout == "True\nFunctionWrapper\n"


def test_uninstalled_without_deactivate(environment: Environment) -> None:
    environment.command("activate")
    shutil.rmtree(environment.packages / "pp_hookfix")
    result = environment.run("-c", "print('started')")
    assert (result.returncode, result.stdout, result.stderr) == (0, "started\n", "")
    # Broken is not gone: that is told.
    (environment.packages / "pp_hookfix").mkdir()
    (environment.packages / "pp_hookfix" / "__init__.py").write_text("import no_such_module\n")
    result = environment.run("-c", "print('started')")
    assert (result.returncode, result.stdout) == (0, "started\n")
    assert "No module named 'no_such_module'" in result.stderr


def test_somebody_elses_file_stays(environment: Environment) -> None:
    path = environment.packages / FILE
    path.write_text("# mine\n")
    for command in ("activate", "deactivate"):
        result = environment.command(command)
        assert result.returncode == 1
        assert result.stderr == (
            f"pp-hookfix {command}: {path} is there and was not written by pp-hookfix: "
            "it stays as it is\n"
        )
    assert path.read_text() == "# mine\n"


def test_what_cannot_be_written(environment: Environment) -> None:
    # A folder in the file's place: permissions do not hold for root.
    path = environment.packages / FILE
    path.mkdir()
    result = environment.command("activate")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == f"pp-hookfix activate: {path} cannot be written: Is a directory\n"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(environment: Environment) -> None:
    environment.packages.chmod(0o555)
    try:
        result = environment.command("activate")
    finally:
        environment.packages.chmod(0o755)
    assert (result.returncode, len(result.stderr.splitlines())) == (1, 1)
    assert "Permission denied" in result.stderr


def test_a_file_that_is_not_read_is_not_left_behind(environment: Environment) -> None:
    # -S for every interpreter: no .pth file is read.
    (environment.packages / "pp_hookfix" / "interpreter_startup.py").write_text(
        (environment.packages / "pp_hookfix" / "interpreter_startup.py")
        .read_text()
        .replace('[sys.executable, "-c", show]', '[sys.executable, "-S", "-c", show]')
    )
    result = environment.command("activate")
    assert result.returncode == 1
    assert "does not read it" in result.stderr
    assert not (environment.packages / FILE).exists()


def test_a_start_that_prints(environment: Environment) -> None:
    prints = "import atexit; print('started'); atexit.register(print, 'ended')\n"
    (environment.packages / "prints.pth").write_text(prints)
    environment.command("activate")
    printed = environment.command("status", "--json").stdout.splitlines()
    (document,) = (json.loads(line) for line in printed if line.startswith("{"))
    assert document["new_python"]["active"] is True


def test_status_answers_two_questions(environment: Environment) -> None:
    result = environment.command("status")
    first, second = result.stdout.splitlines()
    assert first.startswith("patched: torch 2.13.0 ")
    assert first.endswith(
        "What it wraps is unlike that of every release that was tried: `pp-hookfix verify` "
        "will tell."
    )
    assert second.startswith(
        f"not active in a new Python of this environment ({environment.python}"
    )
    for way in ("import pp_hookfix", "pp-hookfix run", "pp-hookfix activate"):
        assert way in second
    run = environment.command("run", str(environment.python), "-m", "pp_hookfix", "status")
    assert "by `pp-hookfix run`" in run.stdout


def test_a_child_of_the_environment_that_has_the_package(tmp_path: Path) -> None:
    """The package in one environment, torch in another that has the first one's packages, too."""
    python = environments.make_installation(tmp_path / "parent")
    if python is None:
        pytest.skip("this Python does not run from another place")
    for package in ("pp_hookfix", "wrapt"):
        environments.copy_package(package, environments.site_packages(python))
    options = ("--system-site-packages",)
    child = Environment(str(python), tmp_path / "child", packages=(), options=options)
    assert child.run("-c", REPORT).stdout == "False\nfunction\n"
    path = child.run("-c", "import sys; print(sys.path)").stdout
    result = child.command("activate")
    assert (result.returncode, result.stderr) == (0, "")
    assert child.new_python()["by"] == str(child.packages / FILE)
    assert child.run("-c", REPORT).stdout == "True\nFunctionWrapper\n"
    assert child.run("-c", "import sys; print(sys.path)").stdout == path
    # Once the package is gone, as if the file were not there.
    shutil.rmtree(environments.site_packages(python) / "pp_hookfix")
    result = child.run("-c", REPORT)
    assert (result.stdout, result.stderr) == ("False\nfunction\n", "")


def test_a_python_that_is_strict_about_encodings(environment: Environment) -> None:
    strict = {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONWARNINGS": "error"}
    for command in (
        ("activate",),
        ("status",),
        ("status", "--json"),
        ("audit", "--json", str(environment.elsewhere / "report.json"), str(environment.python)),
        ("deactivate",),
    ):
        words = (*command, "-c", REPORT) if "audit" in command else command
        result = environment.command(*words, **strict)
        assert result.returncode == 0, result.stderr
        assert "Warning" not in result.stderr
