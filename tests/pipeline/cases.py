"""Schedules to test with: every kind, by name, and random ones of them."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from hypothesis import strategies as st

from lightning_gpufeed.pipeline.generators import fast_forward, gpipe, interleaved, one_f_one_b, zbv, zero_bubble
from lightning_gpufeed.pipeline.simulate import StageCosts

UNIT = StageCosts()
GIVEN = {"gpipe": gpipe, "one_f_one_b": one_f_one_b, "interleaved": interleaved}
FILLED = {
    "fast_forward": fast_forward,
    "fast_forward_linear": partial(fast_forward, placement="linear"),
    "zero_bubble": zero_bubble,
    "zbv": zbv,
}
NAMES = [*GIVEN, *FILLED]
ONLY = {"one_f_one_b": 1, "zbv": 2}
"""Stages on a rank, where there is no choice."""

passes = st.integers(0, 6).map(float)
stage_costs = st.builds(StageCosts, passes, passes, passes, st.integers(0, 9), st.integers(0, 9))


def of_rank(forward: float, input_grad: float, weight_grad: float, num_virtual: int) -> StageCosts:
    """The costs of each of so many stages that together are all of a rank."""
    return StageCosts(forward / num_virtual, input_grad / num_virtual, weight_grad / num_virtual)


def made(name, num_ranks, num_microbatches, num_virtual=1, costs=UNIT, send_seconds=0.0):
    """A schedule by its name; `num_virtual` is that of the name where there is no choice."""
    num_virtual = ONLY.get(name, num_virtual)
    if name in GIVEN:
        return GIVEN[name](num_ranks, num_microbatches, num_virtual)
    return FILLED[name](num_ranks, num_microbatches, num_virtual, costs=costs, send_seconds=send_seconds)


@st.composite
def shapes(draw, most=2500):
    """Ranks to 16, microbatches to 64, stages on a rank to 8, but no more actions than can be tested in numbers."""
    num_ranks = draw(st.integers(1, 16))
    num_virtual = draw(st.integers(1, 8))
    num_microbatches = draw(st.integers(1, max(1, min(64, most // (3 * num_ranks * num_virtual)))))
    return num_ranks, num_microbatches, num_virtual


@st.composite
def schedules_with_costs(draw, most=600):
    """A schedule of any kind that was made for some costs of its stages, with these and what sends take."""
    name = draw(st.sampled_from(NAMES))
    num_ranks, num_microbatches, num_virtual = draw(shapes(most))
    num_virtual = ONLY.get(name, num_virtual)
    num_stages = num_ranks * num_virtual
    costs = draw(st.lists(stage_costs, min_size=num_stages, max_size=num_stages))
    sends = draw(st.lists(st.sampled_from([0.0, 0.0, 0.5, 3.0]), min_size=num_stages - 1, max_size=num_stages - 1))
    return made(name, num_ranks, num_microbatches, num_virtual, costs, sends), costs, sends


def spans_of_ranks(timeline):
    """Spans, rank by rank."""
    found = [[] for _ in timeline.busy_seconds]
    for span in timeline.spans:
        found[span.rank].append(span)
    return found


def is_without_pause(spans):
    """Whether a rank never waits between its first and its last action."""
    return all(abs(before.end - after.begin) < 1e-9 for before, after in pairwise(spans))
