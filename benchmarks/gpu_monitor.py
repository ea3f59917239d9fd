"""What does `FeedMonitor` cost on a GPU, and does it say the right thing there?

    python benchmarks/gpu_monitor.py [--rounds 5] [--json FILE]

Cost: the time of a training of steps of a few milliseconds, batches already on the device, with and without the
callback, in turns; medians. Verdicts: the same steps with batches on the device, with a loader that takes twice as long
as a step, with large batches from pageable memory and next to no computation, and with a hook that keeps the host busy
while the device runs dry.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_gpufeed import FeedMonitor


class Steps(LightningModule):
    """Steps of a few milliseconds."""

    def __init__(self, num_layers: int = 16) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(num_layers)))

    def training_step(self, batch, batch_idx):
        return self.layers(batch.flatten(1)[:, :4096]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Loader:
    def __init__(self, batch: torch.Tensor, num_batches: int, seconds: float = 0.0) -> None:
        self.batch, self.num_batches, self.seconds = batch, num_batches, seconds

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self):
        for _ in range(self.num_batches):
            time.sleep(self.seconds)
            yield self.batch


class BusyHook(Callback):
    """The host works for twice a step while the device waits for it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_end(self, *_):
        torch.cuda.current_stream().synchronize()
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            pass


def train(model: LightningModule, loader: Loader, callbacks: list[Callback]) -> float:
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=2,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.cuda.synchronize()
    begin = time.perf_counter()
    trainer.fit(model, loader)
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: no CUDA")
        return
    small, num_batches = torch.randn(2048, 4096), 100
    train(Steps(), Loader(small.cuda(), 10), [])  # warms up
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(2 * arguments.rounds):
        is_watched = number % 2 == (number // 2) % 2
        callbacks = [FeedMonitor(table=False, first_seconds=None)] if is_watched else []
        seconds[is_watched].append(train(Steps(), Loader(small.cuda(), num_batches), callbacks))
    watched, plain = (statistics.median(seconds[key]) / (2 * num_batches) for key in (True, False))
    print("| a step on the device | ms | more |\n|---|---|---|")
    print(f"| without | {plain * 1e3:.3f} | |\n| FeedMonitor | {watched * 1e3:.3f} | {watched / plain - 1:+.2%} |")

    large = torch.randn(512, 3 * 224 * 224)  # 308 MB
    cases = {
        "batches on the device": (Steps(), Loader(small.cuda(), 60), []),
        "loader of two steps": (Steps(), Loader(small, 60, 2 * plain), []),
        "large pageable batches, one layer": (Steps(1), Loader(large, 20), []),
        "hook of two steps": (Steps(), Loader(small.cuda(), 60), [BusyHook(2 * plain)]),
    }
    rows = {}
    print("\n| training | verdict | waits | copy | idle |\n|---|---|---|---|---|")
    for name, (model, loader, callbacks) in cases.items():
        monitor = FeedMonitor(table=False, first_seconds=None)
        train(model, loader, [*callbacks, monitor])
        record = monitor.records[-1]
        steps = record.counters.steps
        rows[name] = {"verdict": str(record.verdict.cause), "line": record.line}
        shares = [record.verdict.wait_share, steps.share(steps.copy_seconds), steps.share(steps.idle_seconds)]
        print(f"| {name} | {record.verdict.cause} | {' | '.join(f'{one:.0%}' for one in shares)} |")
    if arguments.json:
        with open(arguments.json, "w") as file:
            card = torch.cuda.get_device_name(0)
            json.dump({"watched": watched, "plain": plain, "verdicts": rows, "card": card}, file)


if __name__ == "__main__":
    main()
