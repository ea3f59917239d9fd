"""Mean and standard deviation per channel of stored images, exactly and in bounded memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.source import H5Source

__all__ = ["channel_statistics"]

_BLOCK_BYTES = 16 << 20


def channel_statistics(
    source: H5Source, field: str, channel_axis: int | None, indices: npt.NDArray[np.int64] | None = None
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Population mean and standard deviation of a field, per channel, in the units stored.

    Reads every sample once, in the order of the file, 16 MiB at a time. uint8 images are counted by value, so the
    result does not depend on the order of summation; others are summed in float64.

    Args:
        source: Where to read.
        field: Field name.
        channel_axis: Axis of the channels in a sample of the field, None for one channel.
        indices: int64 (n,): samples to use, all if None.

    Returns:
        (mean, std), each float64 (num_channels,).

    Raises:
        LayoutError: A value is not finite.
    """
    indices = np.arange(source.num_samples) if indices is None else np.sort(indices)
    rows = max(1, _BLOCK_BYTES // max(1, source.specs[field].row_bytes))
    count = 0
    total: npt.NDArray[np.float64] | float = 0.0
    squares: npt.NDArray[np.float64] | float = 0.0
    shift: npt.NDArray[np.float64] | None = None
    for begin in range(0, len(indices), rows):
        block = source.read_field(field, indices[begin : begin + rows]).numpy()
        block = block[:, None] if channel_axis is None else np.moveaxis(block, channel_axis + 1, 1)
        flat = np.moveaxis(block, 1, 0).reshape(block.shape[1], -1)
        if block.dtype.kind == "f" and not np.isfinite(flat).all():
            bad = ~np.isfinite(block.reshape(len(block), -1)).all(axis=1)
            sample = int(indices[begin + int(np.flatnonzero(bad)[0])])
            raise LayoutError(
                f"statistics of {field!r} cannot be computed: {source.locate(sample)} holds a value that is NaN or "
                f"infinite. Give mean= and std=, or clean the data."
            )
        if flat.dtype == np.uint8:
            values = np.arange(256.0)
            counts = np.stack([np.bincount(channel, minlength=256) for channel in flat])
            total = total + counts @ values
            squares = squares + counts @ values**2
        else:
            # Values are taken relative to the first block's mean, so that the squares do not cancel.
            exact = flat.astype(np.float64)
            shift = exact.mean(axis=1) if shift is None else shift
            total = total + (exact - shift[:, None]).sum(axis=1)
            squares = squares + ((exact - shift[:, None]) ** 2).sum(axis=1)
        count += flat.shape[1]
    mean = np.asarray(total) / count
    variance = np.maximum(np.asarray(squares) / count - mean**2, 0.0)
    return mean + (0.0 if shift is None else shift), np.sqrt(variance)
