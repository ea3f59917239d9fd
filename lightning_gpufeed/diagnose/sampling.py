"""Which steps are watched in full, so that watching keeps to its budget. Asks no clock; its random numbers are its own.

::

    long steps     ████████████████████████████████████████   all
    short steps    ████████░░░░░░░░░░░░░░████████░░░░████████░░░ ...
                   a run   ^ of the steps between, the request for the batch and its arrival are noted

Runs have a fixed length, so that what happens between a step and the next is seen too, and patterns of a few steps are
seen whole. What lies between two runs has a random length: a loader's own period, such as its number of workers, meets
no period of the watch.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Collection

__all__ = ["RUN", "StepSampler", "watched_share"]

RUN = 8
"""Steps of a run."""
_FIRST_RUNS = 8
_BUDGET = 0.005
_LEAST_BUDGET = 0.003
_FLOOR = 0.1
"""What a step costs that is not watched in full, as a share of what one costs that is."""
_LEAST_SHARE = 1 / 32
_HIDDEN_FACTOR = 10.0
"""Calls into a hook and out of it again cost more than what goes by inside of it: this much, all in all."""
_MOST_COSTS = 64
_MOST_MEANS = 8


def watched_share(step_seconds: float, cost_seconds: float, other_share: float = 0.0) -> float:
    """Share of the steps that can be watched in full within the budget.

    Args:
        step_seconds: Time of a step.
        cost_seconds: What it costs to watch one in full.
        other_share: Share of the time that is spent on looking at other things than steps.

    Returns:
        Above 0, at most 1. Steps that are too short for any are watched now and then all the same.
    """
    if cost_seconds <= 0 or step_seconds <= 0:  # not known yet
        return 1.0
    budget = max(_LEAST_BUDGET, _BUDGET - other_share) * step_seconds
    share = (budget / cost_seconds - _FLOOR) / (1 - _FLOOR)
    return min(1.0, max(_LEAST_SHARE, share))


class StepSampler:
    """Decides after each step that is watched in full how many of the next ones are not.

    The first steps of all, and the first run of an epoch, are watched and stand for themselves.

    Example:
        >>> sampler = StepSampler()
        >>> sampler.end_step(now=0.004, inside_seconds=2e-5, direct_seconds=0.0), sampler.weight
        (0, 1.0)

    Attributes:
        weight: Steps that each step of the next run stands for.
        share: Of the steps that are watched in full from the last decision on.
        other_share: Share of the time that is spent on looking at other things than steps; set by the caller.
    """

    def __init__(self, seed: int = 0) -> None:
        """All are watched, to begin with.

        Args:
            seed: Of its own random numbers.
        """
        self._random = random.Random(seed)
        self.weight = self.share = 1.0
        self.other_share = 0.0
        self._left = RUN * _FIRST_RUNS
        self._costs: deque[float] = deque(maxlen=_MOST_COSTS)
        self._means: deque[float] = deque(maxlen=_MOST_MEANS)
        self._num_runs = 0
        self._direct: deque[float] = deque(maxlen=_MOST_MEANS)
        self._direct_before = 0.0
        self._since: float | None = None
        self._num_since = 0

    def begin_epoch(self) -> None:
        """An epoch begins, with a run."""
        self._left = max(RUN, self._left if self._num_runs == 0 else 0)
        self.weight = 1.0
        self.pause()

    def pause(self) -> None:
        """Something else begins, such as validation: the time until the end of the next step is no step's."""
        self._since = None

    def end_step(self, now: float, inside_seconds: float | None, direct_seconds: float) -> int:
        """A step that was watched in full is over.

        Args:
            now: Time, in seconds.
            inside_seconds: What went by inside of the hooks between two steps, without what is measured as a whole;
                None if it is not known.
            direct_seconds: All that was measured as a whole so far, such as reading marks of a device.

        Returns:
            Steps that come before the next one that is watched in full.
        """
        if inside_seconds is not None:
            self._costs.append(inside_seconds)
        if self._since is None:
            self._since, self._num_since = now, 0
        else:
            self._num_since += 1
        self._left -= 1
        if self._left > 0:
            return 0
        self._measure(now, direct_seconds)
        self.share = watched_share(self.step_seconds, self.cost_seconds, self.other_share)
        self._left, self.weight = RUN, 1.0 / self.share
        num_steps = self._gap()
        self._num_since += num_steps
        return num_steps

    @property
    def step_seconds(self) -> float:
        """Time of a step: the mean over a run and what lies before it, of the usual run; 0 if nothing was measured."""
        return _middle(self._means)

    @property
    def cost_seconds(self) -> float:
        """What it costs to watch a step in full, by what was measured; 0 if nothing was."""
        if not self._costs:
            return 0.0
        inside = sorted(self._costs)[3 * len(self._costs) // 4]
        return _HIDDEN_FACTOR * inside + _middle(self._direct)

    def _measure(self, now: float, direct_seconds: float) -> None:
        """Bring the figures up to date."""
        num_watched = RUN * (1 if self._num_runs else _FIRST_RUNS)
        self._num_runs += 1
        if self._num_since > 0 and self._since is not None:
            self._means.append((now - self._since) / self._num_since)
        self._direct.append((direct_seconds - self._direct_before) / num_watched)
        self._direct_before = direct_seconds
        self._since, self._num_since = now, 0

    def _gap(self) -> int:
        """Steps until the next run, in the mean such that the share comes out: as in throwing a die before each."""
        if self.share >= 1.0:
            return 0
        mean = RUN * (1 / self.share - 1)
        return int(math.log(1.0 - self._random.random()) / math.log(mean / (mean + 1)))


def _middle(values: Collection[float]) -> float:
    """The usual one of some; 0 of none."""
    return sorted(values)[len(values) // 2] if values else 0.0
