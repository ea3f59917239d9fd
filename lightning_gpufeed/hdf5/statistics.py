"""Mean and standard deviation per channel of images, exactly where that can be, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.quantize import Affine
from lightning_gpufeed.hdf5.source import H5Source

__all__ = ["ChannelStatistics", "channel_statistics"]

Array = npt.NDArray[Any]

_BLOCK_BYTES = 16 << 20
# Values looked at in one go while summing squares: a slab this small stays in the processor's cache.
_SLAB_VALUES = 256 * 1024


def channel_statistics(
    source: H5Source,
    field: str,
    layout: str,
    indices: npt.NDArray[np.int64] | None = None,
    affine: Affine | None = None,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Population mean and standard deviation of a field, per channel.

    Reads every sample once, in the order of the file, 16 MiB at a time.

    Args:
        source: Where to read.
        field: Field name.
        layout: `"NCHW"`, `"NHWC"` or `"NHW"`.
        indices: int64 (n,): samples to use, all if None.
        affine: Steps of a quantised field; without, uint8 counts as value / 255, other types as they are.

    Returns:
        (mean, std), each float64 (num_channels,).

    Raises:
        LayoutError: A value is not finite.
    """
    indices = np.arange(source.num_samples) if indices is None else np.sort(indices)
    spec = source.specs[field]
    rows = max(1, _BLOCK_BYTES // max(1, spec.row_bytes))
    statistics = ChannelStatistics(spec.row_shape, source.fields[field][0].dtype, layout, affine)
    for begin in range(0, len(indices), rows):
        block = source.read_field(field, indices[begin : begin + rows]).numpy()
        if block.dtype.kind == "f":
            is_finite = np.isfinite(block.reshape(len(block), -1)).all(axis=1)
            if not is_finite.all():
                sample = int(indices[begin + int(np.flatnonzero(~is_finite)[0])])
                raise LayoutError(
                    f"statistics of {field!r} cannot be computed: {source.locate(sample)} holds a value that is NaN or "
                    f"infinite. Give mean= and std=, or clean the data."
                )
        statistics.update(block)
    return statistics.mean_std()


class ChannelStatistics:
    """Mean and population standard deviation per channel, gathered batch by batch.

    Integers of up to 16 bits are summed as whole numbers, so the result does not depend on the batches at all. Other
    types are merged in float64 by squared deviations, which do not cancel as sums of squares would.

    Args:
        sample_shape: Shape of one image.
        dtype: NumPy type in the file.
        layout: `"NCHW"`, `"NHWC"` or `"NHW"`.
        affine: Steps of a quantised field; without, uint8 counts as value / 255, other types as they are.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
    1979, for the merging.
    """

    def __init__(self, sample_shape: tuple[int, ...], dtype: np.dtype[Any], layout: str, affine: Affine | None) -> None:
        self._layout, self._is_exact = layout, dtype.kind in "biu" and dtype.itemsize <= 2
        self._affine = affine or Affine(1 / 255 if dtype == np.uint8 else 1.0, 0.0)
        num_channels = {"NCHW": sample_shape[0], "NHWC": sample_shape[-1], "NHW": 1}[layout]
        self._count = 0
        # Sums and sums of squares when exact, else means and summed squared deviations.
        self._first: list[Any] = [0] * num_channels
        self._second: list[Any] = [0] * num_channels

    def update(self, images: Array) -> None:
        """Take in images `(num_rows, *sample_shape)`."""
        for slab in _channel_slabs(images, self._layout):
            (self._add if self._is_exact else self._merge)(slab)
            self._count += slab.shape[1]

    def _add(self, slab: Array) -> None:
        """Add sums of a slab `(num_channels, num_values)`."""
        squares: Any = slab.astype(np.uint16 if slab.dtype == np.uint8 else np.int64)
        squares *= squares  # 255 * 255 still fits into 16 bits
        for channel in range(len(slab)):
            self._first[channel] += int(slab[channel].sum(dtype=np.int64))
            self._second[channel] += int(squares[channel].sum(dtype=np.int64))

    def _merge(self, slab: Array) -> None:
        """Merge means and deviations of a slab `(num_channels, num_values)`."""
        values, count = slab.astype(np.float64), slab.shape[1]
        total = self._count + count
        # Values kept as they are may be NaN or overflow when squared; the result then is no number either.
        with np.errstate(invalid="ignore", over="ignore"):
            for channel, row in enumerate(values):
                mean = row.mean()
                delta = mean - self._first[channel]
                deviations = ((row - mean) ** 2).sum() + delta**2 * (self._count * count / total)
                self._second[channel] = float(self._second[channel] + deviations)
                self._first[channel] = float(self._first[channel] + delta * (count / total))

    def mean_std(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Mean and standard deviation, float64 `(num_channels,)` each, of the decoded values."""
        count, scale = self._count, self._affine.scale
        if not self._is_exact:
            return np.array(self._first), np.sqrt(np.array(self._second) / count)
        # In whole numbers, where the difference of two large products is still exact.
        pairs = zip(self._first, self._second, strict=True)
        variances = [(count * square - total * total) / (count * count) for total, square in pairs]
        means = np.array([total / count for total in self._first])
        return means * scale + self._affine.offset, np.sqrt(variances) * abs(scale)

    @property
    def state(self) -> list[Any]:
        """What `restore` needs; JSON holds it without loss."""
        return [self._count, list(self._first), list(self._second)]

    def restore(self, state: list[Any]) -> None:
        """Go on from a saved `state`."""
        self._count, self._first, self._second = state[0], list(state[1]), list(state[2])


def _channel_slabs(images: Array, layout: str) -> Iterator[Array]:
    """Images as `(num_channels, num_values)` arrays of a size that the processor's cache holds."""
    by_channel: dict[str, Callable[[Array], Array]] = {
        "NCHW": lambda part: part.reshape(*part.shape[:2], -1).transpose(1, 0, 2).reshape(part.shape[1], -1),
        "NHWC": lambda part: np.ascontiguousarray(part.reshape(-1, part.shape[-1]).T),
        "NHW": lambda part: part.reshape(1, -1),
    }
    rows = max(1, _SLAB_VALUES // max(1, images[0].size)) if len(images) else 1
    for start in range(0, len(images), rows):
        yield by_channel[layout](images[start : start + rows])
