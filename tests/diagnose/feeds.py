"""Counters of epochs for the tests of the verdict: one built from shares of the time, and any that can be drawn."""

from __future__ import annotations

from dataclasses import replace
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
COSTS = UnitCosts(read_seconds=4e-10, convert_seconds=1.2e-9, ship_seconds=1e-9)

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
    """An epoch whose readers spend these shares of their time; read_ratio is in bytes as delivered.

    `main_user` is the training's own part, in cores; where it loads by itself, that comes on top.
    """
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
    loading = 0.0 if loader.is_ahead else readers.busy_seconds
    main = Usage(wall_seconds=steps.elapsed_seconds, user_seconds=main_user * steps.elapsed_seconds + loading)
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

# Each draw costs time, so most values come from lists of what makes a difference, and sizes are powers of ten.
SHARES = st.floats(0, 1)
FLAGS = st.booleans()
PORTIONS = [0.0, 0.02, 0.3, 0.9]
PATHS = ["data/train.h5", "/data/with a blank/it's.h5", "/data/two\nlines"]
COMMAND = "gpufeed pack data/train.h5 OUT.h5 --keep-dtype"

FILES = [
    FileFacts(
        path=path,
        key=key,
        dtype=dtype,
        chunk_shape=None if rows is None else (rows, 3, 8, 8),
        chunk_samples=rows or 1,
        filters=filters,
        is_direct=not filters and is_direct,
        order=order,
        command=command,
        cached_share=None if command else 0.5,
    )
    for path in PATHS
    for key, dtype in [(None, None), ("images", "uint8"), ("a/b c", "float32"), ("x", "object")]
    for rows in (None, 1, 32)
    for filters in ((), ("gzip",))
    for is_direct in (False, True)
    for order in (None, "full", "window:4096")
    for command in (None, COMMAND)
]
LOADERS = [
    LoaderFacts(
        name="H5Loader" if is_own else "DataLoader",
        num_workers=num_workers,
        has_thread=has_thread,
        is_own=is_own,
        batch_size=None if is_pinned else 64,
        prefetch_factor=2 if num_workers > 2 else None,
        pin_memory=is_pinned,
        start_method="spawn" if num_workers else None,
        is_persistent=is_persistent,
    )
    for is_own, num_workers, has_thread in [
        (True, 0, True),
        (True, 0, True),
        (False, 0, False),
        (False, 0, True),
        (False, 1, False),
        (False, 2, True),
        (False, 3, False),
        (False, 64, False),
    ]
    for is_pinned in (None, False, True)
    for is_persistent in {False, num_workers > 0}
]
USAGES = [
    (user, system, queue)
    for user in PORTIONS
    for system in PORTIONS
    for queue in [None, *PORTIONS]
    if user + system + (queue or 0.0) <= 1
]
CORES = [0.5, 1.0, 1.5, 2.0, 8.0, 256.0]


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    """Numbers of any size: 10 to the power of low to high."""
    return st.floats(low, high).map(lambda one: 10.0**one)


@st.composite
def usages(draw: st.DrawFn, wall: float) -> Usage:
    """On a core, waiting for one, asleep: together the time watched."""
    user, system, queue = draw(st.sampled_from(USAGES))
    is_told = draw(FLAGS)
    return Usage(
        wall_seconds=wall,
        user_seconds=user * wall,
        system_seconds=system * wall,
        queue_seconds=None if queue is None else queue * wall,
        major_faults=draw(st.sampled_from([None, 0, 1, 12_345])),
        minor_faults=10**9 if is_told else None,
        read_bytes=draw(st.none() | st.just(0) | powers(0, 15).map(int)),
        disk_bytes=0 if is_told else None,
    )


@st.composite
def step_totals(draw: st.DrawFn) -> StepTotals:
    """Steps of 10 us to 100 s in parts that add up to no more than that."""
    num_steps = draw(st.sampled_from([1, 1000, 10**6]))
    elapsed = num_steps * draw(powers(-5, 2))
    wait, copy, compute, hooks, sync = draw(st.tuples(*[st.sampled_from([0, 1, 10, 100])] * 5))
    share = elapsed / max(1, wait + copy + compute + hooks + sync + draw(st.sampled_from([0, 0, 3])))
    has_ranks, (received, ready) = draw(FLAGS), draw(st.tuples(*[st.sampled_from([None, 0.0, 0.6, 1.0])] * 2))
    return StepTotals(
        num_steps=num_steps,
        elapsed_seconds=elapsed,
        wait_seconds=wait * share,
        receive_seconds=received and received * wait * share,
        ready_seconds=ready and ready * wait * share,
        copy_seconds=copy * share,
        compute_seconds=compute * share,
        idle_seconds=draw(st.none() | SHARES.map(lambda one: one * elapsed)),
        sync_seconds=sync * share if has_ranks else None,
        hook_seconds=hooks * share,
        compute_cpu_seconds=draw(st.sampled_from([None, 0.0, 0.5 * compute * share])) if has_ranks else None,
    )


@st.composite
def batches(draw: st.DrawFn) -> BatchFacts:
    """Without a tensor, of a few bytes, of gigabytes; all, some or none of it widened."""
    num_values = draw(st.just(0) | powers(0, 9).map(int))
    width, part = draw(st.sampled_from([(2, 0), (4, 0), (4, 1), (4, 2), (8, 1)]))
    widened = num_values // part if part else 0
    return BatchFacts(
        num_samples=None if part == 2 else 64,
        num_bytes=width * num_values,
        widened_bytes=width * widened,
        widened_values=widened,
        is_pinned=draw(FLAGS),
    )


@st.composite
def machines(draw: st.DrawFn) -> MachineFacts:
    """Half a core to many, with a GPU or without."""
    pressure, memory = draw(st.none() | SHARES), draw(st.sampled_from([None, 0, 10**9, 8 * 10**10]))
    return MachineFacts(
        num_cores=draw(st.sampled_from(CORES)),
        cpu_pressure=pressure,
        io_pressure=pressure,
        memory_pressure=pressure,
        device_utilisation=pressure,
        device_free_bytes=memory,
        device_total_bytes=draw(st.sampled_from([None, 0, 8 * 10**10])),
        device_peak_bytes=memory,
        costs=draw(st.none() | st.builds(UnitCosts, *[powers(-11, -6)] * 3)),
    )


@st.composite
def epochs(draw: st.DrawFn) -> EpochCounters:
    """Any epoch with a step, each counter there or not; what was watched is a part of it."""
    steps = draw(step_totals())
    files = tuple(draw(st.lists(st.sampled_from(FILES), max_size=2)))
    loader = replace(draw(st.sampled_from(LOADERS)), files=files)
    watched = draw(st.sampled_from([0, 1, max(1, steps.num_steps // 2), steps.num_steps]))
    wall = steps.step_seconds * watched
    has_ranks, is_known = steps.sync_seconds is not None, draw(FLAGS)
    training = draw(st.none() | usages(wall))
    return EpochCounters(
        epoch=7,
        is_first=draw(FLAGS),
        rank=1 if has_ranks else 0,
        num_ranks=8 if has_ranks else 1,
        steps=steps,
        readers=draw(st.none() | usages(wall * loader.num_readers)),
        main=training if is_known else None,
        training_thread=training,
        loader=loader,
        batch=draw(batches()),
        machine=draw(machines()),
        num_watched_steps=watched,
        num_main_steps=watched,
        start_seconds=draw(st.sampled_from([0.0, 0.1, 1000.0])),
    )


EPOCHS = epochs()
