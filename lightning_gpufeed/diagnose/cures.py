"""What would help, in order, and how much. Pure.

Each cure changes what a reader does for a batch, see `LoadParts`; the gain follows from `LoadModel`. Where the parts
are not known the range spans from no gain to no waiting at all.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Callable

from lightning_gpufeed.diagnose import shares
from lightning_gpufeed.diagnose.counters import EpochCounters, FileFacts
from lightning_gpufeed.diagnose.judgement import Cause, Cure
from lightning_gpufeed.diagnose.load_model import LoadModel, LoadParts
from lightning_gpufeed.diagnose.records import printable

__all__ = ["are_workers_worth_it", "cures_for"]

_WORTH = 1.03
"""A cure that is not expected to gain this much is not named."""
_ALIKE = math.log(1.15)
_DEVICE_READY = "on_after_batch_transfer"


def cures_for(cause: Cause, counters: EpochCounters, model: LoadModel) -> tuple[Cure, ...]:
    """What to try, in order.

    Args:
        cause: Of the verdict.
        counters: What it was judged by.
        model: Made of them.

    Returns:
        None for a step that is bound by its own computing, or where nothing is worth the trouble.
    """
    makers = _CURES.get(cause, ())
    found = [cure for make in makers if (cure := make(counters, model)) is not None]
    found = [cure for cure in found if cure.gain >= _WORTH]
    if cause in _BY_GAIN:  # among the like the order is that of the effort
        found.sort(key=lambda cure: -round(math.log(cure.gain) / _ALIKE))
    return tuple(found)


def are_workers_worth_it(counters: EpochCounters, model: LoadModel) -> bool:
    """Whether more workers are a cure.

    Args:
        counters: Of an epoch.
        model: Made of them.

    Returns:
        False where they cost as much as they bring.
    """
    cure = _more_workers(counters, model)
    return cure is not None and cure.gain >= _WORTH


# Reading -------------------------------------------------------------------------------------------------


def _chunk_order(counters: EpochCounters, model: LoadModel) -> Cure | None:
    """Each chunk read once: by a file with one sample per chunk, or by an order that keeps to chunks."""
    ratio = _amplification(counters)
    if ratio is None:
        return None
    files = [one for one in counters.loader.files if one.key is not None and not one.is_direct]
    slow = next((one for one in files if one.chunk_samples > 1), None)
    if slow is None and not counters.loader.is_own:
        return _smaller_samples(files[0] if files else None, ratio, model)
    if counters.loader.is_own and (slow is None or slow.order != "full") and not (slow and slow.command):
        return None
    action = _repack_action(counters, slow)
    if model.parts is None:
        return model.cure("chunk order", action, 1 / ratio, least=0.0, most=1.0)
    parts, kept = model.parts, 1 / ratio
    # At least what copying those bytes costs goes; at most all that a reader does but convert and hand over.
    surely = dataclasses.replace(parts, read=parts.read * kept, asleep=parts.asleep * kept)
    # Without filters HDF5 does little more with a chunk than copy it once more.
    is_decoding = slow is None or bool(slow.filters)
    goes = parts.other * (1 - kept) if is_decoding else min(parts.other * (1 - kept), 2 * parts.read)
    likely = dataclasses.replace(surely, other=parts.other - goes)
    middle = dataclasses.replace(surely, other=parts.other - 0.75 * goes)
    lefts = [model.share_left(one) for one in (middle, likely, surely)]
    return model.cure("chunk order", action, lefts[0], least=lefts[1], most=lefts[2])


def _smaller_samples(file: FileFacts | None, ratio: float, model: LoadModel) -> Cure:
    """Samples are read one by one, and only a part of what is read is used."""
    action = "store samples in the size that is delivered, and apart from each other: a part of what is read is used"
    if file is not None:
        command = f"gpufeed pack {shlex.quote(file.path)} OUT.h5 --crop HEIGHTxWIDTH"
        action = (
            f"store samples in the size that is delivered (for images `{command}`, or --resize): a part of each is used"
        )
    return model.cure("smaller samples", action, 0.5 + 0.5 / ratio, least=1 / ratio, most=1.0)


def _amplification(counters: EpochCounters) -> float | None:
    """Bytes read per byte delivered, by the counters, or by the layout."""
    ratio = shares.amplification(counters)
    if ratio is not None and ratio > 1.5:
        return ratio
    return max((float(one.chunk_samples) for one in counters.loader.files if one.chunk_samples > 1), default=None)


def _repack_action(counters: EpochCounters, slow: FileFacts | None) -> str:
    command = slow.command if slow is not None else None
    if counters.loader.is_own:
        text = "shuffle='window' in the DataModule, which reads each chunk once"
        if command and slow is not None and slow.order != "full":
            return f"`{command}` once, and train on OUT.h5"
        return f"`{command}` once, and train on OUT.h5; or {text}" if command else text
    command = command or f"gpufeed pack {shlex.quote(slow.path) if slow else 'FILE'} OUT.h5"
    if slow is None or slow.chunk_shape is None:
        return f"read whole chunks in a row, or write a file with one sample per chunk: `{command}`"
    # As packed by default, several samples still share a chunk, which only this package's own reader does not mind.
    # Images are packed as bytes, unless it says otherwise; repacking keeps their type.
    keeps_type = "--keep-dtype" in command or command.startswith("gpufeed repack")
    width = (shares.item_bytes(slow.dtype) or 1) if keeps_type else 1
    sample_bytes = math.prod(slow.chunk_shape) // slow.chunk_samples * width
    return f"`{command} --chunk-bytes {sample_bytes}` once, and read OUT.h5: one sample per chunk"


def _direct(counters: EpochCounters, model: LoadModel) -> Cure | None:
    """Our reader finds single samples inside chunks, where no filter is in the way."""
    files = [one for one in counters.loader.files if one.key is not None]
    return _own_feed(counters, model) if files and not any(one.filters for one in files) else None


def _window(counters: EpochCounters, model: LoadModel) -> Cure | None:
    """Our loader decodes whole chunks for single samples."""
    files = [
        one for one in counters.loader.files if one.order == "full" and one.chunk_samples > 1 and not one.is_direct
    ]
    return _chunk_order(counters, model) if counters.loader.is_own and files else None


def _own_feed(counters: EpochCounters, model: LoadModel) -> Cure | None:
    """Samples copied straight from the mapped file into the batch: no HDF5 call, no handing over, no collating."""
    loader = counters.loader
    if loader.is_own or not counters.batch.num_bytes:
        return None
    file = next((one for one in loader.files if one.key is not None), None)
    action = (
        "H5DataModule, which copies samples straight from the file (other formats: `gpufeed pack SOURCE OUT.h5` once)"
    )
    if file is not None:
        is_direct = not file.filters or file.command is None
        path = printable(file.path)
        action = f"H5DataModule on {path}" if is_direct else f"`{file.command}` once, then H5DataModule on OUT.h5"
    costs, parts = counters.machine.costs, model.parts
    if costs is None or parts is None or file is None:  # it may not even be arrays
        return model.cure("H5DataModule", action, 0.5, least=0.0, most=1.0, becomes_ahead=True)
    # One thread copies what several processes did, into memory that it has used before, which takes less than half of
    # a copy into new memory; converting is left to the device. Small samples cost more per byte.
    left = counters.batch.compact_bytes * costs.read_seconds / model.load
    return model.cure(
        "H5DataModule",
        action,
        min(1.0, 0.4 * left),
        least=0.15 * left,
        # What a Dataset does to samples has to be done elsewhere then: in the file, or on the device.
        most=1.0 if parts.other > 0.6 * parts.busy else min(1.0, left),
        becomes_ahead=True,
        moved=0.5 * parts.convert,
    )


def _pack_decoded(counters: EpochCounters, model: LoadModel) -> Cure | None:
    """What workers decode is not in HDF5: packed once, it is decoded for good."""
    return None if counters.loader.files else _own_feed(counters, model)


def _repack(counters: EpochCounters, model: LoadModel) -> Cure | None:
    """Our own loader decodes: a file without filters is copied from."""
    slow = next((one for one in counters.loader.files if not one.is_direct and one.command), None)
    if not counters.loader.is_own or slow is None:
        return None
    action, costs = f"`{slow.command}` once, and train on OUT.h5", counters.machine.costs
    if costs is None:
        return model.cure("packed file", action, 0.5, least=0.0, most=1.0)
    left = min(1.0, counters.batch.compact_bytes * costs.read_seconds / model.load)
    return model.cure("packed file", action, 0.4 * left, least=0.15 * left, most=left)


def _faster_storage(counters: EpochCounters, model: LoadModel) -> Cure | None:
    """Storage answers sooner: a copy on a local disk, or in memory."""
    if model.parts is None or model.parts.total <= 0:
        return None
    awake = model.parts.busy / model.parts.total
    action = "copy the data to a local disk, or to /dev/shm where it fits"
    return model.cure("local copy", action, min(1.0, awake + 0.2 * (1 - awake)), least=awake, most=1.0)


# Work ----------------------------------------------------------------------------------------------------


def _uint8(counters: EpochCounters, model: LoadModel) -> Cure | None:
    """Deliver 8-bit numbers, and make floats of them on the device."""
    batch, parts = counters.batch, model.parts
    if not batch.widened_bytes:
        return None
    action = (
        "deliver uint8 and convert on the device (H5ImageDataModule does; in a Dataset: return the uint8 array, and "
        f"divide in LightningModule.{_DEVICE_READY})"
    )
    share = batch.compact_bytes / max(1, batch.num_bytes)
    if counters.loader.is_own:
        command = next((one.command for one in counters.loader.files if one.command), None)
        if command is None:
            return None
        action = f"`{command}` once, and train on OUT.h5: bytes in the file, floats on the device"
    if parts is None:
        return model.cure("uint8 on the host", action, share, least=0.0, most=1.0)
    surely = dataclasses.replace(parts, convert=0.0, ship=parts.ship * share)
    # Collating touches every byte once more, and so do the page faults of fresh memory: both shrink with the bytes.
    # Decoding does not, so no more goes than what converting and handing over explain.
    goes = min(parts.other * (1 - share), 2 * (parts.convert + parts.ship * (1 - share)))
    likely = dataclasses.replace(surely, other=parts.other - goes)
    middle = dataclasses.replace(surely, other=parts.other - goes / 2)
    lefts = [model.share_left(one) for one in (middle, likely, surely)]
    if counters.readers is not None and counters.readers.queue_seconds is None:  # they may sleep for all we know
        lefts[2] = 1.0
    if counters.machine.costs is None:  # converting may be all that they do
        lefts[1] = 0.0
    # Where the host computes, it converts in the step what readers no longer do; a whole batch at once takes less.
    moved = 0.5 * parts.convert
    return model.cure("uint8 on the host", action, lefts[0], least=lefts[1], most=lefts[2], moved=moved)


def _device_transform(counters: EpochCounters, model: LoadModel) -> Cure | None:
    """Do the transform for whole batches where the step runs."""
    action = (
        "do the transform for whole batches on the device: H5DataModule(device_transform=...), or "
        f"LightningModule.{_DEVICE_READY}"
    )
    parts = model.parts
    if counters.loader.is_own or counters.steps.idle_seconds is None:  # where the host computes, it has the same cores
        return None
    if parts is None:
        return model.cure("transform on the device", action, 0.5, least=0.0, most=1.0)
    # What is handed over then is what was read, which may be fewer bytes.
    batch = counters.batch
    known = max(counters.read_ratio or 1.0, batch.compact_bytes / max(1, batch.num_bytes), 0.125)
    plain = LoadParts(parts.read, 0.0, parts.ship * min(1.0, known), 0.0, parts.asleep)
    likely = model.share_left(dataclasses.replace(plain, other=0.1 * parts.other))
    # How much of it is decoding, which has to be done before a device can do the rest, cannot be seen.
    return model.cure("transform on the device", action, likely, least=model.share_left(plain), most=1.0)


def _transform_once(counters: EpochCounters, model: LoadModel) -> Cure | None:
    """Store what the transform makes; later epochs read that."""
    parts, costs, batch = model.parts, counters.machine.costs, counters.batch
    if counters.loader.is_own or not batch.num_bytes:
        return None
    action = (
        "where the transform is not random, do it once and store what it makes: "
        "`gpufeed pack package.module:dataset OUT.h5 --keep-dtype`"
    )
    if parts is None or costs is None:
        return model.cure("transform once", action, 0.5, least=0.0, most=1.0)
    read = batch.num_bytes * costs.read_seconds
    plain = LoadParts(read, 0.0, parts.ship, 0.1 * parts.other, parts.asleep)
    least = LoadParts(0.3 * read, 0.0, 0.5 * parts.ship, 0.0, 0.0)
    return model.cure("transform once", action, model.share_left(plain), least=model.share_left(least), most=1.0)


# Workers -------------------------------------------------------------------------------------------------


def _more_workers(counters: EpochCounters, model: LoadModel) -> Cure | None:
    loader, cores = counters.loader, max(1, math.floor(counters.machine.num_cores))
    if loader.is_own:
        return None
    wanted = cores
    if model.parts is not None:  # as many as keep up, and a few more
        wanted = min(cores, max(loader.num_workers + 1, math.ceil(1.3 * model.parts.total / model.rest)))
    if wanted <= loader.num_workers:
        return None
    action = f"DataLoader(num_workers={wanted}, persistent_workers=True)"
    return model.cure_by_workers(f"{wanted} worker{'s' * (wanted > 1)}", action, wanted)


def _more_sleepers(counters: EpochCounters, model: LoadModel) -> Cure | None:
    """Readers that sleep most of the time need no core of their own."""
    if counters.loader.is_own:
        return None
    now = max(1, counters.loader.num_workers)
    wanted = 2 * now
    if model.parts is not None:  # as many as keep up, and a few more
        wanted = min(4 * now, max(now + 1, math.ceil(1.3 * model.parts.total / model.rest)))
    action = f"DataLoader(num_workers={wanted}, persistent_workers=True): more requests to storage at the same time"
    cure = model.cure_by_workers(f"{wanted} workers", action, wanted)
    # Behind a lock, a limit of requests or one connection they would wait for each other.
    return dataclasses.replace(cure, low=min(1.0, cure.low))


def _no_workers(counters: EpochCounters, model: LoadModel) -> Cure | None:
    action = "DataLoader(num_workers=0): loading a batch costs less than handing it over"
    return model.cure_without_workers("no workers", action)


def _larger_batches(counters: EpochCounters, model: LoadModel) -> Cure | None:
    """What is paid per batch is paid less often, if the training allows for it."""
    size = counters.loader.batch_size
    if size is None:
        return None
    action = (
        f"DataLoader(batch_size={2 * size}), if the training allows for it: what a batch costs is paid half as often"
    )
    return model.cure("larger batches", action, 1 - 0.4 * model.wait / model.step, least=0.5, most=1.0)


def _fewer_workers(counters: EpochCounters, model: LoadModel) -> Cure | None:
    wanted = max(1, math.floor(counters.machine.num_cores))
    action = f"DataLoader(num_workers={wanted}): the same work with less memory and fewer changes of process"
    # The work stays; what goes is the changing between processes. It is worth a tenth or two at most.
    return model.cure(f"{wanted} worker{'s' * (wanted > 1)}", action, 0.95, least=0.75, most=1.05)


def _deeper_queue(counters: EpochCounters, model: LoadModel) -> Cure | None:
    """More batches ready at a time, so that a slow one is made up for by the others."""
    loader = counters.loader
    if loader.is_own:
        return model.cure(
            "num_slots", "H5DataModule(num_slots=8)", 0.5 + 0.5 * model.rest / model.step, least=0.0, most=1.0
        )
    if not loader.num_workers:
        return None
    factor = 4 * (loader.prefetch_factor or 2)
    action = f"DataLoader(prefetch_factor={factor})"
    return model.cure("prefetch_factor", action, 0.5 + 0.5 * model.rest / model.step, least=0.0, most=1.0)


# Inside the step -----------------------------------------------------------------------------------------


def _pinned(counters: EpochCounters, model: LoadModel) -> Cure | None:
    steps, batch = counters.steps, counters.batch
    copy = steps.copy_seconds / max(1, steps.num_steps)
    if batch.is_pinned or counters.loader.pin_memory or counters.loader.is_own:
        return None
    action = "DataLoader(pin_memory=True), so that the copy runs at the bus's rate and the host goes on meanwhile"
    return model.cure_by_step("pin_memory", action, (0.5 * copy, 0.25 * copy, 0.75 * copy))


def _uint8_copy(counters: EpochCounters, model: LoadModel) -> Cure | None:
    steps, batch = counters.steps, counters.batch
    if not batch.widened_bytes:
        return None
    saved = steps.copy_seconds / max(1, steps.num_steps) * (1 - batch.compact_bytes / batch.num_bytes)
    action = f"deliver uint8 and convert on the device (H5ImageDataModule, or LightningModule.{_DEVICE_READY})"
    return model.cure_by_step("uint8 on the host", action, (saved, 0.8 * saved, saved))


def _fewer_hooks(counters: EpochCounters, model: LoadModel) -> Cure | None:
    steps = counters.steps
    count = max(1, steps.num_steps)
    seconds = shares.host_seconds(counters) / count
    action = "less Python per step: a larger log_every_n_steps, no .item() or print in hooks, torch.compile"
    return model.cure_by_step("host code", action, (0.5 * seconds, 0.0, seconds))


def _even_ranks(counters: EpochCounters, model: LoadModel) -> Cure | None:
    steps = counters.steps
    seconds = shares.sync_share(counters, ()) * steps.step_seconds
    action = "smaller or fewer messages: larger batches per rank, accumulate_grad_batches, bf16 gradients, faster links"
    return model.cure_by_step("fewer synchronisations", action, (0.5 * seconds, 0.0, seconds))


def _persistent(counters: EpochCounters, model: LoadModel) -> Cure | None:
    steps, start = counters.steps, counters.start_seconds
    after = [(start + steps.elapsed_seconds) / (share * start + steps.elapsed_seconds) for share in (0.15, 0.5, 0.0)]
    action = "DataLoader(persistent_workers=True), which keeps the workers from epoch to epoch"
    return Cure("persistent_workers", action, *after)


_Maker = Callable[[EpochCounters, LoadModel], Cure | None]

_CURES: dict[Cause, tuple[_Maker, ...]] = {
    Cause.AMPLIFICATION: (_direct, _chunk_order, _uint8, _more_workers),
    Cause.TOO_MANY_WORKERS: (_fewer_workers, _uint8, _device_transform, _transform_once),
    Cause.TOO_FEW_WORKERS: (_more_workers, _own_feed, _uint8, _device_transform),
    Cause.DISK: (_more_sleepers, _faster_storage),
    Cause.CPU: (_device_transform, _more_workers, _transform_once, _pack_decoded, _uint8),
    Cause.DECODE: (_repack, _own_feed, _window, _more_workers, _uint8),
    Cause.CONVERSION: (_uint8, _own_feed, _more_workers),
    Cause.KERNEL: (_own_feed, _uint8, _more_workers),
    Cause.LOADER: (_more_workers, _own_feed, _uint8),
    Cause.COPY: (_pinned, _uint8_copy),
    Cause.HOST: (_fewer_hooks,),
    Cause.SYNC: (_even_ranks,),
    Cause.START: (_persistent,),
    Cause.UNEVEN: (_more_sleepers, _deeper_queue),
    Cause.HANDOVER: (_no_workers, _larger_batches),
}
_BY_GAIN = {Cause.AMPLIFICATION, Cause.DECODE, Cause.CONVERSION, Cause.KERNEL, Cause.LOADER}
