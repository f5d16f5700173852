"""Draw docs/hooks.svg from the record of the releases, docs/memory.svg from the benchmarks.

python benchmarks/pictures.py
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

DOCS = Path(__file__).parents[1] / "docs"
# Mid-tones on no background: legible on white and on near-black pages.
INK, STOCK, FIXED, UPSTREAM, COPIES = "#808890", "#d9534f", "#2f9e63", "#4a90d9", "#b5852b"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "pp_hookfix",
    "font.family": "sans-serif",
    "font.size": 11,
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK
    ),
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.transparent": True,
    "legend.frameon": False,
}


def hooks(record: dict[str, Any]) -> None:
    """Hooks fired per step in 1F1B: stock torch, the same with the fix, and torch 2.15."""
    runs: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for version, entry in record.items():
        for schedule in entry.get("verify", {}).get("schedules", []):
            if schedule["schedule"] != "1F1B":
                continue
            affected = entry["verify"]["policies"]["detach"]["state"] == "patched"
            (without,) = schedule["hooks"].values()
            (fixed,) = schedule["policies"]["detach"]["hooks"].values()
            runs.setdefault(("stock" if affected else "upstream", tuple(without)), []).append(
                version
            )
            if affected:
                runs.setdefault(("fixed", tuple(fixed)), []).append(version)
    figure, axes = plt.subplots(figsize=(7.2, 3.6))
    looks: dict[str, dict[str, Any]] = {
        "stock": {"color": STOCK, "marker": "o"},
        "fixed": {"color": FIXED, "marker": "s", "linewidth": 5, "markersize": 9},
        "upstream": {"color": UPSTREAM, "marker": "D", "linestyle": "--"},
    }
    for (kind, counts), versions in sorted(runs.items()):
        steps = range(1, len(counts) + 1)
        label = {
            "stock": f"torch {versions[0]} - {versions[-1]}, as it is",
            "fixed": f"torch {versions[0]} - {versions[-1]}, with pp_hookfix",
            "upstream": f"torch {versions[0]}, as it is",
        }[kind]
        axes.plot(steps, counts, label=label, **looks[kind])
        if kind == "stock":
            for step, count in zip(steps, counts):
                axes.annotate(str(count), (step, count), (-4, 7), textcoords="offset points")
    axes.set_xlabel("training step (4 microbatches, one hook each)")
    axes.set_ylabel("hooks fired in the step")
    axes.set_xticks(steps)
    axes.set_yticks(sorted({0, *(count for _, counts in runs for count in counts)}))
    axes.set_ylim(0)
    axes.legend(loc="upper left")
    figure.savefig(DOCS / "hooks.svg", bbox_inches="tight", metadata={"Date": None})


def memory(rows: list[dict[str, Any]]) -> None:
    """Bytes in receive buffers against the number of microbatches."""
    schedules = sorted({row["schedule"] for row in rows})
    figure, panels = plt.subplots(1, len(schedules), figsize=(9, 3.6), sharey=True)
    looks: dict[str, dict[str, Any]] = {
        "stock": {"color": STOCK, "marker": "o", "linewidth": 5},
        "detach": {"color": INK, "marker": "x"},
        "clone": {"color": COPIES, "marker": "+", "linestyle": ":"},
        "fresh": {"color": FIXED, "marker": "s", "linewidth": 5},
        "torch 2.15": {"color": UPSTREAM, "marker": "D", "linestyle": "--"},
    }
    for axes, schedule in zip(panels, schedules):
        for row, look in looks.items():
            points = [
                (one["microbatches"], one["receive buffers MiB"])
                for one in rows
                if one["schedule"] == schedule and one["row"] == row
            ]
            if points:
                label = "stock torch 2.13" if row == "stock" else row
                axes.plot(*zip(*points), label=label, **look)
        axes.set_title(schedule)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        ticks = sorted({one["microbatches"] for one in rows})
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.yaxis.set_major_formatter(lambda value, position: f"{value:g}")
        axes.set_xlabel("microbatches (activations of 1 MiB)")
    panels[0].set_ylabel("receive buffers of a rank, MiB")
    panels[0].legend(loc="upper left")
    figure.savefig(DOCS / "memory.svg", bbox_inches="tight", metadata={"Date": None})


def main() -> int:
    mpl.rcParams.update(STYLE)
    hooks(json.loads((DOCS / "releases.json").read_text()))
    memory(json.loads((DOCS / "benchmarks.json").read_text())["memory"]["rows"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
