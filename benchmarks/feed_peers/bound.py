"""The bounds: the same bytes read into one reused buffer of 1 MiB, from the first to the last; chunks only decoded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import h5py
import numpy as np
from serve import Arm, Epoch, Workload, serve


def plain_read(num_threads: int) -> Any:
    def open_file(workload: Workload) -> Epoch:
        descriptor = os.open(workload.h5, os.O_RDONLY)
        size = os.fstat(descriptor).st_size
        buffers = [bytearray(1 << 20) for _ in range(num_threads)]
        threads = ThreadPoolExecutor(num_threads)

        def read(thread: int) -> int:
            offset, stop = size * thread // num_threads, size * (thread + 1) // num_threads
            first = offset
            while offset < stop:
                offset += os.preadv(descriptor, [memoryview(buffers[thread])[: stop - offset]], offset)
            return offset - first

        def epoch(number: int) -> Iterator[Any]:
            yield sum(threads.map(read, range(num_threads)) if num_threads > 1 else [read(0)]), None

        return epoch

    return open_file


def decoder(name: str) -> Callable[..., Any]:
    """The fastest that is known for one filter."""
    import imagecodecs

    by_name = {"gzip": imagecodecs.deflate_decode, "lz4": imagecodecs.lz4h5_decode, "zstd": imagecodecs.zstd_decode}
    return by_name[name]


def decode(num_threads: int) -> Any:
    """Stored chunks that are in memory, each decoded by one of some threads into memory of that thread."""

    def open_chunks(workload: Workload) -> Epoch:
        with h5py.File(workload.h5) as file:
            images = file["images"].id
            stored = [images.read_direct_chunk(images.get_chunk_info(n).chunk_offset)[1]
                      for n in range(images.get_num_chunks())]  # fmt: skip
            num_bytes = int(np.prod(file["images"].chunks))
        undo = decoder(workload.h5.stem.split("-")[1])
        threads = ThreadPoolExecutor(num_threads)
        memory = np.empty((num_threads, num_bytes), np.uint8)

        def work(thread: int) -> int:
            return sum(len(undo(chunk, out=memory[thread])) for chunk in stored[thread::num_threads])

        def epoch(number: int) -> Iterator[Any]:
            yield sum(threads.map(work, range(num_threads))), None

        return epoch

    return open_chunks


serve({"1": Arm(plain_read(1)), "2": Arm(plain_read(2)), "decode-2": Arm(decode(2))})
