"""Notice when user code changed a batch, and give it back as it was where that can be done."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from lightning_gpufeed.device.samples import has_tensors, is_container, is_sequence, like, parts, rebuilt, with_entries
from lightning_gpufeed.recover.attributes import is_of_library
from lightning_gpufeed.recover.batch_reading import is_opaque

__all__ = ["BatchGuard", "changed_in_place"]


class BatchGuard:
    """Notes what a batch is like, to notice later whether user code changed it.

    An attempt that failed may have normalised the images in place or taken the labels out of the dict; the next
    attempt would see other data. In-place changes of tensors are seen by their version counter (not those through
    `.data`, of arrays, of tensors made in inference mode, or inside objects that cannot be looked into).

    Example:
        >>> batch = {"image": torch.zeros(2), "label": torch.zeros(2)}
        >>> guard = BatchGuard(batch)
        >>> _ = batch["image"].add_(1), batch.pop("label")
        >>> guard.changed()
        ["batch['image']", "batch['label'] was removed"]
        >>> list(guard.restored())
        ['image', 'label']
    """

    def __init__(self, batch: Any) -> None:
        """Note it: a few microseconds, nothing is copied but lists of references.

        Args:
            batch: A nested batch.
        """
        self._note = _noted(batch)

    def changed(self) -> list[str]:
        """Key paths of all that changed: `changed_tensors`, then `changed_containers`."""
        return self.changed_tensors() + self.changed_containers()

    def changed_tensors(self) -> list[str]:
        """Key paths of what cannot be undone: tensors changed in place, edited objects that cannot be rebuilt."""
        return _changed_tensors(self._note, "batch")

    def changed_containers(self) -> list[str]:
        """Key paths of entries that were removed, replaced or added; `restored` undoes it."""
        return _changed_containers(self._note, "batch")

    def restored(self) -> Any:
        """The batch with the structure it had when it was noted.

        Returns:
            New containers around the same leaf objects. Later edits of what is returned do not reach the note, so
            that every attempt can have a batch of its own.
        """
        return _restored(self._note)


def changed_in_place(guard: BatchGuard) -> str:
    """Why a batch cannot be done again.

    Args:
        guard: Of the batch.

    Returns:
        A reason with its cure; empty if it can.
    """
    changed = guard.changed_tensors()
    if not changed:
        return ""
    return (
        f"the batch cannot be done again, because {', '.join(changed)} was changed in place; write x = x - mean in the "
        f"place of x.sub_(mean)"
    )


DEEP = 4
"""Levels to which objects are looked into."""
LONG = 64
"""Entries from which on a list without tensors is not looked into."""
MANY_ATTRIBUTES = 256


class _Note:
    """A part of a batch as it was."""

    __slots__ = ("attributes", "entries", "is_fixed", "keys", "node", "parts", "version")

    def __init__(self, node: Any) -> None:
        self.node = node
        self.version: int | None = None
        self.is_fixed = False  # it cannot be rebuilt, so an edit of it cannot be undone
        self.keys: list[Any] = []
        self.parts: list[tuple[str, _Note]] = []
        self.attributes: list[tuple[str, _Note]] = []
        self.entries: list[Any] | None = None  # of a long list of names or other metadata, which is not looked into


def _has_attributes(node: Any) -> bool:
    """An object of a class for batches, which cannot be rebuilt but whose attributes can be put back."""
    return not is_container(node) and not is_of_library(node) and not callable(node) and hasattr(node, "__dict__")


def _noted(node: Any, depth: int = DEEP) -> _Note:
    note = _Note(node)
    if isinstance(node, torch.Tensor):
        if not node.is_inference():
            note.version = node._version
    elif depth and _has_attributes(node):
        note.attributes = [(name, _noted(part, depth - 1)) for name, part in list(vars(node).items())[:MANY_ATTRIBUTES]]
    elif is_sequence(node) and len(node) > LONG and not has_tensors(node[0]):
        note.entries = list(node)
    elif is_container(node) and depth >= 0:
        # Objects may point to their parents, so inside them containers count as a level too.
        note.parts = [(where, _noted(part, depth if depth == DEEP else depth - 1)) for where, part in parts(node)]
        note.is_fixed = is_opaque(node)
        if isinstance(node, Mapping):
            note.keys = list(node.keys())
    return note


def _changed_tensors(note: _Note, path: str) -> list[str]:
    if note.version is not None and note.node._version != note.version:
        return [path]
    if note.is_fixed and _changed_containers(note, path, is_inside=True):
        return [path]
    if note.attributes:
        return [changed for name, part in note.attributes for changed in _changed_tensors(part, f"{path}.{name}")]
    return [changed for where, part in note.parts for changed in _changed_tensors(part, path + where)]


def _changed_containers(note: _Note, path: str, *, is_inside: bool = False) -> list[str]:
    if note.entries is not None:
        is_same = len(note.node) == len(note.entries) and all(map(operator.is_, note.node, note.entries))
        return [] if is_same else [f"{path} was changed"]
    if not is_container(note.node) or (note.is_fixed and not is_inside):
        return []
    now = dict(parts(note.node))
    changed = []
    for where, part in note.parts:
        if where not in now:
            changed.append(f"{path}{where} was removed")
        elif now.pop(where) is not part.node:
            changed.append(f"{path}{where} was replaced")
        changed += _changed_containers(part, path + where)
    return changed + [f"{path}{where} was added" for where in now]


def _restored(note: _Note) -> Any:
    node = note.node
    if note.entries is not None:
        is_same = len(node) == len(note.entries) and all(map(operator.is_, node, note.entries))
        return node if isinstance(node, tuple) and is_same else like(node, note.entries)
    if note.attributes:
        vars(node).update({name: _restored(part) for name, part in note.attributes})
        return node
    if not is_container(node) or note.is_fixed:
        return node
    old = [_restored(part) for _, part in note.parts]
    if isinstance(node, tuple) and all(part is now for part, now in zip(old, node, strict=True)):
        return node
    if isinstance(node, Mapping):
        return with_entries(node, dict(zip(note.keys, old, strict=True)))
    return like(node, old) if is_sequence(node) else rebuilt(node, old)
