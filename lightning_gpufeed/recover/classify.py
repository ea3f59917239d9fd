"""Is this error an out-of-memory, and if it is, can a smaller step cure it?

::

    error, root of its causes first
      a sign of NEVER in any of them            ->  NEVER      (first: a worker's error keeps its original type)
      an error of this package in it            ->  OTHER      (says itself what to do)
      out-of-memory, but in a loader's worker   ->  NEVER
      out-of-memory of the device               ->  DEVICE
      out-of-memory of the host                 ->  HOST, or NEVER where the training is on an accelerator
      a text that often hides an out-of-memory  ->  PROBABLE
      anything else                             ->  OTHER

Few of these errors have a type of their own; most are a `RuntimeError` with a text that a library wrote. The tables
below hold these texts as regular expressions, in any case of letters; white space in a text counts as one blank.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from lightning_gpufeed.errors import GpuFeedError

__all__ = ["Diagnosis", "Kind", "classify"]


class Kind(enum.Enum):
    """What an error is, and what may be done about it."""

    DEVICE = "device memory ran out: retry"
    HOST = "host memory ran out in the step: retry only when training on the CPU"
    PROBABLE = "may be out-of-memory: retry once if memory is low, else re-raise"
    NEVER = (
        "never retry: sticky device fault, collective failure, DataLoader worker / pin-memory thread / killed worker, "
        "or host memory while the training is on an accelerator"
    )
    OTHER = "no out-of-memory at all"


@dataclass(frozen=True)
class Diagnosis:
    """What `classify` found.

    Args:
        kind: What the error is.
        advice: For `Kind.NEVER`, one sentence that says what to do; else None.
        requested_bytes: Size of the allocation that failed; None if the error does not say it, or is `Kind.OTHER`.
    """

    kind: Kind
    advice: str | None
    requested_bytes: int | None


# The signs ------------------------------------------------------------------------------------------------


def _any_of(*signs: str) -> re.Pattern[str]:
    """One expression out of several."""
    return re.compile("|".join(f"(?:{sign})" for sign in signs), re.IGNORECASE)


_COLLECTIVE_ADVICE = (
    "A collective operation failed, and its communicator cannot be used again: look for the first error on all ranks "
    "(NCCL_DEBUG=INFO) and leave memory outside of torch's cache (PYTORCH_ALLOC_CONF, a smaller batch)."
)

_NEVER: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "The workers of the loader ran out of shared memory: enlarge it (docker --shm-size, /dev/shm), or lower "
        "num_workers or prefetch_factor.",
        _any_of(
            r"DataLoader worker \([^)]*\) is killed by signal: Bus error",
            r"insufficient shared memory \(shm\)",
            r"unable to allocate shared memory ?\(shm\)",
            r"unable to (write to|resize) file </torch_",
        ),
    ),
    (
        "A worker of the loader was killed or ended, most often by the kernel for want of host memory: lower "
        "num_workers or prefetch_factor, or ask for more memory.",
        _any_of(r"DataLoader worker \(pid.*?\) (is killed by signal|exited unexpectedly)"),
    ),
    (
        "The thread that pins batches ended: set pin_memory=False, or lower num_workers or prefetch_factor.",
        _any_of(r"Pin memory thread exited unexpectedly"),
    ),
    (
        "The device is in a state that only a new process ends: run again with CUDA_LAUNCH_BLOCKING=1 to find the "
        "operation at fault (often an index out of range).",
        _any_of(
            r"an illegal (memory access|instruction) was encountered",
            # The hint below every CUDA error, also an out-of-memory, speaks of "device-side assertions".
            r"device-side assert triggered",
            r"unspecified launch (failure|error)",
            r"launch timed out and was terminated",
            r"error: misaligned address",
            r"error: (invalid program counter|hardware stack error)",
            r"uncorrectable (ECC|NVLink) error",
            r"\b(cuda|hip)Error(IllegalAddress|Assert|LaunchFailure|MisalignedAddress|EccUncorrectable)\b",
            r"\bCUDA_ERROR_(ILLEGAL_ADDRESS|ASSERT|LAUNCH_FAILED|MISALIGNED_ADDRESS|CONTEXT_IS_DESTROYED)\b",
            r"Memory access fault by GPU",
            r"\bUR_RESULT_ERROR_DEVICE_LOST\b",
        ),
    ),
    (
        _COLLECTIVE_ADVICE,
        _any_of(
            r"\b[NRXH]CCL (error|communicator)",
            r"\bnccl(UnhandledCuda|System|Internal|InvalidUsage|InvalidArgument|Remote)Error\b",
            r"\bWatchdog caught collective operation timeout",
            r"\bgloo[/\\]transport\b|\bGloo connectFullMesh failed",
            r"\boneCCL\b.*\b(failed|error|exception)\b",
            r"failed to pass monitoredBarrier",
            r"Timed out waiting [0-9]+ms for (recv|send) operation",
            r"Application timeout caused pair closure",
        ),
    ),
)

_IN_LOADER = _any_of(r"\bCaught \w+ in (DataLoader worker process|pin memory thread)\b")
_IN_LOADER_ADVICE = (
    "Memory ran out in a worker or the pin-memory thread of the loader, where no step can be made smaller: lower "
    "num_workers or prefetch_factor, or set pin_memory=False."
)

_HOST_ADVICE = (
    "The host's memory ran out, not the device's, so a smaller step would not help: lower num_workers or "
    "prefetch_factor, hold less on the host, or ask for more memory."
)

_DEVICE = _any_of(
    r"\b(CUDA|HIP|XPU|NPU|MUSA|MLU) out of memory",
    r"\b(CUDA|HIP|XPU|NPU|MUSA)( driver| runtime)? error( \([0-9]+\))? ?: ?out of memory",
    r"\bAllocation on device( [0-9]+)? would exceed allowed memory",  # backend:cudaMallocAsync
    r"\b(cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory|hipErrorMemoryAllocation)\b",
    r"\b(CUBLAS|CUDNN|CUSPARSE|CUSOLVER|HIPBLAS|HIPSPARSE|HIPSOLVER)_STATUS_ALLOC_FAILED\b",
    r"\b(CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED|CURAND_STATUS_ALLOCATION_FAILED)\b",
    r"\b(CUFFT|HIPFFT)_ALLOC_FAILED\b",
    r"\b(rocblas_status_memory_error|miopenStatusAllocFailed)\b",
    r"\bTriton Error \[\w+\]: .{0,40}out of memory",  # [CUDA]: the words alone, [HIP]: a code before them
    r"\bMPS backend out of memory",
    r"\bInvalid buffer size: [0-9.]+ ([KMGT]i?B|bytes)\b",  # MPS: larger than any buffer may be
    r"\b(PI|UR_RESULT)_ERROR_(OUT_OF_DEVICE_MEMORY|MEM_OBJECT_ALLOCATION_FAILURE)\b",
    r"\bOut of memory allocating [0-9,]+ bytes",  # CuPy, as a MemoryError
)

_HOST = _any_of(
    r"\bDefaultCPUAllocator: (can't allocate|not enough) memory",
    r"\[Errno 12\]",
    r"\bCannot allocate memory( \(12\)|\))",
    r"\bUnable to allocate [0-9.]+ \w+ for an array\b",  # numpy
    r"\bCaught \w*MemoryError in (DataLoader|pin memory)",  # numpy's cannot be made anew, so is a RuntimeError
    r"\bstd::bad_alloc\b",
    r"\bCUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED\b",
    r"\b(PI|UR_RESULT)_ERROR_OUT_OF_HOST_MEMORY\b",
)

# oneDNN says no more than this. On the CPU it was seen to be memory; other devices have other reasons as well.
# "could not create a primitive descriptor" is about shapes and types.
_ONEDNN = _any_of(r"\bcould not create a primitive\b(?! descriptor)")

_PROBABLE = _any_of(
    r"\bCUDNN_STATUS_(NOT_SUPPORTED|NOT_INITIALIZED|INTERNAL_ERROR|EXECUTION_FAILED)",
    r"\bunable to find an engine to execute this computation",
    r"\bUnable to find a valid cuDNN algorithm",
    r"\b(CUBLAS|CUSOLVER|CUSPARSE|HIPBLAS|HIPSOLVER|HIPSPARSE)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)\b",
    r"\bcusolver error: 7\b",
    r"\b(CUFFT|HIPFFT)_INTERNAL_ERROR\b",
    r"\bmiopenStatus(InternalError|UnknownError)\b",
    r"INTERNAL ASSERT FAILED at \S*CachingAllocator\.cpp",
    r"\b(CUDA|HIP)( driver)? error: device not ready",
    r"\bINT_MAX\b|canUse32BitIndexMath|larger than currently supported by the MPS backend",
    r"\b(PI|UR_RESULT)_ERROR_OUT_OF_RESOURCES\b",
    r"\bcould not execute a primitive\b",
)

# A text of another type is the user's: `ValueError("CUDA out of memory is no valid name")`.
_READ_TYPES = (RuntimeError, MemoryError, OSError)


def _types(module: object, *names: str) -> tuple[type, ...]:
    """The types of these names that a module has."""
    return tuple(getattr(module, name) for name in names if hasattr(module, name))


_OUT_OF_MEMORY_TYPES = _types(torch, "OutOfMemoryError")
# A build of torch without distributed has the module, but nothing in it.
_COLLECTIVE_TYPES = _types(torch.distributed, "DistError", "DistBackendError")

_REQUESTED = re.compile(
    r"\b(?:(?:tried|trying|unable) to allocate|unable to mmap|requested ?:|out of memory allocating|"
    r"invalid buffer size:|CUDA calloc(?: async)?) "
    # Bounded, so that the number stays finite. numpy writes "745. GiB", CuPy "1,024 bytes".
    r"(?P<number>[0-9]{1,20}(?:,[0-9]{3}){0,6}(?:\.[0-9]{0,20})?) ?(?P<unit>bytes|[KMGTPE]i?B)\b",
    re.IGNORECASE,
)

# "GB" is 1024 ** 3 too, as MPS writes it.
_UNITS = {"b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50, "e": 2**60}


# Reading an error -----------------------------------------------------------------------------------------


def classify(error: BaseException, device_type: str) -> Diagnosis:
    """Tell whether an error is an out-of-memory that a smaller step may cure.

    An error counts as what it was raised from: its `__cause__`, that of the cause, and so on, as with
    `raise RuntimeError("step failed") from error` or what torch.compile makes of an error in its backend. The one at
    the root decides, because the others only report it; what is certain goes before what is probable, and a sign of
    `Kind.NEVER` in any of them before all. `__context__` alone does not count: an error in a handler of an
    out-of-memory is a fault of its own, which a retry would hide.

    An error in a DataLoader's worker that has nothing to do with memory is `Kind.OTHER`: advice about memory would
    mislead. So is whatever ends a program (`KeyboardInterrupt`, `SystemExit`), from any cause, and an error of this
    package.

    Args:
        error: Any exception. Only its type, text and causes are looked at; it is left as it is.
        device_type: Where the training runs: "cpu", "cuda", "xpu", "mps", ...

    Returns:
        The kind, advice for `Kind.NEVER`, and the size that was asked for if the text says it. Never raises.
    """
    if not isinstance(error, Exception):
        return Diagnosis(Kind.OTHER, None, None)
    chain = list(_causes(error))[::-1]
    texts = [_text(link) for link in chain]
    kind, advice = _judge(chain, texts, device_type)
    if kind is Kind.OTHER:
        return Diagnosis(kind, None, None)
    sizes = [size for text in texts if (size := _requested_bytes(text)) is not None]
    return Diagnosis(kind, advice, sizes[0] if sizes else None)


def _judge(chain: list[BaseException], texts: list[str], device_type: str) -> tuple[Kind, str | None]:
    """The kind and advice of errors with the root first."""
    for link, text in zip(chain, texts, strict=True):
        if advice := _never(link, text):
            return Kind.NEVER, advice
    if any(isinstance(link, GpuFeedError) for link in chain):
        return Kind.OTHER, None
    found = [_memory_kind(link, text, device_type) for link, text in zip(chain, texts, strict=True)]
    certain = [kind for kind in found if kind in (Kind.DEVICE, Kind.HOST)]
    kind = next(iter(certain), Kind.PROBABLE if Kind.PROBABLE in found else Kind.OTHER)
    if kind is not Kind.OTHER and any(_IN_LOADER.search(text) for text in texts):
        return Kind.NEVER, _IN_LOADER_ADVICE
    if kind is Kind.HOST and device_type != "cpu":
        return Kind.NEVER, _HOST_ADVICE
    return kind, None


def _never(error: BaseException, text: str) -> str | None:
    """Advice, if this error by itself rules out a retry."""
    if isinstance(error, _COLLECTIVE_TYPES):
        return _COLLECTIVE_ADVICE
    return next((advice for advice, signs in _NEVER if signs.search(text)), None)


def _memory_kind(error: BaseException, text: str, device_type: str) -> Kind:
    """Whose memory ran out, by the type and text of one error."""
    if isinstance(error, _OUT_OF_MEMORY_TYPES) or _DEVICE.search(text):
        return Kind.DEVICE
    if isinstance(error, MemoryError) or _HOST.search(text):
        return Kind.HOST
    if _ONEDNN.search(text):
        return Kind.HOST if device_type == "cpu" else Kind.PROBABLE
    return Kind.PROBABLE if _PROBABLE.search(text) else Kind.OTHER


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, outermost first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:  # `raise error from error` is a circle
        seen.add(id(link))
        yield link
        link = link.__cause__


def _text(error: BaseException) -> str:
    """The text of an error of a type that libraries raise, in one line."""
    if not isinstance(error, _READ_TYPES):
        return ""
    try:
        return " ".join(str(error).split())
    except Exception:  # a `__str__` of somebody's own
        return ""


def _requested_bytes(text: str) -> int | None:
    """The size of an allocation that a text names."""
    if (match := _REQUESTED.search(text)) is None:
        return None
    return round(float(match["number"].replace(",", "")) * _UNITS[match["unit"][0].lower()])
