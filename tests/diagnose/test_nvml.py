"""What is known of a device by NVIDIA's library. Without a GPU the library is a stand-in, but for what fails really.

The twin with a real device is tests/gpu/diagnose/test_nvml_gpu.py.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_gpufeed.diagnose.nvml import DeviceWatch

CUDA = torch.device("cuda", 0)
UUID = "01234567-89ab-cdef-0123-456789abcdef"


class Library(SimpleNamespace):
    """Stands in for `pynvml`: one device with an identity, and a note of every call.

    Args:
        identity: By which the device is found.
        loads: What each look at the load gives in turn; an error is raised, and then the last one goes on.
        has_memory: Whether the device tells its memory.
        can_start: Whether there is a driver.
    """

    def __init__(
        self,
        *,
        identity: str = f"GPU-{UUID}",
        loads: list[int | Exception] | None = None,
        has_memory: bool = True,
        can_start: bool = True,
    ) -> None:
        super().__init__()
        self.calls: list[str] = []
        self._identity, self._loads = identity, loads or [50]
        self._has_memory, self._can_start = has_memory, can_start

    def nvmlInit(self) -> None:  # noqa: N802 - its name
        self.calls.append("init")
        if not self._can_start:
            raise RuntimeError("driver not loaded")

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.calls.append("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self.calls.append(uuid)
        if uuid != self._identity:
            raise RuntimeError("not found")
        return "handle"

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:  # noqa: N802
        assert handle == "handle"
        self.calls.append("load")
        load = self._loads.pop(0) if len(self._loads) > 1 else self._loads[0]
        if isinstance(load, Exception):
            raise load
        return SimpleNamespace(gpu=load, memory=99)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:  # noqa: N802
        assert handle == "handle"
        self.calls.append("memory")
        if not self._has_memory:
            raise RuntimeError("not supported")
        return SimpleNamespace(free=10, total=40, used=30)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Library], Library]:
    """Put a library in the place of the real one, and a device that torch sees."""

    def put(library: Library) -> Library:
        monkeypatch.setitem(sys.modules, "pynvml", library)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=UUID))
        return library

    return put


def told(watch: DeviceWatch) -> tuple[float | None, int | None, int | None]:
    return watch.utilisation, watch.free_bytes, watch.total_bytes


UNKNOWN = (None, None, None)


def test_without_a_driver_the_real_library_leaves_all_unknown() -> None:
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        pass
    else:
        pynvml.nvmlShutdown()
        pytest.skip("there is a driver here")
    watch = DeviceWatch(CUDA)
    watch.sample()
    watch.sample()
    assert told(watch) == UNKNOWN
    watch.close()


def test_the_real_library_has_all_that_the_stand_in_has() -> None:
    pynvml = pytest.importorskip("pynvml", reason="needs nvidia-ml-py")
    names = [name for name in dir(Library) if name.startswith("nvml")]
    assert len(names) == 5
    assert all(callable(getattr(pynvml, name)) for name in names)
    assert {"free", "total"} <= {name for name, _ in pynvml.c_nvmlMemory_t._fields_}
    assert "gpu" in {name for name, _ in pynvml.c_nvmlUtilization_t._fields_}


def test_without_the_package_all_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    watch = DeviceWatch(CUDA)
    watch.sample()
    assert told(watch) == UNKNOWN
    watch.close()


def test_of_another_device_than_a_cuda_one_nobody_is_asked(install: Callable[[Library], Library]) -> None:
    library = install(Library())
    watch = DeviceWatch(torch.device("cpu"))
    watch.sample()
    watch.close()
    assert told(watch) == UNKNOWN
    assert library.calls == []


def test_the_load_is_the_average_of_the_samples(install: Callable[[Library], Library]) -> None:
    install(Library(loads=[0, 100, 50, 90]))
    watch = DeviceWatch(CUDA)
    assert told(watch) == UNKNOWN
    for _ in range(3):
        watch.sample()
    assert told(watch) == (0.5, 10, 40)
    watch.reset()
    assert told(watch) == (None, 10, 40)
    watch.sample()
    assert watch.utilisation == 0.9
    watch.close()
    assert told(watch) == (0.9, 10, 40)


@pytest.mark.parametrize(
    ("identity", "asked"), [(f"GPU-{UUID}", [f"GPU-{UUID}"]), (f"MIG-{UUID}", [f"GPU-{UUID}", f"MIG-{UUID}"])]
)
def test_the_device_is_found_by_its_identity_not_by_its_number(
    install: Callable[[Library], Library], identity: str, asked: list[str]
) -> None:
    library = install(Library(identity=identity))
    watch = DeviceWatch(CUDA)
    assert library.calls == []  # nothing is opened before it is needed
    watch.sample()
    assert library.calls == ["init", *asked, "load", "memory"]
    watch.close()


def test_what_a_device_does_not_tell_is_not_asked_again(install: Callable[[Library], Library]) -> None:
    library = install(Library(loads=[RuntimeError("not supported")]))
    watch = DeviceWatch(CUDA)
    watch.sample()
    watch.sample()
    assert told(watch) == (None, 10, 40)
    assert (library.calls.count("load"), library.calls.count("memory")) == (1, 2)
    watch.close()


def test_an_error_on_the_way_keeps_what_was_sampled(install: Callable[[Library], Library]) -> None:
    install(Library(loads=[40, RuntimeError("device is lost")], has_memory=False))
    watch = DeviceWatch(CUDA)
    for _ in range(3):
        watch.sample()
    assert told(watch) == (0.4, None, None)
    watch.close()


def test_the_library_is_shut_down_once_and_not_opened_again(install: Callable[[Library], Library]) -> None:
    library = install(Library())
    watch = DeviceWatch(CUDA)
    watch.sample()
    watch.close()
    watch.close()
    watch.sample()
    assert [call for call in library.calls if call in ("init", "shutdown")] == ["init", "shutdown"]
    assert library.calls[-1] == "shutdown"


def test_a_watch_that_never_sampled_has_nothing_to_shut_down(install: Callable[[Library], Library]) -> None:
    library = install(Library())
    watch = DeviceWatch(CUDA)
    watch.close()
    watch.sample()  # too late
    assert library.calls == []


def test_dropping_a_watch_shuts_the_library_down(install: Callable[[Library], Library]) -> None:
    library = install(Library())
    watch = DeviceWatch(CUDA)
    watch.sample()
    del watch
    gc.collect()
    assert library.calls[-1] == "shutdown"


def test_a_driver_that_does_not_start_is_not_shut_down(install: Callable[[Library], Library]) -> None:
    library = install(Library(can_start=False))
    watch = DeviceWatch(CUDA)
    watch.sample()
    watch.sample()
    watch.close()
    assert told(watch) == UNKNOWN
    assert library.calls == ["init"]


def test_a_device_that_is_not_found_ends_the_asking(install: Callable[[Library], Library]) -> None:
    library = install(Library(identity="GPU-another"))
    watch = DeviceWatch(CUDA)
    watch.sample()
    watch.sample()
    assert told(watch) == UNKNOWN
    assert library.calls == ["init", f"GPU-{UUID}", f"MIG-{UUID}", "shutdown"]


def test_a_torch_that_does_not_know_the_device_ends_the_asking(
    install: Callable[[Library], Library], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = install(Library())

    def fail(_: torch.device) -> None:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    watch = DeviceWatch(CUDA)
    watch.sample()
    assert told(watch) == UNKNOWN
    assert library.calls == ["init", "shutdown"]
