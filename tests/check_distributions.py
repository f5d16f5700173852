"""Build the wheel and the sdist into a folder and check what they hold.

``python tests/check_distributions.py FOLDER``, with `build` and `twine` installed.
"""

import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path


def files(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def left_behind(wheel: Path, folder: Path) -> tuple[set[str], set[str]]:
    """Install the wheel in a new environment and uninstall it: what it brought, what stayed."""
    venv.create(folder, with_pip=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    before = files(folder)
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True)
    brought = files(folder) - before
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", "pp-hookfix"], check=True)
    return brought, files(folder) - before


def main(folder: str) -> int:
    root = Path(__file__).parents[1]
    subprocess.run([sys.executable, "-m", "build", "--outdir", folder, str(root)], check=True)
    built = sorted(Path(folder).glob("pp_hookfix-*"))
    subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", *map(str, built)], check=True
    )
    (wheel,) = (path for path in built if path.suffix == ".whl")
    names = zipfile.ZipFile(wheel).namelist()
    if "pp_hookfix/py.typed" not in names:
        print(f"{wheel.name} lacks pp_hookfix/py.typed", file=sys.stderr)
        return 1
    stray = [name for name in names if not name.startswith(("pp_hookfix/", "pp_hookfix-"))]
    stray += [name for name in names if "test" in name or name.endswith(".pth")]
    if stray:
        print(f"{wheel.name} holds more than the package: {stray}", file=sys.stderr)
        return 1
    metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
    page = zipfile.ZipFile(wheel).read(metadata).decode()
    dead = re.findall(r"\]\((?!https://|#)[^)]*\)", page)
    home = re.findall(r"^Project-URL: Homepage, (\S+)$", page, re.MULTILINE)
    if dead or len(home) != 1 or page.count(f"]({home[0]}/blob/main/docs/") < 5:
        print(f"{wheel.name}: links that are dead on a package page: {dead}", file=sys.stderr)
        return 1
    brought, stayed = left_behind(wheel, Path(folder) / "venv")
    outside = [
        path
        for path in brought
        if "/site-packages/pp_hookfix" not in path and path != "bin/pp-hookfix"
    ]
    if outside or stayed:
        print(f"installed outside of its place: {outside}; left behind: {stayed}", file=sys.stderr)
        return 1
    print(
        f"{wheel.name}: {len(names)} files, the package and its metadata alone; "
        "nothing stays when it is uninstalled"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
