"""How far packing is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from lightning_gpufeed.cli.messages import say
from lightning_gpufeed.hdf5.report import bytes_text
from lightning_gpufeed.hdf5.writer import PackProgress

__all__ = ["show_progress"]

_PLAIN_LINE_SECONDS = 5.0


@contextmanager
def show_progress() -> Iterator[Callable[[PackProgress], None]]:
    """Show how far packing is: a bar on a terminal, else a line every few seconds.

    Yields:
        What to call with the progress.
    """
    if not sys.stderr.isatty():
        yield _PlainLines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("opening", total=None, rate="")
        pace = _Pace()

        def show(now: PackProgress) -> None:
            bar.update(task, description=now.stage, total=now.rows_total, completed=now.rows_done, rate=pace.text(now))

        yield show


class _PlainLines:
    """Prints how far packing is, not too often."""

    def __init__(self) -> None:
        self._pace = _Pace()
        self._last = time.monotonic()

    def __call__(self, now: PackProgress) -> None:
        pace = self._pace.text(now)
        if time.monotonic() - self._last >= _PLAIN_LINE_SECONDS:
            self._last = time.monotonic()
            say(", ".join(filter(None, [f"{now.stage} {now.rows_done:,} of {now.rows_total:,} samples", pace])))


class _Pace:
    """Rates since the first call of a stage, so that an interrupted run's share does not count."""

    def __init__(self) -> None:
        self._first: PackProgress | None = None
        self._start = 0.0

    def text(self, now: PackProgress) -> str:
        """Rates and the time that is left."""
        if self._first is None or self._first.stage != now.stage:
            self._first, self._start = now, time.monotonic()
        seconds = time.monotonic() - self._start
        num_rows = now.rows_done - self._first.rows_done
        if not (num_rows and seconds):
            return ""
        left = round((now.rows_total - now.rows_done) * seconds / num_rows)
        rates = [f"{num_rows / seconds:,.0f} samples/s"]
        if num_bytes := now.bytes_written - self._first.bytes_written:
            rates.append(f"{bytes_text(num_bytes / seconds)}/s")
        return ", ".join([*rates, f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"])
