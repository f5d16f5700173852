"""In the place of a framework's own tests: one of them fails where the plugin is."""

import os

import pytest


def test_passes() -> None:
    pass


def test_passes_without_the_plugin() -> None:
    assert "PP_HOOKFIX" not in os.environ


def test_fails() -> None:
    raise AssertionError


@pytest.mark.skip
def test_is_skipped() -> None:
    pass
