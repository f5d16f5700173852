"""Print a benchmark's rows for a person, or as JSON, or as Markdown."""

import argparse
import json
from typing import Any

Row = dict[str, Any]


def markdown(rows: list[Row]) -> str:
    """A Markdown table; the rows have the same keys."""
    head = list(rows[0])
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(str(row[key]) for key in head)} |" for row in rows]
    return "\n".join(lines) + "\n"


def text(rows: list[Row]) -> str:
    """Aligned columns."""
    cells = [
        [str(key) for key in rows[0]],
        *([str(value) for value in row.values()] for row in rows),
    ]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() + "\n"
        for line in cells
    )


def show(rows: list[Row], as_json: bool) -> None:
    """Print to standard output."""
    print(json.dumps(rows) if as_json else text(rows), end="\n" if as_json else "")


def parser(docstring: str) -> argparse.ArgumentParser:
    """With the flag that all benchmarks have."""
    made = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", action="store_true", help="print rows as JSON")
    return made
