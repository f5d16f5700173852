"""The recorder's own questions: which releases are there, and which parts a record lacks."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import record_releases

RECORDER = str(Path(record_releases.__file__))


@pytest.mark.parametrize(
    ("listed", "newer"),
    [
        ("2.15.0, 2.14.1, 2.13.0", []),
        ("2.16.0, 2.15.1, 2.15.0, 2.14.2, 2.14.1", ["2.15.1", "2.16.0"]),
        ("3.0.0, 2.16.0+cpu, 2.16.0rc1, 2.16.0.post1, 2.15.0", ["3.0.0"]),
    ],
)
def test_a_final_release_that_the_index_has_since(
    monkeypatch: pytest.MonkeyPatch, listed: str, newer: list[str]
) -> None:
    def run(command: list[str], limit: float) -> Any:
        printed = f"torch (9.9.9)\nAvailable versions: {listed}\n  INSTALLED: 9.9.9+cpu\n"
        return subprocess.CompletedProcess(command, 0, printed.partition("  INST")[0], "")

    monkeypatch.setattr(record_releases, "run", run)
    assert record_releases.newer_releases() == newer


def test_no_index_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(command: list[str], limit: float) -> Any:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(record_releases, "run", run)
    assert record_releases.newer_releases() == []
    assert "the package index does not tell" in capsys.readouterr().err


def test_an_unknown_release_is_a_usage_error() -> None:
    result = subprocess.run(
        [sys.executable, RECORDER, "wheel", "2.3.1"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "2.3.1 is no final release with pipelining: 2.4.0, 2.4.1" in result.stderr
