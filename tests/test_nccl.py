"""Whether NCCL was tried: all that runs on Gloo runs on it, too, where there are GPUs."""

import pytest
from conftest import BACKENDS, GPUS


def test_nccl_is_tried() -> None:
    if GPUS < 2:
        pytest.skip(f"NCCL takes a GPU for each of 2 ranks, {GPUS} here: tried on Gloo alone")
    assert "nccl" in BACKENDS
