"""The runner of real frameworks, on a pipeline and on tests of ours that end in every way."""

import json
import sys
from pathlib import Path
from typing import Any

import clients_table
import evidence
import pytest
import run_clients
from conftest import AFFECTED, TORCH, python

from pp_hookfix.policies import POLICIES

affected = pytest.mark.skipif(not AFFECTED, reason="nothing piles up on this torch")
CLIENT = run_clients.Client("none", "any")
ONE = run_clients.Case("one", CLIENT, "train_stand_in.py")
STEPS = [4, 4, 4]


def compared(driver: str, *policies: str, itself: bool = False, **options: Any) -> dict[str, Any]:
    case = run_clients.Case("one", CLIENT, driver, options, 2, itself)
    return run_clients.compare(case, Path(sys.executable), list(policies))


@affected
def test_the_same_to_the_last_bit_or_not_and_hooks_that_pile_up() -> None:
    entry = compared("train_stand_in.py", "detach", "fresh", under="fresh")
    # 3 x 4 losses, 2 gradients on 2 ranks in each step, 2 parameters on 2 ranks.
    assert (entry["compared"], entry["unit"]) == (12 + 12 + 4, "values")
    assert entry["without"]["hooks"] == {"registered": STEPS, "fired": [4, 8, 12]}
    assert entry["policies"]["detach"] == {
        "hooks": {"registered": STEPS, "fired": STEPS},
        "differs": [],
    }
    assert "rank 1: gradient 0 weight" in entry["policies"]["fresh"]["differs"]
    assert not run_clients.is_ok(ONE, entry)
    del entry["policies"]["fresh"]
    assert run_clients.is_ok(ONE, entry)


@affected
@pytest.mark.full
def test_the_plugin_may_come_after_the_stages() -> None:
    entry = compared("train_stand_in.py", "clone", itself=True)
    assert entry["without"]["hooks"]["fired"] == [4, 8, 12]
    assert entry["policies"]["clone"]["differs"] == []


def test_a_run_that_the_plugin_did_not_come_into_is_no_run_with_it() -> None:
    rank = {"kept": [["loss", "0"]], "hooks": {"1": [STEPS, [4, 8, 12]]}, "plugin": None}
    result = run_clients.result_of([rank], [rank], "detach", unit_tests=False)
    assert result["differs"] == ["the plugin was None", "hooks pile up, or are lost"]


def test_the_line_that_tells_why_a_run_failed() -> None:
    log = """Error running lspci: not found
    raise ValueError("no")
[rank1]: torch.some.OutOfMemoryError: no more
ChildFailedError:
"""
    assert run_clients.last_error(log) == "torch.some.OutOfMemoryError: no more"
    assert run_clients.last_error(log + "Timeout (0:00:10)!\n") == "Timeout (0:00:10)!"
    assert run_clients.last_error("killed\n\n") == "killed"
    assert run_clients.last_error("") == "it printed nothing"


def test_more_or_other_values_differ() -> None:
    one, other = ["loss", "float 1"], ["loss", "float 2"]
    assert run_clients.differences([one], [one], in_order=True) == []
    assert run_clients.differences([other], [one], in_order=True) == ["loss"]
    (longer,) = run_clients.differences([one, one], [one], in_order=True)
    assert longer == "1 values without the plugin, 2 with it"


@pytest.mark.skipif(TORCH == (0, 0), reason="there is no torch here")
def test_what_fails_without_the_plugin_is_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    entry = compared("train_stand_in.py", "detach", raises="no such layer")
    assert entry["not_compared"] == "ValueError: no such layer"
    assert "policies" not in entry
    # Nothing was compared, which is no success but where it is known.
    assert not run_clients.is_ok(ONE, entry)
    assert run_clients.is_ok(ONE._replace(fails_on_stock=True), entry)
    assert "no such layer" in capsys.readouterr().err


def test_a_frameworks_own_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    entry = compared("stand_in_unit_tests", "detach")
    assert (entry["compared"], entry["unit"]) == (2, "tests")
    (lost,) = entry["policies"]["detach"]["differs"]
    assert lost.endswith("::test_passes_without_the_plugin")


def test_the_page_is_made_from_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (clients_table.DOCS / "clients.md").read_text()
    code = evidence.code_of(clients_table.DOCS / "clients.md")
    record = json.loads((clients_table.DOCS / "clients.json").read_text())
    monkeypatch.setattr(clients_table, "DOCS", tmp_path)
    clients_table.write(record, code)
    assert (tmp_path / "clients.md").read_text() == page


def test_every_case_is_in_the_record_and_none_differs() -> None:
    record = json.loads((clients_table.DOCS / "clients.json").read_text())
    cases = {f"{case.client}: {case.name}": case for case in run_clients.CASES}
    assert set(record) == set(cases)
    for name, entry in record.items():
        assert run_clients.is_ok(cases[name], entry), name
        assert "not_compared" in entry or set(entry["policies"]) == set(POLICIES)


def test_a_typo_is_a_usage_error_that_says_what_there_is() -> None:
    result = python(run_clients.__file__, "some.whl", "torchtitn")
    assert result.returncode == 2
    assert "no case matches torchtitn; there are" in result.stderr
    assert "graph_pp: its unit tests" in result.stderr
