"""Environments of their own, for what must not lie in the one that runs the tests."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Optional

import pp_hookfix


def make(python: str, folder: Path, *packages: str, options: tuple[str, ...] = ()) -> Path:
    """A virtual environment of `python` with some of our packages copied in; its interpreter."""
    subprocess.run(
        [python, "-m", "venv", "--without-pip", *options, str(folder)],
        check=True,
        capture_output=True,
    )
    made = folder / "bin" / "python"
    for package in packages:
        copy_package(package, site_packages(made))
    return made


def make_installation(folder: Path) -> Optional[Path]:
    """A Python whose own site-packages is empty, by links to this one's; its interpreter, if any.

    None where the interpreter does not run from another place.
    """
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    library, real = folder / "lib" / version, Path(os.__file__).parent
    python = folder / "bin" / "python3"
    (library / "site-packages").mkdir(parents=True)
    python.parent.mkdir()
    for entry in real.iterdir():
        if entry.name != "site-packages":
            (library / entry.name).symlink_to(entry)
    shutil.copy(os.path.realpath(sys.executable), python)
    show = "import sys, json, select; print(sys.prefix)"
    ran = subprocess.run(
        [str(python), "-I", "-c", show], capture_output=True, text=True, check=False
    )
    return python if ran.stdout.strip() == str(folder) else None


def site_packages(python: Path) -> Path:
    show = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(subprocess.check_output([str(python), "-c", show], text=True).strip())


def copy_package(name: str, folder: Path) -> None:
    """As it lies in the environment that runs the tests."""
    if name == "pp_hookfix":
        source = Path(pp_hookfix.__file__).parent
    else:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).parent
    shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))


def distributions_python() -> Optional[str]:
    """One whose standard library has a sitecustomize, as Debian's and Ubuntu's have."""
    python = "/usr/bin/python3"
    if not os.path.exists(python):
        return None
    show = "import os, sysconfig; print(os.path.exists(sysconfig.get_path('stdlib') + "
    show += "'/sitecustomize.py') and __import__('sys').version_info >= (3, 9))"
    ran = subprocess.run([python, "-S", "-c", show], capture_output=True, text=True, check=False)
    return python if ran.stdout.strip() == "True" else None


def other_pythons() -> list[str]:
    """An interpreter of each other CPython from 3.9 on that is here, pyenv's too."""
    candidates = [shutil.which(f"python3.{minor}") for minor in range(9, 16)]
    pyenv = shutil.which("pyenv")
    if pyenv is not None:
        root = subprocess.run([pyenv, "root"], capture_output=True, text=True, check=False).stdout
        candidates += map(str, sorted(Path(root.strip(), "versions").glob("3.*/bin/python")))
    show = "import sys; print(sys.executable, sys.version_info >= (3, 9), sys.version_info[1])"
    found = {}
    for python in filter(None, candidates):
        ran = subprocess.run([python, "-c", show], capture_output=True, text=True, check=False)
        if ran.returncode == 0 and ran.stdout.split()[1] == "True":
            found[int(ran.stdout.split()[2])] = ran.stdout.split()[0]
    found.pop(sys.version_info[1], None)
    return [found[minor] for minor in sorted(found)]
