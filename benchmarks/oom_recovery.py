"""Claim: while memory suffices, `OOMRecovery` costs less than 2 % of the time of a step on one device.

    python benchmarks/oom_recovery.py [--pairs 14] [--one-device] [--json FILE] [--quick]

A real Trainer, with and without the callback. Three models: a residual network with batch normalisation and a
collection of torchmetrics on images of 3x32x32; a small transformer that predicts the next token; and a network so
small that nearly all of its step is Lightning's own work, which shows the price in microseconds and no share that
anybody would meet in practice. One thread computes.

blocks    A block is a training of its own: some batches to warm up, then those that count. The arms take turns, and
          the one that begins changes from pair to pair. A block's time is the median over its accumulation windows.
price     Median over the pairs of the difference between the two arms, with its quartiles; the share is that of the
          median batch without the callback. A price far inside its own quartiles is noise.
ranks     Two processes with gloo on this machine, `strategy="ddp"`, each on a thread of its own. With the callback
          gradients are reduced after backward in place of during it, and the ranks vote once per batch: no bar, the
          price is printed as it is.
recovery  An error raised by a hook, at the end of forward or of backward, where all the work of the attempt is lost.
          What the batch took beyond a usual one, in usual ones; "in 2 microbatches" fails twice before.

The bar: under 2 % for both models of a usual size, with windows of 1 and of 4 batches. About five minutes on two cores.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import platform
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from lightning_gpufeed import OOMRecovery

BAR_SHARE = 0.02
NUM_RANKS = 2
RANK_SECONDS = 600
VOCABULARY = 256


# Models ----------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Two convolutions with batch normalisation, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.convolutions(images) + self.around(images))


class ResidualNet(LightningModule):
    """Fourteen convolutions deep; logs its loss and two metrics of torchmetrics."""

    def __init__(self, width: int = 16, num_blocks: int = 2) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        inputs = width
        for stage, outputs in enumerate((width, 2 * width, 4 * width)):
            for number in range(num_blocks):
                layers.append(Block(inputs, outputs, 2 if stage and not number else 1))
                inputs = outputs
        self.model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))
        self.metrics = MetricCollection([MulticlassAccuracy(10), MulticlassF1Score(10)])

    def training_step(self, batch, batch_idx):
        images, labels = batch
        scores = self.model(images)
        loss = F.cross_entropy(scores, labels)
        self.metrics.update(scores.detach(), labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        self.log_dict(self.metrics.compute())
        self.metrics.reset()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Transformer(LightningModule):
    """Predicts the next token; dropout, a causal mask as a buffer, AdamW."""

    def __init__(self, width: int = 128, num_layers: int = 4, length: int = 64) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, max(1, width // 32), 4 * width, batch_first=True)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.model = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def training_step(self, batch, batch_idx):
        tokens = batch["tokens"]
        scores = self.head(self.model(self.embedding(tokens[:, :-1]), mask=self.mask, is_causal=True))
        loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class Tiny(LightningModule):
    """Hardly any work."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def training_step(self, batch, batch_idx):
        points, labels = batch
        return F.cross_entropy(self.model(points), labels)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def random_images(batch_size: int) -> list[Any]:
    return [(torch.randn(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))) for _ in range(4)]


def random_tokens(batch_size: int, length: int = 64) -> list[Any]:
    return [{"tokens": torch.randint(VOCABULARY, (batch_size, length + 1))} for _ in range(4)]


def random_points(batch_size: int) -> list[Any]:
    return [(torch.randn(batch_size, 16), torch.randint(4, (batch_size,))) for _ in range(4)]


@dataclass(frozen=True)
class Case:
    """What is trained; `num_batches` count in each block, after `num_warm`."""

    name: str
    make_module: Callable[[], LightningModule]
    make_batches: Callable[[], list[Any]]
    num_batches: int
    num_warm: int = 4
    accumulate: int = 1
    is_under_bar: bool = True


RESIDUAL = Case("residual network", ResidualNet, lambda: random_images(16), 12)
TRANSFORMER = Case("transformer", Transformer, lambda: random_tokens(8), 12)
TINY = Case("tiny network", Tiny, lambda: random_points(8), 200, 20, is_under_bar=False)


# Measuring -------------------------------------------------------------------------------------------------


class Batches:
    """The same few batches, over and over; a loader that takes no time."""

    def __init__(self, batches: list[Any], num_batches: int) -> None:
        self.batches, self.num_batches = batches, num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[number % len(self.batches)] for number in range(self.num_batches))


class Stopwatch(Callback):
    """Marks the time when the first batches are done, and from there on after every so many."""

    def __init__(self, num_warm: int, every: int, is_on_device: bool) -> None:
        self.num_warm, self.every, self.is_on_device = num_warm, every, is_on_device
        self.marks: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        num_counted = batch_idx + 1 - self.num_warm
        if num_counted >= 0 and num_counted % self.every == 0:
            if self.is_on_device:
                torch.cuda.synchronize()
            self.marks.append(time.perf_counter())

    @property
    def between(self) -> list[float]:
        return [end - begin for begin, end in zip(self.marks, self.marks[1:], strict=False)]


class Bench:
    """Trains blocks of one case, with its module and batches made once."""

    def __init__(self, case: Case, **settings: Any) -> None:
        seed_everything(0, verbose=False)
        self.case = case
        self.module, self.batches = case.make_module(), case.make_batches()
        self.settings = {"accelerator": "cpu", "devices": 1, "accumulate_grad_batches": case.accumulate, **settings}

    @property
    def is_on_device(self) -> bool:
        return self.settings["accelerator"] != "cpu"

    def fit(self, callbacks: Sequence[Callback], every: int = 1) -> list[float]:
        """Seconds from mark to mark."""
        watch = Stopwatch(self.case.num_warm, every, self.is_on_device)
        trainer = Trainer(
            max_epochs=1,
            callbacks=[*callbacks, watch],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **self.settings,
        )
        gc.collect()
        trainer.fit(self.module, Batches(self.batches, self.case.num_warm + self.case.num_batches))
        return watch.between

    def batch_seconds(self, callbacks: Sequence[Callback]) -> float:
        """Of one batch of a block."""
        # A mark waits for a device, which would then have nothing queued: there only the ends of a block are marked.
        between = self.fit(callbacks, self.case.num_batches if self.is_on_device else self.case.accumulate)
        return statistics.median(between) * len(between) / self.case.num_batches


@dataclass(frozen=True)
class Price:
    """Of one case; seconds per batch."""

    case: str
    ranks: int
    accumulate: int
    is_under_bar: bool
    plain: float
    guarded: float
    difference: float
    low: float
    high: float

    @property
    def share(self) -> float:
        return self.difference / self.plain


def price_of(case: Case, num_pairs: int, num_ranks: int = 1, **settings: Any) -> Price:
    bench = Bench(case, **settings)
    bench.batch_seconds([])  # the first block pays for what is made once per process
    bench.batch_seconds([OOMRecovery()])
    plain, guarded = [], []
    for number in range(num_pairs):
        for is_guarded in (False, True) if number % 2 == 0 else (True, False):
            seconds = bench.batch_seconds([OOMRecovery()] if is_guarded else [])
            (guarded if is_guarded else plain).append(seconds)
    differences = [with_it - without for with_it, without in zip(guarded, plain, strict=True)]
    low, middle, high = statistics.quantiles(differences, n=4)
    return Price(
        case.name,
        num_ranks,
        case.accumulate,
        case.is_under_bar and num_ranks == 1,
        statistics.median(plain),
        statistics.median(guarded),
        middle,
        low,
        high,
    )


# Two ranks -------------------------------------------------------------------------------------------------


def run_rank(rank: int, cases: list[Case], num_pairs: int, connection: Any) -> None:
    """One rank, in a fork of its own; the first sends the prices."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
    prices = [
        price_of(case, num_pairs, NUM_RANKS, devices=NUM_RANKS, strategy="ddp", use_distributed_sampler=False)
        for case in cases
    ]
    if rank == 0:
        connection.send(prices)
    torch.distributed.destroy_process_group()


def prices_of_ranks(cases: list[Case], num_pairs: int) -> list[Price]:
    """Called before this process computes anything: a fork shares imports, but no threads."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [context.Process(target=run_rank, args=(r, cases, num_pairs, sender)) for r in range(NUM_RANKS)]
    try:
        for process in ranks:
            process.start()
        end = time.monotonic() + RANK_SECONDS
        while not receiver.poll(0.2):
            if time.monotonic() > end or any(process.exitcode for process in ranks):
                raise SystemExit(f"the ranks gave no prices: exit codes {[process.exitcode for process in ranks]}")
        prices: list[Price] = receiver.recv()
        for process in ranks:
            process.join(30)
    finally:
        for process in ranks:
            process.kill()
    return prices


# Recovery --------------------------------------------------------------------------------------------------


class Starve(Callback):
    """Lets the batch of one number fail so many times, at the end of a phase."""

    def __init__(self, batch_index: int, phase: str, num_failures: int) -> None:
        self.batch_index, self.phase, self.num_failures = batch_index, phase, num_failures
        self.num_left = 0

    def on_train_start(self, trainer, pl_module):
        # The gradient of the first layer comes last.
        is_forward = self.phase == "forward"
        layers = pl_module.model
        hook = layers.register_forward_hook if is_forward else next(layers.parameters()).register_hook
        self.handle = hook(self.fail)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == self.batch_index:
            self.num_left = self.num_failures

    def on_train_end(self, trainer, pl_module):
        self.handle.remove()

    def fail(self, *_: Any) -> None:
        if self.num_left:
            self.num_left -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@dataclass(frozen=True)
class Cost:
    """Of one out-of-memory error, in usual batches; and of batches in microbatches after it."""

    case: str
    what: str
    extra: float
    extra_seconds: float
    later: float


FAILURES = [
    ("forward fails, the same again", "forward", 1, "refuse"),
    ("backward fails, the same again", "backward", 1, "refuse"),
    ("forward fails twice, in 2 microbatches, their loss checked", "forward", 2, "refuse"),
    ("the same without the check, which is made once", "forward", 2, "skip"),
]


def costs_of(case: Case, num_rounds: int, **settings: Any) -> list[Cost]:
    """A training for each error, in turn."""
    num_before = 6
    bench = Bench(replace(case, num_warm=3, num_batches=2 * num_before, accumulate=1), **settings)
    usual: list[float] = []
    taken: dict[str, list[float]] = {what: [] for what, *_ in FAILURES}
    later: dict[str, list[float]] = {what: [] for what, *_ in FAILURES}
    for _ in range(num_rounds):
        for what, phase, num_failures, split_check in FAILURES:
            recovery = OOMRecovery(split_check=split_check, emergency_checkpoint=False)
            between = bench.fit([recovery, Starve(3 + num_before, phase, num_failures)])
            if [event.num_retries for event in recovery.events] != [num_failures]:
                raise SystemExit(f"{what}: it was {recovery.events}")
            usual += between[:num_before]
            taken[what].append(between[num_before])
            later[what] += between[num_before + 1 :]
    batch = statistics.median(usual)
    return [
        Cost(
            case.name,
            what,
            (statistics.median(seconds) - batch) / batch,
            statistics.median(seconds) - batch,
            statistics.median(later[what]) / batch,
        )
        for what, seconds in taken.items()
    ]


# Results ---------------------------------------------------------------------------------------------------


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    return (
        f"{os.cpu_count()} cores ({model}), {card}; "
        f"torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()}"
    )


def price_table(prices: Sequence[Price]) -> str:
    lines = [
        "| model | ranks | batches a window | without, ms | with, ms | price, us a batch (quartiles) | share |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in prices:
        price, low, high = (round(1e6 * seconds) for seconds in (one.difference, one.low, one.high))
        lines.append(
            f"| {one.case} | {one.ranks} | {one.accumulate} | {1e3 * one.plain:.2f} | {1e3 * one.guarded:.2f} "
            f"| {price:,} ({low:,} to {high:,}) | {100 * one.share:.2f} % |"
        )
    return "\n".join(lines)


def cost_table(costs: Sequence[Cost]) -> str:
    lines = [
        "| model | one error | extra time, in batches | extra time, ms | a batch after it |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {one.case} | {one.what} | {one.extra:.2f} | {1e3 * one.extra_seconds:.0f} | {one.later:.2f} |"
        for one in costs
    ]
    return "\n".join(lines)


def bar(prices: Sequence[Price]) -> str:
    held = [one for one in prices if one.is_under_bar]
    worst = max(held, key=lambda one: one.share)
    is_met = worst.share < BAR_SHARE
    return (
        f"Bar {'met' if is_met else 'NOT met'}: on one device at most {100 * worst.share:.2f} % of a batch "
        f"({worst.case}, windows of {worst.accumulate}); bar: under {100 * BAR_SHARE:g} %."
    )


def quiet() -> None:
    """Lightning's hints on workers and logging are not what this script is about."""
    warnings.filterwarnings("ignore", module=r"(lightning|torch|pytorch_lightning)\.")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=14, help="blocks of each arm, 2 or more")
    parser.add_argument("--one-device", action="store_true", help="only the prices that the bar is about")
    parser.add_argument("--json", type=Path, help="write all figures")
    parser.add_argument("--quick", action="store_true", help="see that it runs; its numbers mean nothing")
    options = parser.parse_args()
    cases = [RESIDUAL, TRANSFORMER, TINY]
    num_rounds = 5
    if options.quick:
        options.pairs, num_rounds = 2, 1
        small = (lambda: random_images(4), lambda: random_tokens(4), lambda: random_points(8))
        cases = [replace(c, make_batches=make, num_batches=4, num_warm=4) for c, make in zip(cases, small, strict=True)]
    if options.pairs < 2:
        parser.error(f"--pairs is {options.pairs}; expected 2 or more")
    quiet()
    torch.set_num_threads(1)
    begin = time.perf_counter()

    residual, transformer, tiny = cases
    alone = [replace(case, accumulate=number) for case in (residual, transformer, tiny) for number in (1, 4)]
    of_ranks = [residual, replace(residual, accumulate=4), transformer]
    to_fail = [residual, transformer]
    if options.quick:
        alone, of_ranks, to_fail = alone[1:3], of_ranks[:1], to_fail[:1]
    if options.one_device:
        of_ranks, to_fail = [], []
    prices = prices_of_ranks(of_ranks, options.pairs) if of_ranks else []
    prices = [price_of(case, options.pairs) for case in alone] + prices
    costs = [cost for case in to_fail for cost in costs_of(case, num_rounds)]
    minutes = (time.perf_counter() - begin) / 60

    if options.quick:
        print("A quick run: that it runs is all that it shows.\n")
    print(f"{machine()}. One thread; {options.pairs} pairs of blocks, medians. {minutes:.1f} minutes in all.\n")
    print(price_table(prices) + "\n")
    if costs:
        print(cost_table(costs) + "\n")
    print(bar(prices))
    if options.json:
        results = {"prices": [asdict(one) for one in prices], "costs": [asdict(one) for one in costs]}
        options.json.write_text(json.dumps({"machine": machine(), "pairs": options.pairs, **results}, indent=1))


if __name__ == "__main__":
    main()
