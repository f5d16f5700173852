"""What a user may ask for: a policy, in the environment or of ``enable()``."""

# Runs at interpreter start (see __init__.py).
import os
import sys

from pp_hookfix.policies import AUDIT, DEFAULT, POLICIES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

ENVIRONMENT_VARIABLE = "PP_HOOKFIX"
# Set by `pp-hookfix audit`: the folder for what each process saw.
AUDIT_VARIABLE = "PP_HOOKFIX_AUDIT"


def policy_of(argument: "Optional[str]") -> str:
    """The policy that ``enable(argument)`` asks for.

    Raises:
        ValueError: it, or what ``PP_HOOKFIX`` says, is not one of those allowed.
    """
    if argument is None:
        policy = policy_of_environment()
        return DEFAULT if policy == "off" else policy
    if argument not in POLICIES and not (argument == AUDIT and is_audited()):
        raise ValueError(_not_allowed(f"policy {argument!r}", [*POLICIES]))
    return AUDIT if is_audited() else argument


def policy_of_environment() -> str:
    """What ``PP_HOOKFIX`` asks for: a policy, or ``off``. Empty is unset.

    Raises:
        ValueError: it is neither.
    """
    if is_audited():
        return AUDIT
    policy = os.environ.get(ENVIRONMENT_VARIABLE) or DEFAULT
    if policy != "off" and policy not in POLICIES:
        raise ValueError(
            _not_allowed(
                f"{ENVIRONMENT_VARIABLE}={policy!r} in the environment", [*POLICIES, "off"]
            )
        )
    return policy


def is_audited() -> bool:
    """Whether ``pp-hookfix audit`` started this process: it looks, whatever else is asked for."""
    return bool(os.environ.get(AUDIT_VARIABLE))


def _not_allowed(what: str, allowed: "list[str]") -> str:
    return f"{what} is not one of those allowed: {', '.join(allowed)}."


def tell(error: ValueError) -> None:
    """Tell of a wrong ``PP_HOOKFIX`` as the way in can bear it.

    Raises:
        ValueError: `error`, where a script imports us. While the interpreter starts,
            nothing: it would end a sitecustomize half way, and the whole interpreter
            where autowrapt imports us.
        SystemExit: in our own command, a usage error.
    """
    if brought_by() is not None:
        sys.stderr.write(f"pp_hookfix: {error} {sys.executable} runs without the fix.\n")
    elif _runs_our_command():
        sys.stderr.write(f"pp-hookfix: {error}\n")
        sys.exit(2)
    else:
        raise error


def brought_by() -> "Optional[str]":
    """The file by which ``site`` imports us while the interpreter starts, or None.

    A sitecustomize, or a ``.pth`` file, whose lines run in the globals of ``site`` itself.
    """
    frame, file = sys._getframe(), None
    while frame.f_back is not None and frame.f_globals.get("__name__") != "site":
        if not frame.f_code.co_filename.startswith("<"):
            file = frame.f_code.co_filename
        frame = frame.f_back
    if frame.f_globals.get("__name__") != "site":
        return None
    while frame.f_back is not None and "fullname" not in frame.f_locals:
        frame = frame.f_back
    return str(frame.f_locals.get("fullname", file))


def _runs_our_command() -> bool:
    """Whether this process is ``pp-hookfix`` or (3.10 and later) ``python -m pp_hookfix``."""
    words = getattr(sys, "orig_argv", [])
    return os.path.basename(sys.argv[0] if sys.argv else "") == "pp-hookfix" or (
        "-m" in words and words[words.index("-m") + 1 :][:1] == ["pp_hookfix"]
    )
