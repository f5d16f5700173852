"""A stand-in for the torch package, for what cannot exist in a test's environment.

Another release's internals, a vendor's version string, or any torch at all on
a CPython without one. It has the module names that pp_hookfix waits for and a
stage class with the methods that it wraps, over plain objects.
"""

from pathlib import Path

STAGE = """
class _RecvInfo:
    def __init__(self, input_name, source, buffer):
        self.buffer = buffer


class _PipelineStageBase:
    def __init__(self, buffer=None):
        self.args_recv_info = {0: (_RecvInfo("x", 0, buffer),)}

    def _retrieve_recv_activations(self, fwd_chunk_id):
        return tuple(info.buffer for info in self.args_recv_info[fwd_chunk_id])


class PipelineStage(_PipelineStageBase):
    pass
"""


def make(folder: Path, version: str = "2.13.0", stage: str = STAGE) -> Path:
    """Write a package ``torch`` under `folder`; returns the folder, to go on ``sys.path``."""
    pipelining = folder / "torch" / "distributed" / "pipelining"
    pipelining.mkdir(parents=True)
    (folder / "torch" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (folder / "torch" / "distributed" / "__init__.py").write_text("")
    (pipelining / "__init__.py").write_text("from .stage import PipelineStage\n")
    (pipelining / "stage.py").write_text(stage)
    return folder
