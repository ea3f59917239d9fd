"""How many microbatches a batch is cut into: more at once when memory runs out, fewer again after clean batches.

Pure: numbers in, numbers out. Several ranks that are told the same stay the same.

::

    batch     1   2   3 ....... 22   23  24  25 ...... 63   64
    memory    ok  out ok ...... ok   ok  out ok ...... ok   ok
    count     1   1   2 ....... 2    1   1   2 ....... 2    1
                  1 again                2 (no second try of a size on trial)
                  2 works
                      |-- 20 clean -|        |-- 40 --|         grow_after=20, doubled as the trial failed early
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["RetryPlan"]


class RetryPlan:
    """Number of microbatches for the next batch, and for the next attempt of one that failed.

    Attributes:
        num_microbatches: Microbatches for a batch of `found_samples`.
        fewest: What the user asked for; never less.
        found_samples: Samples of the batch that the number was found on; 0: any.
    """

    def __init__(self, num_microbatches: int = 1, *, grow_after: int | None = 20, max_retries: int = 20) -> None:
        """Begin with what the user asked for.

        Args:
            num_microbatches: To begin with, and the fewest ever.
            grow_after: Clean batches before a larger size is tried; None: never.
            max_retries: Failed attempts of one batch after which it is given up.
        """
        self.num_microbatches = self.fewest = num_microbatches
        self.found_samples = 0
        self._grow_after, self._max_retries = grow_after, max_retries
        self._patience: dict[int, int] = {}
        self._num_clean = 0
        self._is_on_trial = self._has_repeated = False
        self._before_trial = (num_microbatches, 0)

    def num_for(self, num_samples: int) -> int:
        """Microbatches for a batch.

        Args:
            num_samples: Samples in it.

        Returns:
            At least 1, at most `num_samples`; none of them larger than what is known to fit.
        """
        if self.num_microbatches == 1:
            return 1
        if self.found_samples in (0, num_samples):
            return max(1, min(self.num_microbatches, num_samples))
        fitting = math.ceil(self.found_samples / self.num_microbatches)
        return max(1, min(self.fewest, num_samples), math.ceil(num_samples / fitting))

    def after_failure(self, num_samples: int, num_microbatches: int, num_failures: int) -> int | None:
        """What to do with a batch that ran out of memory.

        Args:
            num_samples: Samples in it; the largest of all ranks.
            num_microbatches: It was cut into so many; the largest of all ranks.
            num_failures: Failed attempts of this batch, this one too.

        Returns:
            Microbatches for the next attempt. None: give up.
        """
        if num_failures > self._max_retries:
            return None
        is_first = num_failures == 1 and not self._is_on_trial and not self._has_repeated
        if is_first or (num_microbatches >= num_samples and num_failures == 1):
            return num_microbatches
        return min(2 * num_microbatches, num_samples) if num_microbatches < num_samples else None

    def settle(self, num_samples: int = 0, num_microbatches: int = 0, num_failures: int = 0) -> bool:
        """A batch is done.

        Args:
            num_samples: Samples in it, if it failed at first.
            num_microbatches: What worked, if it failed at first.
            num_failures: Attempts that failed.

        Returns:
            Whether a larger size is tried from the next batch on.
        """
        if num_failures:
            self._note_failure(num_samples, num_microbatches)
            return False
        self._has_repeated = False
        self._num_clean += 1
        if self._is_on_trial and self._num_clean >= self._patience_for(self.num_microbatches):
            self._is_on_trial = False
        if self._grow_after is None or self.num_microbatches <= self.fewest:
            return False
        larger = max(self.fewest, self.num_microbatches // 2)
        if self._num_clean < self._patience_for(larger):
            return False
        self._before_trial = (self.num_microbatches, self.found_samples)
        self.num_microbatches, self._num_clean, self._is_on_trial = larger, 0, True
        if larger == self.fewest:  # what the user asked for is a number, whatever the batch
            self.found_samples = 0
        return True

    def _note_failure(self, num_samples: int, num_microbatches: int) -> None:
        tried = self.num_for(num_samples)
        if self._is_on_trial:  # it came soon after it was tried, so that was too early
            self._patience[self.num_microbatches] = 2 * self._patience_for(self.num_microbatches)
        # One size that is too large by a little in every batch would be tried twice each time.
        self._has_repeated = num_microbatches <= tried
        if num_microbatches > tried:
            fits, failed = math.ceil(num_samples / num_microbatches), math.ceil(num_samples / tried)
            before, samples_before = self._before_trial
            # What was known to fit before a trial still does, if the trial failed on another size of batch.
            is_known = self._is_on_trial and samples_before > 0 and fits < math.ceil(samples_before / before) < failed
            self.num_microbatches = before if is_known else num_microbatches
            self.found_samples = samples_before if is_known else num_samples
        self._num_clean, self._is_on_trial = 0, False

    def start_over(self) -> None:
        """Batches are smaller now: begin again with what the user asked for."""
        self.num_microbatches, self.found_samples = self.fewest, 0
        self._patience.clear()
        self._num_clean, self._is_on_trial, self._has_repeated = 0, False, False
        self._before_trial = (self.fewest, 0)

    def _patience_for(self, num_microbatches: int) -> int:
        """Clean batches before this number is tried."""
        return self._patience.get(num_microbatches, self._grow_after or 0)

    def state_dict(self) -> dict[str, Any]:
        """What was found.

        Returns:
            Plain numbers.
        """
        return {
            "num_microbatches": self.num_microbatches,
            "found_samples": self.found_samples,
            "num_clean": self._num_clean,
            "patience": dict(self._patience),
            "is_on_trial": self._is_on_trial,
            "has_repeated": self._has_repeated,
            "before_trial": list(self._before_trial),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with what was found.

        Args:
            state: From `state_dict`. The number is not lower than what the user asks for now.
        """
        self.num_microbatches = max(self.fewest, int(state["num_microbatches"]))
        self.found_samples = int(state["found_samples"])
        self._num_clean = int(state["num_clean"])
        self._patience = {int(number): int(batches) for number, batches in state["patience"].items()}
        self._is_on_trial, self._has_repeated = bool(state["is_on_trial"]), bool(state["has_repeated"])
        before, found = state["before_trial"]
        self._before_trial = (max(self.fewest, int(before)), int(found))
