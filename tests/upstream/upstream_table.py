"""docs/upstream.json, and docs/upstream.md that is made from it: upstream's own tests, as run.

python tests/upstream/upstream_table.py
"""

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import evidence

DOCS = Path(__file__).parents[2] / "docs"

HEAD = """\
# Upstream's own tests, under every policy

Made by `nox -s upstream -- TREE` from what its runs wrote ([upstream.json](upstream.json)); not
edited by hand. torch's own pipelining tests, out of its source tree, on the release that they are
of: each test without the plugin first, and those that passed then under each policy. One that no
longer passes is a failure of the plugin. Where there are no two GPUs, Gloo and the CPU are put in
the place of NCCL and GPUs.

| torch | tests of | run on | tests | passed without | {policies} |
|---|---|---|---|---|{lines}|
"""

IN_WORDS = (
    ("Flex attention backward", "the test skips itself: torch has no such backward on the CPU"),
    (
        "'_AdjacencyTestStage' object has no attribute",
        "the tests at hand for 2.13.0 are a best fit, not those that were tagged; this one was "
        "written for a torch of another month",
    ),
)
"""What a person makes of an error of stock torch, by a part of it."""


def add(torch_version: str, entry: dict[str, Any]) -> None:
    """Put a run into the record, in the place of an earlier one of that release."""
    path = DOCS / "upstream.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    record[torch_version] = {**evidence.stamp(), **entry}
    record = dict(sorted(record.items(), key=lambda one: _order(one[0])))
    path.write_text(json.dumps(record, indent=1) + "\n")
    write(record)


def _order(torch_version: str) -> list[int]:
    return [int(part) for part in torch_version.partition("+")[0].split(".")]


def write(record: dict[str, Any], code: str = "") -> None:
    """docs/upstream.md from the whole record, held to the package's code (default: here)."""
    code = code or evidence.fingerprint()
    policies = list(dict.fromkeys(one for entry in record.values() for one in entry["policies"]))
    page = HEAD.format(policies=" | ".join(policies), lines="---|" * (len(policies) - 1) + "---")
    for version, entry in record.items():
        counts = [entry["tests"], entry["passed"], *map(entry["policies"].get, policies)]
        cells = [version + evidence.age(entry, code), entry["tree"], entry["where"]]
        cells += map(str, counts)
        page += f"| {' | '.join(cells)} |\n"
    for version, entry in record.items():
        for title, tests in (("Not compared", "not_compared"), ("Broken", "broken")):
            if entry[tests]:
                page += f"\n## {title} on {version}\n\n"
                by_reason: dict[str, list[str]] = defaultdict(list)
                for test, why in entry[tests].items():
                    by_reason[why].append(test.rpartition("::")[2])
                for why, names in by_reason.items():
                    page += f"- {', '.join(f'`{name}`' for name in names)}: {_inline(why)}"
                    page += "".join(f" ({words})" for part, words in IN_WORDS if part in why)
                    page += "\n"
    (DOCS / "upstream.md").write_text(page + evidence.foot(code))


def _inline(why: str) -> str:
    return f"`{why[:200].replace('`', chr(39))}`" if why else "no reason given"


if __name__ == "__main__":
    write(json.loads((DOCS / "upstream.json").read_text()))
    sys.exit(0)
