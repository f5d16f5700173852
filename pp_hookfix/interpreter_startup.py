"""Whether a new Python of this environment has the fix, by what, and how to see to it.

``pp-hookfix activate`` writes one ``.pth`` file: those run before any sitecustomize, which
a distribution's own may hide (Debian's and Ubuntu's lie in the standard library's folder).
"""

import json
import os
import site
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple, Optional

from pp_hookfix.settings import ENVIRONMENT_VARIABLE

_MARK = "# Written by `pp-hookfix activate`. `pp-hookfix deactivate` removes it."
_CODE = """\
import sys
sys.path += {folders!r}
try:
 import pp_hookfix
except ModuleNotFoundError as error:
 if error.name != 'pp_hookfix': raise
finally:
 del sys.path[len(sys.path) - {number}:]
"""
_ANSWER = "pp_hookfix: "


class CannotWrite(Exception):
    """The file cannot be written or removed; the message is one line for the user."""


class NewPython(NamedTuple):
    """What an interpreter does that starts now in this environment."""

    python: str
    active: bool
    """Whether it waits for torch, or would have patched it."""
    by: Optional[str]
    """The file that brings pp_hookfix; None: nothing does."""
    policy: Optional[str]
    """The policy, or ``off``; None: nothing brings pp_hookfix."""
    sitecustomize: Optional[str]
    """The sitecustomize that Python runs."""
    hidden_sitecustomize: Optional[str]
    """One in this environment's site-packages that it does not run."""


def new_python() -> NewPython:
    """Start one and ask it.

    Raises:
        subprocess.CalledProcessError: it does not start.
    """
    show = (
        "import json, sys; ours = sys.modules.get('pp_hookfix.activation'); "
        f"print({_ANSWER!r} + json.dumps(["
        "getattr(ours, '_brought_by', None), getattr(ours, '_policy', None), "
        "getattr(sys.modules.get('sitecustomize'), '__file__', None)]))"
    )
    # From elsewhere: its own folder comes first on the path of `python -c`.
    command = [sys.executable, "-c", show]
    out = subprocess.check_output(command, encoding="utf-8", errors="replace", cwd=sys.prefix)
    # What runs at its start may print, too.
    (answer,) = (line for line in out.splitlines() if line.startswith(_ANSWER))
    by, policy, runs = json.loads(answer[len(_ANSWER) :])
    there = [Path(folder, "sitecustomize.py") for folder in site.getsitepackages()]
    hidden = [
        str(path)
        for path in there
        if path.exists() and (runs is None or not os.path.samefile(path, runs))
    ]
    active = by is not None and policy != "off"
    return NewPython(sys.executable, active, by, policy, runs, hidden[0] if hidden else None)


def in_words(new: NewPython) -> str:
    """The answer as lines for a person."""
    if new.by is None:
        lines = [
            f"not active in a new Python of this environment ({new.python}): import pp_hookfix in "
            "the script, start it by `pp-hookfix run`, or `pp-hookfix activate` once."
        ]
    elif new.active:
        lines = [f"active in a new Python of this environment ({new.python}), by {_named(new.by)}."]
    else:
        lines = [
            f"off in a new Python of this environment ({new.python}): {_named(new.by)} brings it, "
            f"and {ENVIRONMENT_VARIABLE}={os.environ.get(ENVIRONMENT_VARIABLE)!r} is set."
        ]
    if new.hidden_sitecustomize is not None and new.sitecustomize is not None:
        lines.append(
            f"{new.hidden_sitecustomize} is not run: Python runs {new.sitecustomize} in its place."
        )
    return "\n".join(lines)


def _named(by: str) -> str:
    path = Path(by)
    if "autowrapt" in (path.parent.name, path.name.partition("-")[0]):
        return f"autowrapt ({by})"
    if path.parent.name == "bootstrap":
        return "`pp-hookfix run`, under which this command runs"
    if path == file():
        return f"`pp-hookfix activate` ({by})"
    return by


def content() -> str:
    """What that file says. After an uninstallation, interpreters start as before.

    A virtual environment that has another's packages, too (``--system-site-packages``), runs its
    own files before those are on the path: there, the file says where pp_hookfix lies.
    """
    here = str(Path(__file__).parents[1])
    folders = [] if here in map(sysconfig.get_path, ("purelib", "platlib")) else [here]
    code = _CODE.format(folders=folders, number=len(folders))
    # One line: `site` runs lines.
    return f"{_MARK}\nimport sys; exec({code!a})\n"


def file() -> Path:
    """What `activate` writes."""
    return Path(sysconfig.get_path("purelib"), "pp_hookfix_activate.pth")


def activate() -> NewPython:
    """Write the file and see that it takes.

    Raises:
        CannotWrite: no permission, or somebody else's file has that name, or a new
            interpreter does not read it.
    """
    path = file()
    _is_ours(path)
    try:
        path.write_text(content(), encoding="utf-8")
    except OSError as error:
        raise CannotWrite(f"{path} cannot be written: {error.strerror}") from error
    new = new_python()
    if new.by is None:
        path.unlink()
        raise CannotWrite(
            f"{path} was written and removed again: a new {new.python} does not read it"
        )
    return new


def deactivate() -> bool:
    """Remove the file; whether it was there.

    Raises:
        CannotWrite: no permission, or it is somebody else's file.
    """
    path = file()
    if not _is_ours(path):
        return False
    try:
        path.unlink()
    except OSError as error:
        raise CannotWrite(f"{path} cannot be removed: {error.strerror}") from error
    return True


def _is_ours(path: Path) -> bool:
    """Whether the file is there."""
    if not path.is_file():
        return False
    if not path.read_text(encoding="utf-8", errors="replace").startswith(_MARK):
        raise CannotWrite(f"{path} is there and was not written by pp-hookfix: it stays as it is")
    return True
