"""The tables of feed.py, from the answers of its arms."""

from __future__ import annotations

import dataclasses
import os
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import torch
from feed_arms import ARMS, Arm, Measured

TITLES = {
    "warm": "Warm: all in the page cache",
    "cold": "Cold: evicted before each epoch",
    "compressed": "Compressed chunks",
    "lock": "Beside a trainer that holds Python's lock",
    "remote": "A store that answers after 20 ms",
}
USUAL, BOUND = "DataLoader + h5py", "bound: plain read, 1 thread"
CHUNKS, IN_A_ROW = "h5py, whole chunks, 4096 in play", "h5py, all in a row"
DECODING = "bound: decoding alone, 2 threads"
REMOTE_USUAL, REMOTE_BOUND = "h5py over fsspec, as it comes", "bound: one request for all of it"


@dataclass
class Results:
    """Section -> what it was measured on -> what came of the arms."""

    sections: dict[str, dict[str, Measured]]
    sizes: dict[str, str]
    machine: str
    seconds: float
    rounds: int


def dump(results: Results) -> dict[str, Any]:
    return dataclasses.asdict(results)


def load(fields: dict[str, Any]) -> Results:
    sections = {
        section: {on: Measured(**measured) for on, measured in of.items()} for section, of in fields["sections"].items()
    }
    return Results(**{**fields, "sections": sections})


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in names if "model name" in line), platform.machine())
    return (
        f"{os.cpu_count()} cores ({model}), load {os.getloadavg()[0]:.1f} at the start; torch {torch.__version__}, "
        f"h5py {h5py.__version__} (HDF5 {h5py.version.hdf5_version}), Python {platform.python_version()}"
    )


# Numbers ---------------------------------------------------------------------------------------------------------


def rates(measured: Measured, name: str, unit: str = "bytes") -> list[float]:
    """Bytes, or samples, a second, in each round."""
    return [answer[unit] / answer["seconds"] for answer in measured.answers.get(name, [])]


def rate(measured: Measured, name: str, unit: str = "bytes") -> float | None:
    of = rates(measured, name, unit)
    return statistics.median(of) if of else None


def best(measured: Measured, *kinds: str, unit: str = "bytes") -> tuple[str, float] | None:
    """The fastest arm of some kinds."""
    found = [(rate(measured, arm.name, unit), arm.name) for arm in ARMS if arm.kind in kinds]
    of = [(value, name) for value, name in found if value is not None]
    return max(of)[::-1] if of else None


def ratio(value: float | None, to: float | None) -> float | None:
    return None if value is None or not to else value / to


def median_of(measured: Measured, name: str, what: str) -> float | None:
    values = [answer[what] for answer in measured.answers.get(name, []) if answer.get(what) is not None]
    return statistics.median(values) if values else None


def lost_steps(measured: Measured, name: str) -> float | None:
    """Which share of its steps a trainer loses beside an arm."""
    answers = measured.answers.get(name)
    if not answers:
        return None
    return 1 - statistics.median(answer["steps_beside"] / answer["steps_alone"] for answer in answers)


def show(value: float | None, digits: int = 2, unit: str = "") -> str:
    if value is None:
        return "–"
    if unit == "%":
        return f"{100 * value:.0f} %"
    digits = digits if abs(value) < 100 else 0
    return f"{value:,.{digits}f}"


# Tables ----------------------------------------------------------------------------------------------------------


def table(header: list[str], rows: list[list[str]]) -> str:
    """Columns lined up, in Markdown too."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, *rows]:
        cells = [cell.rjust(widths[n]) if n else cell.ljust(widths[n]) for n, cell in enumerate(row)]
        lines.append("| " + " | ".join(cells) + " |")
    lines.insert(1, "|" + "|".join("-" * (width + 1) + (":" if n else "-") for n, width in enumerate(widths)) + "|")
    return "\n".join(lines)


def ordered(measured: Measured) -> list[Arm]:
    """The arms that were measured; the bounds first, then the fastest."""
    names = {name: rate(measured, name) or 0.0 for name in measured.answers}
    arms = list({arm.name: arm for arm in ARMS if arm.name in names}.values())
    return sorted(arms, key=lambda arm: (not arm.is_bound, arm.reads, -names[arm.name]))


def disk_table(measured: Measured, is_cold: bool) -> str:
    usual, bound = rate(measured, USUAL), rate(measured, BOUND)
    header = ["", "GB/s", "k samples/s", "times usual", "of the bound", "classes", "CPU s an epoch", "s, least-most"]
    header += ["in memory before" if is_cold else "s to write", "size, GB"]
    rows = []
    for arm in ordered(measured):
        of = rate(measured, arm.name)
        assert of is not None
        samples = rate(measured, arm.name, "samples")
        seconds = [answer["seconds"] for answer in measured.answers[arm.name]]
        written = measured.converted[arm.name]
        rows.append(
            [
                arm.name,
                show(of / 1e9, 3 if of < 1e8 else 2),
                show(None if samples is None else samples / 1e3, 1),
                show(ratio(of, usual), 1),
                show(ratio(of, bound), unit="%"),
                show(median_of(measured, arm.name, "classes")),
                show(median_of(measured, arm.name, "cpu_seconds")),
                f"{min(seconds):.3f}-{max(seconds):.3f}",
                show(median_of(measured, arm.name, "cached_share"), unit="%")
                if is_cold
                else show(written["seconds"], 1),
                show(written["bytes"] / 1e9),
            ]
        )
    return table(header, rows)


def compressed_table(measured: Measured) -> str:
    row, bound = rate(measured, IN_A_ROW), rate(measured, BOUND)
    header = ["", "decoded GB/s", "samples/s", "times h5py in a row", "times usual", "classes", "CPU s for a GB"]
    usual = rate(measured, USUAL)
    rows = []
    for arm in ordered(measured):
        of = rate(measured, arm.name)
        assert of is not None
        cpu = [answer["cpu_seconds"] / answer["bytes"] * 1e9 for answer in measured.answers[arm.name]]
        is_stored = arm.name == BOUND
        name = f"{arm.name} (stored bytes)" if is_stored else arm.name
        samples = None if is_stored else rate(measured, arm.name, "samples")
        rows.append(
            [
                name,
                show(of / 1e9, 3 if of < 1e8 else 2),
                show(samples, 0),
                show(None if is_stored else ratio(of, row), 2),
                show(None if is_stored else ratio(of, usual), 1),
                show(median_of(measured, arm.name, "classes")),
                show(statistics.median(cpu)),
            ]
        )
    return table(header, rows) + (f"\n\nStored bytes are read at {bound / 1e9:.1f} GB/s." if bound else "")


def lock_table(measured: Measured) -> str:
    usual = rate(measured, USUAL)
    header = ["", "GB/s", "times usual", "steps/s alone", "beside", "steps lost"]
    header += ["no core", "waiting", "a step slower", "classes"]
    rows = []
    for arm in ordered(measured):
        of = rate(measured, arm.name)
        assert of is not None
        rows.append(
            [
                arm.name,
                show(of / 1e9 if arm.reads else None, 3),
                show(ratio(of, usual) if arm.reads else None, 1),
                show(median_of(measured, arm.name, "steps_alone"), 0),
                show(median_of(measured, arm.name, "steps_beside"), 0),
                show(lost_steps(measured, arm.name), unit="%"),
                *(show(median_of(measured, arm.name, what), unit="%") for what in ("no_core", "waiting", "slower")),
                show(median_of(measured, arm.name, "classes") if arm.reads else None),
            ]
        )
    return table(header, rows)


def remote_table(measured: Measured) -> str:
    usual, bound = rate(measured, REMOTE_USUAL, "samples"), rate(measured, REMOTE_BOUND, "samples")
    header = ["", "samples/s", "MB/s", "times usual", "of the bound", "classes"]
    rows = []
    for arm in ordered(measured):
        of, in_bytes = rate(measured, arm.name, "samples"), rate(measured, arm.name)
        assert in_bytes is not None
        rows.append(
            [
                arm.name,
                show(of, 0),
                show(in_bytes / 1e6, 1),
                show(ratio(of, usual), 1),
                show(ratio(of, bound), unit="%"),
                show(median_of(measured, arm.name, "classes")),
            ]
        )
    return table(header, rows)


def heading(section: str, on: str, sizes: dict[str, str]) -> str:
    if section in ("warm", "cold"):
        return sizes[on]
    if section == "compressed":
        return f"{on}: {sizes['C']}"
    if section == "lock":
        what = {
            "taking": "small operations of torch, and takes a batch every 28 steps",
            "torch": "small operations of torch, beside reading as fast as can be",
            "python": "a loop of pure Python, beside reading as fast as can be",
        }[on]
        return f"The trainer is {what}; {sizes['A']}"
    return sizes["A"]


def section_text(section: str, of: dict[str, Measured], sizes: dict[str, str]) -> str:
    parts = [f"### {TITLES[section]}"]
    for on, measured in of.items():
        draw = {
            "warm": lambda one: disk_table(one, is_cold=False),
            "cold": lambda one: disk_table(one, is_cold=True),
            "compressed": compressed_table,
            "lock": lock_table,
            "remote": remote_table,
        }[section]
        parts.append(heading(section, on, sizes))
        parts.append(draw(measured))
        if measured.skipped:
            parts.append("\n".join(f"- {name}: skipped: {reason}" for name, reason in measured.skipped.items()))
        answers = [answer for of_arm in measured.answers.values() for answer in of_arm]
        shares = [answer["cached_share"] for answer in answers if "cached_share" in answer]
        if section == "warm" and shares and min(shares) < 0.999:
            parts.append(f"Not all was in the page cache: as little as {100 * min(shares):.0f} % of an arm's files.")
    return "\n\n".join(parts)


def report(results: Results) -> str:
    from feed_bars import bars

    parts = [
        f"{results.machine}. Batches of 256, {results.rounds} round(s), medians; {results.seconds / 60:.0f} minutes.",
        *(section_text(section, of, results.sizes) for section, of in results.sections.items()),
        "### The bars",
        "\n".join(f"- {line}" for line in bars(results)),
    ]
    return "\n\n".join(parts)
