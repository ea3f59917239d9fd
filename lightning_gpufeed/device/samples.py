"""Which part of a nested batch belongs to which sample, and how to take some of them.

::

    rows       {"image": (512, 3, 32, 32), "label": (512,), "name": [512 strings], "epoch": 3}
               sample i is row i of each tensor and entry i of each list of 512; all else belongs to the batch
    fields     ([image, image, ...], [target, target, ...])      sample i is entry i of each list
    items      [(image, label), (image, label), ...]             sample i is entry i

Containers are dicts, lists, tuples, named tuples and dataclasses, nested in any way.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch

__all__ = [
    "BatchForm",
    "batch_form",
    "copy_batch",
    "count_samples",
    "has_host_items",
    "take_samples",
    "tensor_addresses",
]

BatchForm = Literal["rows", "fields", "items"]


def batch_form(batch: Any, expected: int | None = None) -> BatchForm:
    """Find out how the samples lie in a batch.

    Args:
        batch: A nested batch.
        expected: How many samples it should have, if that is known; it decides where several forms are possible.

    Returns:
        "rows", "fields" or "items"; see the module's drawing.

    Raises:
        ValueError: The samples cannot be told apart, or in more than one way.
    """
    _refuse_unknown(batch)
    lengths: dict[BatchForm, int | None] = {
        "rows": _common_rows(batch),
        "fields": _common_length(batch),
        "items": len(batch) if _is_sequence(batch) else None,
    }
    fitting = [form for form, length in lengths.items() if length is not None and length == expected]
    # [x, y] of tensors is the usual batch; a list of tuples may be one too, or a list of samples.
    is_nested = _is_sequence(batch) and any(_is_container(part) for part in batch)
    if "rows" in (fitting or [form for form, length in lengths.items() if length is not None]):
        if not is_nested or fitting == ["rows"]:
            return "rows"
    elif fitting:
        return fitting[0]
    elif lengths["fields"] is not None:
        return "fields"
    elif lengths["items"] is not None and (is_nested or _has_tensors(batch)):
        return "items"
    raise ValueError(
        f"the samples of this batch cannot be told apart: {_describe(batch)}. Expected tensors whose first dimension "
        f"counts the samples{'' if expected is None else f' (batch_size {expected})'}, or lists with one entry each."
    )


def count_samples(batch: Any, form: BatchForm) -> int:
    """Number of samples in a batch.

    Args:
        batch: A nested batch.
        form: From `batch_form`.

    Returns:
        The count.

    Raises:
        ValueError: The batch does not have this form.
    """
    count = {"rows": _common_rows, "fields": _common_length, "items": len}[form](batch)
    if count is None:
        raise ValueError(
            f"this batch is not made like the ones before it: {_describe(batch)}. Expected "
            f"{'tensors of one length' if form == 'rows' else 'lists of one length'} in every batch."
        )
    return int(count)


def has_host_items(batch: Any, form: BatchForm) -> bool:
    """Whether taking samples needs their numbers on the host: for lists and arrays, which no device indexes."""
    return form != "rows" or any(
        isinstance(node, np.ndarray) or _is_list_of_items(node, count_samples(batch, form)) for node in _nodes(batch)
    )


def take_samples(batch: Any, form: BatchForm, index: torch.Tensor, host_index: list[int] | None = None) -> Any:
    """Copy some samples out of a batch, on its own device.

    Args:
        batch: A nested batch.
        form: From `batch_form`.
        index: int64 (n,): which samples, on the device of the tensors.
        host_index: The same numbers; needed if `has_host_items`.

    Returns:
        A batch of the same structure that shares no tensor with the given one. Memory formats are kept. Entries of
        lists, and objects that are no tensor, are the same objects.
    """
    if form == "items":
        return _like(batch, [copy_batch(batch[i]) for i in host_index or []])
    if form == "fields":
        return _mapped(batch, lambda part: _like(part, [copy_batch(part[i]) for i in host_index or []]))
    return _take_rows(batch, count_samples(batch, form), index, host_index)


def _take_rows(node: Any, num_samples: int, index: torch.Tensor, host_index: list[int] | None) -> Any:
    if isinstance(node, torch.Tensor):
        return _rows(node, index) if node.ndim else node.clone()
    if isinstance(node, np.ndarray):
        return node[host_index] if node.ndim else node.copy()
    if _is_list_of_items(node, num_samples):
        return _like(node, [node[i] for i in host_index or []])
    if _is_container(node):
        return _mapped(node, lambda part: _take_rows(part, num_samples, index, host_index))
    return node


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor in its memory format."""
    for number_of_dimensions, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        is_channels_last = tensor.ndim == number_of_dimensions and not tensor.is_contiguous()
        if is_channels_last and tensor.is_contiguous(memory_format=memory_format):
            shape = (len(index), *tensor.shape[1:])
            out = torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=memory_format)
            return torch.index_select(tensor, 0, index, out=out)
    return tensor.index_select(0, index)


def copy_batch(batch: Any) -> Any:
    """Copy a whole batch on its own device.

    Args:
        batch: Anything.

    Returns:
        The same, sharing no tensor or array with the given one.
    """
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, np.ndarray):
        return batch.copy()
    if _is_container(batch) and not isinstance(batch, torch.nn.utils.rnn.PackedSequence):
        return _mapped(batch, copy_batch)
    # What cannot be looked into but moves to a device is a batch of somebody's own kind.
    return copy.deepcopy(batch) if hasattr(batch, "to") else batch


def tensor_addresses(batch: Any) -> set[int]:
    """Where the data of the tensors and arrays of a batch begin in memory; empty ones have no place."""
    tensors = {node.data_ptr() for node in _nodes(batch) if isinstance(node, torch.Tensor) and node.numel()}
    return tensors | {node.ctypes.data for node in _nodes(batch) if isinstance(node, np.ndarray) and node.size}


# The kinds of containers ----------------------------------------------------------------------------------


def _is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def _is_sequence(node: Any) -> bool:
    """A plain list or tuple, whose entries may be samples."""
    return isinstance(node, list | tuple) and not _is_named_tuple(node)


def _is_record(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def _is_container(node: Any) -> bool:
    return isinstance(node, list | tuple | Mapping) or _is_record(node)


def _parts(node: Any) -> list[tuple[str, Any]]:
    """What is directly in a container, with how it is reached."""
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if _is_record(node):
        return [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]
    return [(f"[{number}]", value) for number, value in enumerate(node)]


def _mapped(node: Any, change: Callable[[Any], Any]) -> Any:
    """A container like this one with every part changed."""
    if isinstance(node, Mapping):
        # A copy keeps what a plain dict would lose: a default factory, attributes of a subclass.
        changed = copy.copy(node)
        for key, value in node.items():
            changed[key] = change(value)  # type: ignore[index]
        return changed
    if _is_record(node):
        changed = copy.copy(node)
        for field in dataclasses.fields(node):
            object.__setattr__(changed, field.name, change(getattr(node, field.name)))
        return changed
    return _like(node, [change(part) for part in node])


def _like(node: Any, parts: list[Any]) -> Any:
    return node._make(parts) if _is_named_tuple(node) else type(node)(parts)


def _nodes(node: Any) -> Iterator[Any]:
    """The node and all below it."""
    yield node
    if _is_container(node):
        for _, part in _parts(node):
            yield from _nodes(part)


def _has_tensors(node: Any) -> bool:
    return any(isinstance(part, torch.Tensor | np.ndarray) for part in _nodes(node))


def _is_list_of_items(node: Any, num_samples: int) -> bool:
    """A list with something for each sample that is no tensor: names, metadata."""
    return _is_sequence(node) and len(node) == num_samples and not _has_tensors(node)


# How many samples -----------------------------------------------------------------------------------------


def _common_rows(batch: Any) -> int | None:
    """Length of all tensors and arrays, if they have one in common."""
    lengths = {len(node) for node in _nodes(batch) if isinstance(node, torch.Tensor | np.ndarray) and node.ndim}
    return lengths.pop() if len(lengths) == 1 else None


def _common_length(batch: Any) -> int | None:
    """Length of all lists directly in the batch, if it holds nothing else."""
    if not _is_container(batch):
        return None
    parts = [part for _, part in _parts(batch)]
    lengths = {len(part) if _is_sequence(part) else -1 for part in parts}
    return lengths.pop() if len(lengths) == 1 and -1 not in lengths else None


def _refuse_unknown(batch: Any) -> None:
    """What can be moved to a device but not looked into, or whose rows are not samples."""
    for node in _nodes(batch):
        is_opaque = not _is_container(node) and not isinstance(node, torch.Tensor) and hasattr(node, "to")
        if is_opaque or isinstance(node, torch.nn.utils.rnn.PackedSequence):
            raise ValueError(f"the samples of a {type(node).__module__}.{type(node).__name__} cannot be told apart.")
        if isinstance(node, torch.Tensor) and (node.is_nested or node.layout is not torch.strided):
            raise ValueError("the samples of a nested or sparse tensor cannot be told apart.")


def _describe(node: Any, path: str = "batch") -> str:
    """Where the tensors are and of which shape; a few of them."""
    shown = list(_describe_all(node, path))
    return ", ".join(shown[:6]) + (" ..." if len(shown) > 6 else "") or f"a {type(node).__name__}"


def _describe_all(node: Any, path: str) -> Iterator[str]:
    if isinstance(node, torch.Tensor | np.ndarray):
        yield f"{path} has shape {tuple(node.shape)}"
    elif _is_container(node) and _has_tensors(node):
        for where, part in _parts(node):
            yield from _describe_all(part, path + where)
    elif _is_sequence(node):
        yield f"{path} is a list of {len(node)}"
