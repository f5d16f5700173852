"""The runner of upstream's tests, on a tree of ours whose tests end in every way there is."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import AFFECTED, python

RUNNER = str(Path(__file__).with_name("run_upstream.py"))
TREE = str(Path(__file__).with_name("upstream_like"))
NO_GPU_NEEDED = "test/distributed/pipelining/test_microbatch.py"


def runner(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return python(RUNNER, *arguments, timeout=500)


@pytest.mark.skipif(not AFFECTED, reason=f"torch {torch.__version__} needs no plugin")
def test_each_outcome_is_told_and_what_the_plugin_breaks_fails() -> None:
    result = runner(TREE, "--limit", "60")
    printed = result.stdout
    assert result.returncode == 1, printed + result.stderr
    cases = {
        line.split("::")[-1].partition(":")[0]: line.split(":")[0]
        for line in printed.splitlines()
        if "::" in line
    }
    assert cases == {
        "test_crashes_always": "  not compared, crashed without",
        "test_is_skipped": "  not compared, skipped without",
        "test_b_fails_always": "  not compared, failed without",
        "test_d_hangs_always": "  not compared, hung without",
        "test_c_hooks_pile_up": "BROKEN, passed without, failed with",
    }
    # The files in their order, those after a failure or a hang not lost.
    assert "test_microbatch.py (as it is): without ... 2 of 4 passed; with ... 2 passed" in printed
    assert "): without ... 3 of 5 passed; with ... 2 passed" in printed
    assert "pp_hookfix was patched\n" in printed
    assert "two ranks are not three" in printed
    assert "AssertionError" in next(line for line in printed.splitlines() if "BROKEN" in line)
    assert printed.endswith("5 tests passed without the plugin, 4 of them with it.\n")


def test_it_succeeds_and_leaves_the_tree_as_it_was(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(TREE, tree, ignore=shutil.ignore_patterns("__pycache__"))
    before = sorted(tree.rglob("*"))
    result = runner(str(tree), NO_GPU_NEEDED, "-k", "not crashes")
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.endswith("2 tests passed without the plugin, 2 of them with it.\n")
    assert sorted(tree.rglob("*")) == before


def test_nothing_compared_is_no_success() -> None:
    result = runner(TREE, NO_GPU_NEEDED, "-k", "crashes")
    assert result.returncode == 1
    assert result.stdout.endswith("Nothing was compared: no test passed without the plugin.\n")


def test_a_run_in_which_the_plugin_was_off_is_no_success() -> None:
    result = python(
        RUNNER, TREE, NO_GPU_NEEDED, "-k", "chunks", timeout=500, env={"PP_HOOKFIX": "off"}
    )
    assert result.returncode == 1
    assert "pp_hookfix was off\nThat is no run with the plugin" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: TREE"),
        (["/nowhere"], "/nowhere has no test/distributed/pipelining/test_*.py: give a torch"),
        ([TREE, "test_typo.py"], f"no such test file: {Path(TREE) / 'test_typo.py'}"),
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
