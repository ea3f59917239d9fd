"""The bars that feed.py holds H5Loader to, as ratios within one run; one that is missed says what limits it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from feed_arms import ARMS, Measured
from feed_table import (
    BOUND,
    DECODING,
    IN_A_ROW,
    REMOTE_USUAL,
    USUAL,
    Results,
    best,
    lost_steps,
    median_of,
    rate,
    ratio,
)

OURS, WINDOW, ISOLATED = "H5Loader", 'H5Loader, shuffle="window"', "H5Loader, isolate=True"
LARGEST_LOSS = 0.1
NEIGHBOURS = [arm.name for arm in ARMS if arm.kind == "neighbour"]
AS_IT_COMES = re.compile(r"as it comes|buffer of 1000")


def verdict(claim: str, value: float | None, least: float, limit: str) -> str:
    """`limit` is only told when the bar is missed."""
    if value is None:
        return f"{claim}: not measured (bar: {least:g}x)"
    text = f"{claim}: {value:.2f}x (bar: {least:g}x): {'holds' if value >= least else 'MISSED'}"
    return text if value >= least else f"{text}: {limit}"


def bars(results: Results) -> Iterator[str]:
    for section, lines in (
        ("warm", warm),
        ("cold", cold),
        ("compressed", compressed),
        ("lock", lock),
        ("remote", remote),
    ):
        for on, measured in results.sections.get(section, {}).items():
            yield from lines(on, measured)


def gb(value: float | None) -> str:
    return "–" if value is None else f"{value / 1e9:.2f} GB/s"


def warm(on: str, measured: Measured) -> Iterator[str]:
    ours, usual, bound = rate(measured, OURS), rate(measured, USUAL), rate(measured, BOUND)
    size = {"A": "64x64", "B": "224x224"}[on]
    at_bound = ratio(ours, bound)
    share = "" if at_bound is None else f"{100 * at_bound:.0f} % of the bound"
    copied = f"ours runs at {gb(ours)}, {share}; {_gather(measured)}"
    yield verdict(f"warm {size}, against {USUAL}", ratio(ours, usual), {"A": 30, "B": 7}[on], copied)
    yield _against("the chunk-cache trap removed", size, measured, ours, 4, copied, "no cache")
    least = {"A": 20, "B": 4}[on]
    yield _against(
        "the best of litdata, MDS, WebDataset", size, measured, ours, least, _tuned(ours, measured), "chunked"
    )
    yield _against("FFCV", size, measured, ours, 1.0, copied, "ffcv")
    yield verdict(f"warm {size}, of the one-thread bound", at_bound, 0.6, _gather(measured))


def _against(whom: str, size: str, measured: Measured, ours: float | None, least: float, limit: str, kind: str) -> str:
    found = best(measured, kind)
    name = f" ({found[0]}, {gb(found[1])})" if found else ""
    return verdict(f"warm {size}, against {whom}{name}", ratio(ours, found[1] if found else None), least, limit)


def _tuned(ours: float | None, measured: Measured) -> str:
    """How much of a peer's rate is owed to settings that are not its own."""
    found = [(rate(measured, name), name) for name in measured.answers if AS_IT_COMES.search(name)]
    known = [(of, name) for of, name in found if of is not None]
    if not known or not ours:
        return "the best arm is set up for this by hand"
    of, name = max(known)
    return f"the best arm is set up for this by hand; as they come the best is {name}, {gb(of)}: {ours / of:.1f}x"


def _gather(measured: Measured) -> str:
    """What the copy itself costs: a plain loop over a map of the same bytes does that and nothing else."""
    parts = []
    loop = rate(measured, ".npy map, plain loop, 1 thread")
    if loop:
        parts.append(f"a plain loop that gathers the same rows from a .npy map, with no hand-over, runs at {gb(loop)}")
    cpu, seconds = median_of(measured, OURS, "cpu_seconds"), median_of(measured, OURS, "seconds")
    if cpu and seconds:
        parts.append(f"an epoch of ours takes {cpu:.2f} s of CPU in {seconds:.3f} s")
    parts.append("the bound reuses a buffer that stays in the CPU's cache; a batch is written to memory and kept")
    return "; ".join(parts)


def cold(on: str, measured: Measured) -> Iterator[str]:
    bound = rate(measured, BOUND)
    for name in (OURS, WINDOW):
        of = rate(measured, name)
        limit = f"the disk gives {gb(bound)} to one thread in sequence and {gb(of)} to what this shuffle asks for"
        yield verdict(f"cold {on}, {name}, against sequential reading by one thread", ratio(of, bound), 1.2, limit)


def compressed(on: str, measured: Measured) -> Iterator[str]:
    of, row, bound = rate(measured, WINDOW), rate(measured, IN_A_ROW), rate(measured, DECODING)
    cpu = [answer["cpu_seconds"] / answer["bytes"] * 1e9 for answer in measured.answers.get(WINDOW, [])]
    limit = f"h5py decodes at {gb(row)} on one core, two threads that only decode have {gb(bound)}" + (
        f"; ours takes {min(cpu):.1f} s of CPU for a GB" if cpu else ""
    )
    if on.startswith("gzip"):
        yield verdict(f"{on}, against {IN_A_ROW}", ratio(of, row), 2.5, limit)
    elif of and row:
        yield f"{on}, against {IN_A_ROW}: {of / row:.2f}x (no bar)"


def lock(on: str, measured: Measured) -> Iterator[str]:
    for name in (OURS, ISOLATED):
        lost = lost_steps(measured, name)
        if lost is None:
            yield f"beside a trainer ({on}), {name}: not measured (bar: at most 10 % of its steps lost)"
            continue
        is_held = lost <= LARGEST_LOSS
        line = (
            f"beside a trainer ({on}), {name} at {gb(rate(measured, name))}: it loses {100 * lost:.0f} % of its steps "
        )
        line += f"(bar: 10 %): {'holds' if is_held else 'MISSED'}"
        if not is_held:
            line += "".join(
                f"; {neighbour}, with nothing read: {100 * of:.0f} %"
                for neighbour in NEIGHBOURS
                if (of := lost_steps(measured, neighbour)) is not None
            )
        yield line


def remote(on: str, measured: Measured) -> Iterator[str]:
    found = best(measured, "usual", unit="samples")
    for name in (OURS, WINDOW):
        of = rate(measured, name, "samples")
        whom = f" ({found[0]})" if found else ""
        limit = f"{REMOTE_USUAL} has {rate(measured, REMOTE_USUAL, 'samples') or 0:.0f} samples/s"
        value = ratio(of, found[1] if found else None)
        yield verdict(f"remote, {name}, against the best of h5py over fsspec{whom}", value, 10, limit)
