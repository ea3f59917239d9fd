"""A step as text, as a picture and as a trace. Pure.

::

    rank 0  F0 F1 .  .  .  B0--- B1---    F forward, I input gradient, W weight gradient, B both; the microbatch; . idle
    rank 1  .  F0 F1 B0--- B1--- .  .
"""

from __future__ import annotations

import html
import json

from lightning_gpufeed.pipeline.action import Kind
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.simulate import Span, StageCosts, Timeline, simulate

__all__ = ["chrome_trace", "draw", "draw_svg"]

_IDLE, _BUSY = ".", "-"

# Any two stay apart for readers with any kind of colour blindness, and the text of each stands out from it;
# tests/pipeline/test_draw.py simulates it.
_LOOKS: dict[Kind, tuple[str, str, str]] = {
    "F": ("#0b7bcb", "#000000", "forward"),
    "I": ("#d45911", "#000000", "input gradient"),
    "W": ("#94d1bd", "#000000", "weight gradient"),
    "B": ("#673248", "#ffffff", "full backward"),
}
_INK = "#777777"  # stands out from white and from black alike
_TOP, _LEFT, _ROW, _BOX = 34, 64, 36, 30  # pixels
_NARROWEST, _WIDEST, _BOX_WIDTH = 480, 1600, 22  # pixels
_DIGIT = 8  # pixels


def draw(drawn: Schedule | Timeline, width: int | None = None) -> str:
    """Draw a step as text, one row for each rank.

    An action is its kind and microbatch; where a rank has several stages, its stage comes first: `4F0`.

    Args:
        drawn: A schedule is drawn with equal costs, a timeline to scale.
        width: Columns of a step, each wide enough for the name of an action. Without, the shortest action has one: one
            for each second of a schedule. What is shorter than half a column may be missing.

    Returns:
        The rows.

    Raises:
        ValueError: `width` is not positive.
        ScheduleError: The schedule cannot be carried out.

    Example:
        >>> from lightning_gpufeed.pipeline.generators import zero_bubble
        >>> print(draw(zero_bubble(2, 3)))
        rank 0  F0 F1 .  I0 W0 F2 I1 W1 I2 W2
        rank 1  .  F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    timeline = drawn if isinstance(drawn, Timeline) else simulate(drawn, StageCosts())
    if width is None:
        shortest = min((span.end - span.begin for span in timeline.spans if span.end > span.begin), default=1.0)
        width = max(1, round(timeline.step_seconds / shortest))
    if width < 1:
        raise ValueError(f"width is {width}; expected at least 1 column.")
    cell = 1 + max((len(_label(span, timeline)) for span in timeline.spans), default=0)
    rows = [[_IDLE.ljust(cell)] * width for _ in timeline.busy_seconds]
    scale = width / timeline.step_seconds if timeline.step_seconds else 0.0
    for span in timeline.spans:
        begin, end = round(span.begin * scale), round(span.end * scale)
        if end > begin:
            label, size = _label(span, timeline), cell * (end - begin)
            text = label.ljust(size - 1, _BUSY if end - begin > 1 else " ") + " "
            rows[span.rank][begin:end] = [text[i : i + cell] for i in range(0, size, cell)]
    name = len(f"rank {len(rows) - 1}")
    return "\n".join(f"{f'rank {i}':<{name}}  {''.join(row)}".rstrip() for i, row in enumerate(rows))


def _label(span: Span, timeline: Timeline) -> str:
    stage, kind, microbatch = span.action
    return f"{kind}{microbatch}" if timeline.num_virtual == 1 else f"{stage}{kind}{microbatch}"


def draw_svg(timeline: Timeline) -> str:
    """Draw a step as a Gantt chart, for a page or a file.

    The microbatch is in the box; where a rank has several stages, its stage is below. The ground is transparent and all
    text can be read on white and on black.

    Args:
        timeline: From `simulate`.

    Returns:
        SVG.

    Example:
        >>> from lightning_gpufeed.pipeline.generators import gpipe
        >>> draw_svg(simulate(gpipe(2, 2), StageCosts())).startswith("<svg")
        True
    """
    step = timeline.step_seconds
    shortest = min((span.end - span.begin for span in timeline.spans if span.end > span.begin), default=step)
    wanted = _BOX_WIDTH * step / shortest if shortest else 0.0
    across = min(max(wanted, _NARROWEST), _WIDEST)
    scale = across / step if step else 0.0
    num_ranks = len(timeline.busy_seconds)
    height, width = _TOP + _ROW * num_ranks + 28, _LEFT + round(across) + 12
    said = f"step {step:.4g} s, idle {timeline.bubble_ratio:.1%}"
    shapes = [_legend(timeline), *(_row(rank, across) for rank in range(num_ranks))]
    shapes += [_box(span, timeline, scale) for span in timeline.spans if span.end > span.begin]
    shapes.append(f'<text x="{_LEFT}" y="{height - 9}">{said}</text>')
    described = f"{num_ranks} ranks of a pipeline: {said}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{_INK}" role="img" '
        f'aria-label="{html.escape(described)}">\n' + "\n".join(shapes) + "\n</svg>\n"
    )


def _legend(timeline: Timeline) -> str:
    """Names of the kinds that there are."""
    kinds = {span.action.kind for span in timeline.spans}
    parts, left = [], _LEFT
    for kind, (colour, ink, name) in _LOOKS.items():
        if kind in kinds:
            parts.append(
                f'<rect x="{left}" y="7" width="18" height="18" rx="2" fill="{colour}"/>'
                f'<text x="{left + 9}" y="20.5" text-anchor="middle" fill="{ink}">{kind}</text>'
                f'<text x="{left + 25}" y="20.5">{name}</text>'
            )
            left += 48 + _DIGIT * len(name)
    return "".join(parts)


def _row(rank: int, across: float) -> str:
    """The name of a rank, and a line under its boxes where it is idle."""
    middle = _TOP + _ROW * rank + _BOX / 2
    return (
        f'<text x="4" y="{middle + 4.5:g}">rank {rank}</text>'
        f'<line x1="{_LEFT}" x2="{_LEFT + across:.2f}" y1="{middle:g}" y2="{middle:g}" stroke="{_INK}" '
        f'stroke-opacity="0.5"/>'
    )


def _box(span: Span, timeline: Timeline, scale: float) -> str:
    """One action; what it is in full appears under the pointer."""
    stage, kind, microbatch = span.action
    colour, ink, name = _LOOKS[kind]
    left, wide, top = _LEFT + span.begin * scale, (span.end - span.begin) * scale, _TOP + _ROW * span.rank
    gap = min(1.0, wide / 4)  # between boxes, so that two of a kind stay two
    title = f"{span.action}: {name} of stage {stage}, microbatch {microbatch}, {span.begin:.4g} to {span.end:.4g} s"
    texts, has_stage = "", timeline.num_virtual > 1
    if wide >= _DIGIT * len(str(microbatch)) + 4:
        y = top + (14 if has_stage else 19.5)
        texts = f'<text x="{left + wide / 2:.2f}" y="{y:g}" text-anchor="middle" fill="{ink}">{microbatch}</text>'
    if has_stage and wide >= 6 * len(f"s{stage}") + 4:
        texts += (
            f'<text x="{left + wide / 2:.2f}" y="{top + 26}" text-anchor="middle" font-size="9" fill="{ink}">'
            f"s{stage}</text>"
        )
    return (
        f'<g><title>{title}</title><rect x="{left:.2f}" y="{top}" width="{wide - gap:.2f}" height="{_BOX}" rx="2" '
        f'fill="{colour}"/>{texts}</g>'
    )


def chrome_trace(timeline: Timeline) -> str:
    """Write a step for chrome://tracing and Perfetto.

    Args:
        timeline: From `simulate`.

    Returns:
        JSON: a row for each rank, times in microseconds.

    Example:
        >>> from lightning_gpufeed.pipeline.generators import gpipe
        >>> events = json.loads(chrome_trace(simulate(gpipe(1, 1), StageCosts())))["traceEvents"]
        >>> [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
        [('0F0', 0.0, 1000000.0), ('0B0', 1000000.0, 2000000.0)]
    """
    events: list[dict[str, object]] = [
        {"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(len(timeline.busy_seconds))
    ]
    for span in timeline.spans:
        stage, kind, microbatch = span.action
        events.append(
            {
                "name": str(span.action),
                "cat": _LOOKS[kind][2],
                "ph": "X",
                "pid": 0,
                "tid": span.rank,
                "ts": span.begin * 1e6,
                "dur": (span.end - span.begin) * 1e6,
                "args": {"stage": stage, "microbatch": microbatch},
            }
        )
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
