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
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import torch

__all__ = [
    "BatchForm",
    "as_same_class",
    "batch_form",
    "copy_batch",
    "count_samples",
    "has_host_items",
    "has_tensors",
    "is_container",
    "is_record",
    "is_sequence",
    "like",
    "parts",
    "rebuilt",
    "take_samples",
    "tensor_addresses",
    "walk",
    "with_entries",
]

BatchForm = Literal["rows", "fields", "items"]


def batch_form(batch: Any, expected: int | None = None) -> BatchForm:
    """Find out how the samples lie in a batch.

    Args:
        batch: A nested batch.
        expected: How many samples a full one has, if that is known; it decides where several forms are possible.

    Returns:
        "rows", "fields" or "items"; see the module's drawing.

    Raises:
        ValueError: The samples cannot be told apart, or in more than one way.
    """
    _refuse_unknown(batch)
    rows, is_nested = _common_rows(batch), _holds_lists_of_tensors(batch)
    if rows is not None and not is_nested:
        # [x, y] is the usual batch; only tensors of one shape could be a list of samples as well.
        is_alike = is_sequence(batch) and len(batch) > 1 and len({_shape(part) for part in batch}) == 1
        may_be_items = is_alike and (expected is None or len(batch) == expected)
        if not may_be_items and (expected is None or rows <= expected):
            return "rows"
        if may_be_items and expected is not None and rows != expected:
            return "items"
    else:
        lengths: dict[BatchForm, int | None] = {
            "rows": rows,
            "fields": _common_length(batch),
            "items": len(batch) if is_sequence(batch) and (expected is not None or has_tensors(batch)) else None,
        }
        possible = [form for form, length in lengths.items() if length]
        if expected is not None:
            # Of forms that fit, none may be guessed; a batch that is not full fits too, if nothing else could be meant.
            fitting = [form for form in possible if lengths[form] == expected]
            possible = fitting or [form for form in possible if not is_nested and (lengths[form] or 0) < expected]
        if len(possible) == 1:
            return possible[0]
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
    """Whether taking samples needs their numbers on the host: for lists, arrays, and tensors that stayed there."""
    devices = {node.device for node in walk(batch) if isinstance(node, torch.Tensor) and node.ndim}
    return (
        form != "rows"
        or len(devices) > 1
        or any(isinstance(node, np.ndarray) or _is_list_of_items(node, _common_rows(batch)) for node in walk(batch))
    )


def take_samples(batch: Any, form: BatchForm, index: torch.Tensor, host_index: list[int] | None = None) -> Any:
    """Copy some samples out of a batch, on its own device.

    Args:
        batch: A nested batch.
        form: From `batch_form`.
        index: int64 (n,): which samples, on the device of the tensors; on the host if they are on several.
        host_index: The same numbers; needed if `has_host_items`.

    Returns:
        A batch of the same structure that shares no tensor with the given one. Memory formats are kept. Entries of
        lists, and objects that are no tensor, are the same objects.
    """
    if form == "items":
        return like(batch, [copy_batch(batch[i]) for i in host_index or []])
    if form == "fields":
        return _mapped(batch, lambda part: like(part, [copy_batch(part[i]) for i in host_index or []]))
    return _take_rows(batch, count_samples(batch, form), index, host_index)


def _take_rows(node: Any, num_samples: int, index: torch.Tensor, host_index: list[int] | None) -> Any:
    if isinstance(node, torch.Tensor):
        return _rows(node, index.to(node.device, non_blocking=True)) if node.ndim else node.clone()
    if isinstance(node, np.ndarray):
        return node[host_index] if node.ndim else node.copy()
    if _is_list_of_items(node, num_samples):
        return like(node, [node[i] for i in host_index or []])
    if is_container(node):
        return _mapped(node, lambda part: _take_rows(part, num_samples, index, host_index))
    return node


def _rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of a tensor in its memory format."""
    for number_of_dimensions, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        is_channels_last = tensor.ndim == number_of_dimensions and not tensor.is_contiguous()
        if is_channels_last and tensor.is_contiguous(memory_format=memory_format):
            if tensor.requires_grad:  # cannot be gathered into memory of its own
                return tensor.index_select(0, index).contiguous(memory_format=memory_format)
            shape = (len(index), *tensor.shape[1:])
            out = torch.empty(shape, dtype=tensor.dtype, device=tensor.device, memory_format=memory_format)
            return torch.index_select(tensor, 0, index, out=out)
    try:
        return tensor.index_select(0, index)
    except NotImplementedError:  # a few unsigned types, on some devices
        return tensor[index]


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
    if is_container(batch) and not isinstance(batch, torch.nn.utils.rnn.PackedSequence):
        return _mapped(batch, copy_batch)
    # What cannot be looked into but moves to a device is a batch of somebody's own kind.
    return copy.deepcopy(batch) if hasattr(batch, "to") else batch


def tensor_addresses(batch: Any) -> set[int]:
    """Where the data of the tensors and arrays of a batch begin in memory; empty ones have no place."""
    tensors = {node.data_ptr() for node in walk(batch) if isinstance(node, torch.Tensor) and node.numel()}
    return tensors | {node.ctypes.data for node in walk(batch) if isinstance(node, np.ndarray) and node.size}


# The kinds of containers ----------------------------------------------------------------------------------


def _is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def is_sequence(node: Any) -> bool:
    """Whether it is a plain list or tuple, whose entries may be samples."""
    return isinstance(node, list | tuple) and not _is_named_tuple(node)


def is_record(node: Any) -> bool:
    """Whether it is an instance of a dataclass."""
    return dataclasses.is_dataclass(node) and not isinstance(node, type)


def is_container(node: Any) -> bool:
    """Whether it can be looked into: a dict, list, tuple, named tuple or dataclass."""
    return isinstance(node, list | tuple | Mapping) or is_record(node)


def parts(node: Any) -> list[tuple[str, Any]]:
    """What is directly in a container.

    Args:
        node: A container.

    Returns:
        How each part is reached, such as `['image']`, `.image` or `[0]`, and the part, in their order.
    """
    if isinstance(node, Mapping):
        return [(f"[{key!r}]", value) for key, value in node.items()]
    if is_record(node):
        return [(f".{field.name}", getattr(node, field.name)) for field in dataclasses.fields(node)]
    return [(f"[{number}]", value) for number, value in enumerate(node)]


def rebuilt(node: Any, new_parts: list[Any]) -> Any:
    """A container like this one with other parts.

    Args:
        node: A container; it stays as it is.
        new_parts: As many as it has, in the order of `parts`.

    Returns:
        A container of the same class; what a subclass keeps beside its parts is kept.

    Raises:
        ValueError: A mapping cannot be made of a dict.
    """
    if isinstance(node, Mapping):
        return with_entries(node, dict(zip(node.keys(), new_parts, strict=True)))
    if is_record(node):
        changed = copy.copy(node)
        for field, part in zip(dataclasses.fields(node), new_parts, strict=True):
            object.__setattr__(changed, field.name, part)
        return changed
    return like(node, new_parts)


def with_entries(node: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """A mapping like this one that holds these entries and no others.

    Args:
        node: A mapping; it stays as it is.
        entries: Its new entries.

    Returns:
        A mapping of the same class.

    Raises:
        ValueError: It cannot be made of a dict.
    """
    if isinstance(node, dict | UserDict):
        # A copy keeps what a plain dict would lose: a default factory, attributes of a subclass.
        changed = copy.copy(node)
        if list(changed) != list(entries):
            changed.clear()
        for key, value in entries.items():
            changed[key] = value
        return changed
    try:  # only it knows where it keeps its entries
        return type(node)(entries)  # type: ignore[call-arg]
    except TypeError as error:
        raise ValueError(
            f"a {type(node).__name__} cannot be made of a dict ({error}); use a dict in its place."
        ) from error


def like(node: Any, entries: list[Any]) -> Any:
    """A list, tuple or named tuple of the same class as this one, with any number of entries."""
    return node._make(entries) if _is_named_tuple(node) else type(node)(entries)


def as_same_class(tensor: torch.Tensor, original: torch.Tensor) -> torch.Tensor:
    """Make rows of a tensor what the tensor is: some subclasses (images, boxes) forget it in every operation.

    Args:
        tensor: Made from the original.
        original: Maybe of a subclass.

    Returns:
        The same values, of the original's class and with its attributes; of a parameter, a plain tensor.
    """
    if type(tensor) is type(original) or isinstance(original, torch.nn.Parameter):
        return tensor
    same = tensor.as_subclass(type(original))
    same.__dict__.update(original.__dict__)
    return same


def _mapped(node: Any, change: Callable[[Any], Any]) -> Any:
    """A container like this one with every part changed."""
    return rebuilt(node, [change(part) for _, part in parts(node)])


def walk(node: Any) -> Iterator[Any]:
    """The node and all below it: containers and what they hold."""
    yield node
    if is_container(node):
        for _, part in parts(node):
            yield from walk(part)


def has_tensors(node: Any) -> bool:
    """Whether there is a tensor or array in it, or it is one."""
    return any(isinstance(part, torch.Tensor | np.ndarray) for part in walk(node))


def _is_list_of_items(node: Any, num_samples: int | None) -> bool:
    """A list with something for each sample that is no tensor: names, metadata. A tuple of numbers is a shape."""
    if not is_sequence(node) or len(node) != num_samples or has_tensors(node):
        return False
    return not (isinstance(node, tuple) and all(isinstance(part, int | float) for part in node))


def _holds_lists_of_tensors(batch: Any) -> bool:
    """Whether there is a list with tensors anywhere below the top, which may be a list of samples."""
    return any(node is not batch and is_sequence(node) and has_tensors(node) for node in walk(batch))


def _shape(node: Any) -> Any:
    return tuple(node.shape) if isinstance(node, torch.Tensor | np.ndarray) else type(node)


# How many samples -----------------------------------------------------------------------------------------


def _common_rows(batch: Any) -> int | None:
    """Length of all tensors and arrays, if they have one in common."""
    lengths = {len(node) for node in walk(batch) if isinstance(node, torch.Tensor | np.ndarray) and node.ndim}
    return lengths.pop() if len(lengths) == 1 else None


def _common_length(batch: Any) -> int | None:
    """Length of all lists directly in the batch, if it holds nothing else."""
    if not is_container(batch):
        return None
    lengths = {len(part) if is_sequence(part) else -1 for _, part in parts(batch)}
    return lengths.pop() if len(lengths) == 1 and -1 not in lengths else None


def _refuse_unknown(batch: Any) -> None:
    """What can be moved to a device but not looked into, or whose rows are not samples."""
    for node in walk(batch):
        is_opaque = not is_container(node) and not isinstance(node, torch.Tensor) and hasattr(node, "to")
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
    elif is_container(node) and has_tensors(node):
        for where, part in parts(node):
            yield from _describe_all(part, path + where)
    elif is_sequence(node):
        yield f"{path} is a list of {len(node)}"
