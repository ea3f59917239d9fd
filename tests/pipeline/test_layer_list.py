from __future__ import annotations

import pytest
import torch
from torch import nn
from torchmetrics import Metric

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.layer_list import check_enough, find_layers, is_compiled


def linears(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


class Skip(nn.Sequential):
    """Does more than its layers."""

    def forward(self, x):
        return x + super().forward(x)


class Named(nn.Sequential):
    """Does what its layers do."""


class Loss(nn.L1Loss):
    """A loss with a network of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.features = linears()


class Distance(Metric):
    """A metric with a network of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.features = linears()

    def update(self) -> None: ...

    def compute(self) -> None: ...


class Net(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.number = 3
        self.stray = [nn.Linear(2, 2)]

    def in_order(self):
        return [self.first, *self.rest]

    def numbers(self):
        return [self.first, torch.relu]

    def strangers(self):
        return [self.first, *self.stray]

    def twice(self):
        return (self.first, self.first)

    def nested(self):
        return self.first, self.rest, self.rest[1]

    def of_a_batch(self, batch):
        return batch

    def nothing(self):
        return []

    def itself(self):
        return [self]


def with_method() -> Net:
    return Net(first=nn.Linear(2, 2), rest=nn.ModuleList([nn.ReLU(), nn.Linear(2, 2)]))


# Found -----------------------------------------------------------------------------------------------------


def test_the_only_sequential_is_the_pipeline():
    model = Net(inner=Net(seq=linears(3)), head=nn.Linear(2, 2))
    found = find_layers(model)
    assert (found.name, found.names) == ("inner.seq", ("inner.seq.0", "inner.seq.1", "inner.seq.2"))
    assert found.owner is model.inner.seq
    assert found.layers == tuple(model.inner.seq)
    assert all(model.get_submodule(name) is layer for name, layer in zip(found.names, found.layers, strict=True))


def test_a_sequential_in_another_one_is_a_layer():
    model = Net(seq=nn.Sequential(linears(), Net(deep=linears()), nn.ReLU()))
    assert find_layers(model).names == ("seq.0", "seq.1", "seq.2")


@pytest.mark.parametrize("aside", [Loss, Distance], ids=["loss", "metric"])
def test_one_in_a_loss_or_a_metric_does_not_count(aside):
    assert find_layers(Net(aside=aside(), seq=linears())).name == "seq"


def test_one_under_two_names_is_one():
    seq = linears()
    assert find_layers(Net(seq=seq, same=seq)).name == "seq"


def test_the_model_itself_may_be_the_sequential():
    assert find_layers(linears()).names == ("0", "1")


def test_layers_keep_the_names_they_were_given():
    model = Net(seq=nn.Sequential())
    model.seq.add_module("stem", nn.Linear(2, 2))
    model.seq.add_module("head", nn.Linear(2, 2))
    assert find_layers(model).names == ("seq.stem", "seq.head")


def test_a_subclass_that_runs_as_sequential_is_one():
    assert find_layers(Net(seq=Named(nn.ReLU()))).owner.__class__ is Named


def test_what_is_in_a_sequential_with_a_forward_of_its_own_may_be_cut():
    assert find_layers(Net(skip=Skip(linears(), linears())), "skip.1").names == ("skip.1.0", "skip.1.1")
    assert find_layers(Net(skip=Skip(linears()))).name == "skip.0"


def test_a_method_gives_the_layers_and_stands_for_the_forward_of_its_module():
    model = with_method()
    found = find_layers(model, "in_order")
    assert (found.name, found.names, found.owner) == ("in_order", ("first", "rest.0", "rest.1"), model)
    outer = Net(inner=model)
    found = find_layers(outer, "inner.in_order")
    assert (found.names[0], found.owner) == ("inner.first", model)


def test_layers_may_share_parameters_and_have_hooks():
    model = Net(seq=linears())
    model.seq[1].weight = model.seq[0].weight
    model.seq[0].register_forward_hook(lambda *_: None)
    assert len(find_layers(model).layers) == 2


def test_a_compiled_layer_is_a_layer():
    model = Net(seq=nn.Sequential(compiled(nn.Linear(2, 2)), nn.ReLU()))
    model.seq[1].compile(backend="eager")
    assert [is_compiled(layer) for layer in find_layers(model).layers] == [True, True]


# Refused ---------------------------------------------------------------------------------------------------


def hooked() -> Net:
    model = Net(seq=linears())
    model.seq.register_forward_pre_hook(lambda *_: None)
    return model


def replaced() -> Net:
    model = Net(seq=linears())
    model.seq.forward = lambda x: x
    return model


def repeated() -> Net:
    layer = nn.Linear(2, 2)
    return Net(seq=nn.Sequential(layer, nn.ReLU(), layer))


def compiled_in_place() -> Net:
    model = Net(seq=linears())
    model.seq.compile(backend="eager")
    return model


def compiled_around() -> Net:
    return Net(inner=compiled(Net(seq=linears())))


REFUSED = {
    "none": (lambda: Net(head=nn.Linear(2, 2)), None, "has no nn.Sequential; expected one. Put the layers into"),
    "a module list": (with_method, None, r"Not counted: 'rest' \(an nn.ModuleList, which does not say how it runs\)"),
    "own forward": (lambda: Net(skip=Skip()), None, r"Not counted: 'skip' \(Skip has a forward of its own\)"),
    "several": (
        lambda: Net(one=linears(), two=linears()),
        None,
        "has 2 nn.Sequential that could be the pipeline: 'one', 'two'; expected one. .*pipeline_module='one'",
    ),
    "no such name": (lambda: Net(seq=linears()), "net", "Net has no 'net'; .*such as pipeline_module='seq'"),
    "no such path": (lambda: Net(seq=linears()), "seq.0.net", "Net has no 'seq.0.net'"),
    "another module": (lambda: Net(head=nn.Linear(2, 2)), "head", "'head' is a Linear, which does not say in which"),
    "own forward by name": (lambda: Net(skip=Skip()), "skip", r"'skip' \(Skip\) has a forward of its own"),
    "a replaced forward": (replaced, "seq", r"'seq' \(Sequential\) has a forward of its own"),
    "no method": (lambda: Net(), "number", "'number' of Net is a int; expected an nn.Sequential, or a method"),
    "a method with arguments": (with_method, "of_a_batch", "'of_a_batch' cannot give the layers: .*takes nothing"),
    "no module": (with_method, "numbers", "Layer 1 that the method 'numbers' returns is a builtin_function_or_method"),
    "not in the model": (with_method, "strangers", "Layer 1 .*, a Linear, is not in the model"),
    "twice": (with_method, "twice", "Layers 0 and 1 of 'twice' are the same module"),
    "twice in a Sequential": (repeated, None, "Layers 0 and 2 of 'seq' are the same module .*may share their"),
    "one in another": (with_method, "nested", "Layer 2 of 'nested' .Linear. is a part of layer 1 .ModuleList."),
    "its own owner": (with_method, "itself", "hold the module that they are the layers of"),
    "no layers": (with_method, "nothing", "'nothing' has no layers"),
    "an empty Sequential": (lambda: Net(seq=nn.Sequential()), None, "'seq' has no layers"),
    "hooks": (hooked, None, r"'seq' has hooks of its own \(forward_pre_hooks\)"),
    "compiled": (lambda: Net(seq=compiled(linears())), "seq", "'seq' is compiled as a whole"),
    "compiled, unnamed": (lambda: Net(seq=compiled(linears())), None, "is in 'seq', which is compiled as a whole"),
    "compiled in place": (compiled_in_place, None, "'seq' is compiled as a whole"),
    "compiled around": (compiled_around, None, "'inner._orig_mod.seq' is in 'inner', which is compiled as a whole"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_cut_is_refused_with_a_way_out(case):
    make, name, words = REFUSED[case]
    with pytest.raises(ScheduleError, match=words):
        find_layers(make(), name)


def test_too_few_layers_are_refused_with_numbers():
    layers = find_layers(Net(seq=linears(3)))
    check_enough(layers, 3)
    with pytest.raises(ScheduleError, match=r"'seq' has 3 layers \(Linear, Linear, Linear\), but there are 4 stages"):
        check_enough(layers, 4)
