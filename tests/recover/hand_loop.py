"""A training loop by hand, without Lightning, and faults that can be put anywhere into it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

from lightning_gpufeed.recover.attempt import Recovery
from lightning_gpufeed.recover.logged import LogCall
from lightning_gpufeed.recover.merge import merge_values
from lightning_gpufeed.recover.plan import RetryPlan
from lightning_gpufeed.recover.report import OOMEvent
from lightning_gpufeed.recover.split_batch import BatchSplitter, Split
from lightning_gpufeed.recover.states import ModuleStates
from lightning_gpufeed.recover.work import StepWork
from tests.doubles import EventLog, KeptList

CPU = torch.device("cpu")
DEVICE_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB"
HOST_TEXT = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4194304 bytes. Error code 12"
PROBABLE_TEXT = "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"

Step = Callable[[nn.Module, Any, "HandLogs"], "torch.Tensor | None"]


def device_error() -> RuntimeError:
    return torch.OutOfMemoryError(DEVICE_TEXT)


def host_error() -> RuntimeError:
    return RuntimeError(HOST_TEXT)


def probable_error() -> RuntimeError:
    return RuntimeError(PROBABLE_TEXT)


class HandLogs:
    """What was logged, row by row; calls can be kept back."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, Any, int | None]] = []
        self._held: list[LogCall] | None = None
        self._num_saved = 0

    def log(self, key: str, value: Any, reduce_name: str = "mean", batch_size: int | None = None) -> None:
        if isinstance(value, torch.Tensor):
            value = value.detach().clone()
        call = LogCall(key, value, reduce_name, batch_size)
        if self._held is None:
            self.apply(call)
        else:
            self._held.append(call)

    def save(self) -> None:
        self._num_saved = len(self.rows)

    def put_back(self) -> None:
        del self.rows[self._num_saved :]

    def begin(self) -> list[LogCall]:
        self._held = []
        return self._held

    def end(self) -> None:
        self._held = None

    def apply(self, call: LogCall) -> None:
        value = call.value._forward_cache if isinstance(call.value, Metric) else call.value
        self.rows.append((call.key, float(value), call.batch_size))


class Faults:
    """Raises in chosen attempts, where the module asks for it.

    Args:
        wanted: (batch, attempt) -> phase, microbatch, what makes the error.
    """

    def __init__(self, wanted: dict[tuple[int, int], tuple[str, int, Callable[[], BaseException]]]) -> None:
        self.wanted = wanted
        self.batch = self.attempt = self.microbatch = -1
        self.is_running = False
        self.activations: list[weakref.ref[torch.Tensor]] = KeptList()

    def num_alive(self) -> int:
        """Activations of all attempts so far that something still holds."""
        return sum(activation() is not None for activation in self.activations)

    def begin_batch(self, batch: int) -> None:
        self.batch, self.attempt = batch, -1

    def begin_attempt(self) -> None:
        self.attempt, self.microbatch, self.is_running = self.attempt + 1, -1, True

    def end_attempt(self) -> None:
        self.is_running = False

    def place(self, hidden: torch.Tensor) -> None:
        """In the middle of forward; a fault of backward comes when the gradient of this gets here."""
        if not self.is_running:
            return
        self.microbatch += 1
        self.activations.append(weakref.ref(hidden))
        phase, microbatch, make = self.wanted.get((self.batch, self.attempt), ("", 0, device_error))
        if microbatch != self.microbatch:
            return
        if phase == "forward":
            raise make()
        if phase == "backward":

            def fail(_: torch.Tensor) -> None:
                raise make()

            hidden.register_hook(fail)


class Net(nn.Module):
    """Two layers with a place for faults between them."""

    def __init__(self, faults: Faults | None = None, between: nn.Module | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.first, self.between, self.last = nn.Linear(6, 8), between or nn.Tanh(), nn.Linear(8, 4)
        self.faults = faults
        self.kept: list[BaseException] = KeptList()
        with torch.no_grad():
            for parameter in [*self.first.parameters(), *self.last.parameters()]:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.between(self.first(x))
        if self.faults is not None:
            self.faults.place(hidden)
        return self.last(hidden)


def cross_entropy_step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
    """The usual: a mean over samples."""
    x, y = batch
    loss = nn.functional.cross_entropy(module(x), y)
    logs.log("loss", loss)
    return loss


def make_batches(number: int, num_samples: int = 16, seed: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(num_samples, 6, generator=generator),
            torch.randint(0, 4, (num_samples,), generator=generator),
        )
        for _ in range(number)
    ]


class LoggedWork(StepWork):
    """Says what is done with it, and lets faults happen in attempts only."""

    def __init__(self, log: EventLog, faults: Faults | None, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._log, self._faults = log, faults

    def save(self) -> None:
        self._log.add("save")
        super().save()

    def undo(self) -> None:
        self._log.add("undo")
        super().undo()

    def run(self, split: Split) -> Any:
        self._log.add(f"run {len(split.microbatches)}")
        if self._faults is None:
            return super().run(split)
        self._faults.begin_attempt()
        try:
            return super().run(split)
        finally:
            self._faults.end_attempt()

    def finish(self) -> None:
        self._log.add("finish")
        super().finish()


class HandLoop:
    """Trains a module step by step; a batch that runs out of memory is recovered."""

    def __init__(
        self,
        module: nn.Module,
        step: Step = cross_entropy_step,
        *,
        plan: RetryPlan | None = None,
        splitter: BatchSplitter | None = None,
        faults: Faults | None = None,
        accumulate: int = 1,
        split_check: Any = "refuse",
        lr: float = 0.05,
        **options: Any,
    ) -> None:
        self.module, self.step, self.faults, self.accumulate, self.options = module, step, faults, accumulate, options
        self.log, self.logs = EventLog(), HandLogs()
        self.plan = plan or RetryPlan()
        self.optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=0.9)
        self.states = ModuleStates(module, CPU)
        self.rules: dict[str, Any] = {}
        self.events: list[OOMEvent] = []
        self.notes: list[str] = []
        self.recovery = Recovery(
            "fit",
            self.plan,
            splitter or BatchSplitter(),
            CPU,
            split_check=split_check,
            on_event=self.events.append,
            on_note=self.notes.append,
            on_give_up=self._give_up,
        )

    def _give_up(self) -> str:
        self.log.add("give up")
        return "A checkpoint was written."

    def work(self, *, is_first: bool = True) -> LoggedWork:
        """For one batch, the first or a later one of an accumulation window."""
        return LoggedWork(
            self.log,
            self.faults,
            self.states,
            self.logs,
            forward=self._forward,
            put_together=lambda outputs, split: merge_values(outputs, split.sizes, split.weights),
            backward=lambda loss, is_first, is_last: loss.backward(),
            zero_grad=self.optimizer.zero_grad if is_first else None,
            rules=self.rules,
            **self.options,
        )

    def _forward(self, microbatch: Any) -> tuple[torch.Tensor | None, Any]:
        loss = self.step(self.module, microbatch, self.logs)
        return loss, None if loss is None else loss.detach()

    def train(self, batches: Sequence[Any]) -> list[Any]:
        """All batches; gives what each step gave."""
        outcomes = []
        for number, batch in enumerate(batches):
            if self.faults is not None:
                self.faults.begin_batch(number)
            outcomes.append(self.recovery.run(self.work(is_first=number % self.accumulate == 0), batch, number))
            if (number + 1) % self.accumulate == 0:
                self.optimizer.step()
        return outcomes

    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.module.parameters()]
