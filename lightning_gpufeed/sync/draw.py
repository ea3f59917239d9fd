"""A step as text, one row for the device and one for the link. Pure.

::

    device  F0--F1--F2--B2------I1--I0--W0--W1--    F forward, I input gradient, W weight gradient, B both
    link    1===................2===........0===    the layers whose gradients are in a bucket; . idle
            ^ sent during the next step's forward
"""

from __future__ import annotations

from lightning_gpufeed.sync.simulate import Span, Timeline

__all__ = ["draw"]

_IDLE = "."
_BUSY = {"device": "-", "link": "="}


def draw(timeline: Timeline, width: int = 100) -> str:
    """Draw one step of the steady state, to scale.

    What is sent during the next step's forward is drawn at the left, where the step before has left the same. What is
    shorter than half a column may be missing, and a label longer than its part is cut.

    Args:
        timeline: From `simulate`.
        width: Columns of a step.

    Returns:
        Two lines.

    Raises:
        ValueError: `width` is not positive.

    Example:
        >>> from lightning_gpufeed.sync.costs import LayerCosts, LinkCosts
        >>> from lightning_gpufeed.sync.plan import SyncPlan
        >>> from lightning_gpufeed.sync.simulate import simulate
        >>> layers = [LayerCosts(name, 1.0, 1.0, 1.0, gradient_bytes=2) for name in "abc"]
        >>> plan = SyncPlan.parse("cross; B2 I1 I0 W0 W1; 2:0-2 0:0-2 1:0-2")
        >>> print(draw(simulate(plan, layers, LinkCosts(0.0, 2.0)), width=36))
        device  F0--F1--F2--B2------I1--I0--W0--W1--
        link    1===................2===........0===
    """
    if width < 1:
        raise ValueError(f"width is {width}; expected at least 1 column.")
    rows = {lane: [_IDLE] * width for lane in _BUSY}
    if timeline.step_seconds > 0:
        scale = width / timeline.step_seconds
        for span in timeline.spans:
            row = rows[span.lane]
            begin, end = round(span.begin * scale), round(span.end * scale)
            for place, letter in enumerate(_label(span).ljust(end - begin, _BUSY[span.lane])[: end - begin]):
                row[(begin + place) % width] = letter
    return "\n".join(f"{lane:<6}  {''.join(row)}" for lane, row in rows.items())


def _label(span: Span) -> str:
    layers = "+".join(map(str, span.layers))
    return layers if span.lane == "link" else f"{span.phase}{layers}"
