"""Epochs as they happen, for the tests of what is shown of them: one per kind of training, and the odd ones."""

from __future__ import annotations

from dataclasses import replace

from lightning_gpufeed.diagnose.counters import (
    BatchFacts,
    EpochCounters,
    FileFacts,
    LoaderFacts,
    MachineFacts,
    Span,
    StepTotals,
    UnitCosts,
    Usage,
)
from lightning_gpufeed.diagnose.judgement import Cause, Cure, Verdict
from lightning_gpufeed.diagnose.records import EpochRecord

COMMAND = "gpufeed repack data/train.h5 data/train-rows.h5"
LONG_PATH = "/data/" + "a_very_long_name_of_a_folder_without_any_blank/" * 5 + "train with blanks & <angle> brackets.h5"
LONG_COMMAND = f"gpufeed repack '{LONG_PATH}' '{LONG_PATH.replace('train', 'repacked')}'"
NUM_STEPS = 400


def timeline(*, has_device: bool, num_steps: int = 4, first: int = 0) -> tuple[Span, ...]:
    """Steps that wait for data; a device runs behind the host."""
    spans, now, free_from = [], 0.0, 0.0
    for step in range(first, first + num_steps):
        host = {"sync": 0.003, "wait": 0.051 + 0.004 * (step % 3), "copy": 0.002, "compute": 0.018, "hooks": 0.004}
        if not has_device:
            host |= {"compute": 0.027}
            del host["sync"]
        for phase, seconds in host.items():
            spans.append(Span("host", phase, now, now + seconds, step))
            if has_device and phase in ("copy", "compute"):
                begin, length = max(now, free_from), 0.007 if phase == "copy" else 0.034
                spans.append(Span("device", phase, begin, begin + length, step))
                free_from = begin + length
            now += seconds
    return tuple(spans)


def usage(
    wall: float, user: float, system: float, queue: float, *, read_bytes: int = 0, major_faults: int = 0
) -> Usage:
    """Shares of the time watched."""
    return Usage(
        wall_seconds=wall,
        user_seconds=user * wall,
        system_seconds=system * wall,
        queue_seconds=queue * wall,
        major_faults=major_faults,
        read_bytes=read_bytes,
    )


MACHINE = MachineFacts(
    num_cores=2.0,
    cpu_pressure=0.412,
    io_pressure=0.087,
    memory_pressure=0.0,
    costs=UnitCosts(read_seconds=1.6e-10, convert_seconds=5.2e-10, ship_seconds=4.1e-10),
)
FILE = FileFacts(
    path="data/train.h5",
    key="images",
    dtype="uint8",
    chunk_shape=(32, 224, 224, 3),
    chunk_samples=32,
    filters=("blosc-zstd",),
    order="full",
    command=COMMAND,
    cached_share=0.83,
)
LOADER = LoaderFacts(
    name="torch.utils.data.DataLoader",
    num_workers=2,
    batch_size=64,
    prefetch_factor=2,
    pin_memory=False,
    start_method="fork",
    files=(FILE,),
)
HOST_STEPS = StepTotals(
    num_steps=NUM_STEPS,
    elapsed_seconds=35.0,
    wait_seconds=22.05,
    copy_seconds=0.7,
    compute_seconds=10.5,
    hook_seconds=1.4,
    compute_cpu_seconds=9.8,
    num_timed=NUM_STEPS,
)
AMPLIFIED = EpochRecord(
    EpochCounters(
        epoch=3,
        steps=HOST_STEPS,
        readers=usage(70.0, 0.04, 0.49, 0.45, read_bytes=int(NUM_STEPS * 9_633_792 * 31.9), major_faults=12),
        main=usage(35.0, 0.31, 0.03, 0.06),
        loader=LOADER,
        batch=BatchFacts(num_samples=64, num_bytes=9_633_792),
        machine=MACHINE,
        timeline=timeline(has_device=False),
        num_watched_steps=NUM_STEPS,
        num_main_steps=NUM_STEPS,
        start_seconds=0.31,
    ),
    Verdict(
        Cause.AMPLIFICATION,
        0.63,
        figures=(
            "loader workers read 31.9 bytes for each byte delivered",
            "data/train.h5 images: chunks of 32x224x224x3, 32 samples each, read in order 'full'",
            "92 % of the reading time is the kernel's",
        ),
        cures=(
            Cure("chunk order", f"{COMMAND} once, and train on it with H5DataModule", 2.1, 1.8, 2.4),
            Cure("4 workers", "DataLoader(num_workers=4, persistent_workers=True)", 1.2, 0.9, 1.4),
        ),
        notes=("5 % of the device's memory is free: OOMRecovery() keeps a run from ending there",),
        free_echo_factor=2.7,
    ),
    "read amplification: the step waits 63 % of the time for data; loader workers read 31.9 bytes for each byte "
    "delivered. Predicted: chunk order 2.1x (1.8-2.4), 4 workers 1.2x (0.9-1.4), BatchEcho e <= 2.7 is free.",
)
"""Workers that read a chunked file in random rows; the host computes."""

ON_DEVICE = EpochRecord(
    EpochCounters(
        epoch=12,
        rank=3,
        num_ranks=4,
        steps=StepTotals(
            num_steps=5_004,
            elapsed_seconds=391.0,
            wait_seconds=150.0,
            copy_seconds=35.2,
            compute_seconds=170.1,
            idle_seconds=184.4,
            sync_seconds=15.1,
            hook_seconds=8.0,
            num_timed=4_990,
        ),
        readers=usage(3128.0, 0.393, 0.051, 0.0004, read_bytes=48_000_000_000),
        main=usage(391.0, 0.26, 0.03, 0.001),
        loader=replace(LOADER, num_workers=8, pin_memory=True, files=(replace(FILE, command=None, cached_share=1.0),)),
        batch=BatchFacts(
            num_samples=64, num_bytes=38_535_168, widened_bytes=38_535_168, widened_values=9_633_792, is_pinned=True
        ),
        machine=replace(
            MACHINE,
            num_cores=16.0,
            device_utilisation=0.524,
            device_free_bytes=12 << 30,
            device_total_bytes=80 << 30,
            device_peak_bytes=61 << 30,
        ),
        timeline=timeline(has_device=True, num_steps=5, first=4_998),
        num_watched_steps=5_004,
    ),
    Verdict(
        Cause.CONVERSION,
        0.384,
        figures=(
            "100 % of the bytes delivered are floats made of 8-bit numbers: 38.5 MB a batch instead of 9.6 MB",
            "of their time on a core loader workers spend 12 % in the kernel",
        ),
        cures=(
            Cure(
                "uint8 on the host",
                "deliver uint8 and convert on the device (H5ImageDataModule does; in a Dataset: return the uint8 "
                "array, and divide in LightningModule.on_after_batch_transfer)",
                1.6,
                1.4,
                1.9,
            ),
        ),
        notes=("Rank 3 of 4 waits most; the others wait 11 % to 40 % for their own data",),
        free_echo_factor=1.9,
    ),
    "conversion on the host: the step waits 38 % of the time for data.",
)
"""Workers that make floats of 8-bit numbers; a device computes, on four ranks."""

COMPUTE = EpochRecord(
    replace(
        AMPLIFIED.counters,
        epoch=0,
        is_first=True,
        steps=StepTotals(
            num_steps=2_000,
            elapsed_seconds=400.0,
            wait_seconds=2.4,
            copy_seconds=0.1,
            compute_seconds=395.9,
            hook_seconds=1.6,
        ),
        loader=LoaderFacts("H5ImageDataModule", has_thread=True, is_own=True, batch_size=64, files=()),
        readers=usage(400.0, 0.005, 0.0245, 0.001),
        timeline=(),
    ),
    Verdict(Cause.COMPUTE, 0.006, figures=("99 % of the step is computing",)),
    "compute-bound: waits 1 % of the time for data; nothing to gain in the loader.",
)
"""A step that does not wait: shares of a tenth of a percent."""

UNKNOWN_ALL = EpochRecord(
    EpochCounters(
        epoch=1,
        steps=StepTotals(num_steps=7, elapsed_seconds=1.4, wait_seconds=0.9, compute_seconds=0.5),
        loader=LoaderFacts(num_workers=3),
        num_hidden_readers=3,
    ),
    Verdict(Cause.LOADER, 0.64, figures=("loader workers could not be watched",)),
    "loader-bound: the step waits 64 % of the time for data; loader workers could not be watched.",
    is_interim=True,
)
"""Nothing but the clock could be read, and the epoch is not over."""

LONG = EpochRecord(
    replace(
        ON_DEVICE.counters,
        epoch=123_456,
        num_hidden_readers=2,
        loader=replace(
            LOADER,
            name="a_package.with_a_long_name.in_some_module.ADataLoaderWithAVeryLongNameIndeedMoreThanOneLineOfACard",
            num_workers=64,
            files=(
                replace(FILE, path=LONG_PATH, command=LONG_COMMAND, key="/deep" * 20, filters=("shuffle", "zstd") * 6),
                replace(FILE, path=LONG_PATH + ".2", command=None, key=None, chunk_shape=None, is_direct=True),
            ),
        ),
        timeline=timeline(has_device=True, num_steps=40, first=99_999_990),
    ),
    Verdict(
        Cause.SYNC,
        0.4321,
        figures=tuple(f"{LONG_PATH} images: chunks of 32x224x224x3, {number} samples each" for number in (32, 64)),
        cures=tuple(
            Cure(f"{name} with a long name", f"`{LONG_COMMAND}` once, and then set OUT.h5 as its path", gain, low, high)
            for name, gain, low, high in [
                ("chunk order", 21.4, 1.0, 99.9),
                ("uint8 on the host", 2.0, 2.0, 2.0),
                ("H5DataModule", 1.3, 0.8, 1.5),
                ("transform on the device", 1.2, 1.1, 1.3),
                ("AVeryLongNameOfACureWithoutAnyBlankInIt", 1.1, 1.0, 1.2),
                ("64 workers", 1.0, 0.7, 1.0),
            ]
        ),
        notes=(f"{LONG_PATH} was not in memory", "a second note"),
    ),
    f"synchronisation-bound: the step waits 43 % of the time for data; {LONG_PATH}: chunks.",
)
"""Everything is as long as it can be."""

TINY_SHARES = replace(
    AMPLIFIED,
    counters=replace(
        AMPLIFIED.counters,
        epoch=0,
        is_first=True,
        steps=StepTotals(
            num_steps=100_000,
            elapsed_seconds=1000.0,
            wait_seconds=1.0,
            copy_seconds=1.0,
            compute_seconds=994.0,
            idle_seconds=3.0,
            sync_seconds=0.5,
            hook_seconds=0.9,
        ),
        timeline=timeline(has_device=True, num_steps=1),
    ),
)
"""One epoch, the first, with parts of a tenth of a percent and a timeline of one step."""


def epochs(number: int, of: EpochRecord = AMPLIFIED) -> list[EpochRecord]:
    """So many epochs; the first one cold, each a little different."""
    made = []
    for epoch in range(number):
        steps, is_first = of.counters.steps, epoch == 0
        extra = 60.0 if is_first else 3.0 * (epoch % 4)
        idle = None if steps.idle_seconds is None else steps.idle_seconds + extra
        steps = replace(
            steps,
            elapsed_seconds=steps.elapsed_seconds + extra,
            wait_seconds=steps.wait_seconds + extra,
            idle_seconds=idle,
        )
        counters = replace(of.counters, epoch=epoch, is_first=is_first, steps=steps)
        made.append(replace(of, counters=counters))
    return made
