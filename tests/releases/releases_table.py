"""Make docs/releases.md, the table that a person reads, from docs/releases.json.

python tests/releases/releases_table.py
"""

import json
import sys
from pathlib import Path
from typing import Any, Optional

from pp_hookfix import fingerprints

sys.path.insert(0, str(Path(__file__).parents[1]))
import evidence

ROOT = Path(__file__).parents[2]
DOCS, PACKAGE = ROOT / "docs", ROOT / "pp_hookfix"

TESTS = ("tests", "audit")
HEAD = """\
# Every torch release, measured

Made by `nox -s releases` from what its runs wrote ([releases.json](releases.json));
not edited by hand. Each release was really installed, on the CPU, with the built wheel:
`pp-hookfix verify` (2 ranks, 5 steps), the tests of the regression, of the policies and of
users' own stages, and those of `pp-hookfix audit`, as `pytest` has them by default: on Gloo with
2 ranks. "Hooks" are those fired in each step where most fired, over all schedules: without the
fix, and under the worst of the three policies. "Equal" means losses and all gradients, to the
last bit, under every policy.

| torch | build | Python | schedules | hooks without | with | equal | decision | tests | audit |
|---|---|---|---|---|---|---|---|---|---|
"""


def most_fired(by_stage: list[list[int]]) -> str:
    return " ".join(map(str, max(by_stage, key=sum, default=[])))


def row(version: str, entry: dict[str, Any], code: str) -> str:
    """One line of the table."""
    of: dict[str, Any] = entry.get("of", {})
    if "not_installed" in entry:
        return f"| {version} | not installed: see the record | | | | | | | | |"
    build, verify = entry["build"], entry["verify"]
    cells = [version, f"`{build['torch']}`", build["python"]]
    if "schedules" in verify:
        schedules = verify["schedules"]
        results = [result for one in schedules for result in one["policies"].values()]
        equal = all(result["losses_equal"] and result["gradients_equal"] for result in results)
        states = {status["state"] for status in verify["policies"].values()}
        cells += [
            str(len(schedules)),
            most_fired([counts for one in schedules for counts in one["hooks"].values()]),
            most_fired([counts for result in results for counts in result["hooks"].values()]),
            "yes" if equal else "NO",
            ", ".join(sorted(states)) + evidence.age(of.get("verify"), code),
        ]
    else:
        cells += ["", f"verify {verify.get('hung') or 'failed: see the record'}", "", "", ""]
    cells += [_counts(entry.get(part), of.get(part), code) for part in TESTS]
    return f"| {' | '.join(cells)} |"


def _counts(tests: Optional[dict[str, Any]], of: Optional[dict[str, Any]], code: str) -> str:
    if tests is None:
        return "not run yet"
    if "hung" in tests:
        return f"hung: {tests['hung']}"
    counts = f"{tests['passed']} passed, {tests['skipped']} skipped"
    failed = tests["failures"] + tests["errors"]
    counts += evidence.age(of, code)
    return f"{counts}, **{failed} failed**" if failed else counts


def summary(entry: dict[str, Any]) -> str:
    """An entry in one line, as its run ends."""
    if "not_installed" in entry:
        return "NOT INSTALLED"
    verified = entry["verify"].get("exit_status")
    of, code = entry.get("of", {}), evidence.fingerprint()
    counts = "; ".join(f"{part}: {_counts(entry.get(part), of.get(part), code)}" for part in TESTS)
    return f"verify exits {verified}; {counts}"


def write(record: dict[str, Any], code: str = "") -> None:
    """docs/releases.md from the whole record, and the fingerprints that are shipped.

    Args:
        record: what docs/releases.json has.
        code: the package's, to which the page holds the entries; default: that which is here.
    """
    code = code or evidence.fingerprint()
    lines = [row(version, entry, code) for version, entry in record.items()]
    reasons = sorted(
        {
            reason
            for entry in record.values()
            for part in TESTS
            for reason in entry.get(part, {}).get("skip_reasons", [])
        }
    )
    foot = "\nWhat was skipped, and why:\n\n" + "".join(f"- {reason}\n" for reason in reasons)
    (DOCS / "releases.md").write_text(HEAD + "\n".join(lines) + "\n" + foot + evidence.foot(code))
    sources = {version: entry["sources"] for version, entry in record.items() if "sources" in entry}
    (PACKAGE / fingerprints.FILE.name).write_text(fingerprints.text(sources))


if __name__ == "__main__":
    write(json.loads((DOCS / "releases.json").read_text()))
    sys.exit(0)
