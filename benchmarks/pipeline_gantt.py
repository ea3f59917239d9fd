"""The pictures of a step in the README: GPipe, fast-forward, and fast-forward with modulo allocation. Simulated.

    python benchmarks/pipeline_gantt.py [--svg FILE.svg]

4 ranks, 4 microbatches, 16 layers whose forward, input and weight gradient take equally long; sends cost nothing. All
three have the same axis, so they are put together from the parts of `pipeline.draw_svg`, not from its pictures.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from lightning_gpufeed.pipeline.draw import _LOOKS
from lightning_gpufeed.pipeline.generators import fast_forward, gpipe
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.simulate import Span, StageCosts, Timeline, simulate

NUM_RANKS, NUM_MICROBATCHES, NUM_LAYERS = 4, 4, 16
LEFT, TOP, ROW, BOX, UNIT = 148, 86, 36, 22, 10.6  # pixels
HEAD, FOOT, GAP = 14, 56, 30  # pixels


def charts() -> list[tuple[str, str, Schedule]]:
    """What is drawn: a name, what it does, the schedule."""
    per_rank = NUM_LAYERS // NUM_RANKS
    return [
        ("GPipe", "a stage computes both gradients, then sends one on", gpipe(NUM_RANKS, NUM_MICROBATCHES)),
        (
            "Fast-forward",
            "the input gradient is sent on before the weight gradient is computed",
            fast_forward(NUM_RANKS, NUM_MICROBATCHES),
        ),
        (
            "Fast-forward + modulo",
            "and layer k is on rank k mod 4, so that the next rank can begin sooner",
            fast_forward(NUM_RANKS, NUM_MICROBATCHES, per_rank),
        ),
    ]


def layers_of(schedule: Schedule, stage: int) -> range:
    """The layers of a stage."""
    size = NUM_LAYERS // schedule.num_stages
    return range(stage * size, (stage + 1) * size)


def timeline_of(schedule: Schedule) -> Timeline:
    """In seconds of one pass of one layer."""
    size = float(NUM_LAYERS // schedule.num_stages)
    return simulate(schedule, StageCosts(size, size, size))


def draw() -> str:
    """All charts under each other."""
    drawn = [(name, what, schedule, timeline_of(schedule)) for name, what, schedule in charts()]
    longest = drawn[0][3].step_seconds
    height_of_chart = HEAD + NUM_RANKS * ROW + GAP
    width, bottom = LEFT + round(longest * UNIT) + 20, TOP + len(drawn) * height_of_chart - GAP + 10
    parts = [*_legend()]
    for i, (name, what, schedule, timeline) in enumerate(drawn):
        top = TOP + i * height_of_chart
        facts = f"{timeline.step_seconds:g} units, idle {timeline.bubble_ratio:.0%}"
        times = f", {longest / timeline.step_seconds:.2f}x GPipe" if i else ""
        parts.append(
            f'<text x="8" y="{top}"><tspan font-weight="bold">{name}: {facts}{times}</tspan>'
            f'<tspan dx="10" fill="#555">{what}</tspan></text>'
        )
        parts += _chart(schedule, timeline, top + HEAD)
    parts += _axis(longest, bottom)
    height = bottom + FOOT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="#222" role="img">\n'
        f"<title>A simulated step of GPipe, fast-forward, and fast-forward with modulo allocation</title>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n'
        f'<text x="8" y="24" font-size="15" font-weight="bold">One step, simulated: {NUM_RANKS} ranks, '
        f"{NUM_MICROBATCHES} microbatches, {NUM_LAYERS} equal layers</text>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _legend() -> Iterator[str]:
    """Colours, above the charts."""
    left = 8.0
    for kind in ("F", "I", "W", "B"):
        colour, ink, name = _LOOKS[kind]
        text = f"{name}: input and weight gradient at once" if kind == "B" else name
        yield (
            f'<rect x="{left:g}" y="35" width="16" height="16" fill="{colour}"/><text x="{left + 8:g}" y="47" '
            f'font-size="11" text-anchor="middle" fill="{ink}">0</text><text x="{left + 22:g}" y="48">{text}</text>'
        )
        left += 42 + 6.6 * len(text)
    yield f'<text x="{left:g}" y="48" fill="#555">in a box: its microbatch</text>'


def _chart(schedule: Schedule, timeline: Timeline, top: int) -> Iterator[str]:
    """A row for each rank; under its boxes, where a rank has several stages, their layers."""
    for rank in range(schedule.num_ranks):
        y = top + rank * ROW
        own = [layers_of(schedule, stage) for stage, owner in enumerate(schedule.stage_to_rank) if owner == rank]
        layers = f"{own[0][0]}–{own[0][-1]}" if len(own) == 1 else ", ".join(str(one[0]) for one in own)
        spans = [span for span in timeline.spans if span.rank == rank]
        end = timeline.step_seconds * UNIT
        yield f'<text x="8" y="{y + 10}">rank {rank}</text>'
        yield f'<text x="8" y="{y + 24}" font-size="11" fill="#555">layers {layers}</text>'
        yield f'<rect x="{LEFT}" y="{y}" width="{end:.1f}" height="{BOX}" fill="#eee"/>'
        for span in spans:
            yield _box(span, y)
        if len(own) > 1:
            yield from _layer_marks(schedule, spans, y + BOX)


def _box(span: Span, y: int) -> str:
    colour, ink, _ = _LOOKS[span.action.kind]
    left, wide = LEFT + span.begin * UNIT, (span.end - span.begin) * UNIT
    return (
        f'<rect x="{left:.1f}" y="{y}" width="{wide:.1f}" height="{BOX}" fill="{colour}" stroke="#fff"/>'
        f'<text x="{left + wide / 2:.1f}" y="{y + 15.5}" text-anchor="middle" font-size="11" fill="{ink}">'
        f"{span.action.microbatch}</text>"
    )


def _layer_marks(schedule: Schedule, spans: Sequence[Span], y: int) -> Iterator[str]:
    """A line under boxes of the same layer that follow each other, with its number."""
    is_forward = lambda span: (span.action.stage, span.action.kind == "F")  # noqa: E731
    for (stage, _), group in groupby(spans, key=is_forward):
        found = list(group)
        left, right = LEFT + found[0].begin * UNIT + 2, LEFT + found[-1].end * UNIT - 2
        if right - left < 20:
            continue
        yield f'<path d="M{left:.1f} {y + 2.5}H{right:.1f}" stroke="#555"/>'
        text = f"layer {layers_of(schedule, stage)[0]}" if right - left > 44 else f"{layers_of(schedule, stage)[0]}"
        yield (
            f'<text x="{(left + right) / 2:.1f}" y="{y + 12}" text-anchor="middle" font-size="10" fill="#444">'
            f"{text}</text>"
        )


def _axis(longest: float, y: int) -> Iterator[str]:
    end = LEFT + longest * UNIT
    yield f'<path d="M{LEFT} {y}H{end:.1f}" stroke="#222"/>'
    for tick in range(0, int(longest) + 1, 12):
        x = LEFT + tick * UNIT
        yield f'<path d="M{x:.1f} {y}v5" stroke="#222"/>'
        yield f'<text x="{x:.1f}" y="{y + 19}" text-anchor="middle">{tick}</text>'
    yield (
        f'<text x="{end:.1f}" y="{y + 38}" text-anchor="end">time, in passes (forward, input or weight gradient) of '
        f"one layer and microbatch</text>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--svg", type=Path, default=Path(__file__).with_suffix(".svg"))
    options = parser.parse_args()
    print("| schedule, simulated | step | idle | x GPipe |\n|---|---|---|---|")
    longest = timeline_of(charts()[0][2]).step_seconds
    for name, _, schedule in charts():
        timeline = timeline_of(schedule)
        times = longest / timeline.step_seconds
        print(f"| {name} | {timeline.step_seconds:g} | {timeline.bubble_ratio:.1%} | {times:.2f} |")
    options.svg.write_text(draw())


if __name__ == "__main__":
    main()
