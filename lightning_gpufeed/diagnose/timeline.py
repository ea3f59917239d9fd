"""Which steps the timeline shows, and from when on. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpufeed.diagnose.counters import Span

__all__ = ["NUM_SHOWN", "ShownStep", "Stretch", "lay_out"]

NUM_SHOWN = 8
"""Steps."""
_FEW = 4

Stretch = tuple[str, float, float]
"""What was done, from when to when."""
ShownStep = tuple[int, list[Stretch]]
"""A step's number, and what was done in it."""


def lay_out(host: Sequence[ShownStep], device: Sequence[ShownStep], *, is_sampled: bool) -> tuple[Span, ...]:
    """The latest few steps, stretch by stretch; where there is a device, the latest ones that it has finished.

    Args:
        host: Steps in their order.
        device: The same of the device; empty on the CPU.
        is_sampled: Whether steps may be missing in between. Steps that follow each other are shown then.

    Returns:
        In seconds from the beginning of the first of them.
    """
    shown = list(device or host)
    if is_sampled:
        shown = _latest_run(shown)
    numbers = {number for number, _ in shown[-NUM_SHOWN:]}
    lanes = [
        (name, [one for one in steps if one[0] in numbers]) for name, steps in (("host", host), ("device", device))
    ]
    zero = min((spans[0][1] for _, kept in lanes for _, spans in kept if spans), default=0.0)
    return tuple(
        Span(lane, phase, begin - zero, end - zero, number)
        for lane, kept in lanes
        for number, spans in kept
        for phase, begin, end in spans
    )


def _latest_run(steps: list[ShownStep]) -> list[ShownStep]:
    """The latest steps without one left out between them; if they are few, those of the run before."""
    runs: list[list[ShownStep]] = []
    for one in steps:
        if runs and one[0] == runs[-1][-1][0] + 1:
            runs[-1].append(one)
        else:
            runs.append([one])
    if len(runs) > 1 and len(runs[-1]) < min(_FEW, len(runs[-2])):
        return runs[-2]
    return runs[-1] if runs else []
