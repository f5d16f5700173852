"""Switching the fix on and off on torch's own stage class, alone and among other wrappers."""

import copy
import importlib
import pickle
import warnings
from collections.abc import Iterator
from typing import Any, Callable, Optional

import pytest
import torch
import wrapt
from conftest import AFFECTED, python

import pp_hookfix
from pp_hookfix import activation, detach, fresh, policies
from pp_hookfix.verification import bare_stage, training

stage_module = importlib.import_module(activation.STAGE_MODULE)
Base = stage_module._PipelineStageBase
NAME = "_retrieve_recv_activations"
ORIGINAL = getattr(vars(Base)[NAME], "__wrapped__", vars(Base)[NAME])

pytestmark = pytest.mark.skipif(
    not AFFECTED, reason=f"torch {torch.__version__} has no persistent receive buffers to patch"
)


@pytest.fixture(autouse=True)
def stock() -> Iterator[None]:
    pp_hookfix.disable()
    setattr(Base, NAME, ORIGINAL)
    yield
    pp_hookfix.disable()
    setattr(Base, NAME, ORIGINAL)
    pp_hookfix.enable()


def methods() -> dict[tuple[str, str], Any]:
    """The methods of torch's stage classes, as they stand."""
    return {
        (cls.__name__, name): method
        for cls in (Base, *Base.__subclasses__())
        for name, method in vars(cls).items()
        if callable(method)
    }


def changed(stock: dict[tuple[str, str], Any]) -> set[str]:
    """Names of the methods that are no longer the same objects."""
    return {name for (cls, name), method in methods().items() if method is not stock[cls, name]}


def wrapped_by(policy: str) -> set[str]:
    """The methods that a policy wraps, of those that this release has."""
    there = {name for _, name in methods()}
    lacks = {
        name
        for name, around in policies.POLICIES[policy].methods.items()
        if around.is_optional and not hasattr(Base, name)
    }
    assert lacks.isdisjoint(there)
    return {*policies.POLICIES[policy].methods} - lacks


def retrieve() -> tuple[torch.Tensor, torch.Tensor]:
    """A receive buffer, and what the stage is handed for it."""
    buffer = torch.arange(4.0, requires_grad=True)
    return buffer, bare_stage.make(buffer)._retrieve_recv_activations(0)[0]


def is_fixed() -> bool:
    buffer, activation = retrieve()
    assert activation.data_ptr() == buffer.data_ptr()
    return activation is not buffer


def test_the_alias() -> None:
    pp_hookfix.enable()
    buffer = torch.arange(8.0).view(2, 4).t().requires_grad_()
    buffer.register_hook(lambda grad: grad)
    buffer.seen = True  # type: ignore[attr-defined]
    buffer.grad = torch.ones_like(buffer)
    activation = bare_stage.make(buffer)._retrieve_recv_activations(0)[0]
    assert activation is not buffer
    assert activation.data_ptr() == buffer.data_ptr()
    assert activation.stride() == buffer.stride()
    assert activation.is_leaf
    assert activation.requires_grad
    assert activation.grad is None
    assert not activation._backward_hooks
    assert not hasattr(activation, "seen")
    # The buffer is as it was.
    assert buffer._backward_hooks
    assert buffer.grad is not None
    assert buffer.is_leaf


def test_a_buffer_that_needs_no_gradient() -> None:
    pp_hookfix.enable()
    buffer = torch.arange(4)
    activation = bare_stage.make(buffer)._retrieve_recv_activations(fwd_chunk_id=0)[0]
    assert activation is not buffer
    assert not activation.requires_grad


def test_a_buffer_made_in_inference_mode() -> None:
    pp_hookfix.enable()
    with torch.inference_mode():
        buffer = torch.zeros(4, requires_grad=True)
    assert detach.alias(buffer).requires_grad
    assert detach.alias(buffer).is_leaf
    assert detach.alias(buffer) is not buffer


@pytest.mark.parametrize("policy", policies.POLICIES)
def test_a_policy_wraps_its_methods_and_puts_them_back(policy: str) -> None:
    stock = methods()
    pp_hookfix.enable(policy)
    assert pp_hookfix.status().state == "patched"
    assert pp_hookfix.status().policy == policy
    assert changed(stock) == wrapped_by(policy)
    pp_hookfix.enable(policy)
    pp_hookfix.disable()
    now = methods()
    assert now.keys() == stock.keys()
    assert all(now[key] is stock[key] for key in stock)


def test_policies_give_way_to_each_other() -> None:
    stock = methods()
    for policy in [*policies.POLICIES, *reversed(policies.POLICIES)]:
        pp_hookfix.enable(policy)
        assert changed(stock) == wrapped_by(policy)
        assert not hasattr(vars(Base)[NAME].__wrapped__, "__wrapped__")


@pytest.mark.parametrize(
    "gone",
    [name for name, around in policies.POLICIES["fresh"].methods.items() if not around.is_optional],
)
def test_a_policy_that_lacks_a_method_is_not_half_applied(
    gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cls in (Base, *Base.__subclasses__()):
        if gone in vars(cls):
            monkeypatch.delattr(cls, gone)
    stock = methods()
    if gone != NAME:
        pp_hookfix.enable("detach")  # gives way all the same
    with pytest.warns(RuntimeWarning, match=f"needs a method _PipelineStageBase.{gone}"):
        pp_hookfix.enable("fresh")
    assert pp_hookfix.status().state == "unsupported"
    assert all(methods()[key] is stock[key] for key in stock)


def test_a_method_that_not_every_release_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("set_local_fwd_input", "set_local_bwd_input"):
        monkeypatch.delattr(Base, name, raising=False)
    pp_hookfix.enable("fresh")
    assert pp_hookfix.status().state == "patched"


def test_the_copy_keeps_the_layout() -> None:
    pp_hookfix.enable("clone")
    buffer = torch.arange(16.0).view(1, 2, 2, 4).to(memory_format=torch.channels_last)
    copy = bare_stage.make(buffer.requires_grad_())._retrieve_recv_activations(0)[0]
    assert copy.stride() == buffer.stride()
    assert copy.data_ptr() != buffer.data_ptr()
    assert torch.equal(copy, buffer)
    assert copy.is_leaf
    assert copy.requires_grad


def just_in_time(buffer: Callable[[], torch.Tensor] = lambda: torch.zeros(4)) -> Any:
    """A stage under `fresh`, prepared as torch's own preparation does."""
    pp_hookfix.enable("fresh")
    stage = bare_stage.make(buffer())
    fresh.take_charge(stage, None, (), {})
    return stage


def receive(stage: Any, value: float) -> torch.Tensor:
    """Receive into what torch posts; the buffer."""
    buffer = bare_stage.post(stage)
    with torch.no_grad():
        buffer.fill_(value)
    return buffer


def test_fresh_takes_the_buffer_out_of_its_descriptor() -> None:
    stage = just_in_time(lambda: torch.empty_strided((4, 2), (1, 4), requires_grad=True))
    assert not list(training.held_buffers(stage))
    first = receive(stage, 1)
    assert bare_stage.post(stage) is first  # asked twice
    assert (first.size(), first.stride(), first.requires_grad) == ((4, 2), (1, 4), True)
    assert stage._retrieve_recv_activations(0)[0] is first
    assert not list(training.held_buffers(stage))
    second = receive(stage, 2)
    assert second is not first
    assert stage._retrieve_recv_activations(fwd_chunk_id=0)[0] is second
    assert torch.equal(first, torch.ones(4, 2))


def test_fresh_says_so_when_nothing_was_received() -> None:
    stage = just_in_time()
    words = "stage 1 has no received activation for microbatch 0 .*fresh.*PP_HOOKFIX=detach"
    with pytest.raises(RuntimeError, match=words):
        stage._retrieve_recv_activations(0)
    receive(stage, 1)
    stage._retrieve_recv_activations(0)
    with pytest.raises(RuntimeError, match=words):
        stage._retrieve_recv_activations(0)
    assert pp_hookfix.status().state == "patched"


def test_what_is_not_there_cannot_be_used() -> None:
    stage = just_in_time(lambda: torch.zeros(4, 2))
    info = stage.args_recv_info[0][0]
    buffer = info.buffer
    assert isinstance(buffer, torch.Tensor)
    words = "receive buffer was used while it has none: under the policy fresh .*=detach or clone"
    uses: list[Callable[[], Any]] = [
        lambda: buffer.sum(),
        lambda: buffer.detach(),
        lambda: buffer[0],
        lambda: buffer.fill_(2),
        lambda: buffer.copy_(torch.zeros(4, 2)),
        lambda: torch.cat([torch.zeros(4, 2), buffer]),
        lambda: torch.add(torch.zeros(4, 2), other=buffer),
        lambda: torch.zeros(4, 2).copy_(buffer),
        lambda: torch.equal(torch.zeros(4, 2), buffer),
        lambda: buffer.numpy(),
        lambda: buffer.data_ptr(),
        lambda: buffer.is_meta,
        lambda: buffer.device,
        lambda: buffer.register_hook(print),
        lambda: bool(buffer),
        lambda: [*buffer],
    ]
    for use in uses:
        with pytest.raises(RuntimeError, match=words):
            use()
    # What torch's own stage module does with it, and what copies a descriptor.
    buffer.grad = None
    buffer.requires_grad_()
    assert "shape=torch.Size([4, 2])" in repr(info)
    for copied in (copy.copy(info), copy.deepcopy(info), pickle.loads(pickle.dumps(info))):
        stage.args_recv_info[0] = (copied,)
        assert receive(stage, 3).requires_grad
        assert torch.equal(stage._retrieve_recv_activations(0)[0], torch.full((4, 2), 3.0))
        with pytest.raises(RuntimeError, match="no received activation"):
            stage._retrieve_recv_activations(0)


def test_a_buffer_that_somebody_set_is_his() -> None:
    stage = just_in_time()
    info = stage.args_recv_info[0][0]
    mine = info.buffer = torch.zeros(4)
    for value in (1.0, 2.0):
        assert receive(stage, value) is mine
        (activation,) = stage._retrieve_recv_activations(0)
        assert torch.equal(activation, mine)
        assert activation.data_ptr() != mine.data_ptr()
        assert info.buffer is mine
    assert "Served by copies" in pp_hookfix.status().reason
    assert "PipelineStage, whose buffers are set by others" in pp_hookfix.status().reason


def test_a_stage_that_was_prepared_before_is_served_by_copies(
    caplog: pytest.LogCaptureFixture,
) -> None:
    buffer = torch.zeros(4)
    buffer.left = "by a step before"  # type: ignore[attr-defined]
    pp_hookfix.enable("fresh")
    stage = bare_stage.make(buffer)
    fresh.served_by_copies.clear()
    for _ in range(3):
        assert receive(stage, 1) is buffer
        (activation,) = stage._retrieve_recv_activations(0)
        assert not hasattr(activation, "left")
        assert activation.data_ptr() != buffer.data_ptr()
    told = "policy fresh serves by copies: PipelineStage, prepared before this policy"
    assert [record.getMessage() for record in caplog.records].count(told) == 1
    assert pp_hookfix.status().reason.endswith("PipelineStage, prepared before this policy.")
    pp_hookfix.enable("detach")
    assert "copies" not in pp_hookfix.status().reason


def test_a_stage_that_overrides_a_method_is_served_by_copies() -> None:
    own: Any = stage_module.PipelineStage

    class Mine(own):  # type: ignore[misc]
        def get_fwd_recv_ops(self, chunk: int) -> Any:
            return super().get_fwd_recv_ops(chunk)

        def of_my_own(self) -> None:
            pass

    class Harmless(own):  # type: ignore[misc]
        def of_my_own(self) -> None:
            pass

    for kind, is_in_charge in ((Mine, False), (Harmless, True)):
        pp_hookfix.enable("fresh")
        stage = bare_stage.make(torch.zeros(4))
        stage.__class__ = kind
        fresh.take_charge(stage, None, (), {})
        posted = receive(stage, 1)
        activation = stage._retrieve_recv_activations(0)[0]
        assert (activation is posted) == is_in_charge
        assert (receive(stage, 2) is posted) == (not is_in_charge)
        assert torch.equal(activation, torch.ones(4))
    reason = pp_hookfix.status().reason
    assert "Mine, which overrides get_fwd_recv_ops" in reason
    assert "Harmless" not in reason


def test_descriptors_have_their_buffers_again_when_fresh_ends() -> None:
    stage = just_in_time(lambda: torch.zeros(4, requires_grad=True))
    put_aside = copy.deepcopy(stage.args_recv_info)
    kept = receive(stage, 1)
    stage._retrieve_recv_activations(0)
    pp_hookfix.enable("detach")
    for infos in (stage.args_recv_info, put_aside):
        stage.args_recv_info = infos
        buffer = receive(stage, 2)
        assert type(buffer) is torch.Tensor
        assert (buffer is kept, buffer.requires_grad) == (False, True)
        (activation,) = stage._retrieve_recv_activations(0)
        assert activation is not buffer
        assert activation.data_ptr() == buffer.data_ptr()
    pp_hookfix.disable()
    assert stage._retrieve_recv_activations(0)[0] is buffer
    pp_hookfix.enable("fresh")
    assert stage._retrieve_recv_activations(0)[0] is not buffer
    assert torch.equal(kept, torch.ones(4))


@pytest.mark.parametrize("policy", [None, *policies.POLICIES])
def test_methods_are_pickled_and_copied_as_functions_are(policy: Optional[str]) -> None:
    pp_hookfix.enable(policy) if policy else pp_hookfix.disable()
    method = stage_module.PipelineStage._retrieve_recv_activations
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(method, protocol)) == method
    assert copy.copy(method) is method
    assert copy.deepcopy({"method": method})["method"] is method
    assert copy.deepcopy(vars(Base)[NAME]) is vars(Base)[NAME]
    assert copy.copy(vars(Base)[NAME]) is vars(Base)[NAME]
    stage = bare_stage.make(torch.ones(4))
    bound = stage._retrieve_recv_activations
    assert copy.copy(bound).__self__ is stage
    for copied in (copy.deepcopy(bound), pickle.loads(pickle.dumps(bound))):
        assert copied.__self__ is not stage
        assert type(copied.__self__) is type(stage)
        assert torch.equal(copied(0)[0], torch.ones(4))
    # What was pickled with the fix loads without, and the other way round.
    pickled = pickle.dumps(method)
    pp_hookfix.disable()
    assert pickle.loads(pickled) is ORIGINAL


def test_what_is_no_receive_buffer_passes_through() -> None:
    buffer, other = torch.zeros(2), torch.ones(2)
    stage = bare_stage.make(buffer)
    result = detach.alias_activations(stage, (None, other, buffer), (0,), {})
    assert result[0] is None
    assert result[1] is other
    assert result[2] is not buffer


def test_on_and_off_in_any_order() -> None:
    assert not is_fixed()
    for _ in range(3):
        pp_hookfix.enable()
        pp_hookfix.enable()
        assert is_fixed()
        assert vars(Base)[NAME].__wrapped__ is ORIGINAL
        pp_hookfix.disable()
        pp_hookfix.disable()
        assert not is_fixed()
        assert vars(Base)[NAME] is ORIGINAL


def test_a_foreign_wrapper_beneath_ours_stays() -> None:
    calls = []

    @wrapt.decorator
    def foreign(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        calls.append(1)
        return wrapped(*args, **kwargs)

    theirs = foreign(ORIGINAL)
    setattr(Base, NAME, theirs)
    pp_hookfix.enable()
    assert is_fixed()
    pp_hookfix.disable()
    assert vars(Base)[NAME] is theirs
    assert not is_fixed()
    assert len(calls) == 2


@pytest.mark.parametrize("tells", [True, False], ids=["with __wrapped__", "plain closure"])
def test_a_foreign_wrapper_above_ours_stays(tells: bool) -> None:
    pp_hookfix.enable()
    beneath = vars(Base)[NAME]
    calls = []

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return beneath.__get__(self, type(self))(*args, **kwargs)

    if tells:
        theirs.__wrapped__ = beneath  # type: ignore[attr-defined]
    setattr(Base, NAME, theirs)
    assert is_fixed()
    pp_hookfix.disable()
    assert vars(Base)[NAME] is theirs
    assert not is_fixed()
    pp_hookfix.enable()
    assert is_fixed()
    # Where theirs tells what it wraps, ours beneath it works again and nothing is added.
    assert (vars(Base)[NAME] is theirs) == tells
    pp_hookfix.disable()
    assert vars(Base)[NAME] is theirs
    assert not is_fixed()
    assert len(calls) == 4


def test_enabling_again_mends_a_patch_that_somebody_removed() -> None:
    pp_hookfix.enable()
    setattr(Base, NAME, ORIGINAL)
    assert not is_fixed()
    pp_hookfix.enable()
    assert is_fixed()


def test_a_failure_of_ours_hands_out_what_torch_did_and_gives_up() -> None:
    pp_hookfix.enable()
    stage = bare_stage.make(torch.zeros(2, requires_grad=True))
    infos = stage.args_recv_info

    class Once(dict):  # type: ignore[type-arg]
        """torch reads it, and what we read is broken."""

        reads = 0

        def __getitem__(self, key: int) -> Any:
            self.reads += 1
            if self.reads > 1:
                raise RuntimeError("broken")
            return super().__getitem__(key)

    stage.args_recv_info = Once(infos)
    with pytest.warns(RuntimeWarning, match=r"pp_hookfix failed with RuntimeError: broken"):
        handed_out = stage._retrieve_recv_activations(0)
    assert handed_out[0] is infos[0][0].buffer
    assert pp_hookfix.status().state == "unsupported"
    assert vars(Base)[NAME] is ORIGINAL


def test_torchs_own_exception_is_the_users() -> None:
    pp_hookfix.enable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError):
            bare_stage.make(torch.zeros(2))._retrieve_recv_activations(7)
    assert pp_hookfix.status().state == "patched"


def test_a_method_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Base, NAME)
    with pytest.warns(RuntimeWarning, match=f"torch .*{NAME}"):
        pp_hookfix.enable()
    assert pp_hookfix.status().state == "unsupported"
    assert torch.__version__ in pp_hookfix.status().reason
    assert NAME not in vars(Base)


@pytest.mark.parametrize(
    "order",
    [
        "import pp_hookfix, torch.distributed.pipelining",
        "import torch, pp_hookfix, torch.distributed.pipelining",
        "import torch.distributed.pipelining, pp_hookfix",
    ],
)
def test_import_order_with_the_real_torch(order: str) -> None:
    script = f"{order}; print(pp_hookfix.status().state)"
    assert python("-c", script).stdout == "patched\n"
