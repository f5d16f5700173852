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
    just_in_time = stand_in.STAGE + "_RecvInfo.take_buffer = lambda self: None\n"
    path = stand_in.make(tmp_path / "site", "2.15.0", just_in_time)
    script = "import pp_hookfix, torch.distributed.pipelining" + REPORT
    assert run(script, path) == "not-needed function\n"


def test_a_release_that_was_not_tried_is_left_alone_without_a_warning(tmp_path: Path) -> None:
    path = stand_in.make(tmp_path / "site", "2.16.0")
    script = "import pp_hookfix, torch.distributed.pipelining" + REPORT
    assert run(script, path) == "untried function\n"
    script = "import pp_hookfix, torch.distributed.pipelining; print(pp_hookfix.status().reason)"
    assert "`pp-hookfix verify` tells" in run(script, path, None, "-Werror")


def test_status_tells_the_version_and_policy(torch_path: Path) -> None:
    script = "import pp_hookfix, torch; print(pp_hookfix.status()[2:])"
    assert run(script, torch_path) == "('2.13.0', 'detach')\n"


# --- behind other import hooks


PATCHED = f"print(type(stage.{ORIGINAL}).__name__)"
STAGE = "import sys; stage = sys.modules['torch.distributed.pipelining.stage']\n"
FINDERS = {
    # typeguard, beartype and others: a finder in front that has modules loaded by itself.
    "in front, for pipelining": """
import importlib.machinery
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torch.distributed.pipelining"):
            return importlib.machinery.PathFinder.find_spec(name, path, target)
import pp_hookfix, torch.distributed
sys.meta_path.insert(0, Finder())
import torch.distributed.pipelining
""",
    "put back around torch": """
import pp_hookfix
saved = list(sys.meta_path)
import torch.distributed
sys.meta_path = saved
import torch.distributed.pipelining
""",
    "put back in place around torch": """
saved = list(sys.meta_path)
import pp_hookfix
import torch.distributed
sys.meta_path[:] = saved
import torch.distributed.pipelining
""",
    "all there is put back": """
saved = list(sys.meta_path)
import pp_hookfix
sys.meta_path[:] = saved
import torch.distributed.pipelining
pp_hookfix.status()
""",
    "a later module": """
import pp_hookfix
class Hidden(type(sys)):
    pass
import torch.distributed
torch.__class__ = torch.distributed.__class__ = Hidden
sys.meta_path.insert(0, sys.meta_path.pop())
import torch.distributed.pipelining
sys.meta_path.append(sys.meta_path.pop(0))
import colorsys
""",
}


@pytest.mark.parametrize("kind", FINDERS)
def test_patched_behind_other_import_hooks(kind: str, torch_path: Path) -> None:
    out = run("import sys\n" + FINDERS[kind] + STAGE + PATCHED + REPORT + LAYERS, torch_path)
    assert out == "FunctionWrapper\npatched FunctionWrapper\n1\n"


def test_when_the_decision_has_fallen_nothing_waits(torch_path: Path) -> None:
    script = """
import sys
before = list(sys.meta_path)
import pp_hookfix
waiting = sys.meta_path
import torch.distributed
told = type(torch.distributed)
import torch.distributed.pipelining
print(sys.meta_path == before, type(torch.distributed) is type(sys), told is type(sys))
sys.meta_path = waiting
import colorsys
print(sys.meta_path == before)
"""
    assert run(script, torch_path) == "True True False\nTrue\n"


def test_the_finder_goes_without_disturbing_the_loop_that_asks_it(torch_path: Path) -> None:
    # sys.meta_path is iterated live: in place, the finder behind ours would be skipped.
    script = """
import sys, pp_hookfix
class Behind:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        asked.append(name)
asked = []
sys.meta_path.insert(1, Behind)
import torch.distributed
torch.distributed.__class__ = type(sys)
sys.meta_path.remove(next(finder for finder in sys.meta_path if "pp_hookfix" in repr(finder)))
import torch.distributed.pipelining
pp_hookfix.activation._wait()
import colorsys
print(asked.count("colorsys"), pp_hookfix.status().state)
"""
    assert run(script, torch_path) == "1 patched\n"


def test_torch_distributed_can_be_pickled_while_it_tells(torch_path: Path) -> None:
    script = """
import pickle, pp_hookfix, torch.distributed
pp_hookfix.enable()
again = pickle.loads(pickle.dumps(torch.distributed))
print(type(torch.distributed).__name__, again is torch.distributed)
pp_hookfix.disable()
print(type(torch.distributed).__name__)
"""
    assert run(script, torch_path) == "_NotifyingModule True\nmodule\n"


# --- what is true now

BYPASSED = {
    "reloaded": ("import importlib; importlib.reload(stage)", "stage.py:"),
    "a function that does not call ours": (
        "def new(self, fwd_chunk_id): return ()\nBase._retrieve_recv_activations = new",
        "__main__.new (<string>:",
    ),
    "torch's own": (
        "Base._retrieve_recv_activations = vars(Base)['_retrieve_recv_activations'].__wrapped__",
        "stage.py:",
    ),
    "in a subclass": (
        "stage.PipelineStage._retrieve_recv_activations = lambda self, fwd_chunk_id: ()",
        "PipelineStage._retrieve_recv_activations is __main__.<lambda> (<string>:",
    ),
    "gone": ("del Base._retrieve_recv_activations", "Base._retrieve_recv_activations is gone"),
}
REACHED = {
    "__wrapped__": "import functools\n@functools.wraps(ours)\ndef new(*args): return ours(*args)",
    "a closure": "def make(ours):\n return lambda *args: ours(*args)\nnew = make(ours)",
    "a global": "def new(*args): return ours(*args)",
    "a default": "def new(self, fwd_chunk_id, ours=ours): return ours(self, fwd_chunk_id)",
    "a partial": "import functools\npart = functools.partial(ours)\ndef new(*args): part(*args)",
    "a callable object": """
class New:
    def __init__(self, function): self.function = function
    def __call__(self, *args): return self.function(*args)
    def __get__(self, stage, owner): return self.__call__
new = New(ours)""",
    "wrapt": "import wrapt\nnew = wrapt.decorator(lambda wrapped, instance, args, kwargs: "
    "wrapped(*args, **kwargs))(vars(Base)['_retrieve_recv_activations'])",
    "two functions": "def inner(*args): return ours(*args)\ndef new(*args): return inner(*args)",
}
START = """
import pp_hookfix, torch.distributed.pipelining.stage as stage
Base = stage._PipelineStageBase
ours = Base._retrieve_recv_activations
"""


@pytest.mark.parametrize("kind", BYPASSED)
def test_what_no_longer_stands_is_told_and_mended(kind: str, torch_path: Path) -> None:
    change, told = BYPASSED[kind]
    script = f"{START}{change}\nprint(*pp_hookfix.status()[:2], sep='\\n')\n"
    script += "pp_hookfix.enable()\nprint(pp_hookfix.status().state)"
    out = run(script if kind == "gone" else script + LAYERS, torch_path)
    first, reason, *mended = out.splitlines()
    assert first == "bypassed"
    assert told in reason
    assert "pp_hookfix.enable()" in reason
    if kind == "gone":
        assert "unsupported" in mended
    else:
        assert mended == ["patched", "1"]


@pytest.mark.parametrize("kind", REACHED)
def test_wrappers_above_ours_do_not_hide_it(kind: str, torch_path: Path) -> None:
    script = f"{START}{REACHED[kind]}\nBase._retrieve_recv_activations = new\n"
    assert run(script + "print(pp_hookfix.status().state)", torch_path) == "patched\n"


def test_a_stage_module_that_is_imported_anew(torch_path: Path) -> None:
    script = """
import sys
for name in [name for name in sys.modules if name.startswith("torch.distributed.pipelining")]:
    del sys.modules[name]
import torch.distributed.pipelining.stage
assert torch.distributed.pipelining.stage is not stage
pp_hookfix.status()
"""
    out = run(START + script + REPORT + LAYERS, torch_path)
    assert out == "patched FunctionWrapper\n1\n"


def test_status_decides_where_nothing_else_did(torch_path: Path) -> None:
    script = """
import pp_hookfix, sys
finders = sys.meta_path
sys.meta_path = [finder for finder in finders if "pp_hookfix" not in repr(finder)]
import torch.distributed.pipelining
stage = sys.modules["torch.distributed.pipelining.stage"]
print(pp_hookfix.status().state)
"""
    assert run(script + REPORT, torch_path) == "patched\npatched FunctionWrapper\n"
