"""Plain attributes of a module: counters, lists of outputs, meters, generators, tensors that are no buffers."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

__all__ = ["AttributeStates", "can_be_copied_into", "is_of_library", "is_ordinary"]

LIBRARIES = frozenset({"torch", "lightning", "pytorch_lightning", "torchmetrics", "torchvision", "numpy", "builtins"})
CONTAINERS = (list, dict, set, deque, Counter, defaultdict, OrderedDict)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
PLAIN = frozenset(
    {int, float, bool, complex, str, bytes, tuple, frozenset, type(None), torch.Tensor, np.ndarray, *CONTAINERS}
)
MANY = 10_000
"""Entries from which on only the length of a list is noted, and nothing of another container."""
DEEP = 3
SMALL_BYTES = 2**20
OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def is_of_library(value: Any) -> bool:
    """Whether an object's class belongs to torch, Lightning or the like, and not to a user.

    Args:
        value: Anything.

    Returns:
        By the first name of its module.
    """
    return type(value).__module__.partition(".")[0] in LIBRARIES


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether it is a tensor of torch's own kind with a memory of its own; not one that wraps others, or waits for one.

    Args:
        tensor: A tensor, parameter or buffer.

    Returns:
        Of others only a reference can be kept.
    """
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and not is_lazy(tensor)


def can_be_copied_into(tensor: torch.Tensor) -> bool:
    """Whether each of its elements has a place of its own.

    Args:
        tensor: A tensor, parameter or buffer.

    Returns:
        Not for sparse, quantised and expanded ones.
    """
    if not is_ordinary(tensor) or tensor.layout is not torch.strided or tensor.is_quantized:
        return False
    return all(stride or size < 2 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


class AttributeStates:
    """Values of plain attributes before a batch, so that a batch that is done twice is counted once.

    `self.total += len(y)` and `self.outputs.append(x)` in a step are put back when an attempt has failed; generators of
    the module's own draw the same again. Looked at are attributes of modules of the user's own classes: numbers,
    texts, small tensors and arrays, generators, lists, dicts, sets and deques, a few levels deep; of submodules those
    that the first batches have changed. Attributes that a failed attempt has made are deleted. Objects of other classes
    are left alone, as nobody can know what else they are tied to.
    """

    def __init__(self, module: nn.Module, ignored: frozenset[str] = frozenset()) -> None:
        """Find them.

        Args:
            module: Its submodules too.
            ignored: Names of attributes that are not the user's.
        """
        self._module = module
        self._ignored = OF_EVERY_MODULE | ignored
        self._owners = [part for part in module.modules() if not is_of_library(part)]
        self._learned: set[tuple[int, str]] | None = None
        self._notes: list[tuple[dict[str, Any], str, _Note]] = []
        self._lengths: list[int] = []

    @torch.no_grad()
    def save(self) -> None:
        """Note the values as they are now."""
        if self._learned is None and self._notes:
            self._learned = {
                (id(owner), name)
                for owner, name, note in self._notes
                if owner.get(name) is not note.value or note.has_changed()
            }
        self._lengths = [len(vars(owner)) for owner in self._owners]
        self._notes = [(vars(owner), name, _Note(value, DEEP)) for owner, name, value in self._chosen()]

    def _chosen(self) -> Iterator[tuple[nn.Module, str, Any]]:
        for owner in self._owners:
            for name, value in vars(owner).items():
                if name in self._ignored:
                    continue
                is_plain = type(value) in PLAIN or isinstance(value, GENERATORS)
                if is_plain and (owner is self._module or self._is_learned(owner, name)):
                    yield owner, name, value

    def _is_learned(self, owner: nn.Module, name: str) -> bool:
        return self._learned is None or (id(vars(owner)), name) in self._learned

    @torch.no_grad()
    def put_back(self) -> None:
        """Give all of them the values that were noted."""
        for owner, length in zip(self._owners, self._lengths, strict=True):
            for name in list(vars(owner))[length:]:  # new ones come last
                if name not in self._ignored:
                    del vars(owner)[name]
        for attributes, name, note in self._notes:
            attributes[name] = note.value
            note.put_back()


class _Note:
    """A value as it was."""

    __slots__ = ("entries", "length", "parts", "value", "version")

    def __init__(self, value: Any, depth: int) -> None:
        self.value = value
        self.entries: Any = None
        self.length = self.version = -1
        self.parts: list[_Note] = []
        if isinstance(value, torch.Tensor):
            self._note_tensor(value)
        elif isinstance(value, np.ndarray):
            self.entries = value.copy() if value.nbytes <= SMALL_BYTES else None
        elif isinstance(value, GENERATORS):
            self.entries = _state_of(value)
        elif type(value) in CONTAINERS:
            self.length = len(value)
            if self.length <= MANY:
                self.entries = dict(value) if isinstance(value, dict) else list(value)
                self._note_parts(self.entries.values() if isinstance(value, dict) else self.entries, depth)

    def _note_tensor(self, value: torch.Tensor) -> None:
        if value.grad_fn is not None:
            self.value = None  # of the last batch: it would be kept alive
            return
        is_small = value.numel() * value.element_size() <= SMALL_BYTES
        is_open = not value.is_inference() or torch.is_inference_mode_enabled()
        if is_small and is_open and can_be_copied_into(value):
            self.entries = value.detach().clone()
            self.version = -1 if value.is_inference() else value._version

    def _note_parts(self, values: Any, depth: int) -> None:
        if depth and len(values) <= 64:
            self.parts = [
                _Note(one, depth - 1) for one in values if type(one) in CONTAINERS or isinstance(one, GENERATORS)
            ]

    def has_changed(self) -> bool:
        """Whether what is in it has changed."""
        value = self.value
        if self.entries is None:
            return self.length >= 0 and len(value) != self.length
        if isinstance(value, torch.Tensor):
            return not torch.equal(value.detach(), self.entries)
        if isinstance(value, np.ndarray):
            return not np.array_equal(value, self.entries)
        if isinstance(value, GENERATORS):
            return True
        return len(value) != self.length or any(part.has_changed() for part in self.parts)

    def put_back(self) -> None:
        """Give it what was in it."""
        value = self.value
        if self.entries is None:
            if isinstance(value, list) and self.length >= 0:
                del value[self.length :]
        elif isinstance(value, torch.Tensor):
            # What has not changed is left alone: it may share its memory with a weight or with the batch.
            if self.version < 0 or value._version != self.version or not torch.equal(value.detach(), self.entries):
                value.detach().copy_(self.entries)
        elif isinstance(value, np.ndarray):
            value[...] = self.entries
        elif isinstance(value, GENERATORS):
            _set_state(value, self.entries)
        elif isinstance(value, list):
            value[:] = self.entries
        else:
            value.clear()
            value.extend(self.entries) if isinstance(value, deque) else value.update(self.entries)
        for part in self.parts:
            part.put_back()


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
