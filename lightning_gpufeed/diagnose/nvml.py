"""How busy a CUDA device is, and how full, by NVIDIA's management library, if it and `nvidia-ml-py` are there."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

import torch

__all__ = ["DeviceWatch"]


class DeviceWatch:
    """Asks the driver of one device now and then; knows nothing, and says so, where there is nobody to ask.

    The driver counts kernels of all processes on the device, over the last sixth of a second to one second. A device
    on which a single small kernel always runs counts as busy.

    Example:
        >>> watch = DeviceWatch(torch.device("cpu"))
        >>> watch.sample()
        >>> watch.utilisation is None
        True
    """

    def __init__(self, device: torch.device) -> None:
        """Nobody is asked yet: the library is opened by the first sample.

        Args:
            device: The device that steps run on; only of a CUDA device anything is known.
        """
        self._device = device
        self._is_open = False
        self._nvml: Any = None
        self._handle: Any = None
        self._shutdown: weakref.finalize[[Any], DeviceWatch] | None = None
        self._has_rates = True
        self._has_memory = True
        self._memory: Any = None
        self.reset()

    def reset(self) -> None:
        """Begin a new average."""
        self._busy_percent = 0.0
        self._num_samples = 0

    def sample(self) -> None:
        """Ask once, without waiting for the device; never fails."""
        if not self._is_open:
            self._is_open = True
            self._open()
        if self._handle is None:
            return
        # What a device does not tell once, such as the load of a slice of it, it never tells.
        if self._has_rates:
            try:
                self._busy_percent += float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu)
                self._num_samples += 1
            except Exception:
                self._has_rates = False
        if self._has_memory:
            try:
                self._memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
            except Exception:
                self._has_memory = False

    @property
    def utilisation(self) -> float | None:
        """Share of the time that any kernel ran, 0 to 1, averaged over the samples since `reset`; None if unknown."""
        return self._busy_percent / self._num_samples / 100 if self._num_samples else None

    @property
    def free_bytes(self) -> int | None:
        """Device memory that no process has taken, as of the latest sample; None if unknown."""
        return None if self._memory is None else int(self._memory.free)

    @property
    def total_bytes(self) -> int | None:
        """Device memory in all; None if unknown."""
        return None if self._memory is None else int(self._memory.total)

    def close(self) -> None:
        """Let go of the library; what was sampled stays. Closing twice is allowed, dropping the watch closes too."""
        self._is_open = True  # for good
        self._handle = None
        if self._shutdown is not None:
            self._shutdown()

    def _open(self) -> None:
        """Open the library and find the device, if both are there."""
        if self._device.type != "cuda":
            return
        # Package, library or driver may be missing, too old or broken: then nothing is known.
        try:
            self._nvml = importlib.import_module("pynvml")
            self._nvml.nvmlInit()
        except Exception:
            return
        self._shutdown = weakref.finalize(self, _shut_down, self._nvml)
        # At the end of the interpreter nothing needs to be given back, and the library may be gone already.
        self._shutdown.atexit = False
        self._handle = _handle_of(self._device, self._nvml)
        if self._handle is None:
            self.close()


def _handle_of(device: torch.device, nvml: Any) -> Any:
    """The device by the identity that torch sees: its number may be another one here, by `CUDA_VISIBLE_DEVICES`."""
    try:
        uuid = str(torch.cuda.get_device_properties(device).uuid)
    except Exception:
        return None
    for prefix in ("GPU-", "MIG-"):  # a whole device, or a slice of one
        try:
            return nvml.nvmlDeviceGetHandleByUUID(prefix + uuid)
        except Exception:
            continue
    return None


def _shut_down(nvml: Any) -> None:
    """The library counts how often it was opened, so others who use it keep it."""
    try:
        nvml.nvmlShutdown()
    except Exception:
        return
