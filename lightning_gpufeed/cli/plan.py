"""`gpufeed plan`: which order of a step is the fastest for a model, from its layers' times. Needs no device."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_gpufeed.pipeline.draw import draw, draw_svg
from lightning_gpufeed.pipeline.search import Candidate, best
from lightning_gpufeed.pipeline.simulate import Send, StageCosts, Timeline, simulate
from lightning_gpufeed.sync.costs import LayerCosts, LinkCosts
from lightning_gpufeed.sync.plan import SyncPlan, conventional, reverse_first_k
from lightning_gpufeed.sync.search import search
from lightning_gpufeed.sync.simulate import simulate as simulate_sync

__all__ = ["PlanReport", "plan_model", "read_layers", "render_plan", "save_picture", "transformer_layers"]

_COLUMNS = ("name", "forward_ms", "input_grad_ms", "weight_grad_ms", "gradient_mb", "activation_mb")
_BUCKET_BYTES = (1 << 20, 4 << 20, 25 << 20)


@dataclass(frozen=True)
class Layer:
    """One layer, for one microbatch.

    Attributes:
        costs: Seconds and gradient bytes.
        activation_bytes: What it passes on, and keeps for backward.
    """

    costs: LayerCosts
    activation_bytes: int


@dataclass(frozen=True)
class SyncChoice:
    """An order of the data-parallel part.

    Attributes:
        name: What it is.
        seconds: Of a step, as simulated.
        plan: The order.
    """

    name: str
    seconds: float
    plan: SyncPlan


@dataclass(frozen=True)
class PlanReport:
    """What was found.

    Attributes:
        num_layers: Of the model.
        num_ranks: That share a model.
        num_microbatches: Of a batch.
        compute_seconds: Of a step on one device.
        schedules: Of the pipeline, best first; empty without one.
        orders: Of the data-parallel part; empty without one. The usual one is first, the best is last.
        communication_seconds: Of all gradients in one message.
        send: From one stage of the pipeline to the next.
    """

    num_layers: int
    num_ranks: int
    num_microbatches: int
    compute_seconds: float
    schedules: tuple[Candidate, ...]
    orders: tuple[SyncChoice, ...]
    communication_seconds: float
    send: Send

    def as_dict(self) -> dict[str, Any]:
        """For JSON.

        Returns:
            Plain values.
        """
        return {
            "num_layers": self.num_layers,
            "num_ranks": self.num_ranks,
            "num_microbatches": self.num_microbatches,
            "compute_seconds": self.compute_seconds,
            "communication_seconds": self.communication_seconds,
            "schedules": [
                {
                    "name": one.name,
                    "stages_per_rank": one.num_virtual,
                    "step_seconds": one.step_seconds,
                    "bubble_ratio": one.bubble_ratio,
                    "peak_bytes": one.peak_bytes,
                    "schedule": str(one.schedule),
                }
                for one in self.schedules
            ],
            "orders": [{"name": one.name, "step_seconds": one.seconds, "plan": str(one.plan)} for one in self.orders],
        }


def read_layers(path: str | Path) -> list[Layer]:
    """Read what was measured of each layer.

    Args:
        path: A CSV file with a line per layer in the order of forward, and the columns name, forward_ms, input_grad_ms,
            weight_grad_ms, gradient_mb and activation_mb, for one microbatch.

    Returns:
        The layers.

    Raises:
        ValueError: A column is missing, or a value is no number.
    """
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; expected {', '.join(_COLUMNS)}.")
        layers = []
        for number, row in enumerate(reader, start=2):
            try:
                forward, input_grad, weight_grad, gradient, activation = (float(row[name]) for name in _COLUMNS[1:])
            except (TypeError, ValueError):
                raise ValueError(
                    f"{path}, line {number}: expected a number in each of {', '.join(_COLUMNS[1:])}, got "
                    f"{', '.join(str(row[name]) for name in _COLUMNS[1:])}."
                ) from None
            seconds = forward / 1e3, input_grad / 1e3, weight_grad / 1e3
            layers.append(_layer(row["name"], *seconds, gradient * 1e6, activation * 1e6))
    if not layers:
        raise ValueError(f"{path} has no line but the names of the columns; expected one for each layer.")
    return layers


def transformer_layers(
    num_layers: int, hidden: int, num_tokens: int, teraflops: float, bytes_per_value: int = 2
) -> list[Layer]:
    """Blocks of a transformer by their sizes: attention and an MLP of four times the width.

    Args:
        num_layers: Blocks.
        hidden: Width.
        num_tokens: Of a microbatch.
        teraflops: What a device really does in a second.
        bytes_per_value: Of activations and gradients.

    Returns:
        The layers. Attention's own products, which grow with the square of the sequence, are left out.

    Source:
        Two operations for each weight and token, in forward, input gradient and weight gradient alike (Narayanan et
        al., 2021, section on FLOPs).
    """
    num_weights = 12 * hidden * hidden
    seconds = 2 * num_weights * num_tokens / (teraflops * 1e12)
    size = num_weights * bytes_per_value
    # A block keeps about as many values for backward as 16 times its width: inputs of its products and of its norms.
    return [
        _layer(f"block {i}", seconds, seconds, seconds, size, 16 * hidden * num_tokens * bytes_per_value)
        for i in range(num_layers)
    ]


def _layer(
    name: str, forward: float, input_grad: float, weight_grad: float, gradient_bytes: float, activation_bytes: float
) -> Layer:
    costs = LayerCosts(name, forward, input_grad, weight_grad, round(gradient_bytes), round(activation_bytes))
    return Layer(costs, round(activation_bytes))


def plan_model(
    layers: list[Layer],
    *,
    num_ranks: int = 1,
    num_microbatches: int = 1,
    link: LinkCosts | None = None,
    send_bytes: int | None = None,
    memory_cap_bytes: int | None = None,
) -> PlanReport:
    """Simulate every schedule of a pipeline, and the orders of data parallel training.

    Args:
        layers: Of the model, for one microbatch.
        num_ranks: That share a model; 1 for no pipeline.
        num_microbatches: Of a batch.
        link: What activations and gradients cross; None for one that takes no time, and no data-parallel part.
        send_bytes: That one stage sends to the next; None for the smallest activation.
        memory_cap_bytes: Most bytes of activations on a rank; None for no limit.

    Returns:
        What was found.

    Raises:
        ValueError: Numbers do not fit each other.
    """
    schedules: list[Candidate] = []
    send = Send()
    if num_ranks > 1:
        costs = [
            StageCosts(
                one.costs.forward_seconds,
                one.costs.input_grad_seconds,
                one.costs.weight_grad_seconds,
                one.activation_bytes,
                one.activation_bytes,
            )
            for one in layers
        ]
        size = send_bytes if send_bytes is not None else min(one.activation_bytes for one in layers) // 16
        if link is not None:
            send = Send(link.seconds(0), link.seconds(size) - link.seconds(0))
        schedules = best(costs, send, num_ranks, num_microbatches, memory_cap_bytes)
        if not schedules:
            raise ValueError(
                f"No schedule keeps activations below {memory_cap_bytes} bytes on each of {num_ranks} ranks; expected "
                "at least one to. Raise --memory-gb, or take more microbatches of fewer samples."
            )
    total = sum(one.costs.gradient_bytes for one in layers)
    orders = _orders(layers, num_microbatches, link, memory_cap_bytes) if link is not None and num_ranks == 1 else ()
    return PlanReport(
        len(layers),
        num_ranks,
        num_microbatches,
        num_microbatches * sum(one.costs.compute_seconds for one in layers),
        tuple(schedules),
        orders,
        0.0 if link is None else link.seconds(total),
        send,
    )


def _orders(
    layers: list[Layer], num_microbatches: int, link: LinkCosts, memory_cap_bytes: int | None
) -> tuple[SyncChoice, ...]:
    """Of the last microbatch; the others come between its step and the first forward."""
    costs = [one.costs for one in layers]
    earlier = (num_microbatches - 1) * sum(one.compute_seconds for one in costs)
    costs.append(LayerCosts("earlier microbatches", earlier, 0.0, 0.0, 0))

    def choice(name: str, plans: list[SyncPlan]) -> SyncChoice:
        seconds, plan = min(
            ((simulate_sync(plan, costs, link).step_seconds, plan) for plan in plans), key=lambda pair: pair[0]
        )
        return SyncChoice(name, seconds, plan)

    ks = range(len(layers) + 1)
    total = max(1, sum(one.gradient_bytes for one in costs))
    sizes = sorted({max(1, total >> halvings) for halvings in range(7)})
    reverse = choice("best reverse first-k", [reverse_first_k(costs, k, size) for k in ks for size in sizes])
    waiting = len(reverse.plan.deferred)
    return (
        choice("DDP, best bucket size", [conventional(costs, size) for size in _BUCKET_BYTES]),
        SyncChoice(f"reverse first-{waiting}", reverse.seconds, reverse.plan),
        choice("searched", [search(costs, link, memory_cap_bytes=memory_cap_bytes)]),
    )


def render_plan(report: PlanReport, layers: list[Layer], width: int = 36) -> str:
    """As text.

    Args:
        report: What was found.
        layers: That it was made from.
        width: Columns of the drawing.

    Returns:
        Lines.
    """
    lines = [
        f"{report.num_layers} layers, microbatches: {report.num_microbatches}, {_ms(report.compute_seconds)} of "
        "compute in a step on one device"
    ]
    if report.schedules:
        ideal = report.compute_seconds / report.num_ranks
        lines += ["", f"pipeline over {report.num_ranks} ranks; without a bubble a step would take {_ms(ideal)}", ""]
        lines.append(f"{'schedule':<14}{'stages a rank':>14}{'step':>12}{'bubble':>9}{'peak memory':>14}")
        for one in report.schedules:
            memory = f"{one.peak_bytes / 1e9:.3g} GB"
            lines.append(
                f"{one.name:<14}{one.num_virtual:>14}{_ms(one.step_seconds):>12}{one.bubble_ratio:>9.1%}{memory:>14}"
            )
        lines += ["", f"{report.schedules[0].name}, to scale:", ""]
        lines.append(draw(_timeline(report, layers), width))
    if report.orders:
        lines += ["", f"data parallel: all gradients take {_ms(report.communication_seconds)} on the link", ""]
        usual = report.orders[0].seconds
        for order in report.orders:
            lines.append(f"{order.name:<24}{_ms(order.seconds):>12}   {usual / order.seconds:.2f}x")
        waiting = report.orders[-1].plan.deferred
        lines += ["", f"weight gradients that wait: {', '.join(map(str, waiting)) or 'none'}"]
    return "\n".join(lines)


def save_picture(report: PlanReport, layers: list[Layer], path: str | Path) -> None:
    """Write the best schedule as a Gantt chart.

    Args:
        report: With a pipeline.
        layers: That it was made from.
        path: Of the SVG file.

    Raises:
        ValueError: There is no pipeline.
    """
    if not report.schedules:
        raise ValueError("There is no pipeline to draw; expected --ranks of 2 or more with --svg.")
    Path(path).write_text(draw_svg(_timeline(report, layers)))


def _timeline(report: PlanReport, layers: list[Layer]) -> Timeline:
    chosen = report.schedules[0]
    costs = [
        StageCosts(
            sum(layers[i].costs.forward_seconds for i in stage),
            sum(layers[i].costs.input_grad_seconds for i in stage),
            sum(layers[i].costs.weight_grad_seconds for i in stage),
        )
        for stage in chosen.stages
    ]
    return simulate(chosen.schedule, costs, report.send)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
