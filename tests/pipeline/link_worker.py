"""All ranks of tests of the link: they measure it as it is, and with a rank that sends slowly.

Run by `tests.doubles.run_ranks`; each rank is a fork. What is slow is emulated: a rank sleeps before it sends. All
else is real.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

NUM_RANKS = 3
SLOW_SECONDS = 0.15
MOST_BYTES = 1 << 18


@contextmanager
def noted_sends(seconds: float = 0.0) -> Iterator[list[int]]:
    """Notes the size of each message that this rank sends; each takes so much longer."""
    sizes: list[int] = []
    send = distributed.send

    def noted(tensor: torch.Tensor, **options: Any) -> None:
        if tensor.dtype == torch.uint8:  # and none of those that say what is to come
            sizes.append(tensor.numel())
            time.sleep(seconds)
        send(tensor, **options)

    distributed.send = noted
    try:
        yield sizes
    finally:
        distributed.send = send


def run_rank(rank: int, folder: Path, probe_link: Callable[..., Any]) -> None:
    """Measure, and write down what came out."""
    distributed.init_process_group("gloo", rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60))
    host = torch.device("cpu")
    found: dict[str, Any] = {}

    def note(name: str, group: Any, place: int, num_ranks: int, most_bytes: int, seconds: float = 0.0) -> None:
        with noted_sends(seconds) as sizes:
            link = probe_link(group, host, place, num_ranks, most_bytes=most_bytes)
        found[name] = {"link": vars(link), "sizes": sizes}

    note("all", None, rank, NUM_RANKS, MOST_BYTES)
    note("small", None, rank, NUM_RANKS, 1000)
    note("slow", None, rank, NUM_RANKS, MOST_BYTES, SLOW_SECONDS if rank == 1 else 0.0)
    pair = distributed.new_group([1, 2])
    if rank > 0:
        note("pair", pair, rank - 1, 2, MOST_BYTES)
    note("alone", None, 0, 1, MOST_BYTES)
    same = torch.tensor([rank])
    distributed.all_reduce(same)  # nothing is under way any more
    found["sum"] = int(same)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def main(folder: Path) -> None:
    """Import what all need once, and then be all ranks."""
    root = Path(__file__).parents[2] / "lightning_gpufeed"
    package = types.ModuleType("lightning_gpufeed")  # without its root module, which imports Lightning for seconds
    package.__path__ = [str(root)]
    sys.modules["lightning_gpufeed"] = package
    from lightning_gpufeed.pipeline.link import probe_link

    torch.set_num_threads(1)
    children = []
    for rank in range(NUM_RANKS):
        child = os.fork()
        if child == 0:
            run_rank(rank, folder, probe_link)
            return
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(json.loads(Path(sys.argv[1]).read_text())["out"]))
