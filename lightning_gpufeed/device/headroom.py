"""How much memory a device has left, and how to give back what nobody uses: one answer for every kind of device.

::

                 free_bytes                               can_allocate           release
    CPU          MemAvailable, or the address space       asks for it and        collects cycles, returns
                 left under `ulimit -v`                   drops it, untouched    the heap's free pages
    CUDA, XPU    free on the device + kept by torch's     by the statistics      collects cycles, returns
                 allocator and in no tensor                                      the allocator's free blocks
    MPS          recommended maximum - held by tensors    by the statistics      the same
    others       unknown                                  yes                    collects cycles
"""

from __future__ import annotations

import ctypes
import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["can_allocate", "describe_memory", "free_bytes", "is_low", "release"]

LOW_SHARE = 0.1
"""Below this share of free memory a failure whose text does not say so may still come from lack of memory."""


@dataclass(frozen=True)
class _Memory:
    """What is known of a device: bytes that a new tensor could get, and out of how many."""

    free_bytes: int
    total_bytes: int


def free_bytes(device: torch.device) -> int | None:
    """Bytes that new tensors could take, fragmentation aside.

    Args:
        device: Any device.

    Returns:
        The bytes; None where the device or the operating system does not tell.
    """
    memory = _memory_of(device)
    return None if memory is None else memory.free_bytes


def can_allocate(device: torch.device, num_bytes: int) -> bool:
    """Tell whether that many bytes could be allocated now; costs microseconds.

    Args:
        device: Any device.
        num_bytes: How many, 0 or more.

    Returns:
        On the CPU the answer of the allocator itself, whose memory is dropped before a page of it is touched. On an
        accelerator what the statistics say; nothing is allocated, and where there are none the answer is True.
    """
    if device.type == "cpu":
        try:
            torch.empty(num_bytes, dtype=torch.uint8, device=device)
        except (RuntimeError, MemoryError):
            return False
        return True
    # The allocator's own statistics first: asking the driver takes longer, and a cache that is full enough decides.
    if _unused_bytes(device) >= num_bytes:
        return True
    memory = _memory_of(device)
    return memory is None or memory.free_bytes >= num_bytes


def is_low(device: torch.device) -> bool:
    """Tell whether less than a tenth of the memory is free.

    Args:
        device: Any device.

    Returns:
        False where it is not known.
    """
    memory = _memory_of(device)
    return memory is not None and memory.free_bytes < LOW_SHARE * memory.total_bytes


def release(device: torch.device) -> None:
    """Give back memory that nothing uses: reference cycles, then what the allocator keeps for later.

    Call it outside of an `except` block: a traceback that is being handled holds the tensors of its frames.

    Args:
        device: Any device.
    """
    gc.collect()
    if device.type == "cpu":
        # Freed blocks below the mapping threshold stay in the heap of the C library, with all their pages.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
        if trim is not None:
            trim(0)
        return
    empty_cache = getattr(torch.get_device_module(device), "empty_cache", None)
    if empty_cache is not None:
        empty_cache()


def describe_memory(device: torch.device) -> str:
    """Say in one line how full a device is.

    Args:
        device: Any device.

    Returns:
        For example "cuda:0: 70.10 GiB in tensors, 71.00 GiB reserved, 8.20 GiB free of 79.10 GiB, 1 out-of-memory
        error, 3 allocations repeated after a clean-up"; what is not known is left out.
    """
    parts = []
    if device.type == "cpu":
        if (resident := _status_bytes("VmRSS")) is not None and (mapped := _status_bytes("VmSize")) is not None:
            parts.append(f"{_gib(resident)} resident, {_gib(mapped)} mapped")
    else:
        module = torch.get_device_module(device)
        if (allocated := _asked(module, "memory_allocated", device)) is not None:
            parts.append(f"{_gib(allocated)} in tensors")
        if (reserved := _asked(module, "memory_reserved", device)) is not None:
            parts.append(f"{_gib(reserved)} reserved")
    if (memory := _memory_of(device)) is not None:
        parts.append(f"{_gib(memory.free_bytes)} free of {_gib(memory.total_bytes)}")
    if device.type != "cpu":
        statistics = _asked(torch.get_device_module(device), "memory_stats", device) or {}
        if "num_ooms" in statistics:
            parts.append(_counted(statistics["num_ooms"], "out-of-memory error"))
        if "num_alloc_retries" in statistics:
            parts.append(_counted(statistics["num_alloc_retries"], "allocation") + " repeated after a clean-up")
    return f"{device}: {', '.join(parts) or 'memory unknown'}"


def _memory_of(device: torch.device) -> _Memory | None:
    """Everything this module knows of free memory."""
    if device.type == "cpu":
        return _host_memory()
    module = torch.get_device_module(device)
    if device.type == "mps":
        # One pool for host and device: the system recommends a maximum, tensors are what counts against it.
        total = int(module.recommended_max_memory())
        return _Memory(max(0, total - int(module.current_allocated_memory())), total)
    info = _asked(module, "mem_get_info", device)
    if info is None:
        return None
    free, total = int(info[0]) + _unused_bytes(device), int(info[1])
    fraction = _asked(module, "get_per_process_memory_fraction", device)
    if fraction is not None and fraction < 1:  # how a card is shared
        allowed, allocated = int(fraction * total), _asked(module, "memory_allocated", device)
        free, total = min(free, max(0, allowed - int(allocated or 0))), allowed
    return _Memory(free, total)


def _unused_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator of an accelerator holds and no tensor uses."""
    module = torch.get_device_module(device)
    reserved, allocated = _asked(module, "memory_reserved", device), _asked(module, "memory_allocated", device)
    return 0 if reserved is None or allocated is None else int(reserved) - int(allocated)


def _asked(module: Any, name: str, device: torch.device) -> Any:
    """What a function of a device module says of the device; None if it has none or the device has no such thing."""
    function = getattr(module, name, None)
    if function is None:
        return None
    try:
        return function(device)
    except (RuntimeError, NotImplementedError):
        return None


def _host_memory() -> _Memory | None:
    """Memory of this machine, or the address space of this process where that is the narrower limit."""
    try:
        system = _fields("/proc/meminfo")
    except OSError:
        return None
    memory = _Memory(system["MemAvailable"], system["MemTotal"])
    import resource  # only where there is a /proc

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    mapped = _status_bytes("VmSize")
    if limit == resource.RLIM_INFINITY or mapped is None:
        return memory
    left = _Memory(max(0, limit - mapped), limit)
    return min(memory, left, key=lambda one: one.free_bytes)


def _status_bytes(name: str) -> int | None:
    """A size of this process, as the kernel counts it."""
    try:
        return _fields("/proc/self/status").get(name)
    except OSError:
        return None


def _fields(path: str) -> dict[str, int]:
    """The sizes in a file of /proc that has lines like `VmSize:  1234 kB`, in bytes."""
    lines = (line.split() for line in Path(path).read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
