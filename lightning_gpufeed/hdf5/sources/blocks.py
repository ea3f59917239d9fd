"""A source as the blocks of rows that go into the file: in writing order, converted, counted.

::

    Source ──read ahead──> rows ──convert──> Block ──> the writer
                             │                 │
                       errors listed      statistics
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5.quantize import (
    Affine,
    Conversion,
    convert,
    finite_range,
    plan_conversions,
)
from lightning_gpufeed.hdf5.sources.source import RowError, Source, SourceRows
from lightning_gpufeed.hdf5.statistics import ChannelStatistics

__all__ = ["Block", "BlockReader", "shuffled_order"]

# Blocks of at most this size are read and written; also the grid on which an interrupted run goes on.
_BLOCK_BYTES = 32 * 1024**2
# Blocks being read while one is written, where the source allows it.
_NUM_READ_AHEAD = 2


@dataclass(frozen=True)
class Block:
    """Rows as they are stored.

    Attributes:
        position: Rows of the source that are dealt with when this block is written.
        num_rows: Rows in it; fewer than were read when some could not be.
        values: Key to C-contiguous array `(num_rows, *sample_shape)` of the stored type.
        errors: Rows left out.
    """

    position: int
    num_rows: int
    values: dict[str, npt.NDArray[Any]]
    errors: list[RowError]


def shuffled_order(num_samples: int, seed: int) -> npt.NDArray[np.int64]:
    """A random order that stays the same in every version of NumPy.

    `Generator.permutation` may change between releases; the raw bits of PCG64 may not.

    Args:
        num_samples: Number of rows.
        seed: 0 or more.

    Returns:
        int64 `(num_samples,)`, each row once.

    Raises:
        ValueError: A negative seed.
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}; expected 0 or more")
    bits = np.random.PCG64(np.random.SeedSequence(seed)).random_raw(num_samples)
    return np.argsort(bits, kind="stable").astype(np.int64)


class BlockReader:
    """What a file will hold of a source.

    Args:
        source: The source.
        order: int64 `(num_samples,)`, the order to write in; None for the source's own.
        on_error: `"raise"` at a row that cannot be read, or `"skip"` it.
        scale: See `plan_conversions`, which raises for what makes no sense.
        quantize: See `plan_conversions`.
        keep_dtype: See `plan_conversions`.

    Raises:
        ValueError: `on_error` is neither.
    """

    def __init__(
        self,
        source: Source,
        *,
        order: npt.NDArray[np.int64] | None,
        on_error: Literal["raise", "skip"],
        scale: float | None,
        quantize: Literal["auto"] | tuple[float, float] | None,
        keep_dtype: bool,
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise ValueError(f'on_error is {on_error!r}; expected "raise" or "skip"')
        self.source, self._order, self._on_error = source, order, on_error
        self.conversions = plan_conversions(source.fields, scale=scale, quantize=quantize, keep_dtype=keep_dtype)
        row_bytes = max(1, sum(spec.sample_bytes for spec in source.fields.values()))
        self._block_rows = max(1, min(source.most_rows_per_read, _BLOCK_BYTES // row_bytes))
        self._statistics: dict[str, ChannelStatistics] = {}

    def refuse_floats(self) -> None:
        """Look at the first rows of a field that nobody said how to store, to say what is wrong with them."""
        refused = [key for key, conversion in self.conversions.items() if conversion.kind == "refuse"]
        if refused:
            rows = self.source.read(np.arange(min(self._block_rows, self.source.num_samples)))
            for key in refused:
                convert(rows.values[key], self.conversions[key], key, rows.indices)

    def scan_ranges(self, on_block: Callable[[int], None]) -> dict[str, list[float]]:
        """Find the ranges that are to be found automatically, in one pass over the source.

        Args:
            on_block: Called with the number of rows dealt with.

        Returns:
            Key to `[low, high]`; empty when there is nothing to find.
        """
        ranges: dict[str, list[float]] = {}
        open_keys = [key for key, c in self.conversions.items() if c.kind == "affine" and c.low is None]
        for position, rows in self._read(None, 0) if open_keys else ():
            self._raise_errors(rows)
            for key in open_keys if len(rows.indices) else ():
                low, high = finite_range(rows.values[key], key, rows.indices)
                known = ranges.setdefault(key, [low, high])
                ranges[key] = [min(known[0], low), max(known[1], high)]
            on_block(position)
        return ranges

    def start(self, ranges: dict[str, list[float]], statistics: dict[str, list[Any]]) -> None:
        """Set the ranges that were found, and the statistics gathered so far (none at the beginning)."""
        for key, (low, high) in ranges.items():
            self.conversions[key] = Conversion("affine", self.conversions[key].dtype, low=low, high=high)
        for key, spec in self.source.fields.items():
            layout, dtype = self._known(key).get("layout"), self.conversions[key].dtype
            if layout is not None and dtype.kind in "biuf":
                collector = ChannelStatistics(spec.sample_shape, dtype, layout, self._affine(key))
                if key in statistics:
                    collector.restore(statistics[key])
                self._statistics[key] = collector

    def blocks(self, position: int) -> Generator[Block]:
        """Blocks from a position on; the statistics include each block from when it is handed out.

        Args:
            position: 0, or the position of an earlier block.

        Yields:
            Blocks; values that cannot be stored raise `PackError`.

        Raises:
            PackError: The source delivers rows of another shape than its fields say.
        """
        for stop, rows in self._read(self._order, position):
            self._raise_errors(rows)
            values = {key: convert(rows.values[key], c, key, rows.indices) for key, c in self.conversions.items()}
            for key, stored in values.items():
                expected = (len(rows.indices), *self.source.fields[key].sample_shape)
                if stored.shape != expected:  # they would go to wrong places
                    raise PackError(f"the source delivered {key!r} as {stored.shape}; its fields say {expected}")
            for key, collector in self._statistics.items():
                collector.update(values[key])
            yield Block(stop, len(rows.indices), values, rows.errors)

    def _read(self, order: npt.NDArray[np.int64] | None, position: int) -> Iterator[tuple[int, SourceRows]]:
        """Rows of the source block by block, each with the position after it."""
        num_samples, step = self.source.num_samples, self._block_rows
        spans = [(start, min(start + step, num_samples)) for start in range(position, num_samples, step)]
        indices = (
            np.arange(start, stop, dtype=np.int64) if order is None else order[start:stop] for start, stop in spans
        )
        yield from zip((stop for _, stop in spans), _read_ahead(self.source, indices), strict=True)

    def _raise_errors(self, rows: SourceRows) -> None:
        """Stop at a row that cannot be read, unless such rows are to be skipped."""
        if rows.errors and self._on_error == "raise":
            first = rows.errors[0]
            raise PackError(
                f"{first.name} cannot be read: {first.reason}. Repair or remove it, or leave such samples out and "
                'keep a list with on_error="skip" (--on-error skip)'
            )

    def statistics_state(self) -> dict[str, list[Any]]:
        """What `start` needs to go on."""
        return {key: collector.state for key, collector in self._statistics.items()}

    def attributes(self, key: str) -> dict[str, Any]:
        """What the file says about a field, complete after the last block.

        Args:
            key: The field.

        Returns:
            `layout` and `class_names` as the source knows them, `scale` and `offset` of a quantised field, and
            `mean` and `std`, float64 `(num_channels,)`, unless values that are not finite were kept.
        """
        attributes = {name: self._known(key)[name] for name in ("layout", "class_names") if self._known(key).get(name)}
        affine = self._affine(key)
        if affine is not None:
            attributes |= {"scale": affine.scale, "offset": affine.offset}
        if key in self._statistics:
            mean, std = self._statistics[key].mean_std()
            if np.isfinite(mean).all() and np.isfinite(std).all():
                attributes |= {"mean": mean, "std": std}
        return attributes

    def _known(self, key: str) -> dict[str, Any]:
        """What the source says about a field."""
        return self.source.attributes.get(key, {})

    def _affine(self, key: str) -> Affine | None:
        """The steps of a quantised field: ours, or those of a quantised file that is packed again."""
        conversion, known = self.conversions[key], self._known(key)
        if conversion.kind == "keep" and conversion.dtype == np.uint8 and "scale" in known:
            return Affine(float(known["scale"]), float(known.get("offset", 0.0)))
        return conversion.affine


def _read_ahead(source: Source, blocks: Iterator[npt.NDArray[np.int64]]) -> Iterator[SourceRows]:
    """Read blocks in order; ahead, where the source allows it, so that decoding does not wait for writing."""
    if not source.is_thread_safe:
        yield from map(source.read, blocks)
        return
    pending: deque[Future[SourceRows]] = deque()
    with ThreadPoolExecutor(_NUM_READ_AHEAD, thread_name_prefix="gpufeed-pack") as threads:
        try:
            for block in blocks:
                pending.append(threads.submit(source.read, block))
                if len(pending) > _NUM_READ_AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
