"""The picture of feed.py: a bar for each arm, warm and cold."""

from __future__ import annotations

import math

from feed_arms import Arm, Measured
from feed_table import BOUND, USUAL, Results, median_of, ordered, rate

LABEL, PANEL, VALUE, ROW, TOP, GAP = 258, 152, 84, 21, 108, 70
COLORS = {"ours": "#0072b2", "usual": "#d55e00", "no cache": "#e69f00", "chunks": "#e69f00", "npy": "#56b4e9"}
PEER = "#8a8f98"
FULL_SHUFFLE = 0.9
PANELS = {
    "warm": ("in the page cache", [("A", "64x64"), ("B", "224x224")]),
    "cold": ("evicted before each epoch", [("A", "64x64"), ("B", "224x224")]),
}
LEGEND = [
    ("H5Loader", "#0072b2"),
    ("h5py as usual", "#d55e00"),
    ("h5py, made faster", "#e69f00"),
    (".npy map", "#56b4e9"),
    ("other formats", PEER),
]


def draw(results: Results) -> str:
    """Panels two by two, as far as they were measured."""
    column, parts, top = LABEL + PANEL + VALUE, [], TOP
    for section, (name, panels) in PANELS.items():
        of = results.sections.get(section, {})
        there = [(title, of[on]) for on, title in panels if on in of and of[on].answers]
        for number, (title, measured) in enumerate(there):
            parts.append(_panel(measured, f"{title}, {name}", 14 + number * column, top))
        if there:
            top += max(len(_arms(measured)) for _, measured in there) * ROW + GAP
    width, height = 14 + 2 * column, top - 24
    head = [
        '<text x="14" y="26" font-size="17" font-weight="bold">One epoch in random order, batches of 256</text>',
        '<text x="14" y="46" fill="#555">Right of a bar: GB/s, and times the usual DataLoader + h5py. '
        "Pale: not a full shuffle.</text>",
        _legend(14, 68),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="12" fill="#222" role="img">\n'
        f"<title>Rates of reading HDF5 and other formats in random order</title>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join([*head, *parts]) + "\n</svg>\n"
    )


def _arms(measured: Measured) -> list[Arm]:
    return [arm for arm in ordered(measured) if not arm.is_bound]


def _legend(left: int, y: int) -> str:
    parts = []
    for name, color in LEGEND:
        parts.append(f'<rect x="{left}" y="{y - 10}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{left + 18}" y="{y}">{name}</text>')
        left += 40 + round(6.4 * len(name))
    parts.append(f'<path d="M{left + 6} {y - 11}v14" stroke="#222" stroke-width="1.5" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{left + 18}" y="{y}">the bound: a plain read by one thread</text>')
    return "\n".join(parts)


def _step(end: float) -> float:
    """A round distance, for at most five marks."""
    return next(s * 10.0**p for p in range(-3, 6) for s in (1, 2, 5) if end / (s * 10.0**p) <= 5)


def _panel(measured: Measured, title: str, left: int, top: int) -> str:
    arms, bound, usual = _arms(measured), rate(measured, BOUND), rate(measured, USUAL)
    fastest = max([rate(measured, arm.name) or 0.0 for arm in arms] + [bound or 0.0]) / 1e9
    zero, bottom = left + LABEL, top + len(arms) * ROW
    end = 1.04 * fastest

    def x(gigabytes: float) -> float:
        return zero + PANEL * gigabytes / end

    parts = [f'<text x="{left}" y="{top - 6}" font-size="13.5" font-weight="bold">{title}</text>']
    step = _step(end)
    for number in range(math.floor(end / step) + 1):
        parts.append(f'<path d="M{x(number * step):.1f} {top}V{bottom}" stroke="#e4e4e4"/>')
        parts.append(
            f'<text x="{x(number * step):.1f}" y="{bottom + 16}" text-anchor="middle">{number * step:g}</text>'
        )
    parts.append(f'<text x="{x(end / 2):.1f}" y="{bottom + 33}" text-anchor="middle">GB/s</text>')
    if bound:
        parts.append(
            f'<path d="M{x(bound / 1e9):.1f} {top - 2}V{bottom}" stroke="#222" stroke-width="1.5" '
            'stroke-dasharray="4 3"/>'
        )
    for row, arm in enumerate(arms):
        value = rate(measured, arm.name) or 0.0
        classes = median_of(measured, arm.name, "classes")
        is_pale = classes is not None and classes < FULL_SHUFFLE
        y, color = top + row * ROW, COLORS.get(arm.kind, PEER)
        weight = ' font-weight="bold"' if arm.kind == "ours" else ""
        length = max(x(value / 1e9) - zero, 1.0)
        parts.append(f'<text x="{zero - 8}" y="{y + 15}" text-anchor="end"{weight} font-size="11.5">{arm.name}</text>')
        parts.append(
            f'<rect x="{zero}" y="{y + 4}" width="{length:.1f}" height="{ROW - 7}" fill="{color}" '
            f'fill-opacity="{0.4 if is_pale else 1}"/>'
        )
        times = f" · {value / usual:.{1 if value < 10 * usual else 0}f}x" if usual else ""
        text = f"{value / 1e9:.{1 if value >= 1e9 else 2}f}{times}"
        at = max(zero + length, 0) + 5
        halo = 'stroke="#fff" stroke-width="3" paint-order="stroke"'
        parts.append(f'<text x="{at:.1f}" y="{y + 15}"{weight} font-size="11.5" {halo}>{text}</text>')
    parts.append(f'<path d="M{zero} {top}V{bottom}" stroke="#222"/>')
    return "\n".join(parts)
