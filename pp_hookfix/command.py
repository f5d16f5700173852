"""The command ``pp-hookfix``, also ``python -m pp_hookfix``."""

import argparse
import contextlib
import importlib
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Callable, Optional

import pp_hookfix
from pp_hookfix import fingerprints, interpreter_startup
from pp_hookfix.activation import STAGE_MODULE
from pp_hookfix.decision import FIRST_AFFECTED, dotted
from pp_hookfix.policies import POLICIES
from pp_hookfix.settings import AUDIT_VARIABLE, ENVIRONMENT_VARIABLE
from pp_hookfix.verification.schedules import LAYOUTS


def main(argv: Optional[list[str]] = None) -> int:
    """Run the command and return its exit status; usage errors exit with 2."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except interpreter_startup.CannotWrite as error:
        print(f"pp-hookfix {arguments.name}: {error}", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pp-hookfix",
        description="Give every pipeline-parallel microbatch its own input activation "
        "on torch 2.4 - 2.14 (upstream issue 185331).",
    )
    parser.add_argument("--version", action="version", version=pp_hookfix.__version__)
    commands = parser.add_subparsers(metavar="COMMAND", dest="name", required=True)

    status = commands.add_parser(
        "status",
        help="say what the fix does with the torch installed here, and whether a new Python "
        "of this environment has it",
        description="Answer three questions: what the fix does with the torch installed here; "
        "whether the code that it wraps is that of a release which was tried; and whether a new "
        "Python of this environment has it, and by what.",
    )
    status.add_argument("--json", action="store_true", help="print one JSON object")
    status.set_defaults(run=_status)

    verify = commands.add_parser(
        "verify",
        help="train real pipelines on the torch installed here, without and with the fix, "
        "and compare hooks, losses and gradients",
        description="Train real pipelines on the torch installed here, without and with the "
        "fix. Exit status: 0 when hooks are constant with the fix (or on a torch that needs "
        "none) and nothing else changed, 1 when not, 2 when it cannot be run. Under torchrun "
        "it uses the ranks that are there: torchrun --nproc-per-node 4 -m pp_hookfix verify",
    )
    verify.add_argument("--ranks", type=_at_least(2), help="processes to start (2)")
    verify.add_argument("--steps", type=_at_least(2), default=5, help="training steps (5)")
    verify.add_argument(
        "--microbatches", type=_at_least(1), default=4, help="microbatches per step (4)"
    )
    verify.add_argument(
        "--schedule",
        action="append",
        choices=list(LAYOUTS),
        metavar="NAME",
        help="a schedule; may be repeated; default: all that this torch has "
        f"({', '.join(LAYOUTS)})",
    )
    verify.add_argument(
        "--policy",
        action="append",
        choices=list(POLICIES),
        metavar="NAME",
        help=f"a policy; may be repeated; default: all ({', '.join(POLICIES)})",
    )
    verify.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        default="auto",
        help="default: nccl where there is a GPU for each rank, else gloo",
    )
    verify.add_argument(
        "--timeout",
        type=_at_least(1),
        default=120,
        metavar="SECONDS",
        help="limit for each schedule, after which a hang ends (120)",
    )
    verify.add_argument("--json", action="store_true", help="print one JSON object")
    verify.set_defaults(run=_verify)

    run = commands.add_parser(
        "run",
        help="run a command with the fix active in it and in all its Python children",
        usage="pp-hookfix run [-h] [--policy NAME] COMMAND [ARGS ...]",
        description="Run a command with the fix active in it and in all its Python children, "
        "for example: pp-hookfix run torchrun --nproc-per-node 8 train.py. Nothing is written "
        "anywhere: a folder with a sitecustomize of ours goes first on PYTHONPATH. Out of reach "
        "is a Python that is started with -E, -I or -S.",
    )
    run.add_argument(
        "--policy",
        choices=[*POLICIES, "off"],
        metavar="NAME",
        help=f"set {ENVIRONMENT_VARIABLE} for the command: {', '.join(POLICIES)} or off",
    )
    audit = commands.add_parser(
        "audit",
        help="run a command and say what the fault does to it, where, and which policy it needs",
        usage="pp-hookfix audit [-h] [--json FILE] COMMAND [ARGS ...]",
        description="Run a training command, of all ranks of this machine, and look meanwhile "
        "at what stock torch does wrong in it: hooks and attributes that pile up on stage inputs, "
        "and inputs or received gradients that are kept and overwritten. It trains to the same "
        "bits. The report comes on standard error when the command has ended, whose exit status "
        "is the command's own.",
    )
    audit.add_argument("--json", metavar="FILE", help="write the report as one JSON object, too")
    activate = commands.add_parser(
        "activate",
        help="have the fix in every Python of this environment, from its start",
        description="Write one small file into this environment's site-packages, by which "
        f"every Python of it has the fix; {ENVIRONMENT_VARIABLE} rules as ever. Exit status: 0 "
        "when a new Python has it, 1 when the file cannot be written.",
    )
    activate.set_defaults(run=_activate)
    deactivate = commands.add_parser("deactivate", help="undo activate")
    deactivate.set_defaults(run=_deactivate)

    # One positional that takes the rest as it is, the command's own options too.
    for command, function in ((run, _run), (audit, _audit)):
        command.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
        command.set_defaults(run=function, error=command.error)
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"{number} is too few: the least is {least}")
        return number

    return whole_number


def _import_pipelining() -> Optional[str]:
    """Import what the fix is for; why that is not possible, or None."""
    try:
        importlib.import_module(STAGE_MODULE)
    except (ImportError, OSError) as error:  # OSError: a library that torch links to is missing
        if sys.modules.get("torch") is None:
            return f"no torch can be imported here ({error})"
        version = sys.modules["torch"].__version__
        return (
            f"torch {version} has no torch.distributed.pipelining, "
            f"which came with {dotted(FIRST_AFFECTED)} ({error})"
        )
    return None


def _status(arguments: argparse.Namespace) -> int:
    lacking = _import_pipelining()
    status = pp_hookfix.status()
    if lacking and status.state != "off":
        status = status._replace(state="not-needed", reason=f"{lacking}: there is nothing to fix.")
    releases = None
    if status.state == "patched":
        releases = fingerprints.tried_as(sys.modules[STAGE_MODULE], status.policy)
    new = interpreter_startup.new_python()
    if arguments.json:
        document = {**status._asdict(), "tried_as": releases, "new_python": new._asdict()}
        print(json.dumps(document))
    else:
        known = "" if releases is None else f" {fingerprints.in_words(releases)}"
        print(f"{status.state}: {status.reason}{known}")
        print(interpreter_startup.in_words(new))
    return 0


def _activate(arguments: argparse.Namespace) -> int:
    print(interpreter_startup.in_words(interpreter_startup.activate()))
    print(f"{interpreter_startup.file()} is what does it; `pp-hookfix deactivate` removes it.")
    return 0


def _deactivate(arguments: argparse.Namespace) -> int:
    was_there = interpreter_startup.deactivate()
    path = interpreter_startup.file()
    print(f"{path} is removed." if was_there else f"{path} is not there: nothing to undo.")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    lacking = _import_pipelining()
    if lacking:
        return _cannot_run(f"{lacking}: pip install 'pp-hookfix[torch]'")
    from pp_hookfix.verification import ranks
    from pp_hookfix.verification.verify import verify

    options = {
        "backend": arguments.backend,
        "timeout": arguments.timeout,
        "steps": arguments.steps,
        "microbatches": arguments.microbatches,
        "names": arguments.schedule,
        "policies": arguments.policy or list(POLICIES),
        "as_json": arguments.json,
    }
    if ranks.started_by_torchrun() and arguments.ranks is not None:
        return _cannot_run("under torchrun the ranks are those that it started: leave --ranks out")
    try:
        if ranks.started_by_torchrun():
            status: int = ranks.run_here(verify, **options)
            return status
        outcome = ranks.start(verify, arguments.ranks or 2, **options)
    except ranks.CannotRun as error:
        return _cannot_run(str(error))
    if outcome.exit_status:
        for rank, log in enumerate(outcome.logs):
            sys.stderr.write(f"--- rank {rank} printed:\n{log}")
        return 1
    return int(max(outcome.results))


def _run(arguments: argparse.Namespace) -> int:
    command = _command_below_us(arguments)
    if arguments.policy is not None:
        os.environ[ENVIRONMENT_VARIABLE] = arguments.policy
    sys.stdout.flush()
    # Python ignores these two, and so would all that it starts.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        return _not_started(arguments, command[0], error)


def _audit(arguments: argparse.Namespace) -> int:
    from pp_hookfix.audit import launch, report

    command = _command_below_us(arguments)
    if arguments.json is not None:
        try:
            open(arguments.json, "w", encoding="utf-8").close()
        except OSError as error:
            arguments.error(f"{arguments.json} cannot be written: {error.strerror}")
    folder = tempfile.mkdtemp(prefix="pp_hookfix-audit-")
    os.environ[AUDIT_VARIABLE] = folder
    try:
        ended = launch.run(command)
        found = report.document(*report.read(Path(folder)), launch.failure(ended))
    except OSError as error:
        return _not_started(arguments, command[0], error)
    finally:
        # Whatever the command left running may still be writing there.
        shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        sys.stderr.write(report.text(found))
        sys.stderr.flush()
    if arguments.json is not None:
        try:
            text = json.dumps(found, indent=1) + "\n"
            Path(arguments.json).write_text(text, encoding="utf-8")
        except OSError as error:
            print(f"pp-hookfix audit: {arguments.json}: {error.strerror}", file=sys.stderr)
    return launch.end_like(ended)


def _command_below_us(arguments: argparse.Namespace) -> list[str]:
    """The command that was given; its Python processes will import us as they start."""
    command: list[str] = arguments.command
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        arguments.error("the following arguments are required: COMMAND")
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap")
    # An empty PYTHONPATH is none; after a separator it would be the working folder.
    existing = os.environ.get("PYTHONPATH")
    if not existing or existing.split(os.pathsep)[0] != folder:
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, existing] if existing else [folder])
    if "opentelemetry-instrument" in map(os.path.basename, command[:1]):
        ours = f"pp-hookfix {arguments.name}"
        print(
            f"{ours}: opentelemetry-instrument starts its command without the fix: put "
            f"{ours} behind it: {command[0]} {ours} ...",
            file=sys.stderr,
        )
    return command


def _not_started(arguments: argparse.Namespace, name: str, error: OSError) -> int:
    """Say that the command cannot be started; the exit status that shells have for it."""
    missing = isinstance(error, FileNotFoundError)
    why = "command not found" if missing else error.strerror
    print(f"pp-hookfix {arguments.name}: {name}: {why}", file=sys.stderr)
    return 127 if missing else 126


def _cannot_run(why: str) -> int:
    if os.environ.get("RANK", "0") == "0":
        print(f"pp-hookfix verify: {why}", file=sys.stderr)
    return 2
