from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

from lightning_gpufeed.sync.hooks import ModelHooks, compiled_parts


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.body = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))

    def forward(self, x):
        return self.body(x) * self.scale


class Watched:
    """A model under hooks, and what they told."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.events: list[str] = []
        self.hooks = ModelHooks(model, self.before_forward, self.after_grad)
        self.hooks.watch(model)

    def before_forward(self, parameters: tuple[nn.Parameter, ...]) -> None:
        self.events.append("use " + " ".join(self.names[id(parameter)] for parameter in parameters))

    def after_grad(self, parameter: torch.Tensor) -> None:
        self.events.append(f"grad {self.names[id(parameter)]}")


def num_hooks(model: nn.Module) -> int:
    of_modules = sum(len(module._forward_pre_hooks) for module in model.modules())
    return of_modules + sum(len(one._post_accumulate_grad_hooks or ()) for one in model.parameters())


def test_a_module_tells_before_it_runs_and_a_parameter_when_its_gradient_is_there():
    watched = Watched(Model())
    watched.model(torch.ones(1, 2)).sum().backward()
    uses, grads = watched.events[:3], watched.events[3:]
    assert uses == ["use scale", "use body.0.weight body.0.bias", "use body.2.weight body.2.bias"]
    assert sorted(grads) == sorted(f"grad {name}" for name in watched.names.values())


def test_a_gradient_is_complete_when_a_parameter_tells_of_it():
    model = nn.Linear(2, 2)
    grads = []
    hooks = ModelHooks(model, lambda parameters: None, lambda parameter: grads.append(parameter.grad.clone()))
    hooks.watch(model)
    x = torch.ones(3, 2)
    (model(x) + model(x)).sum().backward()
    assert sorted(grad.shape for grad in grads) == [(2,), (2, 2)]
    assert sorted(grad.sum().item() for grad in grads) == [12.0, 24.0]


def test_watching_again_adds_only_what_requires_a_gradient_since():
    model = Model()
    model.scale.requires_grad_(False)
    watched = Watched(model)

    def grads() -> list[str]:
        watched.events.clear()
        watched.model(torch.ones(1, 2)).sum().backward()
        return [event for event in watched.events if event.startswith("grad")]

    assert len(grads()) == 4
    watched.hooks.watch(model)
    assert len(grads()) == 4
    model.scale.requires_grad_(True)
    watched.hooks.watch(model)
    assert len(grads()) == 5


def test_hooks_of_others_on_a_gradient_come_first_whenever_they_were_made():
    watched = Watched(Model())
    seen = []
    for one in watched.model.parameters():
        one.register_post_accumulate_grad_hook(lambda _: seen.append(len(watched.events)))
    watched.model(torch.ones(1, 2)).sum().backward()
    assert seen == [3, 4, 5, 6, 7]


def test_close_takes_every_hook_off():
    watched = Watched(Model())
    watched.hooks.close()
    watched.hooks.close()
    assert num_hooks(watched.model) == 0
    assert all(type(module._parameters) is dict for module in watched.model.modules())
    watched.model(torch.ones(1, 2)).sum().backward()
    assert watched.events == []


def test_hooks_of_others_stay():
    model = Model()
    seen = []
    model.register_forward_pre_hook(lambda module, arguments: seen.append("theirs"))
    watched = Watched(model)
    watched.hooks.close()
    model(torch.ones(1, 2))
    assert seen == ["theirs"]


def saved_whole(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "save": saved_whole}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_of_the_model_works_and_tells_nothing(how):
    watched = Watched(Model())
    other = COPIES[how](watched.model)
    x = torch.ones(1, 2)
    output = other(x)
    output.sum().backward()
    assert watched.events == []
    assert torch.equal(output, watched.model(x))
    assert watched.events[0] == "use scale"


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def test_of_a_compiled_part_the_border_alone_tells_of_all_inside():
    model = nn.Sequential(nn.Linear(2, 2), compiled(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
    watched = Watched(model)
    with torch.no_grad():
        model(torch.ones(1, 2))
    inner = "1._orig_mod"
    parts = [f"{inner}.{i}.{name}" for i in (0, 1) for name in ("weight", "bias")]
    assert watched.events == ["use 0.weight 0.bias", "use " + " ".join(parts)]


def test_compiled_parts_are_all_modules_at_and_below_a_border():
    model = nn.Sequential(nn.Linear(2, 2), compiled(nn.Sequential(nn.Linear(2, 2))))
    names = {"1", "1._orig_mod", "1._orig_mod.0"}
    assert compiled_parts(model) == (names, False)
    assert compiled_parts(compiled(nn.Linear(2, 2))) == ({"", "_orig_mod"}, False)
    assert compiled_parts(nn.Linear(2, 2)) == (frozenset(), False)


def test_a_name_that_begins_like_a_compiled_one_is_not_inside():
    model = nn.ModuleDict({"a": compiled(nn.Linear(2, 2)), "ab": nn.Linear(2, 2)})
    assert compiled_parts(model)[0] == {"a", "a._orig_mod"}


def test_what_is_scripted_or_compiled_in_place_has_no_border():
    inner = nn.Linear(2, 2)
    inner.compile(backend="eager")
    assert compiled_parts(nn.Sequential(inner)) == (frozenset(), True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(nn.Linear(2, 2))
    assert compiled_parts(nn.Sequential(scripted))[1]
