"""When the fix goes in: at once, or as soon as torch's pipeline stages are imported.

``import pp_hookfix`` runs `activate`. Until the stage module is there, two things wait
for it. A finder on ``sys.meta_path`` finds nothing, but is asked for most modules, and
looks. Finders in front of it (import hooks of other packages) keep modules from it, so
from the moment that it sees torch, the module itself tells when the import system sets
``distributed`` on it, and that one when it sets ``pipelining``, which nothing bypasses.
Then `decision` decides.
"""

# Runs at interpreter start (see __init__.py): these are builtin, or loaded by
# every interpreter before it runs a line of ours. All else is imported where
# it is first needed.
import _thread
import sys

from pp_hookfix import settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, Optional

    from pp_hookfix.decision import Status

STAGE_MODULE = "torch.distributed.pipelining.stage"
# Where it is imported from, the nearest first, and the name set on each.
_PARENTS = {"torch.distributed": "pipelining", "torch": "distributed"}

# Held for short changes of the state below, never during an import: another
# thread may hold that import's lock and be waiting for this one.
_lock = _thread.RLock()
_policy = "off"
_why_off = ""
_times_off = 0
_status: "Optional[Status]" = None  # the decision, while it stands
_decided_on: "Optional[ModuleType]" = None  # the stage module that it is of
_brought_by: "Optional[str]" = None  # the file that imported us as the interpreter started


# --- on and off


def activate() -> None:
    """Enable the policy that the environment names; what ``import pp_hookfix`` does.

    Raises:
        ValueError: ``PP_HOOKFIX`` is neither a policy nor ``off``. While the
            interpreter starts, a line on standard error instead.
    """
    global _why_off, _brought_by
    _brought_by = settings.brought_by()
    try:
        policy = settings.policy_of_environment()
    except ValueError as error:
        settings.tell(error)
        _why_off = str(error)
        return
    if policy == "off":
        _why_off = f"{settings.ENVIRONMENT_VARIABLE}=off in the environment: nothing is wrapped."
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
    policy = settings.policy_of(policy)
    with _lock:
        if policy != _policy:
            _policy, _status = policy, None
    if STAGE_MODULE in sys.modules:
        import importlib

        # Waits for a thread that is in the middle of importing it.
        importlib.import_module(STAGE_MODULE)
    stage_module = loaded_stage_module()
    if stage_module is None:
        _wait()
    else:
        on_stage_module(stage_module)


def disable() -> None:
    """Turn the fix off, from the next microbatch on. Mirrors `enable`.

    torch gets its original function back; where another package has wrapped
    ours since, theirs stays and ours passes through. Stages that are built
    stay as they are and train on.
    """
    global _policy, _status, _why_off, _times_off
    with _lock:
        _policy, _status, _times_off = "off", None, _times_off + 1
        _why_off = "pp_hookfix.disable() was called: torch is as it was."
        _stop_waiting()
        _revert()


# --- waiting for the stage module


class _Finder:
    """Finds nothing; asked for a module, it looks what is there by now."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if "torch" in sys.modules:
            _catch_up()


class _NotifyingModule(type(sys)):  # type: ignore[misc]
    """What the nearest parent is while we wait: a module that sees its submodule come."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if _PARENTS.get(self.__name__) == name:
            _catch_up()

    def __reduce__(self) -> "Any":
        # Picklers know modules by their exact class.
        import importlib

        return importlib.import_module, (self.__name__,)


_finder = _Finder()


def _wait() -> None:
    with _lock:
        if _finder not in sys.meta_path:
            sys.meta_path = [_finder, *sys.meta_path]
        nearest = next((name for name in _PARENTS if name in sys.modules), None)
        for name in _PARENTS:
            _set_notifying(name, name == nearest)


def _stop_waiting() -> None:
    # The import system iterates sys.meta_path live, and may be doing so now: find_spec
    # calls us. A new list leaves the running loop on the old one, where it skips no finder.
    sys.meta_path = [finder for finder in sys.meta_path if finder is not _finder]
    for name in _PARENTS:
        _set_notifying(name, False)


def _set_notifying(name: str, tells: bool) -> None:
    # Nobody's own class of modules, nor a lazy one, is taken away.
    module: Any = sys.modules.get(name)
    before, after = (type(sys), _NotifyingModule) if tells else (_NotifyingModule, type(sys))
    if type(module) is before:
        module.__class__ = after


def _catch_up() -> None:
    """Decide if the stage module is there; from within an import, so it raises nothing."""
    if _policy == "off" or _status is not None:
        _stop_waiting()  # somebody has put back a sys.meta_path of before
        return
    stage_module = loaded_stage_module()
    if stage_module is None:
        _wait()
    else:
        on_stage_module(stage_module)


def loaded_stage_module() -> "Optional[ModuleType]":
    """torch's stage module, once its import is over."""
    stage_module = sys.modules.get(STAGE_MODULE)
    if getattr(getattr(stage_module, "__spec__", None), "_initializing", False):
        return None
    return stage_module


# --- the decision


def on_stage_module(stage_module: "ModuleType") -> None:
    """Decide and patch, once torch's stage module is loaded; autowrapt calls it, too.

    Never raises: the import of torch would fail with it.
    """
    global _status, _decided_on
    with _lock:
        _stop_waiting()
    try:
        from pp_hookfix import decision, patch

        policy = _policy
        if policy == "off":
            return
        decided = decision.decide(torch_version() or "", stage_module, policy)
        if decided.state == "patched":
            patch.load(policy)
        with _lock:
            if policy != _policy:  # another thread's, meanwhile
                return
            if decided.state == "patched":
                patch.apply(stage_module, policy, _failed)
            else:
                patch.revert()  # of a policy that was on before
            news = decided != _status
            _status, _decided_on = decided, stage_module
        if news:
            _announce(decided)
    except Exception as error:
        _failed(error)


def _failed(error: Exception) -> None:
    """Give up, in a way that nobody can miss, and leave torch untouched."""
    global _status, _decided_on
    from pp_hookfix.decision import Status

    with _lock:
        _revert()
        version = torch_version() or "(unknown version)"
        _status = failed = Status(
            "unsupported",
            f"torch {version} is left untouched and its stages keep their receive "
            f"buffers: pp_hookfix failed with {type(error).__name__}: {error}.",
            version,
            _policy,
        )
        _decided_on = sys.modules.get(STAGE_MODULE)
    _announce(failed)


def _revert() -> None:
    if "pp_hookfix.patch" in sys.modules:  # else nothing was ever put in
        from pp_hookfix import patch

        patch.revert()


def torch_version() -> "Optional[str]":
    """``torch.__version__``, or None while torch is not imported."""
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
