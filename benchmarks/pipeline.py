"""Claim: "auto" is faster than every schedule that torch ships, and takes what it predicts, on an emulated accelerator.

    python benchmarks/pipeline.py [--ranks 4 8] [--layers 16 32] [--microbatches 4 8 16] [--compute emulated|real|both]
                                  [--rounds N] [--steps N] [--pass-ms MS] [--json FILE] [--plot FILE] [--quick]

compute     "emulated": an accelerator that sleeps, on as many ranks as asked for; see `pipeline_models.py`. "real": a
            transformer on 2 ranks, each with a core of its own and one thread; up to 8 microbatches.
arms        `torch.distributed.pipelining`, each schedule as shipped, with each number of stages on a rank that divides
            the layers, and with both forms of an emulated layer; and ours, through `PipelineSession`. All train in the
            same processes and take turns, round by round, in an order drawn anew. After a first round the best of each
            torch schedule goes on, with what is within 25 % of it.
ms          Median over rounds of a step, on the rank that takes longest; the optimizer's step is part of it. The first
            two steps of each arm are not counted (and not slept in), and of real compute not the first of each turn.
efficiency  Ideal / measured. Ideal is what the busiest rank computes, without a wait: emulated, the sum of its sleeps;
            real, the least measured with all ranks at work and nothing sent.
predicted   By `pipeline.simulate`, from what rank 0 measured: each layer alone, and the link.

Ranks share this machine's cores: what they do beside sleeping (autograd, messages, sums) takes longer than it would
with cores enough. That holds for all arms.

Exit status 1 if a bar is not met.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from pipeline_models import OURS, Arm, Costs, OurArm, Task, loss_of, sleeping, torch_arms
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn

from lightning_gpufeed.pipeline.links import PipelineGroups

TIMEOUT = timedelta(seconds=120)
REAL_RANKS, REAL_LAYERS, REAL_MOST = 2, 8, 8
FAST_FORWARD, AUTO = "ours fast_forward + modulo", "ours auto"
MODULO_BAR, AUTO_BAR, PREDICTION_BAR, REAL_BAR = 1.40, 1.08, 0.05, 0.97
KEPT_WITHIN = 1.25

Cell = dict[str, Any]
"""What was measured for one number of ranks, layers and microbatches."""


# On a rank ---------------------------------------------------------------------------------------------------


def longest(seconds: float) -> float:
    """Over ranks."""
    box = torch.tensor([seconds], dtype=torch.float64)
    distributed.all_reduce(box, distributed.ReduceOp.MAX)
    return box.item()


def turn(arm: Arm, num_steps: int, num_uncounted: int) -> float:
    """Seconds of a step."""
    for _ in range(num_uncounted):
        arm.step()
    distributed.barrier()
    begin = time.perf_counter()
    for _ in range(num_steps):
        arm.step()
    return longest((time.perf_counter() - begin) / num_steps)


def ideal_seconds(task: Task) -> float:
    """What the busiest rank computes in a step."""
    per_rank = task.num_layers // distributed.get_world_size()
    if task.is_emulated:
        return 3 * per_rank * task.num_microbatches * task.pass_seconds
    model = nn.Sequential(*(task.layer(n) for n in range(per_rank)))
    x, y = task.batch()
    found = []
    for _ in range(3):
        distributed.barrier()
        begin = time.perf_counter()
        pairs = zip(x.tensor_split(task.num_microbatches), y.tensor_split(task.num_microbatches), strict=True)
        for one, target in pairs:
            loss_of(model(one.requires_grad_(distributed.get_rank() > 0)), target).backward()  # type: ignore[no-untyped-call]
        found.append(longest(time.perf_counter() - begin))
    return min(found)  # what else runs on the machine only adds to it


def measure(task: Task, groups: PipelineGroups, options: argparse.Namespace) -> Cell:
    size = distributed.get_world_size()
    ideals, costs = [ideal_seconds(task)], Costs.measure(task, groups)
    makers: dict[str, Any] = dict(torch_arms(task, size))
    for name, (schedule, v) in OURS.items():
        makers[name] = lambda schedule=schedule, v=v: OurArm(task, groups, schedule, v, costs)
    arms: dict[str, Arm] = {}
    seconds: dict[str, list[float]] = {}
    uncounted = 0 if task.is_emulated else 1
    for name, make in makers.items():
        with sleeping(False):
            arms[name] = make()
            arms[name].step()
            arms[name].step()
        seconds[name] = [turn(arms[name], options.steps, uncounted)]
    kept = going_on(seconds)
    for number in range(options.rounds - 1):
        ideals.append(ideal_seconds(task))
        for name in random.Random(number).sample(kept, len(kept)):
            seconds[name].append(turn(arms[name], options.steps, uncounted))
    ours = {name: arm for name, arm in arms.items() if isinstance(arm, OurArm)}
    cell = {
        "ranks": size,
        "layers": task.num_layers,
        "microbatches": task.num_microbatches,
        "is_emulated": task.is_emulated,
        "pass_seconds": task.pass_seconds,
        "ideal": min(ideals),
        "kept": kept,
        "seconds": {name: statistics.median(found) for name, found in seconds.items()},
        "every": seconds,
        "predicted": {name: arm.predicted_seconds for name, arm in ours.items()},
        "plans": {name: str(arm.session.plan) for name, arm in ours.items()},
        "link": [costs.link.latency_seconds, costs.link.seconds_per_byte],
        "layer": costs.layers.as_lists()[1],
        "load": os.getloadavg()[0],
    }
    losses: list[Any] = [None] * size
    distributed.all_gather_object(losses, {name: arm.first_loss for name, arm in arms.items()})
    cell["losses"] = {name: next(one[name] for one in losses if one[name] is not None) for name in arms}
    for arm in arms.values():
        arm.close()
    return cell


def schedule_of(arm: str) -> str:
    return arm.split(",")[0]


def going_on(seconds: dict[str, list[float]]) -> list[str]:
    """Ours, and of each torch schedule the fastest and what comes near it."""
    best: dict[str, float] = {}
    for name, found in seconds.items():
        best[schedule_of(name)] = min(best.get(schedule_of(name), found[0]), found[0])
    return [name for name, found in seconds.items() if found[0] <= KEPT_WITHIN * best[schedule_of(name)]]


def rank_main(rank: int, size: int, port: int, options: argparse.Namespace, tasks: list[Task], out: Path) -> None:
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    if not tasks[0].is_emulated:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    init = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=TIMEOUT)
    groups = PipelineGroups.create(size, TIMEOUT)
    for task in tasks:
        cell = measure(task, groups, options)
        if not rank:
            with out.open("a") as file:
                file.write(json.dumps(cell) + "\n")
            print(progress(cell), file=sys.stderr, flush=True)
    groups.close()
    distributed.destroy_process_group()


# Results -----------------------------------------------------------------------------------------------------


def shipped(cell: Cell) -> list[str]:
    return [name for name in cell["seconds"] if name.startswith("torch")]


def best_shipped(cell: Cell) -> str:
    return min(shipped(cell), key=lambda name: cell["seconds"][name])


def gain(cell: Cell, arm: str = AUTO, *, without_separable: bool = False) -> float:
    """How many times as fast as the best that torch ships."""
    them = [one for one in shipped(cell) if not (without_separable and "separable" in one)]
    best: float = min(cell["seconds"][one] for one in them)
    return best / float(cell["seconds"][arm])


def off_prediction(cell: Cell, arm: str = AUTO) -> float:
    return float(cell["seconds"][arm] / cell["predicted"][arm]) - 1


def named(cell: Cell) -> str:
    kind = f"emulated, {1e3 * cell['pass_seconds']:g} ms slept for each pass" if cell["is_emulated"] else "real compute"
    return f"{cell['ranks']} ranks, {cell['layers']} layers, {cell['microbatches']} microbatches ({kind})"


def progress(cell: Cell) -> str:
    best = best_shipped(cell)
    return (
        f"{named(cell)}: {best} {1e3 * cell['seconds'][best]:.0f} ms, {AUTO} {1e3 * cell['seconds'][AUTO]:.0f} ms, "
        f"{gain(cell):.2f}x, {100 * off_prediction(cell):+.1f} % off its prediction; load {cell['load']:.1f}"
    )


def table(cell: Cell) -> str:
    lines = [f"### {named(cell)}", "", f"Ideal {1e3 * cell['ideal']:.0f} ms; load {cell['load']:.1f}.", ""]
    head = ["arm", "ms", "least", "efficiency", "x best of torch", "predicted ms", "measured / predicted"]
    lines += ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    best = best_shipped(cell)
    for name, seconds in cell["seconds"].items():
        row = [f"**{name}**" if name == best else name, f"{1e3 * seconds:.0f}", f"{1e3 * min(cell['every'][name]):.0f}"]
        row += [f"{cell['ideal'] / seconds:.2f}", f"{gain(cell, name):.2f}"]
        predicted = cell["predicted"].get(name)
        row += [f"{1e3 * predicted:.0f}", f"{seconds / predicted:.3f}"] if predicted else ["", ""]
        row[0] += "" if name in cell["kept"] else " (first round only)"
        lines.append("| " + " | ".join(row) + " |")
    plans = [f"- {name}: {plan}" for name, plan in cell["plans"].items() if name in (FAST_FORWARD, AUTO)]
    return "\n".join([*lines, "", *plans, ""])


def bars(cells: list[Cell]) -> list[tuple[str, bool | None]]:
    """What is asked for, and whether it holds; None if it was not measured."""
    emulated = [cell for cell in cells if cell["is_emulated"]]
    real = [cell for cell in cells if not cell["is_emulated"]]
    found: list[tuple[str, bool | None]] = []
    small = [c for c in emulated if (c["ranks"], c["microbatches"], c["layers"]) == (4, 4, 16)]
    ratio = [cell["seconds"]["torch GPipe"] / cell["seconds"][FAST_FORWARD] for cell in small]
    text = f"emulated, 4 ranks, 4 microbatches, 16 layers: fast_forward + modulo {MODULO_BAR:g} times as fast as GPipe"
    found.append((f"{text}: {ratio[0]:.2f}" if ratio else text, ratio[0] >= MODULO_BAR if ratio else None))

    def everywhere(text: str, among: list[Cell], value: Any, is_met: Any) -> None:
        values = [f"{value(cell):.3f}{'' if is_met(value(cell)) else ' (missed)'}" for cell in among]
        is_all = all(is_met(value(cell)) for cell in among)
        found.append((text + (f": {', '.join(values)}" if values else ""), is_all if among else None))

    auto = f"emulated: auto {AUTO_BAR:g} times as fast as the best that torch ships"
    everywhere(f"{auto}, separable layers", emulated, gain, lambda x: x >= AUTO_BAR)
    whole = lambda cell: gain(cell, without_separable=True)  # noqa: E731
    everywhere(f"{auto}, whole layers", emulated, whole, lambda x: x >= AUTO_BAR)
    everywhere(
        "emulated: auto within 5 % of its prediction", emulated, off_prediction, lambda x: abs(x) <= PREDICTION_BAR
    )
    everywhere("real: auto never below 0.97 times the best of torch", real, gain, lambda x: x >= REAL_BAR)
    spread = lambda cell: max(cell["losses"].values()) / min(cell["losses"].values()) - 1  # noqa: E731
    everywhere("all arms have the same first loss, to 1e-5", cells, spread, lambda x: x <= 1e-5)
    return found


# The picture -------------------------------------------------------------------------------------------------

LEFT, WIDTH, ROW = 260, 560, 20


def draw(cells: list[Cell]) -> str:
    """Efficiency of the best form of each schedule, cell after cell."""
    parts, y = [], 30
    for cell in cells:
        parts.append(f'<text x="16" y="{y}" font-weight="bold">{named(cell)}</text>')
        y += 10
        names: dict[str, str] = {}
        for name in sorted(cell["seconds"], key=lambda name: cell["seconds"][name]):
            names.setdefault(schedule_of(name), name)
        for name in names.values():
            share = cell["ideal"] / cell["seconds"][name]
            color = "#0072b2" if name.startswith("ours") else "#bbb"
            shown = name.removesuffix(", separable")
            parts.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{shown}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{share * WIDTH:.1f}" height="{ROW - 3}" fill="{color}"/>')
            label = f"{100 * share:.0f} %, {1e3 * cell['seconds'][name]:.0f} ms"
            parts.append(f'<text x="{LEFT + share * WIDTH + 6:.1f}" y="{y + 14}">{label}</text>')
            y += ROW
        y += 34
    heading = "Efficiency: what the busiest rank computes / measured time of a step"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 130} {y}" width="{LEFT + WIDTH + 130}" '
        f'height="{y}" font-family="sans-serif" font-size="13" fill="#222" role="img">\n<title>{heading}</title>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


# The command -------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8])
    parser.add_argument("--layers", nargs="+", type=int, help="one for each of --ranks; 4 on a rank if not given")
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--compute", choices=["emulated", "real", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1, help="of a turn")
    parser.add_argument("--pass-ms", type=float, default=10, help="of each of a layer's passes, emulated")
    parser.add_argument("--json", type=Path, help="write every measurement")
    parser.add_argument("--plot", type=Path, help="write a picture, as SVG")
    parser.add_argument("--quick", action="store_true", help="4 ranks, 16 layers, 4 microbatches, emulated; 3 rounds")
    options = parser.parse_args()
    if options.quick:
        options.ranks, options.layers, options.microbatches = [4], [16], [4]
        options.compute, options.rounds = "emulated", 3
    options.layers = options.layers or [4 * number for number in options.ranks]
    if len(options.layers) != len(options.ranks):
        parser.error(
            f"--layers has {len(options.layers)} numbers; expected {len(options.ranks)}, one for each of --ranks"
        )
    return options


def run_all(options: argparse.Namespace) -> list[Cell]:
    """Processes are started once for each number of ranks."""
    runs: list[tuple[int, list[Task]]] = []
    if options.compute != "real":
        for size, num_layers in zip(options.ranks, options.layers, strict=True):
            runs.append((size, [Task(num_layers, m, options.pass_ms / 1e3) for m in options.microbatches]))
    if options.compute != "emulated":
        runs.append((REAL_RANKS, [Task(REAL_LAYERS, m, 0.0) for m in options.microbatches if m <= REAL_MOST]))
    os.environ.update(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cells"
        for size, tasks in runs:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            spawn(rank_main, (size, port, options, tasks, out), nprocs=size)  # type: ignore[no-untyped-call]
        return [json.loads(line) for line in out.read_text().splitlines()]


def main() -> None:
    options = arguments()
    begin = time.perf_counter()
    cells = run_all(options)
    minutes = (time.perf_counter() - begin) / 60
    print(" ".join(["`python benchmarks/pipeline.py", *sys.argv[1:]]) + "`")
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, gloo; {options.rounds} rounds; {minutes:.1f} minutes\n")
    print("\n".join(table(cell) for cell in cells))
    results = bars(cells)
    for text, is_met in results:
        print(f"- {'not measured' if is_met is None else 'met' if is_met else 'NOT met'}: {text}")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "cells": cells}, indent=1))
    if options.plot:
        options.plot.write_text(draw(cells))
    if any(is_met is False for _, is_met in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
