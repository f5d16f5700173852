"""Make docs/releases.md, the table that a person reads, from docs/releases.json.

python tests/releases_table.py
"""

import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1] / "docs"

HEAD = """\
# Every torch release, measured

Made by `nox -s releases` from what its runs wrote ([releases.json](releases.json));
not edited by hand. Each release was really installed, on the CPU, with the built wheel:
`pp-hookfix verify` (2 ranks, 5 steps) and the tests of the regression, of the policies and
of users' own stages, on Gloo with 2 and 4 ranks. "Hooks" are those fired in each step where
most fired, over all schedules: without the fix, and under the worst of the three policies.
"Equal" means losses and all gradients, to the last bit, under every policy.

| torch | build | Python | schedules | hooks without | hooks with | equal | decision | tests |
|---|---|---|---|---|---|---|---|---|
"""


def most_fired(by_stage: list[list[int]]) -> str:
    return " ".join(map(str, max(by_stage, key=sum, default=[])))


def row(version: str, entry: dict[str, Any]) -> str:
    """One line of the table."""
    if "not_installed" in entry:
        return f"| {version} | not installed: see the record | | | | | | | |"
    build, verify, tests = entry["build"], entry["verify"], entry.get("tests")
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
            ", ".join(sorted(states)),
        ]
    else:
        cells += ["", f"verify {verify.get('hung') or 'failed: see the record'}", "", "", ""]
    if tests is None:
        cells.append("not run yet")
    elif "hung" in tests:
        cells.append(f"hung: {tests['hung']}")
    else:
        counts = f"{tests['passed']} passed, {tests['skipped']} skipped"
        failed = tests["failures"] + tests["errors"]
        cells.append(f"{counts}, **{failed} failed**" if failed else counts)
    return f"| {' | '.join(cells)} |"


def summary(entry: dict[str, Any]) -> str:
    """An entry in one line, as its run ends."""
    if "not_installed" in entry:
        return "NOT INSTALLED"
    tests = entry.get("tests", {"hung": "not run"})
    counts = tests.get("hung") or ", ".join(
        f"{tests[key]} {key}" for key in ("passed", "skipped", "failures", "errors")
    )
    return f"verify exits {entry['verify'].get('exit_status')}; tests: {counts}"


def write(record: dict[str, Any]) -> None:
    """docs/releases.md from the whole record."""
    lines = [row(version, entry) for version, entry in record.items()]
    reasons = sorted(
        {
            reason
            for entry in record.values()
            for reason in entry.get("tests", {}).get("skip_reasons", [])
        }
    )
    foot = "\nWhat was skipped, and why:\n\n" + "".join(f"- {reason}\n" for reason in reasons)
    (DOCS / "releases.md").write_text(HEAD + "\n".join(lines) + "\n" + foot)


if __name__ == "__main__":
    write(json.loads((DOCS / "releases.json").read_text()))
    sys.exit(0)
