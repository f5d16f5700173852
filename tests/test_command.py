"""``pp-hookfix`` as a user types it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stand_in
import torch
from conftest import AFFECTED, python, spawned

import pp_hookfix
from pp_hookfix.policies import POLICIES
from pp_hookfix.verification import ranks

PACKAGE = Path(pp_hookfix.__file__).parents[1]


def command(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    return python("-m", "pp_hookfix", *arguments, **options)


def test_status() -> None:
    result = command("status")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("patched: " if AFFECTED else "not-needed: ")
    assert torch.__version__ in result.stdout


def test_status_as_json() -> None:
    document = json.loads(command("status", "--json", env={"PP_HOOKFIX": "off"}).stdout)
    assert document["state"] == "off"
    assert document["policy"] == "off"
    assert document["torch_version"] == torch.__version__
    document = json.loads(command("status", "--json").stdout)
    assert document["state"] == ("patched" if AFFECTED else "not-needed")


def test_verify(tmp_path: Path) -> None:
    result = command("verify", "--schedule", "1F1B", "--schedule", "GPipe", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = [" ".join(line.split()) for line in result.stdout.splitlines()]
    without = "4 8 12 16 20" if AFFECTED else "4 4 4 4 4"
    constant = " ".join(["4 4 4 4 4"] * len(POLICIES))
    assert f"schedule without {' '.join(POLICIES)} losses gradients" in rows
    for name in ("1F1B", "GPipe"):
        assert f"{name} {without} {constant} equal equal" in rows
    assert rows[-1].startswith("OK: ")


def test_verify_as_json_prints_nothing_else() -> None:
    result = command(
        *("verify", "--json", "--schedule", "Interleaved1F1B", "--steps", "3"),
        *("--microbatches", "3", "--policy", "fresh", "--policy", "detach"),
    )
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["ok"] is True
    assert document["ranks"] == 2
    assert list(document["policies"]) == ["fresh", "detach"]
    (schedule,) = document["schedules"]
    # An interleaved schedule takes a multiple of the ranks.
    assert schedule["microbatches"] == 4
    for policy in ("fresh", "detach"):
        assert schedule["policies"][policy]["hooks"] == {stage: [4, 4, 4] for stage in "123"}
    if AFFECTED:
        assert schedule["hooks"] == {stage: [4, 8, 12] for stage in "123"}


@pytest.mark.full
def test_verify_needs_no_numpy(tmp_path: Path) -> None:
    # torch does not install it, and its own exchange of objects needs it.
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['numpy'] = None")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PACKAGE)])}
    result = command("verify", "--schedule", "GPipe", "--policy", "detach", env=env)
    assert result.returncode == 0, result.stderr


def test_verify_under_torchrun(tmp_path: Path) -> None:
    result = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "pp_hookfix", "verify", "--schedule", "GPipe", "--steps", "2"),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("OK: ") == 1
    assert result.stdout.count("GPipe") == 1


def test_verify_fails_when_the_fault_is_there_with_the_fix_active(tmp_path: Path) -> None:
    # A package that replaces the method after us, in every process.
    (tmp_path / "sitecustomize.py").write_text(
        """
import pp_hookfix
enable = pp_hookfix.enable
def enable_in_vain(*args):
    enable(*args)
    from torch.distributed.pipelining import stage
    method = stage._PipelineStageBase.__dict__["_retrieve_recv_activations"]
    stage._PipelineStageBase._retrieve_recv_activations = getattr(method, "__wrapped__", method)
pp_hookfix.enable = enable_in_vain
"""
    )
    result = command(
        "verify",
        *("--schedule", "GPipe", "--policy", "detach"),
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PACKAGE)])},
    )
    if not AFFECTED:
        assert result.returncode == 0
        return
    assert result.returncode == 1, result.stdout + result.stderr
    assert "4 8 12 16 20     4 8 12 16 20" in result.stdout
    assert result.stdout.splitlines()[-1] == "FAILED: GPipe (detach, bypassed)."


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["verify", "--schedule", "1f1b"], "invalid choice: '1f1b' (choose from"),
        (["verify", "--ranks", "1"], "1 is too few: the least is 2"),
        (["verify", "--steps", "many"], "invalid whole_number value: 'many'"),
        (["verify", "--ranks", "99", "--backend", "nccl"], "use fewer --ranks or --backend gloo"),
        (["verify", "--policy", "detatch"], "invalid choice: 'detatch' (choose from"),
        (["verify", "--backend", "mpi"], "invalid choice: 'mpi' (choose from"),
        (["verfy"], "invalid choice: 'verfy' (choose from"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_usage_errors_exit_with_2_and_say_what_is_allowed(arguments: list[str], says: str) -> None:
    result = command(*arguments)
    assert result.returncode == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_a_schedule_that_this_torch_lacks() -> None:
    from pp_hookfix.verification import schedules

    lacking = [name for name in schedules.LAYOUTS if name not in schedules.available()]
    if not lacking:
        pytest.skip("this torch has every schedule")
    result = command("verify", "--schedule", lacking[0])
    assert result.returncode == 2
    assert f"has no schedule {lacking[0]}: it has GPipe, 1F1B" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.skipif(sys.version_info < (3, 10), reason="sys.orig_argv came with Python 3.10")
def test_a_wrong_variable_is_a_usage_error_of_the_command() -> None:
    result = command("status", env={"PP_HOOKFIX": "detatch"})
    assert result.returncode == 2
    assert result.stderr.startswith("pp-hookfix: PP_HOOKFIX='detatch'")
    assert len(result.stderr.splitlines()) == 1


def test_ranks_are_torchruns_to_say() -> None:
    result = command("verify", "--ranks", "2", env={"RANK": "0", "WORLD_SIZE": "2"})
    assert result.returncode == 2
    assert "leave --ranks out" in result.stderr


NO_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
"""


def test_no_torch(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NO_TORCH)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PACKAGE)])}
    result = command("verify", env=env)
    assert result.returncode == 2
    assert "no torch can be imported here" in result.stderr
    assert "pip install" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    result = command("status", "--json", env=env)
    assert result.returncode == 0
    assert json.loads(result.stdout)["state"] == "not-needed"


def test_torch_without_pipelining(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.3.1'\n")
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PACKAGE)])}
    result = command("verify", env=env)
    assert result.returncode == 2
    assert "torch 2.3.1 has no torch.distributed.pipelining" in result.stderr
    result = command("status", env=env)
    assert result.stdout.startswith("not-needed: torch 2.3.1 has no torch.distributed.pipelining")


def test_drifted_torch_is_shown_by_status(tmp_path: Path) -> None:
    drifted = stand_in.STAGE.replace("_retrieve_recv_activations", "_take")
    stand_in.make(tmp_path, "2.14.1+vendor", drifted)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PACKAGE)])}
    result = command("status", env=env)
    assert result.stdout.startswith("unsupported: torch 2.14.1+vendor is left untouched")


def hang_on_rank_1(rank: ranks.Rank) -> None:
    import time

    with rank.time_limit("the nap"):
        if rank.rank == 1:
            time.sleep(600)


def test_a_hang_ends_by_its_time_limit(capfd: pytest.CaptureFixture[str]) -> None:
    outcome = ranks.start(hang_on_rank_1, 2, "gloo", timeout=5)
    assert outcome.exit_status == ranks.RANK_FAILED
    assert "the nap hung on rank 1 of 2: not done after 5 s" in capfd.readouterr().err
    assert "in hang_on_rank_1" in outcome.logs[1]


def whoami(rank: ranks.Rank) -> tuple[int, int, str]:
    return rank.rank, rank.ranks, rank.backend


def test_ranks_return_their_results() -> None:
    assert spawned(whoami, 3, "gloo") == [(0, 3, "gloo"), (1, 3, "gloo"), (2, 3, "gloo")]
