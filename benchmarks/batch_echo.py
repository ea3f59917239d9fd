"""Claim: with a loader four times slower than the training, `BatchEcho` reaches an accuracy at least 1.5 times sooner.

    python benchmarks/batch_echo.py [--plot FILE.svg] [--json FILE] [--quick]

Fashion-MNIST (5 000 of its training images kept apart for validation), a small convolutional network, AdamW, a linear
warm-up over the first twentieth of the fresh data and a linear decay to zero; batches of 512, two epochs of fresh data
in every arm; one CPU thread trains.

R         time the loader needs for a batch / time of one pass of training steps over it. The pass is timed first, in
          the same run: plain Lightning, a loader that does not sleep, median time from step to step.
loader    torch's `DataLoader` with one persistent worker, which sleeps until the R passes that a batch may take are
          over. It reads two batches ahead, as is its default.
rates     Tuned for each arm over one grid, on a seed of its own: the best validation accuracy at the end (mean of the
          last three checks). Only "auto" needs the slowed loader for that: to the other arms the sleep gives another
          time, not another training, which is checked (weights of the same seed, bit by bit).
time      Of training alone. Copies of the weights are kept as it runs, forty at even distances in fresh batches, and
          validated after it.
target    Set by the arm without echo: the lowest accuracy that one of its seeds ends with, rounded down to half a
          point; so each of its seeds has reached it. An arm's time is that of its first check at or above.
order     The arms take turns, seed by seed, back and forth. Medians over the seeds.

"No echo, split" takes two steps of half a batch and repeats nothing: what splitting gives without echo. How much echo
gives depends on how long one trains, less the longer: compare `--epochs` 1, 2 and 4. About ten minutes on two cores.

The bar: "auto" reaches the target 1.5 times sooner than no echo and does not end more than 0.3 points below it.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_gpufeed import BatchEcho
from lightning_gpufeed.cli import main as gpufeed

ROOT = Path(__file__).parents[1]
BATCH_SIZE = 512
NUM_VALIDATION = 5_000
NUM_CHECKS = 40
SLOW, FAST = 4.0, 0.5
BAR_TIMES, BAR_POINTS = 1.5, 0.3
TUNING_SEED = 100


@dataclass(frozen=True, eq=False)
class Arm:
    """A way to train; `echo` are the arguments of `BatchEcho`, None is to train without it."""

    name: str
    echo: dict[str, Any] | None
    color: str
    dash: str = "none"


# Colours of Okabe and Ito, told apart by colour-blind people too; the dashes tell them apart without colour.
NO_ECHO = Arm("no echo", None, "#000000")
SPLIT_ONLY = Arm("no echo, split", {"echo_factor": 1, "num_splits": 2}, "#cc79a7", "2 4")
PLAIN = Arm("plain echo", {"echo_factor": 4, "num_splits": 1}, "#e69f00", "9 4")
SPLIT = Arm("reshuffled split echo", {"echo_factor": 4, "num_splits": 2}, "#009e73", "9 4 2 4")
AUTO = Arm("auto", {"echo_factor": "auto", "max_echo_factor": 5}, "#0072b2", "5 3")
CELLS = [(SLOW, NO_ECHO), (SLOW, SPLIT_ONLY), (SLOW, PLAIN), (SLOW, SPLIT), (SLOW, AUTO)]
CELLS += [(FAST, NO_ECHO), (FAST, PLAIN), (FAST, AUTO)]


@dataclass
class Run:
    """One training. Its curve: seconds, accuracy on the validation images in percent."""

    arm: str
    ratio: float
    rate: float
    seed: int
    seconds: float
    wait_seconds: float
    num_steps: int
    echo_factor: float
    reported_ratio: float | None
    curve: list[tuple[float, float]]
    weights: Tensor = field(repr=False)
    test_accuracy: float = 0.0

    @property
    def final(self) -> float:
        return self.curve[-1][1]

    @property
    def tuned_for(self) -> float:
        return statistics.mean(accuracy for _, accuracy in self.curve[-3:])

    def seconds_to(self, target: float) -> float:
        return next((seconds for seconds, accuracy in self.curve if accuracy >= target), math.inf)


# Data ------------------------------------------------------------------------------------------------------


class SlowImages(Dataset):
    """Images of 28x28 bytes in memory; a batch of them is ready after a given time, not sooner."""

    def __init__(self, images: Tensor, labels: Tensor, seconds_per_batch: float) -> None:
        self.images, self.labels, self.seconds_per_batch = images, labels, seconds_per_batch

    def __len__(self) -> int:
        return len(self.images)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        end = time.perf_counter() + self.seconds_per_batch
        batch = self.images[indices], self.labels[indices]
        time.sleep(max(0.0, end - time.perf_counter()))
        return batch


def as_is(batch: Any) -> Any:
    return batch


def make_loader(images: Tensor, labels: Tensor, seconds_per_batch: float, seed: int) -> DataLoader:
    return DataLoader(
        SlowImages(images, labels, seconds_per_batch),
        BATCH_SIZE,
        shuffle=True,
        drop_last=True,
        num_workers=1,
        persistent_workers=True,
        collate_fn=as_is,
        generator=torch.Generator().manual_seed(seed),
    )


def normalize(images: Tensor) -> Tensor:
    return images[:, None].float().sub_(0.286 * 255).div_(0.353 * 255)


@dataclass
class Data:
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load_data(folder: Path, num_train: int | None) -> Data:
    """Fashion-MNIST as the demo packs it; fetched and packed if that was not done yet."""
    splits = {}
    for split in ("train", "test"):
        packed = folder / f"{split}.h5"
        if not packed.exists():
            sys.path.append(str(ROOT / "examples"))
            from fetch_fashion_mnist import fetch

            if gpufeed(["pack", str(fetch(folder)), str(packed), "--split", split, "--shuffle"]):
                raise SystemExit(1)
        with h5py.File(packed) as h5_file:
            splits[split] = torch.from_numpy(h5_file["images"][:]), torch.from_numpy(h5_file["labels"][:])
    images, labels = splits["train"]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    num_validation = min(NUM_VALIDATION, len(images) // 12)
    held_out, used = order[:num_validation], order[num_validation:][:num_train]
    if len(used) < 4 * BATCH_SIZE:
        raise SystemExit(f"{folder} has {len(images)} training images; at least {5 * BATCH_SIZE} are needed")
    return Data(
        (images[used], labels[used]),
        (normalize(images[held_out]), labels[held_out]),
        (normalize(splits["test"][0]), splits["test"][1]),
    )


# Training --------------------------------------------------------------------------------------------------


class ConvNet(LightningModule):
    """Two convolutions and two linear layers: 52 thousand parameters."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self.model = nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
        self.batch_arrived = 0.0
        self.num_fetched = 0

    def on_before_batch_transfer(self, batch, dataloader_idx):
        self.num_fetched += 1  # echoes do not come here
        return batch

    def on_after_batch_transfer(self, batch, dataloader_idx):
        self.batch_arrived = time.perf_counter()
        images, labels = batch
        return normalize(images), labels

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), self.rate)
        num_steps = int(self.trainer.estimated_stepping_batches)

        def factor(step: int) -> float:
            return min(1.0, 20 * (step + 1) / num_steps) * max(0.0, 1 - step / num_steps)

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Watch(Callback):
    """Times the training and keeps copies of the weights."""

    def __init__(self, num_batches: int) -> None:
        self.num_batches = num_batches
        self.num_checks = 0
        self.begin = self.latest = self.wait_seconds = 0.0
        self.between_steps: list[float] = []
        self.weights: list[tuple[float, Tensor]] = []

    def on_train_start(self, trainer, pl_module):
        self.begin = self.latest = time.perf_counter()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        now = time.perf_counter()
        self.wait_seconds += pl_module.batch_arrived - self.latest
        self.between_steps.append(now - self.latest)
        self.latest = now
        num_due = NUM_CHECKS * pl_module.num_fetched // self.num_batches
        if self.num_checks < num_due < NUM_CHECKS:
            self.num_checks = num_due
            self.keep(pl_module)

    def on_train_end(self, trainer, pl_module):
        self.keep(pl_module)

    def keep(self, module: LightningModule) -> None:
        self.weights.append((self.latest - self.begin, nn.utils.parameters_to_vector(module.parameters()).detach()))


@torch.no_grad()
def accuracy(weights: Tensor, images: Tensor, labels: Tensor) -> float:
    """Percent."""
    module = ConvNet(0.0)
    nn.utils.vector_to_parameters(weights, module.parameters())
    found = torch.cat([module.model(part).argmax(1) for part in images.split(500)])
    return 100 * int((found == labels).sum()) / len(labels)


class Bench:
    """Trains an arm as often as it is asked to, always in the same way."""

    def __init__(self, data: Data, epochs: int) -> None:
        self.data = data
        self.epochs = epochs
        self.num_batches = len(data.train[0]) // BATCH_SIZE
        self.pass_seconds = 0.0

    def fit(self, arm: Arm, ratio: float, rate: float, seed: int) -> tuple[Watch, Trainer, BatchEcho | None]:
        seed_everything(seed, verbose=False)
        # The rate is the one that was tuned for the arm: no warning, and no scaling.
        echo = None if arm.echo is None else BatchEcho(**arm.echo, scale_lr="keep", seed=seed)
        watch = Watch(self.epochs * self.num_batches)
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=self.epochs,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[watch] if echo is None else [echo, watch],
        )
        trainer.fit(ConvNet(rate), make_loader(*self.data.train, ratio * self.pass_seconds, seed))
        return watch, trainer, echo

    def time_pass(self) -> None:
        """Time one pass over a batch, with a loader that is not slowed."""
        watch, _, _ = self.fit(NO_ECHO, 0.0, 0.01, TUNING_SEED)
        self.pass_seconds = statistics.median(watch.between_steps)

    def run(self, arm: Arm, ratio: float, rate: float, seed: int, last_checks: int = 0) -> Run:
        watch, trainer, echo = self.fit(arm, ratio, rate, seed)
        passes = [number for numbers in echo.trace.values() for number in numbers] if echo else []
        ratios = [report.load_ratio for report in echo.reports if not report.is_bound] if echo else []
        return Run(
            arm.name,
            ratio,
            rate,
            seed,
            seconds=watch.weights[-1][0],
            wait_seconds=watch.wait_seconds,
            num_steps=trainer.global_step,
            echo_factor=statistics.mean(passes) if passes else 1.0,
            reported_ratio=ratios[-1] if ratios else None,
            curve=[(seconds, accuracy(w, *self.data.validation)) for seconds, w in watch.weights[-last_checks:]],
            weights=watch.weights[-1][1],
        )


# The experiment --------------------------------------------------------------------------------------------


def say(*words: object) -> None:
    """Progress, apart from the results."""
    print(*words, file=sys.stderr, flush=True)


def tune(bench: Bench, grid: Sequence[float]) -> dict[str, dict[float, float]]:
    """Validation accuracy at the end: arm -> learning rate -> percent."""
    table: dict[str, dict[float, float]] = {}
    for arm in dict.fromkeys(arm for _, arm in CELLS):
        for rate in grid:
            run = bench.run(arm, SLOW if arm is AUTO else 0.0, rate, TUNING_SEED, last_checks=3)
            table.setdefault(arm.name, {})[rate] = run.tuned_for
            say(f"tuning {arm.name}, rate {rate}: {run.tuned_for:.2f} %, {run.seconds:.1f} s")
    return table


def measure(bench: Bench, rates: dict[str, float], seeds: Sequence[int]) -> dict[tuple[float, str], list[Run]]:
    runs: dict[tuple[float, str], list[Run]] = {(ratio, arm.name): [] for ratio, arm in CELLS}
    for number, seed in enumerate(seeds):
        for ratio, arm in CELLS if number % 2 == 0 else reversed(CELLS):
            # Where it has no reason to echo, "auto" is to be the training without it, so it gets that one's rate.
            rate = rates[NO_ECHO.name] if ratio == FAST and arm is AUTO else rates[arm.name]
            run = bench.run(arm, ratio, rate, seed)
            run.test_accuracy = accuracy(run.weights, *bench.data.test)
            runs[ratio, arm.name].append(run)
            say(f"R = {ratio:g}, {arm.name}, seed {seed}: {run.final:.2f} %, {run.seconds:.1f} s")
    for arm in (NO_ECHO, PLAIN):
        for slow, fast in zip(runs[SLOW, arm.name], runs[FAST, arm.name], strict=True):
            if not torch.equal(slow.weights, fast.weights):
                raise SystemExit(f"{arm.name}: the training depends on the loader's speed; its tuning means nothing")
    return runs


# Results ---------------------------------------------------------------------------------------------------


def target_of(runs: Sequence[Run]) -> float:
    """The rule: the lowest accuracy that one of these runs ends with, rounded down to half a point."""
    return math.floor(2 * min(run.final for run in runs)) / 2


def median_seconds(runs: Sequence[Run], target: float) -> float:
    return statistics.median(run.seconds_to(target) for run in runs)


def times_sooner(runs: Sequence[Run], than: Sequence[Run], target: float) -> float:
    """0 if most of the runs never reach it."""
    return median_seconds(than, target) / median_seconds(runs, target)


def spread(values: Sequence[float], digits: int) -> str:
    """The median, and from the least to the most."""
    if num_missing := sum(value == math.inf for value in values):
        return f"not reached by {num_missing} of {len(values)}"
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f}" + (f" ({low:.{digits}f}–{high:.{digits}f})" if low < high else "")


def table(runs: dict[tuple[float, str], list[Run]], target: float) -> str:
    lines = [
        f"| R | arm | learning rate | uses of a batch | optimizer steps | waits for data | training, s "
        f"| to {target:g} %, s | times sooner | validation at the end, % | test, % |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (ratio, name), group in runs.items():
        rates = sorted({run.rate for run in group})
        wait = statistics.median(run.wait_seconds / run.seconds for run in group)
        cells = [
            f"{ratio:g}",
            name,
            ", ".join(f"{rate:g}" for rate in rates),
            f"{statistics.median(run.echo_factor for run in group):.2f}",
            f"{statistics.median(run.num_steps for run in group):,.0f}",
            f"{wait:.0%}".replace("%", " %"),
            spread([run.seconds for run in group], 1),
            spread([run.seconds_to(target) for run in group], 1),
            f"{times_sooner(group, runs[ratio, NO_ECHO.name], target):.2f}",
            spread([run.final for run in group], 2),
            spread([run.test_accuracy for run in group], 2),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tuning_table(tuned: dict[str, dict[float, float]]) -> str:
    grid = list(next(iter(tuned.values())))
    lines = ["| learning rate | " + " | ".join(f"{rate:g}" for rate in grid) + " |", "|---" * (len(grid) + 1) + "|"]
    for name, scores in tuned.items():
        best = max(scores, key=scores.__getitem__)
        cells = [f"**{scores[rate]:.2f}**" if rate == best else f"{scores[rate]:.2f}" for rate in grid]
        at_border = " (best at the border of the grid)" if best in (grid[0], grid[-1]) else ""
        lines.append("| " + " | ".join([name + at_border, *cells]) + " |")
    return "\n".join(lines)


def bar(runs: dict[tuple[float, str], list[Run]], target: float) -> str:
    """Whether it is met."""
    none, auto = runs[SLOW, NO_ECHO.name], runs[SLOW, AUTO.name]
    sooner = times_sooner(auto, none, target)
    points = {
        what: statistics.median(end(run) for run in auto) - statistics.median(end(run) for run in none)
        for what, end in (("validation", lambda run: run.final), ("test", lambda run: run.test_accuracy))
    }
    is_soon, is_accurate = sooner >= BAR_TIMES, min(points.values()) >= -BAR_POINTS
    return (
        f"Bar {'met' if is_soon and is_accurate else 'NOT met'}: with R = {SLOW:g}, auto reaches {target:g} % "
        f"{sooner:.2f} times sooner than no echo (bar: {BAR_TIMES}: {'met' if is_soon else 'NOT met'}) and ends "
        + " and ".join(f"{difference:+.2f} points ({what})" for what, difference in points.items())
        + f" from it (bar: not below -{BAR_POINTS}: {'met' if is_accurate else 'NOT met'})."
    )


def remarks(runs: dict[tuple[float, str], list[Run]], target: float, pass_seconds: float) -> list[str]:
    """What else a reader of the table has to know."""
    none, plain, auto = (runs[FAST, arm.name] for arm in (NO_ECHO, PLAIN, AUTO))
    slow_none, slow_auto = (runs[SLOW, arm.name] for arm in (NO_ECHO, AUTO))
    others = ", ".join(f"{target - d:g} %: {times_sooner(slow_auto, slow_none, target - d):.2f}" for d in (1, 2, 4))
    to_target = 1 / times_sooner(plain, none, target) if median_seconds(plain, target) < math.inf else math.inf
    for_all = statistics.median(run.seconds for run in plain) / statistics.median(run.seconds for run in none)
    num_echoes = [str(run.num_steps - without.num_steps) for run, without in zip(auto, none, strict=True)]
    num_equal = sum(torch.equal(run.weights, without.weights) for run, without in zip(auto, none, strict=True))
    reported = [run.reported_ratio for run in slow_auto if run.reported_ratio]
    later = statistics.median(run.seconds / run.num_steps for run in none)
    return [
        f"Other targets, how many times sooner auto is there than no echo with R = {SLOW:g}: {others}.",
        f"Where the loader keeps up, with R = {FAST:g}, plain echo takes {to_target:.2f} times as long as no echo to "
        f"{target:g} % ({'it does not help' if to_target > 1 else 'it helps even there'}) and {for_all:.2f} times as "
        f"long for the same fresh data. Auto, with the rate of no echo, made {', '.join(num_echoes)} echoed steps; its "
        f"weights are bit-equal to those without echo for {num_equal} of {len(auto)} seeds.",
        f"One pass took {1e3 * pass_seconds:.1f} ms when it was timed; later a step of no echo with R = {FAST:g}, all "
        f"included, {1e3 * later:.1f} ms. R = {SLOW:g} as auto measured it: "
        + (f"{spread(reported, 1)}." if reported else "it was not waited for."),
    ]


def machine() -> str:
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return (
        f"{os.cpu_count()} cores ({model}), no GPU, one thread trains; "
        f"torch {torch.__version__}, lightning {lightning.__version__}, Python {platform.python_version()}"
    )


# The plot --------------------------------------------------------------------------------------------------

PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP = 400, 330, 64, 56, 44
LOWEST = 70


def draw(runs: dict[tuple[float, str], list[Run]], target: float) -> str:
    """Accuracy against wall time, a panel for each loader, as SVG."""
    highest = math.ceil(max(accuracy for group in runs.values() for run in group for _, accuracy in run.curve)) + 1
    lowest = min(LOWEST, 5 * math.floor(target / 5) - 5)
    parts = [_panel(runs, SLOW, LEFT, target, lowest, highest)]
    parts.append(_panel(runs, FAST, LEFT + PANEL_WIDTH + GAP, target, lowest, highest))
    parts.append(_legend([arm for ratio, arm in CELLS if ratio == SLOW], LEFT, TOP + PANEL_HEIGHT + 74))
    middle = TOP + PANEL_HEIGHT / 2
    parts.append(
        f'<text transform="rotate(-90)" x="{-middle:g}" y="20" text-anchor="middle">'
        f"accuracy on the validation images, %</text>"
    )
    width, height = LEFT + 2 * PANEL_WIDTH + GAP + 20, TOP + PANEL_HEIGHT + 92
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="#222" role="img">\n'
        f"<title>Accuracy against wall time with and without BatchEcho</title>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _ticks(end: float) -> list[float]:
    """At most nine round numbers from 0 on."""
    step = next(s * 10**p for p in range(-2, 6) for s in (1, 2, 5) if end / (s * 10**p) <= 8)
    return [step * number for number in range(int(end / step) + 1)]


def _panel(
    runs: dict[tuple[float, str], list[Run]], ratio: float, left: int, target: float, lowest: int, highest: int
) -> str:
    arms = [arm for r, arm in CELLS if r == ratio]
    end = 1.02 * max(seconds for arm in arms for run in runs[ratio, arm.name] for seconds, _ in run.curve)

    def x(seconds: float) -> float:
        return left + PANEL_WIDTH * seconds / end

    def y(accuracy: float) -> float:
        return TOP + PANEL_HEIGHT * (highest - accuracy) / (highest - lowest)

    bottom, right, clip = TOP + PANEL_HEIGHT, left + PANEL_WIDTH, f"panel-{left}"
    parts = [
        f'<clipPath id="{clip}"><rect x="{left}" y="{TOP}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}"/></clipPath>',
        f'<text x="{left}" y="{TOP - 30}" font-size="15" font-weight="bold">R = {ratio:g}</text>',
        f'<text x="{left}" y="{TOP - 12}">a batch takes {ratio:g} times as long to load as to train on</text>',
        f'<text x="{left + PANEL_WIDTH / 2:g}" y="{bottom + 42}" text-anchor="middle">time of training, s</text>',
    ]
    for value in range(lowest, highest + 1, 5):
        parts.append(f'<path d="M{left} {y(value):.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value}</text>')
    for value in _ticks(end):
        parts.append(f'<path d="M{x(value):.1f} {bottom}v5" stroke="#222"/>')
        parts.append(f'<text x="{x(value):.1f}" y="{bottom + 20}" text-anchor="middle">{value:g}</text>')
    parts.append(f'<path d="M{left} {y(target):.1f}H{right}" stroke="#222" stroke-dasharray="1 3"/>')
    if ratio == FAST:  # where there is room
        parts.append(f'<text x="{right - 6}" y="{y(target) + 17:.1f}" text-anchor="end">target {target:g} %</text>')
    curves = []
    for arm in arms:
        checks = list(zip(*(run.curve for run in runs[ratio, arm.name]), strict=False))
        seconds = [statistics.median(second for second, _ in check) for check in checks]
        low, middle, high = (
            [y(of(accuracy for _, accuracy in check)) for check in checks] for of in (min, statistics.median, max)
        )
        across = [x(second) for second in seconds]
        band = [*zip(across, high, strict=True), *reversed(list(zip(across, low, strict=True)))]
        parts.append(f'<path d="{_path(band)}Z" fill="{arm.color}" fill-opacity="0.12" clip-path="url(#{clip})"/>')
        curves.append(
            f'<path d="{_path(list(zip(across, middle, strict=True)))}" fill="none" stroke="{arm.color}" '
            f'stroke-width="2" stroke-dasharray="{arm.dash}" clip-path="url(#{clip})"/>'
        )
        reached = median_seconds(runs[ratio, arm.name], target)
        if reached < math.inf:
            curves.append(f'<circle cx="{x(reached):.1f}" cy="{y(target):.1f}" r="4" fill="{arm.color}"/>')
    parts += curves
    parts.append(
        f'<rect x="{left}" y="{TOP}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" stroke="#222"/>'
    )
    return "\n".join(parts)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _legend(arms: Sequence[Arm], left: int, y: int) -> str:
    parts = []
    for arm in arms:
        parts.append(
            f'<path d="M{left} {y - 4}h44" stroke="{arm.color}" stroke-width="2" stroke-dasharray="{arm.dash}"/>'
        )
        parts.append(f'<text x="{left + 50}" y="{y}">{arm.name}</text>')
        left += 66 + round(6.6 * len(arm.name))
    parts.append(f'<circle cx="{left + 4}" cy="{y - 4}" r="4"/><text x="{left + 14}" y="{y}">target reached</text>')
    return "\n".join(parts)


# The command -----------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.004, 0.008, 0.016, 0.032, 0.064])
    parser.add_argument("--data", type=Path, default=ROOT / "data" / "fashion-mnist")
    parser.add_argument("--plot", type=Path, help="write accuracy against wall time as SVG")
    parser.add_argument("--json", type=Path, help="write every run")
    parser.add_argument("--quick", action="store_true", help="see that it runs; its numbers mean nothing")
    options = parser.parse_args()
    num_train = None
    if options.quick:
        options.epochs, options.seeds, options.rates, num_train = 1, 1, [0.008, 0.016], 12 * BATCH_SIZE
    # Lightning's hints on workers and logging are not what this script is about. BatchEcho's own words stay.
    warnings.filterwarnings("ignore", module=r"(lightning|torch)\.")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # One core trains, another is left for the loader's worker.
    torch.set_num_threads(1)
    begin = time.perf_counter()

    bench = Bench(load_data(options.data, num_train), options.epochs)
    bench.time_pass()
    say(f"one pass: {1e3 * bench.pass_seconds:.1f} ms; {bench.num_batches} batches an epoch")
    tuned = tune(bench, sorted(options.rates))
    rates = {name: max(scores, key=scores.__getitem__) for name, scores in tuned.items()}
    runs = measure(bench, rates, range(1, options.seeds + 1))
    target = target_of(runs[SLOW, NO_ECHO.name])
    minutes = (time.perf_counter() - begin) / 60

    if options.quick:
        print("A quick run: that it runs is all that it shows.\n")
    print(" ".join(["`python benchmarks/batch_echo.py", *sys.argv[1:]]) + "`\n")
    print(
        f"{machine()}. Fashion-MNIST, {bench.num_batches * BATCH_SIZE:,} images an epoch in batches of {BATCH_SIZE}, "
        f"epochs: {options.epochs}, seeds: {options.seeds}; median (least–most). {minutes:.1f} minutes in all.\n"
    )
    print(table(runs, target))
    print("\nTuning: validation accuracy at the end, %, one other seed\n")
    print(tuning_table(tuned))
    print("\n" + "\n".join(f"- {line}" for line in remarks(runs, target, bench.pass_seconds)))
    print("\n" + bar(runs, target))
    if options.plot:
        options.plot.write_text(draw(runs, target))
    if options.json:
        every = [{k: v for k, v in vars(run).items() if k != "weights"} for group in runs.values() for run in group]
        settings = {"epochs": options.epochs, "batch_size": BATCH_SIZE, "pass_seconds": bench.pass_seconds}
        options.json.write_text(
            json.dumps({"machine": machine(), **settings, "target": target, "tuning": tuned, "runs": every}, indent=1)
        )


if __name__ == "__main__":
    main()
