"""Counters of epochs for the tests of the verdict: one built from shares of the time, and any that can be drawn."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from lightning_gpufeed.diagnose.counters import (
    BatchFacts,
    EpochCounters,
    FileFacts,
    LoaderFacts,
    MachineFacts,
    StepTotals,
    UnitCosts,
    Usage,
)

NUM_STEPS = 400
BATCH_BYTES = 9_633_792
"""64 images of 224 x 224 pixels."""
COSTS = UnitCosts(read_seconds=1.6e-10, convert_seconds=5.2e-10, ship_seconds=4.1e-10)

UINT8 = BatchFacts(num_samples=64, num_bytes=BATCH_BYTES)
FLOATS = BatchFacts(num_samples=64, num_bytes=4 * BATCH_BYTES)
WIDENED = BatchFacts(
    num_samples=64, num_bytes=4 * BATCH_BYTES, widened_bytes=4 * BATCH_BYTES, widened_values=BATCH_BYTES
)

CHUNKED = FileFacts(
    path="data/train.h5",
    key="images",
    dtype="uint8",
    chunk_shape=(32, 3, 224, 224),
    chunk_samples=32,
    command="gpufeed pack data/train.h5 OUT.h5",
)
COMPRESSED = FileFacts(
    path="data/train.h5",
    key="images",
    dtype="uint8",
    chunk_shape=(32, 3, 224, 224),
    chunk_samples=32,
    filters=("gzip",),
    order="full",
    command="gpufeed pack data/train.h5 OUT.h5",
)
ROWS = FileFacts(path="data/rows.h5", key="images", dtype="uint8", chunk_shape=(1, 3, 224, 224))

OWN = LoaderFacts(name="H5Loader", has_thread=True, is_own=True, batch_size=64)


def workers(num_workers: int, **changes: Any) -> LoaderFacts:
    """A `DataLoader` that keeps its workers."""
    return LoaderFacts(
        name="DataLoader", num_workers=num_workers, batch_size=64, is_persistent=num_workers > 0, **changes
    )


def steps_of(
    wait: float = 0.6,
    *,
    step_seconds: float = 0.05,
    num_steps: int = NUM_STEPS,
    copy: float = 0.0,
    hooks: float = 0.0,
    idle: float | None = None,
    **changes: Any,
) -> StepTotals:
    """Shares of the time of a step; what is left is computing."""
    elapsed = num_steps * step_seconds
    busy_on_host = 1 - wait - copy - hooks
    return StepTotals(
        num_steps=num_steps,
        elapsed_seconds=elapsed,
        wait_seconds=wait * elapsed,
        copy_seconds=copy * elapsed,
        compute_seconds=(busy_on_host if idle is None else 1 - idle - copy) * elapsed,
        idle_seconds=None if idle is None else idle * elapsed,
        hook_seconds=hooks * elapsed,
        num_timed=num_steps,
        **changes,
    )


def epoch_of(
    *,
    steps: StepTotals | None = None,
    loader: LoaderFacts | None = None,
    user: float = 0.2,
    system: float = 0.2,
    queue: float | None = 0.2,
    read_ratio: float | None = 1.0,
    batch: BatchFacts = UINT8,
    cores: float = 2.0,
    main_user: float = 0.1,
    costs: UnitCosts | None = COSTS,
    **changes: Any,
) -> EpochCounters:
    """An epoch whose readers spend these shares of their time; read_ratio is in bytes as delivered."""
    steps = steps_of() if steps is None else steps
    loader = workers(2) if loader is None else loader
    wall = loader.num_readers * (steps.elapsed_seconds if loader.is_ahead else steps.wait_seconds)
    readers = Usage(
        wall_seconds=wall,
        user_seconds=user * wall,
        system_seconds=system * wall,
        queue_seconds=None if queue is None else queue * wall,
        read_bytes=None if read_ratio is None else int(read_ratio * steps.num_steps * batch.num_bytes),
    )
    main = Usage(wall_seconds=steps.elapsed_seconds, user_seconds=main_user * steps.elapsed_seconds)
    told: dict[str, Any] = {
        "epoch": 1,
        "steps": steps,
        "readers": readers,
        "main": main,
        "training_thread": main,
        "loader": loader,
        "batch": batch,
        "machine": MachineFacts(num_cores=cores, costs=costs),
        "num_watched_steps": steps.num_steps,
        "num_main_steps": steps.num_steps,
    }
    return EpochCounters(**(told | changes))


# Any that can be drawn -------------------------------------------------------------------------------------

SHARES = st.floats(0, 1)
FLAGS = st.booleans()


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers of any size: 10 to the power of low to high."""
    return st.floats(low, high).map(lambda one: 10.0**one)


@st.composite
def usages(draw: st.DrawFn, wall: float) -> Usage:
    """On a core, waiting for one, asleep: together the time watched."""
    user, system, queue = (draw(st.integers(0, 100)) for _ in range(3))
    scale = wall / max(100, user + system + queue)
    return Usage(
        wall_seconds=wall,
        user_seconds=user * scale,
        system_seconds=system * scale,
        queue_seconds=draw(st.sampled_from([None, queue * scale])),
        major_faults=draw(st.sampled_from([None, 0, 1, 12_345])),
        minor_faults=draw(st.sampled_from([None, 0, 10**9])),
        read_bytes=draw(st.none() | st.just(0) | powers(0, 15).map(int)),
        disk_bytes=draw(st.sampled_from([None, 0, 10**12])),
    )


@st.composite
def step_totals(draw: st.DrawFn) -> StepTotals:
    """Steps of 10 us to 100 s in parts that add up to no more than that."""
    num_steps = draw(st.sampled_from([1, 7, 1000, 10**6]))
    elapsed = num_steps * draw(powers(-5, 2))
    wait, copy, compute, hooks, sync, other = (draw(st.integers(0, 100)) for _ in range(6))
    share = elapsed / max(1, wait + copy + compute + hooks + sync + other)
    has_ranks, has_device = draw(FLAGS), draw(FLAGS)
    return StepTotals(
        num_steps=num_steps,
        elapsed_seconds=elapsed,
        wait_seconds=wait * share,
        copy_seconds=copy * share,
        compute_seconds=compute * share,
        idle_seconds=draw(st.none() | SHARES.map(lambda one: one * elapsed)) if has_device else None,
        sync_seconds=sync * share if has_ranks else None,
        hook_seconds=hooks * share,
        compute_cpu_seconds=draw(st.none() | SHARES.map(lambda one: one * compute * share)) if has_ranks else None,
    )


@st.composite
def files(draw: st.DrawFn) -> FileFacts:
    """Chunked or not, named or not."""
    rows = draw(st.sampled_from([None, 1, 2, 32, 10**4]))
    return FileFacts(
        path=draw(st.sampled_from(["data/train.h5", "/data/with a blank/it's.h5", "train"])),
        key=draw(st.sampled_from([None, "images", "a/b c"])),
        dtype=draw(st.sampled_from([None, "uint8", "float32", "int64", "bfloat16", "object"])),
        chunk_shape=None if rows is None else (rows, 3, 8, 8),
        chunk_samples=rows or 1,
        filters=draw(st.sampled_from([(), ("gzip",), ("shuffle", "blosc-zstd")])),
        is_direct=draw(FLAGS),
        order=draw(st.sampled_from([None, "full", "window:4096", "none"])),
        command=draw(st.sampled_from([None, "gpufeed pack data/train.h5 OUT.h5 --keep-dtype"])),
        cached_share=draw(st.sampled_from([None, 0.0, 0.5, 1.0])),
    )


@st.composite
def loaders(draw: st.DrawFn) -> LoaderFacts:
    """Ours, or another one with or without workers, and with a thread before it or not."""
    is_own = draw(FLAGS)
    num_workers = 0 if is_own else draw(st.sampled_from([0, 0, 1, 2, 3, 16, 64]))
    return LoaderFacts(
        name="H5Loader" if is_own else "DataLoader",
        num_workers=num_workers,
        has_thread=is_own or draw(FLAGS),
        is_own=is_own,
        batch_size=draw(st.sampled_from([None, 1, 512])),
        prefetch_factor=draw(st.sampled_from([None, 2])) if num_workers else None,
        pin_memory=draw(st.sampled_from([None, False, True])),
        start_method=draw(st.sampled_from([None, "fork", "spawn", "forkserver"])) if num_workers else None,
        is_persistent=bool(num_workers) and draw(FLAGS),
        files=draw(st.lists(files(), max_size=2).map(tuple)),
    )


@st.composite
def batches(draw: st.DrawFn) -> BatchFacts:
    """Without a tensor, of a few bytes, of gigabytes; all, some or none of it widened."""
    num_values = draw(st.just(0) | powers(0, 9).map(int))
    width = draw(st.sampled_from([2, 4, 8]))
    widened = draw(st.sampled_from([0, num_values, num_values // 2]))
    return BatchFacts(
        num_samples=draw(st.sampled_from([None, 1, 512])),
        num_bytes=width * num_values,
        widened_bytes=width * widened,
        widened_values=widened,
        is_pinned=draw(FLAGS),
    )


@st.composite
def machines(draw: st.DrawFn) -> MachineFacts:
    """Half a core to many, with a GPU or without."""
    memory = st.sampled_from([None, 0, 10**9, 8 * 10**10])
    pressures = [draw(st.none() | SHARES) for _ in range(4)]
    costs = draw(st.none() | st.builds(UnitCosts, *[powers(-11, -6)] * 3))
    cores = draw(st.sampled_from([0.5, 1.0, 1.5, 2.0, 8.0, 64.0, 256.0]))
    return MachineFacts(cores, *pressures, *(draw(memory) for _ in range(3)), costs)


@st.composite
def epochs(draw: st.DrawFn) -> EpochCounters:
    """Any epoch with a step, each counter there or not; what was watched is a part of it."""
    steps, loader = draw(step_totals()), draw(loaders())
    watched = draw(st.sampled_from([0, 1, max(1, steps.num_steps // 2), steps.num_steps]))
    wall = steps.step_seconds * watched
    num_ranks = draw(st.sampled_from([2, 8])) if steps.sync_seconds is not None else 1
    return EpochCounters(
        epoch=draw(st.integers(0, 1000)),
        is_first=draw(FLAGS),
        rank=draw(st.integers(0, num_ranks - 1)),
        num_ranks=num_ranks,
        steps=steps,
        readers=draw(st.none() | usages(wall * loader.num_readers)),
        main=draw(st.none() | usages(wall)),
        training_thread=draw(st.none() | usages(wall)),
        loader=loader,
        batch=draw(batches()),
        machine=draw(machines()),
        num_watched_steps=watched,
        num_main_steps=watched,
        start_seconds=draw(st.just(0.0) | powers(-3, 3)),
    )


EPOCHS = epochs()
