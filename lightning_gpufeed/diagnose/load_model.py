"""What a step would take if loading were cheaper. Pure.

One step lasts as long as the slower of two: the training, or the loader's pace::

    t_step = max(t_rest, t_load)        batches are made ahead, by workers or a thread
    t_step = t_rest + t_load            they are made when they are asked for

A cure leaves a share of `t_load`. How large a share follows from what the readers were seen to do: their time for a
batch is divided into reading, converting, handing over and the rest, by what each costs on this machine.

Source: the model is the steady state of a pipeline of two stages; the unit costs are measured, see `costs`.
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gpufeed.diagnose.counters import EpochCounters, Usage
from lightning_gpufeed.diagnose.judgement import Cure
from lightning_gpufeed.diagnose.shares import ready_share

__all__ = ["LoadModel", "LoadParts", "waiting_asleep"]

_MOST_GAIN = 100.0
_BEHIND_SHARE = 0.5
_HAND_OVER_SECONDS, _MOST_HAND_OVER_SECONDS = 0.5e-3, 2e-3
"""What a batch costs the training when it comes from another process, however small it is."""
_PRESSURE_SHARE = 0.3
_MOST_QUEUE = 0.8
"""Most of the step that the training may have waited for a core."""


@dataclass(frozen=True)
class LoadParts:
    """Time that readers need for one batch, in seconds of one reader.

    Attributes:
        read: Copying bytes out of the page cache, or HDF5's chunk cache.
        convert: Making floats of 8-bit numbers.
        ship: Handing the batch from a worker to the training process.
        other: On a core for anything else: decoding, augmentation, collating, Python.
        asleep: Waiting for storage, or for whatever the dataset waits for.
    """

    read: float
    convert: float
    ship: float
    other: float
    asleep: float

    @property
    def busy(self) -> float:
        """On a core."""
        return self.read + self.convert + self.ship + self.other

    @property
    def total(self) -> float:
        """All of it, waiting for a core apart."""
        return self.busy + self.asleep


class LoadModel:
    """The epoch's step, taken apart, and what it would be with another loader.

    Attributes:
        step: Seconds of one step.
        rest: Seconds of one step that are not waiting for data.
        load: Seconds that the loader needs for one batch, all readers together; an upper bound where it keeps up.
        parts: What one reader needs for a batch; None if the readers could not be watched.
    """

    def __init__(self, counters: EpochCounters) -> None:
        """Take the counters apart.

        Args:
            counters: Of an epoch with at least one step.
        """
        steps, loader = counters.steps, counters.loader
        self._is_ahead = loader.is_ahead
        self._num_readers, self._num_workers = loader.num_readers, loader.num_workers
        self._num_cores = counters.machine.num_cores
        count = max(1, steps.num_steps)
        self.step = steps.step_seconds
        self.wait = steps.data_seconds / count
        self.rest = max(self.step - self.wait, 1e-9)
        # Where the loader sets the pace, a batch takes it as long as a step.
        self.load = self.step if self._is_ahead else max(self.wait, 1e-9)
        self.parts = _parts_of(counters)
        self._most_total = _most_total(counters, self.parts)
        watched = counters.num_main_steps
        self._is_host = steps.idle_seconds is None
        self._is_crowded = (counters.machine.cpu_pressure or 0.0) >= _PRESSURE_SHARE
        self._main_busy = self._main_queue = 0.0
        if counters.main is not None and watched:
            self._main_busy = counters.main.busy_seconds / watched
            if not self._is_ahead and self.parts is not None:  # it loads, too
                self._main_busy = max(0.0, self._main_busy - self.parts.busy)
        self._main_queue = self._most_queue = (
            self._queue_of_training(counters) if self._is_host and self._is_ahead else 0.0
        )
        if self._main_queue < 0:  # not known
            is_crowded = (counters.machine.cpu_pressure is None) or counters.machine.cpu_pressure > 0.1
            self._main_queue, self._most_queue = 0.0, _MOST_QUEUE * self.rest if is_crowded else 0.0

    def _queue_of_training(self, counters: EpochCounters) -> float:
        """How long the training waits for a core in a step: where readers take the cores, that ends with them."""
        thread, watched = counters.training_thread, counters.num_main_steps
        if thread is None or thread.queue_seconds is None or not watched:
            return -1.0
        return min(thread.queue_seconds / watched, _MOST_QUEUE * self.rest)

    @property
    def free_echo_factor(self) -> float:
        """R: time to load a batch over time to train on it; `BatchEcho` reads ahead, so up to this it is free."""
        return min(_MOST_GAIN, self.load / self.rest)

    def cure(
        self,
        name: str,
        action: str,
        left: float,
        *,
        least: float | None = None,
        most: float | None = None,
        becomes_ahead: bool = False,
        moved: float = 0.0,
    ) -> Cure:
        """A cure that leaves a share of the loading time.

        Args:
            name: Of the cure.
            action: What to do.
            left: Share of the loading time that is left, as far as can be told.
            least: Least share that could be left; None for the same.
            most: Most share that could be left; None for the same.
            becomes_ahead: Whether batches are made ahead then, whatever they are now.
            moved: Seconds of work for a batch that the step does then; where a device computes it costs nothing.

        Returns:
            The cure with its gain, and the range of it.
        """
        is_ahead = self._is_ahead or becomes_ahead
        moved = moved if self._is_host else 0.0
        low = self._gain(left if most is None else most, self.rest + 1.5 * moved, is_ahead)
        high = self._gain(left if least is None else least, self.rest - self._most_queue + 0.25 * moved, is_ahead)
        middle = self._gain(left, self.rest - self._main_queue / 2 + moved, is_ahead)
        if self.parts is None:
            low = min(low, 1.0)
        elif self._is_host:  # loading and training share the cores, whatever is done ahead
            on_cores = (left * self.parts.busy + self._main_busy + moved) / self._num_cores
            middle = min(middle, self.step / max(on_cores, 1e-9))
        high = max(high, low)
        return Cure(name, action, min(max(middle, low), high), low, high)

    def _gain(self, left: float, rest: float, is_ahead: bool) -> float:
        load = max(0.0, left) * self.load
        after = max(rest, load) if is_ahead else rest + load
        return min(_MOST_GAIN, self.step / max(after, 1e-9))

    def cure_by_workers(self, name: str, action: str, num_workers: int) -> Cure:
        """Another number of workers.

        Args:
            name: Of the cure.
            action: What to do.
            num_workers: At least 1.

        Returns:
            The cure. However many there are, all that readers and training do on a core has to fit on the cores.
        """
        if self.parts is None:
            load = self.load * self._num_readers / num_workers
            middle, high = (min(_MOST_GAIN, self.step / max(one, 1e-9)) for one in (max(self.rest, load), self.rest))
            return Cure(name, action, middle, min(1.0, middle), max(middle, high))
        cores = (self.parts.busy + self._main_busy) / self._num_cores
        # The first worker has its price: a batch is handed over then.
        price, most_price = (0.0, 0.0) if self._num_workers else (_HAND_OVER_SECONDS, _MOST_HAND_OVER_SECONDS)
        load = max(self.parts.total / num_workers, cores)
        rest = max(self.rest - self._main_queue / 2, cores) + price
        gains = [
            self.step / max(one, 1e-9)
            for one in (
                max(rest, load),
                max(self.rest + most_price, 1.25 * max(load, self._most_total / num_workers)),
                max(self.rest - self._most_queue, cores, 0.8 * load),
            )
        ]
        gains = [min(_MOST_GAIN, gain) for gain in gains]
        if self._is_crowded:  # others want the cores too
            gains[1] = min(1.0, gains[1])
        return Cure(name, action, min(max(gains[0], gains[1]), gains[2]), gains[1], gains[2])

    def cure_without_workers(self, name: str, action: str) -> Cure | None:
        """No worker: the training thread loads between the steps, and nothing is handed over.

        Args:
            name: Of the cure.
            action: What to do.

        Returns:
            None if what workers do is not known.
        """
        if self.parts is None:
            return None
        work = self.parts.busy - self.parts.ship
        after = [self.rest + factor * work for factor in (1.0, 1.5, 0.5)]
        return Cure(name, action, *(min(_MOST_GAIN, self.step / max(one, 1e-9)) for one in after))

    def cure_by_step(self, name: str, action: str, saved: tuple[float, float, float]) -> Cure:
        """A cure that shortens the step itself.

        Args:
            name: Of the cure.
            action: What to do.
            saved: Seconds of a step saved: as far as can be told, at least, at most.

        Returns:
            The cure.
        """
        gains = [self.step / max(self.step - one, 0.01 * self.step) for one in saved]
        return Cure(name, action, *gains)

    def share_left(self, parts: LoadParts) -> float:
        """Share of a reader's time that is left.

        Args:
            parts: What it would do then.

        Returns:
            0 to 1, 1 if the readers could not be watched.
        """
        if self.parts is None or self.parts.total <= 0:
            return 1.0
        return min(1.0, max(0.0, parts.total / self.parts.total))


def _parts_of(counters: EpochCounters) -> LoadParts | None:
    """What one reader needs for a batch."""
    usage, watched = counters.readers, counters.num_watched_steps
    if usage is None or not watched:
        return None
    busy = usage.busy_seconds / watched
    asleep = waiting_asleep(counters) * usage.wall_seconds / watched
    read, convert, ship = _by_unit_costs(counters, usage, watched)
    known = read + convert + ship
    # The unit costs are those of an idle machine; they cannot be more than what was seen.
    scale = min(1.0, busy / known) if known > 0 else 0.0
    return LoadParts(read * scale, convert * scale, ship * scale, busy - known * scale, asleep)


def _most_total(counters: EpochCounters, parts: LoadParts | None) -> float:
    """Most that one reader may need for a batch: where the kernel keeps back who waits for a core, they may sleep."""
    usage, watched = counters.readers, counters.num_watched_steps
    if parts is None or usage is None or not watched:
        return 0.0
    return parts.total if usage.queue_seconds is not None else usage.wall_seconds / watched


def waiting_asleep(counters: EpochCounters) -> float:
    """Share of the time that readers sleep although the step waits for them.

    While the step does not wait, readers that are ahead have nothing to do, and sleep too: that is taken off.

    Args:
        counters: Of an epoch.

    Returns:
        0 to 1; 0 if unknown.
    """
    usage = counters.readers
    asleep = usage.share(usage.asleep_seconds) if usage is not None else None
    if asleep is None:
        return 0.0
    # Where the step waits for batches that are not ready, they are not idle.
    ready = ready_share(counters)
    is_behind = ready is not None and ready < _BEHIND_SHARE
    idle = 1.0 - counters.steps.wait_share if counters.loader.is_ahead and not is_behind else 0.0
    return max(0.0, asleep - idle)


def _by_unit_costs(counters: EpochCounters, usage: Usage, watched: int) -> tuple[float, float, float]:
    costs, batch = counters.machine.costs, counters.batch
    if costs is None:
        return 0.0, 0.0, 0.0
    read_bytes = usage.read_bytes / watched if usage.read_bytes is not None else float(batch.compact_bytes)
    read = max(read_bytes, float(batch.compact_bytes)) * costs.read_seconds
    convert = batch.widened_values * costs.convert_seconds
    ship = batch.num_bytes * costs.ship_seconds if counters.loader.num_workers else 0.0
    return read, convert, ship
