"""The record of upstream's own tests, and the page that is made from it."""

import json
from pathlib import Path

import evidence
import pytest
import upstream_table

DOCS = upstream_table.DOCS
RECORD = json.loads((upstream_table.DOCS / "upstream.json").read_text())


@pytest.mark.parametrize("version", RECORD)
def test_what_passed_without_the_plugin_passed_under_every_policy(version: str) -> None:
    entry = RECORD[version]
    assert entry["broken"] == {}
    assert set(entry["policies"].values()) == {entry["passed"]}
    assert entry["passed"] + len(entry["not_compared"]) == entry["tests"]


def test_the_page_is_made_from_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (upstream_table.DOCS / "upstream.md").read_text()
    monkeypatch.setattr(upstream_table, "DOCS", tmp_path)
    code = evidence.code_of(DOCS / "upstream.md")
    upstream_table.write(RECORD, code)
    assert (tmp_path / "upstream.md").read_text() == page


def test_what_was_not_compared_is_said_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(upstream_table, "DOCS", tmp_path)
    skipped = "skipped: Skipped: Flex attention backward is not supported on CPU"
    entry = {
        **{"tree": "1.0", "where": "here", "tests": 3, "passed": 1},
        **{"policies": {"detach": 0}, "broken": {"detach: a.py::test_b": "failed: no"}},
        "not_compared": {"a.py::test_c": skipped, "a.py::test_d": skipped},
    }
    upstream_table.write({"1.0": entry})
    page = (tmp_path / "upstream.md").read_text()
    assert f"- `test_c`, `test_d`: `{skipped}` (the test skips itself: torch has no such" in page
    assert "## Broken on 1.0\n\n- `test_b`: `failed: no`\n" in page
