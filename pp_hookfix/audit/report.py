"""The report of ``pp-hookfix audit``: what every process noted, put together."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

Noted = dict[str, Any]

VERDICTS = {
    "nothing": "nothing needed: no hook on a stage's input was called for a later microbatch, and "
    "nothing was kept that the next receive overwrites.",
    "detach": "detach is enough (`import pp_hookfix`, or `pp-hookfix run`): what is put on "
    "a stage's input then ends with its step.",
    "clone or fresh": "needs clone or fresh (PP_HOOKFIX=clone or fresh): it keeps {kept}, which "
    "the next step overwrites, under detach, too.",
}


def read(folder: Path) -> tuple[list[Noted], int]:
    """What processes noted in `folder`, in the order in which they began; and how many began."""
    noted, began = [], 0
    for path in folder.iterdir():
        if path.suffix == ".new":
            continue
        began += 1
        with contextlib.suppress(OSError, ValueError):
            text = path.read_text(encoding="utf-8")
            if text:
                noted.append(json.loads(text))
    return sorted(noted, key=lambda one: float(one["began"])), began


def document(noted: list[Noted], began: int, failed: Optional[str] = None) -> dict[str, Any]:
    """The report as one object, as ``--json`` has it.

    Args:
        noted: what `read` found.
        began: how many Python processes there were.
        failed: how the command ended, in words, unless it succeeded.

    Its ``stages`` have, besides what was seen of each, the ``run`` that they belong to: 1, and
    more where torchrun started its ranks again, or the command several jobs.
    """
    runs = _runs(noted)
    stages = [
        {"run": number, **stage}
        for number, run in enumerate(runs, 1)
        for one in run
        for stage in one["stages"]
    ]
    return {
        "torch_version": next(
            (one["torch_version"] for one in noted if one["torch_version"]), None
        ),
        "ranks": max((len(run) for run in runs), default=0),
        "steps": max(_steps(stages).values(), default=0),
        "runs": len(runs),
        "stages": sorted(stages, key=lambda one: (one["run"], one["rank"], one["stage"])),
        "needs": _needs(noted, stages),
        "notes": [*_notes(noted, began), *_doubts(stages, failed)],
    }


def _runs(noted: list[Noted]) -> list[list[Noted]]:
    """Ranks that ran together: started by one process, in one attempt, each rank once."""
    runs: list[list[Noted]] = []
    for one in noted:
        if not one["stages"]:
            continue
        for run in runs:
            if run[0]["launch"] == one["launch"] and all(
                other["rank"] != one["rank"] for other in run
            ):
                run.append(one)
                break
        else:
            runs.append([one])
    return runs


def _needs(noted: list[Noted], stages: list[dict[str, Any]]) -> Optional[str]:
    """The verdict, a key of `VERDICTS`; None where nothing is known."""
    if any(one["kept_inputs"] or one["kept_gradients"] for one in stages):
        return "clone or fresh"
    if any(one["hooks"] or one["attributes"] for one in stages):
        return "detach"
    if any(one["not_looked_at"] for one in stages) or _lacks_second_step(stages):
        return None
    if stages or any(one["state"] == "not-needed" for one in noted):
        return "nothing"
    return None


def _lacks_second_step(stages: list[dict[str, Any]]) -> bool:
    """Whether no stage was seen to begin a second step, where what is left of one shows.

    A pipeline that is built anew for each has as many stages as steps, each gone with its own.
    """
    return max(_steps(stages).values(), default=0) == 1


def _steps(stages: list[dict[str, Any]]) -> "Counter[tuple[int, int, int]]":
    """By run, rank and index of the stage, whether it is one or is built anew."""
    steps: Counter[tuple[int, int, int]] = Counter()
    for one in stages:
        steps[one["run"], one["rank"], one["stage"]] += one["steps"]
    return steps


def _notes(noted: list[Noted], began: int) -> Iterator[str]:
    """What is not known, and why, a line each."""
    loaded = [one for one in noted if one["state"] != "pending"]
    if not began:
        yield (
            "no Python process of the command could be looked into: is it Python, started "
            "without -E, -I and -S?"
        )
    elif not loaded:
        torch = "torch" if not noted else "torch.distributed.pipelining"
        yield f"none of the command's Python processes ({began}) is known to have imported {torch}."
    for state in ("not-needed", "untried", "unsupported", "bypassed"):
        yield from sorted({one["reason"] for one in loaded if one["state"] == state})
    was_off = any(one["times_off"] for one in loaded)
    if was_off:
        yield (
            "pp_hookfix was switched off by the script (disable()): what ran while it was off "
            "was not looked at."
        )
    seen = [one for one in loaded if one["stages"]]
    is_needed = not any(one["state"] == "not-needed" for one in loaded)
    if loaded and not seen and is_needed and not was_off:
        yield "no pipeline stage was built and ran a step."
    for one in seen:
        rank, step = one["stages"][0]["rank"], max(stage["steps"] for stage in one["stages"])
        if not one["has_ended"]:
            yield (
                f"rank {rank} ended after step {step} without a word (killed?): what is said of "
                "it is what was known by then."
            )
        for stage in one["stages"]:
            for what in stage["not_looked_at"]:
                yield f"not looked at: stage {stage['stage']} (rank {rank}): {what}."


def _doubts(stages: list[dict[str, Any]], failed: Optional[str]) -> Iterator[str]:
    if stages and failed:
        yield f"the command {failed}: what is said is of the steps that it ran."
    if _lacks_second_step(stages):
        yield (
            "only one step was seen, and what is left of a step shows in the next: let it run two "
            "steps or more."
        )


def text(report: dict[str, Any]) -> str:
    """The report for a person."""
    lines = []
    if report["stages"]:
        what = f"torch {report['torch_version']}, {_number(report['ranks'], 'rank')}"
        lines.append(
            f"{what}, {_number(report['steps'], 'step')}: what stock torch does in this job"
        )
    for run in range(1, report["runs"] + 1):
        stages = [stage for stage in report["stages"] if stage["run"] == run]
        if report["runs"] > 1:
            steps = max(_steps(stages).values())
            lines.append(f"run {run} of {report['runs']}, {_number(steps, 'step')}:")
        lines += [f"  {line}" for line in _findings(stages)]
    lines += report["notes"]
    verdict = VERDICTS.get(report["needs"], "verdict: not known.")
    if report["needs"] == "nothing" and not report["stages"]:
        verdict = "nothing needed."  # on this torch, whatever the job does
    lines.append(verdict.format(kept=_how_many_kept(report["stages"])))
    return "".join(
        f"{line}\n" if line.startswith(" ") else f"pp-hookfix audit: {line}\n" for line in lines
    )


def _findings(stages: list[dict[str, Any]]) -> Iterator[str]:
    hooks = _merged(stages, "hooks")
    if hooks:
        yield "hooks on stage inputs are not taken off, and fire again for later microbatches:"
    for hook, where in hooks:
        yield (
            f"    {hook['per_step']} a step, {hook['on_stock_in_last_step']} fired in the last "
            f"step: {hook['kind']}, {_shorter(hook['where'])} ({where})"
        )
        if hook["changes_gradient"] is None:
            yield (
                "        whether it changes the gradient was not looked at: the backward is not "
                "that of torch's schedules."
            )
        if hook["changes_gradient"] and hook["on_stock_in_last_step"] > hook["per_step"]:
            yield (
                "        it changes the gradient, and stock torch applies it again in each later "
                "step: your gradients are wrong, and so are those of this run."
            )
    for stage in stages:
        if stage["pinned_bytes_per_step"]:
            yield (
                f"    they hold tensors that nobody else does: "
                f"{_size(stage['pinned_bytes_per_step'])} more each step, "
                f"{_size(stage['pinned_bytes_on_stock_by_last_step'])} in the end "
                f"({_stages([stage])})"
            )
    for stage in stages:
        if stage["attributes"]:
            names = ", ".join(stage["attributes"])
            yield f"attributes stay on the stage's input: {names} ({_stages([stage])})"
    for key, what in (("kept_inputs", "stage inputs"), ("kept_gradients", "received gradients")):
        kept = _merged(stages, key)
        if kept:
            yield f"{what} are kept, and the next step overwrites them:"
        for one, where in kept:
            yield (
                f"    {one['count']} of shape {tuple(one['shape'])}, since step "
                f"{one['since_step']}: held by {_shorter(one['held_by'])} ({where})"
            )


def _how_many_kept(stages: list[dict[str, Any]]) -> str:
    inputs, gradients = (
        sum(one["count"] for stage in stages for one in stage[key])
        for key in ("kept_inputs", "kept_gradients")
    )
    kept = [(inputs, "stage input"), (gradients, "received gradient")]
    return " and ".join(_number(number, what) for number, what in kept if number)


def _merged(stages: list[dict[str, Any]], key: str) -> list[tuple[dict[str, Any], str]]:
    """Equal findings once, with the stages where they were made."""
    found: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for stage in stages:
        for one in stage[key]:
            found.setdefault(json.dumps(one, sort_keys=True), (one, []))[1].append(stage)
    return [(one, _stages(where)) for one, where in found.values()]


def _stages(stages: list[dict[str, Any]]) -> str:
    indices = sorted({stage["stage"] for stage in stages})
    each = "each of " if len(indices) > 1 else ""
    return f"{each}stage{'s' * (len(indices) > 1)} {', '.join(map(str, indices))}"


def _shorter(place: str) -> str:
    """Paths below the working folder as a person there writes them."""
    return place.replace(os.getcwd() + os.sep, "")


def _number(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _size(number: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            break
        number /= 1024
    return f"{number:.4g} {unit}"
