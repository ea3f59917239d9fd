"""One rank of tests of `ClippedGradientSync`: trains models by hand, in DistributedDataParallel and under sync.

Run by `tests.doubles.run_ranks`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from lightning_gpufeed.sync.candidates import PlanOptions
from lightning_gpufeed.sync.clipped_session import ClippedGradientSync
from lightning_gpufeed.sync.ranks import Ranks
from tests.sync.sync_worker import MODELS, Branches, batch, convolutional, dense, run_rank

PLANS = {
    "small messages": PlanOptions(0, True, 100, overlap_clipping=True),
    "two wait": PlanOptions(2, True, 1, overlap_clipping=True),
}
FOUND = PlanOptions(overlap_clipping=True)
LARGE, SMALL = 1e9, 0.03
"""Norms above all gradients' and below."""
NUM_STEPS = 4

Meddle = Callable[[int, nn.Module], None]
"""What is done before clipping in a step of a number."""


def nothing(number: int, model: nn.Module) -> None:
    """Nobody looks."""


def look_on_rank_0(number: int, model: nn.Module) -> None:
    if distributed.get_rank() == 0 and number % 2:
        sum(float(one.grad.sum()) for one in model.parameters())


def look_at_one(number: int, model: nn.Module) -> None:
    assert next(model.parameters()).grad is not None


def change_in_place(number: int, model: nn.Module) -> None:
    if number % 2:
        with torch.no_grad():
            next(model.parameters()).grad.mul_(3.0)


def change_behind_its_back(number: int, model: nn.Module) -> None:
    next(model.parameters()).grad.data.mul_(3.0)


def replace_data(number: int, model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.data = parameter.grad.data * 3.0


def measure_on_rank_0(number: int, model: nn.Module) -> None:
    """As whoever logs a norm does it: all gradients are multiplied by one."""
    if distributed.get_rank() == 0:
        clip_grad_norm_(model.parameters(), float("inf"))


def copy_on_rank_0(number: int, model: nn.Module) -> None:
    if distributed.get_rank() == 0:
        for parameter in model.parameters():
            parameter.grad = parameter.grad.clone()


def replace_one(number: int, model: nn.Module) -> None:
    parameter = next(model.parameters())
    parameter.grad = parameter.grad * 3.0


def take_one_away(number: int, model: nn.Module) -> None:
    next(model.parameters()).grad = None


MEDDLERS = {
    "one rank looks": look_on_rank_0,
    "all look at one": look_at_one,
    "one rank measures": measure_on_rank_0,
    "one rank copies": copy_on_rank_0,
    "one is changed": change_in_place,
    "one is changed behind its back": change_behind_its_back,
    "data are replaced": replace_data,
    "one is replaced": replace_one,
    "one is taken away": take_one_away,
}


def seen(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """Parameters, buffers, gradients, the optimizer's state."""
    found = {f"{name}": one.detach().clone() for name, one in model.state_dict().items()}
    for name, one in model.named_parameters():
        if one.grad is not None:
            found[f"{name}.grad"] = one.grad.clone()
        for key, value in optimizer.state[one].items():
            found[f"{name}.{key}"] = torch.as_tensor(value).clone()
    return found


def train(
    model: nn.Module,
    max_norm: float,
    options: PlanOptions | None,
    *,
    meddle: Meddle = nothing,
    accumulate: int = 1,
    find_unused: bool = False,
    num_clips: int = 1,
    num_updated: int | None = None,
    num_steps: int = NUM_STEPS,
    messages: list[str] | None = None,
) -> dict[str, Tensor]:
    """By hand, in DistributedDataParallel without options; what is said and then the plan go into `messages`."""
    rank = distributed.get_rank()
    updated = [one for one in model.parameters() if one.requires_grad][:num_updated]
    optimizer = optim.SGD(updated, 0.05, momentum=0.9, weight_decay=0.01)
    ddp = sync = None
    if options is None:
        ddp = DistributedDataParallel(model, find_unused_parameters=find_unused)
    else:
        sync = ClippedGradientSync(
            model,
            Ranks(),
            options,
            find_unused_parameters=find_unused,
            on_message=lambda text, figures=None: None if messages is None else messages.append(text),
        )
        sync.needs_norm = True
    for number in range(num_steps):
        for part in range(accumulate):
            x, y = batch(rank, number * accumulate + part)
            is_last = part == accumulate - 1
            if ddp is not None:
                ddp.require_backward_grad_sync = is_last
            else:
                sync.is_syncing = is_last
                sync.forward_begins()
            loss = F.cross_entropy((ddp or model)(x), y)
            if not part:
                optimizer.zero_grad()
            if sync is not None:
                sync.backward_begins(loss)
            loss.backward()
            if sync is not None:
                sync.backward_ends()
        meddle(number, model)
        for _ in range(num_clips):
            if sync is None or not sync.clip(optimizer, max_norm):
                clip_grad_norm_(updated, max_norm)
        if sync is None:
            optimizer.step()
        else:
            sync.step(optimizer)
    if sync is not None:
        if messages is not None:
            messages.append(str(sync.plan))
        sync.close()
    return seen(model, optimizer)


@functools.cache
def _expected(make_model: Callable[[], nn.Module], max_norm: float, **settings: Any) -> dict[str, Tensor]:
    """What one sees after a training in DistributedDataParallel: the same for all plans."""
    torch.manual_seed(1)
    return train(make_model(), max_norm, None, **settings)


def differences(make_model: Callable[[], nn.Module], max_norm: float, options: PlanOptions, **settings: Any) -> Any:
    """Of what one sees after a training: names of all that has other bits, and the largest difference in relation."""
    expected = _expected(make_model, max_norm, **settings)
    torch.manual_seed(1)
    model = make_model()
    messages: list[str] = []
    found = train(model, max_norm, options, messages=messages, **settings)
    assert list(found) == list(expected)
    others = [name for name, one in found.items() if not torch.equal(one, expected[name])]
    # Some are nothing but rounding, such as a gradient in front of a BatchNorm: they count as their neighbours do.
    scales: dict[str, float] = {}
    for name, one in expected.items():
        kind = name.rpartition(".")[2]
        scales[kind] = max(scales.get(kind, 0.0), float(one.double().abs().max()))
    scales["weight"] = scales["bias"] = max(scales["weight"], scales["bias"])
    worst = 0.0
    for name in others:
        difference = float((found[name].double() - expected[name].double()).abs().max())
        worst = max(worst, difference / (scales[name.rpartition(".")[2]] or 1.0))
    is_same = _is_same(found, dict(model.named_parameters()))
    return {"others": others, "worst": worst, "same on all ranks": is_same, "said": messages}


def _is_same(found: dict[str, Tensor], names: Collection[str]) -> bool:
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, {name: found[name] for name in names})
    return all(torch.equal(one, every[0][name]) for other in every for name, one in other.items())


def _run(said: dict[str, Any], rank: int, folder: Path) -> None:
    norms = {"clipped": SMALL} if distributed.get_world_size() > 2 else {"clipped": SMALL, "not clipped": LARGE}
    for name, make_model in MODELS.items():
        for how, options in PLANS.items():
            for norm, value in norms.items():
                said[f"{name}, {how}, {norm}"] = differences(make_model, value, options)
    small = PLANS["small messages"]
    for name, meddle in MEDDLERS.items():
        said[name] = differences(dense, SMALL, small, meddle=meddle)
    said["accumulated"] = differences(convolutional, SMALL, PLANS["two wait"], accumulate=3)
    said["unused"] = differences(Branches, SMALL, small, find_unused=True, num_steps=8)
    said["unused, not clipped"] = differences(Branches, LARGE, small, find_unused=True, num_steps=8)
    said["clipped twice"] = differences(dense, SMALL, small, num_clips=2)
    said["some are not updated"] = differences(dense, SMALL, small, num_updated=3)
    if distributed.get_world_size() > 2:
        return
    said["found by itself"] = differences(dense, SMALL, FOUND, num_steps=56)
    said["class of its own"] = differences(with_class_of_its_own, SMALL, small)
    said["half precision"] = differences(in_half_precision, SMALL, small)


class Special(nn.Parameter):
    """A parameter of a class of its own: nobody waits for it when it is used."""


def with_class_of_its_own() -> nn.Module:
    model = dense()
    model[0].weight = Special(model[0].weight.detach())
    model[2].bias = Special(model[2].bias.detach())
    return model


def in_half_precision() -> nn.Module:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = dense().to(torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x.to(torch.bfloat16)).float()

    return Cast()


if __name__ == "__main__":
    run_rank(_run)
