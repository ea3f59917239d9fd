"""Mean and standard deviation that images are normalised with: given, of the file, or computed once for all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.image_field import affine_of, common_layout, image_layout, per_channel
from lightning_gpufeed.hdf5.layout import H5DatasetLayout
from lightning_gpufeed.hdf5.quantize import Affine
from lightning_gpufeed.hdf5.splits import Found
from lightning_gpufeed.hdf5.statistics import channel_statistics

__all__ = ["compute_on_all_ranks", "find_normalisation", "training_statistics"]


def find_normalisation(
    given: Mapping[str, Any], layout: H5DatasetLayout, channels: int, compute: Callable[[], Mapping[str, Any]]
) -> dict[str, tuple[float, ...] | None]:
    """Settle what images are normalised with.

    Args:
        given: `mean` and `std`: numbers, "auto", or None.
        layout: Of the images; its attributes of these names are used where numbers are not given.
        channels: Of the images.
        compute: Gives what is "auto" and no attribute; called once at most.

    Returns:
        `mean` and `std`, each one number per channel, or None for none.

    Raises:
        ValueError: A value cannot be used.
    """
    computed: Mapping[str, Any] | None = None
    values: dict[str, tuple[float, ...] | None] = {}
    for name in ("mean", "std"):
        value = given[name]
        if isinstance(value, str) and value != "auto":
            raise ValueError(f"{name} is {value!r}; expected numbers, 'auto' or None.")
        is_auto = isinstance(value, str)
        if value is None or is_auto:
            stored = layout.attributes.get(name)
            if stored is None and is_auto:
                computed = compute() if computed is None else computed
                stored = computed[name]
            # A channel that never changes has no spread to divide by, and stays as it is.
            value = stored if stored is None or name == "mean" else np.where(np.asarray(stored) == 0, 1.0, stored)
        where = name if given[name] is value else f"attribute {name} of {layout.path} {layout.key!r}"
        values[name] = None if value is None else per_channel(where, value, channels)
    is_scaled = layout.dtype.kind == "u" and affine_of(layout) is None
    if values["mean"] is not None and is_scaled and max(values["mean"]) > 1:
        raise ValueError(
            f"mean is {values['mean']}, but images are scaled to 0..1 before it is subtracted. Divide mean and "
            f"std by {np.iinfo(layout.dtype).max}."
        )
    if values["std"] is not None and min(values["std"]) <= 0:
        raise ValueError(f"std is {values['std']}; expected numbers above 0.")
    return values


def compute_on_all_ranks(trainer: Any, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Compute on rank 0, give to all; an error there is an error everywhere, not a hang.

    Args:
        trainer: The Trainer, or None.
        compute: Gives the values.

    Returns:
        The values, the same on every rank.

    Raises:
        LayoutError: Computing failed on rank 0, and this is another; there the error itself is raised.
    """
    if trainer is None or trainer.world_size == 1:
        return compute()
    result: dict[str, Any] = {}
    error: Exception | None = None
    if trainer.is_global_zero:
        try:
            result = compute()
        except Exception as raised:
            error = raised
            result = {"error": str(raised)}
    result = trainer.strategy.broadcast(result)
    if error is not None:
        raise error
    if "error" in result:
        raise LayoutError(result["error"])
    return result


def training_statistics(found: Found | None, axes: str) -> dict[str, Any]:
    """Mean and standard deviation of the scaled training images.

    Args:
        found: Source and samples of the training split; None if there is none.
        axes: Of the stored images, or "auto".

    Returns:
        `mean` and `std`, each one number per channel.

    Raises:
        ValueError: There is no training data.
    """
    if found is None:
        raise ValueError("mean or std is 'auto', which is computed over the training data, but train= is missing.")
    source, indices = found
    layout = common_layout(source)
    affine = affine_of(layout)
    if affine is None and layout.dtype == np.uint16:
        affine = Affine(1 / 65535, 0.0)
    mean, std = channel_statistics(source, "image", image_layout(layout, axes), indices, affine)
    return {"mean": mean.tolist(), "std": std.tolist()}
