"""docs/clients.json, and docs/clients.md that is made from it: real frameworks, as trained.

python tests/clients/clients_table.py
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
# Real frameworks, trained without the plugin and under every policy

Made by `nox -s clients` from what its runs wrote ([clients.json](clients.json)); not edited by
hand. Each framework comes from the package index, in an environment of its own, and trains with
its own trainer or pipeline, over Gloo on the CPU. Each microbatch puts a hook on the input of
every stage. Compared to the last bit with the run without the plugin: losses (of validation,
too), gradient norms, every gradient of every step, every parameter at the end. "Hooks" are those
that fired in each step, at the stage where most did, without the plugin and with it; with it,
under each policy, they are as many as were registered in that step.
"""


def add(name: str, entry: dict[str, Any]) -> None:
    """Put a case into the record, in the place of an earlier run of it."""
    path = DOCS / "clients.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    record[name] = {**evidence.stamp(), **entry}
    path.write_text(json.dumps(record, indent=1) + "\n")
    write(record)


def write(record: dict[str, Any], code: str = "") -> None:
    """docs/clients.md from the whole record, held to the package's code (default: here)."""
    code = code or evidence.fingerprint()
    by_client: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, entry in record.items():
        by_client[entry["client"]][name.partition(": ")[2]] = entry
    page = HEAD
    for client, cases in by_client.items():
        page += f"\n## {client}\n\n"
        policies = list(
            dict.fromkeys(
                policy for entry in cases.values() for policy in entry.get("policies", {})
            )
        )
        titles = ["case", "ranks", "compared", "hooks without", "hooks with", *policies]
        page += f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}\n"
        for name, entry in cases.items():
            row = _row(name + evidence.age(entry, code), entry, policies)
            page += f"| {' | '.join(row)} |\n"
        for name, entry in cases.items():
            for policy, result in entry.get("policies", {}).items():
                for what in result.get("differs", [result.get("failed")]):
                    page += f"\n- {name}, {policy}: `{what}`"
            if "not_compared" in entry:
                page += f"\n{name}: not compared, it fails without the plugin: "
                page += f"`{entry['not_compared'][:300]}`\n"
    (DOCS / "clients.md").write_text(page + evidence.foot(code))


def _row(name: str, entry: dict[str, Any], policies: list[str]) -> list[str]:
    if "not_compared" in entry:
        return [name, str(entry["ranks"]), "not compared", "", "", *[""] * len(policies)]
    hooks = [entry["without"]["hooks"]["fired"]]
    hooks += [
        result["hooks"]["fired"] for result in entry["policies"].values() if "hooks" in result
    ]
    compared = f"{entry['compared']} {entry['unit']}"
    results = [_result(entry["policies"].get(policy)) for policy in policies]
    counts = [" ".join(map(str, one)) or "-" for one in (hooks[0], hooks[-1])]
    return [name, str(entry["ranks"]), compared, *counts, *results]


def _result(result: Any) -> str:
    if result is None:
        return "not run"
    if "failed" in result:
        return "FAILED"
    return "DIFFERS" if result["differs"] else "equal"


if __name__ == "__main__":
    write(json.loads((DOCS / "clients.json").read_text()))
    sys.exit(0)
