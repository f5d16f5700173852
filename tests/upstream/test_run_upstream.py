"""The runner of upstream's tests, on a tree of ours whose tests end in every way there is."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import AFFECTED, python

from pp_hookfix.policies import POLICIES

RUNNER = str(Path(__file__).with_name("run_upstream.py"))
TREE = str(Path(__file__).with_name("upstream_like"))
NO_GPU_NEEDED = "test/distributed/pipelining/test_microbatch.py"


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run writes down of the tests lies with the temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))


def runner(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return python(RUNNER, *arguments, timeout=500)


def cases(printed: str) -> dict[str, str]:
    return {
        line.split("::")[-1].partition(":")[0]: line.split(":")[0]
        for line in printed.splitlines()
        if "::" in line
    }


@pytest.mark.skipif(not AFFECTED, reason=f"torch {torch.__version__} needs no plugin")
@pytest.mark.full
def test_each_outcome_is_told_and_what_the_plugin_breaks_fails() -> None:
    result = runner(TREE, "--limit", "30", "--policy", "detach")
    printed = result.stdout
    assert result.returncode == 1, printed + result.stderr
    assert cases(printed) == {
        "test_crashes_always": "  not compared, crashed without",
        "test_is_skipped": "  not compared, skipped without",
        "test_b_fails_always": "  not compared, failed without",
        "test_d_hangs_always": "  not compared, hung without",
        "test_c_hooks_pile_up": "BROKEN, passed without",
    }
    # The files in their order, those after a failure or a hang not lost.
    lines = [" ".join(line.replace(".", "").split()) for line in printed.splitlines()]
    assert lines[1:4] == [
        "test_microbatchpy (as it is)",
        "without 2 of 4 passed",
        "detach 2 of 2 passed",
    ]
    assert "without 3 of 5 passed" in lines
    assert "detach 2 of 3 passed" in lines
    assert "pp_hookfix was patched\n" in printed
    assert "two ranks are not three" in printed
    assert "AssertionError" in next(line for line in printed.splitlines() if "BROKEN" in line)
    assert printed.endswith("5 tests passed without the plugin; of them, 4 under detach.\n")
    # What hung is known now, and not waited for again; so is what passed.
    started = time.monotonic()
    again = runner(TREE, "--limit", "30", "--policy", "detach")
    assert time.monotonic() - started < 25
    assert again.returncode == 1
    assert cases(again.stdout) == cases(printed)
    assert again.stdout.endswith("5 tests passed without the plugin; of them, 4 under detach.\n")


def test_it_succeeds_under_every_policy_and_leaves_the_tree_as_it_was(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(TREE, tree, ignore=shutil.ignore_patterns("__pycache__"))
    before = sorted(tree.rglob("*"))
    result = runner(str(tree), NO_GPU_NEEDED, "-k", "not crashes")
    assert result.returncode == 0, result.stdout + result.stderr
    counts = ", ".join(f"2 under {policy}" for policy in POLICIES)
    assert result.stdout.endswith(f"2 tests passed without the plugin; of them, {counts}.\n")
    assert sorted(tree.rglob("*")) == before


def test_nothing_compared_is_no_success() -> None:
    result = runner(TREE, NO_GPU_NEEDED, "-k", "crashes")
    assert result.returncode == 1
    assert result.stdout.endswith("Nothing was compared: no test passed without the plugin.\n")


@pytest.mark.full
def test_a_run_in_which_the_plugin_was_off_is_no_success(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import pp_hookfix; pp_hookfix.disable()")
    result = python(
        *(RUNNER, TREE, NO_GPU_NEEDED, "-k", "chunks", "--policy", "detach"),
        timeout=500,
        env={"PYTHONPATH": str(tmp_path)},
    )
    assert result.returncode == 1
    assert "pp_hookfix was off\nThat is no run with the plugin" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: TREE"),
        (["/nowhere"], "/nowhere has no test/distributed/pipelining/test_*.py: give a torch"),
        ([TREE, "test_typo.py"], f"no such test file: {Path(TREE) / 'test_typo.py'}"),
        ([TREE, "--policy", "detatch"], "argument --policy: invalid choice: 'detatch'"),
        ([TREE, "--record", "-k", "some"], "--record is of the whole tree and every policy"),
        ([TREE, "--limit", "soon"], "argument --limit: invalid float value: 'soon'"),
    ],
)
def test_bad_arguments_get_one_line(arguments: "list[str]", message: str) -> None:
    result = runner(*arguments)
    assert result.returncode == 2
    assert message in result.stderr.splitlines()[-1]


def test_what_torchs_tests_need_is_named_when_it_lacks(tmp_path: Path) -> None:
    result = python("-S", RUNNER, TREE)
    assert result.returncode == 2, sys.version
    assert result.stderr.splitlines()[-1].endswith(
        "torch's tests need torch, which is not installed: pip install it"
    )
