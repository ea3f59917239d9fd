"""What `pack` turns into HDF5: image folders, NumPy and idx files, Python datasets, other HDF5 files."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import h5py

from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5.sources.source import FieldSpec, RowError, Source, SourceOptions, SourceRows

__all__ = ["FieldSpec", "RowError", "Source", "SourceOptions", "SourceRows", "open_source"]

_IMPORT_SPEC = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def open_source(spec: Any, **options: Any) -> Source:
    """Open what is to be packed.

    Whatever cannot be used raises `PackError` with what was expected; an option with a wrong value, or one
    that means nothing for this source, `ValueError`.

    Args:
        spec: A path (a folder of images or of idx pairs, a .npy, .npz, .h5 or idx file),
            `"package.module:name"` of a dataset or of what returns one, a dataset itself, or a `Source`,
            which comes back as it is.
        **options: Fields of `SourceOptions`.

    Returns:
        The source; `close` it.

    Raises:
        FileNotFoundError: No such file or folder, and no import path either.
        PackError: A pipe or device.

    Example:
        >>> import numpy as np
        >>> source = open_source("digits.npy")
        >>> source.read(np.arange(8)).values["images"].shape
        (8, 28, 28)
        >>> source.close()
    """
    checked = SourceOptions(**options)
    if isinstance(spec, Source):
        checked.refuse(("keys", "split", "resize", "crop", "mode"), "a source that is open already")
        return spec
    if not isinstance(spec, (str, os.PathLike)):
        from lightning_gpufeed.hdf5.sources.torch_dataset import open_torch_dataset

        return open_torch_dataset(spec, f"the given {type(spec).__qualname__}", checked)
    path = Path(spec).expanduser()
    if path.is_dir():
        return _open_folder(path, checked)
    if path.is_file():
        return _open_file(path, checked)
    if path.exists():
        raise PackError(f"{path} is a pipe or device; expected a file or a folder")
    if isinstance(spec, str) and _IMPORT_SPEC.fullmatch(spec):
        from lightning_gpufeed.hdf5.sources.torch_dataset import import_object, open_torch_dataset

        return open_torch_dataset(import_object(spec), spec, checked)
    raise FileNotFoundError(
        f"no such file or folder: {str(path)!r}; a dataset in a module is written 'package.module:name'"
    )


def _open_folder(path: Path, options: SourceOptions) -> Source:
    """A folder: idx pairs by their names, else images."""
    from lightning_gpufeed.hdf5.sources.arrays import idx_files, open_idx_folder

    if any("images" in pair for pair in idx_files(path).values()):
        return open_idx_folder(path, options)
    from lightning_gpufeed.hdf5.sources.image_folder import open_image_folder

    return open_image_folder(path, options)


def _open_file(path: Path, options: SourceOptions) -> Source:
    """A file: NumPy by its suffix, HDF5 and idx by their first bytes."""
    from lightning_gpufeed.hdf5.sources import arrays

    if path.suffix == ".npy":
        return arrays.open_npy(path, options)
    if path.suffix == ".npz":
        return arrays.open_npz(path, options)
    if path.suffix in (".h5", ".hdf5", ".hdf") or h5py.is_hdf5(path):
        from lightning_gpufeed.hdf5.sources.h5 import open_h5

        return open_h5(path, options)
    if "-ubyte" in path.name or arrays.is_idx(path):
        return arrays.open_idx(path, options)
    raise PackError(
        f"{path} is of no kind that can be packed; expected a folder of images, .npy, .npz, idx (MNIST), "
        "HDF5, or a dataset as 'package.module:name'"
    )
