"""The version, the changelog and the pin that the README gives agree."""

import datetime
import re
from importlib import metadata
from pathlib import Path

import pp_hookfix

ROOT = Path(__file__).parents[1]
SECTION = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", re.MULTILINE)


def test_the_newest_section_of_the_changelog_is_this_version() -> None:
    sections = SECTION.findall((ROOT / "CHANGELOG.md").read_text())
    versions = [tuple(map(int, version.split("."))) for version, _ in sections]
    dates = [datetime.date.fromisoformat(date) for _, date in sections]
    assert sections[0][0] == pp_hookfix.__version__
    assert versions == sorted(versions, reverse=True)
    assert dates == sorted(dates, reverse=True)


def test_the_readme_pins_this_minor_version() -> None:
    pins = re.findall(r"pp-hookfix~=([\d.]+)", (ROOT / "README.md").read_text())
    assert pins == [pp_hookfix.__version__.rpartition(".")[0]]


def test_the_installed_version_is_this_one() -> None:
    assert metadata.version("pp-hookfix") == pp_hookfix.__version__
