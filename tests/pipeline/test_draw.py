"""Steps as they are drawn, in text, as a picture and as a trace."""

from __future__ import annotations

import doctest
import itertools
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.pipeline import draw as draw_module
from lightning_gpufeed.pipeline.draw import chrome_trace, draw, draw_svg
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.simulate import StageCosts, simulate
from tests.pipeline.cases import UNIT, made, schedules_with_costs

GROUNDS = ("#ffffff", "#0d1117")
SVG = "{http://www.w3.org/2000/svg}"
NOTHING = Schedule((), (), 0)


def test_the_examples_run():
    assert doctest.testmod(draw_module).failed == 0


@pytest.mark.parametrize(
    ("name", "shape", "drawing"),
    [
        (
            "gpipe",
            (3, 3),
            """
rank 0  F0 F1 F2 .  .  .  .  .  .  B0--- B1--- B2---
rank 1  .  F0 F1 F2 .  .  .  B0--- B1--- B2--- .  .
rank 2  .  .  F0 F1 F2 B0--- B1--- B2--- .  .  .  .""",
        ),
        (
            "gpipe",
            (2, 2, 2),
            """
rank 0  0F0 0F1 2F0 2F1 .   .   .   2B0---- 2B1---- 0B0---- 0B1----
rank 1  .   1F0 1F1 3F0 3F1 3B0---- 3B1---- 1B0---- 1B1---- .   .""",
        ),
        (
            "one_f_one_b",
            (3, 4),
            """
rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .""",
        ),
        (
            "interleaved",
            (2, 4, 2),
            """
rank 0  0F0 0F1 2F0 2F1 0F2 .   2B0---- 0F3 2B1---- 2F2 0B0---- 2F3 0B1---- .   2B2---- .   2B3---- 0B2---- 0B3----
rank 1  .   1F0 1F1 3F0 3B0---- 3F1 3B1---- 1F2 1B0---- 1F3 1B1---- 3F2 3B2---- 3F3 3B3---- 1B2---- 1B3---- .   .""",
        ),
        (
            "fast_forward",
            (3, 4),
            """
rank 0  F0 F1 F2 F3 .  .  .  .  I0 W0 I1 W1 I2 W2 I3 W3
rank 1  .  F0 F1 F2 F3 .  .  I0 W0 I1 W1 I2 W2 I3 W3 .
rank 2  .  .  F0 F1 F2 F3 I0 I1 I2 I3 W0 W1 W2 W3 .  .""",
        ),
        (
            "fast_forward",
            (2, 2, 2),
            """
rank 0  0F0 0F1 2F0 2F1 .   .   2I0 2W0 2I1 0I0 0W0 0I1 2W1 0W1
rank 1  .   1F0 1F1 3F0 3F1 3I0 3I1 1I0 1W0 1I1 3W0 3W1 1W1 .""",
        ),
        (
            "fast_forward_linear",
            (2, 2, 2),
            """
rank 0  0F0 1F0 0F1 1F1 .   .   .   .   1I0 0I0 1W0 1I1 0W0 0I1 1W1 0W1
rank 1  .   .   2F0 3F0 2F1 3F1 3I0 2I0 3I1 2I1 3W0 2W0 3W1 2W1 .   .""",
        ),
        (
            "zero_bubble",
            (3, 5),
            """
rank 0  F0 F1 F2 .  .  I0 W0 F3 I1 W1 F4 I2 W2 I3 W3 I4 W4
rank 1  .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 F4 I3 W2 I4 W3 W4
rank 2  .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 F4 I4 W2 W3 W4""",
        ),
        (
            "zero_bubble",
            (2, 2, 2),
            """
rank 0  0F0 0F1 2F0 2F1 .   2I0 2W0 2I1 0I0 0I1 2W1 0W0 0W1
rank 1  .   1F0 1F1 3F0 3I0 3F1 3I1 1I0 1I1 3W0 3W1 1W0 1W1""",
        ),
        (
            "zbv",
            (2, 3),
            """
rank 0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2 .
rank 1  .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2""",
        ),
    ],
)
def test_a_schedule_is_drawn_as_it_is(name, shape, drawing):
    assert draw(made(name, *shape)) == drawing.strip()


def test_a_timeline_is_drawn_to_scale():
    timeline = simulate(made("gpipe", 2, 1), StageCosts(1.0, 2.0, 1.0), 1.0)
    assert draw(timeline) == (
        "rank 0  F0 .  .  .  .  .  .  B0------\n"
        "rank 1  .  .  F0 B0------ .  .  .  ."
    )  # fmt: skip
    assert draw(timeline, width=5) == (
        "rank 0  .  .  .  .  B0\n"
        "rank 1  .  F0 B0 .  ."
    )  # fmt: skip


@given(schedules_with_costs(most=200), st.integers(1, 80))
@settings(max_examples=40)
def test_a_drawing_has_a_row_for_each_rank_no_wider_than_asked_for(case, width):
    schedule, costs, sends = case
    timeline = simulate(schedule, costs, sends)
    rows = draw(timeline, width).split("\n")
    cell = 1 + max(len(str(action)) for actions in schedule.ranks for action in actions)
    assert len(rows) == schedule.num_ranks
    assert all(row.startswith(f"rank {rank}") for rank, row in enumerate(rows))
    assert all(len(row) <= 9 + cell * width for row in rows)


def test_a_step_of_nothing_can_be_drawn():
    assert draw(NOTHING) == ""
    assert draw(made("gpipe", 1, 1), 1) == "rank 0  B0"
    assert draw(simulate(made("gpipe", 1, 1), StageCosts(0.0, 0.0, 0.0)), 2) == "rank 0  .  ."
    ET.fromstring(draw_svg(simulate(NOTHING, [])))
    assert json.loads(chrome_trace(simulate(NOTHING, [])))["traceEvents"] == []


def test_no_columns_are_refused():
    with pytest.raises(ValueError, match="width is 0; expected at least 1 column"):
        draw(made("gpipe", 1, 1), width=0)


# The picture ------------------------------------------------------------------------------------------------


def boxes(drawing):
    """Give position, colour and texts of each action that is drawn, with its full name."""
    found = []
    for group in ET.fromstring(drawing).iter(f"{SVG}g"):
        box = group.find(f"{SVG}rect")
        texts = [text.text for text in group.iter(f"{SVG}text")]
        left, wide, top = (float(box.get(name)) for name in ("x", "width", "y"))
        found.append((group.find(f"{SVG}title").text, left, left + wide, top, box.get("fill"), texts))
    return found


@given(schedules_with_costs(most=200))
@settings(max_examples=25)
def test_every_action_that_takes_time_has_its_box_in_the_row_of_its_rank(case):
    schedule, costs, sends = case
    timeline = simulate(schedule, costs, sends)
    drawing = draw_svg(timeline)
    image = ET.fromstring(drawing)
    spans = [span for span in timeline.spans if span.end > span.begin]
    found = boxes(drawing)
    assert [name.split(":")[0] for name, *_ in found] == [str(span.action) for span in spans]
    tops = sorted({top for _, _, _, top, _, _ in found})
    for span, (_, left, right, top, _, _) in zip(spans, found, strict=True):
        assert left < right <= float(image.get("width"))
        assert top + 30 <= float(image.get("height"))
        assert top == 34 + 36 * span.rank
    for top in tops:
        row = [(left, right) for _, left, right, here, _, _ in found if here == top]
        # Positions are written with two digits.
        assert all(one[1] <= other[0] + 0.02 for one, other in itertools.pairwise(row))


def test_a_box_shows_its_microbatch_and_where_there_are_several_its_stage():
    one, several = (draw_svg(simulate(made(name, 2, 3), UNIT)) for name in ("gpipe", "zbv"))
    assert [texts for *_, texts in boxes(one)][:3] == [["0"], ["1"], ["2"]]
    assert [texts for *_, texts in boxes(several)][:4] == [["0", "s0"], ["1", "s0"], ["2", "s0"], ["0", "s3"]]


def test_a_legend_names_the_kinds_that_there_are():
    def said(name):
        image = ET.fromstring(draw_svg(simulate(made(name, 2, 2), UNIT)))
        return [text.text for text in image.findall(f"{SVG}text")]

    assert said("gpipe")[:4] == ["F", "forward", "B", "full backward"]
    assert said("zbv")[:6] == ["F", "forward", "I", "input gradient", "W", "weight gradient"]
    assert said("gpipe")[-1] == "step 9 s, idle 33.3%"


# What is left of a colour (linear RGB) for those who lack one kind of cone: Machado, Oliveira, Fernandes, "A
# physiologically-based model for simulation of color vision deficiency", 2009, table 1, full severity.
EYES = {
    "usual": np.eye(3),
    "protanope": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranope": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanope": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# Linear RGB to Oklab, in which equal distances look about equally different (Ottosson, 2020).
TO_CONES = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
TO_LAB = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
          [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip


def linear(colour):
    values = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    dark, light = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def seen_by(eye, colour):
    left = np.clip(np.array(EYES[eye]) @ linear(colour), 0, 1)
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_CONES) @ left)


@pytest.mark.parametrize("eye", EYES)
def test_any_two_kinds_can_be_told_apart_by_any_eye(eye):
    colours = {kind: look[0] for kind, look in draw_module._LOOKS.items()}
    for one, other in itertools.combinations(colours, 2):
        # A difference of 0.02 is just seen side by side; six times that also across a page.
        assert np.linalg.norm(seen_by(eye, colours[one]) - seen_by(eye, colours[other])) > 0.12, (one, other)


def test_all_text_can_be_read_on_white_and_on_dark():
    for colour, ink, _ in draw_module._LOOKS.values():
        assert contrast(colour, ink) >= 4.5  # WCAG 2.1, 1.4.3
        assert all(contrast(colour, ground) >= 1.7 for ground in GROUNDS)
    for ground in GROUNDS:
        assert contrast(draw_module._INK, ground) >= 4  # no grey reaches 4.5 on both


# The trace --------------------------------------------------------------------------------------------------


@given(schedules_with_costs(most=150))
@settings(max_examples=20)
def test_a_trace_has_an_event_for_each_action_and_a_name_for_each_rank(case):
    schedule, costs, sends = case
    timeline = simulate(schedule, costs, sends)
    events = json.loads(chrome_trace(timeline))["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {rank: f"rank {rank}" for rank in range(schedule.num_ranks)}
    done = [event for event in events if event["ph"] == "X"]
    assert [(event["tid"], event["name"], event["args"]["microbatch"]) for event in done] == [
        (span.rank, str(span.action), span.action.microbatch) for span in timeline.spans
    ]
    for event, span in zip(done, timeline.spans, strict=True):
        assert (event["ts"], event["ts"] + event["dur"]) == pytest.approx((span.begin * 1e6, span.end * 1e6))
