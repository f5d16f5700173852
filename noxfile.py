"""Sessions for developers (CONTRIBUTING.md); ``nox`` runs the first four."""

import shutil
from pathlib import Path

import nox

nox.options.sessions = ["tests", "lint", "types", "build"]
nox.options.default_venv_backend = "uv|virtualenv"

TORCH = "torch==2.13.0"


@nox.session
def tests(session: nox.Session) -> None:
    """Every test, against one affected torch; `-- ARGS` go to pytest."""
    session.install(".[test]", TORCH)
    session.run("pytest", *session.posargs)


@nox.session
def tests_in_full(session: nox.Session) -> None:
    """Every test of the whole matrix; `-- ARGS` go to pytest."""
    session.install(".[test]", TORCH)
    session.run("pytest", "-m", "", *session.posargs)


@nox.session
def release_check(session: nox.Session) -> None:
    """Fail unless every record is of the code that is here; say what makes what is missing."""
    session.run("python", "tests/evidence.py")


@nox.session
def evidence(session: nox.Session) -> None:
    """Make every record that is not of the code that is here: `-- TREE ...` for upstream's tests.

    One environment at a time, and one record after the other, each as it was made; interrupted,
    it goes on where it was.
    """
    missing = session.run("python", "tests/evidence.py", "--missing", silent=True) or ""
    sessions = str(missing).split()
    for number, name in enumerate(sessions, 1):
        session.log(f"[{number}/{len(sessions)}] {name}; then: {' '.join(sessions[number:])}")
        for arguments in [[tree] for tree in session.posargs] if name == "upstream" else [[]]:
            command = ("nox", "-s", name, *(["--", *arguments] if arguments else []))
            session.run(*command, external=True, success_codes=[0, 1])
    session.run("python", "tests/evidence.py")


@nox.session(python=["3.9", "3.10", "3.11", "3.12", "3.13", "3.14"])
@nox.parametrize("wrapt", ["1.14.*", "1.17.*", ">=2"])
def pythons(session: nox.Session, wrapt: str) -> None:
    """The tests that need no torch, on every CPython here and with old and new wrapts."""
    specifier = wrapt if wrapt.startswith(">") else f"=={wrapt}"
    session.install(
        ".", f"wrapt{specifier}", "pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.7"
    )
    session.run("pytest", *session.posargs)


@nox.session
def releases(session: nox.Session) -> None:
    """The record of every torch from 2.4 on: all that it lacks, or `-- VERSIONS`.

    A release is 3 to 5 GB, installed, tried and removed before the next.
    """
    session.install(".[dev]")
    wheel = built_wheel(session)
    session.run("python", "tests/releases/record_releases.py", wheel, *session.posargs)


@nox.session
def ways_in(session: nox.Session) -> None:
    """Every way in with the real tools (uv, pipx, ddtrace, PEX, ...), into docs/ways-in.md."""
    session.install(".[dev]")
    wheel = built_wheel(session)
    session.install("autowrapt>=2", wheel)
    session.run("python", "tests/ways_in/try_ways_in.py", wheel)


def built_wheel(session: nox.Session) -> str:
    """The project's wheel, made anew."""
    folder = Path(session.create_tmp()) / "dist"
    shutil.rmtree(folder, ignore_errors=True)
    session.run("python", "-m", "build", "--wheel", "--outdir", str(folder))
    (wheel,) = folder.glob("*.whl")
    return str(wheel.resolve())


@nox.session
def upstream(session: nox.Session) -> None:
    """torch's own pipelining tests, without the plugin and under each policy: `-- TREE`.

    TREE is a torch source tree; the torch installed is of the release that it is of. A whole
    run goes into docs/upstream.json; `-- TREE FILE`, `-k` and `--policy` are for some.
    """
    if not session.posargs:
        session.error("give a torch source tree: nox -s upstream -- TREE (docs/developing.md)")
    version = Path(session.posargs[0]).expanduser() / "version.txt"
    if not version.is_file():
        session.error(f"{session.posargs[0]} is no torch source tree: it has no version.txt")
    # As it stands there: 2.12.0a0 in the tree of 2.12.0.
    release = version.read_text().partition("a")[0].strip()
    session.install(".[test]", f"torch=={release}")
    whole = ["--record"] if len(session.posargs) == 1 else []
    session.run("python", "tests/upstream/run_upstream.py", *session.posargs, *whole)


@nox.session
def clients(session: nox.Session) -> None:
    """torchtitan and NeMo Automodel, trained without the plugin and under each policy.

    `-- CASES` are for some, by a part of their names. An environment is 5 to 8 GB, and removed.
    """
    session.install(".[dev]")
    wheel = built_wheel(session)
    session.run("python", "tests/clients/run_clients.py", wheel, *session.posargs)


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Every benchmark, into docs/; `-- NAMES` for some. Needs a quiet machine."""
    session.install(".[test]", TORCH, "matplotlib")
    names = session.posargs
    options: list[str] = []
    if not names or "memory" in names:
        # torch 2.15's row, from an environment of its own.
        folder = Path(session.create_tmp()) / "torch-2.15"
        session.run("python", "-m", "venv", "--clear", str(folder))
        python = str(folder / "bin" / "python")
        install = (python, "-m", "pip", "install", "--quiet", "--no-cache-dir")
        session.run(*install, ".", "torch==2.15.*", external=True)
        options = ["--torch-2.15", python]
    session.run("python", "benchmarks/run.py", *options, *names)
    session.run("python", "benchmarks/pictures.py")


@nox.session
def lint(session: nox.Session) -> None:
    """Lint and check the format."""
    session.install(".[dev]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types, of the tests too."""
    session.install(".[test,dev]", TORCH)
    session.run("mypy")


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheel and the sdist, and check what they hold."""
    session.install(".[dev]")
    session.run("python", "tests/check_distributions.py", session.create_tmp())
