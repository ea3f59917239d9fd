"""What is shown of an epoch, and in which words. Pure: the page and the table say the same because both ask here.

::

    host computes      elapsed = wait + copy + compute + sync + hooks + other
    device computes    elapsed = copy + compute + [ wait + sync + hooks + idle ] + other
                                                    ^ as far as they left the device idle, in this order
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_gpufeed.diagnose.counters import EpochCounters, StepTotals, Usage
from lightning_gpufeed.diagnose.judgement import Cause, Verdict

__all__ = [
    "PARTS",
    "UNKNOWN",
    "EpochRecord",
    "Part",
    "bytes_text",
    "free_echo_text",
    "headline",
    "milliseconds_text",
    "percent_text",
    "percent_texts",
    "printable",
    "range_text",
    "settled",
    "step_parts",
]

UNKNOWN = "unknown"


@dataclass(frozen=True)
class EpochRecord:
    """An epoch, or the part of it so far, and what was made of it.

    Attributes:
        counters: What was counted.
        verdict: Why the step waits.
        line: The verdict in one line.
        is_interim: Whether the verdict was given before the epoch was over.
    """

    counters: EpochCounters
    verdict: Verdict
    line: str
    is_interim: bool = False

    @property
    def label(self) -> str:
        """Which epoch, such as `epoch 0, so far`."""
        return f"epoch {self.counters.epoch}{', so far' if self.is_interim else ''}"

    @property
    def usage(self) -> Usage | None:
        """What those that read used: the training process itself where nothing reads ahead of it."""
        counters = self.counters
        if counters.readers or counters.loader.is_ahead:
            return counters.readers
        return counters.training_thread or counters.main

    @property
    def who_reads(self) -> str:
        """Whose figures `usage` are, such as `2 workers`."""
        loader, hidden = self.counters.loader, self.counters.num_hidden_readers
        if loader.num_workers:
            name = f"{loader.num_workers} worker{'s' if loader.num_workers != 1 else ''}"
        else:
            name = "reading thread" if loader.has_thread else "training process"
        return f"{name} ({hidden} not watched)" if hidden else name


@dataclass(frozen=True)
class Part:
    """One of the things that a step spends its time on.

    Attributes:
        name: One of `PARTS`.
        meaning: The same in a few words.
        seconds: Per step.
        share: Of the time of the step, 0 to 1; over all parts they add up to 1.
        is_known: False where it could not be counted; it then shows as 0.
    """

    name: str
    meaning: str
    seconds: float
    share: float
    is_known: bool = True


PARTS = {
    "wait": "no batch was ready",
    "copy": "host to device",
    "compute": "forward, backward, update",
    "idle": "device idle for another reason",
    "sync": "asking the other ranks",
    "hooks": "callbacks, loggers, progress bar",
    "other": "not accounted for",
}
"""What a step spends its time on, name -> meaning, in the order of bars, legends and tables."""


def step_parts(steps: StepTotals) -> tuple[Part, ...]:
    """Cut the time of a step into parts that add up to it.

    Where a device computes, what the host did at the same time cost nothing: waiting, synchronisation and hooks count
    as far as they left the device idle, in this order, and what is left of its idle time is `idle`.

    Args:
        steps: Where the time of the steps went.

    Returns:
        All of `PARTS`, in their order; none if no step was counted.
    """
    if not steps.num_steps or steps.elapsed_seconds <= 0:
        return ()
    sync, hooks, idle = steps.sync_seconds or 0.0, steps.hook_seconds, 0.0
    if steps.idle_seconds is not None:
        idle = max(0.0, steps.idle_seconds - steps.data_seconds)
        sync = min(sync, idle)
        hooks = min(hooks, idle - sync)
        idle -= sync + hooks
    seconds = {
        "wait": steps.data_seconds,
        "copy": steps.copy_seconds,
        "compute": steps.compute_seconds,
        "idle": idle,
        "sync": sync,
        "hooks": hooks,
    }
    counted = sum(seconds.values())
    seconds["other"] = max(0.0, steps.elapsed_seconds - counted)
    # Two clocks may count a little more than elapsed; the shares still add up.
    whole = max(counted, steps.elapsed_seconds)
    unknown = {"idle"} if steps.idle_seconds is None else set()
    unknown |= {"sync"} if steps.sync_seconds is None else set()
    return tuple(
        Part(name, meaning, seconds[name] / steps.num_steps, seconds[name] / whole, name not in unknown)
        for name, meaning in PARTS.items()
    )


def settled(records: Sequence[EpochRecord]) -> list[EpochRecord]:
    """Leave out what was said of an epoch before the last word on it.

    Args:
        records: In the order in which they were made.

    Returns:
        One of each epoch, the latest, in the same order.
    """
    latest = {record.counters.epoch: position for position, record in enumerate(records)}
    return [record for position, record in enumerate(records) if latest[record.counters.epoch] == position]


def headline(record: EpochRecord) -> str:
    """What the verdict comes to, after the name of its cause.

    Args:
        record: Of an epoch.

    Returns:
        A clause without a full stop.
    """
    if not record.counters.steps.num_steps:
        return "no step was measured"
    share = record.verdict.wait_share
    waits = "less than 1 %" if 0 < share < 0.005 else f"{share:.0%}".replace("%", " %")
    end = ", nothing to gain in the loader" if record.verdict.cause is Cause.COMPUTE else ""
    return f"the step waits {waits} of the time for data{end}"


def free_echo_text(verdict: Verdict) -> str | None:
    """What echoing batches would cost.

    Args:
        verdict: Of an epoch.

    Returns:
        A sentence without a full stop; None where no echo is free.
    """
    factor = verdict.free_echo_factor
    if factor is None or factor < 1.1:
        return None
    return f"A BatchEcho with an echo_factor of up to {factor:.1f} is free: it trains while the step would wait"


# Words -----------------------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Make a text from outside safe to show: nothing in it moves a cursor, turns a line round or cannot be encoded.

    Args:
        text: Such as a path, which may hold any character.

    Returns:
        The same on one line, with the characters that have no shape of their own escaped.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else " " if one.isspace() else one.encode("unicode_escape").decode() for one in text
    )


def percent_text(share: float | None) -> str:
    """A share for people.

    Args:
        share: 0 to 1; None: unknown.

    Returns:
        Such as `63.0 %`.
    """
    return UNKNOWN if share is None else f"{share * 100:.1f} %"


def percent_texts(shares: Sequence[float]) -> list[str]:
    """Shares of one whole for people: rounded so that the texts add up to 100 too.

    Args:
        shares: 0 to 1, together 1.

    Returns:
        Such as `63.0 %`, one each.
    """
    tenths = [share * 1000 for share in shares]
    rounded = [math.floor(value) for value in tenths]
    # The ones that lost most by rounding down are rounded up instead.
    by_loss = sorted(range(len(tenths)), key=lambda one: rounded[one] - tenths[one])
    for one in by_loss[: max(0, round(sum(tenths)) - sum(rounded))]:
        rounded[one] += 1
    return [f"{value / 10:.1f} %" for value in rounded]


def milliseconds_text(seconds: float) -> str:
    """A time of a step for people, always in the same unit so that a column can be compared.

    Args:
        seconds: The time.

    Returns:
        Such as `8.21 ms` or `1,234 ms`.
    """
    milliseconds = seconds * 1000
    digits = 2 if milliseconds < 9.995 else 1 if milliseconds < 99.95 else 0
    return f"{milliseconds:,.{digits}f} ms"


def bytes_text(num_bytes: float | None) -> str:
    """A number of bytes for people.

    Args:
        num_bytes: None: unknown.

    Returns:
        Three digits and a unit.
    """
    if num_bytes is None:
        return UNKNOWN
    value, units = float(num_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.3g} {units[0]}" if value < 999.5 else f"{value:,.0f} {units[0]}"


def range_text(low: float, high: float) -> str:
    """A range of gains for people.

    Args:
        low: Least.
        high: Most.

    Returns:
        Such as `1.8 to 2.4`; one number where both look the same.
    """
    least, most = f"{low:.1f}", f"{high:.1f}"
    return least if least == most else f"{least} to {most}"
