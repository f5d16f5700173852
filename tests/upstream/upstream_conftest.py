"""The conftest of a run of upstream's tests: each outcome is written down as it falls.

A hang or a crash then costs one test and not the whole file. Copied by
run_upstream.py above the tests, into a folder of its own.
"""

import json
import os
import re
from typing import Any

import pytest

from pp_hookfix import status

RANK, RANKS = os.environ.get("UPSTREAM_RANK"), os.environ.get("UPSTREAM_RANKS")
OUTCOMES = os.environ["UPSTREAM_OUTCOMES"]
_ORDER = ["passed", "skipped", "failed"]
_worst: "dict[str, tuple[str, str]]" = {}


def _write(**what: Any) -> None:
    with open(OUTCOMES, "a") as file:
        file.write(json.dumps(what) + "\n")


def pytest_collection_modifyitems(items: "list[pytest.Item]") -> None:
    classes = {getattr(item, "cls", None) for item in items}
    for case in classes:
        # torch's base class of tests whose ranks stay up from test to test.
        if case is None or not hasattr(case, "rdvz_file"):
            continue
        if RANK is not None and RANKS is not None:
            case.rank, case.world_size = int(RANK), int(RANKS)
            case.rdvz_file = os.path.join(os.path.dirname(OUTCOMES), case.__name__)
        elif RANKS is not None and case.world_size == -2:  # torch's "one for each device"
            case.world_size = int(RANKS)


def pytest_collection_finish(session: pytest.Session) -> None:
    _write(collected=[item.nodeid for item in session.items])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(cannot_collect=_last_error(report.longreprtext))


def pytest_runtest_logstart(nodeid: str) -> None:
    _worst[nodeid] = ("passed", "")
    _write(started=nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if _ORDER.index(report.outcome) > _ORDER.index(_worst[report.nodeid][0]):
        why = report.longrepr
        reason = str(why[-1]) if isinstance(why, tuple) else _last_error(report.longreprtext)
        _worst[report.nodeid] = (report.outcome, reason)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _write(finished=nodeid, outcome=_worst[nodeid][0], why=_worst[nodeid][1])


def pytest_sessionfinish() -> None:
    _write(state=status().state)


def _last_error(text: str) -> str:
    """The line that names the last exception in a traceback, else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit|Failed)\b", line)]
    return (errors or lines or [""])[-1]
