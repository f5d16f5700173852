"""What a record is of: a fingerprint of the package's code. What lacks one of today's code.

    python tests/evidence.py [--fingerprint | --missing]

Exits 1 unless every entry of docs/releases.json, upstream.json, clients.json, ways-in.json and
benchmarks.json is of the code as it is now; names what is missing, and what makes it.
"""

import datetime
import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
EARLIER = "of an earlier state"
PARTS_OF_A_RELEASE = ("sources", "verify", "tests", "audit")
UPSTREAM = ("2.7.1", "2.12.0", "2.13.0")


def fingerprint() -> str:
    """Of the ``.py`` files of the package: their names and what they say."""
    package = ROOT / "pp_hookfix"
    code = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        code.update(f"{path.relative_to(package).as_posix()}\0".encode())
        code.update(path.read_bytes() + b"\0")
    return code.hexdigest()[:12]


def stamp() -> dict[str, str]:
    """What an entry carries."""
    return {"code": fingerprint(), "ran": datetime.date.today().isoformat()}


def is_of(stamped: Optional[dict[str, Any]], code: str) -> bool:
    return stamped is not None and stamped.get("code") == code


def age(stamped: Optional[dict[str, Any]], code: str) -> str:
    """In a table: nothing, or that an entry is of an earlier state."""
    return "" if is_of(stamped, code) else f" ({EARLIER})"


def foot(code: str) -> str:
    """The last line of a page, by which it can be made again from its record."""
    return f"\n<!-- of the code {code} -->\n"


def code_of(page: Path) -> str:
    """The fingerprint for which a page was made."""
    found = re.search(r"<!-- of the code (\w+) -->", page.read_text(encoding="utf-8"))
    return found[1] if found else ""


def lacking(docs: Path = DOCS, code: str = "") -> dict[str, list[str]]:
    """By the command that makes them, the entries that are not of the code."""
    code = code or fingerprint()

    def record(name: str) -> dict[str, Any]:
        path = docs / f"{name}.json"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    missing: dict[str, list[str]] = {
        "nox -s releases": [
            f"{version}: {part}"
            for version, entry in record("releases").items()
            for part in PARTS_OF_A_RELEASE
            if not is_of(entry.get("of", {}).get(part), code)
        ],
        "nox -s upstream -- TREE": [
            version
            for version in UPSTREAM
            if not any(
                key.partition("+")[0] == version and is_of(entry, code)
                for key, entry in record("upstream").items()
            )
        ],
        "nox -s clients": [
            name for name, entry in record("clients").items() if not is_of(entry, code)
        ],
        "nox -s ways_in": [
            name for name, entry in record("ways-in").items() if not is_of(entry, code)
        ],
        "nox -s benchmarks": [
            name for name, entry in record("benchmarks").items() if not is_of(entry, code)
        ],
    }
    return {command: entries for command, entries in missing.items() if entries}


def main() -> int:
    if "--fingerprint" in sys.argv:
        print(fingerprint())
        return 0
    missing = lacking()
    if "--missing" in sys.argv:
        print(" ".join(command.split()[2] for command in missing))
        return 0
    for command, entries in missing.items():
        print(f"not of the code that is here ({fingerprint()}): {', '.join(entries)}")
        print(f"    {command} makes {'it' if len(entries) == 1 else 'them'}")
    if not missing:
        print(f"every record is of the code that is here ({fingerprint()})")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
