"""One or more HDF5 files as a single collection of samples with named fields."""

from __future__ import annotations

import copy
import os
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.device.memory import TensorSpec
from lightning_gpufeed.errors import FeedError, LayoutError
from lightning_gpufeed.hdf5.access import StrPath, list_datasets, open_file
from lightning_gpufeed.hdf5.agreement import (
    read_layouts,
    refuse_different_shapes,
    refuse_slow_addresses,
    refuse_unequal_lengths,
)
from lightning_gpufeed.hdf5.keys import refuse_one_per_sample
from lightning_gpufeed.hdf5.layout import Engine, H5DatasetLayout
from lightning_gpufeed.hdf5.readers.reader import FieldReader, is_resident, open_reader, read_objects, spec_of
from lightning_gpufeed.hdf5.readers.row_blocks import BlockNumbers
from lightning_gpufeed.hdf5.remote.addresses import absolute, know, remember, warn_of_unmarked

__all__ = ["Batch", "H5Source"]

Batch = dict[str, Any]
"""Field name -> tensor (n, *sample_shape), or a list of n strings or tensors of varying length."""

Indices = npt.NDArray[np.int64]

_DIGEST_SAMPLES = 16
_CACHE_BYTES = 256 << 20
_SLOWEST_FIRST = (Engine.H5PY, Engine.CHUNKS, Engine.RAW)


class H5Source:
    """Samples of one or more files with the same keys, counted through all of them in the order given.

    Opening reads the layouts only; files are mapped at the first batch. Pickling keeps names and layouts but
    nothing open, so a source can be sent to another process under any start method.

    Attributes:
        paths: The files, absolute.
        fields: Field name -> layouts, one per file.
        num_samples: Samples in all files together.

    Example:
        >>> source = H5Source("train.h5", keys=["images", "labels"])
        >>> source.num_samples
        300
        >>> source.close()
    """

    def __init__(
        self,
        path: StrPath | Sequence[StrPath],
        keys: Mapping[str, str] | Sequence[str] | str | None = None,
        *,
        resident_bytes: int = 256 << 20,
        cache_bytes: int | None = None,
        buffer_bytes: int = 1 << 30,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Read the layouts.

        Args:
            path: One file or several: paths, or addresses such as `s3://bucket/train.h5`.
            keys: Datasets to use: names, or field name -> key. None takes every dataset of the first file.
            resident_bytes: Arrays of rows up to 64 bytes and of this total are read once and kept in memory.
            cache_bytes: A field of up to this size that has to be decoded is decoded once for all epochs; None takes
                256 MB.
            buffer_bytes: Limit of the rolling buffer of decoded chunks of a larger field. A window shuffle needs about
                the bytes of its window; with less, some chunks are decoded again.
            storage_options: What fsspec needs to reach the addresses among the files.

        Raises:
            FileNotFoundError: A file is missing.
            LayoutError: A file or key cannot be used, lengths differ within a file, or shapes differ between files.
            ValueError: No file was given, or `keys` names nothing.
        """
        paths = [path] if isinstance(path, str | os.PathLike) else list(path)
        if not paths:
            raise ValueError("no file was given; expected a path or a list of paths.")
        self.paths = tuple(absolute(one) for one in paths)
        self._remotes = know(self.paths, storage_options)
        self._resident_bytes = resident_bytes
        self._cache_bytes = _CACHE_BYTES if cache_bytes is None else cache_bytes
        self._buffer_bytes = buffer_bytes
        # Told in a line when a field begins to be read in another way.
        self.on_way: Callable[[str], None] | None = None
        names = _named_keys(self.paths[0], keys)
        self.fields: dict[str, tuple[H5DatasetLayout, ...]] = read_layouts(self.paths, names)
        for position, one in enumerate(self.paths):
            refuse_unequal_lengths(one, [layouts[position] for layouts in self.fields.values()])
        for layouts in self.fields.values():
            refuse_different_shapes(layouts)
            if not is_resident(layouts, self._resident_bytes):
                refuse_slow_addresses(layouts)
        warn_of_unmarked(self._remotes)
        first = next(iter(self.fields.values()))
        self.num_samples = sum(layout.num_samples for layout in first)
        if self.num_samples == 0:
            raise LayoutError(
                f"{', '.join(self.paths)}: dataset {first[0].key!r} holds no samples (shape {first[0].shape}); "
                f"expected at least one. Was the file packed to the end?"
            )
        self._readers: dict[str, FieldReader] = {}
        self._objects: dict[str, list[Any]] = {}
        self._digest: str | None = None
        self._opening = threading.Lock()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        """Everything but what is open."""
        return {**self.__dict__, "_readers": {}, "_objects": {}, "_opening": None, "on_way": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore; files are opened at the first read."""
        remember(state["_remotes"])
        self.__dict__.update(state, _opening=threading.Lock(), _process=os.getpid())

    def twin(self) -> H5Source:
        """The same samples, read by readers of its own, so that two loaders do not disturb each other.

        Returns:
            Another source.
        """
        other = copy.copy(self)
        other.forget_open()
        return other

    def forget_open(self) -> None:
        """Leave what is open as it is, and open it anew at the next read: for a process forked from another."""
        self.__setstate__(self.__getstate__())

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Field name -> row shape and dtype, for the fields that are tensors."""
        return {name: spec_of(layouts[0]) for name, layouts in self.fields.items() if layouts[0].is_tensor}

    @property
    def engine_lines(self) -> list[str]:
        """One line per field: how it is read and why."""
        lines = []
        for name, layouts in self.fields.items():
            slow = min(layouts, key=lambda layout: _SLOWEST_FIRST.index(layout.engine))
            label = name if name == slow.key else f"{name} ({slow.key!r})"
            if is_resident(layouts, self._resident_bytes):
                lines.append(f"{label}: read once and kept in memory")
            else:
                lines.append(f"{label}: {slow.engine} ({slow.engine_reason})")
        return lines

    @property
    def needs_decoding(self) -> bool:
        """Whether the largest field is read by whole chunks, so that its access order decides the speed."""
        largest = self._largest_streamed()
        return largest is not None and any(layout.engine is not Engine.RAW for layout in largest)

    @property
    def fits_cache(self) -> bool:
        """Whether the largest field, decoded, is small enough to be kept whole, so that any order is as good."""
        largest = self._largest_streamed()
        return largest is None or sum(layout.total_bytes for layout in largest) <= self._cache_bytes

    def _largest_streamed(self) -> tuple[H5DatasetLayout, ...] | None:
        """The largest field that is not kept in memory."""
        streamed = [one for one in self.fields.values() if not is_resident(one, self._resident_bytes)]
        return max(streamed, key=lambda layouts: sum(layout.total_bytes for layout in layouts), default=None)

    def blocks(self, indices: Indices) -> Indices:
        """Which samples are read together: those of the largest field that lie in the same block.

        Args:
            indices: int64 (n,) sample numbers.

        Returns:
            int64 (n,): number of the block of each.
        """
        layouts = self._largest_streamed() or next(iter(self.fields.values()))
        return BlockNumbers.of(layouts).locate(indices)[0]

    def is_kept(self, name: str) -> bool:
        """Whether a field is read once and kept in memory.

        Args:
            name: Field name.

        Returns:
            True for small rows, and for what is no tensor.
        """
        layouts = self.fields[name]
        return not layouts[0].is_tensor or is_resident(layouts, self._resident_bytes)

    def check_unchanged(self) -> None:
        """Make sure that no file changed since its layout was read.

        Raises:
            FeedError: A file was replaced, written to, or is gone. The byte offsets noted would be wrong.
        """
        for stamp in {stamp for layouts in self.fields.values() for layout in layouts for stamp in layout.stamps}:
            if difference := stamp.difference():
                raise FeedError(
                    f"{stamp.path} {difference} since it was opened, so its samples may lie elsewhere now. "
                    f"Build the loader or DataModule again to use the new file."
                )

    def read(self, indices: Indices, out: Mapping[str, torch.Tensor]) -> Batch:
        """Read samples by number.

        Args:
            indices: int64 (n,), any order, repeats allowed.
            out: Field name -> contiguous host tensor (n, *sample_shape) to write to, for every field in `specs`.

        Returns:
            The tensors of `out` and a list for each field that is not a tensor, in the order of `fields`.

        Raises:
            FeedError: Reading failed.
        """
        batch: Batch = {}
        for name, layouts in self.fields.items():
            if not layouts[0].is_tensor:
                values = self._object_field(name)
                batch[name] = [_own(values[index]) for index in indices.tolist()]
                continue
            self._reader(name).read_into(indices, out[name])
            batch[name] = out[name]
        return batch

    def expect(self, indices: Indices, batch_samples: int = 1) -> None:
        """Say which samples `read` will be asked for next, in order, so that they can be read ahead.

        Args:
            indices: int64 (n,): the rest of an epoch.
            batch_samples: Samples that one call of `read` will take, at most.

        Raises:
            FeedError: A file changed since its layout was read.
        """
        for name, layouts in self.fields.items():
            if layouts[0].is_tensor:
                self._reader(name).expect(indices, batch_samples)

    def rest(self) -> None:
        """Nothing is read for a while: end threads. Reading again starts them again."""
        if self._process == os.getpid():
            for reader in list(self._readers.values()):
                reader.rest()

    def locate(self, sample: int) -> str:
        """Where a sample is, for messages.

        Args:
            sample: Its number.

        Returns:
            Such as `sample 3 of data.h5`, counted inside that file.
        """
        for layout in next(iter(self.fields.values())):
            if sample < layout.num_samples:
                return f"sample {sample} of {layout.path}"
            sample -= layout.num_samples
        return f"sample {sample}"

    def read_new(self, indices: Indices) -> Batch:
        """Read samples by number into new tensors.

        Args:
            indices: int64 (n,).

        Returns:
            The batch.
        """
        out = {
            name: torch.empty((len(indices), *spec.row_shape), dtype=spec.dtype, device="cpu")
            for name, spec in self.specs.items()
        }
        return self.read(indices, out)

    def read_field(self, name: str, indices: Indices) -> torch.Tensor:
        """Read one tensor field into a new tensor.

        Args:
            name: Field name.
            indices: int64 (n,).

        Returns:
            (n, *sample_shape).
        """
        spec = self.specs[name]
        out = torch.empty((len(indices), *spec.row_shape), dtype=spec.dtype, device="cpu")
        self._reader(name).read_into(indices, out)
        return out

    def _reader(self, name: str) -> FieldReader:
        if self._process != os.getpid():
            self.forget_open()  # forked: the threads and locks of what is open stayed behind
        with self._opening:
            if name not in self._readers:
                self.check_unchanged()
                self._readers[name] = open_reader(
                    self.fields[name],
                    resident_bytes=self._resident_bytes,
                    cache_bytes=self._cache_bytes,
                    buffer_bytes=self._buffer_bytes,
                    on_way=self._note_way,
                )
            return self._readers[name]

    def _note_way(self, line: str) -> None:
        if self.on_way is not None:
            self.on_way(line)

    def _object_field(self, name: str) -> list[Any]:
        if self._process != os.getpid():
            self.forget_open()
        with self._opening:
            if name not in self._objects:
                self.check_unchanged()
                self._objects[name] = read_objects(self.fields[name])
            return self._objects[name]

    def digest(self) -> str:
        """A short text that stays the same when the files are copied or re-chunked, and changes with their content.

        Made of shapes, dtypes and a checksum over 16 samples spread evenly; it tells whether a saved position
        belongs to this data.

        Returns:
            Hexadecimal digits.
        """
        if self._digest is None:
            was_open = bool(self._readers or self._objects)
            picked = np.unique(np.linspace(0, self.num_samples - 1, _DIGEST_SAMPLES).round().astype(np.int64))
            crc = zlib.crc32(repr(self.num_samples).encode())
            for name in sorted(self.fields):
                spec = self.specs.get(name)
                crc = zlib.crc32(f"{name} {spec}".encode(), crc)
                if spec is None:
                    values = self._object_field(name)
                    crc = zlib.crc32(b"".join(_as_bytes(values[index]) for index in picked.tolist()), crc)
                else:
                    crc = zlib.crc32(self.read_field(name, picked).numpy().tobytes(), crc)
            self._digest = f"{crc:08x}"
            if not was_open:
                self.close()
        return self._digest

    def close(self) -> None:
        """Let go of files and memory; the next read opens them again."""
        if self._process != os.getpid():
            self.forget_open()
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
        self._objects.clear()


def _as_bytes(value: Any) -> bytes:
    """A string, a tensor of any length, or a list of these, without ambiguity."""
    if isinstance(value, list):
        return b"[" + b",".join(_as_bytes(part) for part in value) + b"]"
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}".encode() + value.numpy().tobytes()
    return repr(value).encode()


def _own(value: Any) -> Any:
    """A value the caller may change: strings as they are, tensors and lists copied."""
    if isinstance(value, list):
        return [_own(part) for part in value]
    return value.clone() if isinstance(value, torch.Tensor) else value


def _named_keys(path: str, keys: Mapping[str, str] | Sequence[str] | str | None) -> dict[str, str]:
    """Field name -> key."""
    if keys is not None:
        named = (
            dict(keys)
            if isinstance(keys, Mapping)
            else {key: key for key in ([keys] if isinstance(keys, str) else keys)}
        )
        if not named or not all(isinstance(key, str) and key for key in named.values()):
            raise ValueError(f"keys={keys!r}; expected at least one name of a dataset, or field name -> key.")
        return named
    with open_file(path) as h5_file:
        found = {key: key for key in list_datasets(h5_file)}
    refuse_one_per_sample(path, found)
    if not found:
        raise LayoutError(f"{path}: there are no datasets in it; expected at least one array of samples.")
    return found
