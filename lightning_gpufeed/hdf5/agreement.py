"""What datasets have to agree in to be used as one: in a file their length, over files their shape and type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.access import has_keys
from lightning_gpufeed.hdf5.layout import Engine, H5DatasetLayout, read_layout
from lightning_gpufeed.hdf5.remote.addresses import hold_open
from lightning_gpufeed.hdf5.remote.remote_file import is_remote

__all__ = ["read_layouts", "refuse_different_shapes", "refuse_slow_addresses", "refuse_unequal_lengths"]


def read_layouts(paths: Sequence[str], names: Mapping[str, str]) -> dict[str, tuple[H5DatasetLayout, ...]]:
    """Read the layouts of datasets in each of several files.

    Args:
        paths: The files.
        names: Field name -> key.

    Returns:
        Field name -> layouts, one per file.

    Raises:
        LayoutError: A file lacks one, or it cannot be used.
    """
    found: dict[str, list[H5DatasetLayout]] = {name: [] for name in names}
    for number, path in enumerate(paths):
        with hold_open(path):
            for name, key in names.items():
                found[name].append(_read_layout(path, key, is_first=number == 0))
    return {name: tuple(layouts) for name, layouts in found.items()}


def _read_layout(path: str, key: str, *, is_first: bool) -> H5DatasetLayout:
    """The layout of a dataset; says what can be done where a later file lacks it."""
    try:
        return read_layout(path, key)
    except LayoutError as error:
        if is_first or has_keys(path, [key]):
            raise
        raise LayoutError(
            f"{error} Files given together follow each other, sample by sample. To lay arrays of several files "
            f"side by side, make a file of links: with h5py.File('joined.h5', 'w') as f: f['x'] = "
            f"h5py.ExternalLink('part.h5', 'x'), and so on."
        ) from error


def refuse_unequal_lengths(path: str, layouts: Sequence[H5DatasetLayout]) -> None:
    """Make sure that the datasets of a file have as many samples.

    Args:
        path: The file.
        layouts: Of its datasets.

    Raises:
        LayoutError: They have not.
    """
    if len({layout.num_samples for layout in layouts}) > 1:
        lengths = ", ".join(f"{layout.key!r} {layout.num_samples}" for layout in layouts)
        raise LayoutError(
            f"{path}: the datasets have different numbers of samples: {lengths}. Name those that belong together."
        )


def _type_name(layout: H5DatasetLayout) -> str:
    return "text" if layout.is_text else str(layout.dtype) if layout.is_tensor else "numbers of variable length"


def refuse_different_shapes(layouts: Sequence[H5DatasetLayout]) -> None:
    """Make sure that samples of several files are alike.

    Args:
        layouts: One per file.

    Raises:
        LayoutError: They are not.
    """
    first = layouts[0]
    for layout in layouts[1:]:
        here, there = ((one.sample_shape, one.dtype, one.is_text) for one in (layout, first))
        if here != there:
            raise LayoutError(
                f"{layout.path}: dataset {layout.key!r} has samples of shape {layout.sample_shape} and type "
                f"{_type_name(layout)}, but {first.path} has {first.sample_shape} and {_type_name(first)}. "
                f"Files used as one dataset must agree."
            )


def refuse_slow_addresses(layouts: Sequence[H5DatasetLayout]) -> None:
    """Refuse what could only be read from a store by HDF5, one piece after the other.

    Args:
        layouts: One per file.

    Raises:
        LayoutError: One is such.
    """
    for layout in layouts:
        if is_remote(layout.path) and layout.engine is Engine.H5PY:
            raise LayoutError(
                f"{layout.path}: dataset {layout.key!r} can only be read by HDF5 ({layout.engine_reason}), which asks "
                f"a store for one piece after the other. Copy the file to a disk, and use it there or put it right: "
                f"gpufeed repack COPY.h5 OUT.h5"
            )
