"""Sessions for developers: ``nox`` runs the first four."""

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
def lint(session: nox.Session) -> None:
    """Lint and check the format."""
    session.install("ruff==0.17.*")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Strict types, of the tests too."""
    session.install(".[test]", TORCH, "mypy==2.4.*", "nox")
    session.run("mypy")


@nox.session
def build(session: nox.Session) -> None:
    """Build the wheel and the sdist, and check what they hold."""
    session.install("build", "twine")
    session.run("python", "tests/check_distributions.py", session.create_tmp())
