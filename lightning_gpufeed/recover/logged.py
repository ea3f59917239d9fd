"""What was logged in microbatches, put together to what the whole batch would have logged.

A value can stand for a batch in several ways: the mean over its samples (a loss), their sum (a number of hits), the
largest or smallest of them. Which one it is cannot be read off the value. It is found by comparing, once, a part that
fits with its own halves; before that, the way in which the value is reduced over an epoch is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

__all__ = ["LogCall", "Rule", "combine", "combine_calls", "find_rule", "find_rules", "size_key", "usual_rule"]

Rule = Literal["mean", "sum", "max", "min"]
RULES: tuple[Rule, ...] = ("mean", "sum", "max", "min")


@dataclass
class LogCall:
    """One call of `log`.

    Attributes:
        key: Which value it is.
        value: A tensor with one element, or a metric object.
        reduce_name: How it is reduced over an epoch.
        batch_size: If the caller said it.
        rest: Whatever else is needed to log it.
    """

    key: str
    value: Any
    reduce_name: str
    batch_size: int | None
    rest: tuple[tuple[Any, ...], dict[str, Any]] = field(default=((), {}), repr=False)


def usual_rule(reduce_name: str) -> Rule:
    """The way a value is taken to stand for a batch if nothing else is known.

    Args:
        reduce_name: How it is reduced over an epoch.

    Returns:
        The same.
    """
    return reduce_name if reduce_name in RULES else "mean"


def combine(parts: Sequence[torch.Tensor], weights: Sequence[float], rule: Rule) -> torch.Tensor:
    """Put the values of parts together.

    Args:
        parts: One value each, on one device.
        weights: Their shares of the whole.
        rule: How.

    Returns:
        One value of the same type. Values that are all the same stay what they are, to the last bit, but for sums.
    """
    stacked = torch.stack([part.detach() for part in parts])
    if rule == "sum":
        return stacked.sum(0).to(parts[0].dtype)
    if rule in ("max", "min"):
        return stacked.amax(0) if rule == "max" else stacked.amin(0)
    if all(torch.equal(part, parts[0]) for part in parts[1:]):
        return parts[0].detach()
    wide = stacked if stacked.dtype == torch.float64 else stacked.float()
    shares = torch.tensor(weights, dtype=wide.dtype, device=wide.device) / sum(weights)
    mean = (wide * shares.view(-1, *[1] * (wide.ndim - 1))).sum(0)
    return mean.to(parts[0].dtype) if parts[0].is_floating_point() else mean


def find_rule(
    whole: torch.Tensor, parts: Sequence[torch.Tensor], weights: Sequence[float], usual: Rule, tolerance: float
) -> Rule | None:
    """How a value of parts gives that of the whole.

    Args:
        whole: What the whole gave.
        parts: What its parts gave.
        weights: Their shares.
        usual: Taken if it fits, as several may.
        tolerance: Relative.

    Returns:
        None: in no way that is known.
    """
    scale = max(float(value.double().abs().max()) for value in (whole, *parts))
    errors: dict[Rule, float] = {}
    for rule in (usual, *[other for other in RULES if other != usual]):
        got = combine(parts, weights, rule).double()
        is_same = torch.equal(got, whole.double())  # also if both are infinite
        errors[rule] = 0.0 if is_same else float((got - whole.double()).abs().max())
    best = min(errors, key=lambda rule: errors[rule])
    if not errors[best] <= tolerance * scale:
        return None
    # In half precision several are near; the usual one has to be about as near as any.
    return usual if errors[usual] <= max(2 * errors[best], 1e-6 * scale) else best


def find_rules(
    whole: Sequence[LogCall], parts: Sequence[Sequence[LogCall]], weights: Sequence[float], tolerance: float
) -> tuple[dict[str, Rule], list[str], list[str]]:
    """How each logged value of parts gives that of the whole.

    Args:
        whole: What the whole logged.
        parts: What each of its parts logged.
        weights: Share of each part.
        tolerance: Relative.

    Returns:
        Key -> rule, also for batch sizes that were said (see `size_key`); keys for which there is none; keys whose
        values were zero, so that any rule fits and none is noted.
    """
    rules: dict[str, Rule] = {}
    unknown: list[str] = []
    still_open: list[str] = []
    for call in whole:
        same = [[other for other in calls if other.key == call.key] for calls in parts]
        if call.key in rules or any(len(calls) != 1 for calls in same):
            continue  # logged several times, or not by every part: taken the usual way
        sizes = [calls[0].batch_size for calls in same]
        if call.batch_size is not None and None not in sizes:
            rules[size_key(call.key)] = "sum" if sum(size or 0 for size in sizes) == call.batch_size else "max"
        if isinstance(call.value, torch.Tensor):
            values = [calls[0].value for calls in same]
            if not any(bool(value.any()) for value in (call.value, *values)):
                still_open.append(call.key)
                continue
            rule = find_rule(call.value, values, weights, usual_rule(call.reduce_name), tolerance)
            rules[call.key] = rule or "mean"
            if rule is None:
                unknown.append(call.key)
    return rules, unknown, still_open


def size_key(key: str) -> str:
    """Where the rule for the batch size that was said with a value stands."""
    return f"{key}#batch_size"


def combine_calls(
    microbatches: Sequence[Sequence[LogCall]],
    sizes: Sequence[int],
    weights: Sequence[float],
    rules: Mapping[str, Rule],
) -> list[LogCall]:
    """What the whole batch would have logged.

    Args:
        microbatches: The calls of each.
        sizes: Samples of each.
        weights: Share of each.
        rules: From `find_rules`; the usual way for keys that are not there.

    Returns:
        One call for each, in the order of the first microbatch that has it. A value that not every microbatch has
        logged is put together from those that have.
    """
    found: dict[tuple[str, int], list[tuple[LogCall, int, float]]] = {}
    for calls, size, weight in zip(microbatches, sizes, weights, strict=True):
        times: dict[str, int] = {}
        for call in calls:
            number = times[call.key] = times.get(call.key, 0) + 1
            found.setdefault((call.key, number), []).append((call, size, weight))
    return [_combined(same, rules) for same in found.values()]


def _combined(same: list[tuple[LogCall, int, float]], rules: Mapping[str, Rule]) -> LogCall:
    first = same[0][0]
    said = [call.batch_size for call, _, _ in same]
    batch_size = None
    if None not in said:
        numbers = [size or 0 for size in said]
        # What differs, or counts the microbatch's own samples, is a part; the same number each time is of the whole.
        is_part = len(set(numbers)) > 1 or numbers == [size for _, size, _ in same]
        rule = rules.get(size_key(first.key), "sum" if is_part else "max")
        batch_size = sum(numbers) if rule == "sum" else max(numbers)
    value = first.value
    if isinstance(value, torch.Tensor):
        rule = rules.get(first.key, usual_rule(first.reduce_name))
        value = combine([call.value for call, _, _ in same], [weight for _, _, weight in same], rule)
    return LogCall(first.key, value, first.reduce_name, batch_size, first.rest)
