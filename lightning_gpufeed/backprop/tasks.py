"""Weight gradients that wait: what each needs, how many bytes that keeps, and computing each exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpufeed.backprop.kernels import Kernels, WeightGrads
from lightning_gpufeed.errors import DeferredGradientError

TaskKey = tuple[str, int, int]
"""A layer's name, the number of the backward pass, and which parameter."""

__all__ = ["Call", "Task", "TaskKey", "TaskQueue", "kept_by"]


@dataclass(slots=True)
class Call:
    """What one call of a layer left behind.

    Attributes:
        kernels: What computes it.
        grad_output: Gradient of the output.
        x: The input, in the dtype that was computed with.
        weight: The weight as it was computed with: under autocast a copy of less precision.
        versions: Of `x` and `grad_output` when they were noted.
        is_cast_shared: Whether autograd would have cast one sum of all calls, rather than each.
    """

    kernels: Kernels
    grad_output: Tensor
    x: Tensor
    weight: Tensor
    versions: tuple[int, int]
    is_cast_shared: bool

    def grads(self, name: str, mask: tuple[bool, bool]) -> WeightGrads:
        """Of weight and bias.

        Args:
            name: The layer's, for an error.
            mask: Which of them.

        Returns:
            In the dtype that was computed with.

        Raises:
            DeferredGradientError: The input or the gradient of the output was changed in place meanwhile.
        """
        if (self.x._version, self.grad_output._version) != self.versions:
            what = "input" if self.x._version != self.versions[0] else "gradient of the output"
            raise DeferredGradientError(
                f"The {what} of {name} was changed in place before its weight gradient was computed from it; expected "
                "it to stay as it was until then. Copy it before the change, or leave this layer out of those that "
                "wait."
            )
        return self.kernels.weight_grad(self.grad_output, self.x, self.weight, mask)


@dataclass
class Task:
    """The weight gradient of one layer in one backward pass.

    Attributes:
        name: The layer's.
        weight: Gets its gradient in `.grad`.
        bias: Likewise; None if there is none.
        number: Of the backward pass.
        calls: One for each time that the layer ran, in the order in which their gradients came.
        totals: Of calls that are computed already, for weight and bias.
    """

    name: str
    weight: nn.Parameter
    bias: nn.Parameter | None
    number: int
    calls: list[Call] = field(default_factory=list)
    totals: list[Tensor | None] = field(default_factory=lambda: [None, None])

    @property
    def num_grads(self) -> int:
        """How many parameters get a gradient; 0 if all are frozen meanwhile."""
        return self.weight.requires_grad + (self.bias is not None and self.bias.requires_grad)

    def root(self) -> Tensor | None:
        """What has to be run backward from to compute it.

        Returns:
            A tensor without elements; None if all is frozen meanwhile.
        """
        if not self.num_grads:
            return None
        bias = self.bias if self.bias is not None and self.bias.requires_grad else None
        mask = (self.weight.requires_grad, bias is not None)
        with torch.enable_grad():
            root: Tensor = _Grads.apply(self, self.weight if mask[0] else None, bias)  # type: ignore[no-untyped-call]
        return root

    def fold(self) -> None:
        """Compute the calls so far, and keep their sum in place of what they need: more calls are to come."""
        calls, self.calls = self.calls, []
        mask = (self.weight.requires_grad, self.bias is not None and self.bias.requires_grad)
        with torch.no_grad(), torch.autocast(self.weight.device.type, enabled=False):
            for call in calls:
                for place, grad in enumerate(call.grads(self.name, mask)):
                    if grad is not None:
                        self._add(place, grad if call.is_cast_shared else grad.to(self._dtype(place)))

    def grads(self) -> WeightGrads:
        """Of weight and bias, over all calls; lets go of what they were computed from.

        Returns:
            In the parameters' dtypes.
        """
        self.fold()
        totals, self.totals = self.totals, [None, None]
        weight, bias = (None if total is None else total.to(self._dtype(n)) for n, total in enumerate(totals))
        return weight, bias

    def _add(self, place: int, grad: Tensor) -> None:
        total = self.totals[place]
        self.totals[place] = grad if total is None else total + grad

    def _dtype(self, place: int) -> torch.dtype:
        return self.weight.dtype if place == 0 or self.bias is None else self.bias.dtype


class _Grads(torch.autograd.Function):
    """A node whose backward is the computation of a task: what comes out of it goes to the parameters natively."""

    @staticmethod
    def forward(ctx: Any, task: Task, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.task = task
        return task.weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor | None, ...]:
        return None, *ctx.task.grads()


def kept_by(call: Call, weight: nn.Parameter) -> list[Tensor]:
    """What a call keeps alive: all that it needs, but for the parameter itself.

    Args:
        call: Of a layer.
        weight: The layer's.

    Returns:
        Its tensors.
    """
    tensors = [call.grad_output, call.x]
    return tensors if call.weight.data_ptr() == weight.data_ptr() else [*tensors, call.weight]


class TaskQueue:
    """Tasks in the order in which they came, and how many bytes they keep alive.

    Memory that several calls share, such as the input of three projections, is counted once.
    """

    def __init__(self) -> None:
        """Empty."""
        self._tasks: dict[TaskKey, Task] = {}
        self._owners: dict[tuple[torch.device, int], list[int]] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        """Those that wait, oldest first."""
        return iter(list(self._tasks.values()))

    def add(self, name: str, weight: nn.Parameter, bias: nn.Parameter | None, number: int, call: Call) -> None:
        """Note a call.

        Args:
            name: The layer's.
            weight: Its weight.
            bias: Its bias, if it has one.
            number: Of the backward pass: calls of the same one are added up before they reach `.grad`.
            call: What is needed.
        """
        task = self._tasks.setdefault((name, number, id(weight)), Task(name, weight, bias, number))
        task.calls.append(call)
        for tensor in kept_by(call, weight):
            storage = tensor.untyped_storage()
            entry = self._owners.setdefault((tensor.device, storage.data_ptr()), [0, storage.nbytes()])
            if entry[0] == 0:
                self.num_bytes += entry[1]
            entry[0] += 1

    def fold(self, task: Task) -> None:
        """Keep the sum of a task's calls so far in place of what they need.

        Args:
            task: One that waits.
        """
        self._release(task)
        task.fold()

    def __contains__(self, key: object) -> bool:
        """Whether a task waits."""
        return key in self._tasks

    def keys(self, names: Iterable[str] | None = None) -> tuple[TaskKey, ...]:
        """Tell tasks of one layer in several backward passes from each other.

        Args:
            names: Of layers. None: all.

        Returns:
            A key for each task: layer after layer as given, and oldest first; all of them just oldest first.
        """
        if names is None:
            return tuple(self._tasks)
        places: dict[str, list[TaskKey]] = {}
        for key in self._tasks:
            places.setdefault(key[0], []).append(key)
        return tuple(key for name in dict.fromkeys(names) for key in places.get(name, ()))

    def of(self, keys: Iterable[TaskKey]) -> list[Task]:
        """Look tasks up.

        Args:
            keys: Of tasks that wait.

        Returns:
            The tasks.
        """
        return [self._tasks[key] for key in keys]

    def run(self, names: Iterable[str] | None = None) -> None:
        """Run all tasks of some layers, one layer after the other.

        Args:
            names: The layers'. None: all, oldest first.
        """
        self.run_keys(self.keys(names))

    def run_keys(self, keys: Iterable[TaskKey]) -> None:
        """Run some tasks, one after the other.

        Autograd adds each to `.grad` as soon as it is computed, so all hooks on parameters run as they would have. All
        are given to it at once, as each time costs tens of microseconds.

        Args:
            keys: Of tasks that wait.
        """
        tasks: list[Task] = []
        weights: set[int] = set()
        for key in list(keys):
            task = self._tasks.pop(key)
            if id(task.weight) in weights:  # of another backward pass: autograd adds that to `.grad` by itself
                self._compute(tasks)
                tasks, weights = [], set()
            tasks.append(task)
            weights.add(id(task.weight))
        self._compute(tasks)

    def _compute(self, tasks: list[Task]) -> None:
        for task in tasks:
            self._release(task)
        # Of nodes that are ready the engine takes the one that was made last.
        roots = [root for task in reversed(tasks) if (root := task.root()) is not None]
        tasks.clear()
        if roots:
            torch.autograd.backward(roots, [root.detach() for root in roots])

    def _release(self, task: Task) -> None:
        for call in task.calls:
            for tensor in kept_by(call, task.weight):
                place = (tensor.device, tensor.untyped_storage().data_ptr())
                entry = self._owners[place]
                entry[0] -= 1
                if entry[0] == 0:
                    self.num_bytes -= entry[1]
                    del self._owners[place]

    def clear(self) -> None:
        """Forget all tasks, as after a failed backward."""
        self._tasks.clear()
        self._owners.clear()
        self.num_bytes = 0
