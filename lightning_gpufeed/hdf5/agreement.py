"""What datasets have to agree in to be used as one: in a file their length, over files their shape and type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.access import has_keys
from lightning_gpufeed.hdf5.layout import H5DatasetLayout, read_layout

__all__ = ["read_layouts", "refuse_different_shapes", "refuse_unequal_lengths"]


def read_layouts(paths: Sequence[str], key: str) -> Iterator[H5DatasetLayout]:
    """Read the layout of a dataset in each of several files.

    Args:
        paths: The files.
        key: Name of the dataset.

    Yields:
        The layouts.

    Raises:
        LayoutError: A file has no such dataset, or it cannot be used.
    """
    for number, path in enumerate(paths):
        try:
            yield read_layout(path, key)
        except LayoutError as error:
            if number == 0 or has_keys(path, [key]):
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
