"""One rank of a real process group (gloo). Started by test_runtime.py, once per rank, with a plan as JSON.

    python pipeline_rank_worker.py PLAN.json

The plan names cases, run one after the other in the same process group; each is a function here, and gives a value
that is saved as OUT/<name>.<rank>.pt. An error is a result like any other: its type, its text, how long it took.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn

from lightning_gpufeed.pipeline import generators
from lightning_gpufeed.pipeline.links import Links, PipelineGroups
from lightning_gpufeed.pipeline.runtime import PipelineRuntime
from lightning_gpufeed.pipeline.search import balanced
from tests.pipeline.pipeline_models import (
    NUM_LAYERS,
    Failing,
    batches,
    build,
    loss_of,
    part,
)

RANK = int(os.environ.get("LOCAL_RANK", "0"))
CPU = torch.device("cpu")
SHORT = timedelta(seconds=1.5)
"""How long ranks wait for each other where one of them fails."""


class Pipe:
    """One rank's part of a model, with an optimizer, as the strategy would hold them."""

    groups: PipelineGroups
    """Of the whole run."""

    def __init__(
        self,
        model: str | nn.Sequential,
        schedule: str = "fast_forward",
        num_virtual: int = 1,
        num_microbatches: int = 4,
        *,
        is_checkpointed: bool = False,
        groups: PipelineGroups | None = None,
        replica: int = 0,
        lr: float = 0.05,
    ) -> None:
        self.model = build(model) if isinstance(model, str) else model
        groups = groups or self.groups
        num_ranks = len(groups.ranks)
        self.schedule = getattr(generators, schedule)(num_ranks, num_microbatches, num_virtual)
        self.cut = balanced([1.0] * len(self.model), self.schedule.num_stages)
        links = Links(groups, CPU, self.schedule.num_stages)
        self.runtime = PipelineRuntime(
            list(self.model), self.cut, self.schedule, links, CPU, replica=replica, is_checkpointed=is_checkpointed
        )
        self.own = [place for index in self.runtime.stages for place in self.cut[index]]
        self.parameters = [one for place in self.own for one in self.model[place].parameters()]
        self.optimizer = torch.optim.SGD(self.parameters or [torch.zeros(1)], lr=lr, momentum=0.9)

    def step(self, x: Any, y: Tensor, scale: float = 1.0, loss: Callable[..., Tensor] = loss_of) -> Tensor:
        """Forward and backward as a training step; the loss of microbatches is offered for schedules that want it."""

        def training_step(x: Any, y: Tensor) -> Tensor:
            return loss(self.runtime.run(x), y)

        self.offer(training_step, x, y, scale)
        value = training_step(x, y)
        (value * scale).backward()
        return value.detach()

    def offer(self, training_step: Callable[..., Tensor], x: Any, y: Tensor, scale: float = 1.0) -> None:
        """What the strategy does before a training step."""

        def microbatch_loss(microbatch: int, sizes: Any) -> Tensor:
            begin = sum(sizes[:microbatch])
            end = begin + sizes[microbatch]
            return training_step(part(x, begin, end), part(y, begin, end)) * (sizes[microbatch] / sum(sizes)) * scale

        self.runtime.microbatch_loss = microbatch_loss

    def update(self) -> None:
        """Take a step of the optimizer."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> dict[str, Tensor]:
        """Weights and buffers of this rank's layers."""
        state = self.model.state_dict()
        return {key: one.clone() for key, one in state.items() if int(key.split(".")[0]) in self.own}

    @property
    def grads(self) -> dict[str, Tensor | None]:
        """Gradients of this rank's layers."""
        named = self.model.named_parameters()
        return {
            key: None if one.grad is None else one.grad.clone()
            for key, one in named
            if int(key.split(".")[0]) in self.own
        }

    def result(self, **more: Any) -> dict[str, Any]:
        """What tests look at; gives the layers back."""
        self.runtime.close()
        executor = self.runtime.executor
        return {
            "state": self.state,
            "grads": self.grads,
            "peak": executor.peak_activations,
            "live": executor.live_activations,
            "why_split": self.runtime.why_split,
            "pending": sum(stage.pending_bytes for stage in self.runtime.stages.values()),
            **more,
        }


def caught(function: Callable[[], Any]) -> dict[str, Any]:
    """An error as plain values, and after how long it came."""
    begin = time.monotonic()
    try:
        function()
    except Exception as error:
        return {"type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begin}
    return {"type": None, "text": "", "seconds": time.monotonic() - begin}


# Trainings ---------------------------------------------------------------------------------------------------------


def training(
    model: str,
    schedule: str,
    num_virtual: int,
    num_samples: int = 8,
    is_checkpointed: bool = False,
    is_eval: bool = False,
    dtype: str = "float32",
    is_autocast: bool = False,
    evaluated: tuple[int, ...] = (),
    accumulations: tuple[int, ...] = (1, 2),
    num_microbatches: int = 4,
) -> dict[str, Any]:
    """Windows of batches, then forwards with other numbers of samples."""
    pipe = Pipe(
        build(model).to(getattr(torch, dtype)), schedule, num_virtual, num_microbatches, is_checkpointed=is_checkpointed
    )
    pipe.model.train(not is_eval)
    data = iter(batches(model, sum(accumulations), num_samples))
    losses = []
    for accumulation in accumulations:
        for _ in range(accumulation):
            x, y = next(data)
            x, y = (one.to(getattr(torch, dtype)) if one.is_floating_point() else one for one in (x, y))
            with torch.autocast("cpu", torch.bfloat16) if is_autocast else nullcontext():
                losses.append(pipe.step(x, y, 1 / accumulation))
        pipe.update()
    pipe.model.eval()
    outputs = []
    for number in evaluated:
        x = batches(model, 1, number)[0][0]
        with torch.no_grad():
            output = pipe.runtime.run(x)
        assert not output.requires_grad
        if not outputs:  # once: before the next ones, which find what it has left
            with torch.inference_mode():
                assert torch.equal(output, pipe.runtime.run(x))
        outputs.append(output)
    return pipe.result(losses=losses, outputs=outputs)


def nested(schedule: str, num_virtual: int) -> dict[str, Any]:
    """Nests go in, through, and come out."""
    pipe = Pipe("nested", schedule, num_virtual)
    losses, classes = [], []
    for x, y in batches("nested", 2, 8):

        def loss(output: Any, y: Tensor) -> Tensor:
            classes.append(output[1])
            return loss_of(output, y)

        losses.append(pipe.step(x, y, loss=loss))
        pipe.update()
    with torch.no_grad():
        kind = type(pipe.runtime.run(x)).__name__
    return pipe.result(losses=losses, kind=kind, classes=classes[-1])


def freezing(schedule: str, num_virtual: int) -> dict[str, Any]:
    """The first five layers are frozen for a step, then not any more."""
    pipe = Pipe("mlp", schedule, num_virtual)
    for step, (x, y) in enumerate(batches("mlp", 3, 8)):
        pipe.model[:5].requires_grad_(step > 0)
        pipe.step(x, y)
        pipe.update()
    return pipe.result()


def dropping_out(schedule: str, num_virtual: int, is_checkpointed: bool = False, replica: int = 0) -> dict[str, Any]:
    """Random numbers inside, and outside."""
    pipe = Pipe("dropout", schedule, num_virtual, is_checkpointed=is_checkpointed, replica=replica)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    losses = [pipe.step(x, y) for x, y in batches("dropout", 2, 8)]
    is_untouched = torch.equal(before, torch.get_rng_state()) and torch.initial_seed() == 3
    return pipe.result(losses=losses, is_untouched=is_untouched)


def before_it(schedule: str, num_virtual: int = 1) -> dict[str, Any]:
    """A layer before the pipeline, which every rank has."""
    pipe = Pipe("mlp", schedule, num_virtual)
    torch.manual_seed(11)
    first = nn.Linear(8, 8)
    for x, y in batches("mlp", 2, 8):

        def training_step(x: Tensor, y: Tensor) -> Tensor:
            return loss_of(pipe.runtime.run(first(x)), y)

        pipe.offer(training_step, x, y)
        training_step(x, y).backward()
    return pipe.result(first=[first.weight.grad, first.bias.grad])


def hooked(schedule: str) -> dict[str, Any]:
    """Hooks on parameters, such as those that clip gradients one by one."""
    pipe = Pipe("mlp", schedule)
    calls: list[str] = []
    for name, one in pipe.model.named_parameters():
        if int(name.split(".")[0]) in pipe.own:
            one.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
            one.register_post_accumulate_grad_hook(lambda _, name=name: calls.append(name))
    pipe.step(*batches("mlp", 1, 8)[0])
    return pipe.result(calls=calls)


def adversarial(schedule: str, how: str, is_second: bool = False) -> dict[str, Any]:
    """The gradient of the batch alone, to make a harder batch of it; perhaps after another batch of the same step."""
    pipe = Pipe("mlp", schedule)
    (x, y), other = batches("mlp", 2, 8)
    if is_second:
        pipe.step(*other)

    def training_step(x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = loss_of(pipe.runtime.run(x), y)
        if how == "grad":
            (grad,) = torch.autograd.grad(loss, x)
        else:
            loss.backward(inputs=[x])
            grad = x.grad
        return loss_of(pipe.runtime.run(x.detach() + 0.1 * grad.sign()), y)

    pipe.offer(training_step, x, y)
    training_step(x, y).backward()
    return pipe.result()


def all_frozen(schedule: str) -> dict[str, Any]:
    """Only a layer before the pipeline learns."""
    pipe = Pipe("mlp", schedule)
    pipe.model.requires_grad_(False)
    torch.manual_seed(11)
    first = nn.Linear(8, 8)
    (x, y), *_ = batches("mlp", 1, 8)

    def training_step(x: Tensor, y: Tensor) -> Tensor:
        return loss_of(pipe.runtime.run(first(x)), y)

    pipe.offer(training_step, x, y)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        training_step(x, y).backward()
    return pipe.result(first=[first.weight.grad, first.bias.grad])


def shared_factor(schedule: str) -> dict[str, Any]:
    """A part of the input that has no samples, and that learns: all microbatches have it."""
    pipe = Pipe("nested", schedule)
    (x, y), *_ = batches("nested", 1, 8)
    factor = torch.full((1,), 0.7, requires_grad=True)

    def training_step(x: Any, y: Tensor) -> Tensor:
        return loss_of(pipe.runtime.run({**x, "factor": factor}), y)

    pipe.offer(training_step, x, y)
    training_step(x, y).backward()
    return pipe.result(factor=factor.grad)


def precise(schedule: str) -> dict[str, Any]:
    """Forward and loss under autocast, backward not, as Lightning does it."""
    pipe = Pipe("precise", schedule)
    (x, y), *_ = batches("mlp", 1, 8)

    def training_step(x: Tensor, y: Tensor) -> Tensor:
        return loss_of(pipe.runtime.run(x), y)

    pipe.offer(training_step, x, y)
    with torch.autocast("cpu", torch.bfloat16):
        loss = training_step(x, y)
    loss.backward()
    return pipe.result()


def other_modes() -> dict[str, Any]:
    """A batch in training and one of the same form in evaluation, both with gradients."""
    pipe = Pipe("rounded", "fast_forward")
    (x, y), other = batches("mlp", 2, 8)
    pipe.step(x, y.bfloat16())
    pipe.model.eval()
    pipe.step(*other)
    return pipe.result()


def siamese(schedule: str = "fast_forward") -> dict[str, Any]:
    """Two calls, one backward; the second is fed with what the first one gave."""
    pipe = Pipe("mlp", schedule)
    told: list[int] = []
    pipe.runtime.on_stage_done = told.append
    (x, y), (other, _) = batches("mlp", 2, 8)

    def training_step(x: Tensor, y: Tensor) -> Tensor:
        one, two = pipe.runtime.run(x), pipe.runtime.run(other[: len(x)])
        return loss_of(one, y) + loss_of(pipe.runtime.run(one), two)

    pipe.offer(training_step, x, y)
    loss = training_step(x, y)
    loss.backward()
    return pipe.result(loss=loss.detach(), told=told)


def abandoned() -> dict[str, Any]:
    """Forwards whose output no loss uses, and then a step."""
    pipe = Pipe("mlp", "fast_forward")
    told: list[int] = []
    pipe.runtime.on_stage_done = told.append
    data = batches("mlp", 5, 8)
    pipe.step(*data[0])
    pipe.optimizer.zero_grad()
    told.clear()
    gc.disable()  # nothing may have to wait for it
    try:
        for x, _ in data[1:4]:
            pipe.runtime.run(x)
        pipe.step(*data[0])
    finally:
        gc.enable()
    return pipe.result(told=told)


def let_go(schedule: str) -> dict[str, Any]:
    """Is a batch gone as soon as its step is over?"""
    pipe = Pipe("mlp", schedule)
    alive = []
    gc.disable()
    try:
        for x, y in batches("mlp", 3, 8):
            copied = x.clone()
            watch = weakref.ref(copied)
            pipe.step(copied, y)
            pipe.runtime.microbatch_loss = None
            del copied
            alive.append(watch() is not None)
    finally:
        gc.enable()
    return pipe.result(alive=alive)


def unused_head(model: str = "two heads") -> dict[str, Any]:
    """A part of the output that the loss does not use."""
    pipe = Pipe(model, "fast_forward")
    pipe.step(*batches("mlp", 1, 8)[0])
    return pipe.result()


def twice() -> dict[str, Any]:
    """backward a second time, and again with a new forward."""
    pipe = Pipe("mlp", "fast_forward")
    (x, y), *_ = batches("mlp", 1, 8)
    loss = loss_of(pipe.runtime.run(x), y)
    loss.backward(retain_graph=True)
    error = caught(loss.backward)
    pipe.optimizer.zero_grad()
    pipe.step(x, y)
    return pipe.result(error=error)


def without_grad() -> dict[str, Any]:
    """A loss for the eye only."""
    pipe = Pipe("mlp", "zero_bubble")
    (x, y), *_ = batches("mlp", 1, 8)
    with torch.no_grad():
        loss = loss_of(pipe.runtime.run(x), y)
    return pipe.result(loss=loss)


def halved(output: Tensor, y: Tensor) -> Tensor:
    """The output is changed in place, as `logits /= temperature` does."""
    output /= 2
    return loss_of(output, y)


def changed_output(schedule: str) -> dict[str, Any]:
    """A step with such a loss."""
    pipe = Pipe("mlp", schedule)
    error = caught(lambda: pipe.step(*batches("mlp", 1, 8)[0], loss=halved))
    return {"error": error, **pipe.result()}


def smaller_last(model: str, schedule: str, num_virtual: int) -> dict[str, Any]:
    """A batch of 8, and one of 5."""
    pipe = Pipe(model, schedule, num_virtual)
    (x, y), *_ = batches(model, 1, 8)
    pipe.step(x, y)
    pipe.step(x[:5], y[:5])
    return pipe.result()


def in_place(model: str, num_virtual: int = 1) -> dict[str, Any]:
    """Layers that change what they are given; where that is an error of one rank, the others have not long to wait."""
    groups = PipelineGroups.create(distributed.get_world_size(), SHORT) if model == "changes its input" else None
    pipe = Pipe(model, "fast_forward", num_virtual, groups=groups)
    error = caught(lambda: pipe.step(*batches("mlp", 1, 8)[0]))
    return {"error": error, **pipe.result()}


# Losses that fuse, and losses that do not ----------------------------------------------------------------------------


def root_mean_square(output: Tensor, y: Tensor) -> Tensor:
    """No mean over samples."""
    return (output - y).square().mean().sqrt()


def contrastive(output: Tensor, y: Tensor) -> Tensor:
    """Every sample against every other."""
    return nn.functional.cross_entropy(output @ y.t(), torch.arange(len(y)))


def raising(output: Tensor, y: Tensor) -> Tensor:
    """Only whole batches will do."""
    if len(output) < 8:
        raise ValueError("8 samples are expected")
    return loss_of(output, y)


def without_graph(output: Tensor, y: Tensor) -> Tensor:
    """For a part of a batch a constant."""
    return loss_of(output, y) if len(output) == 8 else torch.zeros(())


def nearly_mean(output: Tensor, y: Tensor) -> Tensor:
    """Mean over the elements that count, of which parts of a batch have slightly different numbers."""
    mask = torch.ones_like(y)
    mask[y[:, 0] > 0, :2] = 0
    return ((output.float() - y.float()).square() * mask).sum() / mask.sum()


def few_left_out(output: Tensor, y: Tensor) -> Tensor:
    """Mean over the elements that count, which are nearly all: gradients of parts are a third of a percent larger."""
    mask = y <= 2.6
    return ((output.float() - y.float()).square() * mask).sum() / mask.sum()


def coupled(output: Tensor, y: Tensor) -> Tensor:
    """A mean, and a little of what every sample has to do with every other."""
    output, y = output.float(), y.float()
    centred = output - output.mean(0)
    covariance = centred.t() @ centred / len(output)
    return loss_of(output, y) + 0.02 * (covariance - covariance.diag().diag()).square().sum()


LOSSES = {
    "coupled": coupled,
    "mean": loss_of,
    "root mean square": root_mean_square,
    "contrastive": contrastive,
    "raising": raising,
    "without graph": without_graph,
    "nearly a mean": nearly_mean,
    "few left out": few_left_out,
}


def falling_back(
    loss: str,
    schedule: str,
    num_virtual: int = 1,
    model: str = "batch norm",
    num_samples: int = 8,
    is_autocast: bool = False,
    dtype: str = "float32",
    num_microbatches: int = 4,
) -> dict[str, Any]:
    """Two steps with a loss."""
    whole = build(model).to(getattr(torch, dtype))
    pipe = Pipe(whole, schedule, num_virtual, num_microbatches)
    losses: list[Tensor] = []

    def steps() -> None:
        for x, y in batches(model, 2, num_samples):
            x, y = x.to(getattr(torch, dtype)), y.to(getattr(torch, dtype))
            with torch.autocast("cpu", torch.bfloat16) if is_autocast else nullcontext():
                losses.append(pipe.step(x, y, loss=LOSSES[loss]))
            pipe.update()

    error = caught(steps)
    return {**pipe.result(losses=losses), "error": error}


def masked_words(schedule: str) -> dict[str, Any]:
    """Words are left out at random before the model."""
    pipe = Pipe("transformer", schedule)
    (x, y), *_ = batches("transformer", 1, 8)
    torch.manual_seed(13)

    def training_step(x: Tensor, y: Tensor) -> Tensor:
        return loss_of(pipe.runtime.run(torch.where(torch.rand(x.shape) < 0.5, 0, x)), y)

    pipe.offer(training_step, x, y)
    training_step(x, y).backward()
    return pipe.result()


def augmented(schedule: str) -> dict[str, Any]:
    """Noise before the model."""
    pipe = Pipe("batch norm", schedule)
    torch.manual_seed(13)
    for x, y in batches("batch norm", 2, 8):

        def training_step(x: Tensor, y: Tensor) -> Tensor:
            return loss_of(pipe.runtime.run(x + torch.randn_like(x)), y)

        pipe.offer(training_step, x, y)
        training_step(x, y).backward()
        pipe.update()
    return pipe.result(drawn=torch.rand(1))


def scaled(schedule: str) -> dict[str, Any]:
    """A loss that is scaled after the training step, as for half precision, without a word to the pipeline."""
    pipe = Pipe("mlp", schedule)
    (x, y), *_ = batches("mlp", 1, 8)

    def training_step(x: Tensor, y: Tensor) -> Tensor:
        return loss_of(pipe.runtime.run(x), y)

    pipe.offer(training_step, x, y)
    (training_step(x, y) * 1024).backward()
    return pipe.result()


def with_nothing(output: Tensor, y: Tensor) -> Tensor:
    """A mean, and a term of the whole batch that counts for nothing as long as it is finite."""
    return loss_of(output, y) + 0.0 * (output * y.sum()).mean()


def not_a_number(schedule: str, loss: str = "mean") -> dict[str, Any]:
    """One batch overflows, as the first ones do in half precision; the next ones do not."""
    pipe = Pipe("mlp", schedule)
    data = batches("mlp", 2, 8)
    data[0][1][0, 0] = float("inf")
    loss_function = with_nothing if loss == "with nothing" else loss_of
    pipe.step(*data[0], loss=loss_function)
    why = pipe.runtime.why_split
    pipe.optimizer.zero_grad()
    pipe.step(*data[1], loss=loss_function)
    return pipe.result(why=why)


def two_losses(schedule: str) -> dict[str, Any]:
    """Two training steps, and one backward of the sum of their losses."""
    pipe = Pipe("mlp", schedule)

    def training_step(x: Tensor, y: Tensor) -> Tensor:
        return loss_of(pipe.runtime.run(x), y)

    losses = []
    for x, y in batches("mlp", 2, 8):
        pipe.offer(training_step, x, y)
        losses.append(training_step(x, y))
    torch.stack(losses).sum().backward()
    return pipe.result()


# Errors ------------------------------------------------------------------------------------------------------------


def other_batches(what: str, num_before: int) -> dict[str, Any]:
    """Each rank has another batch, at once or after some steps."""
    pipe = Pipe("mlp", "fast_forward", groups=PipelineGroups.create(distributed.get_world_size(), SHORT))
    (x, y), *_ = batches("mlp", 1, 8)
    for number in range(num_before):
        with torch.no_grad():
            pipe.runtime.run(x[: 8 - number % 2])
    if what == "values":
        x = x + RANK
    elif what == "number":
        x, y = x[: 8 - RANK], y[: 8 - RANK]
    elif what == "smaller":
        x, y = x[: 4 - RANK], y[: 4 - RANK]
    elif what == "order" and RANK:
        x = x.flip(0)
    elif what == "infinite":
        x[0, 1], x[1, 0] = float("inf"), -float("inf")  # no difference at all
    with torch.set_grad_enabled(not num_before):
        return {"error": caught(lambda: pipe.runtime.run(x))}


def too_small() -> dict[str, Any]:
    """The first batch is smaller than the microbatches; a later one may be."""
    pipe = Pipe("mlp", "fast_forward")
    (x, y), *_ = batches("mlp", 1, 8)
    error = caught(lambda: pipe.step(x[:3], y[:3]))
    pipe.step(x, y)
    pipe.step(x[:3], y[:3])
    return pipe.result(error=error)


def failing_layer(schedule: str, failing_rank: int) -> dict[str, Any]:
    """A layer of one rank raises, which the others learn after the timeout."""
    layers = [nn.Linear(8, 8) for _ in range(NUM_LAYERS)]
    world = distributed.get_world_size()
    place = failing_rank * NUM_LAYERS // world
    failing = Failing()
    pipe = Pipe(
        nn.Sequential(*layers[:place], failing, *layers[place + 1 :]),
        schedule,
        groups=PipelineGroups.create(world, SHORT),
    )
    data = batches("mlp", 2, 8)
    pipe.step(*data[0])
    failing.is_failing = True
    return {"error": caught(lambda: pipe.step(*data[1]))}


def other_shapes() -> dict[str, Any]:
    """A layer gives as many numbers as before, in another shape."""
    layers = [nn.Linear(8, 8) for _ in range(NUM_LAYERS)]
    shaping = nn.Unflatten(1, (2, 4))
    layers[NUM_LAYERS // 2 - 1 : NUM_LAYERS // 2 + 1] = shaping, nn.Flatten()
    groups = PipelineGroups.create(distributed.get_world_size(), SHORT)
    pipe = Pipe(nn.Sequential(*layers), "fast_forward", groups=groups)
    data = batches("mlp", 2, 8)
    pipe.step(*data[0])
    shaping.unflattened_size = (4, 2)
    return {"error": caught(lambda: pipe.step(*data[1]))}


def no_samples() -> dict[str, Any]:
    """Nothing to cut."""
    pipe = Pipe("mlp", "fast_forward")
    return {"error": caught(lambda: pipe.runtime.run({"factor": torch.ones(())}))}


def notes(kind: str) -> dict[str, Any]:
    """Something that is no tensor is part of the input, another one in each step."""
    groups = PipelineGroups.create(distributed.get_world_size(), SHORT) if kind in ("object", "array") else None
    pipe = Pipe("noted", "fast_forward", groups=groups)

    def steps() -> None:
        for number, (x, y) in enumerate(batches("nested", 3, 8)):
            note: Any = {
                "object": Note(number),
                "array": np.full(3, number),
                "texts": ["a" * 90 + str(number)],
                "nan": float("nan"),
            }[kind]
            pipe.step({**x, "note": note}, y)
            pipe.update()

    error = caught(steps)
    return {"error": error, **pipe.result()}


class Note:
    """Equal to itself alone, with an address in its text."""

    def __init__(self, number: int) -> None:
        self.number = number


def replicas() -> dict[str, Any]:
    """Pipelines of two ranks next to each other, each with its own batches."""
    groups = PipelineGroups.create(2)
    replica = RANK // 2
    pipe = Pipe("mlp", "fast_forward", 2, groups=groups, replica=replica)
    data = batches("mlp", 2, 8)
    pipe.step(*data[replica])
    noisy = Pipe("dropout", "fast_forward", groups=groups, replica=replica)
    loss = noisy.step(*batches("dropout", 1, 8)[0])
    noisy.result()
    result = pipe.result(place=groups.place, ranks=groups.ranks, replicas=groups.replicas, dropped=loss)
    groups.close()
    return result


def dying(schedule: str) -> dict[str, Any]:
    """Rank 1 is gone in the middle of a step."""
    pipe = Pipe("mlp", schedule)
    data = batches("mlp", 2, 8)
    pipe.step(*data[0])
    if RANK == 1:
        pipe.model[pipe.own[0]].register_forward_hook(lambda *_: os._exit(9))
    return {"error": caught(lambda: pipe.step(*data[1]))}


def main() -> None:
    """Run the plan."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    plan = json.loads(Path(sys.argv[1]).read_text())
    distributed.init_process_group(
        "gloo", rank=RANK, world_size=plan["world_size"], timeout=timedelta(seconds=4 * plan["timeout_seconds"])
    )
    Pipe.groups = PipelineGroups.create(plan["world_size"], timedelta(seconds=plan["timeout_seconds"]))
    for case in plan["cases"]:
        begin = time.monotonic()
        try:
            result = globals()[case["function"]](**case["arguments"])
        except Exception:
            result = {"failed": traceback.format_exc()}
        torch.save(result, Path(plan["out"]) / f"{case['name']}.{RANK}.pt")
        print(f"{case['name']}: {time.monotonic() - begin:.2f} s", flush=True)
        if not plan.get("ends_badly"):
            has_failed = torch.tensor([float("failed" in result or bool(result.get("error", {}).get("type")))])
            distributed.all_reduce(has_failed)
            if has_failed:  # what still waits in these groups is not to be felt in the next case
                Pipe.groups = PipelineGroups.create(plan["world_size"], timedelta(seconds=plan["timeout_seconds"]))
    if not plan.get("ends_badly"):
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
