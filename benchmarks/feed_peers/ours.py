"""`H5Loader`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from serve import BATCH_SIZE, Arm, Epoch, Workload, serve

from lightning_gpufeed import H5Loader


def loader(**arguments: Any) -> Any:
    def open_loader(workload: Workload) -> Epoch:
        loader = H5Loader(workload.h5, BATCH_SIZE, **arguments)

        def epoch(number: int) -> Iterator[Any]:
            loader.set_epoch(number)
            for batch in loader:
                yield batch["images"], batch["labels"]

        return epoch

    return open_loader


serve(
    {
        "full": Arm(loader(shuffle="full")),
        "window": Arm(loader(shuffle="window")),
        "isolate": Arm(loader(shuffle="full", isolate=True)),
    }
)
