"""What a step is made of: seconds and bytes of each layer, and of the link that gradients cross. Pure.

::

    layer   F forward | I input gradient | W weight gradient | bytes of its gradient
    link    seconds of a message = latency + bytes / rate
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from statistics import median

__all__ = ["LayerCosts", "LinkCosts", "fit_link"]

_MOST_PAIRED = 200
"""Samples of which every pair is looked at."""
_OUTLIER = 3.0
"""Standard deviations, told by the median, from which on a sample is left out."""
_LEAST_SPREAD = 0.02
"""Relative error of a measurement that is no reason to leave it out."""


@dataclass(frozen=True)
class LayerCosts:
    """One layer. A model is a tuple of them in the order of forward.

    Attributes:
        name: Of the layer, for messages.
        forward_seconds: Of its forward.
        input_grad_seconds: Of the gradient of its input; 0 where nobody needs it, as for the first layer.
        weight_grad_seconds: Of the gradient of its parameters.
        gradient_bytes: What is sent; 0 for a layer without parameters.
        deferred_bytes: What stays in memory while its weight gradient waits.
        is_deferrable: False if the weight gradient comes with the input gradient, as in a norm.
    """

    name: str
    forward_seconds: float
    input_grad_seconds: float
    weight_grad_seconds: float
    gradient_bytes: int
    deferred_bytes: int = 0
    is_deferrable: bool = True

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: One is negative or no finite number.
        """
        for name in (
            "forward_seconds",
            "input_grad_seconds",
            "weight_grad_seconds",
            "gradient_bytes",
            "deferred_bytes",
        ):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} of layer {self.name!r} is {value}; expected a finite number, at least 0.")

    @property
    def compute_seconds(self) -> float:
        """All that the device does for the layer in a step."""
        return self.forward_seconds + self.input_grad_seconds + self.weight_grad_seconds


@dataclass(frozen=True)
class LinkCosts:
    """The link between the ranks, seen from one of them: one message at a time.

    Attributes:
        latency_seconds: What a message takes however small it is.
        bytes_per_second: Gradient bytes that it reduces in a second; `inf` if size does not matter.

    Example:
        >>> LinkCosts(latency_seconds=0.5, bytes_per_second=100.0).seconds(50)
        1.0
    """

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: The latency is negative, or the rate is not positive.
        """
        if not (self.latency_seconds >= 0 and math.isfinite(self.latency_seconds)):
            raise ValueError(f"latency_seconds is {self.latency_seconds}; expected a finite number, at least 0.")
        if not self.bytes_per_second > 0:
            raise ValueError(f"bytes_per_second is {self.bytes_per_second}; expected more than 0.")

    def seconds(self, num_bytes: int) -> float:
        """How long one message takes.

        Args:
            num_bytes: Its size.

        Returns:
            Seconds.
        """
        return self.latency_seconds + num_bytes / self.bytes_per_second


def fit_link(samples: Iterable[tuple[int, float]]) -> LinkCosts:
    """The link whose messages would take what was measured.

    A straight line through the medians of all pairs says which samples are outliers; least squares of the relative
    errors of the others gives the answer. A line that would need a negative latency or rate is replaced by the best
    one without.

    Args:
        samples: Pairs of the bytes of a message, more than 0, and its seconds. Two sizes or more, to tell latency
            from rate: with one size all of the time counts as rate.

    Returns:
        The link.

    Raises:
        ValueError: There is no sample, or one is not positive.

    Source:
        Theil and Sen's estimator (Sen, 1968) for the first line.

    Example:
        >>> link = fit_link([(100, 3.0), (200, 4.0), (300, 5.0), (400, 6.0), (250, 99.0)])
        >>> round(link.latency_seconds, 6), round(link.bytes_per_second, 6)
        (2.0, 100.0)
    """
    points = sorted(samples)
    if not points:
        raise ValueError("There is no sample; expected at least one message with its bytes and its seconds.")
    for size, seconds in points:
        if size <= 0 or not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"A message of {size} bytes took {seconds} s; expected more than 0 of both, and finite.")
    paired = points[:: -(-len(points) // _MOST_PAIRED)]
    slopes = [(s2 - s1) / (b2 - b1) for (b1, s1), (b2, s2) in combinations(paired, 2) if b1 != b2]
    if not slopes:
        return LinkCosts(0.0, points[0][0] / median(seconds for _, seconds in points))
    slope = max(0.0, median(slopes))
    latency = max(0.0, median(seconds - slope * size for size, seconds in points))
    errors = [abs(seconds - latency - slope * size) / seconds for size, seconds in points]
    most = _OUTLIER * max(1.4826 * median(errors), _LEAST_SPREAD)
    kept = [point for point, error in zip(points, errors, strict=True) if error <= most]
    latency, slope = _least_squares(kept)
    return LinkCosts(latency, 1 / slope if slope > 0 else math.inf)


def _least_squares(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Latency and seconds per byte with the least relative errors, neither negative."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_size = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
    mean_seconds = sum(w * seconds for w, (_, seconds) in zip(weights, points, strict=True)) / total
    spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, points, strict=True))
    if spread <= 0:  # the outliers were all of the other sizes
        return 0.0, mean_seconds / mean_size
    both = sum(
        w * (size - mean_size) * (seconds - mean_seconds) for w, (size, seconds) in zip(weights, points, strict=True)
    )
    slope = both / spread
    latency = mean_seconds - slope * mean_size
    if slope < 0:
        return mean_seconds, 0.0
    if latency < 0:
        squares = sum(w * size**2 for w, (size, _) in zip(weights, points, strict=True))
        products = sum(w * size * seconds for w, (size, seconds) in zip(weights, points, strict=True))
        return 0.0, products / squares
    return latency, slope
