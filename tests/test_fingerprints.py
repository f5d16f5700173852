"""Which torch's methods were tried: by fingerprints of their source."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import stand_in

from pp_hookfix import fingerprints
from pp_hookfix.policies import POLICIES

METHOD = "_PipelineStageBase._retrieve_recv_activations"


@pytest.fixture
def stage_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stage module that was read from a file, apart from torch's."""
    (tmp_path / "stage_of_a_vendor.py").write_text(stand_in.STAGE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "stage_of_a_vendor", raising=False)
    return importlib.import_module("stage_of_a_vendor")


def record(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    (folder / "known.json").write_text(text)
    monkeypatch.setattr(fingerprints, "FILE", folder / "known.json")


def test_a_build_that_has_a_releases_code(
    stage_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fingerprints.fingerprints(stage_module)
    assert list(found) == [METHOD]
    other = {METHOD: "another"}
    record(
        monkeypatch,
        tmp_path,
        fingerprints.text({"2.12.0": other, "2.13.0": found, "2.14.0": found}),
    )
    assert fingerprints.tried_as(stage_module, "detach") == ["2.13.0", "2.14.0"]
    assert "torch 2.13.0 to 2.14.0, which was tried" in fingerprints.in_words(["2.13.0", "2.14.0"])
    # Beneath our wrapper, or anybody's, it is the same.
    import functools

    base = stage_module._PipelineStageBase
    original = base._retrieve_recv_activations
    base._retrieve_recv_activations = functools.wraps(original)(lambda *args: original(*args))
    assert fingerprints.fingerprints(stage_module) == found


def test_a_build_unlike_any_release(
    stage_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(monkeypatch, tmp_path, fingerprints.text({"2.13.0": {METHOD: "another"}}))
    assert fingerprints.tried_as(stage_module, "detach") == []
    assert "`pp-hookfix verify` will tell" in fingerprints.in_words([])
    # Every method that a policy wraps must be a release's, and of one release.
    both = {METHOD: "another", "_PipelineStageBase._retrieve_recv_grads": "g"}
    monkeypatch.setattr(fingerprints, "fingerprints", lambda _: both)
    record(
        monkeypatch,
        tmp_path,
        fingerprints.text({"2.12.0": {METHOD: "another"}, "2.13.0": {**both, METHOD: "b"}}),
    )
    assert fingerprints.tried_as(stage_module, "detach") == ["2.12.0"]
    assert fingerprints.tried_as(stage_module, "clone") == []


def test_a_source_that_cannot_be_had(stage_module: ModuleType, tmp_path: Path) -> None:
    source = "def _retrieve_recv_activations(self, fwd_chunk_id): ..."
    # Not "<string>": from 3.13 on that is the source of `python -c`, as a worker is started.
    exec(compile(source, "<nowhere>", "exec"), vars(stage_module))
    made = vars(stage_module)["_retrieve_recv_activations"]
    stage_module._PipelineStageBase._retrieve_recv_activations = made
    assert fingerprints.fingerprints(stage_module) == {METHOD: ""}
    assert fingerprints.tried_as(stage_module, "detach") == []


def test_this_torch_was_tried() -> None:
    torch = pytest.importorskip("torch")
    stage_module = importlib.import_module("torch.distributed.pipelining.stage")
    release = torch.__version__.partition("+")[0]
    if not any(
        release in releases
        for by_source in json.loads(fingerprints.FILE.read_text()).values()
        for releases in by_source.values()
    ):
        pytest.skip(f"torch {release} is not in the record")
    for policy in POLICIES:
        assert release in fingerprints.tried_as(stage_module, policy)
