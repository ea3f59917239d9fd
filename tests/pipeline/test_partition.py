from __future__ import annotations

import gc
import weakref
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.layer_list import find_layers
from lightning_gpufeed.pipeline.partition import Partition, map_tensors
from tests.pipeline.partition_models import OPTIMIZERS, STAGES, Net, make_net, tokens


class Pair(NamedTuple):
    left: Any
    right: Any


def each_own(model: nn.Module, rank: int, num_ranks: int = 2) -> Partition:
    """A stage for each layer, round and round."""
    layers = find_layers(model)
    stages = [range(number, number + 1) for number in range(len(layers.layers))]
    return Partition(model, layers, stages, [number % num_ranks for number in range(len(stages))], rank)


def names(tensors: list[tuple[str, torch.Tensor]]) -> list[str]:
    return [name for name, _ in tensors]


# Who has what ----------------------------------------------------------------------------------------------


def test_a_tensor_is_on_the_ranks_of_its_layers_and_outside_on_all():
    partitions = [each_own(make_net(0), rank, 3) for rank in range(3)]
    owners = {one.name: one.owners for one in partitions[0].tensors}
    assert owners["seq.0.weight"] == (0, 2)  # also the head's
    assert owners["seq.5.bias"] == (2,)
    assert owners["seq.1.mask"] == (1,)
    assert owners["seq.2.norm.num_batches_tracked"] == (2,)
    assert owners["seq.3.linear.bias"] == (0,)
    assert owners["after.weight"] == owners["scale"] == (0, 1, 2)
    for rank, partition in enumerate(partitions):
        assert {one.name: one.owners for one in partition.tensors} == owners
        assert names(partition.own) == [name for name, ranks in owners.items() if rank in ranks]
        assert names(partition.foreign) == [name for name, ranks in owners.items() if rank not in ranks]


def test_only_parameters_of_layers_on_several_ranks_are_shared():
    assert each_own(make_net(0), 0, 3).shared == {"seq.0.weight": (0, 2)}
    assert each_own(make_net(0), 0, 5).shared == {}  # embedding and head are on one rank


def test_every_tensor_is_there_once_under_its_first_name():
    net = make_net(0)
    found = [one.name for one in each_own(net, 0).tensors]
    assert len(found) == len(set(found))
    assert set(found) == {name for name, _ in [*net.named_parameters(), *net.named_buffers()]}


@given(num_ranks=st.integers(1, 6), cut=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_own_and_foreign_are_all_and_every_layer_has_an_owner(num_ranks, cut):
    model = nn.Sequential(*(nn.Linear(1, 1 + number) for number in range(sum(cut))))
    ends = np.cumsum(cut).tolist()
    stages = [range(end - length, end) for end, length in zip(ends, cut, strict=True)]
    stage_to_rank = [number % min(num_ranks, len(cut)) for number in range(len(cut))]
    seen: set[str] = set()
    sizes = set()
    for rank in set(stage_to_rank):
        partition = Partition(model, find_layers(model), stages, stage_to_rank, rank)
        seen |= set(names(partition.own))
        sizes.add(partition.own_bytes + partition.foreign_bytes)
        assert sorted(names(partition.own) + names(partition.foreign)) == sorted(dict(model.named_parameters()))
    assert seen == set(dict(model.named_parameters()))
    assert sizes == {4 * sum(one.numel() for one in model.parameters())}


def test_a_module_is_known_by_identity_and_not_by_its_name():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.net = nn.Sequential(self.first, nn.Linear(2, 2))

    partition = each_own(Model(), 1)
    assert names(partition.foreign) == ["first.weight", "first.bias"]
    assert partition.ranks_of(partition.model.first) == (0,)
    assert partition.ranks_of(partition.model) == ()


def test_a_parameter_is_found_by_identity():
    net = make_net(0)
    partition = each_own(net, 0)
    assert partition.find(net.seq[5].weight).name == "seq.0.weight"
    assert partition.find(nn.Parameter(torch.ones(1))) is None


def test_a_buffer_that_both_sides_read_is_everywhere():
    net = nn.ModuleDict({"seq": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))})
    mask = torch.ones(2)
    net.register_buffer("mask", mask)
    net["seq"][1].register_buffer("mask", mask)
    assert {one.name: one.owners for one in each_own(net, 0).tensors}["mask"] == (0, 1)


# Dropped ---------------------------------------------------------------------------------------------------


def test_what_is_foreign_has_no_memory_and_the_rest_is_untouched():
    net = make_net(0)
    partition = each_own(net, 0)
    kept = {name: (tensor, tensor.detach().clone()) for name, tensor in partition.own}
    objects = [id(one) for one in net.parameters()]
    assert not partition.is_dropped
    partition.drop()
    partition.drop()
    assert partition.is_dropped
    assert [id(one) for one in net.parameters()] == objects
    assert all(tensor.is_meta for _, tensor in partition.foreign)
    for name, tensor in partition.own:
        assert tensor is kept[name][0]
        assert torch.equal(tensor, kept[name][1])
    assert net.seq[3].linear.bias.requires_grad is False
    assert net.seq[1].linear.bias.requires_grad is True
    assert net.state_dict().keys() == make_net(0).state_dict().keys()


def test_the_memory_of_foreign_layers_is_given_back():
    arrays = [np.ones((2, 2), dtype=np.float32) for _ in range(2)]
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer, array in zip(model, arrays, strict=True):
        layer.weight = nn.Parameter(torch.from_numpy(array))
    memory = [weakref.ref(array) for array in arrays]
    del arrays, array, layer
    each_own(model, 1).drop()
    gc.collect()
    assert [one() is None for one in memory] == [True, False]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_own_layers_train_on_beside_foreign_ones(name):
    net, twin = make_net(0), make_net(0)
    partition = each_own(net, 0)
    optimizers = [OPTIMIZERS[name](net), OPTIMIZERS[name](twin)]
    partition.drop()
    partition.drop_state(optimizers[0])
    for _ in range(2):
        for model, optimizer in zip((net, twin), optimizers, strict=True):
            optimizer.zero_grad()
            model.seq[2](model.seq[0](tokens(0))).square().sum().backward()
            optimizer.step()
    expected = dict(twin.named_parameters())
    for name_, tensor in partition.own:
        if tensor.requires_grad:
            assert torch.equal(tensor, expected[name_])
    assert all(tensor.grad is None for _, tensor in partition.foreign)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_can_be_made_after_the_drop_too(name):
    net = make_net(0)
    partition = each_own(net, 0)
    partition.drop()
    optimizer = OPTIMIZERS[name](net)
    net.seq[0](tokens(0)).sum().backward()
    optimizer.step()
    with_memory = {
        id(parameter)
        for parameter, state in optimizer.state.items()
        if not all(value.is_meta for key, value in state.items() if key != "step")
    }
    assert with_memory <= {id(tensor) for _, tensor in partition.own}


def test_states_of_foreign_parameters_go():
    net = make_net(0)
    optimizer = optim.AdamW(net.parameters(), amsgrad=True)
    net.loss(net.seq(tokens(0))).backward()
    optimizer.step()
    partition = each_own(net, 0)
    before = {name: optimizer.state[tensor] for name, tensor in partition.own if tensor in optimizer.state}
    partition.drop_state(optimizer)
    foreign = [optimizer.state[tensor] for _, tensor in partition.foreign if tensor in optimizer.state]
    assert not foreign
    for name, tensor in partition.own:
        if name in before:
            assert optimizer.state[tensor] is before[name]


def test_own_tensors_move_and_foreign_ones_stay_away():
    net = make_net(0)
    partition = each_own(net, 0)
    partition.drop()
    net.to("cpu").to(torch.float64)
    assert all(tensor.is_meta for _, tensor in partition.foreign)
    assert all(tensor.dtype in (torch.float64, torch.int64) for _, tensor in partition.own + partition.foreign)


def test_a_buffer_that_is_another_tensor_after_a_forward_is_still_known():
    net = make_net(0)
    partition = each_own(net, 1)
    net.seq[1](torch.ones(2, 4))
    assert dict(partition.own)["seq.1.seen"] is net.seq[1].seen


def test_a_tensor_that_is_made_later_in_an_own_layer_is_a_stranger():
    net = make_net(0)
    partition = each_own(net, 1)
    net.seq[0].register_buffer("cache", torch.ones(1))
    assert partition.strangers() == []
    net.seq[1].norm.register_buffer("cache", torch.ones(1))
    assert partition.strangers() == ["seq.1.norm.cache"]


def test_a_structure_keeps_its_form():
    value = {"a": [torch.ones(1), 2], "b": (None, torch.ones(2)), "c": Pair(torch.ones(3), "text")}
    assert map_tensors(value, len) == {"a": [1, 2], "b": (None, 2), "c": Pair(3, "text")}
    assert type(map_tensors(value, len)["c"]) is Pair


# Refused ---------------------------------------------------------------------------------------------------


def tied_to_outside() -> nn.Module:
    net = make_net(0)
    net.after.weight = net.seq[3].linear.weight
    return net


def one_memory() -> nn.Module:
    net = make_net(0)
    net.seq[3].linear.weight.data = net.seq[1].linear.weight.data
    return net


def one_norm() -> nn.Module:
    net = make_net(0)
    net.seq[3].norm = net.seq[2].norm
    return net


def lazy() -> nn.Module:
    net = make_net(0)
    net.seq[1].linear = nn.LazyLinear(4)
    return net


def sparse() -> nn.Module:
    net = make_net(0)
    net.seq[1].register_buffer("graph", torch.eye(2).to_sparse())
    return net


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            tied_to_outside,
            "'seq.3.linear.weight' in a layer and 'after.weight' outside of 'seq' are the same parameter",
        ),
        (one_memory, "'seq.[13].linear.weight' and 'seq.[13].linear.weight' are two parameters in the same memory"),
        (one_norm, r"'seq.2.norm.running_mean' \(of a BatchNorm1d\) is in layers of 'seq' on several ranks"),
        (lazy, "'seq.1.linear.weight' has no shape yet"),
        (sparse, "'seq.1.graph' is a Tensor of layout torch.sparse_coo"),
    ],
    ids=["tied to outside", "one memory", "one norm", "lazy", "sparse"],
)
def test_what_cannot_be_shared_out_exactly_is_refused(make, words):
    with pytest.raises(ScheduleError, match=words):
        each_own(make(), 0, 3)


def test_what_is_on_one_rank_may_be_tied_to_anything():
    partition = each_own(tied_to_outside(), 0, 1)
    assert (partition.shared, partition.foreign) == ({}, [])


def make(net: Net, stages: object = STAGES, ranks: object = (0, 1, 0, 1, 0, 1), rank: int = 0) -> Partition:
    return Partition(net, find_layers(net), stages, ranks, rank)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"stages": STAGES[:-1]},
            "expected ranges that follow each other, each with a layer or more, and all 6 layers",
        ),
        ({"stages": [range(0, 6), range(6, 6)]}, "each with a layer or more"),
        ({"ranks": (0, 1)}, r"6 stages are on ranks \[0, 1\]; expected a rank for each"),
        ({"ranks": (0, 2, 0, 2, 0, 2)}, "a stage on each rank from 0 on"),
        ({"rank": 2}, "This is rank 2 of a pipeline of ranks 0 to 1"),
    ],
    ids=["a layer left", "an empty stage", "too few ranks", "an idle rank", "no such rank"],
)
def test_stages_that_do_not_fit_are_wrong_arguments(options, words):
    with pytest.raises(ValueError, match=words):
        make(make_net(0), **options)
