"""What passes between stages: tensors in any nest of lists, tuples, dicts and registered classes.

Private name of torch, asserted in `tests/test_private_api.py`: `torch.utils._pytree`, which takes such a nest apart and
puts it together again, and to which other libraries register their classes.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from lightning_gpufeed.errors import ScheduleError

__all__ = [
    "NestedSpec",
    "TensorSpec",
    "batch_size",
    "concatenate",
    "flatten",
    "in_memory",
    "is_same_leaf",
    "microbatch_sizes",
    "split",
    "unflatten",
]


_LEAF: Any = _pytree.tree_flatten(0)[1]
"""The structure of a value that is no nest."""


@dataclass(frozen=True)
class TensorSpec:
    """All that has to be known to receive a tensor.

    Attributes:
        shape: Its sizes.
        dtype: Its type.
        requires_grad: Whether a gradient comes back.
        strides: If it is in one piece of memory in another order, as images are with channels last.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    strides: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """That of a tensor.

        Args:
            tensor: Any that is not sparse.

        Returns:
            Its specification.
        """
        strides = tuple(tensor.stride()) if not tensor.is_contiguous() and _is_dense(tensor) else None
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, strides)

    def laid_out(self, tensor: Tensor) -> Tensor:
        """A tensor in the order that is expected.

        Args:
            tensor: Of this shape and type.

        Returns:
            It, or a copy.
        """
        if self.strides is None:
            return tensor.contiguous()
        if tuple(tensor.stride()) == self.strides:
            return tensor
        return self.empty(tensor.device).copy_(tensor)

    def empty(self, device: torch.device) -> Tensor:
        """Memory to receive into.

        Args:
            device: Where.

        Returns:
            A tensor with any values, which requires no gradient.
        """
        if self.strides is not None:
            return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class NestedSpec:
    """All that has to be known to receive a nest of tensors.

    Attributes:
        structure: How the leaves are nested, as `flatten` gives it.
        leaves: A `TensorSpec` for each tensor; everything else is here itself.
    """

    structure: Any
    leaves: tuple[Any, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """The structure as a nest of its own: torch's description of it warns when it is pickled."""
        return _rebuilt, (unflatten([0] * len(self.leaves), self.structure), self.leaves)

    @classmethod
    def of(cls, value: Any) -> NestedSpec:
        """That of a value.

        Args:
            value: Any nest.

        Returns:
            Its specification.
        """
        leaves, structure = flatten(value)
        return cls(structure, tuple(TensorSpec.of(one) if isinstance(one, Tensor) else one for one in leaves))

    def is_same(self, other: NestedSpec) -> bool:
        """Whether another one is equal, where a number that is none is equal to itself.

        Args:
            other: Any.

        Returns:
            True if so.
        """
        if self.structure is _LEAF and other.structure is _LEAF:
            return self.leaves == other.leaves
        if self.structure != other.structure or len(self.leaves) != len(other.leaves):
            return False
        return all(map(is_same_leaf, self.leaves, other.leaves))

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """Of the tensors alone, in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, TensorSpec))

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """Put a value together.

        Args:
            tensors: As many as `tensors` has.

        Returns:
            The nest.
        """
        given = iter(tensors)
        return unflatten(
            [next(given) if isinstance(leaf, TensorSpec) else leaf for leaf in self.leaves], self.structure
        )


def is_same_leaf(one: Any, other: Any) -> bool:
    """Whether a leaf is the same on another rank, or at another time.

    Args:
        one: A `TensorSpec`, or a leaf that is no tensor.
        other: Likewise.

    Returns:
        True if nobody could tell the difference.
    """
    if isinstance(one, TensorSpec) or isinstance(other, TensorSpec):
        return bool(one == other)
    return one is other or pickle.dumps(one) == pickle.dumps(other)


def _rebuilt(nest: Any, leaves: tuple[Any, ...]) -> NestedSpec:
    structure = flatten(nest)[1]
    return NestedSpec(_LEAF if structure == _LEAF else structure, leaves)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements are next to each other in memory, in any order."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def in_memory(tensor: Tensor) -> Tensor:
    """The elements of a tensor in the order in which they are in memory.

    Args:
        tensor: Laid out as its `TensorSpec` says.

    Returns:
        A flat view.
    """
    return tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Take a nest apart.

    Args:
        value: Any.

    Returns:
        The leaves in order, and the structure for `unflatten`.
    """
    if isinstance(value, Tensor):  # as nearly always
        return [value], _LEAF
    return _pytree.tree_flatten(value)


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """Put a nest together.

    Args:
        leaves: In order.
        structure: As of `flatten`.

    Returns:
        The nest.
    """
    if structure is _LEAF:
        return leaves[0]
    return _pytree.tree_unflatten(leaves, structure)


def batch_size(value: Any) -> int | None:
    """How many samples a batch has.

    Args:
        value: Any nest.

    Returns:
        The first dimension of the first tensor that has one; None if there is none.
    """
    return next((leaf.shape[0] for leaf in flatten(value)[0] if isinstance(leaf, Tensor) and leaf.ndim), None)


def microbatch_sizes(num_samples: int, num_microbatches: int) -> tuple[int, ...]:
    """Cut a batch into microbatches that differ by one sample at most, the larger ones first.

    Args:
        num_samples: Of the batch.
        num_microbatches: At most as many.

    Returns:
        The samples of each.

    Example:
        >>> microbatch_sizes(10, 4)
        (3, 3, 2, 2)
    """
    size, num_larger = divmod(num_samples, num_microbatches)
    return tuple(size + (index < num_larger) for index in range(num_microbatches))


def split(value: Any, sizes: Sequence[int]) -> list[Any]:
    """Cut a batch into microbatches.

    Args:
        value: Any nest. Tensors whose first dimension is the sum of `sizes` are cut; all else goes to each microbatch.
        sizes: Samples of each.

    Returns:
        A nest for each, of views.
    """
    leaves, structure = flatten(value)
    total = sum(sizes)
    columns = [
        torch.split(leaf, list(sizes))
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == total
        else [leaf] * len(sizes)
        for leaf in leaves
    ]
    return [unflatten([column[index] for column in columns], structure) for index in range(len(sizes))]


def concatenate(parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """The whole output from those of the microbatches.

    Args:
        parts: Nests of one structure.
        sizes: Samples of each.

    Returns:
        A nest; each of its tensors has the sum of `sizes` as its first dimension, and begins a graph if one of the
        parts requires a gradient. What is no tensor is the first's.

    Raises:
        ScheduleError: A tensor's first dimension is not that of the samples, so there is no telling what the whole is.
    """
    flat = [flatten(part) for part in parts]
    leaves: list[Any] = []
    for column in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(column[0], Tensor):
            leaves.append(column[0])
            continue
        for tensor, size in zip(column, sizes, strict=True):
            if not tensor.ndim or tensor.shape[0] != size:
                raise ScheduleError(
                    f"The last layer of the pipeline gives a tensor of shape {tuple(tensor.shape)} for {size} samples; "
                    f"expected the samples in the first dimension, so that the outputs of microbatches can be put "
                    f"together. Take such values from the whole output in training_step."
                )
        whole = torch.cat(column) if len(column) > 1 else column[0]
        leaves.append(whole.detach().requires_grad_(any(tensor.requires_grad for tensor in column)))
    return unflatten(leaves, flat[0][1])
