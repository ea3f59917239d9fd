"""What was counted in an epoch, as values. Pure: no clock, no file, no device.

::

    one step     | sync | wait | copy |      compute      | hooks |
                 ^ Lightning asks the other ranks          ^ callbacks, loggers, progress bar
                        ^ the loop is blocked: the loader has no batch yet
                               ^ host to device
    readers      [ user | system | queue (no core free) | asleep (disk, or nothing to do) ]

Whatever could not be counted is None; a verdict then rests on the rest, and its predictions become wider.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Self

__all__ = [
    "BatchFacts",
    "EpochCounters",
    "FileFacts",
    "LoaderFacts",
    "MachineFacts",
    "Span",
    "StepTotals",
    "UnitCosts",
    "Usage",
    "total",
]


@dataclass(frozen=True)
class Usage:
    """What processes or threads used while they were watched, added up.

    Attributes:
        wall_seconds: Time watched; two processes for one second are two seconds.
        user_seconds: On a core, in their own code.
        system_seconds: On a core, in the kernel.
        queue_seconds: Ready to run while no core was free; None if the kernel does not say.
        major_faults: Pages fetched from storage.
        minor_faults: Pages mapped or zeroed in memory.
        read_bytes: Bytes asked for by read calls, from the page cache or not; None if not allowed to know. What is
            read through a memory map does not show here.
        disk_bytes: Bytes fetched from storage; None if unknown. Some virtual machines always say 0.
    """

    wall_seconds: float = 0.0
    user_seconds: float = 0.0
    system_seconds: float = 0.0
    queue_seconds: float | None = 0.0
    major_faults: int | None = 0
    minor_faults: int | None = 0
    read_bytes: int | None = 0
    disk_bytes: int | None = 0

    def __add__(self, other: Self) -> Self:
        """Both together; what is unknown of one is unknown of both."""
        return self._combined(other, 1)

    def __sub__(self, other: Self) -> Self:
        """What was added since `other`, never less than nothing."""
        return self._combined(other, -1)

    def scaled(self, factor: float) -> Self:
        """As if there had been more of them, doing the same.

        Args:
            factor: How many times as many.

        Returns:
            Every figure times that.
        """
        values: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        scaled: dict[str, Any] = {
            name: None if value is None else type(value)(value * factor) for name, value in values.items()
        }
        return type(self)(**scaled)

    def _combined(self, other: Self, sign: int) -> Self:
        values: dict[str, Any] = {}
        for one in fields(self):
            mine, theirs = getattr(self, one.name), getattr(other, one.name)
            values[one.name] = None if mine is None or theirs is None else max(0, mine + sign * theirs)
        return type(self)(**values)

    @property
    def busy_seconds(self) -> float:
        """On a core."""
        return self.user_seconds + self.system_seconds

    def share(self, seconds: float | None) -> float | None:
        """A time as a share of the time watched.

        Args:
            seconds: Such as `queue_seconds`.

        Returns:
            0 to 1; None if either is unknown.
        """
        return None if seconds is None or self.wall_seconds <= 0 else min(1.0, seconds / self.wall_seconds)

    @property
    def asleep_seconds(self) -> float | None:
        """Neither on a core nor waiting for one: for storage or the network, or with nothing to do."""
        if self.queue_seconds is None:
            return None
        return max(0.0, self.wall_seconds - self.busy_seconds - self.queue_seconds)


@dataclass(frozen=True)
class StepTotals:
    """Where the time of the steps went, added up over them.

    Attributes:
        num_steps: Steps counted.
        elapsed_seconds: Their time by the wall clock, validation apart.
        wait_seconds: The training loop was blocked because the loader had no batch ready.
        receive_seconds: Part of `wait_seconds` in which the training thread was on a core: taking over what workers
            have made, or loading itself where there are none. None if unknown.
        ready_seconds: Part of `wait_seconds` in requests at which a batch was ready, so that only handing it over was
            waited for. None if the loader does not say.
        copy_seconds: Moving batches to the device: on a CUDA device its own time, else the host's.
        compute_seconds: Forward, backward and update: on a CUDA device its own time, else the host's.
        idle_seconds: The device had nothing to do; None where the host computes itself.
        sync_seconds: From the end of a step to the next request for a batch, with several ranks: Lightning asks there
            in every step whether a rank was told to stop. None with one rank.
        hook_seconds: Callbacks, loggers and the progress bar after a step.
        compute_cpu_seconds: Time on a core of the training thread during `compute_seconds`; None if unknown.
        num_timed: Steps whose device time is known; times of the device are scaled to all steps.
        num_watched: Steps that were watched in full, where not all were: of the others `elapsed_seconds` and
            `wait_seconds` are counted, and how the rest of their time divides is taken from these. None: all.
    """

    num_steps: int = 0
    elapsed_seconds: float = 0.0
    wait_seconds: float = 0.0
    receive_seconds: float | None = None
    ready_seconds: float | None = None
    copy_seconds: float = 0.0
    compute_seconds: float = 0.0
    idle_seconds: float | None = None
    sync_seconds: float | None = None
    hook_seconds: float = 0.0
    compute_cpu_seconds: float | None = None
    num_timed: int = 0
    num_watched: int | None = None

    @property
    def data_seconds(self) -> float:
        """What waiting for data cost: where a device runs behind the host, only what left it idle."""
        return self.wait_seconds if self.idle_seconds is None else min(self.wait_seconds, self.idle_seconds)

    @property
    def step_seconds(self) -> float:
        """One step by the wall clock; 0 without steps."""
        return self.elapsed_seconds / self.num_steps if self.num_steps else 0.0

    def share(self, seconds: float | None) -> float:
        """A time as a share of the elapsed time.

        Args:
            seconds: None counts as 0.

        Returns:
            0 to 1.
        """
        return min(1.0, max(0.0, seconds / self.elapsed_seconds)) if seconds and self.elapsed_seconds > 0 else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the time that the step waits for data, 0 to 1."""
        return self.share(self.data_seconds)


@dataclass(frozen=True)
class FileFacts:
    """A file that is read, and how its samples lie in it.

    Attributes:
        path: The file.
        key: The dataset that decides the speed; None if not known.
        dtype: Element type as stored, as numpy names it.
        chunk_shape: None unless chunked.
        chunk_samples: Samples that share a chunk; 1 where each can be read alone.
        filters: Compression and other filters, by name.
        is_direct: Whether samples are copied straight from the file, or from memory that holds all of it decoded.
        order: How the loader goes through it: "full", "window:N", "none"; None if not known.
        command: The line to type that would make the file fast; None if it is, or if that is not known.
        cached_share: Share of the file in the page cache, 0 to 1; None if not known.
    """

    path: str
    key: str | None = None
    dtype: str | None = None
    chunk_shape: tuple[int, ...] | None = None
    chunk_samples: int = 1
    filters: tuple[str, ...] = ()
    is_direct: bool = False
    order: str | None = None
    command: str | None = None
    cached_share: float | None = None


@dataclass(frozen=True)
class LoaderFacts:
    """How the loader is set up.

    Attributes:
        name: Its class.
        num_workers: Processes that load; 0 if there are none.
        has_thread: Whether a thread of the training process reads ahead.
        is_own: Whether it is this package's loader, so that advice can name its arguments.
        batch_size: Samples of a batch on this rank; None if not known.
        prefetch_factor: Batches that each worker makes ahead; None if not known.
        pin_memory: Whether batches come in page-locked memory; None if not known.
        start_method: How workers are started: "fork", "spawn", "forkserver"; None if not known.
        is_persistent: Whether workers are kept from epoch to epoch.
        files: What it reads, as far as known.
    """

    name: str = "loader"
    num_workers: int = 0
    has_thread: bool = False
    is_own: bool = False
    batch_size: int | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    start_method: str | None = None
    is_persistent: bool = False
    files: tuple[FileFacts, ...] = ()

    @property
    def num_readers(self) -> int:
        """Processes or threads that load at the same time, at least 1."""
        return max(1, self.num_workers)

    @property
    def is_ahead(self) -> bool:
        """Whether batches are made while a step runs."""
        return self.num_workers > 0 or self.has_thread


@dataclass(frozen=True)
class BatchFacts:
    """What a batch holds, seen on the host before it is copied.

    Attributes:
        num_samples: Samples; None if that cannot be told.
        num_bytes: Bytes of all tensors.
        widened_bytes: Bytes of floating-point tensors whose values are so few that 8-bit numbers must have been their
            source.
        widened_values: Elements of those tensors.
        is_pinned: Whether the largest tensor is in page-locked memory.
    """

    num_samples: int | None = None
    num_bytes: int = 0
    widened_bytes: int = 0
    widened_values: int = 0
    is_pinned: bool = False

    @property
    def compact_bytes(self) -> int:
        """What the batch would have if its widened values were still 8-bit numbers."""
        return self.num_bytes - self.widened_bytes + self.widened_values


@dataclass(frozen=True)
class UnitCosts:
    """What this machine needs for the simple parts of loading, measured on one core.

    Attributes:
        read_seconds: Copying one byte out of the page cache by a read call.
        convert_seconds: Making one 32-bit float in [0, 1] of an 8-bit number.
        ship_seconds: Handing one byte from a worker process to the training process.
    """

    read_seconds: float
    convert_seconds: float
    ship_seconds: float


@dataclass(frozen=True)
class MachineFacts:
    """The machine, or the share of it that this process may use.

    Attributes:
        num_cores: Cores that this process may use, by affinity and control group; may be a fraction.
        cpu_pressure: Share of the time that something waited for a core, 0 to 1; None if unknown.
        io_pressure: Share of the time that something waited for storage; None if unknown.
        memory_pressure: Share of the time that something waited for memory; None if unknown.
        device_utilisation: Share of the time that any kernel ran on the device; None if unknown.
        device_free_bytes: Device memory that is free for this process; None if unknown or not a GPU.
        device_total_bytes: Device memory in all; None if unknown or not a GPU.
        device_peak_bytes: Most device memory that tensors took in the epoch; None if unknown or not a GPU.
        costs: Unit costs; None if not measured.
    """

    num_cores: float = 1.0
    cpu_pressure: float | None = None
    io_pressure: float | None = None
    memory_pressure: float | None = None
    device_utilisation: float | None = None
    device_free_bytes: int | None = None
    device_total_bytes: int | None = None
    device_peak_bytes: int | None = None
    costs: UnitCosts | None = None


@dataclass(frozen=True)
class Span:
    """One stretch of time in the timeline of a few steps.

    Attributes:
        lane: "host" or "device".
        phase: "sync", "wait", "copy", "compute" or "hooks".
        begin: Seconds since the beginning of the timeline.
        end: Seconds since the beginning of the timeline.
        step: Which step it belongs to, counted from 0 in the epoch.
    """

    lane: str
    phase: str
    begin: float
    end: float
    step: int


@dataclass(frozen=True)
class EpochCounters:
    """All that is known of an epoch, or of the part of it so far, on one rank.

    Attributes:
        epoch: Counts from 0.
        is_first: Whether it is the first of this run: files come from storage, workers and kernels start.
        rank: Of the data-parallel ranks.
        num_ranks: How many there are.
        steps: Where the time went.
        readers: What the loader's processes or threads used, while watched; None if there are none, or not to be seen.
        main: What the training process used, its reading threads apart.
        training_thread: What its thread that trains used; without workers or a reading thread it loads too.
        loader: How the loader is set up.
        batch: What a batch holds.
        machine: The machine.
        timeline: A few steps, stretch by stretch.
        num_hidden_readers: Readers that could not be watched.
        num_watched_steps: Steps with a batch of their own that were taken while `readers` were watched.
        num_main_steps: Steps that were taken while `main` and `training_thread` were watched.
        start_seconds: From the beginning of the epoch to its first request for a batch: workers are started there.
    """

    epoch: int = 0
    is_first: bool = False
    rank: int = 0
    num_ranks: int = 1
    steps: StepTotals = field(default_factory=StepTotals)
    readers: Usage | None = None
    main: Usage | None = None
    training_thread: Usage | None = None
    loader: LoaderFacts = field(default_factory=LoaderFacts)
    batch: BatchFacts = field(default_factory=BatchFacts)
    machine: MachineFacts = field(default_factory=MachineFacts)
    timeline: tuple[Span, ...] = ()
    num_hidden_readers: int = 0
    num_watched_steps: int = 0
    num_main_steps: int = 0
    start_seconds: float = 0.0

    @property
    def read_ratio(self) -> float | None:
        """Bytes read for each byte delivered; None if unknown, 0 where files are read through a memory map."""
        if self.readers is None or self.readers.read_bytes is None:
            return None
        delivered = self.num_watched_steps * self.batch.num_bytes
        return self.readers.read_bytes / delivered if delivered else None


def total(usages: Iterable[Usage]) -> Usage:
    """All of them together.

    Args:
        usages: Any number.

    Returns:
        Nothing used for none.
    """
    result = Usage()
    for usage in usages:
        result = result + usage
    return result
