"""A model whose weight gradients wait computes what it computed, and nothing of the splitter stays in it."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpufeed.backprop.order import BackwardOrder
from lightning_gpufeed.backprop.split import WeightGradSplitter, splittable_layers
from lightning_gpufeed.errors import DeferredGradientError
from tests.backprop.checks import Pair, Repeated, all_last, bfloat16, mlp


class Checkpointed(nn.Module):
    """A block in a checkpoint, with dropout."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.stem, self.use_reentrant = nn.Linear(8, 8), use_reentrant
        self.block = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, self.stem(x), use_reentrant=self.use_reentrant)


class Counting(Checkpointed):
    """Counts how often its block runs."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(use_reentrant)
        self.runs = 0
        self.block.register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.runs += 1


class Tied(nn.Module):
    """A head that is a function of the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.layer(self.embedding(x)), self.embedding.weight)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: mlp(8, 16, 4), (5, 8)),
    "in place": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8, bias=False)), (5, 8)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.ConvTranspose2d(8, 4, 2)),
        (2, 3, 9, 9),
    ),
    "transformer": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), (3, 5, 16)),
    "repeated": (Repeated, (5, 8)),
    "checkpoint": (lambda: Checkpointed(False), (5, 8)),
    "reentrant checkpoint": (lambda: Checkpointed(True), (5, 8)),
}


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_over_accumulated_batches_are_those_of_autograd(name, num_steps, is_autocast):
    make, shape = MODELS[name]
    pair = Pair(make())
    for _ in range(num_steps):
        pair.step(torch.randn(shape), **({"context": bfloat16} if is_autocast else {}))
    pair.assert_same_grads()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_block_is_computed_again_once(use_reentrant):
    model = Counting(use_reentrant)
    with WeightGradSplitter(model, all_last(model)) as splitter:
        model(torch.randn(5, 8)).sum().backward()
        splitter.finish()
    assert model.runs == 2


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8)])
def test_an_output_of_any_shape_may_be_changed_in_place(shape, bias):
    pair = Pair(nn.Sequential(nn.Linear(8, 8, bias=bias), nn.ReLU(inplace=True), nn.Linear(8, 4, bias=bias)))
    for _ in range(2):
        pair.step(torch.randn(shape), requires_grad=True)
    pair.assert_same_grads()


def test_a_weight_gradient_is_there_after_finish_and_not_before():
    model = mlp(4, 4, 4)
    with WeightGradSplitter(model, BackwardOrder(last=("0",))) as splitter:
        model(torch.randn(3, 4)).sum().backward()
        assert (model[0].weight.grad, splitter.num_pending) == (None, 1)
        assert model[2].weight.grad is not None
        splitter.finish()
        assert model[0].weight.grad is not None
        assert (splitter.num_pending, splitter.pending_bytes) == (0, 0)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias"])
def test_frozen_parameters_get_no_gradient_and_unfrozen_ones_do(frozen):
    pair = Pair(mlp(4, 4, 4))
    for is_frozen in (True, False):
        for model in pair.both:
            model.get_parameter(frozen).requires_grad_(not is_frozen)
        pair.step(torch.randn(3, 4))
        assert (pair.split.get_parameter(frozen).grad is None) == is_frozen
    pair.assert_same_grads()


def test_a_layer_that_is_frozen_while_its_gradient_waits_gets_none():
    told: list[str] = []
    model = mlp(4, 4, 4)
    with WeightGradSplitter(model, all_last(model), on_grad=told.append) as splitter:
        model(torch.randn(3, 4)).sum().backward()
        model[0].requires_grad_(False)
        splitter.finish()
    assert model[0].weight.grad is None
    assert told == ["2"]


def test_hooks_on_parameters_run_as_they_would_have():
    pair, events = Pair(Repeated()), {True: [], False: []}
    for model in pair.both:
        log = events[model is pair.split]
        weight = model.layer.weight
        weight.register_hook(lambda grad, log=log: log.append("hook") or grad * 2)
        weight.register_post_accumulate_grad_hook(lambda leaf, log=log: log.append(leaf.grad.clone()))
    for _ in range(2):
        pair.step(torch.randn(5, 8))
    pair.assert_same_grads()
    assert len(events[True]) == len(events[False]) == 4
    for one, other in zip(events[True], events[False], strict=True):
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("order", [None, BackwardOrder(after={"layer": ("layer",)})])
@pytest.mark.parametrize("cap", [None, 0, 300])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_a_layer_used_several_times_is_added_up_before_its_hooks_whatever_the_cap(cap, order, is_autocast):
    pair, counts = Pair(Repeated(), order, memory_cap_bytes=cap), [0, 0]
    for place, model in enumerate(pair.both):

        def count(_: Tensor, place: int = place) -> None:
            counts[place] += 1

        model.layer.weight.register_post_accumulate_grad_hook(count)
    for _ in range(3):
        pair.step(torch.randn(5, 8), **({"context": bfloat16} if is_autocast else {}))
    pair.assert_same_grads()
    assert counts == [3, 3]
    assert cap is None or pair.splitter.peak_bytes <= cap


@pytest.mark.parametrize("cap", [0, 500, 1000, 2000, 10**6])
@pytest.mark.parametrize("is_autocast", [False, True])
def test_what_waits_never_keeps_more_than_the_cap(cap, is_autocast):
    most: list[int] = []
    pair = Pair(mlp(16, 16, 16, 16, 16), memory_cap_bytes=cap)

    def look(*_: Any) -> None:
        most.append(pair.splitter.pending_bytes)

    for layer in pair.split[::2]:
        layer.weight.register_post_accumulate_grad_hook(look)

    def look_back(module: nn.Module, arguments: Any, output: Tensor) -> None:
        output.register_hook(look)

    pair.split[-1].register_forward_hook(look_back)
    pair.step(torch.randn(4, 16), **({"context": bfloat16} if is_autocast else {}))
    pair.assert_same_grads()
    assert len(most) == 5
    assert max(most) <= pair.splitter.peak_bytes <= cap
    assert (pair.splitter.peak_bytes > 0) == (cap >= 1000)


def test_what_has_waited_longest_makes_room_for_the_next():
    told: list[str] = []
    model = mlp(16, 16, 16, 16, 16)
    with WeightGradSplitter(model, all_last(model), memory_cap_bytes=1100, on_grad=told.append) as splitter:
        model(torch.randn(4, 16)).sum().backward()  # each layer keeps twice 256 bytes
        assert told == ["6", "4"]
        splitter.finish()
    assert told == ["6", "4", "0", "2"]


def test_an_input_that_several_layers_share_is_counted_once():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(100, 1, bias=False) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) + self.k(x) + self.v(x)

    model, x = Shared(), torch.randn(1000, 100)
    with WeightGradSplitter(model, all_last(model)) as splitter:
        model(x).sum().backward()
        num_bytes = x.untyped_storage().nbytes()
        assert num_bytes <= splitter.pending_bytes < 1.1 * num_bytes


def test_memory_of_what_waited_is_let_go():
    model, kept = mlp(4, 4, 4), []

    def look(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        kept.append(weakref.ref(arguments[0]))

    model[2].register_forward_pre_hook(look)
    with WeightGradSplitter(model, all_last(model)) as splitter:
        model(torch.randn(3, 4)).sum().backward()
        splitter.finish()
        assert kept[0]() is None


def test_gradients_elsewhere_are_computed_without_any_of_the_weights():
    model = mlp(4, 4, 1)
    with WeightGradSplitter(model, all_last(model)) as splitter:
        x = torch.randn(3, 4, requires_grad=True)
        output = model(x).sum()
        (grad,) = torch.autograd.grad(output, x, retain_graph=True)
        assert (splitter.num_pending, model[0].weight.grad) == (0, None)
        output.backward()
        splitter.finish()
        assert torch.equal(grad, x.grad)
    assert model[0].weight.grad is not None


def test_a_gradient_penalty_gets_the_same_gradients():
    pair = Pair(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)))
    x = torch.randn(3, 4, requires_grad=True)
    for model in pair.both:
        score = model(x).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        (score + slope.square().sum()).backward()
    pair.splitter.finish()
    pair.assert_same_grads()


def test_a_gradient_of_a_weight_gradient_is_refused():
    model = mlp(4, 4, 1)
    with WeightGradSplitter(model, all_last(model)), pytest.raises(DeferredGradientError, match="create_graph=True"):
        model(torch.randn(3, 4)).sum().backward(create_graph=True)


def test_a_gradient_of_a_gradient_under_autocast_is_refused():
    model = mlp(4, 4, 1)
    x = torch.randn(3, 4, requires_grad=True)
    with WeightGradSplitter(model, all_last(model)), torch.autocast("cpu", torch.bfloat16):
        score = model(x).sum()
    with pytest.raises(DeferredGradientError, match="create_graph=True"):
        torch.autograd.grad(score, x, create_graph=True)


@pytest.mark.parametrize(("what", "place"), [("input", 0), ("gradient of the output", 1)])
def test_what_is_changed_in_place_before_it_was_used_is_an_error(what, place):
    model = mlp(4, 4)
    changed = [torch.randn(3, 4), torch.randn(3, 4)]
    with WeightGradSplitter(model, all_last(model)) as splitter:
        model(changed[0]).backward(changed[1])
        changed[place].zero_()
        with pytest.raises(DeferredGradientError, match=f"The {what} of 0 was changed in place"):
            splitter.finish()


def test_a_weight_that_no_input_gradient_needs_may_change():
    pair = Pair(nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)))
    for model in pair.both:
        output = model(torch.arange(3)).square().sum()
        with torch.no_grad():
            model[0].weight.zero_()
        output.backward()
    pair.splitter.finish()
    pair.assert_same_grads()


def test_parameters_that_are_swapped_in_get_their_gradient():
    pair = Pair(mlp(4, 4, 4))
    given = [{name: nn.Parameter(torch.ones_like(own)) for name, own in pair.plain.named_parameters()} for _ in "ab"]
    for model, parameters in zip(pair.both, given, strict=True):
        torch.func.functional_call(model, parameters, (torch.arange(12.0).reshape(3, 4),)).sum().backward()
    pair.splitter.finish()
    assert all(own.grad is None for own in pair.split.parameters())
    for name, parameter in given[0].items():
        assert torch.equal(parameter.grad, given[1][name].grad), name


def test_finishing_under_autocast_keeps_full_precision():
    pair = Pair(mlp(16, 16, 16))
    pair.step(torch.randn(8, 16), finish=False)
    with bfloat16():
        pair.splitter.finish()
    pair.assert_same_grads()


@pytest.mark.parametrize("order", [None, BackwardOrder(after={"0": ("2",)}, last=("0",))])
def test_several_backwards_before_one_finish_reach_the_gradient_one_by_one(order):
    told: list[str] = []
    pair = Pair(mlp(7, 9, 5), order, on_grad=told.append)
    pair.step(torch.randn(6, 7))
    counts = [0, 0]
    for place, model in enumerate(pair.both):

        def count(_: Tensor, place: int = place) -> None:
            counts[place] += 1

        model[0].weight.register_post_accumulate_grad_hook(count)
    told.clear()
    for _ in range(3):
        pair.step(torch.randn(6, 7), finish=False)
    pair.splitter.finish()
    pair.splitter.run("0", "0")
    pair.assert_same_grads()
    assert counts == [3, 3]
    assert told.count("0") == 1


def test_a_weight_that_a_function_uses_too_is_noticed_and_left_to_autograd():
    pair = Pair(Tied())
    for _ in range(4):
        pair.step(torch.randint(0, 20, (4, 5)))
        pair.assert_same_grads()
    assert pair.splitter.reasons == {"embedding": "its weight gets gradients from elsewhere too"}
    assert pair.splitter.names == ("layer",)


def test_a_weight_of_two_layers_and_others_that_cannot_wait_have_a_reason():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "c": nn.Linear(4, 4)})
    model["b"].weight = model["a"].weight
    names, reasons = splittable_layers(model)
    assert names == ("c",)
    assert set(reasons) == {"a", "b", "norm"}
    with WeightGradSplitter(model, BackwardOrder(last=("a", "c", ""))) as splitter:
        assert splitter.names == ("c",)
        assert set(splitter.reasons) == {"a", ""}


def test_a_layer_that_others_wait_for_need_not_wait_itself():
    told: list[str] = []
    model = mlp(4, 4, 4, 4)
    with WeightGradSplitter(model, BackwardOrder(after={"2": ("4",)}), on_grad=told.append) as splitter:
        model(torch.randn(3, 4)).sum().backward()
        assert told == ["2", "4"]
        assert (splitter.num_pending, splitter.names) == (0, ("4",))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "dual", "compile"])
def test_transforms_are_left_to_autograd(transform):
    model, x = mlp(4, 4, 1), torch.randn(3, 4)

    def run() -> Any:
        if transform == "vmap":
            return torch.func.vmap(model)(x)
        if transform == "grad":
            return torch.func.grad(lambda x: model(x).sum())(x)
        if transform == "jvp":
            return torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]
        if transform == "dual":
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
                return torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
        return torch.compile(model, backend="eager")(x)

    expected = run()
    with WeightGradSplitter(model, all_last(model)) as splitter:
        assert torch.equal(run(), expected)
        assert splitter.num_pending == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_split_model_is_free_and_can_be_split_itself(copied):
    model = mlp(4, 4, 4)
    with WeightGradSplitter(model, all_last(model)) as splitter:
        other = copied(model)
        other(torch.randn(3, 4)).sum().backward()
        assert splitter.num_pending == 0
        assert other[0].weight.grad is not None
        with WeightGradSplitter(other, all_last(other)) as second:
            other(torch.randn(3, 4)).sum().backward()
            assert second.num_pending == 2
            second.finish()
        other(torch.randn(3, 4)).sum().backward()
        assert second.num_pending == 0


def test_nothing_stays_in_a_model_when_the_splitter_is_closed():
    model = mlp(4, 4, 4)
    keys = [set(vars(module)) for module in model.modules()]
    with WeightGradSplitter(model, all_last(model)) as splitter:
        model(torch.randn(3, 4)).sum().backward()
    splitter.finish()  # what still waits can be computed yet
    assert model[0].weight.grad is not None
    assert [set(vars(module)) for module in model.modules()] == keys
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_after_a_backward_that_failed_nothing_waits_once_it_is_discarded():
    pair = Pair(mlp(4, 4, 4))
    failing = pair.split[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pair.split(torch.randn(3, 4)).sum().backward()
    failing.remove()
    assert pair.splitter.num_pending == 1
    pair.splitter.discard()
    assert (pair.splitter.num_pending, pair.splitter.pending_bytes) == (0, 0)
    pair.step(torch.randn(3, 4))
    pair.assert_same_grads()


@pytest.mark.parametrize(
    ("order", "options", "message"),
    [
        (BackwardOrder(last=("nowhere",)), {}, "nowhere; the model has no such module"),
        (BackwardOrder(after={"nowhere": ("0",)}), {}, "nowhere; the model has no such module"),
        (BackwardOrder(), {"memory_cap_bytes": -1}, "memory_cap_bytes is -1; expected 0 or more"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(order, options, message):
    with pytest.raises(ValueError, match=message):
        WeightGradSplitter(mlp(4, 4), order, **options)
