"""No reading at all: batches that lie in memory, while a process beside keeps another core or the memory busy.

What this costs a trainer is owed to the machine, and is the least that any reading on another core can cost.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from serve import Arm, Epoch, Workload, in_memory, serve

PAUSE_SECONDS = 0.004

COMPUTE = """
while True:
    pass
"""
# From a place in a large piece of memory to another such place, as batches are: of the data's size, at a rate.
COPY = """
import sys, time
import numpy as np
data, batches = np.ones(246 << 20, np.uint8), np.ones(16 << 20, np.uint8)
size, begin, done, rate = 3 << 20, time.perf_counter(), 0, float(sys.argv[1])
while True:
    start, place = done % (len(data) - size), done % (len(batches) - size)
    batches[place : place + size] = data[start : start + size]
    done += size
    time.sleep(max(0, begin + done / rate - time.perf_counter()))
"""


def beside(*program: str) -> Arm:
    def open_neighbour(workload: Workload) -> Epoch:
        batches = in_memory(workload)

        def epoch(number: int) -> Iterator[Any]:
            neighbour = subprocess.Popen([sys.executable, "-c", *program])
            try:
                yield from batches
            finally:
                neighbour.kill()
                neighbour.wait()

        return epoch

    return Arm(open_neighbour, pause_seconds=PAUSE_SECONDS)


torch.set_num_threads(1)
serve({"compute": beside(COMPUTE), "copy-0.8": beside(COPY, "0.8e9"), "copy-3": beside(COPY, "3e9")})
