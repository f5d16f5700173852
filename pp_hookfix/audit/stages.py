"""What was seen of each stage, step by step, and what that amounts to."""

import os
import weakref
from collections import Counter
from typing import Any

import torch

from pp_hookfix.audit.findings import Hooks, Kept, StageFindings
from pp_hookfix.audit.hooks import Place


class Stage:
    """One of torch's stages, as it was seen to train."""

    def __init__(self, stage: Any) -> None:
        self.rank = _rank()
        self.index: int = stage.stage_index
        self.trained = self.evaluated = 0  # steps
        self.period = 0  # counts both
        self.is_cleared_by_schedule = False
        # Directions in which it received, and was handed something, by torch's own means.
        self.posted: set[str] = set()
        self.handed: set[str] = set()
        self.not_looked_at: set[str] = set()
        # Of hooks, in this step and the most of any; `again` are calls of hooks that were put
        # on for an earlier hand-out, and `left` hooks that were there at the next.
        self.put_on: Counter[Place] = Counter()
        self.again: Counter[Place] = Counter()
        self.left: Counter[Place] = Counter()
        self.most_put_on: Counter[Place] = Counter()
        self.most_again: Counter[Place] = Counter()
        self.most_left: Counter[Place] = Counter()
        self.fired: Counter[Place] = Counter()
        """Calls in the last training step."""
        self.changing: set[Place] = set()
        self.unseen: set[Place] = set()  # in a backward that is not torch's
        self.attributes: set[str] = set()
        self.pinned = self.most_pinned = self.most_pinned_in_step = 0
        self._pinned_in_step = 0
        self.kept: dict[tuple[str, tuple[int, ...], str], Kept] = {}

    @property
    def step(self) -> int:
        return self.trained or self.evaluated

    def begin_step(self, is_training: bool) -> None:
        self.period += 1
        if is_training:
            self.trained += 1
            self.fired.clear()
        else:
            self.evaluated += 1

    def end_step(self) -> None:
        for most, now in (
            (self.most_put_on, self.put_on),
            (self.most_again, self.again),
            (self.most_left, self.left),
        ):
            most |= now
            now.clear()
        # What hooks of a step hold is known in the next, when their code is over.
        self._pinned_in_step = 0
        for direction in self.posted - self.handed:
            self.not_looked_at.add(f"it takes a received {direction} by code of its own")

    def note_pinned(self, size: int, is_news: bool) -> None:
        """Bytes that hooks hold, of the last step or (counted anew) of earlier ones."""
        if is_news:
            self._pinned_in_step += size
            self.most_pinned_in_step = max(self.most_pinned_in_step, self._pinned_in_step)
        self.pinned += size
        self.most_pinned = max(self.most_pinned, self.pinned)

    def note_kept(self, direction: str, shape: tuple[int, ...], held_by: str) -> None:
        key = (direction, shape, held_by)
        # It was handed out in the step before the one that overwrites it.
        first = Kept(0, list(shape), max(self.step - 1, 1), held_by)
        self.kept.setdefault(key, first).count += 1

    def findings(self) -> StageFindings:
        hooks = [
            Hooks(
                place.where,
                place.kind,
                number,
                self.fired[place],
                True if place in self.changing else None if place in self.unseen else False,
            )
            for place, number in (self.most_put_on | self.put_on).items()
            # As often as they were put on is as it should be, and so is one that is left to be
            # taken off in the next step.
            if (self.most_again | self.again)[place] or (self.most_left | self.left)[place] > number
        ]
        return StageFindings(
            self.rank,
            self.index,
            self.step,
            hooks,
            sorted(self.attributes),
            self.most_pinned_in_step if hooks else 0,
            self.most_pinned if hooks else 0,
            self._kept("input"),
            self._kept("gradient"),
            sorted(self.not_looked_at),
        )

    def _kept(self, direction: str) -> list[Kept]:
        return [kept for (of, _, _), kept in self.kept.items() if of == direction]


def _rank() -> int:
    if torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK") or 0)


_by_stage: "weakref.WeakKeyDictionary[Any, Stage]" = weakref.WeakKeyDictionary()
_all: list[Stage] = []


def of(stage: Any) -> Stage:
    """The record of one of torch's stages."""
    seen = _by_stage.get(stage)
    if seen is None:
        seen = _by_stage[stage] = Stage(stage)
        _all.append(seen)
    return seen


def every() -> list[Stage]:
    return list(_all)


def forget() -> None:
    """What a process saw from which this one was forked."""
    _by_stage.clear()
    _all.clear()
