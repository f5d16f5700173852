"""Build the wheel and the sdist into a folder and check what they hold.

``python tests/check_distributions.py FOLDER``, with `build` and `twine` installed.
"""

import subprocess
import sys
import zipfile
from pathlib import Path


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
    print(f"{wheel.name}: {len(names)} files, the package and its metadata alone")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
