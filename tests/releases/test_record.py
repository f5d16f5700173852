"""The decision module against the record of the releases (docs/releases.json)."""

import json
from pathlib import Path
from typing import Any

import evidence
import pytest
import releases_table
from test_decision import FRESH, JUST_IN_TIME, module

from pp_hookfix import fingerprints
from pp_hookfix.decision import decide
from pp_hookfix.policies import POLICIES

RECORD = Path(__file__).parents[2] / "docs" / "releases.json"
RELEASES: dict[str, Any] = {
    version: entry
    for version, entry in json.loads(RECORD.read_text()).items()
    if "schedules" in entry.get("verify", {})
}


def piles_up(entry: dict[str, Any]) -> bool:
    """Whether stock torch's hooks grew with the steps, in any schedule."""
    return any(
        counts[-1] > counts[0]
        for schedule in entry["verify"]["schedules"]
        for counts in schedule["hooks"].values()
    )


@pytest.mark.parametrize("version", RELEASES)
def test_the_decision_is_what_the_release_was_seen_to_do(version: str) -> None:
    entry = RELEASES[version]
    expected = "patched" if piles_up(entry) else "not-needed"
    assert {status["state"] for status in entry["verify"]["policies"].values()} == {expected}
    source = FRESH if piles_up(entry) else JUST_IN_TIME
    for policy in POLICIES:
        assert decide(entry["build"]["torch"], module(source), policy).state == expected


@pytest.mark.parametrize("version", RELEASES)
def test_the_release_was_seen_to_work_under_every_policy(version: str) -> None:
    verify = RELEASES[version]["verify"]
    assert verify["exit_status"] == 0
    assert verify["ok"] is True
    assert set(verify["policies"]) == set(POLICIES)
    for schedule in verify["schedules"]:
        for result in schedule["policies"].values():
            assert all(
                counts == [schedule["microbatches"]] * verify["steps"]
                for counts in result["hooks"].values()
            )


def test_the_table_is_made_from_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = (RECORD.parent / "releases.md").read_text()
    monkeypatch.setattr(releases_table, "DOCS", tmp_path)
    monkeypatch.setattr(releases_table, "PACKAGE", tmp_path)
    code = evidence.code_of(RECORD.parent / "releases.md")
    releases_table.write(json.loads(RECORD.read_text()), code)
    assert (tmp_path / "releases.md").read_text() == table
    shipped = fingerprints.FILE
    assert (tmp_path / shipped.name).read_text() == shipped.read_text()
