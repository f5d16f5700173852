"""Print a benchmark's rows for a person, or as JSON, or as Markdown."""

import argparse
import json
import statistics
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


def timed(taken: dict[str, list[float]], baseline: str) -> list[Row]:
    """Rows of seconds taken, with their ratio to the baseline's median."""
    of_baseline = statistics.median(taken[baseline])
    return [
        {
            "row": name,
            "median ms": round(1e3 * statistics.median(times), 2),
            "quartiles ms": " - ".join(
                f"{1e3 * quartile:.2f}" for quartile in statistics.quantiles(times, n=4)[::2]
            ),
            f"over {baseline}": round(statistics.median(times) / of_baseline, 3),
        }
        for name, times in taken.items()
    ]


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
