"""Models, and ways to train them on two ranks, for `gradient_sync.py`.

Each model comes in two kinds. "real" computes on the CPU. "emulated" stands for an accelerator: per layer a forward, an
input gradient and a weight gradient that sleep, so that the host's core is free, as beside a GPU. Everything else in it
is real: autograd, hooks, messages of the real size, the optimizer's step.

An emulated weight gradient costs no time of the host: it is a tensor that was made before, of the size of the weight,
with other numbers on each rank. A few of them change with every step. Autograd takes it over without a copy in every
arm.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gpufeed.backprop.kernels import Kernels, register_kernels
from lightning_gpufeed.sync.candidates import PlanOptions
from lightning_gpufeed.sync.clipped_session import ClippedGradientSync
from lightning_gpufeed.sync.ranks import Ranks

TIMEOUT = timedelta(seconds=120)
NO_CLIPPING = 1e9
"""Largest norm: gradients are measured and multiplied by one, which costs what clipping costs."""
_NUM_CHANGING = 1024
_NUM_BATCHES = 4


# Models ------------------------------------------------------------------------------------------------------


def _linears(width: int, number: int) -> list[nn.Module]:
    return [module for _ in range(number) for module in (nn.Linear(width, width), nn.ReLU())]


def uniform() -> nn.Sequential:
    return nn.Sequential(*_linears(1024, 12))


def head_heavy() -> nn.Sequential:
    """40 % of it is the embedding, whose gradient comes last and whose update is needed first."""
    return nn.Sequential(nn.Embedding(6144, 768), *_linears(768, 12))


def tail_heavy() -> nn.Sequential:
    modules: list[nn.Module] = []
    for channels_in, channels_out, stride in [(3, 32, 1), (32, 64, 2), (64, 128, 2), (128, 256, 1), (256, 512, 2)]:
        modules += [nn.Conv2d(channels_in, channels_out, 3, stride, 1), nn.ReLU()]
    modules += [nn.Conv2d(512, 512, 3, 1, 1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*modules, nn.Linear(8192, 768), nn.ReLU(), nn.Linear(768, 10))


@dataclass(frozen=True)
class Model:
    """How to make it, and a batch for it."""

    make: Callable[[], nn.Sequential]
    batch: Callable[[torch.Generator], Tensor]
    what: str


MODELS = {
    "uniform": Model(uniform, lambda g: torch.randn(128, 1024, generator=g), "12 x Linear(1024, 1024)"),
    "head-heavy": Model(
        head_heavy,
        lambda g: torch.randint(6144, (256,), generator=g),
        "Embedding(6144, 768), then 12 x Linear(768, 768)",
    ),
    "tail-heavy": Model(
        tail_heavy, lambda g: torch.randn(16, 3, 32, 32, generator=g), "6 x Conv2d, 3 to 512 channels, then 2 x Linear"
    ),
}


# The emulated accelerator --------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """What ran when, while it is on: lane, what, number of the layer or bucket, begin and end."""

    is_on: bool = False
    spans: list[tuple[str, str, tuple[int, ...], float, float]] = field(default_factory=list)

    def note(self, lane: str, what: str, layers: tuple[int, ...], begin: float) -> None:
        if self.is_on:
            self.spans.append((lane, what, layers, begin, time.perf_counter()))


RECORDER = Recorder()


@dataclass
class Work:
    """One layer's."""

    number: int
    seconds: float
    grad: Tensor
    num_steps: int = 0

    def sleep(self, what: str) -> None:
        begin = time.perf_counter()
        if self.seconds:
            time.sleep(self.seconds)
        RECORDER.note("device", what, (self.number,), begin)

    def weight_grad(self) -> Tensor:
        self.num_steps += 1
        self.grad.view(-1)[:_NUM_CHANGING].fill_((self.num_steps % 7 + 1) * 1e-3)
        self.sleep("W")
        return self.grad.detach()  # another tensor on the same memory, which autograd takes over


class Emulated(nn.Module):
    """A layer of an accelerator, seen from its host."""

    def __init__(self, shape: torch.Size, work: Work) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape).normal_(0, 0.02))
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Whole.apply(x, self.weight, self.work)  # type: ignore[no-untyped-call]
        return output


class _Whole(torch.autograd.Function):
    """Backward as one node, as autograd has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, work: Work) -> Tensor:
        ctx.work = work
        work.sleep("F")
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if ctx.needs_input_grad[0]:
            ctx.work.sleep("I")
        return grad_output if ctx.needs_input_grad[0] else None, ctx.work.weight_grad(), None


@dataclass(frozen=True)
class _Halves(Kernels):
    """The same in two halves."""

    work: Work

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.work.sleep("F")
        return x + 1

    def input_grad(self, grad_output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        self.work.sleep("I")
        return grad_output.clone()

    def weight_grad(self, grad_output: Tensor, x: Tensor, weight: Tensor, mask: Any) -> tuple[Tensor, None]:
        return self.work.weight_grad(), None


register_kernels(Emulated, lambda module, x: _Halves(module.work))


class Task:
    """A model to train: the same in every arm, with other data on each rank."""

    def __init__(self, name: str, is_emulated: bool, pass_seconds: float) -> None:
        self._model, self._is_emulated = MODELS[name], is_emulated
        torch.manual_seed(0)
        self._real = self._model.make()
        for parameter in self._real.parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_normal_(parameter)
        self.shapes = [m.weight.shape for m in self._real if hasattr(m, "weight")]
        self.num_layers = len(self.shapes)
        self._layer_seconds = pass_seconds / self.num_layers
        generator = torch.Generator().manual_seed(1 + distributed.get_rank())
        self._batches = [self._model.batch(generator) for _ in range(_NUM_BATCHES)]
        self._grads = [torch.randn(shape, generator=generator) * 1e-3 for shape in self.shapes] if is_emulated else []

    @property
    def gradient_bytes(self) -> int:
        return 4 * sum(parameter.numel() for parameter in self.make().parameters())

    def make(self) -> nn.Sequential:
        """A model like all others."""
        torch.manual_seed(0)
        if self._is_emulated:
            works = [Work(n, self._layer_seconds, grad) for n, grad in enumerate(self._grads)]
            return nn.Sequential(*(Emulated(*one) for one in zip(self.shapes, works, strict=True)))
        model = self._model.make()
        model.load_state_dict(self._real.state_dict())
        return model

    def loss(self, model: nn.Module, step: int) -> Tensor:
        if self._is_emulated:
            output: Tensor = model(torch.zeros(1))
            return output.sum()
        output = model(self._batches[step % _NUM_BATCHES])
        return output.square().mean()


# Arms --------------------------------------------------------------------------------------------------------


class Arm:
    """A model with its optimizer, trained without communication."""

    num_warmup_steps = 3

    def __init__(self, task: Task, is_clipped: bool) -> None:
        self.task, self.is_clipped, self.num_steps = task, is_clipped, 0
        self.model = task.make()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2, momentum=0.9)

    def step(self) -> None:
        loss = self.task.loss(self.model, self.num_steps)
        self.optimizer.zero_grad()
        loss.backward()
        self.update()
        self.num_steps += 1

    def update(self) -> None:
        if self.is_clipped:
            nn.utils.clip_grad_norm_(self.model.parameters(), NO_CLIPPING)
        self.optimizer.step()

    def finish(self) -> None:
        """Nothing is pending any more."""

    def close(self) -> None:
        """Let go of hooks."""

    def warm_up(self) -> None:
        for _ in range(self.num_warmup_steps):
            self.step()
        self.finish()

    def digest(self) -> str:
        """Of the weights' bits."""
        self.finish()
        found = hashlib.blake2b(digest_size=8)
        for parameter in self.model.parameters():
            found.update(parameter.detach().numpy().tobytes())
        return found.hexdigest()


class DDPArm(Arm):
    """As users have it, but for the copy of each gradient that `gradient_as_bucket_view` saves."""

    def __init__(self, task: Task, is_clipped: bool, bucket_cap_mb: int) -> None:
        super().__init__(task, is_clipped)
        # None is 25 too, but with a first bucket of 1 MB: the usual case.
        cap = None if bucket_cap_mb == 25 else bucket_cap_mb
        self.model = DistributedDataParallel(self.model, bucket_cap_mb=cap, gradient_as_bucket_view=True)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note when each bucket is on the wire, from now on."""
        places = {id(parameter): n for n, parameter in enumerate(self.model.module.parameters())}

        def hook(_, bucket):  # type: ignore[no-untyped-def]  # an annotation has to be a class, not its name
            layers = tuple(sorted(places[id(one)] for one in bucket.parameters()))
            begin = time.perf_counter()
            work = distributed.all_reduce(bucket.buffer().mul_(0.5), async_op=True)

            def done(future: Any) -> Tensor:
                RECORDER.note("link", "bucket", layers, begin)
                tensor: Tensor = future.value()[0]
                return tensor

            return work.get_future().then(done)

        self.model.register_comm_hook(None, hook)
        yield


class OurArm(Arm):
    """The loop of `GradientSync`'s docstring."""

    def __init__(self, task: Task, is_clipped: bool, ranks: Ranks, options: PlanOptions) -> None:
        super().__init__(task, is_clipped)
        self.messages: list[str] = []
        self.sync = ClippedGradientSync(
            self.model, ranks, options, on_message=lambda text, figures=None: self.messages.append(text)
        )
        self.sync.can_cross, self.sync.needs_norm = options.overlap_clipping or not is_clipped, is_clipped

    def step(self) -> None:
        sync = self.sync
        sync.forward_begins()
        loss = self.task.loss(self.model, self.num_steps)
        self.optimizer.zero_grad()
        sync.backward_begins()
        loss.backward()
        sync.backward_ends()
        if self.is_clipped and not sync.clip(self.optimizer, NO_CLIPPING):
            nn.utils.clip_grad_norm_(self.model.parameters(), NO_CLIPPING)
        sync.step(self.optimizer)
        self.num_steps += 1

    def finish(self) -> None:
        self.sync.synchronize()

    def close(self) -> None:
        self.sync.close()

    def warm_up(self) -> None:
        while not self.sync.is_settled:
            self.step()
            if self.num_steps > 200:
                raise RuntimeError("no plan is settled after 200 steps")
        super().warm_up()

    @property
    def predicted_seconds(self) -> float | None:
        """Of a step with the settled plan, by the tuner's simulation."""
        tried = self.sync._tuner._arms
        return next((arm.predicted_seconds for arm in tried if arm.plan == self.sync.plan), None)

    @property
    def plan_text(self) -> str:
        """The plan in a line: which weight gradients wait until when, and what is sent in which order."""
        plan, sizes = self.sync.plan, [layer.gradient_bytes for layer in self.sync.layers]
        buckets = []
        for bucket in plan.buckets:
            pieces = [f"{n}{'' if end - begin == sizes[n] else '*'}" for n, begin, end in bucket]
            buckets.append("+".join(pieces))
        when = "next forward" if plan.cross_iteration else "after all"
        when += ", after the norm" if plan.is_scattered else ""
        waits = " ".join(map(str, plan.backward)) if plan.deferred else "nothing waits"
        return f"update: {when}; backward: {waits}; sent: {' '.join(buckets)}" + (
            " (*: part of one)" if any("*" in bucket for bucket in buckets) else ""
        )

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Note when each message is on the wire."""
        plan, usual = self.sync.plan, distributed.all_reduce
        parts = [n for n, slices in enumerate(self.sync._reducer.memory.slices) for _ in slices]
        num_sent = 0

        def all_reduce(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            nonlocal num_sent
            layers = tuple(dict.fromkeys(piece.layer for piece in plan.buckets[parts[num_sent % len(parts)]]))
            num_sent += 1
            begin = time.perf_counter()
            work = usual(tensor, *arguments, **options)
            work.get_future().then(lambda _: RECORDER.note("link", "bucket", layers, begin))
            return work

        distributed.all_reduce = all_reduce  # type: ignore[assignment]
        try:
            yield
        finally:
            distributed.all_reduce = usual
