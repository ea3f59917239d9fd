"""What four ranks have, brought together: equal, bit by bit, to what one device has after the same training.

The ranks are real processes (gloo), started once for all tests of this file.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gpufeed.pipeline.weights import load_full_state_dict
from tests.doubles import run_ranks
from tests.pipeline.partition_models import NUM_STEPS, OPTIMIZERS, make_net, train_alone

WORKER = Path(__file__).with_name("weights_worker.py")
NUM_RANKS = 4
LIMIT_SECONDS = 90
MADE = ["adamw_fused", "adamw_foreach", "sgd", "adafactor", "adagrad"]


class Ranks:
    """What each rank wrote down, by the name of the scenario."""

    def __init__(self, folder: Path, log: str) -> None:
        self.folder, self.log = folder, log

    def __getitem__(self, name: str) -> list[Any]:
        files = [self.folder / f"{name}.{rank}.pt" for rank in range(NUM_RANKS)]
        assert all(file.exists() for file in files), f"not every rank finished {name!r}:\n{self.log[-4000:]}"
        return [torch.load(file, weights_only=False) for file in files]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    plan = {"world_size": NUM_RANKS, "out": str(folder)}
    return Ranks(folder, run_ranks(WORKER, plan, folder, num_processes=1, limit_seconds=LIMIT_SECONDS))


@cache
def alone(name: str, num_steps: int = NUM_STEPS, seed: int = 10) -> tuple[Any, Any, list[float]]:
    """Model, optimizer and losses of the same training on one device."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as on the ranks: sums in the same order
    net = make_net(seed)
    optimizer = OPTIMIZERS[name](net)
    losses = train_alone(net, optimizer, range(num_steps))
    torch.set_num_threads(before)
    return net, optimizer, losses


def same(left: Any, right: Any) -> bool:
    """Bit by bit, with types and the order of dicts."""
    if isinstance(left, Tensor):
        is_alike = isinstance(right, Tensor) and (left.dtype, left.shape) == (right.dtype, right.shape)
        return is_alike and left.device == right.device and torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


# Start -----------------------------------------------------------------------------------------------------


def test_every_rank_starts_from_the_weights_and_buffers_of_the_root(ranks):
    expected = {key: value for key, value in make_net(10).state_dict().items() if isinstance(value, Tensor)}
    for found in ranks["sgd"]:
        assert same(found["start"], expected)


# Full state ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE)
def test_the_full_state_of_the_model_is_that_of_one_device_on_every_rank(ranks, name):
    net, _, losses = alone(name)
    expected = net.state_dict()
    for found in ranks[name]:
        assert found["losses"] == losses
        assert same(found["state"], expected)  # extra state too: how often a forward ran
        assert same(found["metadata"], expected._metadata)
        assert found["is_meta_where_foreign"]


@pytest.mark.parametrize("name", MADE)
def test_the_full_state_of_the_optimizer_is_that_of_one_device_on_every_rank(ranks, name):
    _, optimizer, _ = alone(name)
    expected = optimizer.state_dict()
    for found in ranks[name]:
        state = found["optimizer"]
        assert same(state["param_groups"], expected["param_groups"])
        assert list(state["state"]) == sorted(expected["state"])
        assert all(same(state["state"][number], expected["state"][number]) for number in state["state"])


def test_a_parameter_that_was_never_trained_has_no_state(ranks):
    net, optimizer, _ = alone("sgd")
    [frozen] = [number for number, one in enumerate(net.parameters()) if not one.requires_grad]
    assert frozen not in optimizer.state_dict()["state"]
    assert all(frozen not in found["optimizer"]["state"] for found in ranks["sgd"])


def test_tied_weights_are_one_memory_in_the_full_state(ranks):
    for found in ranks["sgd"]:
        first, last = found["state"]["seq.0.weight"], found["state"]["seq.5.weight"]
        assert first.data_ptr() == last.data_ptr()


def test_a_full_checkpoint_goes_on_in_a_plain_model_and_optimizer(ranks):
    net, optimizer, losses = alone("adamw_fused", NUM_STEPS + 1)
    found = ranks["adamw_fused"][2]
    other = make_net(seed=99)
    other_optimizer = OPTIMIZERS["adamw_fused"](other)
    other.load_state_dict(found["state"])
    for name, buffer in other.named_buffers():
        if name.endswith("mask"):  # not in a checkpoint
            buffer.copy_(found["back"][name])
    other_optimizer.load_state_dict(found["optimizer"])
    torch.set_num_threads(1)  # as in `alone`
    assert train_alone(other, other_optimizer, [NUM_STEPS]) == losses[NUM_STEPS:]
    assert same(other.state_dict(), net.state_dict())
    assert same(other_optimizer.state_dict(), optimizer.state_dict())


def test_a_full_checkpoint_goes_on_where_foreign_layers_have_no_memory(ranks):
    net, optimizer, losses = alone("adamw_fused", NUM_STEPS + 1)
    for found in ranks["resumed"]:
        assert found["losses"] == losses[NUM_STEPS:]
        assert same(found["state"], net.state_dict())
        assert same(found["optimizer"]["state"], optimizer.state_dict()["state"])


def test_only_the_states_of_own_parameters_have_memory(ranks):
    num_tensors = len(["step", "exp_avg", "exp_avg_sq"])
    for found in ranks["resumed"]:
        frozen = 1  # of one rank
        assert found["num_own"] * num_tensors - found["num_held"] in (0, frozen * num_tensors)


def test_a_pipeline_of_some_ranks_knows_its_own_numbers(ranks):
    net, optimizer, _ = alone("sgd", seed=13)
    for found in ranks["of_two"]:
        assert same(found["state"], net.state_dict())
        assert same(found["optimizer"]["state"], optimizer.state_dict()["state"])


def test_states_of_any_form_keep_it(ranks):
    for found in ranks["nested_states"]:
        assert list(found["state"]) == [0, 2, 4, 6, 8, "count"]
        assert found["state"]["count"] == 3
        for rank in range(NUM_RANKS):
            grad = torch.full((1, 1), float(rank))
            deep = {"list": [grad + 1, 2.5], "pair": (grad.half(), "text")}
            assert same(found["state"][2 * rank], {"number": 2 * rank, "none": None, "deep": deep})


@pytest.mark.parametrize("kind", ["bool", "int16", "bfloat16", "float64", "complex64", "float8_e5m2"])
def test_tensors_of_every_dtype_arrive(ranks, kind):
    dtype = getattr(torch, kind)
    for found in ranks["odd_tensors"]:
        for number in range(NUM_RANKS):
            expected = (torch.arange(6.0).view(2, 3) + 10 * number).to(dtype)
            for state in (found["state"], found["back"]):
                value = state[f"seq.{number}.as_{kind}"]
                assert value.dtype == dtype
                assert torch.equal(value.to(torch.complex64), expected.to(torch.complex64))


def test_empty_expanded_and_strided_tensors_arrive(ranks):
    for found in ranks["odd_tensors"]:
        for number in range(NUM_RANKS):
            values = torch.arange(6.0).view(2, 3) + 10 * number
            for state in (found["state"], found["back"]):
                assert state[f"seq.{number}.empty"].shape == (0, 3)
                assert torch.equal(state[f"seq.{number}.expanded"], values[:1].expand(4, 3))
                images = state[f"seq.{number}.images"]
                assert torch.equal(images, values.view(1, 2, 3, 1))
                assert images.is_contiguous(memory_format=torch.channels_last)


# End -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE)
def test_at_the_end_every_rank_has_the_whole_model_in_the_same_objects(ranks, name):
    net, _, _ = alone(name)
    expected = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    for found in ranks[name]:
        assert found["back"].keys() == expected.keys()
        assert all(same(found["back"][key], value.detach()) for key, value in expected.items())
        assert found["back"]["seq.2.mix"].stride() == (1, 4)
        assert found["are_same_objects"]
        assert not found["is_dropped"]


# Errors ----------------------------------------------------------------------------------------------------


REFUSED = {
    "models differ": "Rank 2 of the pipeline has .*0.weight.*3, 2.* where the root, rank 1, has .*2, 2",
    "dropped": r"expected to take the root's before Partition\.drop",
    "late buffer": r"Rank 1 of the pipeline has made '1\.late' after the layers were shared out",
    "lost parameter": r"'1\.bias' was taken away after the layers were shared out",
    "torn buffer": r"'1\.1\.total' on rank 3 of the pipeline is not what another rank has",
    "torn weight": r"'1\.1\.weight' on rank 3 of the pipeline is not what another rank has",
    "another group": "This is rank 0 of 1 in the group, but rank . of 4 in the partition",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_brought_together_is_refused_on_every_rank(ranks, case):
    for found in ranks["refusals"]:
        assert re.search(REFUSED[case], found[case])


def test_loading_without_strict_leaves_other_keys_alone():
    net = make_net(0)
    load_full_state_dict(net, {"seq.9.weight": torch.ones(1)}, strict=False)
    assert same(net.state_dict(), make_net(0).state_dict())
