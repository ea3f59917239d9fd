"""Claim: letting every weight gradient wait until the end of backward costs little.

    python benchmarks/split_backward.py [--rounds N] [--json FILE]

Forward and backward of one model, plain and with all layers that can wait waiting (`WeightGradSplitter`,
`reverse_first_k` over all of them), in turns on one thread; medians of the rounds. Bound: the plain step, whose kernels
are the same ones. The third column is what the layers that wait keep alive at most, beside the plain step's own peak.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpufeed.backprop.order import reverse_first_k
from lightning_gpufeed.backprop.split import WeightGradSplitter, splittable_layers


def wide() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(768, 768), nn.ReLU())]), torch.randn(512, 768)


def deep() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(*[part for _ in range(64) for part in (nn.Linear(64, 64), nn.ReLU())]), torch.randn(32, 64)


def convolutions() -> tuple[nn.Module, Tensor]:
    sizes = [3, 32, 64, 64, 128, 128]
    parts: list[nn.Module] = []
    for number, (inner, outer) in enumerate(itertools.pairwise(sizes)):
        parts += [nn.Conv2d(inner, outer, 3, padding=1, stride=1 + number % 2, bias=False), nn.BatchNorm2d(outer)]
        parts.append(nn.ReLU(inplace=True))
    return nn.Sequential(*parts), torch.randn(16, 3, 64, 64)


def transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), torch.randn(8, 64, 256)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "6 x Linear(768), 512 rows": wide,
    "64 x Linear(64), 32 rows": deep,
    "5 convolutions, BatchNorm": convolutions,
    "4 transformer layers": transformer,
}


def measure(make: Callable[[], tuple[nn.Module, Tensor]], rounds: int) -> dict[str, Any]:
    """Times of the two arms, and whether their gradients are equal bit by bit."""
    plain, x = make()
    split = copy.deepcopy(plain)
    names, _ = splittable_layers(split)
    splitter = WeightGradSplitter(split, reverse_first_k(names, len(names)))
    times: dict[str, list[float]] = {"plain": [], "split": []}

    def step(model: nn.Module, name: str) -> None:
        model.zero_grad()
        begin = time.perf_counter()
        model(x).square().mean().backward()
        if name == "split":
            splitter.finish()
        times[name].append(time.perf_counter() - begin)

    for number in range(rounds + 2):
        arms = [(plain, "plain"), (split, "split")]
        for model, name in arms if number % 2 else reversed(arms):
            step(model, name)
    pairs = zip(plain.parameters(), split.parameters(), strict=True)
    is_equal = all(one.grad is not None and torch.equal(one.grad, two.grad) for one, two in pairs)
    medians = {name: statistics.median(values[2:]) for name, values in times.items()}
    return {**medians, "is_equal": is_equal, "peak_bytes": splitter.peak_bytes, "num_layers": len(names)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = {name: measure(make, options.rounds) for name, make in MODELS.items()}
    print("| model | layers that wait | plain, ms | split, ms | cost | kept at most, MB | gradients |")
    print("|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        cost = f"{row['split'] / row['plain'] - 1:+.1%}"
        equal = "equal" if row["is_equal"] else "DIFFER"
        kept = f"{row['peak_bytes'] / 1e6:.1f}"
        times = f"{1e3 * row['plain']:.2f} | {1e3 * row['split']:.2f}"
        print(f"| {name} | {row['num_layers']} | {times} | {cost} | {kept} | {equal} |")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    return 0 if all(row["is_equal"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
