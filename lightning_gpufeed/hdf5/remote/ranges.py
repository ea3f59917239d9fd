"""From many wanted pieces of a file to few requests. Pure: nothing is fetched here.

::

    wanted    [a]  [b]      [c]                        [d]
    ranges    [-----------------]                      [-]      small gaps are fetched along, large ones are not
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["RangePlan", "coalesce", "split_ranges"]

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RangePlan:
    """Ranges to fetch, in the order of the file, and where each wanted piece lies in them.

    Attributes:
        starts: int64 (num_ranges,): first byte of each range.
        stops: int64 (num_ranges,): one past its last byte.
        range_index: int64 (n,): the range that holds a piece whole, -1 for a piece of no bytes.
        range_offset: int64 (n,): where in that range the piece begins.
    """

    starts: Positions
    stops: Positions
    range_index: Positions
    range_offset: Positions


def coalesce(offsets: Positions, sizes: Positions, max_gap: int, max_bytes: int) -> RangePlan:
    """Join pieces that lie close together.

    Args:
        offsets: int64 (n,): first byte of each piece, in any order; pieces may overlap or repeat.
        sizes: int64 (n,): bytes of each.
        max_gap: Bytes between two pieces that are rather fetched along than left out.
        max_bytes: Limit of one range. Only a single piece that is larger makes a larger range.

    Returns:
        The plan.

    Raises:
        ValueError: Lengths differ, or a number is negative.
    """
    if offsets.shape != sizes.shape or offsets.ndim != 1:
        raise ValueError(f"offsets {offsets.shape} and sizes {sizes.shape}; expected two vectors of the same length.")
    if max_gap < 0 or (offsets.size and (offsets.min() < 0 or sizes.min() < 0)):
        raise ValueError("offsets, sizes and max_gap count bytes from zero on; expected no negative number.")
    starts: list[int] = []
    stops: list[int] = []
    index = np.full(len(offsets), -1, dtype=np.int64)
    # At the same place the longest comes first, so that the others lie inside it.
    order = np.lexsort((-sizes, offsets))
    order = order[sizes[order] > 0]
    begins, ends = offsets[order].tolist(), (offsets + sizes)[order].tolist()
    for number, begin, end in zip(order.tolist(), begins, ends, strict=True):
        is_inside = bool(starts) and end <= stops[-1]
        is_near = bool(starts) and begin - stops[-1] <= max_gap and end - starts[-1] <= max_bytes
        if not is_inside and not is_near:
            starts.append(begin)
            stops.append(end)
        stops[-1] = max(stops[-1], end)
        index[number] = len(starts) - 1
    first = np.array(starts, dtype=np.int64)
    offset = np.zeros(len(offsets), dtype=np.int64)
    has_bytes = index >= 0
    offset[has_bytes] = offsets[has_bytes] - first[index[has_bytes]]
    return RangePlan(first, np.array(stops, dtype=np.int64), index, offset)


def split_ranges(starts: Positions, stops: Positions, max_bytes: int) -> tuple[list[tuple[int, int]], Positions]:
    """Cut large ranges into parts that are fetched at the same time.

    Args:
        starts: int64 (num_ranges,).
        stops: int64 (num_ranges,).
        max_bytes: Limit of one part.

    Returns:
        (start, stop) of each part in order, and int64 (num_ranges + 1,): the first part of each range, then the total.
    """
    parts: list[tuple[int, int]] = []
    first_part = [0]
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        parts.extend((at, min(at + max_bytes, stop)) for at in range(start, stop, max_bytes))
        first_part.append(len(parts))
    return parts, np.array(first_part, dtype=np.int64)
