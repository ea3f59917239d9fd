"""What all ranks have to agree on beside gradients: the model at the start, buffers, measurements, the plan.

Private name of torch, asserted in `tests/test_private_api.py`: `torch.distributed._broadcast_coalesced`, with which
`DistributedDataParallel` sends buffers.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lightning_gpufeed.errors import SyncError
from lightning_gpufeed.sync.gloo import group_in_order

__all__ = ["Ranks", "peer_lost"]

_PROBE_BYTES = (1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 23)
_PROBE_REPEATS = 4
_PROBE_SECONDS = 0.3
_BROADCAST_BYTES = 250 << 20


def peer_lost(what: str, error: RuntimeError) -> SyncError:
    """What to raise when a collective has failed.

    Args:
        what: This rank was doing.
        error: The backend's.

    Returns:
        An error that says where to look, and what to do.
    """
    return SyncError(
        f"Rank {distributed.get_rank()} failed in {what}: another rank is gone, has ended earlier (fewer batches), or "
        "did not answer in time, and its own output says why. Training cannot go on; start again from the latest "
        f"checkpoint. ({str(error).splitlines()[0][:200]})"
    )


class Ranks:
    """All ranks of the default process group, with a group of their own for gradients.

    Attributes:
        group: For gradients alone, so that nothing waits behind them; one message after the other.
        unordered_group: Likewise, for plans in which all messages are waited for at once, and for scattered ones: there
            gloo sends two at a time, which is a little faster where the host computes too, and a quarter faster where
            messages only go one way.
        rank: This process.
        num_ranks: How many there are.
    """

    def __init__(self, timeout: timedelta | None = None, device: torch.device | None = None) -> None:
        """Join: every rank has to call this.

        Args:
            timeout: How long a rank waits for the others before it fails; None is what the backend takes.
            device: Where gradients are; None for the CPU.
        """
        self.device = device or torch.device("cpu")
        self.rank, self.num_ranks = distributed.get_rank(), distributed.get_world_size()
        self.group: Any = group_in_order(timeout)
        self.unordered_group: Any = distributed.new_group(timeout=timeout)

    def check_same(self, model: nn.Module, ignored: Collection[str] = ()) -> None:
        """Make sure that all ranks have parameters of the same names, shapes and types.

        Args:
            model: This rank's.
            ignored: Names of parameters that may differ.

        Raises:
            SyncError: They do not; on every rank, which says where it differs from rank 0.
        """
        own = [
            (name, tuple(one.shape), str(one.dtype), one.requires_grad)
            for name, one in model.named_parameters()
            if name not in ignored
        ]
        every: list[Any] = [None] * self.num_ranks
        distributed.all_gather_object(every, own)
        for rank, other in enumerate(every):
            if other != every[0]:
                first = next((pair for pair in zip(every[0], other, strict=False) if pair[0] != pair[1]), None)
                what = (
                    f"{_described(first[1])} where rank 0 has {_described(first[0])}"
                    if first
                    else f"{len(other)} parameters where rank 0 has {len(every[0])}"
                )
                raise SyncError(f"Rank {rank} has {what}; expected the same model on every rank. Build it alike.")

    def broadcast(self, model: nn.Module, ignored: Collection[str] = ()) -> None:
        """Take rank 0's parameters and buffers.

        Args:
            model: Changed in place.
            ignored: Names of those to leave alone.
        """
        self._broadcast([one.detach() for name, one in model.named_parameters() if name not in ignored])
        self.broadcast_buffers(model, ignored)

    def broadcast_buffers(self, model: nn.Module, ignored: Collection[str] = ()) -> None:
        """Take rank 0's buffers.

        Args:
            model: Changed in place.
            ignored: Names of those to leave alone.
        """
        self._broadcast(one for name, one in model.named_buffers() if name not in ignored)

    def _broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Many in few messages, as `DistributedDataParallel` does it."""
        sent = [tensor.detach() for tensor in tensors]
        if sent:
            try:
                everyone: Any = distributed.group.WORLD
                distributed._broadcast_coalesced(everyone, sent, _BROADCAST_BYTES, 0)  # type: ignore[attr-defined]
            except RuntimeError as error:
                raise peer_lost("sending buffers", error) from error

    def check_equal(self, text: str, what: str) -> None:
        """Make sure that all ranks have the same.

        Args:
            text: What.
            what: Its name.

        Raises:
            SyncError: They do not.
        """
        number = float(zlib.crc32(text.encode()))
        largest, smallest = self.maximum([number, -number])
        if largest != -smallest:
            raise SyncError(
                f"The ranks have different {what}s: rank {self.rank} has {text[:200]!r}; expected one on all of them. "
                "Build the model and the strategy alike on every rank; if they are, use strategy='ddp' and report this."
            )

    def decided(self, value: Any) -> Any:
        """What rank 0 says.

        Args:
            value: Anything that can be pickled; only rank 0's counts.

        Returns:
            Rank 0's, on every rank.
        """
        box = [value]
        distributed.broadcast_object_list(box, 0)
        return box[0]

    def mean(self, numbers: Sequence[float]) -> list[float]:
        """Means over all ranks.

        Args:
            numbers: Equally many on every rank.

        Returns:
            The same on every rank.
        """
        return [number / self.num_ranks for number in self._reduced(numbers, distributed.ReduceOp.SUM)]

    def maximum(self, numbers: Sequence[float]) -> list[float]:
        """The largest of each number over all ranks.

        Args:
            numbers: Equally many on every rank.

        Returns:
            The same on every rank.
        """
        return self._reduced(numbers, distributed.ReduceOp.MAX)

    def _reduced(self, numbers: Sequence[float], operation: Any) -> list[float]:
        tensor = torch.tensor(list(numbers), dtype=torch.float64, device=self.device)
        distributed.all_reduce(tensor, operation)
        result: list[float] = tensor.tolist()
        return result

    def probe_link(self, most_bytes: int) -> list[tuple[int, float]]:
        """Measure how long an all-reduce takes, for several sizes.

        Args:
            most_bytes: Of all gradients; nothing larger is sent.

        Returns:
            Pairs of bytes and seconds, means over the ranks: the same on every rank.
        """
        samples: list[tuple[int, float]] = []
        for size in [size for size in _PROBE_BYTES if size <= most_bytes] or [max(4, most_bytes)]:
            tensor = torch.zeros(size // 4, device=self.device)
            seconds = []
            for _ in range(_PROBE_REPEATS + 1):
                self._synchronized()
                begin = time.perf_counter()
                distributed.all_reduce(tensor, group=self.group)
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                seconds.append(time.perf_counter() - begin)
            means = self.mean(seconds[1:])  # the first one may have to connect
            samples += [(size // 4 * 4, one) for one in means]
            if min(means) > _PROBE_SECONDS:
                break  # a slow link need not be shown more
        return samples

    def _synchronized(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.maximum([0.0])

    def close(self) -> None:
        """Give the group back. All ranks have to be there."""
        distributed.destroy_process_group(self.group)
        distributed.destroy_process_group(self.unordered_group)


def _described(parameter: tuple[str, tuple[int, ...], str, bool]) -> str:
    name, shape, dtype, requires_grad = parameter
    return f"{name} {shape} {dtype.removeprefix('torch.')}{'' if requires_grad else ' without a gradient'}"
