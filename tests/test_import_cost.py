"""What ``import pp_hookfix`` may load, wherever an interpreter starts."""

import json
from pathlib import Path

from conftest import python

import pp_hookfix

PACKAGE = Path(pp_hookfix.__file__).parents[1]


def loaded(statement: str) -> set[str]:
    # -S: without the .pth files of this environment, which may load anything.
    script = f"import sys; sys.path.insert(0, {str(PACKAGE)!r}); {statement}\n"
    script += "modules = sorted(sys.modules); import json; print(json.dumps(modules))"
    result = python("-I", "-S", "-c", script)
    assert result.returncode == 0, result.stderr
    return set(json.loads(result.stdout))


def test_nothing_is_loaded_that_a_bare_interpreter_has_not() -> None:
    bare = loaded("import os")  # site does, in every interpreter that is not -S
    extra = loaded("import pp_hookfix") - bare
    ours = {"activation", "policies", "settings"}
    assert extra == {"pp_hookfix", *(f"pp_hookfix.{name}" for name in ours)}


def test_switched_off_nothing_waits_for_torch() -> None:
    result = python(
        "-c",
        "import sys; before = list(sys.meta_path); import pp_hookfix; "
        "print(sys.meta_path == before, pp_hookfix.status().state)",
        env={"PP_HOOKFIX": "off", "PYTHONPATH": str(PACKAGE)},
    )
    assert result.stdout == "True off\n", result.stderr


def test_the_finder_costs_other_imports_one_comparison() -> None:
    # Seen by tracing the lines that the finder runs for another package's import.
    script = """
import sys, pp_hookfix
from pp_hookfix import activation
lines = []
def trace(frame, event, argument):
    if frame.f_code.co_filename == activation.__file__:
        if event == "line":
            lines.append(frame.f_lineno)
        return trace
sys.settrace(trace)
import colorsys
sys.settrace(None)
print(len(lines))
"""
    result = python("-c", script, env={"PYTHONPATH": str(PACKAGE)})
    assert result.stdout == "1\n", result.stderr
