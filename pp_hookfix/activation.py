"""When the fix goes in: at once, or as soon as torch's pipeline stages are imported.

``import pp_hookfix`` runs `activate`. Before torch is imported that leaves a
single finder on ``sys.meta_path``, which waits for the name ``torch``; then a
post-import hook of wrapt waits for the stage module; then `decision` decides.
"""

# Runs at interpreter start (see __init__.py): these are builtin, or loaded by
# every interpreter before it runs a line of ours. All else is imported where
# it is first needed.
import _thread
import os
import sys

from pp_hookfix.policies import DEFAULT, POLICIES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Optional

    from pp_hookfix.decision import Status

ENVIRONMENT_VARIABLE = "PP_HOOKFIX"
STAGE_MODULE = "torch.distributed.pipelining.stage"

# Held for short changes of the state below, never during an import: another
# thread may hold that import's lock and be waiting for this one.
_lock = _thread.RLock()
_policy = "off"
_why_off = ""
_status: "Optional[Status]" = None  # the decision, while it stands
_wrapt_waits = False


def activate() -> None:
    """Enable the policy that the environment names; what ``import pp_hookfix`` does.

    Raises:
        ValueError: ``PP_HOOKFIX`` is neither a policy nor ``off``. While the
            interpreter starts, a line on standard error instead.
    """
    global _why_off
    try:
        policy = _policy_of_environment()
    except ValueError as error:
        if _interpreter_is_starting():
            # Raised here, it would end a sitecustomize half way, and the whole
            # interpreter where autowrapt imports us.
            sys.stderr.write(f"pp_hookfix: {error} {sys.executable} runs without the fix.\n")
            _why_off = str(error)
            return
        if _runs_our_command():
            # A usage error of the command: its one line, not a traceback.
            sys.stderr.write(f"pp-hookfix: {error}\n")
            sys.exit(2)
        raise
    if policy == "off":
        _why_off = f"{ENVIRONMENT_VARIABLE}=off in the environment: nothing is wrapped."
    else:
        enable(policy)


def enable(policy: "Optional[str]" = None) -> None:
    """Turn the fix on, from the next microbatch on. Mirrors `disable`.

    May be called at any time between two steps, before or after torch is
    imported, and any number of times. It goes before ``PP_HOOKFIX=off``.

    Args:
        policy: what stages are handed, a key of ``policies.POLICIES``. Default:
            the one that ``PP_HOOKFIX`` names, else ``detach``. A policy that is
            on gives way to another.

    Raises:
        ValueError: `policy`, or ``PP_HOOKFIX``, is not one of those allowed.
    """
    global _policy, _status
    if policy is None:
        policy = _policy_of_environment()
        if policy == "off":
            policy = DEFAULT
    elif policy not in POLICIES:
        raise ValueError(_not_allowed(f"policy {policy!r}", [*POLICIES]))
    with _lock:
        if policy != _policy:
            _policy, _status = policy, None
    if STAGE_MODULE in sys.modules:
        import importlib

        # Waits for a thread that is in the middle of importing it.
        on_stage_module(importlib.import_module(STAGE_MODULE))
    elif sys.modules.get("torch") is not None:
        _wait_for_stage_module()
    else:
        _wait_for_torch()


def disable() -> None:
    """Turn the fix off, from the next microbatch on. Mirrors `enable`.

    torch gets its original function back; where another package has wrapped
    ours since, theirs stays and ours passes through. Stages that are built
    stay as they are and train on.
    """
    global _policy, _status, _why_off
    with _lock:
        _policy, _status = "off", None
        _why_off = "pp_hookfix.disable() was called: torch is as it was."
        _stop_waiting_for_torch()
        _take_out()


def status() -> "Status":
    """What the fix did, or waits for, in this process; an immutable value.

    Its ``state`` is ``pending`` until ``torch.distributed.pipelining`` is
    imported; then ``patched``, ``not-needed`` or ``unsupported``; or ``off``.
    ``reason`` is one sentence for a person.
    """
    from pp_hookfix.decision import Status

    with _lock:
        if _status is not None:
            return _status
        torch_version = _torch_version()
        if _policy == "off":
            return Status("off", _why_off, torch_version, "off")
        return Status(
            "pending",
            "torch.distributed.pipelining is not imported yet: the decision falls when it is.",
            torch_version,
            _policy,
        )


class _TorchFinder:
    """Finds nothing: notices the import of torch, for one string comparison an import."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname == "torch":
            _wait_for_stage_module()


_torch_finder = _TorchFinder()


def _wait_for_torch() -> None:
    with _lock:
        if _torch_finder not in sys.meta_path:
            sys.meta_path = [_torch_finder, *sys.meta_path]


def _stop_waiting_for_torch() -> None:
    # The import system iterates sys.meta_path live, and may be doing so now: find_spec
    # calls us, and wrapt inserts a finder of its own right after. A new list leaves the
    # running loop on the old one, where it skips no finder and asks none twice.
    sys.meta_path = [finder for finder in sys.meta_path if finder is not _torch_finder]


def _wait_for_stage_module() -> None:
    global _wrapt_waits
    with _lock:
        _stop_waiting_for_torch()
        if _wrapt_waits:
            return
        _wrapt_waits = True
    try:
        import wrapt

        wrapt.register_post_import_hook(on_stage_module, STAGE_MODULE)
    except Exception as error:
        _wrapt_waits = False
        _failed(error)


def on_stage_module(stage_module: "ModuleType") -> None:
    """Decide and patch, once torch's stage module is loaded; a post-import hook of wrapt.

    Never raises: the import of torch would fail with it.
    """
    global _status
    try:
        from pp_hookfix import decision, patch

        with _lock:
            if _policy == "off":
                return
            decided = decision.decide(_torch_version() or "", stage_module, _policy)
            if decided.state == "patched":
                patch.put_in(stage_module, _policy, _failed)
            else:
                patch.take_out()  # of a policy that was on before
            news = decided != _status
            _status = decided
        if news:
            _announce(decided)
    except Exception as error:
        _failed(error)


def _failed(error: Exception) -> None:
    """Give up, in a way that nobody can miss, and leave torch untouched."""
    global _status
    from pp_hookfix.decision import Status

    with _lock:
        _take_out()
        torch_version = _torch_version() or "(unknown version)"
        _status = Status(
            "unsupported",
            f"torch {torch_version} is left untouched and its stages keep their receive "
            f"buffers: pp_hookfix failed with {type(error).__name__}: {error}.",
            torch_version,
            _policy,
        )
        failed = _status
    _announce(failed)


def _take_out() -> None:
    if "pp_hookfix.patch" in sys.modules:  # else nothing was ever put in
        from pp_hookfix import patch

        patch.take_out()


def _torch_version() -> "Optional[str]":
    version = getattr(sys.modules.get("torch"), "__version__", None)
    return None if version is None else str(version)


def _announce(decided: "Status") -> None:
    import logging
    import warnings

    logger = logging.getLogger("pp_hookfix")
    logger.info("%s: %s", decided.state, decided.reason)
    if decided.state == "unsupported":
        try:
            warnings.warn(f"pp_hookfix: {decided.reason}", RuntimeWarning, stacklevel=2)
        except RuntimeWarning as raised:
            # Under -W error a warning would break torch's import or a training step.
            logger.error("%s", raised)


def _policy_of_environment() -> str:
    policy = os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT
    if policy != "off" and policy not in POLICIES:
        raise ValueError(
            _not_allowed(
                f"{ENVIRONMENT_VARIABLE}={policy!r} in the environment", [*POLICIES, "off"]
            )
        )
    return policy


def _interpreter_is_starting() -> bool:
    """Whether ``site`` is what imports us: a sitecustomize, or a ``.pth`` file."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__") != "site":
        frame = frame.f_back
    return frame.f_globals.get("__name__") == "site"


def _runs_our_command() -> bool:
    """Whether this process is ``pp-hookfix`` or (3.10 and later) ``python -m pp_hookfix``."""
    words = getattr(sys, "orig_argv", [])
    return os.path.basename(sys.argv[0] if sys.argv else "") == "pp-hookfix" or (
        "-m" in words and words[words.index("-m") + 1 :][:1] == ["pp_hookfix"]
    )


def _not_allowed(what: str, allowed: "list[str]") -> str:
    return f"{what} is not one of those allowed: {', '.join(allowed)}."
