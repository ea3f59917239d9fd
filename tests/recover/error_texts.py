"""Texts of errors as torch and the libraries below it write them: from this machine, and as users reported them."""

from __future__ import annotations

import torch

KIB, MIB, GIB = 2**10, 2**20, 2**30

DRIVER_HINT = """
Search for `cudaError{}' in the reference of the runtime's types for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""

# name -> (type, text, bytes that were asked for)
DEVICE: dict[str, tuple[type[Exception], str, int | None]] = {
    "cuda": (
        torch.OutOfMemoryError,
        "CUDA out of memory. Tried to allocate 7.45 GiB. GPU 0 has a total capacity of 14.56 GiB of which 3.24 GiB is "
        "free. Process 1 has 11.32 GiB memory in use. Of the allocated memory 8.40 GiB is allocated by PyTorch, and "
        "2.80 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory "
        "Management",
        round(7.45 * GIB),
    ),
    "cuda before there was a type": (
        RuntimeError,
        "CUDA out of memory. Tried to allocate 1024.00 MiB (GPU 0; 15.90 GiB total capacity; 14.25 GiB already "
        "allocated; 991.56 MiB free; 607.00 KiB cached)",
        GIB,
    ),
    "cuda, a size beyond all measure": (
        torch.OutOfMemoryError,
        "CUDA out of memory. Tried to allocate more than 1EB memory.",
        None,
    ),
    "cuda driver": (
        torch.AcceleratorError,
        "CUDA error: out of memory" + DRIVER_HINT.format("MemoryAllocation"),
        None,
    ),
    "cuda driver, without a blank": (RuntimeError, "CUDA error:out of memory", None),
    "cuda driver api": (RuntimeError, "CUDA driver error: out of memory", None),
    "cuda of old": (
        RuntimeError,
        "cuda runtime error (2) : out of memory at /x/aten/src/THC/THCTensorRandom.cu:25",
        None,
    ),
    "cudaMallocAsync": (
        torch.OutOfMemoryError,
        "Allocation on device 5 would exceed allowed memory. (out of memory)\nCurrently allocated     : 54.14 GiB\n"
        "Requested               : 686.41 MiB\nDevice limit            : 79.35 GiB\nFree (according to CUDA): "
        "27.19 MiB\nPyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB",
        round(686.41 * MIB),
    ),
    "hip": (
        torch.OutOfMemoryError,
        "HIP out of memory. Tried to allocate 2.00 MiB. GPU 0 has a total capacity of 287.98 GiB of which 275.86 GiB "
        "is free. 1.05 GiB allowed; Of the allocated memory 1017.01 MiB is allocated by PyTorch, with 17.00 MiB "
        "allocated in private pools (e.g., HIP Graphs), and 54.99 MiB is reserved by PyTorch but unallocated.",
        2 * MIB,
    ),
    "hip driver": (RuntimeError, "HIP error: out of memory", None),
    "xpu": (
        torch.OutOfMemoryError,
        "XPU out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 16.50 GiB. Of the allocated "
        "memory 16.50 GiB is allocated by PyTorch, and 0 bytes is reserved by PyTorch but unallocated. Please use "
        "`empty_cache` to release all unoccupied cached memory.",
        512 * MIB,
    ),
    "xpu driver": (
        RuntimeError,
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        None,
    ),
    "xpu driver, earlier": (
        RuntimeError,
        "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
        None,
    ),
    "mps": (
        RuntimeError,
        "MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 GB, max allowed: 6.80 GB). Tried "
        "to allocate 768.00 MB on private pool. Use PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0 to disable upper limit for "
        "memory allocations (may cause system failure).",
        768 * MIB,
    ),
    "mps, a few bytes": (
        RuntimeError,
        "MPS backend out of memory (MPS allocated: 16.00 GB, other allocations: 3.31 GB, max allowed: 18.13 GB). Tried "
        "to allocate 256 bytes on shared pool.",
        256,
    ),
    "mps, of late": (
        RuntimeError,
        "MPS backend out of memory (MPS allocated: 9.57 GiB, other allocations: 17.35 GiB, max allowed: 27.20 GiB). "
        "Tried to allocate 292.50 MiB on private pool",
        round(292.5 * MIB),
    ),
    "mps, larger than a buffer may be": (RuntimeError, "Invalid buffer size: 19.38 GiB", round(19.38 * GIB)),
    "npu": (
        RuntimeError,
        "NPU out of memory. Tried to allocate 52.00 MiB (NPU 0; 60.96 GiB total capacity; 59.36 GiB already allocated;",
        52 * MIB,
    ),
    "cublas": (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", None),
    "cudnn": (RuntimeError, "cuDNN error: CUDNN_STATUS_ALLOC_FAILED", None),
    "cudnn 9": (RuntimeError, "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", None),
    "hipblas": (RuntimeError, "CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`", None),
    "triton": (RuntimeError, "Triton Error [CUDA]: out of memory", None),
    "triton on hip": (RuntimeError, "Triton Error [HIP]:  Code: 2, Messsage: out of memory", None),
    "inductor, which drops the cause": (
        RuntimeError,
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 7.93 GiB",
        20 * MIB,
    ),
    "data parallel": (
        torch.OutOfMemoryError,
        "Caught OutOfMemoryError in replica 0 on device 0.\nOriginal Traceback (most recent call last):\n  File "
        '"parallel_apply.py", line 96, in _worker\n    output = module(*input, **kwargs)\ntorch.OutOfMemoryError: CUDA '
        "out of memory. Tried to allocate 512 bytes.",
        512,
    ),
    "cupy": (
        MemoryError,
        "Out of memory allocating 1,073,741,824 bytes (allocated so far: 2,147,483,648 bytes).",
        GIB,
    ),
    "no text": (torch.OutOfMemoryError, "", None),
}

HOST: dict[str, tuple[type[Exception], str, int | None]] = {
    "torch on Linux": (
        RuntimeError,
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 67108864 bytes. Error code 12 (Cannot allocate memory)",
        64 * MIB,
    ),
    "torch on Windows": (
        RuntimeError,
        "[enforce fail at ..\\c10\\core\\CPUAllocator.cpp:79] data. DefaultCPUAllocator: not enough memory: you tried "
        "to allocate 1207959552 bytes.",
        1207959552,
    ),
    "numpy": (
        MemoryError,
        "Unable to allocate 745. GiB for an array with shape (10, 10) and data type float64",
        745 * GIB,
    ),
    "numpy, in a text": (RuntimeError, "job failed: Unable to allocate 8.0 KiB for an array with shape (1,)", 8 * KIB),
    "python": (MemoryError, "", None),
    "c++": (RuntimeError, "std::bad_alloc", None),
    "mmap": (OSError, "[Errno 12] Cannot allocate memory", None),
    "torch's mmap": (
        RuntimeError,
        "unable to mmap 134217728 bytes from file <x.pt>: Cannot allocate memory (12)",
        128 * MIB,
    ),
    "xpu, its host": (
        RuntimeError,
        "level_zero backend failed with error: 38 (UR_RESULT_ERROR_OUT_OF_HOST_MEMORY)",
        None,
    ),
}

PROBABLE = {
    "cudnn, non-contiguous": "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a "
    "non-contiguous input.",
    "cudnn, spelled otherwise": "CuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "cudnn execution": "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "engine found": "FIND was unable to find an engine to execute this computation",
    "engine got": "GET was unable to find an engine to execute this computation",
    "cublas": "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cublas, internal": "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`",
    "cusolver": "cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR, when calling `cusolverDnCreate(handle)`",
    "cusolver, by number": "cusolver error: 7, when calling `cusolverDnCreate(handle)`",
    "cufft": "cuFFT error: CUFFT_INTERNAL_ERROR",
    "allocator": 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/CUDACachingAllocator.cpp":830, please '
    "report a bug to PyTorch. ",
    "allocator, built elsewhere": 'NVML_SUCCESS == r INTERNAL ASSERT FAILED at "/pytorch/c10/cuda/'
    'CUDACachingAllocator.cpp":1015, please report a bug to PyTorch.',
    "not ready": "CUDA driver error: device not ready",
    "too many elements": "nonzero is not supported for tensors with more than INT_MAX elements, file a support request",
    "xpu": "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES) -5 (PI_ERROR_OUT_OF_RESOURCES)",
    "xpu, of late": "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
    "onednn": "could not execute a primitive",
}

IN_WORKER = """Caught {0} in {1}.
Original Traceback (most recent call last):
  File "worker.py", line 374, in _worker_loop
    data = fetcher.fetch(index)
{0}: {2}
"""

# name -> (type, text, a word of the advice)
NEVER: dict[str, tuple[type[Exception], str, str]] = {
    "illegal access": (
        torch.AcceleratorError,
        "CUDA error: an illegal memory access was encountered" + DRIVER_HINT.format("IllegalAddress"),
        "CUDA_LAUNCH_BLOCKING",
    ),
    "illegal access on hip": (
        RuntimeError,
        "HIP error: an illegal memory access was encountered",
        "CUDA_LAUNCH_BLOCKING",
    ),
    "assert": (
        torch.AcceleratorError,
        "CUDA error: device-side assert triggered" + DRIVER_HINT.format("Assert"),
        "CUDA_LAUNCH_BLOCKING",
    ),
    "assert of old": (
        RuntimeError,
        "cuda runtime error (59) : device-side assert triggered at /x/THCReduceAll.cuh:327",
        "CUDA_LAUNCH_BLOCKING",
    ),
    "launch": (RuntimeError, "CUDA error: unspecified launch failure", "CUDA_LAUNCH_BLOCKING"),
    "address": (RuntimeError, "CUDA error: misaligned address", "CUDA_LAUNCH_BLOCKING"),
    "triton": (
        RuntimeError,
        "Triton Error [CUDA]: an illegal memory access was encountered",
        "CUDA_LAUNCH_BLOCKING",
    ),
    "memory cells": (RuntimeError, "CUDA error: uncorrectable ECC error encountered", "CUDA_LAUNCH_BLOCKING"),
    "xpu lost": (
        RuntimeError,
        "level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)",
        "CUDA_LAUNCH_BLOCKING",
    ),
    "nccl": (
        RuntimeError,
        "NCCL error in: /x/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1269, internal error, NCCL version 2.14.3\n"
        "ncclInternalError: Internal check failed.\nLast error:\nFailed to CUDA calloc async 1920 bytes",
        "NCCL_DEBUG",
    ),
    "nccl, by type": (
        torch.distributed.DistBackendError,
        "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:340, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\nCuda failure 2 'out of memory'",
        "NCCL_DEBUG",
    ),
    "a collective, by type alone": (torch.distributed.DistBackendError, "CUDA out of memory", "NCCL_DEBUG"),
    "nccl of old": (RuntimeError, "NCCL Error 1: unhandled cuda error", "NCCL_DEBUG"),
    "watchdog": (
        RuntimeError,
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1) ran for 600000 milliseconds",
        "NCCL_DEBUG",
    ),
    "gloo": (
        RuntimeError,
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:10895",
        "NCCL_DEBUG",
    ),
    "device memory in a worker": (
        torch.OutOfMemoryError,
        IN_WORKER.format(
            "OutOfMemoryError", "DataLoader worker process 3", "CUDA out of memory. Tried to allocate 2.00 GiB."
        ),
        "num_workers",
    ),
    "pin-memory thread": (
        torch.AcceleratorError,
        IN_WORKER.format("AcceleratorError", "pin memory thread for device 0", "CUDA error: out of memory"),
        "pin_memory=False",
    ),
    "pin-memory thread, by type alone": (
        torch.OutOfMemoryError,
        "Caught OutOfMemoryError in pin memory thread for device 0.",
        "pin_memory=False",
    ),
    "maybe memory, in a worker": (
        RuntimeError,
        IN_WORKER.format("RuntimeError", "DataLoader worker process 0", "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED"),
        "num_workers",
    ),
    "pin-memory thread gone": (RuntimeError, "Pin memory thread exited unexpectedly", "pin_memory=False"),
    "worker killed": (RuntimeError, "DataLoader worker (pid 1234) is killed by signal: Killed. ", "num_workers"),
    "worker gone": (
        RuntimeError,
        "DataLoader worker (pid(s) 3216, 3217) exited unexpectedly with exit code 1. Details are lost due to "
        "multiprocessing. Rerunning with num_workers=0 may give better error trace.",
        "num_workers",
    ),
    "shared memory": (
        RuntimeError,
        "DataLoader worker (pid 46794) is killed by signal: Bus error. It is possible that dataloader's workers are "
        "out of shared memory. Please try to raise your shared memory limit.",
        "shm",
    ),
    "shared memory full": (
        RuntimeError,
        "unable to write to file </torch_31911_952036340_6686>: No space left on device (28)",
        "shm",
    ),
}

OTHER: dict[str, BaseException] = {
    "memory as a word": RuntimeError("the memory bank is out of keys"),
    "out of memory as words": RuntimeError("we ran out of memory slots in the replay buffer"),
    "a user's check": ValueError("CUDA out of memory is no valid name for a class"),
    "an assertion": AssertionError("CUDA out of memory"),
    "shapes": RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    "a batch size": RuntimeError("Tried to allocate 2.00 GiB."),
    "onednn's shapes": RuntimeError("could not create a primitive descriptor for the matmul primitive. Run workload"),
    "a kernel's shared memory": RuntimeError(
        "out of resource: shared memory, Required: 126978, Hardware limit: 101376. Reducing block sizes or "
        "`num_stages` may help."
    ),
    "another driver error": torch.AcceleratorError(
        "CUDA error: invalid device ordinal" + DRIVER_HINT.format("Invalid")
    ),
    "what DDP says after an abort": RuntimeError("Expected to have finished reduction in the prior iteration"),
    "a file": FileNotFoundError(2, "No such file or directory"),
    "a fault of a dataset": ValueError(
        IN_WORKER.format("ValueError", "DataLoader worker process 0", "invalid literal")
    ),
    "a fault of a dataset, read": RuntimeError(
        IN_WORKER.format("RuntimeError", "DataLoader worker process 0", "bad file")
    ),
    "ctrl-c": KeyboardInterrupt(),
    "exit": SystemExit("CUDA out of memory"),
    "generator": GeneratorExit(),
}
