"""Models, and ways to train them on a pipeline of ranks, for `pipeline.py`.

"real" computes on the CPU. "emulated" stands for an accelerator: a layer's forward, input gradient and weight gradient
sleep, each for the same time, so that the host's cores are free, as beside GPUs. All else in it is real: autograd,
messages and gradients of the real size, the optimizer's step. A core that wakes from a sleep is cold, so what a host
does between two passes takes several times as long as beside a GPU; in all arms.

An emulated layer comes in two forms, and torch's schedules get the one with which they are faster:

whole       one autograd function, as a fused layer of one's own is. Ours splits it, told how by `register_kernels`.
            torch's own split runs the whole backward of such a function twice: once for I, once for W.
separable   input and weight meet in an addition, whose backward torch's split can cut in two, as it can cut those of
            its own operations. Nothing runs twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed import pipelining

from lightning_gpufeed.backprop.kernels import Kernels, register_kernels
from lightning_gpufeed.pipeline.choose import choose
from lightning_gpufeed.pipeline.link import Link, probe_link
from lightning_gpufeed.pipeline.links import PipelineGroups
from lightning_gpufeed.pipeline.measure import MeasuredLayers, measure_layers
from lightning_gpufeed.pipeline.plan import PipelineOptions
from lightning_gpufeed.pipeline.session import PipelineSession
from lightning_gpufeed.pipeline.simulate import StageCosts, simulate

WIDTH, ROWS = 256, 64
TOKENS, SAMPLES = 64, 2

# The emulated accelerator --------------------------------------------------------------------------------------


@dataclass
class Work:
    """One layer's."""

    seconds: float
    grad: Tensor
    is_slept: ClassVar[bool] = True
    """False while what comes is not counted."""

    def sleep(self) -> None:
        if self.is_slept:
            time.sleep(self.seconds)

    def weight_grad(self) -> Tensor:
        self.sleep()
        return self.grad.clone()


@contextmanager
def sleeping(is_slept: bool) -> Iterator[None]:
    """Whether passes take their time."""
    before, Work.is_slept = Work.is_slept, is_slept
    try:
        yield
    finally:
        Work.is_slept = before


class Emulated(nn.Module):
    """A layer of an accelerator, seen from its host; with its backward as one node."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
        self.work = Work(seconds, torch.full((WIDTH, WIDTH), 1e-3))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _Whole.apply(x, self.weight, self.work)  # type: ignore[no-untyped-call]
        return output


class Separable(Emulated):
    """The same, with two nodes."""

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = _InputPath.apply(x, self.work) + _WeightPath.apply(self.weight, self.work)  # type: ignore[no-untyped-call]
        return output


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, work: Work) -> Tensor:
        ctx.work = work
        work.sleep()
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.needs_input_grad[0]:
            ctx.work.sleep()
        return grad_output if ctx.needs_input_grad[0] else None, ctx.work.weight_grad(), None


class _InputPath(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Work) -> Tensor:
        ctx.work = work
        work.sleep()
        return x + 1

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        ctx.work.sleep()
        return grad_output, None


class _WeightPath(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, work: Work) -> Tensor:
        ctx.work = work
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.work.weight_grad(), None


@dataclass(frozen=True)
class _Halves(Kernels):
    """The whole layer, for ours."""

    work: Work

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.work.sleep()
        return x + 1

    def input_grad(self, grad_output: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        self.work.sleep()
        return grad_output.clone()

    def weight_grad(self, grad_output: Tensor, x: Tensor, weight: Tensor, mask: Any) -> tuple[Tensor, None]:
        return self.work.weight_grad(), None


register_kernels(Emulated, lambda module, x: _Halves(module.work))


@dataclass(frozen=True)
class Task:
    """What is trained: the same in every arm."""

    num_layers: int
    num_microbatches: int
    pass_seconds: float
    """Of a layer's forward, input gradient or weight gradient; 0 for real compute."""

    @property
    def is_emulated(self) -> bool:
        return self.pass_seconds > 0

    def layer(self, number: int, form: type[Emulated] = Emulated) -> nn.Module:
        if self.is_emulated:
            return form(self.pass_seconds)
        torch.manual_seed(number)
        return nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Input and target."""
        generator = torch.Generator().manual_seed(1)
        shape = (ROWS, WIDTH) if self.is_emulated else (SAMPLES, TOKENS, WIDTH)
        whole = (shape[0] * self.num_microbatches, *shape[1:])
        return torch.randn(whole, generator=generator), torch.randn(whole, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


# Arms --------------------------------------------------------------------------------------------------------


class Arm:
    """A way to train. `step` is a whole step, with the optimizer's; the loss is there where the last stage is."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.optimizer = torch.optim.SGD(parameters, lr=1e-3)
        self.first_loss: float | None = None

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.forward_backward()
        self.optimizer.step()
        if self.first_loss is None and loss is not None:
            self.first_loss = float(loss)

    def forward_backward(self) -> Tensor | None:
        raise NotImplementedError

    def close(self) -> None:
        """Let go."""


SINGLE = {"GPipe": pipelining.ScheduleGPipe, "1F1B": pipelining.Schedule1F1B}
LOOPED = {
    "LoopedBFS": pipelining.ScheduleLoopedBFS,
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
}
V_SHAPED = {"ZBVZeroBubble": pipelining.ScheduleZBVZeroBubble, "DualPipeV": pipelining.ScheduleDualPipeV}
SPLITTING = {"InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"}
"""Schedules with I and W apart; for the others the form of a layer makes no difference."""


class TorchArm(Arm):
    """`torch.distributed.pipelining` as its documentation has it."""

    def __init__(self, task: Task, schedule: str, num_virtual: int, form: type[Emulated]) -> None:
        rank, size = distributed.get_rank(), distributed.get_world_size()
        num_stages = size * num_virtual
        mine = [rank + size * turn for turn in range(num_virtual)]
        if schedule in V_SHAPED:
            mine = [rank, num_stages - 1 - rank]
        per_stage = task.num_layers // num_stages
        self.stages = []
        for index in mine:
            layers = [task.layer(index * per_stage + n, form) for n in range(per_stage)]
            stage = pipelining.PipelineStage(nn.Sequential(*layers), index, num_stages, torch.device("cpu"))
            self.stages.append(stage)
        if schedule in SINGLE:
            self.schedule: Any = SINGLE[schedule](self.stages[0], task.num_microbatches, loss_fn=loss_of)
        else:
            make: Any = (LOOPED | V_SHAPED)[schedule]
            self.schedule = make(self.stages, task.num_microbatches, loss_fn=loss_of)
        x, y = task.batch()
        self._inputs = (x,) if 0 in mine else ()
        self._target = {"target": y, "losses": []} if num_stages - 1 in mine else {}
        super().__init__([one for stage in self.stages for one in stage.submod.parameters()])

    def forward_backward(self) -> Tensor | None:
        losses: Any = self._target.get("losses")
        if losses is not None:
            losses.clear()
        self.schedule.step(*self._inputs, **self._target)
        return torch.stack(losses).mean().detach() if losses else None


class OurArm(Arm):
    """The loop of `PipelineSession`'s docstring; the loss is on every rank."""

    def __init__(
        self, task: Task, groups: PipelineGroups, schedule: str, num_virtual: int | None, costs: Costs
    ) -> None:
        size = distributed.get_world_size()
        if num_virtual is None and schedule != "auto":
            num_virtual = choose(costs.layers, costs.link, size, task.num_microbatches, schedule).num_virtual
        layers_per_stage = "auto" if num_virtual is None else task.num_layers // (size * num_virtual)
        self.model = nn.Sequential(*(task.layer(number) for number in range(task.num_layers)))
        self.x, self.y = task.batch()
        options = PipelineOptions(size, task.num_microbatches, schedule, layers_per_stage)  # type: ignore[arg-type]
        self.session = PipelineSession(self.model, options, groups, torch.device("cpu"))
        self.session.microbatch_loss = self._microbatch_loss
        self._costs = costs
        if self.session.partition is None:
            with sleeping(True):
                self.forward_backward()  # measures, and shares the layers out
        assert self.session.runtime is not None
        super().__init__([one for stage in self.session.runtime.stages.values() for one in stage.parameters])

    def _microbatch_loss(self, number: int, sizes: Sequence[int]) -> Tensor:
        begin = sum(sizes[:number])
        part = slice(begin, begin + sizes[number])
        return loss_of(self.model(self.x[part]), self.y[part]) * (sizes[number] / sum(sizes))

    def forward_backward(self) -> Tensor:
        loss = loss_of(self.model(self.x), self.y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.session.end_backward()
        return loss.detach()

    @property
    def predicted_seconds(self) -> float:
        """Of a step, as the plan has it, or else simulated with what was measured for the cell."""
        plan = self.session.plan
        assert plan is not None
        return plan.step_seconds or self._costs.simulated(plan.stages, plan.schedule)

    def close(self) -> None:
        assert self.session.runtime is not None
        self.session.runtime.close()  # the groups are those of other arms too


@dataclass(frozen=True)
class Costs:
    """What rank 0 measured for a cell."""

    layers: MeasuredLayers
    link: Link

    @classmethod
    def measure(cls, task: Task, groups: PipelineGroups) -> Costs:
        """Like `PipelineSession` does."""
        size = distributed.get_world_size()
        link = probe_link(groups.output, torch.device("cpu"), distributed.get_rank(), size)
        box: list[Any] = [None]
        if not distributed.get_rank():
            microbatch = task.batch()[0].tensor_split(task.num_microbatches)[0]
            box = [measure_layers([task.layer(n) for n in range(task.num_layers)], microbatch).as_lists()]
        distributed.broadcast_object_list(box, 0)
        return cls(MeasuredLayers.from_lists(box[0]), link)

    def simulated(self, stages: Sequence[range], schedule: Any) -> float:
        of_stages = []
        for stage in stages:
            layers = self.layers.costs[stage.start : stage.stop]
            names = ("forward_seconds", "input_grad_seconds", "weight_grad_seconds")
            of_stages.append(StageCosts(*(sum(getattr(one, name) for one in layers) for name in names)))
        sends = self.layers.send_seconds(self.link)
        return simulate(schedule, of_stages, [sends[stage.stop - 1] for stage in stages[:-1]]).step_seconds


OURS: dict[str, tuple[str, int | None]] = {
    "ours gpipe": ("gpipe", 1),
    "ours fast_forward": ("fast_forward", 1),
    "ours fast_forward + modulo": ("fast_forward", None),
    "ours zero_bubble": ("zero_bubble", None),
    "ours zbv": ("zbv", None),
    "ours auto": ("auto", None),
}
"""Names of a schedule, and stages on a rank; None for the best by our own simulation."""


def torch_arms(task: Task, num_ranks: int) -> dict[str, Callable[[], TorchArm]]:
    """All that torch ships and that takes these numbers, with each number of stages and each form of a layer."""
    per_rank = task.num_layers // num_ranks
    several = [v for v in range(2, per_rank + 1) if per_rank % v == 0]
    found: dict[str, Callable[[], TorchArm]] = {}
    for name in (*SINGLE, *LOOPED, *V_SHAPED):
        if name == "1F1B" and task.num_microbatches < num_ranks:
            continue
        if name == "DualPipeV" and task.num_microbatches < 2 * num_ranks:
            continue
        counts = [1] if name in SINGLE else [2] if name in V_SHAPED else several
        forms = [Separable, Emulated] if task.is_emulated and name in SPLITTING else [Separable]
        for v in counts:
            for form in forms:
                text = ["torch " + name]
                text += [f"v={v}"] if name in LOOPED else []
                text += ["whole" if form is Emulated else "separable"] if len(forms) > 1 else []
                found[", ".join(text)] = partial(TorchArm, task, name, v, form)
    return found
