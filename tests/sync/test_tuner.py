from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_gpufeed.sync import tuner as tuner_module
from lightning_gpufeed.sync.candidates import PlanOptions, usual_plan
from lightning_gpufeed.sync.costs import LinkCosts
from lightning_gpufeed.sync.layers import SyncLayer, find_layers
from lightning_gpufeed.sync.plan import SyncPlan, reverse_first_k, validate
from lightning_gpufeed.sync.times import StepSeconds
from lightning_gpufeed.sync.tuner import Tuner
from tests.sync.clock import Clock
from tests.sync.one_rank import one_rank

NUM_LAYERS = 4
STEPS_BEFORE = 1 + 4
"""In which the order is learned and the parts are measured."""
WINDOW_STEPS, NUM_ROUNDS = 5, 3


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(tuner_module, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


@pytest.fixture
def ranks():
    with one_rank() as ranks:
        ranks.num_ranks = 2  # one rank alone has nothing to gain, so nothing would be tried
        yield ranks


class SeenUsage:
    """What a first step has shown."""

    def __init__(self, layers: list[SyncLayer]) -> None:
        self.first_use = [one for layer in layers for one in layer.parameters]
        self.uncertain: set[str] = set()
        self.reused: set[str] = set()

    def is_certain(self, layer: SyncLayer) -> bool:
        return layer.name not in self.uncertain

    def is_reused(self, layer: SyncLayer) -> bool:
        return layer.name in self.reused


class Loop:
    """What a training loop tells a tuner, with a step of whatever length."""

    def __init__(
        self, ranks, clock, options=None, *, can_defer=True, can_cross=True, deferrable=None, num_layers=NUM_LAYERS
    ) -> None:
        self.model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(num_layers)))
        names = [str(i) for i in range(num_layers)] if deferrable is None else deferrable
        self.layers = find_layers(self.model, names)
        self.messages: list[str] = []
        self.figures: list[dict[str, float]] = []
        self.clock = clock
        self.tuner = Tuner(
            self.layers,
            options or PlanOptions(),
            ranks,
            can_defer=can_defer,
            can_cross=lambda: can_cross,
            on_message=self.said,
        )
        self.usage = SeenUsage(self.layers)

    def said(self, message: str, figures: dict[str, float]) -> None:
        self.messages.append(message)
        self.figures.append(figures)

    def run(self, num_steps: int, seconds: Callable[[SyncPlan], float] = lambda plan: 1.0) -> list[SyncPlan]:
        plans = []
        for _ in range(num_steps):
            tuner = self.tuner
            plans.append(tuner.plan)
            if tuner.times is not None:
                self.note(tuner.times)
            self.clock.now += seconds(tuner.plan)
            tuner.next(self.usage, 1)
        return plans

    def note(self, times) -> None:
        num_layers = len(self.layers)
        times.note("forward")
        for i in range(num_layers):
            times.note("F", i)
        times.note("backward")
        for i in reversed(range(num_layers)):
            times.note("I", i)
            times.note_bytes(i, 100)
            times.note("W", i)
        times.note("wait")
        times.note("waited")


SLOW_LINK = LinkCosts(0.0, 64 * 65 * 4 / 1.0)
"""A second for each layer's gradient."""


@pytest.fixture
def one_second_each(monkeypatch):
    """Measurements as they would be of a model whose network is the bottleneck."""
    ones = (1.0,) * NUM_LAYERS
    step = StepSeconds(ones, ones, ones, 0.0, 0.0, 0.0, (100,) * NUM_LAYERS)
    monkeypatch.setattr(
        tuner_module,
        "medians",
        lambda steps: StepSeconds.of_numbers([2 * one for one in step.numbers()], step.deferred_bytes),
    )  # the mean over "two" ranks of one halves it
    monkeypatch.setattr(tuner_module, "fit_link", lambda samples: SLOW_LINK)


def usual(loop: Loop) -> SyncPlan:
    return usual_plan(loop.tuner._costs())


def test_the_first_step_is_usual_and_sends_all_at_its_end(ranks, clock):
    loop = Loop(ranks, clock)
    assert loop.tuner.plan == usual(loop)
    assert loop.tuner.late == set(range(NUM_LAYERS))
    assert loop.tuner.backward_order() is None
    assert loop.tuner.times is None
    assert not loop.tuner.is_settled


def test_layers_are_numbered_as_forward_came_to_them(ranks, clock):
    loop = Loop(ranks, clock)
    loop.usage.first_use = [loop.layers[i].parameters[0] for i in (2, 0, 3, 1)]
    loop.run(1)
    assert [layer.name for layer in loop.tuner.layers] == ["2", "0", "3", "1"]


def test_while_parts_are_measured_every_layer_that_can_wait_is_split_and_nothing_overlaps(ranks, clock):
    loop = Loop(ranks, clock, deferrable=["1", "3"])
    loop.run(1)
    order = loop.tuner.backward_order()
    assert set(order.after) == {"1", "3"}
    assert order.deferred == frozenset()
    assert loop.tuner.late == set(range(NUM_LAYERS))
    assert loop.tuner.times is not None


def test_layers_whose_gradients_do_not_come_once_are_late_and_do_not_wait(ranks, clock, one_second_each):
    loop = Loop(ranks, clock)
    loop.usage.uncertain = {"1", "2"}
    loop.run(STEPS_BEFORE)
    assert loop.tuner.late == {1, 2}
    assert [layer.is_deferrable for layer in loop.tuner.layers] == [True, False, False, True]
    for arm in loop.tuner._arms:
        validate(arm.plan, loop.tuner._costs())


def test_layers_that_are_used_twice_do_not_wait_and_are_on_time(ranks, clock, one_second_each):
    loop = Loop(ranks, clock)
    loop.usage.reused = {"0"}
    loop.run(STEPS_BEFORE)
    assert loop.tuner.late == set()
    assert [layer.is_deferrable for layer in loop.tuner.layers] == [False, True, True, True]


def test_ranks_tell_each_other_what_cannot_wait_and_it_waits_nowhere(ranks, clock, one_second_each, monkeypatch):
    loop = Loop(ranks, clock)
    loop.tuner.layers[2] = replace(loop.tuner.layers[2], is_deferrable=False)  # has a hook on this rank, say
    told: list[list[float]] = []

    def maximum(numbers: Sequence[float]) -> list[float]:
        told.append(list(numbers))
        return [max(pair) for pair in zip(numbers, [0, len(told) == 2, 0, 0], strict=True)]  # as another rank says

    monkeypatch.setattr(ranks, "maximum", maximum)
    loop.run(1)
    assert told[1] == [False, False, True, False]
    assert sorted(layer.is_deferrable for layer in loop.tuner.layers) == [False, False, True, True]


def test_every_plan_is_tried_as_often_and_in_turn(ranks, clock, one_second_each):
    loop = Loop(ranks, clock)
    loop.run(STEPS_BEFORE)
    plans = [arm.plan for arm in loop.tuner._arms]
    assert len(plans) > 1
    tried = loop.run(WINDOW_STEPS * NUM_ROUNDS * len(plans))
    assert tried == [plan for _ in range(NUM_ROUNDS) for plan in plans for _ in range(WINDOW_STEPS)]
    assert loop.tuner.is_settled


def decide(loop: Loop, seconds: Callable[[int, int], float]) -> int:
    """Which plan stays, if in a round the steps of plan `arm` take so long."""
    loop.run(STEPS_BEFORE)
    plans = [arm.plan for arm in loop.tuner._arms]
    for round_number in range(NUM_ROUNDS):
        for arm in range(len(plans)):
            assert not loop.tuner.is_settled
            assert loop.tuner.plan == plans[arm]
            loop.run(WINDOW_STEPS, lambda _: seconds(round_number, arm))  # noqa: B023
    assert loop.tuner.is_settled
    assert len(loop.messages) == 1
    before = loop.tuner.plan
    assert loop.run(3, lambda _: 50.0) == [before] * 3
    return plans.index(before)


def test_the_plan_that_was_measured_to_be_faster_stays(ranks, clock, one_second_each):
    loop = Loop(ranks, clock)
    assert decide(loop, lambda _, arm: 1.0 if arm == 0 else 1.0 - 0.1 * arm) == len(loop.tuner._arms) - 1
    assert "times as fast" in loop.messages[0]
    assert not loop.tuner.late
    [figures], best, usual_arm = loop.figures, loop.tuner._arms[-1], loop.tuner._arms[-2]
    assert figures["gpufeed/sync/step_seconds"] == pytest.approx(best.seconds)
    assert figures["gpufeed/sync/usual_step_seconds"] == pytest.approx(usual_arm.seconds)
    assert figures["gpufeed/sync/gain"] == pytest.approx(usual_arm.seconds / best.seconds)
    assert figures["gpufeed/sync/predicted_step_seconds"] == best.predicted_seconds
    assert figures["gpufeed/sync/usual_predicted_step_seconds"] == usual_arm.predicted_seconds
    assert figures["gpufeed/sync/num_messages"] == len(best.plan.buckets)
    assert figures["gpufeed/sync/num_deferred"] == len(best.plan.deferred)
    assert figures["gpufeed/sync/is_cross_iteration"] == 1.0
    # Each of four layers computes for three seconds, and its gradient is a second on the wire: in the usual order all
    # messages but those that are sent early in backward are waited for.
    compute = NUM_LAYERS * 3.0
    for name, arm in (("", best), ("usual_", usual_arm)):
        exposed = figures[f"gpufeed/sync/{name}predicted_exposed_seconds"]
        assert exposed == pytest.approx(max(0.0, arm.predicted_seconds - compute))
    assert figures["gpufeed/sync/usual_predicted_exposed_seconds"] > 0


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("a tie", lambda _, arm: 1.0),
        ("slower", lambda _, arm: 1.0 + arm),
        ("a gain below noise", lambda _, arm: 1.0 if arm == 0 else 0.995),
        (
            "a gain no larger than what rounds differ in it",
            lambda number, arm: 1.0 if arm == 0 else 1.0 - (0.3, -0.2, 0.02)[number],
        ),
        ("a gain in one round of three", lambda number, arm: 1.0 if arm == 0 else (0.1, 1.001, 1.002)[number]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_usual_order_stays_without_a_gain_above_noise(ranks, clock, one_second_each, name, seconds):
    loop = Loop(ranks, clock)
    assert decide(loop, seconds) == 0
    assert loop.messages[0].startswith("the usual order stays")
    assert loop.figures[0]["gpufeed/sync/gain"] == 1.0
    assert loop.figures[0]["gpufeed/sync/num_deferred"] == 0.0


def test_a_round_that_is_slower_for_all_does_not_hide_a_gain(ranks, clock, one_second_each):
    loop = Loop(ranks, clock)
    assert decide(loop, lambda number, arm: (1.0, 0.9, 3.0)[number] - arm / 20) == len(loop.tuner._arms) - 1


def test_one_slow_step_in_a_window_does_not_count(ranks, clock, one_second_each):
    loop = Loop(ranks, clock)
    loop.run(STEPS_BEFORE)
    plans = [arm.plan for arm in loop.tuner._arms]
    for _ in range(NUM_ROUNDS):
        for arm in range(len(plans)):
            length = 1.0 if arm == 0 else 0.5
            loop.run(1, lambda _: 100.0)  # a new plan has its first step
            loop.run(1, lambda _: 100.0)  # a hiccup
            loop.run(3, lambda _: length)  # noqa: B023
    assert loop.tuner.plan in plans[1:]


def test_a_given_plan_is_used_from_the_second_step_on(ranks, clock):
    loop = Loop(ranks, clock, PlanOptions(2, True, 1))
    loop.run(1)
    assert loop.tuner.is_settled
    assert loop.tuner.plan == reverse_first_k(loop.tuner._costs(), 2, 1)
    assert loop.tuner.late == set()
    assert set(loop.tuner.backward_order().deferred) == {"0", "1"}
    assert loop.messages[0].endswith("as asked for.")
    assert loop.figures == [
        {
            "gpufeed/sync/num_deferred": 2,
            "gpufeed/sync/num_messages": 4,
            "gpufeed/sync/is_cross_iteration": 1,
            "gpufeed/sync/is_scattered": 0,
        }
    ]


def test_what_is_given_in_part_is_kept_and_the_only_plan_is_not_tried(ranks, clock, one_second_each):
    loop = Loop(ranks, clock, PlanOptions(2, "auto", "auto"))
    loop.run(STEPS_BEFORE)
    assert loop.tuner.is_settled
    assert sorted(loop.tuner.plan.deferred) == [0, 1]
    assert loop.messages[0].endswith("as asked for.")
    [figures] = loop.figures
    assert figures["gpufeed/sync/predicted_step_seconds"] == loop.tuner._arms[0].predicted_seconds
    assert "gpufeed/sync/step_seconds" not in figures


def test_without_a_gain_in_sight_the_usual_plan_stays_from_the_second_step_on(ranks, clock):
    loop = Loop(ranks, clock, can_defer=False)
    loop.run(1)
    assert loop.tuner.is_settled
    assert loop.tuner.plan == usual(loop)


def test_plans_of_an_update_in_the_next_forward_are_not_tried_where_it_cannot_be(ranks, clock, one_second_each):
    loop = Loop(ranks, clock, can_cross=False)
    loop.run(STEPS_BEFORE)
    arms = loop.tuner._arms
    assert not loop.tuner.plan.cross_iteration
    assert not any(arm.plan.cross_iteration for arm in arms)


def test_one_rank_alone_tries_nothing(ranks, clock):
    ranks.num_ranks = 1
    loop = Loop(ranks, clock)
    loop.run(1)
    assert loop.tuner.is_settled
    assert loop.tuner.plan == usual(loop)


def test_a_model_without_layers_has_a_plan(ranks, clock):
    loop = Loop(ranks, clock, num_layers=0)
    loop.run(2)
    assert loop.tuner.is_settled
    assert loop.tuner.plan.buckets == ()


def test_steps_that_cannot_be_measured_leave_the_usual_plan(ranks, clock):
    loop = Loop(ranks, clock)
    loop.note = lambda times: None
    loop.run(20)
    assert loop.tuner.is_settled
    assert loop.tuner.plan == usual(loop)


def test_real_measurements_give_costs_of_every_layer(ranks, clock):
    loop = Loop(ranks, clock)
    loop.run(STEPS_BEFORE)
    assert [costs.name for costs in loop.tuner.costs] == [layer.name for layer in loop.tuner.layers]
    assert all(costs.deferred_bytes == 100 for costs in loop.tuner.costs)
    assert all(costs.gradient_bytes == 65 * 64 * 4 for costs in loop.tuner.costs)
    assert loop.tuner.link is not None
    assert torch.tensor([costs.forward_seconds for costs in loop.tuner.costs]).min() >= 0
