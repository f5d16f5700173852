"""What was found at a stage, as ``--json`` has it; what `stages` hands to `report`."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class Hooks:
    """Hooks of one place that outlived the hand-out which they were put on."""

    where: str
    """``file:line function``: the line that registers, and the function that is called."""
    kind: str
    per_step: int
    """The most that one step put on."""
    on_stock_in_last_step: int
    """Calls in the last training step."""
    changes_gradient: Optional[bool]
    """Whether one was seen to return a gradient, or to change one in place; None: not looked at,
    since the backward is not torch's."""


@dataclass
class Kept:
    """Inputs, or received gradients, that somebody held when the next receive wrote over them."""

    count: int
    """The most that were held at once."""
    shape: list[int]
    since_step: int
    held_by: str


@dataclass
class StageFindings:
    """One stage of one process."""

    rank: int
    stage: int
    steps: int
    hooks: list[Hooks]
    attributes: list[str]
    pinned_bytes_per_step: int
    """Bytes of tensors that only such hooks hold: the most that one step added."""
    pinned_bytes_on_stock_by_last_step: int
    """The most of them at any time."""
    kept_inputs: list[Kept]
    kept_gradients: list[Kept]
    not_looked_at: list[str]
    """What this stage does that could not be seen into, a sentence each."""
