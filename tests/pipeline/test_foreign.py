from __future__ import annotations

import copy
import gc
import io
import weakref

import numpy as np
import pytest
import torch
from torch import nn

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.foreign import is_foreign, lent, make_foreign, make_real


class Special(nn.Parameter):
    """A user's kind of parameter."""


def foreign(*shape: int) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(*shape))
    make_foreign(parameter, "'net.3.weight' (on rank 2)")
    return parameter


@pytest.mark.parametrize("kind", [nn.Parameter, Special])
def test_a_foreign_parameter_is_the_same_object_without_memory(kind):
    parameter = kind(torch.ones(4, 3).t())
    parameter.note = "user's"
    reference = weakref.ref(parameter)  # as nn.LSTM has them, for which torch.utils.swap_tensors fails
    parameter.grad = torch.ones(3, 4)
    make_foreign(parameter, "weight")
    assert reference() is parameter
    assert isinstance(parameter, nn.Parameter)
    assert (parameter.is_meta, parameter.is_leaf, parameter.requires_grad) == (True, True, True)
    assert (parameter.shape, parameter.stride(), parameter.dtype) == ((3, 4), (1, 3), torch.float32)
    assert parameter.grad is None
    assert parameter.note == "user's"
    make_real(parameter, torch.full((3, 4), 2.0))
    assert type(parameter) is kind
    assert torch.equal(parameter, torch.full((3, 4), 2.0))
    assert vars(parameter) == {"note": "user's"}


def test_the_memory_is_given_back():
    array = np.ones(10, dtype=np.float32)
    memory = weakref.ref(array)
    parameter = nn.Parameter(torch.from_numpy(array))
    del array
    assert memory() is not None
    make_foreign(parameter, "weight")
    gc.collect()
    assert memory() is None


def test_hooks_run_again_when_it_is_real_again_and_can_be_taken_off():
    parameter, seen = nn.Parameter(torch.ones(2)), []
    hook = parameter.register_hook(lambda grad: seen.append("tensor"))
    parameter.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))
    make_foreign(parameter, "weight")
    make_real(parameter, torch.ones(2))
    parameter.sum().backward()
    assert seen == ["tensor", "accumulated"]
    hook.remove()
    parameter.sum().backward()
    assert seen == ["tensor", "accumulated", "accumulated"]


def test_a_backward_through_an_older_graph_says_so():
    parameter = nn.Parameter(torch.ones(2))
    loss = (parameter * 2).sum()
    make_foreign(parameter, "'net.3.weight' (on rank 2)")
    with pytest.raises(ScheduleError, match=r"A backward arrived at 'net.3.weight' \(on rank 2\)"):
        loss.backward()


READS = {
    "times": lambda x, p: x * p,
    "add to": lambda x, p: x.add_(p),  # which torch leaves out without a word for a meta tensor
    "add a part to": lambda x, p: x.add_(p.detach()[:1]),
    "add many to": lambda x, p: torch._foreach_add_([x], [p.detach()]),
    "average": lambda x, p: torch._foreach_lerp_([x], [p.detach()], 0.5),
    "copy": lambda x, p: x.copy_(p.data),
    "index with": lambda x, p: x[p.detach().long()],
    "norm": lambda x, p: p.norm().item(),
    "float": lambda x, p: float(p.sum()),
    "bool": lambda x, p: bool(p.isnan().any()),
    "list": lambda x, p: p.tolist(),
    "numpy": lambda x, p: p.detach().numpy(),
    "norms together": lambda x, p: torch.stack([x.norm(), p.norm()]),
    "norm plus norm": lambda x, p: x.norm() + p.norm(),
    "a layer": lambda x, p: nn.functional.linear(x, p[None]),
    "a gradient for": lambda x, p: setattr(p, "grad", x),
    "memory for": lambda x, p: setattr(p, "data", x),
    "save": lambda x, p: torch.save(p, io.BytesIO()),
}


@pytest.mark.parametrize("case", READS)
def test_whoever_needs_values_is_told(case):
    with pytest.raises(ScheduleError, match="which this rank of the pipeline does not have"):
        READS[case](torch.ones(3), foreign(3))


def test_the_error_names_the_tensor_and_its_rank():
    with pytest.raises(ScheduleError, match=r"mul needs the values of 'net.3.weight' \(on rank 2\)"):
        foreign(3) * torch.ones(3)
    buffer = torch.ones(3)
    make_foreign(buffer, "'net.3.mean' (on rank 2)")
    with pytest.raises(ScheduleError, match=r"add needs the values of 'net.3.mean' \(on rank 2\)"):
        torch.ones(3) + buffer


def test_writing_into_it_does_nothing():
    parameter = foreign(3)
    with torch.no_grad():
        parameter.copy_(torch.zeros(3))
        parameter.mul_(2).add_(torch.ones(3))
        parameter.data.clamp_(0, 1)
        nn.init.normal_(parameter)
    assert is_foreign(parameter)


@pytest.mark.parametrize("kind", [nn.Linear, nn.LSTM, nn.Bilinear], ids=lambda kind: kind.__name__)
def test_a_module_moves_and_converts_without_them(kind):
    module = nn.Sequential(kind(2, 2, 2), nn.BatchNorm1d(2))
    tensors = [*module.parameters(), *module.buffers()]
    for tensor in tensors:
        make_foreign(tensor, "weight")
    module.to("cpu").double().cpu()
    for tensor in [*module.parameters(), *module.buffers()]:
        assert is_foreign(tensor)
        assert tensor.dtype in (torch.float64, torch.int64)
    assert [id(one) for one in module.parameters()] == [id(one) for one in tensors if isinstance(one, nn.Parameter)]


def test_a_copy_is_foreign_too():
    other = copy.deepcopy(foreign(3))
    assert is_foreign(other)
    assert isinstance(other, nn.Parameter)


def test_optimizers_leave_it_alone():
    own, other = nn.Parameter(torch.ones(3)), foreign(3)
    optimizer = torch.optim.AdamW([own, other], weight_decay=0.1)
    own.grad = torch.ones(3)
    optimizer.step()
    optimizer.zero_grad()
    assert list(optimizer.state) == [own]


def test_a_lent_content_is_taken_back_even_after_an_error():
    dropped, buffer = foreign(3), torch.ones(2)

    def fail() -> None:
        with lent([(dropped, torch.zeros(3)), (buffer, torch.zeros(2))]):
            assert torch.equal(dropped, torch.zeros(3))
            assert torch.equal(buffer, torch.zeros(2))
            assert dropped.requires_grad
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert is_foreign(dropped)
    assert torch.equal(buffer, torch.ones(2))
    with pytest.raises(ScheduleError, match=r"'net\.3\.weight'"):
        dropped.tolist()


def test_a_foreign_tensor_is_equal_to_itself_alone():
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    make_foreign(layers[0].weight, "there")
    assert torch.equal(layers[0].weight, layers[0].weight)
    assert not torch.equal(layers[0].weight, layers[1].weight)
    assert not torch.equal(layers[1].weight, layers[0].weight)
