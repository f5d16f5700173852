"""Whichever comes first, torch or the fix: once, quietly, and before the first step.

Every test is a script in a process of its own. `torch` there is the stand-in,
so that these run on every CPython; test_patch.py has the real one.
"""

import shutil
from pathlib import Path
from typing import Optional

import pytest
import stand_in
import wrapt
from conftest import python

import pp_hookfix

PACKAGE = Path(pp_hookfix.__file__).parents[1]
ORIGINAL = "_PipelineStageBase.__dict__['_retrieve_recv_activations']"
REPORT = f"""
import sys
stage = sys.modules.get("torch.distributed.pipelining.stage")
wrapped = stage and type(stage.{ORIGINAL}).__name__
print(pp_hookfix.status().state, wrapped)
"""
# Wrappers around the original function: a second patch would be a second layer.
LAYERS = f"""
method, layers = stage.{ORIGINAL}, 0
while hasattr(method, "__wrapped__"):
    method, layers = method.__wrapped__, layers + 1
print(layers)
"""


@pytest.fixture
def torch_path(tmp_path: Path) -> Path:
    return stand_in.make(tmp_path / "site")


def run(
    script: str, path: Optional[Path], env: Optional[dict[str, Optional[str]]] = None, *flags: str
) -> str:
    pythonpath = ":".join(str(folder) for folder in (path, PACKAGE) if folder)
    result = python(*flags, "-c", script, env={"PYTHONPATH": pythonpath, **(env or {})})
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize(
    "script",
    [
        "import pp_hookfix; import torch.distributed.pipelining",
        "import pp_hookfix; from torch.distributed.pipelining import PipelineStage",
        "import pp_hookfix; import torch; import torch.distributed.pipelining.stage",
        "import torch; import pp_hookfix; import torch.distributed.pipelining",
        "import torch.distributed.pipelining; import pp_hookfix",
        "import pp_hookfix; import torch.distributed.pipelining; import pp_hookfix",
        "import pp_hookfix; pp_hookfix.enable(); import torch.distributed.pipelining",
        "import torch.distributed.pipelining; import pp_hookfix; pp_hookfix.enable()",
        "import pp_hookfix, importlib; import torch.distributed.pipelining; "
        "importlib.reload(pp_hookfix)",
    ],
)
def test_any_order_patches_once(script: str, torch_path: Path) -> None:
    assert run(script + REPORT + LAYERS, torch_path) == "patched FunctionWrapper\n1\n"


def test_before_torch_neither_torch_nor_wrapt_is_imported(torch_path: Path) -> None:
    script = "import sys, pp_hookfix; print('torch' in sys.modules, 'wrapt' in sys.modules)"
    assert run(script + REPORT, torch_path) == "False False\npending None\n"


def test_pending_until_the_stage_module_is_imported(torch_path: Path) -> None:
    assert run("import pp_hookfix, torch" + REPORT, torch_path) == "pending None\n"


def test_no_torch_is_no_error(tmp_path: Path) -> None:
    # -S: no site-packages, where a torch may be.
    for package in (pp_hookfix, wrapt):
        source = Path(str(package.__file__)).parent
        shutil.copytree(source, tmp_path / source.name)
    script = """
import pp_hookfix
try:
    import torch
except ModuleNotFoundError as error:
    print(error)
"""
    result = python("-S", "-c", script + REPORT, env={"PYTHONPATH": str(tmp_path)})
    assert result.stdout == "No module named 'torch'\npending None\n", result.stderr


def test_torch_that_joins_the_path_after_a_failed_import(tmp_path: Path) -> None:
    folder = stand_in.make(tmp_path / "later", version="2.13.0")
    script = f"""
import sys
class NoTorch:  # hides a torch that is installed here until the path is ready
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
hide = NoTorch()
import pp_hookfix
sys.meta_path.insert(1, hide)
try:
    import torch
except ModuleNotFoundError:
    print("missing")
sys.meta_path.remove(hide)
sys.path.insert(0, {str(folder)!r})
import torch.distributed.pipelining
"""
    assert run(script + REPORT, None) == "missing\npatched FunctionWrapper\n"


def test_off_in_the_environment(torch_path: Path) -> None:
    script = "import pp_hookfix, torch.distributed.pipelining" + REPORT
    assert run(script, torch_path, {"PP_HOOKFIX": "off"}) == "off function\n"
    # An explicit call says more than the environment.
    enabled = script.replace(REPORT, "; pp_hookfix.enable()" + REPORT)
    assert run(enabled, torch_path, {"PP_HOOKFIX": "off"}) == "patched FunctionWrapper\n"


def test_an_empty_variable_is_an_unset_one(torch_path: Path) -> None:
    script = "import pp_hookfix, torch.distributed.pipelining" + REPORT
    assert run(script, torch_path, {"PP_HOOKFIX": ""}) == "patched FunctionWrapper\n"


def test_an_unknown_policy_is_named_with_those_allowed() -> None:
    result = python(
        "-c", "import pp_hookfix", env={"PP_HOOKFIX": "detatch", "PYTHONPATH": str(PACKAGE)}
    )
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith("ValueError: PP_HOOKFIX='detatch'")
    assert "detach" in last
    assert "off" in last


def test_enable_names_the_policies_that_it_takes() -> None:
    with pytest.raises(ValueError, match="policy 'detatch' is not one of those allowed: detach"):
        pp_hookfix.enable("detatch")


def test_disabled_before_torch(torch_path: Path) -> None:
    script = "import pp_hookfix; pp_hookfix.disable(); import torch.distributed.pipelining"
    assert run(script + REPORT, torch_path) == "off function\n"
    script = "import pp_hookfix, torch; pp_hookfix.disable(); import torch.distributed.pipelining"
    assert run(script + REPORT, torch_path) == "off function\n"
    again = "; pp_hookfix.disable(); pp_hookfix.enable(); pp_hookfix.enable()"
    assert run(script + again + REPORT, torch_path) == "patched FunctionWrapper\n"


def test_threads_that_import_at_once(torch_path: Path) -> None:
    script = """
import threading
start = threading.Barrier(8)
def one(number):
    start.wait()
    if number % 2:
        import pp_hookfix
    import torch.distributed.pipelining
    import pp_hookfix
    pp_hookfix.enable()
threads = [threading.Thread(target=one, args=[number]) for number in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join(60)
import pp_hookfix
"""
    assert run(script + REPORT + LAYERS, torch_path) == "patched FunctionWrapper\n1\n"


def test_forked_children_are_patched_once(torch_path: Path) -> None:
    script = """
import os, pp_hookfix, torch.distributed.pipelining
if os.fork() == 0:
    import pp_hookfix
    pp_hookfix.enable()
else:
    os.wait()
"""
    assert run(script + REPORT, torch_path) == "patched FunctionWrapper\n" * 2


def test_drift_warns_once_and_leaves_torch_alone(tmp_path: Path) -> None:
    drifted = stand_in.STAGE.replace("(self, fwd_chunk_id)", "(self, fwd_chunk_id, recv_infos)")
    path = stand_in.make(tmp_path / "site", "2.14.1+vendor", drifted)
    out = run("import pp_hookfix, torch.distributed.pipelining" + REPORT, path)
    assert "unsupported function\n" in out
    assert out.count("RuntimeWarning: pp_hookfix: torch 2.14.1+vendor is left untouched") == 1
    assert "(self, fwd_chunk_id)" in out
    # Warnings as errors: ours still breaks no import.
    out = run("import pp_hookfix, torch.distributed.pipelining" + REPORT, path, None, "-Werror")
    assert "unsupported function\n" in out


def test_an_exception_of_ours_does_not_break_the_import(torch_path: Path) -> None:
    script = """
import pp_hookfix, sys, types
sys.modules["pp_hookfix.decision"] = types.SimpleNamespace(Status=__import__(
    "collections").namedtuple("Status", "state reason torch_version policy"))
import torch.distributed.pipelining
"""
    out = run(script + REPORT, torch_path)
    assert "unsupported function\n" in out
    assert "RuntimeWarning: pp_hookfix: torch 2.13.0 is left untouched" in out
    assert "ImportError" in out


def test_without_wrapt_torch_imports_and_the_user_is_told(torch_path: Path) -> None:
    script = """
import sys, pp_hookfix
sys.modules["wrapt"] = None
import torch.distributed.pipelining
"""
    out = run(script + REPORT, torch_path)
    assert "unsupported function\n" in out
    assert "RuntimeWarning: pp_hookfix" in out
    assert "wrapt" in out


def test_one_info_line_says_what_was_decided(torch_path: Path) -> None:
    script = """
import logging
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
import pp_hookfix, torch.distributed.pipelining
pp_hookfix.enable()
"""
    out = run(script, torch_path)
    assert out.count("\n") == 1
    assert out.startswith("INFO pp_hookfix patched: torch 2.13.0 ")


@pytest.mark.parametrize("watched", ["torch", "json.tool"])
def test_running_import_loop_asks_every_finder_once(watched: str, torch_path: Path) -> None:
    # The finder of an editable install stands right behind ours; sys.meta_path is iterated live.
    script = f"""
import sys, pp_hookfix
asked = []
class Editable:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        asked.append(name)
sys.meta_path.insert(1, Editable)
before = [Editable if finder is Editable else type(finder) for finder in sys.meta_path]
import importlib
importlib.import_module({watched!r})
print(asked.count({watched!r}), sys.meta_path.count(Editable))
"""
    assert run(script, torch_path) == "1 1\n"


def test_not_needed_wraps_nothing(tmp_path: Path) -> None:
    path = stand_in.make(tmp_path / "site", "2.15.0")
    script = "import pp_hookfix, torch.distributed.pipelining" + REPORT
    assert run(script, path) == "not-needed function\n"


def test_status_tells_the_version_and_policy(torch_path: Path) -> None:
    script = "import pp_hookfix, torch; print(pp_hookfix.status()[2:])"
    assert run(script, torch_path) == "('2.13.0', 'detach')\n"
