"""Running statistics of batch normalisation move once per batch, as the whole batch would have moved them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gpufeed.recover.batchnorm import StatisticsOnce

SHAPES: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "BatchNorm1d": (nn.BatchNorm1d, (5,)),
    "BatchNorm1d of sequences": (nn.BatchNorm1d, (5, 7)),
    "BatchNorm2d": (nn.BatchNorm2d, (5, 4, 3)),
    "BatchNorm3d": (nn.BatchNorm3d, (5, 2, 3, 4)),
}
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def make_input(shape: tuple[int, ...], num_samples: int = 12, seed: int = 1) -> torch.Tensor:
    """Channels with means and scales of their own, samples that drift: microbatches differ from each other."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_samples, *shape, generator=generator)
    channels = torch.arange(1.0, shape[0] + 1).view(1, -1, *[1] * (len(shape) - 1))
    return x * channels + 3 * channels + torch.linspace(0, 5, num_samples).view(-1, *[1] * len(shape))


def in_microbatches(module: nn.Module, x: torch.Tensor, sizes: Sequence[int]) -> None:
    statistics = StatisticsOnce(module)
    try:
        for microbatch in x.split(list(sizes)):
            statistics.begin_microbatch()
            module(microbatch)
    finally:
        statistics.end()
    statistics.apply()


def assert_same_statistics(one: nn.Module, other: nn.Module, *, rtol: float = 2e-6) -> None:
    """Up to rounding of sums in float32 in another order, for values that are not near zero by cancelling."""
    expected = one.state_dict()
    for name, value in other.state_dict().items():
        if name.endswith("num_batches_tracked"):
            assert torch.equal(value, expected[name]), name
        else:
            torch.testing.assert_close(value, expected[name], rtol=rtol, atol=rtol / 2)


def statistics_of(module: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for name, value in module.state_dict().items() if name.endswith(STATISTICS)]


# The same as the whole batch ---------------------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.1, 1.0, 0.0, None])
@pytest.mark.parametrize("kind", SHAPES)
def test_statistics_are_those_of_the_whole_batches(kind, momentum):
    make, shape = SHAPES[kind]
    whole = make(5, momentum=momentum)
    cut = copy.deepcopy(whole)
    for seed in range(3):
        x = make_input(shape, seed=seed)
        whole(x)
        in_microbatches(cut, x, [6, 4, 2])
    assert_same_statistics(whole, cut)
    assert cut.num_batches_tracked == 3


@given(sizes=st.lists(st.integers(2, 7), min_size=1, max_size=6))
@settings(max_examples=40)
def test_however_the_batch_is_cut(sizes: list[int]) -> None:
    whole, cut = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
    x = make_input((5,), sum(sizes))
    whole(x)
    in_microbatches(cut, x, sizes)
    assert_same_statistics(whole, cut)


def test_microbatches_of_one_image_each_count_the_spread_between_images():
    whole, cut = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    x = make_input((3, 2, 2), 6)
    whole(x)
    in_microbatches(cut, x, [1] * 6)
    assert_same_statistics(whole, cut)


def test_large_means_with_small_spread_do_not_cancel():
    """As E[x^2] - E[x]^2 would, to nothing: 1000 squared has seven digits, all that float32 has."""
    whole, cut = nn.BatchNorm1d(1, momentum=1.0), nn.BatchNorm1d(1, momentum=1.0)
    x = 1000 + 0.1 * torch.randn(64, 1, generator=torch.Generator().manual_seed(0))
    whole(x)
    in_microbatches(cut, x, [16] * 4)
    # Inputs of 1000 are themselves rounded to 6e-5, a two-thousandth of the spread.
    assert_same_statistics(whole, cut, rtol=2e-3)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float64, 1e-12)])
def test_modules_in_other_precisions_have_statistics_as_exact_as_their_type(dtype, rtol):
    """With so many elements that a sum of squares would be no half-precision number; rtol: a few units in the end."""
    whole, cut = nn.BatchNorm2d(2).to(dtype), nn.BatchNorm2d(2).to(dtype)
    x = make_input((2, 160, 160), 4).to(dtype)
    whole(x)
    in_microbatches(cut, x, [2, 2])
    assert_same_statistics(whole, cut, rtol=rtol)


def test_the_first_layer_of_a_network_has_exactly_those_and_deeper_layers_count_once_too():
    whole = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 4), nn.BatchNorm1d(4), nn.ReLU())
    cut = copy.deepcopy(whole)
    x = make_input((5,))
    whole(x)
    in_microbatches(cut, x, [4, 4, 4])
    assert_same_statistics(whole[0], cut[0])
    assert cut[2].num_batches_tracked == 1


def test_without_this_the_statistics_would_be_others():
    """Otherwise the tests above could not fail."""
    whole, cut = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
    x = make_input((5,))
    whole(x)
    for microbatch in x.split(4):
        cut(microbatch)
    assert cut.num_batches_tracked == 3
    assert not torch.allclose(whole.running_mean, cut.running_mean, rtol=0.1)


class Twice(nn.Module):
    """One normalisation for two inputs, as in siamese networks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.norm(2 * x + 1)


def test_a_normalisation_that_is_called_twice_in_a_pass_moves_twice_per_batch():
    whole, cut = Twice(), Twice()
    for seed in range(2):
        x = make_input((5,), seed=seed)
        whole(x)
        in_microbatches(cut, x, [7, 5])
    assert_same_statistics(whole, cut)
    assert cut.norm.num_batches_tracked == 4


class Sometimes(nn.Module):
    """A branch that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.never = nn.BatchNorm1d(5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) if x[0, 0] > 0 else x


def test_a_microbatch_that_does_not_call_a_normalisation_does_not_count_in_it():
    x = make_input((5,))
    x[:4, 0], x[4:, 0] = -1, 1
    whole, cut = Sometimes(), Sometimes()
    whole(x[4:])
    in_microbatches(cut, x, [4, 4, 4])
    assert_same_statistics(whole, cut)
    assert cut.never.num_batches_tracked == 0


# Those that have no part in it -------------------------------------------------------------------------------


def test_frozen_normalisations_and_those_without_statistics_are_left_alone():
    frozen, untracked, group = (
        nn.BatchNorm1d(5).eval(),
        nn.BatchNorm1d(5, track_running_stats=False),
        nn.GroupNorm(1, 5),
    )
    net = nn.Sequential(frozen, untracked, group, nn.BatchNorm1d(5))
    before = statistics_of(frozen)
    statistics = StatisticsOnce(net)
    assert len(statistics._norms) == 1
    assert (frozen.momentum, untracked.momentum) == (0.1, 0.1)
    statistics.begin_microbatch()
    net(make_input((5,)))
    statistics.end()
    statistics.apply()
    assert all(torch.equal(one, other) for one, other in zip(before, statistics_of(frozen), strict=True))
    assert untracked.running_mean is None
    assert net[3].num_batches_tracked == 1


def test_a_normalisation_without_weights_counts_as_well():
    whole, cut = nn.BatchNorm1d(5, affine=False), nn.BatchNorm1d(5, affine=False)
    x = make_input((5,))
    whole(x)
    in_microbatches(cut, x, [6, 6])
    assert_same_statistics(whole, cut)


def test_a_normalisation_that_is_frozen_meanwhile_does_not_count():
    norm = nn.BatchNorm1d(5)
    before = statistics_of(norm)
    statistics = StatisticsOnce(norm)
    statistics.begin_microbatch()
    norm.eval()(make_input((5,)))
    statistics.end()
    statistics.apply()
    assert all(torch.equal(one, other) for one, other in zip(before, statistics_of(norm), strict=True))


# Taken back --------------------------------------------------------------------------------------------------


class Broken(nn.Module):
    """Breaks off after the first normalisation, in a microbatch of a number."""

    def __init__(self, breaks_at: int) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(5), nn.BatchNorm1d(5, momentum=None)
        self.breaks_at, self.count = breaks_at, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        self.count += 1
        if self.count - 1 == self.breaks_at:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return self.second(x)


@pytest.mark.parametrize("breaks_at", [0, 1, 2])
def test_an_error_in_the_middle_leaves_statistics_momentum_and_hooks_as_they_were(breaks_at):
    net = Broken(breaks_at)
    net.first(make_input((5,), seed=8))
    tensors, before = [net.first.running_mean, net.second.running_var], statistics_of(net)
    with pytest.raises(torch.OutOfMemoryError):
        in_microbatches(net, make_input((5,)), [4, 4, 4])
    assert all(torch.equal(one, other) for one, other in zip(before, statistics_of(net), strict=True))
    assert net.first.running_mean is tensors[0]
    assert net.second.running_var is tensors[1]
    assert (net.first.momentum, net.second.momentum) == (0.1, None)
    assert not net.first._forward_hooks
    assert not net.second._forward_hooks
    net.breaks_at = -1
    whole = copy.deepcopy(net)
    x = make_input((5,), seed=2)
    whole(x)
    in_microbatches(net, x, [6, 6])
    assert_same_statistics(whole.first, net.first)


class OutOfMemoryAtClone(TorchDispatchMode):
    """Copies of a number and later cannot be had."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.count = number, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            self.count += 1
            if self.count > self.number:
                raise torch.OutOfMemoryError("CUDA out of memory.")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("number", range(6))
def test_memory_that_runs_out_while_it_begins_leaves_everything_as_it_was(number):
    net = nn.Sequential(nn.BatchNorm1d(5), nn.BatchNorm1d(5, momentum=0.3))
    with pytest.raises(torch.OutOfMemoryError), OutOfMemoryAtClone(number):
        StatisticsOnce(net)
    assert [norm.momentum for norm in net] == [0.1, 0.3]
    assert [len(norm._forward_hooks) for norm in net] == [0, 0]


def test_hooks_of_others_and_the_tensors_stay():
    norm = nn.BatchNorm1d(5)
    called: list[int] = []
    norm.register_forward_hook(lambda *_: called.append(1))
    tensors = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
    in_microbatches(norm, make_input((5,)), [6, 6])
    assert len(norm._forward_hooks) == 1
    assert called == [1, 1]
    assert norm.running_mean is tensors[0]
    assert norm.running_var is tensors[1]
    assert norm.num_batches_tracked is tensors[2]


def test_nothing_of_the_graph_is_kept_by_what_was_noted():
    norm = nn.BatchNorm1d(5)
    statistics = StatisticsOnce(norm)
    statistics.begin_microbatch()
    norm(make_input((5,)).requires_grad_())
    statistics.end()
    [[[seen]]] = statistics._seen
    assert not seen.mean.requires_grad
    assert not seen.variance.requires_grad
