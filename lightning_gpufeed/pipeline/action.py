"""One thing that a rank of a pipeline computes. Pure: a value.

::

    2F0     stage 2, forward, microbatch 0
    1I3     stage 1, input gradient, microbatch 3
    1W3     stage 1, weight gradient, microbatch 3
    0B1     stage 0, full backward (input and weight gradient at once), microbatch 1

                stage s-1      stage s        stage s+1
    forward     F ───────────> F ───────────> F
                               │
    backward    I <─────────── I <─────────── I       an arrow: the one is needed by the other
                               │
                               W                      nothing waits for a weight gradient
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

__all__ = ["Action", "Kind"]

Kind = Literal["F", "I", "W", "B"]

_KINDS: dict[str, Kind] = {"F": "F", "I": "I", "W": "W", "B": "B"}


class Action(NamedTuple):
    """One stage's work on one microbatch. Sends are no actions: they follow from what another rank needs.

    Attributes:
        stage: Place of the stage in the model, from 0.
        kind: "F" forward, "I" input gradient, "W" weight gradient, "B" both gradients at once.
        microbatch: Place in the batch, from 0.

    Source:
        The text form is that of `torch.distributed.pipelining`.

    Example:
        >>> Action.parse("2F0")
        Action(stage=2, kind='F', microbatch=0)
        >>> str(Action(1, "I", 3))
        '1I3'
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        """The form that `parse` reads."""
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form.

        Args:
            text: What `str` of an action gives; blanks around it do no harm.

        Returns:
            The action, equal to the one that was written.

        Raises:
            ValueError: The text is no action.
        """
        match = re.fullmatch(r"([0-9]+)([FIWB])([0-9]+)", text.strip())
        if match is None:
            raise ValueError(
                f"{text[:60]!r} is no action; expected a stage, one of F, I, W and B, and a microbatch, such as '2F0'."
            )
        return cls(int(match[1]), _KINDS[match[2]], int(match[3]))

    @property
    def parts(self) -> tuple[Action, ...]:
        """What it computes: itself, or both gradients for a full backward."""
        stage, kind, microbatch = self
        return (Action(stage, "I", microbatch), Action(stage, "W", microbatch)) if kind == "B" else (self,)

    def needs(self, num_stages: int) -> tuple[Action, ...]:
        """What has to be computed before, as parts: an "I" stands for an I or a B.

        Args:
            num_stages: Of the model.

        Returns:
            At most two actions; none for the forward of the first stage.

        Example:
            >>> " ".join(map(str, Action.parse("1B0").needs(num_stages=3)))
            '1F0 2I0'
        """
        stage, kind, microbatch = self
        if kind == "F":
            return (Action(stage - 1, "F", microbatch),) if stage else ()
        if kind == "W":
            return (Action(stage, "I", microbatch),)
        own = Action(stage, "F", microbatch)
        return (own, Action(stage + 1, "I", microbatch)) if stage + 1 < num_stages else (own,)
