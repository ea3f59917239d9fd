"""tensorstore: arrays in chunks, read by the numbers of a batch; two batches ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorstore as ts
import torch
from serve import Arm, Epoch, Workload, batches_of, serve


def folder(name: str) -> Any:
    return lambda workload: workload.own(f"tensorstore-{name}")


def spec(workload: Workload, name: str) -> dict[str, Any]:
    """Where an array is and, for `name`, how it is stored."""
    shape, rows = [workload.num_samples, *workload.sample_shape], workload.chunk_rows
    store: dict[str, Any] = {"kvstore": {"driver": "file", "path": f"{folder(name)(workload)}/"}}
    if name == "n5":
        # Its first axis is the one that changes fastest in memory.
        blocks = [rows, *workload.sample_shape]
        metadata = {"dimensions": shape, "blockSize": blocks, "dataType": "uint8", "compression": {"type": "raw"}}
        return {"driver": "n5", **store, "metadata": metadata}
    chunk = [rows, *workload.sample_shape]
    codecs: list[Any] = ["bytes"]
    if name == "zarr3-shards":
        inner = [1, *workload.sample_shape]
        chunk = [64 * rows, *workload.sample_shape]
        codecs = [{"name": "sharding_indexed", "configuration": {"chunk_shape": inner, "codecs": [{"name": "bytes"}]}}]
    metadata = {
        "shape": shape,
        "data_type": "uint8",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk}},
        "codecs": [{"name": one} if isinstance(one, str) else one for one in codecs],
    }
    return {"driver": "zarr3", **store, "metadata": metadata}


def convert(workload: Workload, name: str) -> None:
    store = ts.open(spec(workload, name), create=True, delete_existing=True, dtype=ts.uint8).result()
    rows = 64 * workload.chunk_rows
    for start in range(0, workload.num_samples, rows):
        stop = min(start + rows, workload.num_samples)
        store[start:stop].write(workload.images[start:stop]).result()


def reader(workload: Workload, name: str, cache_bytes: int) -> Epoch:
    context = ts.Context({"cache_pool": {"total_bytes_limit": cache_bytes}})
    store = ts.open(spec(workload, name), context=context, read=True, recheck_cached_data=False).result()

    def epoch(number: int) -> Iterator[Any]:
        begun: deque[Any] = deque()
        for batch in batches_of(np.random.default_rng(number).permutation(workload.num_samples)):
            begun.append((store.oindex[batch].read(), batch))
            if len(begun) > 2:
                yield finished(*begun.popleft())
        for one in begun:
            yield finished(*one)

    return epoch


def finished(read: Any, batch: np.ndarray) -> Any:
    # Copied only where the library's order of axes in memory is another one.
    return torch.from_numpy(np.ascontiguousarray(read.result())), torch.from_numpy(batch)


def arm(name: str, cache_bytes: int = 0) -> Arm:
    return Arm(
        lambda workload: reader(workload, name, cache_bytes), lambda workload: convert(workload, name), folder(name)
    )


if __name__ == "__main__":
    serve(
        {
            "zarr3": arm("zarr3"),
            "zarr3-kept": arm("zarr3", 4 << 30),
            "zarr3-shards": arm("zarr3-shards"),
            "n5": arm("n5"),
        }
    )
