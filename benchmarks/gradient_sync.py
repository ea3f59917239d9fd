"""Claim: where gradients take about as long as compute, "auto" is faster than the best bucket size of DDP, bit for bit.

    python benchmarks/gradient_sync.py [--models ...] [--ratios ...] [--compute emulated|real|both] [--clip no|yes|both]
                                       [--steps N] [--rounds N] [--pass-ms MS] [--json FILE] [--svg FILE] [--loopback]

link      Two network namespaces on this machine, a rank on a core in each, and a link between them that is made as slow
          as the ratio says: seconds of one all-reduce of all gradients / seconds of a step without communication. Both
          are measured, the first again in every round. Needs root and iproute2; without them nothing is measured,
          unless `--loopback` says that a link that is not slow will do.
compute   "emulated": an accelerator that sleeps, see `sync_models.py`; "real": the CPU. There the sum of the gradients
          takes the core from compute, which hides overlap.
arms      DDP with buckets of 1, 4 and 25 MB. Ours by hand: updates in the next forward and k weight gradients last,
          with messages of 1 MB. Ours with "auto", once it has settled. With clipping by norm nothing can cross into the
          next forward, so there is only "auto", and "overlap": "auto" with `overlap_clipping`, whose sums are made in
          two halves with the norm between them. All train the same model in the same two processes, and take turns,
          round by round, back and forth. Medians over rounds, means over ranks; two steps of each window are not
          counted.
bound     The longer of compute and communication.
clipping  The limit is far above the norm, so that gradients are measured and multiplied by one.
equal     Whether the weights of all arms have the same bits on both ranks after the same steps. "auto" has taken more
          of them, to settle: a DDP arm catches up.

Exit status 1 if a bar is not met.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sync_link import Hosts, NoLinkError, end_with_parent, shape
from sync_models import MODELS, RECORDER, TIMEOUT, Arm, DDPArm, Emulated, OurArm, Task
from torch import Tensor, distributed

from lightning_gpufeed.sync.candidates import PlanOptions
from lightning_gpufeed.sync.ranks import Ranks

RATIOS = [0.3, 0.6, 0.9, 1.2, 2.4]
DDP_ARMS = {"DDP 1": 1, "DDP 4": 4, "DDP 25": 25}
GAIN_BARS = [("uniform", 0.9, 1.12), ("uniform", 1.2, 1.15), ("head-heavy", 0.6, 1.15)]
PREDICTION_BAR, BOUND_BAR, LEAST_BAR = 0.05, 0.85, 0.97
PROBE_RATE = 1e9
NUM_RECORDED = 6

Cell = dict[str, Any]
"""What was measured for one model, kind of compute, ratio, with or without clipping."""


# On a rank ---------------------------------------------------------------------------------------------------


def mean(seconds: float) -> float:
    """Over ranks."""
    both = torch.tensor([seconds], dtype=torch.float64)
    distributed.all_reduce(both)
    return both.item() / distributed.get_world_size()


def window(arm: Arm, num_steps: int) -> float:
    """Seconds of a step."""
    distributed.barrier()
    arm.step()
    arm.step()
    begin = time.perf_counter()
    for _ in range(num_steps):
        arm.step()
    seconds = (time.perf_counter() - begin) / num_steps
    arm.finish()
    return mean(seconds)


def all_reduce_seconds(tensor: Tensor) -> float:
    distributed.barrier()
    begin = time.perf_counter()
    distributed.all_reduce(tensor)
    return mean(time.perf_counter() - begin)


def set_ratio(gradients: Tensor, seconds: float, efficiency: float, is_loopback: bool) -> float:
    """Make the link so slow that an all-reduce of all gradients takes that long; its rate in bits per second."""
    if is_loopback:
        return 0.0
    num_bits = 32 * gradients.numel()
    rate = num_bits / (efficiency * seconds)
    for _ in range(3):
        shape(rate)
        all_reduce_seconds(gradients)  # the first message at a new rate is not like the others
        found = statistics.median(all_reduce_seconds(gradients) for _ in range(3))
        if abs(found / seconds - 1) < 0.03:
            break
        rate = min(rate * found / seconds, 4 * num_bits / (efficiency * seconds))
    return rate


def make_arms(task: Task, ranks: Ranks, is_clipped: bool) -> dict[str, Arm]:
    arms: dict[str, Arm] = {"alone": Arm(task, is_clipped)}
    arms |= {name: DDPArm(task, is_clipped, size) for name, size in DDP_ARMS.items()}
    for k in () if is_clipped else (0, task.num_layers // 2, task.num_layers):
        arms[f"k = {k}"] = OurArm(task, is_clipped, ranks, PlanOptions(k, True, 1 << 20))
    if is_clipped:
        arms["overlap"] = OurArm(task, is_clipped, ranks, PlanOptions(overlap_clipping=True))
    return arms | {"auto": OurArm(task, is_clipped, ranks, PlanOptions())}


def are_equal(arms: dict[str, Arm]) -> bool:
    """All arms that reduce gradients, after the same steps, on both ranks."""
    shape(None)
    reference, *others = sorted((arm for name, arm in arms.items() if name != "alone"), key=lambda arm: arm.num_steps)
    for module in reference.model.modules():
        if isinstance(module, Emulated):
            module.work.seconds = 0.0
    digests = []
    for arm in others:
        while reference.num_steps < arm.num_steps:
            reference.step()
        digests.append((reference.digest(), arm.digest()))
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, digests)
    return all(first == second for first, second in digests) and all(one == digests for one in found)


def record(arm: DDPArm | OurArm) -> dict[str, Any]:
    """When what ran, in steps of which the second and later ones are steady."""
    arm.warm_up()
    begins = []
    with arm.recorded():
        arm.step()
        arm.step()
        RECORDER.spans.clear()
        RECORDER.is_on = True
        for _ in range(NUM_RECORDED):
            begins.append(time.perf_counter())
            arm.step()
        begins.append(time.perf_counter())
        arm.finish()
        distributed.barrier()
        RECORDER.is_on = False
    return {"begins": begins, "spans": list(RECORDER.spans)}


def measure(task: Task, ranks: Ranks, ratio: float, is_clipped: bool, efficiency: float, options: Any) -> Cell:
    arms = make_arms(task, ranks, is_clipped)
    arms["alone"].warm_up()
    gradients = torch.zeros(task.gradient_bytes // 4)
    compute = window(arms["alone"], options.steps)
    rate = set_ratio(gradients, ratio * compute, efficiency, options.loopback)
    for arm in arms.values():
        arm.warm_up()
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    communication = []
    for number in range(options.rounds):
        names = list(arms)
        communication.append(all_reduce_seconds(gradients))
        for name in names if number % 2 == 0 else reversed(names):
            seconds[name].append(window(arms[name], options.steps))
        communication.append(all_reduce_seconds(gradients))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    auto = arms["overlap" if is_clipped else "auto"]
    assert isinstance(auto, OurArm)
    recorded = {}
    if options.compute == "emulated" and not is_clipped:
        best = min(DDP_ARMS, key=lambda name: medians[name])
        recorded = {best: record(DDPArm(task, False, DDP_ARMS[best])), "auto": record(auto)}
    cell = {
        "ratio": ratio,
        "is_clipped": is_clipped,
        "rate": rate,
        "compute": medians.pop("alone"),
        "communication": statistics.median(communication),
        "seconds": medians,
        "every": seconds,
        "predicted": auto.predicted_seconds,
        "plan": auto.plan_text,
        "messages": auto.messages,
        "is_equal": are_equal(arms),
        "recorded": recorded,
    }
    for arm in arms.values():
        arm.close()
    return cell


def rank_main(options: argparse.Namespace) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=TIMEOUT)
    task = Task(options.models[0], options.compute == "emulated", options.pass_ms / 1e3)
    ranks = Ranks(TIMEOUT)
    gradients = torch.zeros(task.gradient_bytes // 4)
    shape(PROBE_RATE)
    probe = statistics.median(all_reduce_seconds(gradients) for _ in range(4))
    efficiency = 8 * task.gradient_bytes / probe / PROBE_RATE
    for is_clipped in {"no": [False], "yes": [True], "both": [False, True]}[options.clip]:
        for ratio in options.ratios:
            cell = measure(task, ranks, ratio, is_clipped, efficiency, options)
            if not ranks.rank:
                cell |= {"model": options.models[0], "compute_kind": options.compute, "bytes": task.gradient_bytes}
                with options.out.open("a") as out:
                    out.write(json.dumps(cell) + "\n")
                print(progress(cell), file=sys.stderr, flush=True)
    distributed.destroy_process_group()


# Results -----------------------------------------------------------------------------------------------------


def best_ddp(cell: Cell) -> float:
    return min(cell["seconds"][name] for name in DDP_ARMS)


def ours(cell: Cell) -> float:
    """With all that it can do."""
    seconds: float = cell["seconds"]["overlap" if cell["is_clipped"] else "auto"]
    return seconds


def gain(cell: Cell) -> float:
    return best_ddp(cell) / ours(cell)


def bound_share(cell: Cell) -> float:
    return max(cell["compute"], cell["communication"]) / ours(cell)


def measured_ratio(cell: Cell) -> float:
    return cell["communication"] / cell["compute"]


def named(cell: Cell) -> str:
    clip = " clipped" if cell["is_clipped"] else ""
    return f"{cell['model']} {cell['compute_kind']}{clip} {cell['ratio']:g}"


def progress(cell: Cell) -> str:
    steps = ", ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in cell["seconds"].items())
    return f"{named(cell)}: {steps} ms; {gain(cell):.2f}x; equal: {'yes' if cell['is_equal'] else 'NO'}"


def off_prediction(cell: Cell) -> float | None:
    return ours(cell) / cell["predicted"] - 1 if cell["predicted"] else None


def device_waits(recorded: dict[str, Any]) -> float:
    """Seconds of a recorded step in which the device does nothing."""
    begin, end = recorded["begins"][1], recorded["begins"][-1]
    busy = sum(b - a for lane, _, _, a, b in recorded["spans"] if lane == "device" and a >= begin and b <= end)
    return (end - begin - busy) / (len(recorded["begins"]) - 2)


def table(cells: list[Cell]) -> str:
    arms = list(cells[0]["seconds"])
    head = ["asked", "ratio", "Mbit/s", "compute", "comm.", *arms, "times best DDP", "share of bound"]
    head += ["predicted", "measured to it", "device idle, DDP / auto", "equal"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for cell in cells:
        off = off_prediction(cell)
        row = [f"{cell['ratio']:g}", f"{measured_ratio(cell):.2f}", f"{cell['rate'] / 1e6:.0f}"]
        row += [f"{1e3 * cell[name]:.0f}" for name in ("compute", "communication")]
        row += [f"{1e3 * cell['seconds'][name]:.0f}" for name in arms]
        row += [f"**{gain(cell):.2f}**", f"{100 * bound_share(cell):.0f} %"]
        row += ["–", "–"] if off is None else [f"{1e3 * cell['predicted']:.0f}", f"{100 * off:+.1f} %"]
        row += [" / ".join(f"{1e3 * device_waits(one):.0f}" for one in cell["recorded"].values()) or "–"]
        lines.append("| " + " | ".join([*row, "yes" if cell["is_equal"] else "**no**"]) + " |")
    plans = [f"- {cell['ratio']:g}: {cell['plan']}" for cell in cells]
    return "\n".join([*lines, "", "Plans of auto:", *plans])


def bars(cells: list[Cell]) -> list[tuple[str, bool | None]]:
    """What is asked for, and whether it holds; None if it was not measured."""
    plain = [cell for cell in cells if cell["compute_kind"] == "emulated" and not cell["is_clipped"]]
    found: list[tuple[str, bool | None]] = []
    for model, ratio, bar in GAIN_BARS:
        one = next((cell for cell in plain if (cell["model"], cell["ratio"]) == (model, ratio)), None)
        text = f"{model}, emulated, {ratio:g}: auto {bar:g} times as fast as the best DDP"
        found.append((text if one is None else f"{text}: {gain(one):.3f}", None if one is None else gain(one) >= bar))

    def everywhere(text: str, among: list[Cell], value: Any, is_met: Any) -> None:
        missed = [f"{named(cell)} ({value(cell):.3g})" for cell in among if not is_met(cell)]
        found.append((text + (f"; not at {', '.join(missed)}" if missed else ""), not missed if among else None))

    told = [cell for cell in plain if cell["predicted"]]
    far = "emulated: auto within 5 % of its prediction"
    everywhere(far, told, off_prediction, lambda cell: abs(off_prediction(cell) or 0.0) <= PREDICTION_BAR)
    everywhere("emulated: auto at 85 % of the bound", plain, bound_share, lambda cell: bound_share(cell) >= BOUND_BAR)
    everywhere("never below 0.97 times the best DDP", cells, gain, lambda cell: gain(cell) >= LEAST_BAR)
    everywhere("weights equal, bit for bit", cells, measured_ratio, lambda cell: cell["is_equal"])
    return found


# The picture -------------------------------------------------------------------------------------------------

LEFT, WIDTH, ROW, TOP = 72, 812, 30, 64
COLORS = {"F": "#56b4e9", "I": "#e69f00", "W": "#009e73", "bucket": "#cc79a7"}
MEANING = {"F": "forward", "I": "input gradient", "W": "weight gradient", "bucket": "all-reduce"}


def spans_of_step(recorded: dict[str, Any]) -> tuple[float, list[tuple[str, str, list[int], float, float]]]:
    """The recorded step of middle length: how long it took, and spans in it in seconds from its begin."""
    steps = sorted(
        zip(recorded["begins"][1:], recorded["begins"][2:], strict=False), key=lambda step: step[1] - step[0]
    )
    begin, end = steps[len(steps) // 2]
    found, link_free = [], 0.0
    for lane, what, layers, a, b in sorted(recorded["spans"], key=lambda span: span[4]):
        if lane == "link":  # on its way from when the one before it had arrived
            a, link_free = max(a, link_free), b
        a, b = max(a, begin), min(b, end)
        if a < b:
            found.append((lane, what, layers, a - begin, b - begin))
    return end - begin, found


def draw(cell: Cell) -> str:
    """One step with the best DDP bucket, and one with auto, as recorded."""
    steps = {name: spans_of_step(recorded) for name, recorded in cell["recorded"].items()}
    scale = WIDTH / (1.02 * max(seconds for seconds, _ in steps.values()))
    parts, y = [], TOP
    for name, (seconds, spans) in steps.items():
        title = "DistributedDataParallel, its best bucket size" if name != "auto" else "lightning_gpufeed, auto"
        step = f"a step takes {1e3 * seconds:.0f} ms"
        parts.append(f'<text x="{LEFT}" y="{y - 10}"><tspan font-weight="bold">{title}</tspan>: {step}</text>')
        for row, lane in enumerate(("device", "link")):
            top = y + row * (ROW + 4)
            parts.append(f'<text x="{LEFT - 8}" y="{top + 20}" text-anchor="end">{lane}</text>')
            parts.append(f'<rect x="{LEFT}" y="{top}" width="{seconds * scale:.1f}" height="{ROW}" fill="#eee"/>')
            parts += [_span(span, scale, top) for span in spans if span[0] == lane]
        end = LEFT + seconds * scale
        parts.append(f'<path d="M{end:.1f} {y - 6}v{2 * ROW + 16}" stroke="#222" stroke-width="2"/>')
        y += 2 * ROW + 64
    bottom = y - 44
    for tick in range(0, int(1e3 * WIDTH / scale) + 1, 100):
        x = LEFT + tick / 1e3 * scale
        parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="#222"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle">{tick}</text>')
    parts.append(f'<path d="M{LEFT} {bottom}H{LEFT + WIDTH}" stroke="#222"/>')
    parts.append(f'<text x="{LEFT + WIDTH}" y="{bottom + 38}" text-anchor="end">time, ms</text>')
    x = LEFT
    for what, meaning in MEANING.items():
        parts.append(f'<rect x="{x}" y="{bottom + 28}" width="14" height="14" fill="{COLORS[what]}"/>')
        parts.append(f'<text x="{x + 20}" y="{bottom + 40}">{meaning}</text>')
        x += 36 + 7 * len(meaning)
    parts.append(f'<rect x="{x}" y="{bottom + 28}" width="14" height="14" fill="#eee"/>')
    parts.append(f'<text x="{x + 20}" y="{bottom + 40}">idle, or the host</text>')
    width, height = LEFT + WIDTH + 16, bottom + 56
    heading = (
        f"{MODELS[cell['model']].what}, emulated accelerator, communication / compute = {measured_ratio(cell):.2f}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="#222" role="img">\n'
        f"<title>One step on one of two ranks: {heading}</title>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n'
        f'<text x="{LEFT}" y="26" font-size="15" font-weight="bold">{heading}</text>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _span(span: tuple[str, str, list[int], float, float], scale: float, top: int) -> str:
    _, what, layers, begin, end = span
    x, width = LEFT + begin * scale, (end - begin) * scale
    box = f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{ROW}" fill="{COLORS[what]}" stroke="#fff"/>'
    name = str(layers[0]) if len(layers) == 1 else f"{layers[0]}–{layers[-1]}"
    if width < 7 * len(name) + 2:
        return box
    return f'{box}<text x="{x + width / 2:.1f}" y="{top + 20}" text-anchor="middle" font-size="11">{name}</text>'


# The command -------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS)
    parser.add_argument("--compute", choices=["emulated", "real", "both"], default="both")
    parser.add_argument("--clip", choices=["no", "yes", "both"], default="both", help="clip the norm of gradients")
    parser.add_argument("--steps", type=int, default=8, help="of a window")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pass-ms", type=float, default=120, help="of forward, input and weight gradients, emulated")
    parser.add_argument("--json", type=Path, help="write every measurement")
    parser.add_argument("--svg", type=Path, help="write a picture of a step of the first emulated model")
    parser.add_argument("--loopback", action="store_true", help="on one host, and with a link that is not slow")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # of a rank
    return parser.parse_args()


def run_all(options: argparse.Namespace) -> list[Cell]:
    kinds = ["emulated", "real"] if options.compute == "both" else [options.compute]
    same = ["--clip", options.clip, "--steps", str(options.steps), "--rounds", str(options.rounds)]
    same += ["--pass-ms", str(options.pass_ms), "--ratios", *map(str, options.ratios)]
    same += ["--loopback"] if options.loopback else []
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory() as folder, Hosts(options.loopback) as hosts:
        for kind in kinds:
            for model in options.models:
                out = Path(folder) / f"{kind}-{model}"
                which = ["--models", model, "--compute", kind, "--out", str(out)]
                hosts.run([sys.executable, __file__, *which, *same], timeout_seconds=3600)
                cells += [json.loads(line) for line in out.read_text().splitlines()]
    return cells


def main() -> None:
    options = arguments()
    if options.loopback:
        options.ratios = [0.0]
    if options.out:
        rank_main(options)
        return
    begin = time.perf_counter()
    try:
        cells = run_all(options)
    except NoLinkError as error:
        print(f"Skipped: no slow link can be made here: {error}. With --loopback a link that is not slow is measured.")
        return
    except KeyboardInterrupt:
        raise SystemExit("Interrupted; namespaces and processes are removed.") from None
    minutes = (time.perf_counter() - begin) / 60
    print(" ".join(["`python benchmarks/gradient_sync.py", *sys.argv[1:]]) + "`")
    print(f"torch {torch.__version__}, {os.cpu_count()} cores, gloo; ms per step; {minutes:.0f} minutes in all\n")
    for kind in ("emulated", "real"):
        for model in MODELS:
            for is_clipped in (False, True):
                group = [
                    c for c in cells if (c["compute_kind"], c["model"], c["is_clipped"]) == (kind, model, is_clipped)
                ]
                if group:
                    what = f"{MODELS[model].what}; {group[0]['bytes'] / 1e6:.0f} MB of gradients"
                    print(
                        f"### {model}, {kind} compute{', clipped' if is_clipped else ''}\n\n{what}\n\n{table(group)}\n"
                    )
    results = [] if options.loopback else bars(cells)  # they are about slow links
    for text, is_met in results:
        print(f"- {'not measured' if is_met is None else 'met' if is_met else 'NOT met'}: {text}")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "cells": cells}, indent=1))
    drawn = [cell for cell in cells if cell["recorded"]]
    if options.svg and drawn:
        options.svg.write_text(draw(min(drawn, key=lambda cell: abs(cell["ratio"] - 0.9))))
    if any(is_met is False for _, is_met in results):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
