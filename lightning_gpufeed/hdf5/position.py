"""Where a loader is in which epoch. Pure.

::

    set_epoch(2)     load(2, 40, 4)        begin -> 40      advance(10)        begin -> next epoch
    epoch 2, new     epoch 2 from 40 on    it runs          50 consumed        epoch 3, new
"""

from __future__ import annotations

__all__ = ["EpochPosition"]


class EpochPosition:
    """Where a loader is: an epoch and how much of it is used.

    Attributes:
        epoch: The epoch running, or to come.
        samples_consumed: Samples of it that all ranks together were handed.
        is_begun: Whether an iteration over this epoch has begun.
        steps_done: Batches of it that each rank was handed, counted back from its end after a resume with other sizes.
    """

    def __init__(self) -> None:
        """Before epoch 0."""
        self.epoch = 0
        self.samples_consumed = 0
        self.steps_done = 0
        self.is_begun = False
        self._is_epoch_set = False
        self._latest_samples = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is.

        Args:
            epoch: Counts from 0.
        """
        if epoch != self.epoch or self.is_begun:
            self.load(epoch, 0, 0)
        self._is_epoch_set = True

    def load(self, epoch: int, samples_consumed: int, steps_done: int) -> None:
        """Go to a saved position.

        Args:
            epoch: The epoch.
            samples_consumed: Samples of it used.
            steps_done: Batches of it handed to each rank.
        """
        self.epoch = epoch
        self.samples_consumed = samples_consumed
        self.steps_done = steps_done
        self._latest_samples = 0
        self.is_begun = False
        self._is_epoch_set = False

    def begin(self, is_over: bool) -> int:
        """An iteration begins: settle its epoch.

        Args:
            is_over: Whether the position leaves no step of its epoch.

        Returns:
            Samples of the epoch that are used already.
        """
        if self.is_begun or (is_over and not self._is_epoch_set):
            self.load(self.epoch + 1, 0, 0)
        self.is_begun = True
        self._is_epoch_set = False
        return self.samples_consumed

    def advance(self, num_samples: int) -> None:
        """A batch was handed out.

        Args:
            num_samples: Samples that all ranks together got.
        """
        self.samples_consumed += num_samples
        self.steps_done += 1
        self._latest_samples = num_samples

    def numbers(self, is_latest_in_work: bool) -> dict[str, int]:
        """The position as numbers to save.

        Args:
            is_latest_in_work: Whether the latest batch is still being worked on, and has to come again.

        Returns:
            `epoch`, `samples_consumed` and `steps_done`.
        """
        steps, samples = (1, self._latest_samples) if is_latest_in_work and self._latest_samples else (0, 0)
        return {
            "epoch": self.epoch,
            "samples_consumed": self.samples_consumed - samples,
            "steps_done": self.steps_done - steps,
        }
