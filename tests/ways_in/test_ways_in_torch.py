"""The ways in with the real torch: torchrun, spawn and fork, and the example as it is."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import AFFECTED, python

import pp_hookfix

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pp_hookfix.__file__).parents[1]
EXAMPLE = ROOT / "examples" / "train_pipeline.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
RUN = ("-m", "pp_hookfix", "run", "--")
PILED_UP = [4, 8, 12] if AFFECTED else [4, 4, 4]


def collected(output: str) -> list[int]:
    """Gradients that the example collected at the boundary, by step."""
    return [int(count) for count in re.findall(r"stage 0-1: (\d+) gradients", output)]


def losses(output: str) -> list[str]:
    return re.findall(r"loss (\S+)", output)


def example(*before: str, **options: Any) -> str:
    result = python(*before, *TORCHRUN, str(EXAMPLE), "--steps", "3", **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_example_under_torchrun(tmp_path: Path) -> None:
    plain = example(cwd=tmp_path)
    fixed = example(*RUN, sys.executable, cwd=tmp_path, env={"PYTHONPATH": str(PACKAGE)})
    assert collected(plain) == PILED_UP
    assert collected(fixed) == [4, 4, 4]
    assert losses(plain) == losses(fixed)
    assert len(losses(plain)) == 3


def test_the_example_under_opentelemetry(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.instrumentation")
    env = {f"OTEL_{kind}_EXPORTER": "none" for kind in ("TRACES", "METRICS", "LOGS")}
    env["PYTHONPATH"] = str(PACKAGE)
    instrument = (str(Path(sys.executable).with_name("opentelemetry-instrument")), sys.executable)
    fixed = example(*instrument, *RUN, sys.executable, cwd=tmp_path, env=env)
    assert collected(fixed) == [4, 4, 4]


@pytest.mark.parametrize("way", ["typeguard", "sys.meta_path put back"])
def test_patched_behind_other_import_hooks(way: str) -> None:
    if way == "typeguard":
        pytest.importorskip("typeguard")
        between = "from typeguard import install_import_hook\n"
        between += "install_import_hook('torch.distributed.pipelining')\n"
    else:
        between = "sys.meta_path[:] = before\n"
    script = "import sys; before = list(sys.meta_path)\nimport pp_hookfix, torch\n" + between
    script += "from torch.distributed.pipelining import PipelineStage\n"
    script += "print(hasattr(PipelineStage._retrieve_recv_activations, '__wrapped__'))\n"
    script += "print(type(torch.distributed) is type(sys), pp_hookfix.status().state)"
    result = python("-c", script, env={"PYTHONPATH": str(PACKAGE)})
    expected = "True\nTrue patched\n" if AFFECTED else "False\nTrue not-needed\n"
    assert result.stdout == expected, result.stderr


@pytest.mark.full
def test_the_example_under_sitecustomize(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import pp_hookfix\n")
    env = {"PYTHONPATH": f"{tmp_path}:{PACKAGE}"}
    assert collected(example(env=env)) == [4, 4, 4]
    assert collected(example(env={**env, "PP_HOOKFIX": "off"})) == PILED_UP


def test_the_example_tells_how_to_start_it() -> None:
    result = python(str(EXAMPLE), env={"RANK": None})
    assert result.returncode == 2
    assert "start it with torchrun" in result.stderr


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_torch_multiprocessing(method: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import sys
import torch.multiprocessing as mp

def child(rank):
    import torch.distributed.pipelining
    import pp_hookfix
    print(pp_hookfix.status().state, flush=True)

if __name__ == "__main__":
    mp.start_processes(child, nprocs=2, start_method=sys.argv[1])
"""
    )
    env = {"PYTHONPATH": str(PACKAGE)}
    result = python(*RUN, sys.executable, str(script), method, env=env)
    expected = "patched" if AFFECTED else "not-needed"
    assert result.stdout.split() == [expected] * 2, result.stderr
