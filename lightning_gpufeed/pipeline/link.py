"""What a message from one rank of a pipeline to the next takes, measured by all of them.

::

    rank 0 ══ there and back ══ rank 1 ══ there and back ══ rank 2       pair after pair, small messages to large ones
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import distributed

from lightning_gpufeed.pipeline.simulate import Send, check_numbers

__all__ = ["Link", "fit_link", "probe_link"]

_PROBE_BYTES = (1 << 12, 1 << 14, 1 << 16, 1 << 18, 1 << 20, 1 << 22)
"""And the largest that is asked for."""
_PROBE_REPEATS = 3
_PROBE_SECONDS = 0.4
"""For all pairs of ranks together; the rest of half a second is for what comes before and after."""


@dataclass(frozen=True)
class Link:
    """What a message between two neighbours takes.

    Attributes:
        latency_seconds: However small it is.
        seconds_per_byte: More for each byte.
        host_seconds: That either rank's thread computes for it.

    Example:
        >>> Link(latency_seconds=0.5, seconds_per_byte=0.25).seconds(2)
        1.0
    """

    latency_seconds: float
    seconds_per_byte: float
    host_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: One is negative or no finite number.
        """
        check_numbers(vars(self))

    def seconds(self, num_bytes: int) -> float:
        """How long one message takes.

        Args:
            num_bytes: Its size.

        Returns:
            Seconds.
        """
        return self.latency_seconds + num_bytes * self.seconds_per_byte

    def send(self, num_bytes: int) -> Send:
        """What a message takes, as a simulation has it.

        Args:
            num_bytes: Of the message.

        Returns:
            Its latency, how long the next message waits for it, and how long the ranks are busy with it.
        """
        latency = max(0.0, self.latency_seconds - 2 * self.host_seconds)  # which has what both ranks compute in it
        return Send(latency, num_bytes * self.seconds_per_byte, self.host_seconds)


def probe_link(group: Any, device: torch.device, rank: int, num_ranks: int, *, most_bytes: int = 8 << 20) -> Link:
    """Measure what a message from one rank to the next takes. Every rank of the group has to call this.

    Each rank in turn sends messages to the next, which sends them back: small ones first, and larger ones while there
    is time. All pairs together take less than half a second from when the ranks are there and connected; where the
    link is so slow that this does not do, the two smallest sizes once. Half of the time there and back counts.

    Args:
        group: Of the ranks; None for the default one.
        device: Where what is sent is: what the group's backend can send.
        rank: This one's place in the group.
        num_ranks: In the group.
        most_bytes: Nothing larger is sent.

    Returns:
        The link of the pair for which `most_bytes` would take longest: the same on every rank. Of one rank alone, a
        link that takes no time.

    Raises:
        ValueError: `most_bytes` is not positive, or there is no such rank.
    """
    if most_bytes < 1 or not 0 <= rank < num_ranks:
        raise ValueError(
            f"rank is {rank} of {num_ranks} and most_bytes is {most_bytes}; expected a rank from 0 to num_ranks - 1, "
            "and at least one byte."
        )
    if num_ranks == 1:
        return Link(0.0, 0.0)
    found = torch.zeros(num_ranks - 1, 3, dtype=torch.float64, device=device)
    if rank > 0:
        _answer(group, device, rank - 1)
    if rank < num_ranks - 1:
        sizes = [size for size in _PROBE_BYTES if size < most_bytes] + [most_bytes]
        before = time.thread_time()
        samples, num_messages = _ask(group, device, rank + 1, sizes, _PROBE_SECONDS / (num_ranks - 1))
        host_seconds = (time.thread_time() - before) / num_messages if device.type == "cpu" else 0.0
        link = fit_link(samples)
        found[rank] = torch.tensor([link.latency_seconds, link.seconds_per_byte, host_seconds], dtype=torch.float64)
    distributed.all_reduce(found, group=group)
    return max((Link(*row) for row in found.tolist()), key=lambda one: one.seconds(most_bytes))


def _ask(
    group: Any, device: torch.device, peer: int, sizes: Sequence[int], budget_seconds: float
) -> tuple[list[tuple[int, float]], int]:
    """Send messages and have them back, as long as there is time: bytes and seconds of one way; how many there were."""
    _round_trips(group, device, peer, sizes[0], 1)  # has to connect, and to wait for the peer
    end = time.perf_counter() + budget_seconds
    samples: list[tuple[int, float]] = []
    num_messages = 2
    for size in sizes:
        left = end - time.perf_counter()
        if len(samples) > 1 and 2 * fit_link(samples).seconds(size) > left:
            break
        seconds = _round_trips(group, device, peer, size, 1)
        num_more = min(_PROBE_REPEATS, int((end - time.perf_counter()) / seconds[0]))
        if num_more > 0:  # the first one meets memory that was not used before
            seconds = _round_trips(group, device, peer, size, num_more)
        samples.append((size, median(seconds) / 2))
        num_messages += 2 * (1 + max(0, num_more))
    distributed.send(torch.zeros(2, dtype=torch.int64, device=device), group=group, group_dst=peer)
    return samples, num_messages


def _round_trips(group: Any, device: torch.device, peer: int, size: int, number: int) -> list[float]:
    """Seconds there and back, of so many messages."""
    distributed.send(torch.tensor([size, number], dtype=torch.int64, device=device), group=group, group_dst=peer)
    message = torch.zeros(size, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(number):
        _synchronize(device)
        begin = time.perf_counter()
        distributed.send(message, group=group, group_dst=peer)
        distributed.recv(message, group=group, group_src=peer)
        _synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return seconds


def _answer(group: Any, device: torch.device, peer: int) -> None:
    """Send back what comes, until no more is to come."""
    head = torch.zeros(2, dtype=torch.int64, device=device)
    while True:
        distributed.recv(head, group=group, group_src=peer)
        size, number = head.tolist()
        if not number:
            return
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        for _ in range(number):
            distributed.recv(message, group=group, group_src=peer)
            distributed.send(message, group=group, group_dst=peer)


def fit_link(samples: Sequence[tuple[int, float]]) -> Link:
    """The link with the least squares of relative errors, of those without a negative number.

    Args:
        samples: Pairs of the bytes of a message and its seconds, more than 0. Of one size, all of the time counts as
            latency.

    Returns:
        The link.

    Raises:
        ValueError: There is no sample, or one is not positive.

    Example:
        >>> link = fit_link([(100, 3.0), (200, 4.0), (400, 6.0)])
        >>> round(link.latency_seconds, 9), round(link.seconds_per_byte, 9)
        (2.0, 0.01)
    """
    if not samples or not all(size > 0 and 0 < seconds < math.inf for size, seconds in samples):
        raise ValueError(f"samples is {list(samples)}; expected one or more pairs of bytes and seconds, more than 0.")
    weights = [1 / seconds**2 for _, seconds in samples]
    total = sum(weights)
    mean_size, mean_seconds, squares, products = (
        sum(weight * term for weight, term in zip(weights, terms, strict=True)) / total
        for terms in (
            [float(size) for size, _ in samples],
            [seconds for _, seconds in samples],
            [float(size) ** 2 for size, _ in samples],
            [size * seconds for size, seconds in samples],
        )
    )
    spread = squares - mean_size**2
    slope = (products - mean_size * mean_seconds) / spread if spread > 1e-9 * squares else 0.0
    if slope <= 0:
        return Link(mean_seconds, 0.0)
    latency = mean_seconds - slope * mean_size
    return Link(latency, slope) if latency >= 0 else Link(0.0, products / squares)


def _synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
