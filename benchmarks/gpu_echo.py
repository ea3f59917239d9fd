"""What does an echo cost on a GPU, against fetching and copying a batch?

    python benchmarks/gpu_echo.py [--rounds 5] [--json FILE]

Batches of 512 uint8 images of 3x224x224 (77 MB). A piece is gathered out of the batch on the device, two pieces a pass;
the peer is the copy of the same bytes from pinned memory. The arms take turns; medians, on the device's own clock. Then
a training whose loader needs four times its step: how long a step waits, with and without `BatchEcho("auto")`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_gpufeed import BatchEcho
from lightning_gpufeed.echo.cache import CachedBatch
from lightning_gpufeed.echo.plan import Piece

NUM_SAMPLES, SHAPE = 512, (3, 224, 224)


def device_seconds(work: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


class Steps(LightningModule):
    """Steps of a few milliseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(16)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class SlowLoader:
    def __init__(self, num_batches: int, seconds: float) -> None:
        self.num_batches, self.seconds = num_batches, seconds
        self.batch = torch.randn(2048, 4096)

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self):
        for _ in range(self.num_batches):
            time.sleep(self.seconds)
            yield self.batch.clone()


def train(seconds: float, num_batches: int, callbacks: list) -> tuple[float, int]:
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Steps()
    begin = time.perf_counter()
    trainer.fit(model, SlowLoader(num_batches, seconds))
    torch.cuda.synchronize()
    return time.perf_counter() - begin, trainer.global_step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA")
        return
    host = torch.randint(256, (NUM_SAMPLES, *SHAPE), dtype=torch.uint8).pin_memory()
    cached = CachedBatch(host.to("cuda"), "rows", seed=0, is_first_in_order=False)
    arms = {
        "copy of a batch from pinned memory": lambda: host.to("cuda", non_blocking=True),
        "one pass gathered, 2 pieces": lambda: [cached.piece(Piece(0, 1, number), 2) for number in range(2)],
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for round_number in range(arguments.rounds + 1):
        for name, work in arms.items():
            measured = device_seconds(work)
            if round_number:  # the first one warms up
                seconds[name].append(measured)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print("| 512 x 3x224x224 uint8 | ms | GB/s |\n|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median * 1e3:.3f} | {host.nbytes / median / 1e9:.0f} |")
    plain, steps = train(0.0, 50, [])
    step_seconds = plain / steps
    rows = {}
    for name, callbacks in (("without", []), ("BatchEcho('auto')", [BatchEcho("auto", scale_lr="keep")])):
        total, steps = train(4 * step_seconds, 60, callbacks)
        wait = callbacks[0].reports[0].wait_share if callbacks else 1 - steps * step_seconds / total
        rows[name] = {"seconds": total, "steps": steps, "wait_share": wait}
    print(f"\n| loader at R = 4 (step {step_seconds * 1e3:.1f} ms) | s | steps | waiting |\n|---|---|---|---|")
    for name, row in rows.items():
        print(f"| {name} | {row['seconds']:.2f} | {row['steps']} | {row['wait_share']:.0%} |")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"medians": medians, "training": rows, "card": torch.cuda.get_device_name(0)}, file)


if __name__ == "__main__":
    main()
