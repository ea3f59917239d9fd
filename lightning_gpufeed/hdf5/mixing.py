"""How well a window shuffle mixes the classes of a loader's data, against a full shuffle."""

from __future__ import annotations

import numpy as np

from lightning_gpufeed.hdf5.labels import describe_labels, order_variety
from lightning_gpufeed.hdf5.loader import H5Loader
from lightning_gpufeed.hdf5.order import WindowShuffle

__all__ = ["describe_mixing"]


def describe_mixing(loader: H5Loader) -> str | None:
    """Estimate the share of classes that a batch of a window shuffle holds.

    Args:
        loader: Any; only a window over data with class numbers has something to tell.

    Returns:
        Such as `window:4096: a batch holds 84 % of the classes of a full shuffle's (labels)`; None where
        the shuffle is none of a window, or there are no classes.
    """
    if not isinstance(loader.shuffle, WindowShuffle):
        return None
    source = loader.source
    for name, spec in source.specs.items():
        if not source.is_kept(name) or spec.row_shape not in ((), (1,)) or spec.dtype.is_floating_point:
            continue
        if spec.dtype.is_complex:
            continue
        labels = source.read_field(name, np.arange(source.num_samples)).numpy().reshape(-1)
        report = describe_labels(name, labels)
        if report is None or report.num_classes < 2:
            continue
        share = order_variety(labels[loader.order(0)], loader.step_samples)
        return f"{loader.shuffle}: a batch holds {100 * share:.0f} % of the classes of a full shuffle's ({name})"
    return None
