"""Simulated, not measured: how far a pipeline scales with each schedule, from 8 to 48 GPUs, over three links.

    python benchmarks/pipeline_scaling.py [--plot FILE.svg]

weak      BERT-like: 12, 24, 36, 48 blocks of width 1024 on 8, 16, 24, 32 GPUs of 30 TFLOP/s (V100 class, 16 bits).
          Batches as in the scripts of the paper's authors: 480 samples in 30 microbatches, 320 in 32, 380 in 38, 320 in
          40, each of 128 tokens. That is one block and a half for each GPU, so a block may be cut in two: attention, a
          third of it, and MLP.
strong    GPT-like: 96 blocks of width 4096 (19 billion weights) on 8 to 48 GPUs of 100 TFLOP/s (A100 class), always 48
          microbatches of 512 tokens. Of this size because it fits 8 GPUs of 80 GB: 16 bytes for each weight, and all
          activations of a batch, are 77 GB on each. Cut between blocks only.
layers    Forward, input and weight gradient take equally long: two operations for each weight and token, at the rate
          above, which holds for any size of a microbatch. Embedding, head, attention's own products (which grow with
          the square of a sequence) and the optimizer are left out. Activations travel in 16 bits.
links     NVLink 300 GB/s, Ethernet 25 and 10 Gbit/s; 5 us for a message on the first, 50 us on the others. All
          neighbours have the same link. A GPU sends one message after the other while it computes: where a link is too
          slow for so many stages, they queue.
arms      GPipe, 1F1B and fast-forward with one stage on each GPU, ZB-V with two; interleaved and fast-forward + modulo
          with two or more, zero bubble with any number: the best of those that `search.best` tries. "auto" is the best
          of all.
figures   Times as fast as one GPU with the same model and batch, if it fitted; times as fast as GPipe; idle share
          of all GPUs; v, stages on each GPU. There is no data parallel part: each GPU has its own stages.

About a minute on one core. Nothing here is a claim about a machine: `pipeline.py` measures.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning_gpufeed.cli.plan import transformer_layers
from lightning_gpufeed.pipeline.search import best
from lightning_gpufeed.pipeline.simulate import Send, StageCosts

BYTES_PER_VALUE = 2
PAPER = (1.41, 1.99)
"""What Oh et al., EuroSys 2022, say for a pipeline, in their abstract."""


class Model(NamedTuple):
    """A model and its batch on some GPUs."""

    name: str
    num_blocks: int
    hidden: int
    teraflops: float
    num_ranks: int
    num_microbatches: int
    num_tokens: int  # of a microbatch
    is_halved: bool  # whether a block can be cut in two


class Link(NamedTuple):
    """Between neighbours."""

    name: str
    bytes_per_second: float
    latency_seconds: float


class Arm(NamedTuple):
    """A way to run a step, and its line."""

    name: str
    is_one: Callable[[str, int], bool]  # by the name of a schedule and the stages on a rank
    color: str
    dash: str


class Result(NamedTuple):
    """One arm of one cell."""

    speedup: float
    gain: float
    bubble_ratio: float
    num_virtual: int
    peak_bytes: int
    schedule: str


def bert(num_blocks: int, num_ranks: int, num_samples: int, num_microbatches: int) -> Model:
    tokens = 128 * num_samples // num_microbatches
    return Model("BERT-like", num_blocks, 1024, 30.0, num_ranks, num_microbatches, tokens, is_halved=True)


def gpt(num_ranks: int) -> Model:
    return Model("GPT-like", 96, 4096, 100.0, num_ranks, num_microbatches=48, num_tokens=512, is_halved=False)


WEAK = [bert(12, 8, 480, 30), bert(24, 16, 320, 32), bert(36, 24, 380, 38), bert(48, 32, 320, 40)]
STRONG = [gpt(num_ranks) for num_ranks in (8, 16, 32, 48)]
FINE_TUNING = bert(24, 4, 96, 4)
SETS = {
    "Weak scaling: BERT-like, one block and a half for each GPU, 30 TFLOP/s": WEAK,
    "Strong scaling: GPT-like, 96 blocks of width 4096, 48 microbatches, 100 TFLOP/s": STRONG,
}
LINKS = [
    Link("NVLink, 300 GB/s", 300e9, 5e-6),
    Link("Ethernet, 25 Gbit/s", 25e9 / 8, 50e-6),
    Link("Ethernet, 10 Gbit/s", 10e9 / 8, 50e-6),
]
ARMS = [
    Arm("GPipe", lambda name, v: name == "gpipe" and v == 1, "#888888", "none"),
    Arm("1F1B", lambda name, _: name == "one_f_one_b", "#cc79a7", "6 3"),
    Arm("interleaved", lambda name, _: name == "interleaved", "#e69f00", "none"),
    Arm("zero bubble", lambda name, _: name == "zero_bubble", "#0072b2", "none"),
    Arm("ZB-V", lambda name, _: name == "zbv", "#d55e00", "none"),
    Arm("fast-forward", lambda name, v: name == "fast_forward" and v == 1, "#56b4e9", "none"),
    Arm("fast-forward + modulo", lambda name, v: name == "fast_forward" and v > 1, "#009e73", "none"),
    Arm("auto", lambda _name, _v: True, "#000000", "2 4"),
]

Results = dict[str, Result]
"""By the name of the arm."""


# The simulation ----------------------------------------------------------------------------------------------


def pieces(model: Model) -> list[StageCosts]:
    """What may be a stage, for one microbatch."""
    blocks = transformer_layers(model.num_blocks, model.hidden, model.num_tokens, model.teraflops, BYTES_PER_VALUE)
    found = []
    for block in blocks:
        for share in (1 / 3, 2 / 3) if model.is_halved else (1.0,):
            costs, size = block.costs, round(share * block.activation_bytes)
            seconds = (costs.forward_seconds, costs.input_grad_seconds, costs.weight_grad_seconds)
            found.append(StageCosts(*(share * one for one in seconds), size, size))
    return found


def simulate_cell(model: Model, link: Link) -> Results:
    """All arms of a model on a link."""
    layers = pieces(model)
    sends = Send(link.latency_seconds, model.hidden * model.num_tokens * BYTES_PER_VALUE / link.bytes_per_second)
    candidates = best(layers, sends, model.num_ranks, model.num_microbatches)
    compute = model.num_microbatches * sum(layer.compute_seconds for layer in layers)
    usual = next(one for one in candidates if (one.name, one.num_virtual) == ("gpipe", 1))
    results = {}
    for arm in ARMS:
        one = next(one for one in candidates if arm.is_one(one.name, one.num_virtual))  # the fastest comes first
        speedup = compute / one.step_seconds
        results[arm.name] = Result(
            speedup,
            usual.step_seconds / one.step_seconds,
            1 - speedup / model.num_ranks,
            one.num_virtual,
            one.peak_bytes,
            one.name.replace("_", " "),
        )
    return results


# Tables ------------------------------------------------------------------------------------------------------


def table(cells: dict[tuple[Model, Link], Results], models: Sequence[Model]) -> str:
    """Throughput and idle share of each arm."""
    lines = [
        "| link | GPUs | blocks | " + " | ".join(arm.name for arm in ARMS) + " |",
        "|---" * (3 + len(ARMS)) + "|",
    ]
    for link in LINKS:
        for model in models:
            found = cells[model, link]
            row = [link.name, str(model.num_ranks), str(model.num_blocks), *(_text(found, arm.name) for arm in ARMS)]
            lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def _text(found: Results, name: str) -> str:
    one = found[name]
    which = f"{one.schedule}, v={one.num_virtual}" if name == "auto" else f"v={one.num_virtual}"
    return f"{one.speedup:.1f}, {one.gain:.2f}x, {one.bubble_ratio:.0%}, {which}"


def memory_table(cells: dict[tuple[Model, Link], Results], models: Sequence[Model]) -> str:
    """Activations, which hardly depend on the link: for the first."""
    lines = ["| GPUs | " + " | ".join(arm.name for arm in ARMS) + " |", "|---" * (1 + len(ARMS)) + "|"]
    for model in models:
        sizes = [f"{cells[model, LINKS[0]][arm.name].peak_bytes / 1e9:.1f}" for arm in ARMS]
        lines.append("| " + " | ".join([str(model.num_ranks), *sizes]) + " |")
    return "\n".join(lines)


def paper_table(cells: dict[tuple[Model, Link], Results]) -> str:
    """Over GPipe, beside what the paper says."""
    lines = ["| simulated | " + " | ".join(link.name for link in LINKS) + " |", "|---" * (1 + len(LINKS)) + "|"]
    for model in [FINE_TUNING, *WEAK, *STRONG]:
        name = f"{model.name}, {model.num_blocks} blocks, {model.num_ranks} GPUs, {model.num_microbatches} microbatches"
        gains = []
        for link in LINKS:
            found = cells[model, link]
            gain, one = max((found[arm].gain, arm) for arm in ("fast-forward", "fast-forward + modulo"))
            gains.append(f"{gain:.2f}x (v={found[one].num_virtual})")
        lines.append("| " + " | ".join([name, *gains]) + " |")
    return "\n".join(lines)


DIFFERENCES = f"""Fast-forwarding, with modulo allocation where that is faster, over GPipe. The paper (Oh et al.,
EuroSys 2022) says {PAPER[0]} to {PAPER[1]}x, measured. Why a simulation gives something else:

- With F = I = W and sends that cost nothing GPipe takes 3 (M + P - 1), this 3 M + 2 (P - 1) / v: less than twice as
  fast while there are as many microbatches M as GPUs P, and hardly faster where M is far larger.
- The paper's runs are a whole system against its authors' own GPipe, which also placed ranks on GPUs in another order.
- Here a block can be cut in two at most, a third and two thirds, so of one block and a half some GPU has five thirds;
  and of three stages on each GPU, dealt out in turn to an even number, some GPUs get the three long ones.
- Here embedding and head, which the first and last GPU would have more, are left out.
- Here a small microbatch is as efficient as a large one, and starting a kernel or a message takes no time of the GPU.
- Here all neighbours have the same link; a machine has a fast one inside and a slow one outside."""


# The picture -------------------------------------------------------------------------------------------------

LEFT, TOP, PANEL_WIDTH, PANEL_HEIGHT = 62, 104, 176, 250
LABEL_WIDTH, ROW_GAP, LINE_HEIGHT = 184, 118, 15
LOWEST = 20


def draw(cells: dict[tuple[Model, Link], Results]) -> str:
    """A row of panels for each set of models, a column for each link."""
    width = LEFT + len(LINKS) * (PANEL_WIDTH + LABEL_WIDTH) - 24
    height = TOP + len(SETS) * (PANEL_HEIGHT + ROW_GAP) - 56
    parts = [
        f'<text x="{LEFT}" y="26" font-size="15" font-weight="bold">Pipelines on 8 to 48 GPUs: a simulation, not a '
        f"measurement</text>",
        f'<text x="{LEFT}" y="46">100 %: as many times as fast as one GPU as there are GPUs. "auto" (dotted) lies on '
        f"what it takes, 1F1B (dashed) over NVLink on GPipe.</text>",
    ]
    for row, (title, models) in enumerate(SETS.items()):
        top = TOP + row * (PANEL_HEIGHT + ROW_GAP)
        parts.append(f'<text x="{LEFT}" y="{top - 28}" font-weight="bold">{title}</text>')
        parts.append(
            f'<text transform="translate({LEFT - 42} {top + PANEL_HEIGHT / 2:g}) rotate(-90)" text-anchor="middle">'
            f"throughput, % of linear</text>"
        )
        for column, link in enumerate(LINKS):
            left = LEFT + column * (PANEL_WIDTH + LABEL_WIDTH)
            parts.append(_panel({model: cells[model, link] for model in models}, link, left, top))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="13" fill="#222" role="img">\n'
        f"<title>Simulated scaling of pipeline schedules over three links</title>\n"
        f'<rect width="{width}" height="{height}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _panel(found: dict[Model, Results], link: Link, left: int, top: int) -> str:
    counts = [model.num_ranks for model in found]
    bottom, right = top + PANEL_HEIGHT, left + PANEL_WIDTH

    def x(count: int) -> float:
        return left + 10 + (PANEL_WIDTH - 20) * (count - counts[0]) / (counts[-1] - counts[0])

    def y(percent: float) -> float:
        return bottom - PANEL_HEIGHT * (percent - LOWEST) / (100 - LOWEST)

    parts = [f'<text x="{left}" y="{top - 9}">{link.name}</text>']
    for percent in range(LOWEST, 101, 20):
        parts.append(f'<path d="M{left} {y(percent):.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 6}" y="{y(percent) + 4:.1f}" text-anchor="end">{percent}</text>')
    for count in counts:
        parts.append(f'<path d="M{x(count):.1f} {bottom}v5" stroke="#222"/>')
        parts.append(f'<text x="{x(count):.1f}" y="{bottom + 20}" text-anchor="middle">{count}</text>')
    parts.append(f'<text x="{left + PANEL_WIDTH / 2:g}" y="{bottom + 38}" text-anchor="middle">GPUs</text>')
    ends = []
    for arm in ARMS:
        points = [(x(m.num_ranks), y(100 * results[arm.name].speedup / m.num_ranks)) for m, results in found.items()]
        parts.append(_line(points, arm))
        ends.append((points[-1][1], arm))
    parts += _labels(ends, x(counts[-1]), right, top, bottom)
    frame = f'<rect x="{left}" y="{top}" width="{PANEL_WIDTH}" height="{PANEL_HEIGHT}" fill="none" stroke="#222"/>'
    return "\n".join([*parts, frame])


def _line(points: Sequence[tuple[float, float]], arm: Arm) -> str:
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{arm.color}"/>' for x, y in points)
    return f'<path d="{path}" fill="none" stroke="{arm.color}" stroke-width="2" stroke-dasharray="{arm.dash}"/>{dots}'


def _labels(ends: Sequence[tuple[float, Arm]], end: float, right: int, top: int, bottom: int) -> list[str]:
    """At the lines' ends, moved apart, each with a thread to its line."""
    places: list[float] = []
    ordered = sorted(ends, key=lambda pair: pair[0])
    for height, _ in ordered:
        places.append(max(height, places[-1] + LINE_HEIGHT if places else top + 4.0))
    for i, lowest in enumerate(bottom - 4.0 - LINE_HEIGHT * i for i in range(len(places))):
        places[-1 - i] = min(places[-1 - i], lowest)
    parts = []
    for (height, arm), place in zip(ordered, places, strict=True):
        thread = f"M{end + 4:.1f} {height:.1f}L{right + 10} {place:.1f}h6"
        parts.append(f'<path d="{thread}" fill="none" stroke="{arm.color}" stroke-dasharray="{arm.dash}"/>')
        parts.append(f'<text x="{right + 19}" y="{place + 4:.1f}" font-size="11.5">{arm.name}</text>')
    return parts


# The command -------------------------------------------------------------------------------------------------


def arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", type=Path, help="write the picture")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    begin = time.perf_counter()
    models = [FINE_TUNING, *WEAK, *STRONG]
    cells = {(model, link): simulate_cell(model, link) for model in models for link in LINKS}
    print("SIMULATED, not measured. A cell: times as fast as one GPU, times as fast as GPipe, idle, stages on a GPU\n")
    for title, of_set in SETS.items():
        print(f"### {title}\n\n{table(cells, of_set)}\n")
        print(f"Most activations on a GPU, GB, over {LINKS[0].name}:\n\n{memory_table(cells, of_set)}\n")
    print(f"### Beside the paper\n\n{paper_table(cells)}\n\n{DIFFERENCES}")
    print(f"\n{time.perf_counter() - begin:.0f} s on one of {os.cpu_count()} cores")
    if options.plot:
        options.plot.write_text(draw(cells))


if __name__ == "__main__":
    main()
