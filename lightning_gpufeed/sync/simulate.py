"""How long a step takes with a plan, and what is where in it. Pure.

The device never waits in backward, and a layer's gradient has arrived before its next forward ends. So time can be
counted from the end of forward, and one pass over the buckets says all about the steady state::

              end of forward                                        end of the next forward
    device    | I3 I2 W3 I1 W2 ...                W0 | F0 F1 F2 F3 |
    link             | bucket      | bucket | bucket         |
                ready                                        | F2 F3 |   its tail: the forward that it holds up

A bucket ends at `max(end of the one before, its gradients are ready) + seconds of the message`. Forward can end one
tail later at the earliest, where the tail is the forward of the bucket's first layer and of all after it; of all
layers, if the optimizer waits for all buckets. The step lasts as long as the longest of these, or all of the compute.

In a scattered plan half of each message crosses in backward, and the other half when all of backward is over and the
norm is known::

    link             | half | half | half      | norm | half 0 | half 1 | half 2 |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_gpufeed.sync.costs import LayerCosts, LinkCosts
from lightning_gpufeed.sync.plan import Action, Bucket, SyncPlan

__all__ = ["Span", "StepModel", "Timeline", "simulate"]


@dataclass(frozen=True)
class Span:
    """Something that the device or the link does, without a pause.

    Attributes:
        lane: Who does it.
        phase: "F", "I", "W", "B" on the device, "bucket" on the link; in a scattered plan that is its first half, and
            "gather" its second.
        layers: Places in forward, from 0; of a bucket, in the order of its pieces.
        begin: Seconds from the moment at which the device was done with the step before.
        end: Likewise. A bucket may begin or end after the step: it is sent during the next forward.
    """

    lane: Literal["device", "link"]
    phase: Literal["F", "I", "W", "B", "bucket", "gather"]
    layers: tuple[int, ...]
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step of the steady state.

    Attributes:
        step_seconds: From one step to the next.
        compute_seconds: That the device is busy in it.
        link_seconds: That the link is busy in it.
        spans: The device's in order, then the link's in the order of issue.
    """

    step_seconds: float
    compute_seconds: float
    link_seconds: float
    spans: tuple[Span, ...]

    @property
    def exposed_seconds(self) -> float:
        """The device waits for the link."""
        return self.step_seconds - self.compute_seconds

    @property
    def link_idle_seconds(self) -> float:
        """The link has nothing to send yet."""
        return self.step_seconds - self.link_seconds

    @property
    def bound_seconds(self) -> float:
        """No order of the same buckets is faster: all of the compute, or all of the messages."""
        return max(self.compute_seconds, self.link_seconds)


class StepModel:
    """A model's costs as flat lists, for many orders of the same layers.

    Attributes:
        forward_seconds: Of all layers.
        compute_seconds: Of a step.
    """

    def __init__(self, layers: Sequence[LayerCosts], link: LinkCosts) -> None:
        """Take the costs apart.

        Args:
            layers: In forward order.
            link: What gradients cross.
        """
        self._latency, self._rate = link.latency_seconds, link.bytes_per_second
        input_grads = [layer.input_grad_seconds for layer in layers]
        weight_grads = [layer.weight_grad_seconds for layer in layers]
        self._seconds = {
            "I": input_grads,
            "W": weight_grads,
            "B": [i + w for i, w in zip(input_grads, weight_grads, strict=True)],
        }
        tails, tail = [], 0.0
        for layer in reversed(layers):
            tail += layer.forward_seconds
            tails.append(tail)
        tails.reverse()
        self.forward_seconds = tail
        self.compute_seconds = tail + sum(self._seconds["B"])
        self._tails = (tuple(tail for _ in layers), tuple(tails))

    def action_seconds(self, action: Action) -> float:
        """How long the device is busy with an action.

        Args:
            action: Of a plan.

        Returns:
            Seconds.
        """
        return self._seconds[action.kind][action.layer]

    def bucket_seconds(self, num_bytes: int) -> float:
        """How long the link is busy with a bucket.

        Args:
            num_bytes: Of its pieces together.

        Returns:
            Seconds.
        """
        return self._latency + num_bytes / self._rate

    def ready_seconds(self, backward: Iterable[Action]) -> list[float]:
        """When each layer's weight gradient is ready.

        Args:
            backward: Actions of a plan.

        Returns:
            Seconds from the end of forward, for each layer.
        """
        ready, clock, seconds = [0.0] * len(self._tails[0]), 0.0, self._seconds
        for kind, layer in backward:
            clock += seconds[kind][layer]
            if kind != "I":
                ready[layer] = clock
        return ready

    def measure(
        self, ready: Sequence[float], buckets: Iterable[Bucket], is_cross: bool, is_scattered: bool = False
    ) -> tuple[float, float]:
        """How long a step takes, and how much is left to gain in it.

        Args:
            ready: From `ready_seconds`.
            buckets: In the order of issue.
            is_cross: Whether the next forward starts before all has arrived.
            is_scattered: Whether it does so when the norm of all gradients is known.

        Returns:
            Seconds of a step; and a mean over all layers of the time at which forward can end if that layer alone holds
            it up: among plans of the same step, that with less has more to spare.
        """
        if is_scattered:
            return self._measure_scattered(ready, buckets)
        tails, latency, rate = self._tails[is_cross], self._latency, self._rate
        clock, longest = 0.0, self.compute_seconds
        arrived: dict[int, float] = {}
        for bucket in buckets:
            size = 0
            for layer, begin, end in bucket:
                if ready[layer] > clock:
                    clock = ready[layer]
                size += end - begin
            clock += latency + size / rate
            for layer, _, _ in bucket:
                last = arrived[layer] = clock + tails[layer]
                if last > longest:
                    longest = last
        return longest, sum(arrived.values()) / len(arrived) if arrived else 0.0

    def _measure_scattered(self, ready: Sequence[float], buckets: Iterable[Bucket]) -> tuple[float, float]:
        clock, halves = 0.0, []
        for bucket in buckets:
            half = self.bucket_seconds(sum(piece.num_bytes for piece in bucket)) / 2
            clock = max(clock, *(ready[piece.layer] for piece in bucket)) + half
            halves.append((min(piece.layer for piece in bucket), half))
        clock = max(clock, self.compute_seconds - self.forward_seconds) + self._latency
        longest = max(self.compute_seconds, clock + self.forward_seconds) if halves else self.compute_seconds
        held = 0.0
        for first, half in sorted(halves, key=lambda one: one[0]):
            clock += half
            held += clock + self._tails[True][first]
            longest = max(longest, clock + self._tails[True][first])
        return longest, held / len(halves) if halves else 0.0


def simulate(plan: SyncPlan, layers: Sequence[LayerCosts], link: LinkCosts) -> Timeline:
    """What a step with a plan looks like once every step is like the one before.

    Args:
        plan: One that `validate` accepts.
        layers: In forward order.
        link: What gradients cross.

    Returns:
        The step.

    Example:
        >>> from lightning_gpufeed.sync.plan import conventional
        >>> layers = [LayerCosts(name, 1.0, 1.0, 1.0, gradient_bytes=10) for name in "ab"]
        >>> timeline = simulate(conventional(layers, bucket_bytes=1), layers, LinkCosts(0.0, 5.0))
        >>> timeline.step_seconds, timeline.bound_seconds, timeline.exposed_seconds
        (8.0, 6.0, 2.0)
    """
    model = StepModel(layers, link)
    ready = model.ready_seconds(plan.backward)
    step_seconds, _ = model.measure(ready, plan.buckets, plan.cross_iteration, plan.is_scattered)
    backward_begin = step_seconds - (model.compute_seconds - model.forward_seconds)
    device, clock = [], backward_begin
    for action in plan.backward:
        begin, clock = clock, clock + model.action_seconds(action)
        device.append(Span("device", action.kind, (action.layer,), begin, clock))
    sent: list[Span] = []
    clock = backward_begin
    arrived = [0.0] * len(layers)  # in the step, of what was sent in the step before
    share = 0.5 if plan.is_scattered else 1.0
    numbers = [(False, number) for number in range(len(plan.buckets))]
    numbers += [(True, number) for number in plan.gathers] if plan.is_scattered else []
    for is_gather, number in numbers:
        bucket = plan.buckets[number]
        begin = max(clock, *(backward_begin + ready[piece.layer] for piece in bucket))
        if is_gather and sent[-1].phase == "bucket":
            begin = max(clock, step_seconds) + link.latency_seconds  # the norm is known
            arrived = [begin - step_seconds] * len(layers)
        clock = begin + share * model.bucket_seconds(sum(piece.num_bytes for piece in bucket))
        layers_of_bucket = tuple(dict.fromkeys(piece.layer for piece in bucket))
        sent.append(Span("link", "gather" if is_gather else "bucket", layers_of_bucket, begin, clock))
        for layer in layers_of_bucket:
            arrived[layer] = clock - step_seconds
    if not plan.cross_iteration:
        arrived = [max(arrived, default=0.0)] * len(layers)
    forward, clock = [], 0.0
    for i, costs in enumerate(layers):
        begin = max(clock, arrived[i])
        clock = begin + costs.forward_seconds
        forward.append(Span("device", "F", (i,), begin, clock))
    return Timeline(
        step_seconds,
        model.compute_seconds,
        sum(span.end - span.begin for span in sent),
        (*forward, *device, *sent),
    )
