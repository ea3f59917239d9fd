"""The two halves of a layer's backward are, to the last bit, what autograd's node computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_gpufeed.backprop.kernels import find_kernels, is_splittable
from tests.backprop.checks import Pair, bfloat16

LAST = torch.channels_last
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear 2-D": (lambda: nn.Linear(37, 24), (33, 37)),
    "linear 2-D no bias": (lambda: nn.Linear(37, 24, bias=False), (33, 37)),
    "linear 3-D": (lambda: nn.Linear(37, 24), (4, 9, 37)),
    "linear 3-D no bias": (lambda: nn.Linear(37, 24, bias=False), (4, 9, 37)),
    "linear 4-D": (lambda: nn.Linear(37, 24), (3, 4, 19, 37)),
    "linear 4-D no bias": (lambda: nn.Linear(37, 24, bias=False), (3, 4, 19, 37)),
    "linear one row": (lambda: nn.Linear(37, 24), (1, 37)),
    "linear one feature": (lambda: nn.Linear(1, 24), (33, 1)),
    "linear one output": (lambda: nn.Linear(37, 1), (2, 33, 37)),
    "conv1d": (lambda: nn.Conv1d(3, 8, 3), (4, 3, 17)),
    "conv1d no bias dilation": (lambda: nn.Conv1d(4, 8, 3, dilation=2, groups=2, bias=False), (4, 4, 17)),
    "conv2d": (lambda: nn.Conv2d(3, 16, 3, padding=1), (4, 3, 17, 15)),
    "conv2d 1x1": (lambda: nn.Conv2d(8, 16, 1, bias=False), (4, 8, 7, 7)),
    "conv2d stride groups": (lambda: nn.Conv2d(8, 16, (3, 2), stride=(2, 1), groups=4), (4, 8, 17, 9)),
    "conv2d depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8, padding=1), (4, 8, 9, 9)),
    "conv2d dilation": (lambda: nn.Conv2d(3, 8, 3, dilation=2, padding=(2, 0)), (4, 3, 12, 12)),
    "conv3d": (lambda: nn.Conv3d(3, 6, 3, stride=2), (2, 3, 7, 7, 7)),
    "conv transpose 1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (3, 4, 9)),
    "conv transpose 2d": (lambda: nn.ConvTranspose2d(8, 4, 2, stride=2), (3, 8, 5, 6)),
    "conv transpose 2d groups": (lambda: nn.ConvTranspose2d(8, 4, 3, groups=2, bias=False, dilation=2), (3, 8, 5, 6)),
    "conv transpose 3d": (lambda: nn.ConvTranspose3d(4, 3, 2), (2, 4, 5, 5, 5)),
    "conv2d channels last": (lambda: nn.Conv2d(3, 16, 3).to(memory_format=LAST), (4, 3, 17, 15)),
    "transpose 2d channels last": (lambda: nn.ConvTranspose2d(8, 4, 2).to(memory_format=LAST), (3, 8, 5, 6)),
}
EMBEDDINGS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Embedding(11, 6),
    "padding": lambda: nn.Embedding(11, 6, padding_idx=3),
    "negative padding": lambda: nn.Embedding(11, 6, padding_idx=-2),
    "by frequency": lambda: nn.Embedding(11, 6, scale_grad_by_freq=True),
    "both": lambda: nn.Embedding(11, 6, padding_idx=0, scale_grad_by_freq=True),
}
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "autocast": torch.float32}


def input_of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.randn(shape).to(dtype)
    return x.contiguous(memory_format=LAST) if "channels last" in name else x


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_gradients_of_autograd_after_one_and_three_backwards(name, dtype, requires_grad):
    make, shape = LAYERS[name]
    pair = Pair(nn.Sequential(make()).to(DTYPES[dtype]))
    context = bfloat16 if dtype == "autocast" else contextlib.nullcontext
    for _ in range(3):
        x = input_of(name, shape, DTYPES[dtype])
        pair.step(x, requires_grad=requires_grad, context=context, finish=False)
        assert pair.splitter.num_pending == 1
        pair.splitter.finish()
        pair.assert_same_grads()
    strides = [[p.grad.stride() for p in model.parameters() if p.grad is not None] for model in pair.both]
    assert strides[0] == strides[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EMBEDDINGS)
@pytest.mark.parametrize("shape", [(7,), (4, 9), (2, 3, 4), (0,)])
def test_an_embedding_has_the_gradient_of_autograd(name, dtype, shape):
    pair = Pair(nn.Sequential(EMBEDDINGS[name]()).to(DTYPES[dtype]))
    context = bfloat16 if dtype == "autocast" else contextlib.nullcontext
    for index_dtype in (torch.int64, torch.int32, torch.int64):
        pair.step(torch.randint(0, 11, shape).to(index_dtype), context=context, finish=False)
        assert pair.splitter.num_pending == 1
        pair.splitter.finish()
        pair.assert_same_grads()


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    dims = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2, 4]))
    n_in, n_out = groups * draw(st.integers(1, 3)), groups * draw(st.integers(1, 3))
    each = st.tuples(*[st.integers(1, 3)] * dims)
    kernel, stride, dilation = draw(each), draw(each), draw(st.tuples(*[st.integers(1, 2)] * dims))
    padding, bias = draw(st.tuples(*[st.integers(0, 2)] * dims)), draw(st.booleans())
    is_transposed = draw(st.booleans())
    kinds = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d] if is_transposed else None
    kind = (kinds or [nn.Conv1d, nn.Conv2d, nn.Conv3d])[dims - 1]
    options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "bias": bias}
    return kind(n_in, n_out, kernel, **options), (draw(st.integers(1, 4)), n_in, *[draw(st.integers(6, 9))] * dims)


@settings(max_examples=60)
@given(convolutions(), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_a_convolution_of_any_geometry_has_the_gradients_of_autograd(convolution, requires_grad, dtype):
    module, shape = convolution
    pair = Pair(nn.Sequential(module).to(dtype))
    for _ in range(2):
        pair.step(torch.randn(shape, dtype=dtype), requires_grad=requires_grad)
    pair.assert_same_grads()


@pytest.mark.parametrize("lead", [(1,), (1, 1), (1, 1, 1)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n_out", [16, 33, 70])
def test_a_single_number_goes_through_the_kernels_that_autograd_takes_for_it(lead, bias, n_out):
    for _ in range(20):
        pair = Pair(nn.Sequential(nn.Linear(1, n_out, bias=bias)))
        pair.step(torch.randn(*lead, 1), requires_grad=True)
        pair.assert_same_grads()


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 70),
    st.integers(1, 70),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_linear_layer_of_any_shape_has_the_gradients_of_autograd(lead, n_in, n_out, bias, dtype):
    pair = Pair(nn.Sequential(nn.Linear(n_in, n_out, bias=bias)).to(dtype))
    for _ in range(2):
        pair.step(torch.randn(*lead, n_in).to(dtype), requires_grad=True)
    pair.assert_same_grads()


@pytest.mark.parametrize("shape", [(1, 257), (65, 1)])
def test_an_input_with_a_dimension_of_one_and_odd_strides_has_the_gradients_of_autograd(shape):
    """Contiguous, but its strides are those of a transposed matrix: autograd may take another kernel."""
    pair, x = Pair(nn.Sequential(nn.Linear(shape[1], 129))), torch.randn(shape[::-1]).t()
    assert x.is_contiguous()
    own = [x.detach().requires_grad_() for _ in range(2)]
    grad_output = torch.randn(shape[0], 129)
    for model, given_x in zip(pair.both, own, strict=True):
        model(given_x).backward(grad_output)
    pair.splitter.finish()
    pair.assert_same_grads()
    assert torch.equal(own[0].grad, own[1].grad)


@pytest.mark.parametrize("kind", ["expanded", "transposed", "sliced"])
def test_an_output_gradient_of_any_layout_will_do(kind):
    for module, x in ((nn.Linear(6, 5), torch.randn(4, 7, 6)), (nn.Conv1d(4, 5, 2), torch.randn(3, 4, 8))):
        pair = Pair(nn.Sequential(module))
        shape = pair.plain(x).shape
        grad = {
            "expanded": torch.ones(()).expand(shape),
            "transposed": torch.randn(shape[::-1]).permute(2, 1, 0),
            "sliced": torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2],
        }[kind]
        own = [x.clone().requires_grad_() for _ in range(2)]
        for model, given_x in zip(pair.both, own, strict=True):
            model(given_x).backward(grad)
        pair.splitter.finish()
        pair.assert_same_grads()
        assert torch.equal(own[0].grad, own[1].grad)


# Complex numbers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "shape"),
    [(nn.Linear(5, 4, dtype=torch.complex64), (6, 5)), (nn.Conv1d(2, 3, 2, dtype=torch.complex64), (4, 2, 7))],
    ids=["linear", "convolution"],
)
def test_complex_layers_have_the_gradients_of_autograd(module, shape):
    pair = Pair(nn.Sequential(module))
    own = [torch.ones(shape, dtype=torch.complex64).mul(1 + 2j).requires_grad_() for _ in range(2)]
    for model, x in zip(pair.both, own, strict=True):
        model(x).abs().sum().backward()
    pair.splitter.finish()
    pair.assert_same_grads()
    assert torch.equal(own[0].grad, own[1].grad)


# What is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Linear(2, 2), None),
        (nn.Linear(2, 2, bias=False), None),
        (nn.Embedding(2, 2), None),
        (nn.ConvTranspose3d(2, 2, 1), None),
        (nn.LayerNorm(2), "no layer"),
        (nn.ReLU(), "no layer"),
        (nn.Bilinear(2, 2, 2), "no layer"),
        (type("Own", (nn.Linear,), {})(2, 2), "no layer"),
        (nn.Embedding(2, 2, sparse=True), "sparse"),
        (nn.Embedding(2, 2, max_norm=1.0), "renormalised"),
        (nn.Conv2d(2, 2, 3, padding="same"), "pads"),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect"), "pads"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), ""),
        (nn.utils.parametrizations.spectral_norm(nn.Conv1d(2, 2, 1)), ""),
    ],
)
def test_a_layer_that_cannot_be_split_has_a_reason(module, reason):
    found = is_splittable(module)
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_a_further_parameter_or_a_replaced_forward_is_a_reason():
    module = nn.Linear(2, 2)
    module.extra = nn.Parameter(torch.ones(1))
    assert "others" in str(is_splittable(module))
    module = nn.Linear(2, 2)
    module.forward = lambda x: x
    assert "replaced" in str(is_splittable(module))


@pytest.mark.parametrize(
    ("module", "x"),
    [
        (nn.Linear(4, 3), torch.randn(4)),
        (nn.Linear(4, 3), torch.randn(0, 4)),
        (nn.Linear(4, 3), torch.randn(4, 5).t()),
        (nn.Linear(4, 3), torch.randn(2, 4, 5, 3).permute(0, 2, 3, 1)),
        (nn.Linear(3, 3), torch.randn(2, 3, 5, 3).contiguous(memory_format=LAST)),
        (nn.Conv1d(4, 3, 2), torch.randn(4, 9)),
        (nn.Conv1d(4, 3, 2), torch.randn(2, 9, 4).transpose(1, 2)),
        (nn.Conv2d(4, 3, 2), torch.randn(0, 4, 5, 5)),
        (nn.Conv2d(4, 3, 2), torch.randn(2, 4, 5, 6).transpose(2, 3)),
        (nn.Embedding(4, 3), torch.zeros(3, 2, dtype=torch.int64).t()),
    ],
)
def test_an_input_for_which_equality_is_not_certain_is_left_to_autograd(module, x):
    assert find_kernels(module, x, ()) is None
    pair = Pair(nn.Sequential(module))
    own = [x.detach().requires_grad_(x.is_floating_point()) for _ in range(2)]
    for model, given_x in zip(pair.both, own, strict=True):
        model(given_x).square().sum().backward()
    assert pair.splitter.num_pending == 0
    pair.assert_same_grads()
    assert not x.is_floating_point() or torch.equal(own[0].grad, own[1].grad)


def test_each_half_computes_only_what_its_mask_says():
    module, x = nn.Linear(4, 3), torch.randn(5, 4)
    kernels = find_kernels(module, x, ())
    grad = torch.ones(5, 3)
    for mask in ((True, True), (True, False), (False, True)):
        found = kernels.weight_grad(grad, x, module.weight, mask)
        assert tuple(part is not None for part in found) == mask
    assert kernels.input_grad(grad, x, module.weight).shape == x.shape
