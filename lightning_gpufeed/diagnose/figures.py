"""The figures behind a verdict, as sentences, and the verdict as one line. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpufeed.diagnose.counters import EpochCounters, FileFacts
from lightning_gpufeed.diagnose.judgement import Cause, Verdict
from lightning_gpufeed.diagnose.load_model import LoadModel
from lightning_gpufeed.diagnose.records import printable
from lightning_gpufeed.diagnose.shares import (
    amplification,
    host_seconds,
    receive_share,
    spare_share,
    start_share,
    sync_share,
    taken_by_others,
)

__all__ = ["duration", "figures_for", "line", "notes_for", "percent", "readers_name"]

_LOW_MEMORY_SHARE = 0.05
_FEW_STEPS = 10
_SPARE_MEMORY_SHARE = 0.5
_IDLE_KERNELS_SHARE = 0.5


def percent(share: float) -> str:
    """A share as text.

    Args:
        share: 0 to 1.

    Returns:
        Such as `63 %`.
    """
    return "less than 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def line(counters: EpochCounters, verdict: Verdict) -> str:
    """The verdict in one line.

    Args:
        counters: What it was judged by.
        verdict: From `judge`.

    Returns:
        Without a line break.
    """
    if not counters.steps.num_steps or counters.steps.elapsed_seconds <= 0:
        return "no step was measured."
    waits = percent(verdict.wait_share)
    if verdict.cause is Cause.COMPUTE:
        text = f"compute-bound: waits {waits} of the time for data; nothing to gain in the loader"
        return ". ".join([text, *verdict.notes]) + "."
    parts = [f"{verdict.cause}: the step waits {waits} of the time for data", *verdict.figures]
    text = "; ".join(parts)
    promised = [str(cure) for cure in verdict.cures]
    if verdict.free_echo_factor is not None and verdict.free_echo_factor >= 1.1:
        promised.append(f"BatchEcho e <= {verdict.free_echo_factor:.1f} is free")
    if promised:
        text += f". Predicted: {', '.join(promised)}"
    if verdict.cures:
        text += f". First: {verdict.cures[0].action}"
    return printable(". ".join([text, *verdict.notes]) + ".")


def figures_for(
    cause: Cause, counters: EpochCounters, model: LoadModel, others: Sequence[EpochCounters]
) -> tuple[str, ...]:
    """The figures that led to a cause, the one that decided first.

    Args:
        cause: Of the verdict.
        counters: What it was judged by.
        model: Made of them.
        others: Counters of the other ranks.

    Returns:
        Sentences without a full stop.
    """
    texts = {
        Cause.COMPUTE: _compute_texts,
        Cause.AMPLIFICATION: _amplification_texts,
        Cause.CONVERSION: _conversion_texts,
        Cause.TOO_MANY_WORKERS: _many_texts,
        Cause.TOO_FEW_WORKERS: _few_texts,
        Cause.COPY: _copy_texts,
        Cause.HOST: _host_texts,
        Cause.DISK: _disk_texts,
        Cause.START: _start_texts,
        Cause.UNEVEN: _uneven_texts,
        Cause.HANDOVER: _handover_texts,
    }
    if cause is Cause.SYNC:
        return tuple(_sync_texts(counters, others))
    chosen = texts.get(cause, _reader_texts)(counters)
    if cause is Cause.CPU:
        chosen.append("the rest in their own code: decoding, transforms, collating")
    if cause is Cause.DECODE:
        chosen += [_layout_text(one) for one in counters.loader.files if not one.is_direct]
    if cause in (Cause.CPU, Cause.DECODE, Cause.KERNEL, Cause.CONVERSION) and model.parts is not None:
        chosen.append(f"a batch takes a reader {duration(model.parts.busy)} on a core")
    return tuple(chosen)


def duration(seconds: float) -> str:
    """A time in the unit that suits it.

    Args:
        seconds: 0 or more.

    Returns:
        Such as `12.3 ms`.
    """
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1000 * seconds:.1f} ms" if seconds >= 0.001 else f"{1e6 * seconds:.0f} us"


def readers_name(counters: EpochCounters) -> str:
    """Who loads: workers, a reading thread, or the training process itself."""
    if counters.loader.num_workers == 1:
        return "the loader's worker"
    if counters.loader.num_workers:
        return "loader workers"
    return "the reading thread" if counters.loader.has_thread else "the training process"


def _reader_texts(counters: EpochCounters) -> list[str]:
    usage = counters.readers
    if usage is None or usage.wall_seconds <= 0:
        return [f"{readers_name(counters)} could not be watched"]
    who, kernel = readers_name(counters), percent(usage.system_seconds / max(usage.busy_seconds, 1e-9))
    several = counters.loader.num_workers > 1
    texts = [
        f"of {'their' if several else 'its'} time on a core {who} spend{'s' * (not several)} {kernel} in the kernel"
    ]
    if (receives := receive_share(counters)) >= 0.1 and counters.loader.num_workers:
        texts.append(f"taking over what they made takes the training {percent(receives)} of the time")
    ratio = counters.read_ratio
    if ratio is not None and ratio >= 0.05:
        texts.append(f"{ratio:.{1 if ratio >= 0.95 else 2}f} bytes are read for each byte delivered")
    return texts


def _amplification_texts(counters: EpochCounters) -> list[str]:
    ratio = amplification(counters)
    texts = []
    if ratio is not None and ratio > 1:
        verb = "read" if counters.loader.num_workers > 1 else "reads"
        texts.append(f"{readers_name(counters)} {verb} {ratio:.1f} bytes for each byte delivered")
    texts += [_layout_text(one) for one in counters.loader.files if one.chunk_samples > 1 and not one.is_direct]
    usage = counters.readers
    if usage is not None and usage.busy_seconds > 0:
        texts.append(f"{percent(usage.system_seconds / usage.busy_seconds)} of the reading time is the kernel's")
    return texts


def _layout_text(one: FileFacts) -> str:
    shape = "x".join(map(str, one.chunk_shape or ()))
    key = f" {one.key}" if one.key else ""
    filters = f" under {', '.join(one.filters)}" if one.filters else ""
    order = f", read in order {one.order!r}" if one.order else ""
    many = f", {one.chunk_samples} samples each" if one.chunk_samples > 1 else ""
    stored = f"chunks of {shape}" if shape else one.dtype or "stored"
    return f"{printable(one.path)}{printable(key)}: {stored}{many}{filters}{order}"


def _conversion_texts(counters: EpochCounters) -> list[str]:
    batch = counters.batch
    texts = [
        f"{percent(batch.widened_bytes / max(1, batch.num_bytes))} of the bytes delivered are floats made of 8-bit "
        f"numbers: {batch.num_bytes / 1e6:.1f} MB a batch instead of {batch.compact_bytes / 1e6:.1f} MB"
    ]
    return texts + _reader_texts(counters)


def _many_texts(counters: EpochCounters) -> list[str]:
    usage, loader = counters.readers, counters.loader
    texts = [f"{loader.num_workers} workers share {_cores(counters)}"]
    queue = usage.share(usage.queue_seconds) if usage is not None else None
    if queue is not None:
        texts.append(f"they wait {percent(queue)} of their time for a core")
    return texts


def _few_texts(counters: EpochCounters) -> list[str]:
    loader, cores = counters.loader, _cores(counters)
    if not loader.is_ahead:
        return [f"batches are loaded between the steps, by the training process itself, on 1 of {cores}"]
    usage = counters.readers
    share = usage.share(usage.busy_seconds) if usage is not None else None
    many = loader.num_workers
    texts = [f"{many} worker{'s' * (many > 1)} on {cores}" if many else f"one reading thread on {cores}"]
    if share is not None:
        texts.append(f"{'each' if many > 1 else 'it'} is on a core {percent(share)} of the time")
    return texts


def _cores(counters: EpochCounters) -> str:
    number = f"{counters.machine.num_cores:.1f}".removesuffix(".0")
    return f"{number} core{'s' * (number != '1')}"


def _disk_texts(counters: EpochCounters) -> list[str]:
    usage = counters.readers
    asleep = usage.share(usage.asleep_seconds) if usage is not None else None
    who, verb = readers_name(counters), "are" if counters.loader.num_workers > 1 else "is"
    share = percent(asleep or 0.0)
    texts = [f"{who} {verb} asleep {share} of the time while a batch is waited for: storage, network or a lock"]
    pressure = counters.machine.io_pressure
    if pressure is not None:
        texts.append(f"the kernel saw something wait for storage {percent(pressure)} of the time")
    if usage is not None and usage.major_faults:
        texts.append(
            f"{usage.major_faults:,} page{'s were' if usage.major_faults > 1 else ' was'} fetched from storage"
        )
    return texts


def _copy_texts(counters: EpochCounters) -> list[str]:
    steps, pinned = counters.steps, "page-locked" if counters.batch.is_pinned else "pageable"
    share = percent(steps.share(steps.copy_seconds))
    return [
        f"copying to the device takes {share} of the step, {counters.batch.num_bytes / 1e6:.1f} MB from {pinned} memory"
    ]


def _host_texts(counters: EpochCounters) -> list[str]:
    steps = counters.steps
    if steps.idle_seconds is None:
        taken = percent(steps.share(steps.hook_seconds))
        return [f"what runs between the steps takes {taken} of the time: Lightning's loop, callbacks, loggers"]
    idle = percent(steps.share(host_seconds(counters)))
    return [f"the device has nothing to do {idle} of the time while the batch is there: Python, hooks, logging"]


def _start_texts(counters: EpochCounters) -> list[str]:
    seconds, share = counters.start_seconds, percent(start_share(counters))
    workers = f"{counters.loader.num_workers} worker{'s' * (counters.loader.num_workers > 1)}"
    method = f" ({counters.loader.start_method})" if counters.loader.start_method else ""
    return [f"starting {workers}{method} takes {duration(seconds)} of every epoch, {share} of it"]


def _uneven_texts(counters: EpochCounters) -> list[str]:
    who, verb = readers_name(counters), "are" if counters.loader.num_workers > 1 else "is"
    idle = percent(spare_share(counters))
    return [f"{who} {verb} asleep {idle} of the time: fast enough on average, but batches come unevenly"]


def _handover_texts(counters: EpochCounters) -> list[str]:
    who = readers_name(counters)
    texts = [
        f"a batch is mostly ready when it is asked for: handing it from {who} to the training is what takes the time"
    ]
    return texts


def _compute_texts(counters: EpochCounters) -> list[str]:
    steps = counters.steps
    return [f"{percent(steps.share(steps.compute_seconds))} of the step is computing"]


def _sync_texts(counters: EpochCounters, others: Sequence[EpochCounters]) -> list[str]:
    texts = [f"ranks wait for each other {percent(sync_share(counters, others))} of the time"]
    ranks = [one for one in (counters, *others) if one.steps.compute_cpu_seconds is not None]
    if len(ranks) > 1:
        longest = max(ranks, key=lambda one: one.steps.compute_cpu_seconds or 0.0)
        shortest = min(ranks, key=lambda one: one.steps.compute_cpu_seconds or 0.0)
        times = [(one.steps.compute_cpu_seconds or 0.0) / max(1, one.steps.num_steps) for one in (longest, shortest)]
        if times[0] > 1.2 * times[1]:
            texts.append(
                f"rank {longest.rank} computes longest, {duration(times[0])} a step against {duration(times[1])}"
            )
    asked = counters.steps.share(counters.steps.sync_seconds)
    if asked >= 0.01:
        texts.append(f"{percent(asked)} of the time goes by in Lightning's own question to all ranks before each step")
    return texts


def notes_for(cause: Cause, counters: EpochCounters, others: Sequence[EpochCounters]) -> tuple[str, ...]:
    """What else was noticed.

    Args:
        cause: Of the verdict.
        counters: What it was judged by.
        others: Counters of the other ranks.

    Returns:
        Sentences without a full stop.
    """
    notes = []
    if cause is Cause.COMPUTE and counters.steps.wait_share >= 0.05:
        notes.append(f"Batches come unevenly: {readers_name(counters)} could make more than twice as many")
    taken = taken_by_others(counters)
    if taken is not None and cause is not Cause.COMPUTE:
        notes.append(
            f"Other processes keep about {taken:.1f} of {_cores(counters)} busy; without them all this is faster"
        )
    if counters.steps.num_steps < _FEW_STEPS:
        many = counters.steps.num_steps
        notes.append(f"Only {many} steps were measured" if many > 1 else "Only one step was measured")
    steps = counters.steps
    if steps.num_watched is not None:
        notes.append(
            f"{steps.num_watched:,} of {steps.num_steps:,} steps were watched in full, since they are short; "
            f"waiting is counted in all of them"
        )
    if counters.is_first and start_share(counters) >= 0.1:
        notes.append(f"Starting the workers took {duration(counters.start_seconds)}")
    if counters.is_first and cause is not Cause.COMPUTE:
        cold = [one for one in counters.loader.files if one.cached_share is not None and one.cached_share < 0.9]
        where = (
            f", {percent(1 - (cold[0].cached_share or 0.0))} of {printable(cold[0].path)} was not in memory"
            if cold
            else ""
        )
        notes.append(f"First epoch{where}: files may come from storage, the next ones may be faster")
    if others:
        shares = sorted(one.steps.wait_share for one in others)
        low, high = percent(shares[0]), percent(shares[-1])
        between = low if low == high else f"{low} to {high}"
        notes.append(
            f"Rank {counters.rank} of {counters.num_ranks} waits most; the others wait {between} for their own data"
        )
    return (*notes, *_device_notes(cause, counters))


def _device_notes(cause: Cause, counters: EpochCounters) -> list[str]:
    machine, notes = counters.machine, []
    used = machine.device_utilisation
    if cause is Cause.COMPUTE and used is not None and used < _IDLE_KERNELS_SHARE:
        share = percent(used)
        notes.append(f"A kernel runs on the device only {share} of the time: many small ones, or Python between them")
    if not machine.device_total_bytes:
        return notes
    free = (machine.device_free_bytes or 0) / machine.device_total_bytes
    if machine.device_free_bytes is not None and free < _LOW_MEMORY_SHARE:
        notes.append(f"{percent(free)} of the device's memory is free: OOMRecovery() keeps a run from ending there")
    peak = (machine.device_peak_bytes or machine.device_total_bytes) / machine.device_total_bytes
    if cause is Cause.COMPUTE and peak < _SPARE_MEMORY_SHARE:
        notes.append(f"Tensors take {percent(peak)} of the device's memory at most: there is room for a larger batch")
    return notes
