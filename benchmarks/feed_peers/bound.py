"""The bound: the same bytes read into one reused buffer of 1 MiB, from the first to the last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


serve({"1": Arm(plain_read(1)), "2": Arm(plain_read(2))})
