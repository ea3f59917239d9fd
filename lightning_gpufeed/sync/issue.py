"""In which order, and in which messages, gradients are sent once it is known when they are ready. Pure.

The gradient that the next forward needs first goes first, of those that are ready::

    ready        3       2       1       0
    cut          | 3     | 2     | 1     | 0     | 1 | 2 | 3 |     a gradient gives way where a more urgent one is ready
    message      | 3 . . . . | 1 . . . . | 0 . . . . | 1 2 . . |   ... or after a message of a fixed size

The first is the best there is for a link without latency (Jackson's rule for one machine, with preemption). The second
has fewer messages, which hold small gradients together.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lightning_gpufeed.sync.costs import LinkCosts
from lightning_gpufeed.sync.plan import Bucket, Piece

__all__ = ["IssueRule", "merged"]

_ALIGN_BYTES = 512
"""Gradients are cut at multiples of it, which is a whole number of elements of every type."""


@dataclass(frozen=True)
class IssueRule:
    """How messages are made.

    Attributes:
        most_bytes: Of a message.
        is_cut: True: one gradient, or a part of one up to the moment when a more urgent one is ready. False: what is
            ready, in the order of urgency, until the message is full.
    """

    most_bytes: int
    is_cut: bool

    def buckets(self, ready: Sequence[float], sizes: Sequence[int], link: LinkCosts, is_cross: bool) -> list[Bucket]:
        """The messages, in the order of issue.

        Args:
            ready: When each layer's gradient is, in seconds.
            sizes: Bytes of each layer's gradient.
            link: What they cross.
            is_cross: Whether a layer's next forward waits for that layer only. If not, none is more urgent.

        Returns:
            Buckets with every byte in one.
        """
        coming = sorted((ready[i], i) for i in range(len(sizes)) if sizes[i])
        urgency = list(range(len(sizes)))
        if not is_cross:
            for place, (_, layer) in enumerate(coming):
                urgency[layer] = place
        sent = [0] * len(sizes)
        clock, arrived, buckets = 0.0, 0, []
        waiting: list[tuple[int, int]] = []  # a heap, most urgent first
        while waiting or arrived < len(coming):
            if not waiting:
                clock = max(clock, coming[arrived][0])
            while arrived < len(coming) and coming[arrived][0] <= clock:
                layer = coming[arrived][1]
                heapq.heappush(waiting, (urgency[layer], layer))
                arrived += 1
            most = self.most_bytes
            if self.is_cut:
                place, layer = waiting[0]
                most = min(most, sizes[layer] - sent[layer])
                end = clock + link.seconds(most)
                for time, other in coming[arrived:]:
                    if time >= end:
                        break
                    if urgency[other] < place:
                        most = _bytes_until(time - clock, link, sent[layer], most)
                        break
                if most <= 0:  # nothing worth sending before it
                    clock = time
                    continue
            bucket = _take(waiting, sent, sizes, most)
            buckets.append(bucket)
            clock += link.seconds(sum(end - begin for _, begin, end in bucket))
        return buckets


def _bytes_until(seconds: float, link: LinkCosts, begin: int, most: int) -> int:
    """How much of a gradient can be sent in a time, from a byte on."""
    if seconds <= link.latency_seconds:
        return 0
    room = int(min(most, (seconds - link.latency_seconds) * link.bytes_per_second))
    return room - (begin + room) % _ALIGN_BYTES


def _take(waiting: list[tuple[int, int]], sent: list[int], sizes: Sequence[int], most: int) -> Bucket:
    """Fill a message with what waits, and take that out."""
    pieces: list[Piece] = []
    room = most
    while waiting and room > 0:
        layer = waiting[0][1]
        begin, end = sent[layer], sizes[layer]
        if end - begin > room:
            end = begin + room
            end -= end % _ALIGN_BYTES
            if end <= begin:
                if pieces:
                    break
                end = min(sizes[layer], begin + room)  # smaller than what is aligned
        pieces.append(Piece(layer, begin, end))
        sent[layer] = end
        room -= end - begin
        if end == sizes[layer]:
            heapq.heappop(waiting)
        else:
            break
    return tuple(pieces)


def merged(
    buckets: Sequence[Bucket], most_bytes: int, score: Callable[[Sequence[Bucket]], tuple[int, int]]
) -> list[Bucket]:
    """Put neighbours together where that makes nothing slower.

    Args:
        buckets: In the order of issue.
        most_bytes: Of a bucket.
        score: Of buckets in the order of issue; less is better.

    Returns:
        The buckets that are left, in the same order, with a score at most that of the given ones.
    """
    kept = list(buckets)
    best = score(kept)
    place = 0
    while place + 1 < len(kept):
        both = _joined(kept[place], kept[place + 1])
        if sum(end - begin for _, begin, end in both) <= most_bytes:
            tried = [*kept[:place], both, *kept[place + 2 :]]
            now = score(tried)
            if now <= best:
                kept, best = tried, now
                continue
        place += 1
    return kept


def _joined(first: Bucket, second: Bucket) -> Bucket:
    """Pieces of both, those that touch as one."""
    pieces = list(first)
    for piece in second:
        if piece.layer == pieces[-1].layer and piece.begin_byte == pieces[-1].end_byte:
            pieces[-1] = Piece(piece.layer, pieces[-1].begin_byte, piece.end_byte)
        else:
            pieces.append(piece)
    return tuple(pieces)
