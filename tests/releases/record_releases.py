"""Try the built wheel on every torch release, really installed, and record what happened.

    python tests/releases/record_releases.py [--only PART] WHEEL [VERSION ...]

One virtual environment at a time, removed afterwards. Per release, in parts: the fingerprints of
the methods that are wrapped; ``pp-hookfix verify --json``; the tests of the regression, of the
policies and of users' own stages; and those of the audit: the tests that run by default, on Gloo
with 2 ranks. Only what a run wrote goes into docs/releases.json, as each release ends, with a
fingerprint of the package's code; without versions, each release has those parts run that the
record lacks of the code that is here, so that an interrupted run goes on where it stopped.
Releases are those of `RELEASES`, and any final one since that the package index has.
docs/releases.md, and the fingerprints that are shipped, are made from the record
(releases_table.py).
"""

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import releases_table

sys.path.insert(0, str(Path(__file__).parents[1]))
import evidence

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "releases.json"
RELEASES = [
    *("2.4.0", "2.4.1", "2.5.0", "2.5.1", "2.6.0", "2.7.0", "2.7.1", "2.8.0", "2.9.0", "2.9.1"),
    *("2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0"),
]
TESTS = {
    "tests": ("recv_buffer_hooks", "policies", "own_stages", "patch"),
    "audit": ("audit",),
}
PARTS = ("sources", "verify", *TESTS)
# Wall-clock limits, in seconds. The ranks' own limits are far shorter.
INSTALL, TEST, VERIFY = 1200, 1800, 600


def install(python: Path, venv: Path, wheel: str, version: str) -> None:
    """A new environment with that torch, the wheel and what the tests need; uv where it is."""
    packages = [f"torch=={version}", f"{wheel}[test]"]
    uv = shutil.which("uv")
    if uv is not None:
        run([uv, "venv", "--quiet", "--python", sys.executable, str(venv)], INSTALL)
        command = [uv, "pip", "install", "--quiet", "--no-cache", "--python", str(python)]
    else:
        run([sys.executable, "-m", "venv", str(venv)], INSTALL)
        command = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    run([*command, *packages], INSTALL)


def run(command: list[str], limit: float) -> "subprocess.CompletedProcess[str]":
    """Raises what says that it failed or hung."""
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=limit, cwd=ROOT
    )


def build_of(python: Path) -> dict[str, Any]:
    show = (
        "import json, platform, torch; print(json.dumps({'torch': torch.__version__, "
        "'git': torch.version.git_version, 'python': platform.python_version()}))"
    )
    build: dict[str, Any] = json.loads(run([str(python), "-c", show], 300).stdout)
    return build


def sources_on(python: Path) -> dict[str, str]:
    show = (
        "import importlib, json; from pp_hookfix import activation, fingerprints as known; "
        "stage = importlib.import_module(activation.STAGE_MODULE); "
        "print(json.dumps(known.fingerprints(stage)))"
    )
    sources: dict[str, str] = json.loads(run([str(python), "-c", show], 300).stdout)
    return sources


def tests_on(python: Path, folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    """Counts, and the names of what did not pass."""
    report = folder / "junit.xml"
    # Not `python -m pytest`, which would put this folder before the installed wheel.
    command = [str(python.with_name("pytest")), "-q", "-p", "no:cacheprovider", "-k", "not nccl"]
    command += [f"--junitxml={report}", *(f"tests/test_{name}.py" for name in names)]
    started = time.monotonic()
    try:
        subprocess.run(command, capture_output=True, timeout=TEST, cwd=ROOT, check=False)
    except subprocess.TimeoutExpired:
        return {"hung": f"not done after {TEST} s"}
    suite = ElementTree.parse(report).getroot()[0]
    counts = {key: int(suite.attrib[key]) for key in ("tests", "failures", "errors", "skipped")}
    return {
        "ran": datetime.date.today().isoformat(),
        "passed": counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"],
        **{key: counts[key] for key in ("failures", "errors", "skipped")},
        "not_passed": [
            f"{case.attrib['classname'].rpartition('.')[2]}::{case.attrib['name']}"
            for case in suite.iter("testcase")
            if case.find("failure") is not None or case.find("error") is not None
        ],
        "skip_reasons": sorted(
            {
                str(skipped.attrib.get("message"))
                for case in suite.iter("testcase")
                for skipped in case.iter("skipped")
            }
        ),
        "seconds": round(time.monotonic() - started),
    }


def verify_on(python: Path) -> dict[str, Any]:
    command = [str(python), "-m", "pp_hookfix", "verify", "--json"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=VERIFY, check=False, cwd="/"
        )
    except subprocess.TimeoutExpired:
        return {"hung": f"not done after {VERIFY} s"}
    verified = {"exit_status": result.returncode}
    try:
        return {**verified, **json.loads(result.stdout)}
    except ValueError:
        return {**verified, "stderr": result.stderr[-2000:]}


def one_release(version: str, wheel: str, folder: Path, parts: list[str]) -> dict[str, Any]:
    """What the entry of a release gains."""
    entry: dict[str, Any] = {
        "ran": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "platform": f"{platform.system()} {platform.machine()}",
        "pp_hookfix": Path(wheel).name,
    }
    venv = folder / "venv"
    python = venv / "bin" / "python"
    try:
        install(python, venv, wheel, version)
        entry["build"] = build_of(python)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        stderr = error.stderr or ""
        entry["not_installed"] = (stderr if isinstance(stderr, str) else str(error))[-2000:]
        return entry
    for part in parts:
        print(f"{part} ... ", end="", flush=True)
        if part == "sources":
            entry[part] = sources_on(python)
        elif part == "verify":
            entry[part] = verify_on(python)
        else:
            entry[part] = tests_on(python, folder, TESTS[part])
        entry.setdefault("of", {})[part] = evidence.stamp()
    return entry


def newer_releases() -> list[str]:
    """Final releases that the package index has and `RELEASES` does not know yet."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    try:
        listed = run(command, 120).stdout
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"the package index does not tell which releases it has: {error}", file=sys.stderr)
        return []
    found = re.findall(r"\b\d+\.\d+\.\d+\b(?![.\w+-])", listed.partition("Available")[2])
    newest = _order(RELEASES[-1])
    return sorted({one for one in found if _order(one) > newest}, key=_order)


def _order(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--only",
        action="append",
        choices=PARTS,
        metavar="PART",
        help=f"may be repeated: {', '.join(PARTS)}",
    )
    parser.add_argument("wheel", help="the built wheel")
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="default: what is lacking")
    # Versions may come after `--only`, which is after the wheel that nox gives.
    arguments = parser.parse_intermixed_args()
    releases = [*RELEASES, *newer_releases()]
    unknown = [version for version in arguments.versions if version not in releases]
    if unknown:
        parser.error(f"{unknown[0]} is no final release with pipelining: {', '.join(releases)}")
    record: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    parts = arguments.only or list(PARTS)
    wanted = {
        version: parts
        if arguments.versions
        else [
            part
            for part in parts
            if not evidence.is_of(
                record.get(version, {}).get("of", {}).get(part), evidence.fingerprint()
            )
        ]
        for version in arguments.versions or releases
    }
    wanted = {version: lacking for version, lacking in wanted.items() if lacking}
    os.environ.pop("PYTHONPATH", None)
    RECORD.parent.mkdir(exist_ok=True)
    for number, (version, lacking) in enumerate(wanted.items(), 1):
        print(f"[{number}/{len(wanted)}] torch {version}: install ... ", end="", flush=True)
        folder = Path(tempfile.mkdtemp(prefix="pp_hookfix-release-"))
        try:
            gained = one_release(version, arguments.wheel, folder, lacking)
            of = {**record.get(version, {}).get("of", {}), **gained.get("of", {})}
            record[version] = {**record.get(version, {}), **gained, "of": of}
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        ordered = {version: record[version] for version in sorted(record, key=_order)}
        RECORD.write_text(json.dumps(ordered, indent=1) + "\n")
        releases_table.write(ordered)
        print(releases_table.summary(record[version]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
