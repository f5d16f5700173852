"""What the rewriting of upstream's test files makes of the ways they ask for accelerators."""

from types import SimpleNamespace
from typing import Any

import pytest
from upstream_on_gloo import asks_for_accelerators, on_gloo

# Written for this test: how each release spells it, in the fewest words.
REWRITTEN = [
    ('DEVICE = "cuda"', "DEVICE = ('cpu')"),
    ("x.to('cuda:1')", "x.to(('cpu'))"),
    ("x.to(f'cuda:{self.rank}')", "x.to(('cpu'))"),
    ('x.to(f"{device_type}:{self.rank}")', "x.to(('cpu'))"),
    ("torch.device(device_type, self.rank)", "(torch.device('cpu'))"),
    ('torch.device(f"cuda:{rank % torch.cuda.device_count()}")', "(torch.device('cpu'))"),
    (
        'kind = a.type if (a := torch.accelerator.current_accelerator()) else "cpu"',
        "kind = a.type if (a := (torch.device('cpu'))) else \"cpu\"",
    ),
    ("n = torch.get_device_module(kind).device_count()", "n = (2)"),
    (
        "MANY = torch.cuda.is_available() and torch.cuda.device_count() > 1",
        "MANY = (True) and (2) > 1",
    ),
    ("init(backend='nccl', device_id=self.device)", "init(backend=('gloo'), device_id=(None))"),
    ("dist.barrier(device_ids=[self.rank])", "dist.barrier(device_ids=(None))"),
    ("torch.cuda.set_device(self.device)", "(None)"),
    ("torch.accelerator.set_device_index(self.rank)", "(None)"),
    (
        "skip_if(not TEST_MULTIGPU, f'{backend}: 2+ GPUs')",
        "skip_if(not (True), f'{backend}: 2+ GPUs')",
    ),
    ("if not dist.is_nccl_available(): pass", "if not (True): pass"),
]


@pytest.mark.parametrize(("source", "expected"), REWRITTEN)
def test_what_asks_for_accelerators_is_replaced(source: str, expected: str) -> None:
    assert on_gloo(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "from torch.testing._internal.common_cuda import TEST_MULTIGPU",
        "torch.device('meta')",
        "x = 'a cuda kernel', f'{name}: {x}', b'nccl'",
        "def cuda(nccl='x', *, device=None): return nccl",
    ],
)
def test_what_does_not_stays(source: str) -> None:
    assert on_gloo(source) == source


def test_decorators_go_and_lines_stay() -> None:
    source = """\
class StageTest(Base):
    @requires_accelerator_dist_backend(
        ["nccl", "xccl"],
    )
    @skip_if_lt_x_gpu(2)
    def test(self):
        return "é", torch.device(
            device_type, self.rank
        ), __import__("sys")._getframe().f_lineno
"""
    rewritten = on_gloo(source)
    assert rewritten.count("\n") == source.count("\n")
    namespace: dict[str, Any] = {"Base": object, "torch": SimpleNamespace(device=str)}
    exec(rewritten, namespace)
    assert namespace["StageTest"]().test() == ("é", "cpu", 9)


def test_files_that_ask_for_none_are_told_apart() -> None:
    assert asks_for_accelerators("@skip_but_pass_in_sandcastle_if(not TEST_MULTIGPU, 'why')")
    assert asks_for_accelerators("@requires_accelerator_dist_backend(['nccl', 'xccl'])")
    assert not asks_for_accelerators("devices = ['cpu', 'cuda', 'hpu', 'xpu']")
