"""Run every benchmark and write docs/benchmarks.json and docs/benchmarks.md.

    python benchmarks/run.py [--torch-2.15 PYTHON] [NAME ...]

With names, only those; the others stay as they were recorded.
"""

import argparse
import inspect
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any, Callable

import audit
import call
import growth
import memory
import startup
import step
import table
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import evidence

DOCS = Path(__file__).parents[1] / "docs"
BENCHMARKS = {
    "call": call,
    "step": step,
    "audit": audit,
    "growth": growth,
    "startup": startup,
    "memory": memory,
}


def write(recorded: dict[str, Any]) -> None:
    """docs/benchmarks.json, and the page made from it, held to the package's code."""
    code = evidence.fingerprint()
    (DOCS / "benchmarks.json").write_text(json.dumps(recorded, indent=1) + "\n")
    page = (
        "# Benchmarks\n\nMade by `nox -s benchmarks`; not edited by hand. Medians of one run each, "
    )
    page += "against the baseline named in the text.\n"
    for name in BENCHMARKS:
        if name not in recorded:
            continue
        one = recorded[name]
        page += f"\n## {one['title']}\n\n{one['text']}\n\n{table.markdown(one['rows'])}\n"
        page += f"{one['ran']}, torch {one['torch']}, Python {one['python']}, {one['machine']}"
        page += f"{evidence.age(one, code)}.\n"
    (DOCS / "benchmarks.md").write_text(page + evidence.foot(code))


def text_of(module: Any) -> tuple[str, str]:
    """Title and text of a benchmark's page, from its docstring without the usage line."""
    title, _, rest = (inspect.getdoc(module) or "").partition("\n")
    paragraphs = [
        paragraph for paragraph in rest.strip().split("\n\n") if "python " not in paragraph
    ]
    return title.rstrip("."), "\n\n".join(paragraphs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*BENCHMARKS, []], metavar="NAME")
    parser.add_argument("--torch-2.15", dest="python", default="", metavar="PYTHON")
    arguments = parser.parse_args()
    path = DOCS / "benchmarks.json"
    recorded: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in arguments.names or BENCHMARKS:
        print(f"{name} ...", file=sys.stderr, flush=True)
        measure: Callable[..., list[table.Row]] = BENCHMARKS[name].measure
        rows = measure(arguments.python) if name == "memory" else measure()
        title, text = text_of(BENCHMARKS[name])
        recorded[name] = {
            "title": title,
            "text": text,
            **evidence.stamp(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "rows": rows,
        }
        write(recorded)
        print(table.text(rows), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
