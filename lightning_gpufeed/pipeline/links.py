"""Sends activations and gradients between the ranks of a pipeline: the only place here that does.

::

    rank 0 ── activations ──► rank 1      one group for each direction: both ends post the same messages in the same
    rank 0 ◄── gradients ──── rank 1      order there, so that NCCL, which keeps an order per group, cannot get stuck
    rank P-1 ── output ─────► all         a group of its own, for what the last stage gives
    control                               gloo, on the host: shapes and types, once for each kind of microbatch

Why not the stages of `torch.distributed.pipelining`: they fix shapes at the first microbatch (a smaller last batch is
silently wrong in a run of forwards alone), take flat tuples of tensors only, and run a whole step at once, so that a
training step of the user's own cannot stand between forward and backward.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

from lightning_gpufeed.device.forks import leave_garbage_to_parent
from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.meeting import leave
from lightning_gpufeed.pipeline.nested import NestedSpec, TensorSpec, in_memory
from lightning_gpufeed.pipeline.peers import lost_peer
from lightning_gpufeed.pipeline.program import Message

__all__ = ["Links", "PipelineGroups", "new_group"]

leave_garbage_to_parent()

_MOST_LEAVES = 1024


@dataclass(frozen=True)
class PipelineGroups:
    """The process groups of one rank.

    Attributes:
        ranks: Global ranks of this pipeline, in the order of its stages.
        replicas: Global ranks that have the same stages in other pipelines, this one among them.
        control: Of the pipeline, gloo.
        output: Of the pipeline, for tensors that all get.
        replica: Of the replicas, for gradients.
        directed: For pairs of places in the pipeline, for tensors from the one to the other.
        timeout: How long a rank waits for the others; None is what the backend takes.
    """

    ranks: tuple[int, ...]
    replicas: tuple[int, ...]
    control: Any
    output: Any
    replica: Any
    directed: dict[tuple[int, int], Any]
    timeout: timedelta | None = None

    @classmethod
    def create(cls, pipeline_size: int, timeout: timedelta | None = None) -> PipelineGroups:
        """Make them: every rank of the default group has to call this.

        Ranks next to each other are one pipeline: with 8 ranks and 4 stages, 0 to 3 and 4 to 7.

        Args:
            pipeline_size: Ranks of a pipeline.
            timeout: How long a rank waits for the others before it fails; None is what the backend takes.

        Returns:
            Those of this rank.

        Raises:
            SyncError: Another rank is gone.
            ValueError: The number of ranks is no multiple.
        """
        world, rank = distributed.get_world_size(), distributed.get_rank()
        if world % pipeline_size:
            raise ValueError(
                f"pipeline_size is {pipeline_size}, and there are {world} ranks; expected a multiple of it. Change "
                f"devices, num_nodes or pipeline_size."
            )
        has_order = distributed.get_backend() != distributed.Backend.GLOO
        found: PipelineGroups | None = None
        by_place = [tuple(range(place, world, pipeline_size)) for place in range(pipeline_size)]
        replicas = [new_group(ranks, timeout) for ranks in by_place]
        for first in range(0, world, pipeline_size):
            ranks = tuple(range(first, first + pipeline_size))
            control = new_group(ranks, timeout, "gloo")
            output = new_group(ranks, timeout)
            shared = None if has_order else new_group(ranks, timeout)
            directed: dict[tuple[int, int], Any] = {}
            for source in range(pipeline_size):
                for target in range(pipeline_size):
                    is_pair = source != target
                    if is_pair and shared is not None:
                        directed[source, target] = shared
                    elif is_pair and abs(source - target) in (1, pipeline_size - 1):
                        directed[source, target] = new_group((ranks[source], ranks[target]), timeout)
            if rank in ranks:
                place = ranks.index(rank)
                found = cls(ranks, by_place[place], control, output, replicas[place], directed, timeout)
        assert found is not None
        return found

    @property
    def place(self) -> int:
        """Of this rank in its pipeline."""
        return self.ranks.index(distributed.get_rank())

    def _every(self) -> list[Any]:
        return list(
            {id(one): one for one in (self.control, self.output, self.replica, *self.directed.values())}.values()
        )

    def close(self) -> None:
        """Give the groups back. All ranks have to be there."""
        for group in self._every():
            distributed.destroy_process_group(group)

    def abandon(self, others: Iterable[Any], pending: Iterable[Any]) -> None:
        """Have them given back before the next training: others may still wait in them.

        Args:
            others: More groups of these ranks.
            pending: What has been begun in any of them and not waited for.
        """
        if distributed.get_backend() == distributed.Backend.GLOO:  # to give back one of NCCL may be to wait for others
            leave([*self._every(), *others], pending)


def new_group(ranks: Sequence[int], timeout: timedelta | None, backend: str | None = None) -> Any:
    """Make a process group: every rank of the default group has to call this, in the same order.

    Args:
        ranks: Of the group.
        timeout: How long a rank waits for the others before it fails; None is what the backend takes.
        backend: Its name; None for that of the default group.

    Returns:
        The group.

    Raises:
        SyncError: Another rank is gone.
    """
    with lost_peer("making a process group"):
        return distributed.new_group(list(ranks), timeout=timeout, backend=backend)


class Links:
    """Messages of one step after the other. A message is posted before it is waited for."""

    def __init__(self, groups: PipelineGroups, device: torch.device, num_stages: int) -> None:
        """Nothing is on its way.

        Args:
            groups: Of this rank.
            device: Where activations are.
            num_stages: Of the pipeline.
        """
        self._groups, self._device, self._num_stages = groups, device, num_stages
        self._specs: dict[tuple[int, Hashable], NestedSpec] = {}
        self._sent: deque[tuple[Any, Tensor]] = deque()
        self._controls: list[tuple[Any, Tensor]] = []
        self._shared: list[Any] = []

    @property
    def groups(self) -> PipelineGroups:
        """Of this rank."""
        return self._groups

    def known_spec(self, border: int, key: Hashable) -> NestedSpec | None:
        """What a stage gives.

        Args:
            border: The stage.
            key: All that its shapes follow from.

        Returns:
            What it gave before; None if this is the first time on this rank.
        """
        return self._specs.get((border, key))

    def tell_spec(self, border: int, key: Hashable, spec: NestedSpec, target: int | None) -> None:
        """Before activations are sent: tell the other rank what they are, if it is the first time.

        Args:
            border: The stage that has computed them.
            key: All that their shapes follow from.
            spec: Of the activations.
            target: Place of the other rank; None if there is none.

        Raises:
            ScheduleError: They are not what they were before.
        """
        known = self._specs.get((border, key))
        if known is None:
            self._specs[border, key] = spec
            if target is not None:
                data = torch.frombuffer(bytearray(pickle.dumps((key, spec))), dtype=torch.uint8)
                for tensor in (torch.tensor([data.numel()]), data):
                    self._controls.append((self._isend(tensor, target, self._groups.control, border), tensor))
        elif not known.is_same(spec):
            raise ScheduleError(
                f"Stage {border} gives {_described(spec)} where it gave {_described(known)} for microbatches of the "
                f"same shapes; expected shapes and types that follow from those of the input. Pad to a fixed length, "
                f"or leave this layer out of the pipeline."
            )

    def ask_spec(self, border: int, key: Hashable, source: int, expected: Collection[Hashable]) -> NestedSpec:
        """Wait until the other rank has told what it sends, if it is the first time.

        Args:
            border: The stage that computes.
            key: All that the shapes follow from.
            source: Place of the other rank.
            expected: Keys of all microbatches of the batch.

        Returns:
            What will come.

        Raises:
            ScheduleError: The other rank has another batch.
        """
        while (border, key) not in self._specs:
            size = torch.empty(1, dtype=torch.int64)
            self._recv(size, source, self._groups.control, border)
            data = torch.empty(int(size), dtype=torch.uint8)
            self._recv(data, source, self._groups.control, border)
            other, spec = pickle.loads(data.numpy().tobytes())
            if other not in expected:
                raise ScheduleError(
                    f"Rank {self._groups.ranks[source]} has a batch of another form than rank "
                    f"{self._groups.ranks[self._groups.place]} of the same pipeline; expected the same batch on all of "
                    "its ranks. Let Lightning's own sampler distribute, or have a loader of your own shard by replica."
                )
            self._specs[border, other] = spec
        return self._specs[border, key]

    def send(self, message: Message, tensors: Sequence[Tensor]) -> None:
        """Post a message. Its tensors are kept until they have left.

        Args:
            message: Whose source this rank is.
            tensors: On the device, laid out as the other rank expects them.
        """
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        group = self._groups.directed[message.source, message.target]
        for index, tensor in enumerate(tensors):
            if tensor.numel():
                tensor = in_memory(tensor.detach())
                self._sent.append((self._isend(tensor, message.target, group, self._tag(message, index)), tensor))

    def receive(self, message: Message, specs: Sequence[TensorSpec]) -> Callable[[], list[Tensor]]:
        """Post what will come.

        Args:
            message: Whose target this rank is.
            specs: Of its tensors.

        Returns:
            What waits for them; on a CUDA device the current stream waits, not the host.
        """
        group = self._groups.directed[message.source, message.target]
        tensors = [spec.empty(self._device) for spec in specs]
        with lost_peer("receiving"):
            works = [
                distributed.irecv(
                    in_memory(tensor), self._groups.ranks[message.source], group, self._tag(message, index)
                )
                for index, tensor in enumerate(tensors)
                if tensor.numel()
            ]

        def wait() -> list[Tensor]:
            with lost_peer(f"waiting for {_named(message)}"):
                for work in works:
                    assert work is not None
                    work.wait()
            return tensors

        return wait

    def share(self, tensors: Sequence[Tensor], source: int) -> Callable[[], None]:
        """Give tensors from one rank to all of the pipeline.

        Args:
            tensors: On the device: the values at the source, memory for them elsewhere.
            source: Place of the rank.

        Returns:
            What waits for them.
        """
        with lost_peer("sending the output"):
            works = [
                distributed.broadcast(in_memory(tensor), self._groups.ranks[source], self._groups.output, async_op=True)
                for tensor in tensors
                if tensor.numel()
            ]
        self._shared += works

        def wait() -> None:
            with lost_peer("waiting for the output of the last stage"):
                for work in works:
                    assert work is not None
                    work.wait()

        return wait

    def share_number(self, number: int, source: int) -> int:
        """Give a number from one rank to all of the pipeline, through the host.

        Args:
            number: Only the source's counts.
            source: Place of the rank.

        Returns:
            The source's.
        """
        box = torch.tensor([number])
        with lost_peer("agreeing"):
            distributed.broadcast(box, self._groups.ranks[source], self._groups.control)
        return int(box)

    def share_object(self, value: Any, source: int) -> Any:
        """Give a value from one rank to all of the pipeline.

        Args:
            value: Anything that can be pickled; only the source's counts.
            source: Place of the rank.

        Returns:
            The source's.
        """
        box = [value]
        with lost_peer("agreeing"):
            distributed.broadcast_object_list(box, self._groups.ranks[source], self._groups.control)
        return box[0]

    @property
    def pending(self) -> list[Any]:
        """What has been begun by all of the pipeline, and has not ended here."""
        return [work for work in self._shared if not work.is_completed()]

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        sent, self._sent = self._sent, deque()
        controls, self._controls = self._controls, []
        self._shared = self.pending
        with lost_peer("sending"):
            for work, _ in [*controls, *sent]:
                work.wait()

    def _tag(self, message: Message, index: int) -> int:
        number = (message.microbatch * self._num_stages + message.stage) * 2 + message.is_grad
        return number * _MOST_LEAVES + index

    def _isend(self, tensor: Tensor, target: int, group: Any, tag: int) -> Any:
        with lost_peer("sending"):
            return distributed.isend(tensor, self._groups.ranks[target], group, tag)

    def _recv(self, tensor: Tensor, source: int, group: Any, tag: int) -> None:
        with lost_peer("waiting to be told what comes"):
            distributed.recv(tensor, self._groups.ranks[source], group, tag)


def _named(message: Message) -> str:
    what = "the gradient for" if message.is_grad else "the input of"
    return f"{what} stage {message.stage}, microbatch {message.microbatch}, from rank {message.source} of the pipeline"


def _described(spec: NestedSpec) -> str:
    parts = [
        f"{leaf.shape} {str(leaf.dtype).removeprefix('torch.')}{'' if leaf.requires_grad else ' without a gradient'}"
        if isinstance(leaf, TensorSpec)
        else repr(leaf)[:40]
        for leaf in spec.leaves
    ]
    return ", ".join(parts) or "nothing"
