"""The drawings of the page, as inline SVG, and texts made safe for HTML. Pure.

Across, everything is in percent, so a drawing takes the width it is given while its text keeps its size; down, all
is in pixels.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Iterator, Sequence

from lightning_gpufeed.diagnose.counters import Span
from lightning_gpufeed.diagnose.judgement import Cure
from lightning_gpufeed.diagnose.records import Part, printable

__all__ = ["PATTERNS", "draw_gain", "draw_shares", "draw_timeline", "escaped", "prose", "shown_steps", "swatch"]

_NARROWEST = 600  # pixels; the style sheet does not let a timeline become narrower
_DIGIT = 10  # pixels, of the widest usual font at 13 px, with a margin
_TOP, _LANE, _GAP, _AXIS = 26, 34, 10, 30  # pixels
_MAX_TIMELINE_STEPS = 16
_TICKS = 5
_LANES = ("host", "device")

PATTERNS = """<svg width="0" height="0" aria-hidden="true" style="position: absolute"><defs>
<pattern id="idle-pattern" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="6" height="6" style="fill: var(--ground)"/><rect width="2.5" height="6" style="fill: var(--idle)"/>
</pattern>
<pattern id="other-pattern" width="5" height="5" patternUnits="userSpaceOnUse">
<rect width="5" height="5" style="fill: var(--ground)"/><circle cx="2.5" cy="2.5" r="1.1" style="fill: var(--other)"/>
</pattern>
</defs></svg>"""
"""Hatching and dots, referred to by the style sheet; once in a page."""


def escaped(text: str) -> str:
    """Make a text from outside safe inside HTML, also in an attribute.

    Args:
        text: Any.

    Returns:
        HTML.
    """
    return html.escape(printable(text))


def prose(text: str, commands: Iterable[str] = ()) -> str:
    """Make a sentence safe inside HTML, and set as code what is code in it.

    That is what stands between two backticks, each of `commands`, and a call with no argument or with named ones.

    Args:
        text: Such as "`gpufeed inspect a.h5` tells, or set DataLoader(num_workers=4)".
        commands: Lines to type that may be part of the text.

    Returns:
        HTML.
    """
    options = r"(?: --[\w-]+(?:[= ]\d+)?)*"  # an advice may add some to a command
    known = [re.escape(escaped(command)) + options for command in sorted(commands, key=len, reverse=True) if command]
    code = "|".join([*known, r"`[^`]+`", r"[\w.]+\((?:[^()]*=[^()]*)?\)"])
    pattern = re.compile(rf"(?P<code>{code})|(?<=\d) (?=(?:%|s|ms|us|bytes?|[kKMGT]i?B)(?!\w))")

    def marked(found: re.Match[str]) -> str:
        # A number stays on the line of its unit.
        return f"<code>{found['code'].strip('`')}</code>" if found["code"] else "&nbsp;"

    return pattern.sub(marked, escaped(text))


def swatch(part: str) -> str:
    """A small square in the colour of a part.

    Args:
        part: Its name.

    Returns:
        SVG.
    """
    return (
        f'<svg class="swatch" width="12" height="12" aria-hidden="true"><rect class="{part}" width="12" height="12"/>'
        "</svg>"
    )


def draw_shares(parts: Sequence[Part], described: str) -> str:
    """One bar, cut into the parts of a step.

    Args:
        parts: Their shares add up to 1.
        described: The same in words, for those who cannot see it.

    Returns:
        SVG.
    """
    shapes, begin = [], 0.0
    for part in parts:
        if part.share > 0:
            shapes.append(_block(part.name, begin, part.share, 0, 20))
        begin += part.share
    # Cuts between parts wide enough not to vanish behind them, where two colours would touch.
    ends, end = [], 0.0
    for part in parts:
        end += part.share
        ends.append(end)
    cuts = [
        f'<rect class="cut" x="{end * 100:.2f}%" width="1" height="20"/>'
        for part, end in zip(parts, ends, strict=True)
        if part.share > 0.02 and end < 0.98
    ]
    label = f'role="img" aria-label="{escaped(described)}"'
    return f'<svg class="shares" width="100%" height="20" {label}>{"".join(shapes + cuts)}</svg>'


def draw_gain(cures: Iterable[Cure], cure: Cure | None = None) -> str:
    """A range of gains with the likely one as a dot, on an axis that all cures share; the line is at 1, no gain.

    Args:
        cures: All of them.
        cure: The one to draw; None draws the name of the line instead.

    Returns:
        SVG.
    """
    values = [value for one in cures for value in (one.low, one.gain, one.high)]
    least, most = max(0.1, min(0.9, *values)), max(1.1, *values)

    def across(value: float) -> str:
        # By ratio: twice as fast and half as fast are equally far from 1.
        return f"{5 + 90 * math.log(max(value, least) / least) / math.log(most / least):.2f}%"

    if cure is None:
        inside = f'<text x="{across(1)}" y="17" text-anchor="middle">1×</text>'
    else:
        inside = (
            f'<line class="line" x1="{across(1)}" x2="{across(1)}" y1="1" y2="21"/>'
            f'<line class="whisker" x1="{across(cure.low)}" x2="{across(cure.high)}" y1="11" y2="11"/>'
            f'<circle class="dot" cx="{across(cure.gain)}" cy="11" r="5"/>'
        )
    return f'<svg width="100%" height="22" aria-hidden="true">{inside}</svg>'


def shown_steps(spans: Iterable[Span]) -> list[Span]:
    """Keep no more steps of a timeline than can be told apart, and only stretches that last.

    Args:
        spans: In any order.

    Returns:
        Those of the first steps, moved so that the earliest begins at 0.
    """
    lasting = [span for span in spans if span.lane in _LANES and 0 < span.end - span.begin < math.inf]
    steps = set(sorted({span.step for span in lasting})[:_MAX_TIMELINE_STEPS])
    kept = [span for span in lasting if span.step in steps]
    origin = min((span.begin for span in kept), default=0.0)
    moved = [Span(span.lane, span.phase, span.begin - origin, span.end - origin, span.step) for span in kept]
    return sorted(moved, key=lambda span: (span.begin, span.end))


def draw_timeline(spans: Sequence[Span]) -> str:
    """Lanes of the host and, where it has any stretch, of the device, over one axis of time.

    Args:
        spans: As `shown_steps` gives them, at least one.

    Returns:
        HTML with two drawings: the names of the lanes, and the lanes.
    """
    lanes = [lane for lane in _LANES if any(span.lane == lane for span in spans)]
    whole = max(span.end for span in spans)
    bottom = _TOP + len(lanes) * (_LANE + _GAP)
    height = bottom + _AXIS
    names = [f'<text x="0" y="{_TOP - 9}">step</text>', f'<text x="0" y="{bottom + 18}">time</text>']
    shapes: list[str] = []
    for index, lane in enumerate(lanes):
        top = _TOP + index * (_LANE + _GAP)
        names.append(f'<text x="0" y="{top + 22}">{lane}</text>')
        shapes.append(f'<rect class="lane" x="0" y="{top}" width="100%" height="{_LANE}"/>')
        shapes += [_stretch(span, whole, top) for span in spans if span.lane == lane]
    shapes += _step_marks([span for span in spans if span.lane == lanes[0]], whole)
    shapes += _axis(whole, bottom)
    return (
        f'<div class="scroll"><div class="timeline"><svg width="60" height="{height}">{"".join(names)}</svg>'
        f'<svg width="100%" height="{height}" role="img" aria-label="Timeline of a few steps">{"".join(shapes)}</svg>'
        "</div></div>"
    )


def _block(part: str, begin: float, share: float, top: int, height: int, inside: str = "") -> str:
    """A rectangle in the colour of a part."""
    place = f'x="{begin * 100:.3f}%" y="{top}" width="{share * 100:.3f}%" height="{height}"'
    return f'<rect class="{escaped(part)}" {place}>{inside}</rect>'


def _stretch(span: Span, whole: float, top: int) -> str:
    """One stretch in its lane; its length shows when the pointer rests on it."""
    title = f"<title>step {span.step}, {escaped(span.phase)}: {_time_text(span.end - span.begin)}</title>"
    return _block(span.phase, span.begin / whole, (span.end - span.begin) / whole, top, _LANE, title)


def _step_marks(spans: Sequence[Span], whole: float) -> Iterator[str]:
    """Where each step begins, and its number where there is room for it on the narrowest page."""
    free_from = 0.0
    for step in sorted({span.step for span in spans}):
        own = [span for span in spans if span.step == step]
        begin, end = (100 * edge / whole for edge in (min(one.begin for one in own), max(one.end for one in own)))
        half = 50 * _DIGIT * len(str(step)) / _NARROWEST
        middle = min(max((begin + end) / 2, half), 100 - half)
        edge = min(begin, 99.9)
        yield f'<line class="line" x1="{edge:.3f}%" x2="{edge:.3f}%" y1="{_TOP - 6}" y2="{_TOP}"/>'
        if middle - half >= free_from:
            yield f'<text x="{middle:.3f}%" y="{_TOP - 9}" text-anchor="middle">{step}</text>'
            free_from = middle + half


def _axis(whole: float, top: int) -> Iterator[str]:
    """A line with a few round times below it."""
    yield f'<line class="line" x1="0" x2="100%" y1="{top}" y2="{top}"/>'
    unit, scale = ("s", 1.0) if whole >= 2 else ("ms", 1e3) if whole >= 2e-3 else ("us", 1e6)
    spacing = _round_spacing(whole * scale / _TICKS)
    digits = max(0, -math.floor(math.log10(spacing) + 1e-9))
    for tick in range(int(whole * scale / spacing * (1 + 1e-9)) + 1):
        at = 100 * tick * spacing / (whole * scale)
        anchor = "start" if at < 3 else "end" if at > 93 else "middle"
        yield f'<line class="line" x1="{at:.3f}%" x2="{at:.3f}%" y1="{top}" y2="{top + 5}"/>'
        yield f'<text x="{at:.3f}%" y="{top + 18}" text-anchor="{anchor}">{tick * spacing:,.{digits}f} {unit}</text>'


def _round_spacing(least: float) -> float:
    """The next 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))


def _time_text(seconds: float) -> str:
    """Three digits and a unit."""
    if seconds >= 1:
        return f"{seconds:,.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
