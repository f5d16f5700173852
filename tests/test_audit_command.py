"""``pp-hookfix audit`` as a user types it: its report, and a command that is left as it is."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import stand_in
from conftest import AFFECTED, python

import pp_hookfix

ROOT = Path(__file__).parents[1]
PACKAGE = Path(pp_hookfix.__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train_pipeline.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

# A stage that needs no process group, as a script trains it.
STEPS = """
import os, signal, sys, time, torch
from pp_hookfix.verification import bare_stage

def stage():
    made = bare_stage.make(torch.ones(2, requires_grad=True))
    made.fwd_cache, made.output_chunks = {}, []
    return made

def step(stage, kept=None):
    stage.clear_runtime_states()
    (x,) = stage._retrieve_recv_activations(0)
    if kept is not None:
        kept.append(x)
    x.register_hook(lambda gradient: print("fired", flush=True))
    (x * 2).sum().backward()

"""


def audit(*command: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    return python("-m", "pp_hookfix", "audit", *command, **options)


def script(folder: Path, text: str) -> str:
    (folder / "job.py").write_text(STEPS + text)
    return str(folder / "job.py")


def last_words(result: "subprocess.CompletedProcess[str]") -> str:
    return result.stderr.splitlines()[-1]


@pytest.mark.skipif(not AFFECTED, reason="no persistent receive buffers")
@pytest.mark.parametrize("keeps", [False, True])
def test_the_example(tmp_path: Path, keeps: bool) -> None:
    options = ["--keep-inputs"] if keeps else []
    command = (*TORCHRUN, str(EXAMPLE), "--steps", "3", *options)
    report = tmp_path / "report.json"
    result = audit("--json", str(report), *command, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    # It is the job of stock torch.
    assert re.findall(r"stage 0-1: (\d+) gradients", result.stdout) == ["4", "8", "12"]
    document = json.loads(report.read_text())
    assert (document["ranks"], document["steps"], document["runs"]) == (2, 3, 1)
    assert document["needs"] == ("clone or fresh" if keeps else "detach")
    assert document["notes"] == []
    first, last = document["stages"]
    assert (first["rank"], first["stage"], last["rank"], last["stage"]) == (0, 0, 1, 1)
    assert first["hooks"] == first["kept_inputs"] == first["kept_gradients"] == []
    (hook,) = last["hooks"]
    assert hook["where"].startswith(f"{EXAMPLE}:")
    assert (hook["per_step"], hook["on_stock_in_last_step"]) == (4, 12)
    assert f"4 a step, 12 fired in the last step: tensor hook, {hook['where']}" in result.stderr
    if keeps:
        (kept,) = last["kept_inputs"]
        assert (kept["count"], kept["shape"], kept["since_step"]) == (8, [8, 64, 64], 1)
        assert kept["held_by"] == "list attribute `kept_inputs` of LanguageModelStage"
        assert f"8 of shape (8, 64, 64), since step 1: held by {kept['held_by']}" in result.stderr
        assert last_words(result).startswith("pp-hookfix audit: needs clone or fresh")
        assert "it keeps 8 stage inputs, which the next step overwrites" in last_words(result)
    else:
        assert last["kept_inputs"] == []
        assert last_words(result).startswith("pp-hookfix audit: detach is enough")


@pytest.mark.skipif(not AFFECTED, reason="no persistent receive buffers")
def test_a_restart_counts_by_itself(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        "first = os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'\n"
        "made = stage()\n"
        "for _ in range(2 if first else 5):\n"
        "    step(made)\n"
        "sys.exit(first)\n",
    )
    report = tmp_path / "report.json"
    command = (*TORCHRUN[:-1], "1", "--max-restarts", "1", job)
    result = audit("--json", str(report), *command)
    assert result.returncode == 0, result.stderr
    document = json.loads(report.read_text())
    assert document["runs"] == 2
    assert [stage["steps"] for stage in document["stages"]] == [2, 5]
    assert [stage["hooks"][0]["on_stock_in_last_step"] for stage in document["stages"]] == [2, 5]
    assert document["notes"] == []
    assert "run 1 of 2, 2 steps:" in result.stderr
    assert "run 2 of 2, 5 steps:" in result.stderr


@pytest.mark.skipif(not AFFECTED, reason="no persistent receive buffers")
def test_a_pipeline_built_anew_for_each_step(tmp_path: Path) -> None:
    # Each buffer goes with its stage: nothing piles up, and nothing is overwritten.
    job = script(tmp_path, "kept = []\nfor _ in range(4):\n    step(stage(), kept)\n")
    report = tmp_path / "report.json"
    result = audit("--json", str(report), sys.executable, job)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("fired") == 4
    document = json.loads(report.read_text())
    assert (document["needs"], document["notes"], document["steps"]) == ("nothing", [], 4)
    assert all(stage["hooks"] == stage["kept_inputs"] == [] for stage in document["stages"])
    # In one step alone there was no later one to see.
    result = audit("--json", str(report), sys.executable, script(tmp_path, "step(stage(), [])\n"))
    document = json.loads(report.read_text())
    assert document["needs"] is None
    assert "only one step was seen" in document["notes"][0]
    assert last_words(result) == "pp-hookfix audit: verdict: not known."


@pytest.mark.skipif(not AFFECTED, reason="no persistent receive buffers")
def test_a_hook_that_changes_the_gradient_is_told(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    source = EXAMPLE.read_text(encoding="utf-8")
    registers = "x.register_hook(lambda grad: self.boundary_norms.append(grad.norm().item()))"
    assert source.count(registers) == 1
    halves = "x.register_hook(lambda grad: grad * 0.5)"
    job.write_text(source.replace(registers, halves), encoding="utf-8")
    stock = python(*TORCHRUN[1:], str(job), "--steps", "3")
    result = audit(*TORCHRUN, str(job), "--steps", "3")
    assert result.returncode == 0, result.stderr
    losses = re.findall(r"loss (\S+)", stock.stdout)
    assert len(losses) == 3
    assert re.findall(r"loss (\S+)", result.stdout) == losses
    assert "it changes the gradient, and stock torch applies it again" in result.stderr
    assert "your gradients are wrong, and so are those of this run" in result.stderr


@pytest.mark.skipif(not AFFECTED, reason="no persistent receive buffers")
def test_ranks_that_multiprocessing_forks(tmp_path: Path) -> None:
    job = script(
        tmp_path,
        "def rank(number):\n"
        "    os.environ['RANK'] = str(number)\n"
        "    made = stage()\n"
        "    for _ in range(3):\n"
        "        step(made)\n"
        "if __name__ == '__main__':\n"
        "    import multiprocessing\n"
        "    context = multiprocessing.get_context('fork')\n"
        "    started = [context.Process(target=rank, args=(one,)) for one in range(2)]\n"
        "    [one.start() for one in started]\n"
        "    [one.join() for one in started]\n",
    )
    report = tmp_path / "report.json"
    result = audit("--json", str(report), sys.executable, job)
    assert result.returncode == 0, result.stderr
    document = json.loads(report.read_text())
    assert (document["ranks"], document["steps"], document["runs"]) == (2, 3, 1)
    assert document["notes"] == []
    assert [stage["rank"] for stage in document["stages"]] == [0, 1]


@pytest.mark.skipif(not AFFECTED, reason="no persistent receive buffers")
def test_what_is_not_known_is_said(tmp_path: Path) -> None:
    # A rank that is killed; what it noted by then is there.
    job = script(tmp_path, "made = stage()\nfor _ in range(2):\n    step(made)\n")
    with open(job, "a") as file:
        file.write("step(made)\nos.kill(os.getpid(), signal.SIGKILL)\n")
    result = audit(sys.executable, job)
    assert result.returncode == -signal.SIGKILL
    assert "rank 0 ended after step 2 without a word (killed?)" in result.stderr
    assert "1 a step, 2 fired in the last step" in result.stderr
    assert "the command was ended by SIGKILL: what is said is of the steps" in result.stderr
    # One that fails as it begins.
    result = audit(sys.executable, script(tmp_path, "step(stage())\nsys.exit(3)\n"))
    assert result.returncode == 3
    assert "the command ended with exit status 3: what is said is of the steps" in result.stderr
    assert "only one step was seen" in result.stderr
    # Switched off by the script, for a while.
    result = audit(
        sys.executable,
        script(
            tmp_path,
            "import pp_hookfix\nmade = stage()\nstep(made)\npp_hookfix.disable()\n"
            "step(made)\npp_hookfix.enable('clone')\nstep(made)\n",
        ),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("fired") == 1 + 2 + 3
    assert "pp_hookfix was switched off by the script" in result.stderr
    assert "torch " in result.stderr
    off = "import pp_hookfix\npp_hookfix.disable()\nstep(stage())\n"
    result = audit(sys.executable, script(tmp_path, off))
    assert len(result.stderr.splitlines()) == 2
    assert "pp_hookfix was switched off by the script" in result.stderr
    assert last_words(result) == "pp-hookfix audit: verdict: not known."
    # Nothing built.
    result = audit(sys.executable, script(tmp_path, ""))
    assert result.returncode == 0
    assert result.stderr.splitlines() == [
        "pp-hookfix audit: no pipeline stage was built and ran a step.",
        "pp-hookfix audit: verdict: not known.",
    ]


NONE = "none of the command's Python processes (1) is known to have imported"


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["true"], "no Python process of the command could be looked into: is it Python"),
        (
            [sys.executable, "-c", "1"],
            "none of the command's Python processes (1) is known to have imported torch.",
        ),
        ([sys.executable, "-c", "import torch"], f"{NONE} torch.distributed.pipelining."),
    ],
)
def test_nothing_to_look_at(command: list[str], says: str) -> None:
    result = audit(*command)
    assert result.returncode == 0
    lines = result.stderr.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"pp-hookfix audit: {says}")
    assert lines[1] == "pp-hookfix audit: verdict: not known."


def test_a_torch_without_the_fault(tmp_path: Path) -> None:
    stand_in.make(tmp_path, "2.15.0", stand_in.STAGE + "_RecvInfo.take_buffer = None\n")
    result = audit(
        "--json",
        str(tmp_path / "report.json"),
        *(sys.executable, "-c", "import torch.distributed.pipelining"),
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 0
    assert "torch 2.15.0 allocates each receive buffer just in time" in result.stderr
    assert last_words(result) == "pp-hookfix audit: nothing needed."
    assert json.loads((tmp_path / "report.json").read_text())["needs"] == "nothing"


def test_a_torch_that_is_not_recognised(tmp_path: Path) -> None:
    stand_in.make(tmp_path, "2.14.1+vendor")
    result = audit(
        *(sys.executable, "-W", "ignore", "-c", "import torch.distributed.pipelining"),
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 0
    assert "torch 2.14.1+vendor is left untouched" in result.stderr
    assert last_words(result) == "pp-hookfix audit: verdict: not known."


def test_the_command_is_left_as_it_is(tmp_path: Path) -> None:
    result = audit(sys.executable, "-c", "import sys; sys.exit(sys.stdin.read() == '' and 7)")
    assert result.returncode == 7
    result = audit("no-such-command")
    assert result.returncode == 127
    assert result.stderr == "pp-hookfix audit: no-such-command: command not found\n"
    result = audit(str(tmp_path))
    assert result.returncode == 126
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["run", "audit"])
def test_a_closed_pipe_ends_the_command(command: str) -> None:
    # Python ignores the signal, and must not have its children ignore it.
    line = f"{sys.executable} -m pp_hookfix {command} yes | head -1; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.stdout == f"y\n{128 + signal.SIGPIPE}\n"
    assert "Broken pipe" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["--json"], "argument --json: expected one argument"),
        (["--json", "/no/such/folder/report.json", "true"], "cannot be written: No such file"),
        (["--jsn", "true"], "unrecognized arguments: --jsn"),
    ],
)
def test_usage_errors(arguments: list[str], says: str) -> None:
    result = audit(*arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


HANDLES = """
def handle(number, frame):
    print("handled", number, flush=True)
    sys.exit(5)
signal.signal(signal.SIGTERM, handle)
made = stage()
step(made)
step(made)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.skipif(not AFFECTED, reason="no persistent receive buffers")
@pytest.mark.parametrize("to_whom", ["to us", "to the group, by a terminal"])
def test_signals_reach_the_command_and_the_report_comes(tmp_path: Path, to_whom: str) -> None:
    number = signal.SIGTERM if to_whom == "to us" else signal.SIGINT
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pp_hookfix", "audit", "--json", str(report)]
    command += [sys.executable, script(tmp_path, HANDLES)]
    environment = {key: value for key, value in os.environ.items() if key != "PP_HOOKFIX"}
    controller, terminal = os.openpty()

    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import os, fcntl, signal, termios; os.setsid(); "
            # In the background of a shell it would be ignored.
            "signal.signal(signal.SIGINT, signal.SIG_DFL); "
            f"fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv({sys.executable!r}, {command!r})",
        ],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    try:
        while "ready" not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(0.2)
        if to_whom == "to us":
            process.send_signal(number)
        else:
            os.write(controller, b"\x03")
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        os.close(controller)
        os.close(terminal)
    if number == signal.SIGTERM:
        assert out == f"handled {number.value}\n"
        assert process.returncode == 5
    else:
        # Once: the terminal sent it to both, and we did not send it on.
        assert err.count("KeyboardInterrupt") == 1
        assert process.returncode == -signal.SIGINT
    document = json.loads(report.read_text())
    how = "ended with exit status 5" if number == signal.SIGTERM else "was ended by SIGINT"
    (note,) = document["notes"]
    assert note.startswith(f"the command {how}: ")
    assert document["stages"][0]["hooks"][0]["on_stock_in_last_step"] == 2
    assert "pp-hookfix audit: detach is enough" in err
