"""Adds the gradients of all ranks up, in the order of a plan. The only module that sends gradients.

::

    hook of the last parameter of layer 3     gradients are scaled and copied into the bucket: .grad is a view of it
    bucket 0 is full                          all-reduce starts, in place, and nobody waits
    bucket 2 is full, bucket 1 is not yet     bucket 2 waits: all ranks send in one and the same order
    end of backward                           what is missing counts as zeros, all buckets are on the wire
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from lightning_gpufeed.device.forks import leave_garbage_to_parent
from lightning_gpufeed.errors import SyncError
from lightning_gpufeed.sync.layers import SyncLayer
from lightning_gpufeed.sync.memory import GradientMemory
from lightning_gpufeed.sync.plan import Bucket
from lightning_gpufeed.sync.ranks import peer_lost

__all__ = ["Reducer", "without_gradient"]

leave_garbage_to_parent()

_POLL_SECONDS = 0.005


def without_gradient(names: Sequence[str]) -> str:
    """What to raise if backward has left parameters out.

    Args:
        names: Theirs.

    Returns:
        What was expected, and what to do.
    """
    return (
        f"{len(names)} parameters got no gradient on rank {distributed.get_rank()}, such as {names[0]}; expected one "
        "for each that requires it. Set find_unused_parameters=True if parts of the model are not always used "
        "(strategy='out_of_order_find_unused_parameters_true')."
    )


class Reducer:
    """One plan's messages, step after step.

    The arithmetic is that of `DistributedDataParallel`: each rank multiplies its gradient by one over the number of
    ranks, then gradients are summed. With two ranks every order and every cut gives the same bits.

    On CUDA devices nothing here waits on the host: the backend orders itself behind the current stream, and `wait`
    orders the current stream behind the backend.
    """

    def __init__(
        self,
        layers: Sequence[SyncLayer],
        buckets: Sequence[Bucket],
        group: Any,
        *,
        is_late: Collection[int] = (),
        sparse: Sequence[tuple[str, nn.Parameter]] = (),
        find_unused_parameters: bool = False,
    ) -> None:
        """Allocate the buckets.

        Args:
            layers: As the buckets number them, the same on all ranks.
            buckets: In the order of issue, each layer in one or more.
            group: Process group, used by nothing else.
            is_late: Layers that are not sent before backward has ended: their gradients may come in several parts.
            sparse: Names and parameters of which the gradient is sparse.
            find_unused_parameters: Whether a parameter may have no gradient: then it keeps none if no rank has one.
        """
        self.layers, self._group, self._sparse = layers, group, sparse
        self.memory = GradientMemory(layers, buckets)
        self._scale = 1.0 / distributed.get_world_size(group)
        self._is_late, self._has_unused = frozenset(is_late), find_unused_parameters
        self._buckets_of: list[list[int]] = [[] for _ in layers]
        self._layers_of: list[tuple[int, ...]] = []
        for number, bucket in enumerate(buckets):
            self._layers_of.append(tuple(dict.fromkeys(piece.layer for piece in bucket)))
            for layer in self._layers_of[-1]:
                self._buckets_of[layer].append(number)
        self._num_gradients = [len(layer.parameters) for layer in layers]
        device = layers[0].memory[0] if layers else torch.device("cpu")
        places = [(i, n) for i, layer in enumerate(layers) for n in range(len(layer.parameters))]
        self._place = {place: number for number, place in enumerate(places)}
        self._used = torch.zeros(len(places), dtype=torch.int32, device=device)
        self._used_work: Any = None
        self.error: SyncError | None = None
        """Why nothing can be reduced any more."""
        self._reset()

    def _reset(self) -> None:
        self._to_come = list(self._num_gradients)
        self._is_copied = [False] * len(self.layers)
        self._full = [len(layers) for layers in self._layers_of]
        self._works: list[list[Any]] = []
        self._unused: dict[int, list[int]] = {}
        self._used_on_host: list[int] | None = None

    def begin(self) -> None:
        """A backward begins whose gradients are to be reduced. All of the one before have been waited for."""
        if self._used_work is not None:  # who has used everything himself has not looked at it
            self._wait(self._used_work, "which parameters are used")
            self._used_work = None
        self._reset()

    def see(self, layer: int) -> None:
        """A parameter's gradient is complete.

        Args:
            layer: Whose.

        Raises:
            SyncError: It was complete before, and is on its way already.
        """
        if layer in self._is_late:
            return
        if self._is_copied[layer]:
            raise SyncError(
                f"A gradient of {self.layers[layer].name} came twice in one backward, the second time after it was "
                "sent; expected as many parts as in the first steps. Run every part of the model the same number of "
                "times in each step, or use strategy='ddp'."
            )
        self._to_come[layer] -= 1
        if not self._to_come[layer]:
            self._copy(layer)
            self._issue()

    def end(self) -> list[str]:
        """Backward has ended: send the rest.

        Returns:
            Names of parameters that require a gradient and have none, if they should.
        """
        missing = []
        for layer, is_copied in enumerate(self._is_copied):
            if not is_copied:
                self._copy(layer)
        self._issue()
        for layer, unused in self._unused.items():
            names = [self._parameter_name(layer, n) for n in unused]
            missing += [name for n, name in zip(unused, names, strict=True) if self._requires_grad(layer, n)]
        if self._has_unused:
            used = [1] * len(self._place)
            for layer, unused in self._unused.items():
                for n in unused:
                    used[self._place[layer, n]] = 0
            self._used.copy_(torch.tensor(used, dtype=torch.int32))
            self._used_work = self._all_reduce(self._used)
            missing = []
        for name, parameter in self._sparse:
            self._reduce_sparse(name, parameter)
        return missing

    def wait(self, layer: int) -> None:
        """Until the gradients of a layer have arrived; on a CUDA device the current stream waits, not the host.

        Args:
            layer: Whose.

        Raises:
            SyncError: Another rank is gone, or did not answer in time.
        """
        for bucket in self._buckets_of[layer]:
            works = self._works[bucket]
            while works:
                self._wait(works[-1], f"the gradient of {self.layers[layer].name}")
                works.pop()
        for n in self._unused.pop(layer, ()):
            if self._has_unused and self._is_used_somewhere(layer, n):
                self.layers[layer].parameters[n].grad = self.memory.views[layer][n].detach()

    def is_arrived(self, layer: int) -> bool:
        """Whether waiting for a layer would take no time.

        Args:
            layer: Which.

        Returns:
            True if all of its messages are there.
        """
        if layer in self._unused and self._has_unused and self._used_on_host is None:
            return False
        return all(work.is_completed() for bucket in self._buckets_of[layer] for work in self._works[bucket])

    def is_arrived_by(self, layer: int, deadline: float) -> bool:
        """Whether a layer's gradients arrive in time, if nobody knows whether they come at all.

        Args:
            layer: Which.
            deadline: Of `time.monotonic`.

        Returns:
            False also if a message of another layer has failed.
        """
        while not self.is_arrived(layer):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return self.error is None

    def _copy(self, layer: int) -> None:
        """Scale a layer's gradients into their bucket, and let `.grad` be what is there."""
        self._is_copied[layer] = True
        with torch.no_grad():
            parameters = self.layers[layer].parameters
            for n, (parameter, view) in enumerate(zip(parameters, self.memory.views[layer], strict=True)):
                grad = parameter.grad
                if grad is None:
                    view.zero_()
                    self._unused.setdefault(layer, []).append(n)
                elif grad.layout != torch.strided:
                    raise SyncError(
                        f"The gradient of {self._parameter_name(layer, n)} is {grad.layout}; expected a dense one. "
                        "Only torch.nn.Embedding(sparse=True) may have a sparse gradient here; use strategy='ddp'."
                    )
                elif grad.data_ptr() == view.data_ptr() and grad.numel():
                    view.mul_(self._scale)
                else:
                    torch.mul(grad.detach(), self._scale, out=view)
                    parameter.grad = view.detach()  # whoever sets its `.data` leaves the bucket as it is
        for bucket in self._buckets_of[layer]:
            self._full[bucket] -= 1

    def _issue(self) -> None:
        """Send every bucket whose turn it is."""
        while len(self._works) < len(self._full) and not self._full[len(self._works)]:
            self._works.append([self._send(part) for part in self.memory.slices[len(self._works)]])

    def _send(self, part: Tensor) -> Any:
        """Begin with what makes a part of a bucket the sum over all ranks."""
        return self._all_reduce(part)

    def _all_reduce(self, tensor: Tensor) -> Any:
        return self._collective(distributed.all_reduce, tensor)

    def _collective(self, call: Callable[..., Any], *tensors: Tensor) -> Any:
        if self.error is not None:
            raise self.error
        try:
            return call(*tensors, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._failure("sending gradients", error) from error

    def _wait(self, work: Any, what: str) -> None:
        if self.error is not None:
            raise self.error
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failure(f"waiting for {what}", error) from error

    def _failure(self, what: str, error: RuntimeError) -> SyncError:
        self.error = peer_lost(what, error)
        return self.error

    def _is_used_somewhere(self, layer: int, n: int) -> bool:
        if self._used_on_host is None:
            self._wait(self._used_work, "which parameters are used")
            self._used_on_host = self._used.tolist()
        return self._used_on_host[self._place[layer, n]] > 0

    def _reduce_sparse(self, name: str, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        if grad is None:
            if not self._has_unused:
                return
            grad = torch.zeros_like(parameter).to_sparse()
        with torch.no_grad():
            reduced = grad.coalesce() * self._scale
            self._wait(self._all_reduce(reduced), f"the gradient of {name}")
            parameter.grad = reduced

    def _requires_grad(self, layer: int, n: int) -> bool:
        return self.layers[layer].parameters[n].requires_grad

    def _parameter_name(self, layer: int, n: int) -> str:
        shape = tuple(self.layers[layer].parameters[n].shape)
        return f"{self.layers[layer].name or 'the model itself'} {shape}"
