"""In without touching the script: sitecustomize, ``pp-hookfix run``, autowrapt, a dependency.

Every test starts real processes. `torch` in them is the stand-in, so that these
run on every CPython; test_ways_in_torch.py has the real one.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Optional

import environments
import pytest
import stand_in
from conftest import ELSEWHERE, python

import pp_hookfix

PACKAGE = Path(pp_hookfix.__file__).parents[1]
OURS = Path(pp_hookfix.__file__).parent / "bootstrap"
REPORT = """
import torch.distributed.pipelining
import pp_hookfix
method = torch.distributed.pipelining.stage._PipelineStageBase._retrieve_recv_activations
print(pp_hookfix.status().state, hasattr(method, "__wrapped__"))
"""


@pytest.fixture
def torch_path(tmp_path: Path) -> Path:
    return stand_in.make(tmp_path / "site")


def joined(*folders: object) -> str:
    return os.pathsep.join(map(str, folders))


def run(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    """``pp-hookfix run`` this interpreter with arguments; pp_hookfix need not be installed."""
    env = dict(options.pop("env", None) or {})
    # What the user's PYTHONPATH is reaches the command untouched.
    start = "import os, sys; sys.path.insert(0, sys.argv.pop(1)); path = sys.argv.pop(1)\n"
    start += "os.environ.pop('PYTHONPATH', None) if path == '-' else "
    start += "os.environ.update(PYTHONPATH=path)\n"
    start += "from pp_hookfix.command import main; sys.exit(main())"
    pythonpath = env.pop("PYTHONPATH", None)
    return python(
        *("-c", start, str(PACKAGE), "-" if pythonpath is None else pythonpath, "run"),
        *options.pop("run_options", ()),
        *(sys.executable, *arguments),
        env={"PYTHONPATH": None, **env},
        **options,
    )


# --- a sitecustomize of the user's


@pytest.fixture
def sitecustomized(torch_path: Path, tmp_path: Path) -> dict[str, Optional[str]]:
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text("import pp_hookfix\nprint('end of sitecustomize')\n")
    return {"PYTHONPATH": joined(folder, torch_path, PACKAGE)}


CHILDREN = {
    "plain script": "exec(REPORT)",
    "fork": "import os\nif os.fork() == 0:\n    exec(REPORT)\nelse:\n    os.wait()",
    "child": "import subprocess, sys; subprocess.run([sys.executable, '-c', REPORT], check=True)",
    "spawn": """
import multiprocessing
def child():
    exec(REPORT)
if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
""",
}


def script(tmp_path: Path, kind: str) -> str:
    path = tmp_path / "train.py"
    path.write_text(f"REPORT = {REPORT!r}\n{CHILDREN[kind]}\n")
    return str(path)


@pytest.mark.parametrize("kind", CHILDREN)
def test_sitecustomize(kind: str, sitecustomized: dict[str, Optional[str]], tmp_path: Path) -> None:
    result = python(script(tmp_path, kind), env=sitecustomized)
    assert result.stdout.splitlines()[-1] == "patched True", result.stderr


def test_sitecustomize_and_a_module_run_with_m(
    sitecustomized: dict[str, Optional[str]], tmp_path: Path
) -> None:
    script(tmp_path, "plain script")
    result = python("-m", "train", env=sitecustomized, cwd=tmp_path)
    assert result.stdout.splitlines()[-1] == "patched True", result.stderr


def test_sitecustomize_of_a_process_that_never_imports_torch(
    sitecustomized: dict[str, Optional[str]],
) -> None:
    result = python("-c", "import sys; print('wrapt' in sys.modules)", env=sitecustomized)
    assert result.stdout.splitlines()[-1] == "False"
    assert result.stderr == ""


def test_a_wrong_policy_under_sitecustomize(sitecustomized: dict[str, Optional[str]]) -> None:
    env = {**sitecustomized, "PP_HOOKFIX": "detatch"}
    result = python("-c", REPORT, env=env)
    assert result.returncode == 0
    # The rest of the sitecustomize ran, and so does the script.
    assert result.stdout == "end of sitecustomize\noff False\n"
    assert result.stderr.startswith("pp_hookfix: PP_HOOKFIX='detatch'")
    assert len(result.stderr.splitlines()) == 1


def test_a_wrong_policy_in_a_script() -> None:
    env = {"PP_HOOKFIX": "detatch", "PYTHONPATH": str(PACKAGE)}
    result = python("-c", "import pp_hookfix", env=env)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("ValueError: PP_HOOKFIX='detatch'")


# --- pp-hookfix run


@pytest.mark.parametrize("kind", CHILDREN)
def test_run(kind: str, torch_path: Path, tmp_path: Path) -> None:
    result = run(script(tmp_path, kind), env={"PYTHONPATH": str(torch_path)})
    assert result.stdout == "patched True\n", result.stderr


@pytest.mark.parametrize(
    "pythonpath", [None, "", "/nowhere", "/a folder/with spaces:/nowhere", "/nowhere:", "::/x"]
)
def test_run_keeps_pythonpath(pythonpath: Optional[str]) -> None:
    show = "import os, sys; print(os.environ.get('PYTHONPATH')); print(sys.path[1:])"
    bare = python("-c", show, env={"PYTHONPATH": pythonpath})
    result = run("-c", show, env={"PYTHONPATH": pythonpath})
    variable, path = result.stdout.splitlines()
    assert variable == (joined(OURS, pythonpath) if pythonpath else str(OURS))
    # What the interpreter searches is what it would have searched.
    assert path == bare.stdout.splitlines()[1]


def test_run_within_run_adds_nothing() -> None:
    inner = f"import sys; sys.path.insert(0, {str(PACKAGE)!r}); sys.argv[1:] = "
    inner += "['run', sys.executable, '-c', 'import os; print(os.environ[\"PYTHONPATH\"])']; "
    inner += "from pp_hookfix.command import main; main()"
    assert run("-c", inner).stdout == f"{OURS}\n"


SITECUSTOMIZE = {
    "prints": "print('theirs', __name__, __file__)",
    "raises": "print('theirs')\nraise KeyError('broken')",
    "exits": "print('theirs')\nraise SystemExit(4)",
    "misses a module": "print('theirs')\nimport no_such_module",
    "imports torch": "import torch.distributed.pipelining\nprint('theirs', torch.__version__)",
    "imports pp_hookfix": "import pp_hookfix\nprint('theirs')",
    "is gone": None,
}


@pytest.mark.parametrize("kind", SITECUSTOMIZE)
def test_run_and_a_sitecustomize_that_was_there(
    kind: str, torch_path: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "environment"
    folder.mkdir()
    content = SITECUSTOMIZE[kind]
    if content is not None:
        (folder / "sitecustomize.py").write_text(content)
    code = "import sys; print(getattr(sys.modules.get('sitecustomize'), '__file__', None))"
    env: dict[str, Optional[str]] = {"PYTHONPATH": joined(folder, torch_path, PACKAGE)}
    bare = python("-c", code, env=env)
    result = run("-c", code, env=env)
    assert bare.stdout.count("theirs") == (content is not None)
    if kind == "is gone":
        # Ours stays in sys.modules under the name: nobody else's is there.
        assert str(OURS) in result.stdout or result.stdout == bare.stdout
    else:
        assert result.stdout == bare.stdout
    assert result.returncode == bare.returncode
    if kind == "exits":
        # Python itself cannot start then; its report names our frame as well.
        assert result.stderr.splitlines()[-1] == bare.stderr.splitlines()[-1] == "SystemExit: 4"
    else:
        assert result.stderr == bare.stderr
        assert run("-c", REPORT, env=env).stdout.splitlines()[-1] == "patched True"


def test_run_leaves_the_working_folder_alone(torch_path: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('the working folder was searched')")
    (tmp_path / "wrapt.py").write_text("print('the working folder was searched')")
    (tmp_path / "train.py").write_text("print('trained')")
    for pythonpath in (None, "", "/nowhere"):
        result = run("-c", "print(1)", cwd=tmp_path, env={"PYTHONPATH": pythonpath})
        assert result.stdout == "1\n", result.stderr


def test_run_with_a_policy(torch_path: Path) -> None:
    env = {"PYTHONPATH": str(torch_path), "PP_HOOKFIX": "detach"}
    result = run("-c", REPORT, env=env, run_options=["--policy", "off"])
    assert result.stdout == "off False\n", result.stderr


def test_run_with_an_unknown_policy() -> None:
    result = run("-c", "print(1)", run_options=["--policy", "detatch"])
    assert result.returncode == 2
    assert "invalid choice: 'detatch' (choose from" in result.stderr
    assert result.stdout == ""


def test_run_hands_over_arguments_and_standard_streams() -> None:
    echo = "import sys; print(sys.argv[1:], sys.stdin.read()); sys.exit(7)"
    command = [sys.executable, "-m", "pp_hookfix", "run", "--", sys.executable, "-c", echo]
    result = subprocess.run(
        [*command, "--policy", "-h", "--", "a b"],
        input="in",
        capture_output=True,
        text=True,
        check=False,
        cwd=ELSEWHERE,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
    )
    assert result.stdout == "['--policy', '-h', '--', 'a b'] in\n", result.stderr
    assert result.returncode == 7


def test_run_becomes_the_command() -> None:
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "pp_hookfix", "run", sys.executable, "-c"),
            "import os, time; print(os.getpid(), flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ELSEWHERE,
        env={**os.environ, "PYTHONPATH": str(PACKAGE)},
    ) as process:
        assert process.stdout is not None
        assert int(process.stdout.readline()) == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        (["no-such-command", "x"], 127, "pp-hookfix run: no-such-command: command not found\n"),
        (["/dev/null"], 126, "pp-hookfix run: /dev/null: Permission denied\n"),
    ],
)
def test_run_what_cannot_be_run(command: list[str], status: int, says: str) -> None:
    result = python("-m", "pp_hookfix", "run", *command, env={"PYTHONPATH": str(PACKAGE)})
    assert (result.returncode, result.stderr) == (status, says)


def test_run_nothing() -> None:
    result = python("-m", "pp_hookfix", "run", env={"PYTHONPATH": str(PACKAGE)})
    assert result.returncode == 2
    assert "the following arguments are required: COMMAND" in result.stderr


@pytest.mark.parametrize("flag", ["-E", "-I", "-S"])
def test_run_does_not_reach_an_isolated_python(flag: str, torch_path: Path) -> None:
    result = run(flag, "-c", "import sys; print('pp_hookfix' in sys.modules)")
    assert result.stdout == "False\n"


def test_run_and_a_broken_pp_hookfix(tmp_path: Path) -> None:
    # Whatever is wrong with ours, the interpreter starts.
    copy = tmp_path / "packages" / "pp_hookfix" / "bootstrap"
    copy.mkdir(parents=True)
    (copy / "sitecustomize.py").write_text((OURS / "sitecustomize.py").read_text())
    (copy.parent / "__init__.py").write_text("raise RuntimeError('broken')")
    result = python("-c", "print(1)", env={"PYTHONPATH": str(copy)})
    assert result.stdout == "1\n"
    assert result.stderr == f"pp-hookfix: {sys.executable} runs without the fix: broken\n"


# --- pp-hookfix run from an environment of its own, as pipx and uvx make them


@pytest.mark.parametrize("python", [sys.executable, *environments.other_pythons()])
def test_run_from_another_environment(python: str, torch_path: Path, tmp_path: Path) -> None:
    tool = environments.make(sys.executable, tmp_path / "tool", "pp_hookfix", "wrapt")
    (environments.site_packages(tool) / "of_the_tool.py").write_text("")
    user = environments.make(python, tmp_path / "user")
    code = REPORT + "import importlib.util; print(importlib.util.find_spec('of_the_tool'))"
    command = [str(tool), "-m", "pp_hookfix", "run", str(user), "-c", code]
    for version in ("2.13.0", "2.14.1+vendor"):
        drifted = stand_in.STAGE.replace("_retrieve_recv_activations", "_take")
        if version != "2.13.0":
            torch_path = stand_in.make(tmp_path / "drifted", version, drifted)
            command[-1] = "import torch.distributed.pipelining"
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(torch_path)}
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, env=env, cwd=tmp_path
        )
        if version == "2.13.0":
            assert result.stdout == "patched True\nNone\n", result.stderr
            assert result.stderr == ""
        else:
            assert "RuntimeWarning: pp_hookfix: torch 2.14.1+vendor is left" in result.stderr


# --- other tools that start Python processes


TOOLS = {
    "opentelemetry-instrument": ("opentelemetry.instrumentation", ["opentelemetry-instrument"]),
    "coverage": ("coverage", ["coverage", "run"]),
    "ddtrace-run": ("ddtrace", ["ddtrace-run"]),
}


@pytest.mark.parametrize("within", [True, False], ids=["run inside", "run outside"])
@pytest.mark.parametrize("tool", TOOLS)
def test_other_tools(tool: str, within: bool, torch_path: Path, tmp_path: Path) -> None:
    package, words = TOOLS[tool]
    pytest.importorskip(package, reason=f"{tool} is not installed")
    words = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
    # A file for coverage, which runs a Python program and no command.
    ours = tmp_path / "pp-hookfix"
    ours.write_text("import sys\nfrom pp_hookfix.command import main\nsys.exit(main())\n")
    run = (
        [str(ours), "run"] if tool == "coverage" and within else [sys.executable, str(ours), "run"]
    )
    path = tmp_path / "train.py"
    path.write_text(
        f"import subprocess, sys\nREPORT = {REPORT!r}\nexec(REPORT)\nsys.stdout.flush()\n"
        "subprocess.run([sys.executable, '-c', REPORT], check=True)\n"
    )
    train = [str(path)] if tool == "coverage" and not within else [sys.executable, str(path)]
    command = [*words, *run, *train] if within else [*run, *words, *train]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ELSEWHERE,
        env={
            **{key: value for key, value in os.environ.items() if key != "PP_HOOKFIX"},
            **{f"OTEL_{kind}_EXPORTER": "none" for kind in ("TRACES", "METRICS", "LOGS")},
            "DD_TRACE_ENABLED": "false",
            "DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false",
            "COVERAGE_FILE": str(tmp_path / "coverage"),
            "PYTHONPATH": joined(torch_path, PACKAGE),
        },
    )
    if tool == "opentelemetry-instrument" and not within:
        # It puts its own sitecustomize in the place of ours: told, and as without the fix.
        assert "opentelemetry-instrument starts its command without the fix" in result.stderr
        assert "opentelemetry-instrument pp-hookfix run" in result.stderr
        return
    assert result.stdout == "patched True\n" * 2, result.stderr


@pytest.mark.parametrize("torch", ["before", "after"])
def test_behind_the_import_hook_of_typeguard(torch: str, torch_path: Path) -> None:
    pytest.importorskip("typeguard")
    hook = "from typeguard import install_import_hook\n"
    hook += "install_import_hook('torch.distributed.pipelining')\n"
    code = "import pp_hookfix\n" + ("import torch\n" + hook if torch == "before" else hook)
    code += "import torch.distributed.pipelining\n"
    code += "print('typeguard' in repr(torch.distributed.pipelining.stage.__loader__).lower())\n"
    code += "base = vars(torch.distributed.pipelining.stage._PipelineStageBase)\n"
    code += "print(type(base['_retrieve_recv_activations']).__name__)"
    result = python("-c", code, env={"PYTHONPATH": joined(torch_path, PACKAGE)})
    assert result.stdout == "True\nFunctionWrapper\n", result.stderr


# --- autowrapt


@pytest.mark.skipif(
    importlib.util.find_spec("autowrapt") is None, reason="autowrapt is not installed"
)
@pytest.mark.parametrize("value", [None, "detach", "off", "detatch"])
def test_autowrapt(value: Optional[str], torch_path: Path) -> None:
    env = {
        "AUTOWRAPT_BOOTSTRAP": "pp_hookfix",
        "PP_HOOKFIX": value,
        "PYTHONPATH": joined(torch_path, PACKAGE),
    }
    result = python("-c", REPORT, env=env)
    assert result.returncode == 0, result.stderr
    fixed = value in (None, "detach")
    assert result.stdout == ("patched True\n" if fixed else "off False\n")
    if value == "detatch":
        assert result.stderr.startswith("pp_hookfix: PP_HOOKFIX='detatch'")


# --- a dependency of other packages


def test_two_packages_that_depend_on_it_and_the_user_too(torch_path: Path, tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    for name in ("trainer", "observer"):
        (packages / name).mkdir(parents=True)
        (packages / name / "__init__.py").write_text("import pp_hookfix\n")
    (packages / "trainer" / "fit.py").write_text("import torch.distributed.pipelining\n")
    code = "import trainer.fit, observer, pp_hookfix" + REPORT
    code += "print(hasattr(method.__wrapped__, '__wrapped__'))"
    result = python("-c", code, env={"PYTHONPATH": joined(packages, torch_path, PACKAGE)})
    assert result.stdout == "patched True\nFalse\n", result.stderr
