"""Finds out which plan is the fastest here: learn the order, measure the parts, search, and try the best on real steps.

::

    step    0        1     2  3  4    5 .. 9    10 .. 14   15 .. 19  20 .. 24  25 .. 29  30 .. 34   35 ...
            order    warm  measure    usual     best       usual     best      usual     best       what was faster

Every rank takes the same decisions: rank 0 plans with means over all ranks, and its plans go to all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from lightning_gpufeed.backprop.order import BackwardOrder, from_actions
from lightning_gpufeed.sync.candidates import PlanOptions, given_plan, plans_to_try, usual_plan
from lightning_gpufeed.sync.costs import LayerCosts, LinkCosts, fit_link
from lightning_gpufeed.sync.layers import SyncLayer, in_order
from lightning_gpufeed.sync.plan import SyncPlan
from lightning_gpufeed.sync.ranks import Ranks
from lightning_gpufeed.sync.simulate import StepModel
from lightning_gpufeed.sync.times import StepSeconds, StepTimes, medians
from lightning_gpufeed.sync.usage import Usage

__all__ = ["Tuner"]

_NUM_MEASURED = 3
_WINDOW_STEPS, _NUM_ROUNDS = 5, 3
"""Steps with one plan before the next is tried, the first of them not counted; and how often each is tried."""
_MIN_GAIN = 0.01
"""Share of a step below which a gain is none."""


@dataclass
class _Arm:
    """A plan that is tried."""

    plan: SyncPlan
    predicted_seconds: float
    exposed_seconds: float
    """Of these, how long the device waits for messages."""
    windows: list[float] = field(default_factory=list)
    """Median step of each window."""

    @property
    def seconds(self) -> float:
        return median(self.windows)

    @property
    def is_usual(self) -> bool:
        """Whether it differs from `DistributedDataParallel` in the sizes of messages only."""
        return not self.plan.cross_iteration and not self.plan.deferred


class Tuner:
    """Says which plan to use in the next step.

    Attributes:
        layers: In forward order, once that is known.
        plan: For the next step; numbers `layers`.
        late: Layers that are sent when backward has ended, as the number of their gradients is not certain.
        times: Where the parts of a step are noted, while they are measured.
        costs: Measured; empty before.
        link: Measured; None before.
    """

    def __init__(
        self,
        layers: Sequence[SyncLayer],
        options: PlanOptions,
        ranks: Ranks,
        *,
        can_defer: bool,
        can_cross: Callable[[], bool],
        scatters: Callable[[], bool] = lambda: False,
        on_message: Callable[[str, dict[str, float]], None],
    ) -> None:
        """Before the first step.

        Args:
            layers: Of the model, in any order.
            options: What is to be found, and what is given.
            ranks: Who takes part.
            can_defer: Whether weight gradients may wait. If not, nothing is measured.
            can_cross: Whether updates may be taken in the next forward; asked after a step.
            scatters: Whether, if they are, the norm of all gradients has to be known before; asked after a step.
            on_message: Told the decision: a line, and figures for a logger.
        """
        self.layers = list(layers)
        self._options, self._ranks, self._on_message = options, ranks, on_message
        self._can_defer, self._can_cross, self._scatters = can_defer, can_cross, scatters
        self._really_late: set[int] = set()
        self.late = set(range(len(self.layers)))
        self.plan = usual_plan(self._costs())
        self.times: StepTimes | None = None
        self.costs: list[LayerCosts] = []
        self.link: LinkCosts | None = None
        self._stage = "order"
        self._measured: list[StepSeconds] = []
        self._num_steps = 0
        self._arms: list[_Arm] = []
        self._window: list[float] = []
        self._clock = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether the plan will stay."""
        return self._stage == "settled"

    def backward_order(self) -> BackwardOrder | None:
        """What the plan says of the weight gradients that can wait.

        Returns:
            None if none waits and none has to be measured.
        """
        names = {i: layer.module_name for i, layer in enumerate(self.layers) if layer.is_deferrable}
        if self._stage == "measure":
            return BackwardOrder(after={name: () for name in names.values()}) if names else None
        actions = []
        for kind, i in self.plan.backward:
            if i in names and i not in self.late:
                actions += [(part, names[i]) for part in ("IW" if kind == "B" else kind)]
        order = from_actions(actions)
        return order if order.deferred else None

    def next(
        self,
        usage: Usage | None,
        num_microbatches: int,
    ) -> bool:
        """A step is over.

        Args:
            usage: What was seen in the first step; None later.
            num_microbatches: In the step.

        Returns:
            Whether the next step has another plan, or other layers.
        """
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self._num_steps += 1
        if self._stage == "order":
            assert usage is not None
            self._learn_order(usage)
            return True
        if self._stage == "measure":
            return self._measure(num_microbatches)
        return self._stage == "try" and self._try(seconds)

    def _learn_order(self, usage: Usage) -> None:
        places = {id(layer): place for place, layer in enumerate(self.layers)}
        order = self._ranks.decided([places[id(layer)] for layer in in_order(self.layers, usage.first_use)])
        is_odd = self._ranks.maximum([not usage.is_certain(layer) for layer in self.layers])
        is_shared = self._ranks.maximum([usage.is_reused(one) or not one.is_deferrable for one in self.layers])
        self.layers = [self.layers[place] for place in order]
        for i, place in enumerate(order):
            if is_shared[place] or is_odd[place]:
                self.layers[i] = replace(self.layers[i], is_deferrable=False)
        self._really_late = {i for i, place in enumerate(order) if is_odd[place]}
        costs = self._costs()
        if self._can_defer and self._options.is_given:
            is_scattered = self._scatters()
            self._settle(given_plan(costs, self._options, self._really_late, is_scattered=is_scattered))
            self._on_message(f"{_described(self.plan, self.layers)}, as asked for.", _figures(self.plan))
        elif costs and self._can_defer and self._ranks.num_ranks > 1:
            self.plan = usual_plan(costs)
            self.times = StepTimes(self._ranks.device, len(self.layers))
            self._stage = "measure"
        else:
            self._settle(usual_plan(costs, self._really_late))

    def _settle(self, plan: SyncPlan) -> None:
        self.plan, self.late, self.times, self._stage = plan, self._really_late, None, "settled"

    def _costs(self, step: StepSeconds | None = None) -> list[LayerCosts]:
        """The layers as plans see them."""
        costs = []
        num_bytes = sum(layer.gradient_bytes for layer in self.layers)
        for i, layer in enumerate(self.layers):
            parts = (0.0, 0.0, 0.0)
            if step is not None:  # a gradient is copied when it is there, a parameter updated before its forward
                share = layer.gradient_bytes / num_bytes
                copy, update = share * step.copies, share * step.updates
                parts = (step.forward[i] + update, step.input_grad[i], step.weight_grad[i] + copy)
            deferred_bytes = step.deferred_bytes[i] if step else 0
            costs.append(LayerCosts(layer.name, *parts, layer.gradient_bytes, deferred_bytes, layer.is_deferrable))
        return costs

    def _measure(self, num_microbatches: int) -> bool:
        assert self.times is not None
        step = self.times.take()
        if step is not None and self._num_steps > 2:  # the first of them is warm-up
            self._measured.append(step)
        is_short = any(self._ranks.maximum([len(self._measured) < _NUM_MEASURED]))
        if is_short and self._num_steps < 2 * _NUM_MEASURED + 2:
            return False
        self.times = None
        if self._ranks.maximum([float(not self._measured)]) != [0.0]:
            self._settle(usual_plan(self._costs(), self._really_late))
            return True
        step = medians(self._measured)
        step = StepSeconds.of_numbers(self._ranks.mean(step.numbers()), step.deferred_bytes)
        self.link = fit_link(self._ranks.probe_link(sum(layer.gradient_bytes for layer in self.layers)))
        self.costs = self._costs(step)
        compute_seconds = StepModel(self.costs, self.link).compute_seconds + step.other
        texts: list[tuple[str, float]] = []
        if self._ranks.rank == 0:
            found = plans_to_try(
                self.costs,
                self.link,
                self._options if self._can_cross() else replace(self._options, cross_iteration=False),
                other_seconds=step.other,
                is_accumulating=num_microbatches > 1,
                late=self._really_late,
                is_scattered=self._scatters(),
            )
            texts = [(str(one.plan), one.seconds) for one in found]
        self._arms = [
            _Arm(SyncPlan.parse(text), seconds, seconds - compute_seconds)
            for text, seconds in self._ranks.decided(texts)
        ]
        if len(self._arms) == 1:
            [arm] = self._arms
            self._settle(arm.plan)
            self._on_message(f"{_described(arm.plan, self.layers)}, as asked for.", _figures(arm.plan, arm))
        else:
            self._stage, self.plan, self.late = "try", self._arms[0].plan, self._really_late
        self._window = []
        return True

    def _try(self, seconds: float) -> bool:
        num_windows = sum(len(arm.windows) for arm in self._arms)
        self._window.append(seconds)
        if len(self._window) < _WINDOW_STEPS:
            return False
        self._arms[num_windows % len(self._arms)].windows.append(median(self._window[1:]))
        self._window = []
        num_windows += 1
        if num_windows < _NUM_ROUNDS * len(self._arms):
            self.plan = self._arms[num_windows % len(self._arms)].plan
            return True
        numbers = iter(self._ranks.mean([one for arm in self._arms for one in arm.windows]))
        for arm in self._arms:
            arm.windows = [next(numbers) for _ in arm.windows]
        best = self._arms[self._ranks.decided(_best(self._arms))]
        self._settle(best.plan)
        usual = min((arm for arm in self._arms if arm.is_usual), key=lambda arm: arm.seconds, default=self._arms[0])
        self._on_message(self._decision(usual, best), _figures(best.plan, best, usual))
        return True

    def _decision(self, usual: _Arm, best: _Arm) -> str:
        def both(arm: _Arm) -> str:
            return f"{arm.seconds * 1e3:.4g} ms a step measured, {arm.predicted_seconds * 1e3:.4g} ms predicted"

        others = [arm for arm in self._arms if not arm.is_usual]
        if best.is_usual and others:
            rival = min(others, key=lambda arm: arm.seconds)
            return (
                f"the usual order stays, messages: {len(best.plan.buckets)} ({both(best)}); the best other one would "
                f"take {both(rival)}, which is no gain above noise."
            )
        return (
            f"{_described(best.plan, self.layers)}: {both(best)}; the usual order takes {both(usual)}. That is "
            f"{usual.seconds / best.seconds:.3g} times as fast."
        )


def _best(arms: Sequence[_Arm]) -> int:
    """The fastest that changes no order, unless another one beats it in all rounds but one, and by more than noise."""
    # Round by round, as a machine may be slower in one of them for all.
    numbers = sorted(range(len(arms)), key=lambda number: arms[number].seconds)
    usual = next((number for number in numbers if arms[number].is_usual), numbers[0])
    best = numbers[0]
    gains = [one - other for one, other in zip(arms[usual].windows, arms[best].windows, strict=True)]
    gain = median(gains)
    noise = max(_MIN_GAIN * arms[usual].seconds, median(abs(one - gain) for one in gains))
    return best if gain > noise and sum(one > 0 for one in gains) >= len(gains) - 1 else usual


def _described(plan: SyncPlan, layers: Sequence[SyncLayer]) -> str:
    when = "in the next forward" if plan.cross_iteration else "when all have arrived"
    when += ", once the norm of all gradients is known" if plan.is_scattered else ""
    waiting = [layers[i].name for i in plan.deferred]
    what = f"{len(waiting)} of {len(layers)} weight gradients wait" if waiting else "no weight gradient waits"
    return f"{what}, {len(plan.buckets)} messages, parameters are updated {when}"


def _figures(plan: SyncPlan, chosen: _Arm | None = None, usual: _Arm | None = None) -> dict[str, float]:
    """For a logger: what the plan is; and where it is known, what was predicted and measured."""
    values: dict[str, float] = {
        "num_deferred": len(plan.deferred),
        "num_messages": len(plan.buckets),
        "is_cross_iteration": plan.cross_iteration,
        "is_scattered": plan.is_scattered,
    }
    if chosen is not None:
        values["predicted_step_seconds"] = chosen.predicted_seconds
        values["predicted_exposed_seconds"] = max(0.0, chosen.exposed_seconds)
    if chosen is not None and usual is not None:
        values["step_seconds"] = chosen.seconds
        values["usual_step_seconds"] = usual.seconds
        values["usual_predicted_step_seconds"] = usual.predicted_seconds
        values["usual_predicted_exposed_seconds"] = max(0.0, usual.exposed_seconds)
        values["gain"] = usual.seconds / chosen.seconds
    return {f"gpufeed/sync/{name}": float(value) for name, value in values.items()}
