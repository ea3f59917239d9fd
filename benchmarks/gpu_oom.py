"""What does `OOMRecovery` cost on a GPU while memory suffices, and what does a recovered error cost?

    python benchmarks/gpu_oom.py [--pairs 4] [--json FILE]

The measurement of oom_recovery.py, with models of a size for a GPU. In windows of several batches the gradients of the
earlier ones are copied to the host, beside the forward pass: the transformer has 400 MB of them. About 40 seconds.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import torch
from oom_recovery import (
    TINY,
    Case,
    ResidualNet,
    Transformer,
    bar,
    cost_table,
    costs_of,
    machine,
    price_of,
    price_table,
    quiet,
    random_images,
    random_tokens,
)

LENGTH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=4, help="blocks of each arm, 2 or more")
    parser.add_argument("--json", type=Path, help="write all figures")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA")
        return
    quiet()
    residual = Case("residual network", lambda: ResidualNet(64), lambda: random_images(512), 12)

    def large() -> Transformer:
        return Transformer(1024, 8, LENGTH)

    transformer = Case("transformer", large, lambda: random_tokens(32, LENGTH), 12)
    windows = Case("transformer", large, lambda: random_tokens(32, LENGTH), 12, accumulate=4)
    settings = {"accelerator": "gpu", "precision": "bf16-mixed"}
    prices = [price_of(case, options.pairs, **settings) for case in (residual, transformer, windows, TINY)]
    costs = costs_of(transformer, 2, **settings)
    print(f"{machine()}; bf16-mixed; {options.pairs} pairs of blocks, medians.\n")
    print(price_table(prices) + "\n")
    print(cost_table(costs) + "\n")
    print(bar(prices))
    if options.json:
        results = {"prices": [asdict(one) for one in prices], "costs": [asdict(one) for one in costs]}
        options.json.write_text(json.dumps({"machine": machine(), "pairs": options.pairs, **results}, indent=1))


if __name__ == "__main__":
    main()
