"""What a batch holds: any container, any tensor, and floats that were bytes before."""

from __future__ import annotations

import collections
import dataclasses
import random
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.diagnose.batch import describe_batch, is_widened
from lightning_gpufeed.diagnose.counters import BatchFacts

Pair = collections.namedtuple("Pair", ["image", "label"])


@dataclasses.dataclass
class Record:
    image: torch.Tensor
    name: str = "a"


MEAN = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
DEVIATION = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)


def pixels(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape or (16, 3, 64, 64), dtype=torch.uint8)


def scaled(*shape: int) -> torch.Tensor:
    return pixels(*shape).float() / 255


def normalised() -> torch.Tensor:
    return (scaled() - MEAN) / DEVIATION


# Containers ------------------------------------------------------------------------------------------------


IMAGE, LABEL = torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64)
NUM_BYTES = IMAGE.nbytes + LABEL.nbytes


@pytest.mark.parametrize(
    "batch",
    [
        (IMAGE, LABEL),
        [IMAGE, LABEL],
        {"image": IMAGE, "label": LABEL},
        collections.UserDict({"image": IMAGE, "label": LABEL}),
        Pair(IMAGE, LABEL),
        {"pair": Pair(IMAGE, LABEL), "names": ["a", "b", "c", "d"], "epoch": 3, "nothing": None},
        {"record": Record(IMAGE), "rest": {"label": LABEL, "text": "a", "array": np.zeros(4)}},
    ],
    ids=["tuple", "list", "dict", "UserDict", "named tuple", "with other things", "records"],
)
def test_tensors_are_found_in_any_container(batch: Any) -> None:
    facts = describe_batch(batch)
    assert facts.num_bytes == NUM_BYTES
    assert facts.num_samples == 4


@pytest.mark.parametrize("batch", [None, "text", 3, [], {}, ["a", None], np.zeros((4, 100)), object()])
def test_a_batch_without_tensors_is_described_as_empty(batch: Any) -> None:
    facts = describe_batch(batch)
    assert (facts.num_bytes, facts.widened_bytes, facts.widened_values, facts.is_pinned) == (0, 0, 0, False)


def test_a_tensor_that_is_in_a_batch_twice_counts_once() -> None:
    image = scaled()
    facts = describe_batch({"image": image, "again": [image, image], "other": image.clone()})
    assert facts.num_bytes == facts.widened_bytes == 2 * image.nbytes
    assert facts.widened_values == 2 * image.numel()


def test_what_is_widened_is_told_apart_from_what_is_not() -> None:
    image, label, target = scaled(), torch.arange(16), torch.randn(16, 512)
    facts = describe_batch({"image": image, "label": label, "target": target})
    assert facts == BatchFacts(
        num_samples=16,
        num_bytes=image.nbytes + label.nbytes + target.nbytes,
        widened_bytes=image.nbytes,
        widened_values=image.numel(),
    )
    assert facts.compact_bytes == image.numel() + label.nbytes + target.nbytes


# Tensors of any kind ---------------------------------------------------------------------------------------


class Labelled(torch.Tensor):
    """A tensor of somebody's own."""


def nested(layout: torch.layout) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype, it says
        return torch.nested.nested_tensor([torch.randn(100, 9), torch.randn(30, 9)], layout=layout)


def compressed() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # in beta, it says
        return torch.eye(300).to_sparse_csr()


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, it says
        return torch.quantize_per_tensor(torch.rand(1000), 0.1, 0, torch.quint8)


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.rand(1000)


def of_numbers_to_come() -> torch.Tensor:
    return torch.rand(1000, requires_grad=True) * 2


def read_only() -> torch.Tensor:
    return torch.from_numpy(np.zeros(1000, np.float32).copy())


KINDS: dict[str, Callable[[], Any]] = {
    "sparse": lambda: torch.eye(300).to_sparse(),
    "sparse, compressed": compressed,
    "nested": lambda: nested(torch.strided),
    "nested, jagged": lambda: nested(torch.jagged),
    "quantized": quantized,
    "complex": lambda: torch.randn(1000, dtype=torch.complex64),
    "conjugate view": lambda: torch.randn(1000, dtype=torch.complex64).conj(),
    "real part": lambda: torch.randn(1000, dtype=torch.complex64).conj().imag,
    "bool": lambda: torch.ones(1000, dtype=torch.bool),
    "needs a gradient": of_numbers_to_come,
    "parameter": lambda: torch.nn.Parameter(torch.rand(1000)),
    "meta": lambda: torch.empty(1000, device="meta"),
    "inference": inference,
    "eight bits": lambda: torch.randn(1000).to(torch.float8_e4m3fn),
    "empty": lambda: torch.empty(0, 3),
    "a number": lambda: torch.tensor(1.0),
    "expanded": lambda: torch.rand(1).expand(1000, 1000),
    "transposed": lambda: torch.rand(50, 60).T,
    "every other": lambda: torch.rand(50, 60)[:, ::2],
    "subclass": lambda: torch.rand(1000).as_subclass(Labelled),
    "packed": lambda: torch.nn.utils.rnn.pack_sequence([torch.randn(5, 100), torch.randn(3, 100)]),
    "not a number": lambda: torch.full((1000,), float("nan")),
    "negative view": lambda: torch._neg_view(torch.rand(1000)),
    "from numpy": read_only,
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_any_kind_of_tensor_is_described(make: Callable[[], Any]) -> None:
    tensor = make()
    facts = describe_batch({"x": tensor, "y": torch.zeros(10, dtype=torch.int64)})
    assert facts.num_bytes >= 80
    assert 0 <= facts.widened_bytes <= facts.num_bytes
    assert not facts.is_pinned
    describe_batch(tensor)


def test_what_is_said_of_a_tensor_without_values_is_its_size() -> None:
    facts = describe_batch(torch.empty(1000, 10, device="meta"))
    assert (facts.num_bytes, facts.widened_bytes, facts.num_samples) == (40_000, 0, 1000)


# Floats that were bytes ------------------------------------------------------------------------------------


def padded_volume() -> torch.Tensor:
    """A scan in an empty room: the border of every sample is zero."""
    volume = torch.zeros(8, 1, 64, 64, 64)
    volume[..., 8:-8, 8:-8, 8:-8] = torch.randn(8, 1, 48, 48, 48)
    return volume


def padded_audio() -> torch.Tensor:
    audio = torch.randn(16, 80_000)
    for number, row in enumerate(audio):
        row[80_000 - 3000 * number :] = 0
    return audio


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


WIDENED: dict[str, Callable[[], torch.Tensor]] = {
    "0 to 255": lambda: pixels().float(),
    "0 to 1": scaled,
    "-1 to 1": lambda: scaled() * 2 - 1,
    "mean and deviation, NCHW": normalised,
    "mean and deviation, NHWC": lambda: normalised().permute(0, 2, 3, 1).contiguous(),
    "channels last": lambda: channels_last(scaled()),
    "channels last, mean and deviation": lambda: channels_last(normalised()),
    "video, channels last": lambda: scaled(4, 3, 8, 32, 32).contiguous(memory_format=torch.channels_last_3d),
    "transposed": lambda: scaled(128, 256).T,
    "double": lambda: pixels().double() / 255,
    "half": lambda: scaled().half(),
    "grey, mean and deviation": lambda: (scaled(64, 1, 28, 28) - 0.1307) / 0.3081,
    "contrast, clipped": lambda: (scaled() * 1.3).clamp(0, 1),
    "one of ten": lambda: torch.nn.functional.one_hot(torch.randint(0, 10, (256,)), 10).float(),
    "all the same": lambda: torch.full((4096,), 0.5),
    "needs a gradient": lambda: scaled().requires_grad_(),
    "a few": lambda: (torch.arange(512) % 7).float(),
}
NOT_WIDENED: dict[str, Callable[[], torch.Tensor]] = {
    "normal": lambda: torch.randn(16, 3, 64, 64),
    "uniform": lambda: torch.rand(16, 3, 64, 64),
    "double, normal": lambda: torch.randn(16, 4096, dtype=torch.float64),
    "half, normal": lambda: torch.randn(16, 4096).half(),
    "half, uniform": lambda: torch.rand(16, 4096).half(),
    "half, between 0 and 1": lambda: torch.randn(16, 4096).sigmoid().half(),
    "brain floats, normal": lambda: torch.randn(16, 4096).bfloat16(),
    "brain floats, uniform": lambda: torch.rand(16, 4096).bfloat16(),
    "brain floats, between 0 and 1": lambda: torch.randn(16, 4096).sigmoid().bfloat16(),
    "brain floats, one octave": lambda: (0.5 + torch.rand(16, 4096) / 2.01).bfloat16(),
    "12 bits": lambda: torch.randint(0, 4096, (16, 4096)).float() / 4095,
    "10 bits": lambda: torch.randint(0, 1024, (16, 4096)).float() / 1023,
    "a border of zeros": padded_volume,
    "zeros at the end": padded_audio,
    "two pictures mixed": lambda: 0.3 * scaled() + 0.7 * scaled(),
    "integers": pixels,
    "bool": lambda: torch.ones(4096, dtype=torch.bool),
    "too few to tell": lambda: torch.zeros(255),
    "meta": lambda: torch.empty(4096, device="meta"),
    "counting": lambda: torch.arange(4096).float(),
    "few of them": lambda: torch.arange(256).float(),
}


@pytest.mark.parametrize("make", WIDENED.values(), ids=WIDENED)
def test_floats_that_were_bytes_are_recognised(make: Callable[[], torch.Tensor]) -> None:
    assert is_widened(make())


@pytest.mark.parametrize("make", NOT_WIDENED.values(), ids=NOT_WIDENED)
def test_floats_that_carry_more_than_bytes_are_left_alone(make: Callable[[], torch.Tensor]) -> None:
    assert not is_widened(make())


@settings(max_examples=40)
@given(
    st.integers(1, 8),
    st.sampled_from([1, 3]),
    st.integers(8, 96),
    st.floats(0.01, 10),
    st.floats(-5, 5),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_bytes_are_recognised_after_any_factor_and_offset(samples, channels, side, factor, offset, dtype) -> None:
    image = (
        pixels(samples, channels, side, side) // 16
        if samples * channels * side * side < 16_384
        else pixels(samples, channels, side, side)
    )
    if image.numel() < 256:
        return
    assert is_widened(image.to(dtype) * factor + offset)


@given(st.integers(256, 100_000), st.integers(0, 10_000))
@settings(max_examples=30)
def test_numbers_that_are_all_different_are_never_taken_for_bytes(length: int, begin: int) -> None:
    assert not is_widened(torch.arange(begin, begin + length).double() / 7)


# Harmless --------------------------------------------------------------------------------------------------


def test_looking_changes_neither_the_batch_nor_a_random_generator() -> None:
    batch = {"x": normalised(), "y": torch.rand(16, 3, requires_grad=True), "z": channels_last(scaled())}
    copies = {name: tensor.detach().clone() for name, tensor in batch.items()}
    versions = {name: tensor._version for name, tensor in batch.items()}
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    describe_batch(batch)
    for name, tensor in batch.items():
        assert torch.equal(tensor, copies[name])
        assert tensor._version == versions[name]
        assert tensor.grad is None
        assert tensor.stride() == copies[name].stride()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1] == states[1]).all()
    assert random.getstate() == states[2]


def test_looking_does_not_depend_on_settings_of_the_program() -> None:
    torch.set_default_device("meta")  # put back after each test
    torch.set_default_dtype(torch.float64)
    with torch.device("meta"), torch.no_grad():
        assert describe_batch(torch.zeros(40_000, device="cpu")).widened_bytes == 8 * 40_000


def test_a_large_batch_is_not_read_whole() -> None:
    """A sixteenth of the values at most: the time hardly depends on the size."""

    def seconds(tensor: torch.Tensor) -> float:
        times = []
        for _ in range(5):
            begin = time.thread_time()
            describe_batch(tensor)
            times.append(time.thread_time() - begin)
        return min(times)

    small, large = torch.rand(64, 1024), torch.rand(64 * 256, 1024)
    # 256 times the values; reading them all, sorted, would take more than 100 times as long.
    assert seconds(large) < 10 * seconds(small) + 0.005


def test_a_batch_in_page_locked_memory_is_one_whose_largest_tensor_is(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = torch.zeros(1000), torch.zeros(10)
    # Page-locked memory needs a GPU, whose tests ask the real thing.
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor is large)
    assert describe_batch([large, small]).is_pinned
    assert describe_batch([small, large]).is_pinned
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: tensor is small)
    assert not describe_batch([large, small]).is_pinned
