"""Microbatches add up to the batch: each kind of container, what counts samples, what is refused."""

from __future__ import annotations

import enum
import re
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from lightning_gpufeed.device.samples import walk
from lightning_gpufeed.recover.merge import merge_values
from lightning_gpufeed.recover.split_batch import BatchSplitter, Split, microbatch_sizes

N = 8


class Pair(NamedTuple):
    image: Any
    label: Any


OldPair = namedtuple("OldPair", ["image", "label"])


@dataclass
class Record:
    image: Any
    label: Any


@dataclass(frozen=True)
class FrozenRecord:
    image: Any
    label: Any


@dataclass(frozen=True, slots=True)
class SlottedRecord:
    image: Any
    label: Any


class Encoding(UserDict):
    """A mapping that is no dict, moves itself and gives its entries as attributes, as tokenizers return it."""

    def __init__(self, data: dict[str, Any] | None = None, language: str = "en") -> None:
        super().__init__(data)
        self.language = language

    def to(self, device: torch.device) -> Encoding:
        return Encoding({key: value.to(device) for key, value in self.items()}, self.language)


class Colour(enum.Enum):
    RED = 1


class Metadata:
    """An object that holds nothing of the samples."""


class Holder:
    """An object that holds a tensor and cannot be looked into."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data


class Graphs:
    """A batch of graphs: it moves to a device and tells how many there are."""

    def __init__(self, graphs: list[torch.Tensor]) -> None:
        self.graphs = graphs
        self.num_graphs = len(graphs)

    def to(self, device: torch.device) -> Graphs:
        return Graphs([graph.to(device) for graph in self.graphs])


class ShapedDict(MutableMapping):
    """A mapping of tensors that has the shape of its batch."""

    def __init__(self, data: dict[str, torch.Tensor], batch_size: list[int]) -> None:
        self._data, self.batch_size = dict(data), torch.Size(batch_size)

    def to(self, device: torch.device) -> ShapedDict:
        return ShapedDict({key: value.to(device) for key, value in self._data.items()}, list(self.batch_size))

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._data[key]

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        self._data[key] = value

    def __delitem__(self, key: str) -> None:
        del self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


def image(num_samples: int = N) -> torch.Tensor:
    """Sample i is a row of i."""
    return torch.arange(num_samples).float()[:, None].expand(-1, 3).clone()


def label(num_samples: int = N) -> torch.Tensor:
    return torch.arange(num_samples)


def clouds(num_samples: int = N) -> list[torch.Tensor]:
    """Samples of different lengths; one of them is as long as the batch."""
    return [torch.full((num_samples - 2 + i, 3), float(i)) for i in range(num_samples)]


def split(batch: Any, number: int = 3, expected: int | None = None) -> Split:
    return BatchSplitter(expected_samples=lambda: expected).split(batch, number)


def joined(pieces: list[Any], take: Any) -> list[int]:
    """The numbers of the samples in all pieces, in order."""
    return [int(number) for piece in pieces for number in torch.as_tensor(np.asarray(take(piece))).flatten()]


# Sizes and weights ------------------------------------------------------------------------------------------


@given(num_samples=st.integers(0, 2000), number=st.integers(1, 300))
def test_sizes_add_up_and_differ_by_at_most_one_larger_first(num_samples, number):
    sizes = microbatch_sizes(num_samples, number)
    assert sum(sizes) == num_samples
    assert len(sizes) == min(number, num_samples)
    assert sizes == sorted(sizes, reverse=True)
    assert all(size >= 1 for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("number", [0, -1, 2.5, None, True, "2"])
def test_a_number_of_microbatches_that_is_none_is_refused(number):
    with pytest.raises(ValueError, match=re.escape(f"num_microbatches is {number!r}; expected a whole number")):
        microbatch_sizes(4, number)
    with pytest.raises(ValueError, match="num_microbatches is"):
        split(image(), number)


def test_a_negative_number_of_samples_is_refused():
    with pytest.raises(ValueError, match="num_samples is -1"):
        microbatch_sizes(-1, 2)


def test_weights_are_the_shares_of_samples():
    made = split(image(), 3)
    assert made.sizes == [3, 3, 2]
    assert made.weights == [3 / 8, 3 / 8, 2 / 8]


def test_a_weight_fn_sets_the_shares():
    tokens = torch.tensor([1, 0, 2, 0, 4, 1, 0, 0])
    made = BatchSplitter(weight_fn=lambda piece: piece["tokens"].sum()).split({"tokens": tokens, "x": image()}, 4)
    assert made.sizes == [2, 2, 2, 2]
    assert made.weights == [1 / 8, 2 / 8, 5 / 8, 0]


def test_weights_that_are_all_zero_are_the_shares_of_samples():
    assert BatchSplitter(weight_fn=lambda _: torch.tensor(0)).split(image(), 3).weights == [3 / 8, 3 / 8, 2 / 8]


@pytest.mark.parametrize(
    "weight", [-1, float("nan"), float("inf"), torch.tensor(-2.0), torch.zeros(2), None, "many"], ids=repr
)
def test_a_weight_that_is_none_is_refused(weight):
    with pytest.raises(ValueError, match=r"weight_fn returned .*; expected a finite number of at least 0"):
        BatchSplitter(weight_fn=lambda _: weight).split(image(), 2)


# Every kind of container ------------------------------------------------------------------------------------

CONTAINERS = {
    "dict": lambda x, y: {"image": x, "label": y},
    "OrderedDict": lambda x, y: OrderedDict(image=x, label=y),
    "defaultdict": lambda x, y: defaultdict(list, image=x, label=y),
    "UserDict": lambda x, y: UserDict(image=x, label=y),
    "encoding": lambda x, y: Encoding({"image": x, "label": y}, "fr"),
    "list": lambda x, y: [x, y],
    "tuple": lambda x, y: (x, y),
    "NamedTuple": Pair,
    "namedtuple": OldPair,
    "dataclass": Record,
    "frozen dataclass": FrozenRecord,
    "frozen dataclass with slots": SlottedRecord,
}
make_container = pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())


def two_parts(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, list | tuple):
        return batch[0], batch[1]
    if hasattr(batch, "keys"):
        return batch["image"], batch["label"]
    return batch.image, batch.label


@make_container
@pytest.mark.parametrize("number", [2, 3, 8, 100])
def test_a_container_keeps_its_class_and_no_sample_is_lost(make, number):
    batch = make(image(), label())
    made = split(batch, number)
    assert [type(piece) for piece in made.microbatches] == [type(batch)] * min(number, N)
    assert joined(made.microbatches, lambda piece: two_parts(piece)[0][:, 0]) == list(range(N))
    assert joined(made.microbatches, lambda piece: two_parts(piece)[1]) == list(range(N))
    assert [len(two_parts(piece)[1]) for piece in made.microbatches] == made.sizes


@make_container
def test_containers_inside_containers_are_cut_as_well(make):
    batch = {"inner": make(image(), (label(), make(label(), None))), "outer": [label()]}
    made = split(batch)
    for take in (
        lambda piece: two_parts(piece["inner"])[0][:, 0],
        lambda piece: two_parts(piece["inner"])[1][0],
        lambda piece: two_parts(two_parts(piece["inner"])[1][1])[0],
        lambda piece: piece["outer"][0],
    ):
        assert joined(made.microbatches, take) == list(range(N))


def test_what_a_mapping_keeps_beside_its_entries_is_kept():
    pieces = split({"a": Encoding({"x": image()}, "fr"), "b": defaultdict(list, x=label())}, 2).microbatches
    assert [piece["a"].language for piece in pieces] == ["fr", "fr"]
    assert pieces[0]["b"].default_factory is list


def test_a_bare_tensor_and_a_bare_array_are_batches():
    assert joined(split(label()).microbatches, lambda piece: piece) == list(range(N))
    pieces = split(np.arange(N)).microbatches
    assert joined(pieces, lambda piece: piece) == list(range(N))
    assert all(isinstance(piece, np.ndarray) for piece in pieces)


def test_the_batch_is_as_it_was_after_it_was_split():
    batch = {"image": image(), "inner": [label(), {"name": list("abcdefgh")}]}
    kept = [batch["image"], batch["inner"], batch["inner"][0], batch["inner"][1]["name"]]
    split(batch)
    found = [batch["image"], batch["inner"], batch["inner"][0], batch["inner"][1]["name"]]
    assert all(now is then for now, then in zip(found, kept, strict=True))
    assert batch["inner"][1]["name"] == list("abcdefgh")


# What another splitter lost without a word, or refused ------------------------------------------------------

ONCE_LOST = {
    "a tuple inside a tuple": (image(), (label(), label())),
    "an auxiliary tensor first": {"weights": torch.rand(3), "x": image(), "y": label()},
    "None": {"x": image(), "y": label(), "mask": None},
    "a dict inside a tuple": (image(), {"y": label()}),
    "a tuple inside a dict": {"x": image(), "pair": (label(), label())},
    "a tensor without dimensions": {"x": image(), "temperature": torch.tensor(2.0)},
    "an auxiliary tensor": {"x": image(), "y": label(), "weights": torch.rand(3)},
}


@pytest.mark.parametrize("batch", ONCE_LOST.values(), ids=ONCE_LOST.keys())
@pytest.mark.parametrize("number", [2, 4, 8])
def test_all_eight_samples_are_kept(batch, number):
    made = split(batch, number, expected=N)
    assert sum(made.sizes) == N
    whole, merged = batch, merge_values(made.microbatches, made.sizes, made.weights)
    assert_equal(merged, whole)


def test_a_loader_without_a_batch_size_is_no_obstacle():
    assert BatchSplitter().split((image(), label()), 2).sizes == [4, 4]


# Beside the tensors -----------------------------------------------------------------------------------------


def test_what_belongs_to_the_batch_is_the_same_object_in_each_microbatch():
    whole = {
        "epoch": 3,
        "scale": 0.5,
        "nothing": None,
        "text": "x" * N,  # as many characters as samples, but no list
        "bytes": b"x" * N,
        "colour": Colour.RED,
        "metadata": Metadata(),
        "temperature": torch.tensor(3.5),
        "array": np.array(2.5),
        "weights": torch.rand(10),
        "prototypes": np.zeros((3, 5)),
        "classes": ["cat", "dog"],
        "shape": torch.Size([3, 32, 32]),
        "kind": int,
        "dtype": torch.float16,
    }
    for piece in split({"x": image(), **whole}, expected=N).microbatches:
        assert {key: id(piece[key]) for key in whole} == {key: id(value) for key, value in whole.items()}


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_with_an_entry_for_each_sample_is_cut(kind):
    entries = {
        "name": [f"sample {i}" for i in range(N)],
        "target": [{"box": [i, i]} for i in range(N)],
        "note": [None, *(str(i) for i in range(1, N))],
        "cloud": clouds(),
        "scalar": [torch.tensor(i) for i in range(N)],
        "object": [Metadata() for _ in range(N)],
    }
    made = split({"x": image(), **{key: kind(value) for key, value in entries.items()}})
    for key, value in entries.items():
        assert all(type(piece[key]) is kind for piece in made.microbatches)
        assert [len(piece[key]) for piece in made.microbatches] == made.sizes
        found = [entry for piece in made.microbatches for entry in piece[key]]
        assert all(now is then for now, then in zip(found, value, strict=True))


@pytest.mark.parametrize(
    "batch",
    [
        clouds(),
        tuple(clouds()),
        [{"points": cloud, "name": str(i)} for i, cloud in enumerate(clouds())],
        [(cloud, i) for i, cloud in enumerate(clouds())],
        [f"prompt {i}" for i in range(N)],
    ],
    ids=["tensors", "tuple of tensors", "dicts", "pairs", "strings"],
)
def test_a_list_of_samples_is_cut_between_them(batch):
    made = split(batch, expected=N)
    assert made.sizes == [3, 3, 2]
    found = [entry for piece in made.microbatches for entry in piece]
    assert all(now is then for now, then in zip(found, batch, strict=True))


def test_a_list_of_many_samples_needs_no_expectation():
    assert split(clouds(12), 2).sizes == split((clouds(12), list(range(12))), 2, 12).sizes == [6, 6]
    with pytest.raises(ValueError, match="cannot be told apart"):
        split(clouds(5), 2)  # or batches of five loaders, or five crops of each image


def test_lists_of_samples_side_by_side_are_cut_alike():
    made = split((clouds(), [{"label": i} for i in range(N)]), expected=N)
    assert [entry["label"] for _, targets in made.microbatches for entry in targets] == list(range(N))
    assert [int(cloud[0, 0]) for points, _ in made.microbatches for cloud in points] == list(range(N))


def test_as_many_fields_as_samples_are_fields_if_their_kinds_say_so():
    made = split([image(2), label(2)], 2)
    assert joined(made.microbatches, lambda piece: piece[0][:, 0]) == [0, 1]
    assert joined(made.microbatches, lambda piece: piece[1]) == [0, 1]
    made = split([image(3), label(3), torch.rand(10, dtype=torch.float64)], 3, expected=3)
    assert joined(made.microbatches, lambda piece: piece[1]) == [0, 1, 2]


def test_as_many_images_as_rows_are_told_apart_by_what_is_expected():
    batch = [torch.rand(3, 4, 4) for _ in range(5)]
    assert split(batch, 2, expected=5).sizes == [3, 2]
    assert split(batch, 2, expected=3).sizes == [2, 1]


# Which length is the batch's --------------------------------------------------------------------------------


def test_tensors_that_agree_need_no_expectation():
    assert split((image(6), label(6)), 2, expected=N).sizes == [3, 3]
    assert BatchSplitter(expected_samples=lambda: 4).count({"x": image(6), "crops": [image(6), label(6)]}) == 6


def test_of_several_lengths_the_expected_one_is_the_batch():
    batch = {"weights": torch.rand(10), "x": image(512), "y": label(512)}
    assert BatchSplitter(expected_samples=lambda: 512).count(batch) == 512
    with pytest.raises(ValueError, match="cannot be told apart"):
        BatchSplitter().count(batch)


@pytest.mark.parametrize("num_samples", [300, 10, 1])
def test_a_last_batch_is_read_as_the_full_ones_before(num_samples):
    splitter = BatchSplitter(expected_samples=lambda: 512)
    weights = torch.rand(10)
    splitter.count({"x": image(512), "weights": weights, "name": ["a"] * 512})
    last = {"x": image(num_samples), "weights": weights, "name": ["b"] * num_samples}
    assert splitter.count(last) == num_samples
    made = splitter.split(last, 5)
    assert sum(made.sizes) == num_samples
    assert all(piece["weights"] is weights for piece in made.microbatches)
    assert [len(piece["name"]) for piece in made.microbatches] == made.sizes


def test_as_many_fields_as_samples_in_a_last_batch_are_the_fields_they_were():
    splitter = BatchSplitter(expected_samples=lambda: N)
    splitter.count([image(), image()])
    made = splitter.split([image(2), image(2)], 2)
    assert [tuple(part.shape for part in piece) for piece in made.microbatches] == [((1, 3), (1, 3))] * 2


def test_a_tuple_of_numbers_is_read_as_it_was():
    splitter = BatchSplitter()
    splitter.count({"x": image(64), "shape": (224, 224), "target": tuple(range(64))})
    made = splitter.split({"x": image(2), "shape": (224, 224), "target": (5, 6)}, 2)
    assert [(piece["shape"], piece["target"]) for piece in made.microbatches] == [
        ((224, 224), (5,)),
        ((224, 224), (6,)),
    ]


def test_a_length_that_agreed_by_chance_is_corrected_when_the_expected_length_says_so():
    splitter = BatchSplitter(expected_samples=lambda: 512)
    weights = torch.rand(10)
    splitter.count({"x": image(10), "weights": weights})
    assert splitter.count({"x": image(512), "weights": weights}) == 512
    assert splitter.split({"x": image(10), "weights": weights}, 2).microbatches[0]["weights"] is weights


@pytest.mark.parametrize("expected", [None, 10, 3])
def test_parts_that_counted_samples_and_no_longer_agree_are_refused(expected):
    splitter = BatchSplitter(expected_samples=lambda: expected)
    splitter.count({"x": image(10), "y": label(10), "weights": torch.rand(10)})
    batch = {"x": image(4), "y": label(4), "weights": torch.rand(10)}
    with pytest.raises(ValueError, match=re.escape("batch['x'] (4, 3), batch['y'] (4,), batch['weights'] (10,)")):
        splitter.split(batch, 2)


def test_rows_of_a_number_that_changes_are_not_taken_for_the_batchs_own():
    splitter = BatchSplitter(expected_samples=lambda: N)
    splitter.count({"tokens": torch.zeros(57), "y": label()})
    with pytest.raises(ValueError, match=r"the length of batch\['tokens'\] is 61 here and was 57 .* split_fn"):
        splitter.split({"tokens": torch.zeros(61), "y": label()}, 2)


def test_a_batch_of_one_sample_teaches_nothing():
    splitter = BatchSplitter(expected_samples=lambda: N)
    splitter.count({"x": image(1), "weights": torch.rand(1)})
    assert splitter.count({"x": image(), "weights": torch.rand(1)}) == N


def test_batches_of_another_structure_are_read_for_themselves():
    splitter = BatchSplitter(expected_samples=lambda: 512)
    for _ in range(2):
        for number in range(40):  # more than are remembered
            assert splitter.count({f"x{number}": image(64 + number)}) == 64 + number
    assert splitter.count({"x": label(10), "weights": torch.rand(512)}) == 512


# Refused ----------------------------------------------------------------------------------------------------

UNKNOWN = {
    "packed sequence": (lambda: pack_sequence(clouds(3), enforce_sorted=False), "rnn.PackedSequence"),
    "nested tensor": (lambda: torch.nested.nested_tensor(clouds(3), layout=torch.jagged), "nested or sparse tensor"),
    "sparse tensor": (lambda: torch.eye(N).to_sparse(), "nested or sparse tensor"),
    "graphs": (lambda: Graphs(clouds()), "Graphs"),
    "mapping with a shape": (lambda: ShapedDict({"x": image()}, [N]), "ShapedDict"),
    "object with a tensor": (lambda: Holder(image()), "Holder"),
}


@pytest.mark.parametrize(("make", "named"), UNKNOWN.values(), ids=UNKNOWN.keys())
@pytest.mark.parametrize(
    ("place", "path"),
    [(lambda part: part, "batch"), (lambda part: {"x": image(), "deep": [part]}, "batch['deep'][0]")],
    ids=["alone", "deep"],
)
def test_what_cannot_be_looked_into_is_refused_by_path_and_type(make, named, place, path):
    batch = place(make())
    with pytest.raises(ValueError, match=re.escape(path) + f", a .*{re.escape(named)}.*split_fn"):
        split(batch)
    assert split(batch, 1).microbatches[0] is batch


AMBIGUOUS = {
    "lengths": ({"a": torch.rand(64, 3), "w": torch.rand(10)}, None),
    "neither is expected": ({"a": torch.rand(64, 3), "w": torch.rand(10)}, 32),
    "two fields or two samples": ([torch.rand(2, 5), torch.rand(2, 5)], 2),
    "two sounds in two channels": ([torch.rand(2, 500), torch.rand(2, 700)], 2),
    "channels or samples": ([torch.rand(3, 4, 4)] * 5, None),
    "pairs of words": ([["a", "b"], ["c", "d"]], 2),
    "words of several lengths": ({"prompt": list("abcd"), "classes": ["x", "y"]}, None),
    "a short tuple of numbers": ({"x": torch.rand(2, 5), "size": (224, 224)}, None),
    "a short list of unlike things": ({"x": torch.rand(2, 5), "about": ["a", 3]}, None),
    "a set": ({"x": torch.rand(4, 5), "names": set("abcd")}, None),
    "a deque": ({"x": torch.rand(4, 5), "names": deque("abcd")}, None),
    "only numbers": ({"loss": torch.tensor(1.0), "epoch": 3}, None),
    "nothing": ({}, None),
    "a word": ("word", None),
}


@pytest.mark.parametrize(("batch", "expected"), AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
def test_a_batch_that_can_be_read_in_two_ways_or_none_is_refused(batch, expected):
    with pytest.raises(ValueError, match="the samples of this batch cannot be told apart"):
        split(batch, 2, expected=expected)


def test_the_message_names_the_paths_their_shapes_what_was_expected_and_the_cure():
    with pytest.raises(ValueError, match="cannot be told apart") as caught:
        split({"a": torch.rand(64, 3), "w": torch.rand(10), "deep": {"name": ["x"] * 7}}, 2, expected=32)
    assert str(caught.value) == (
        "the samples of this batch cannot be told apart: batch['a'] (64, 3), batch['w'] (10,), batch['deep']['name'] "
        "list of 7. Expected tensors whose first dimension counts the samples (batch size 32), or lists with one "
        "entry for each; give a split_fn that returns the microbatches."
    )


@pytest.mark.parametrize(
    "batch",
    [
        {"a": [image(64), label(64)], "b": [image(32), label(32)]},
        {"a": {"x": image(64)}, "b": {"x": image(32)}},
        {"a": (image(64),), "b": (image(32),)},
        {"a": torch.rand(64, 3, 4, 4), "b": torch.rand(32, 3, 4, 4)},
        [[image(64), label(64)], [image(32), label(32)]],
    ],
    ids=["lists", "dicts", "tuples", "images", "list of lists"],
)
@pytest.mark.parametrize("expected", [None, 64, 32])
def test_batches_of_several_loaders_of_different_size_are_refused(batch, expected):
    with pytest.raises(ValueError, match=r"batch(\['b'\]|\['a'\]|\[[01]\])"):
        split(batch, 2, expected=expected)


@pytest.mark.parametrize("tensor", [torch.rand(20, N, 5), torch.zeros(20, N, dtype=torch.long)], ids=["float", "int"])
def test_a_tensor_whose_second_dimension_counts_the_samples_is_refused(tensor):
    with pytest.raises(ValueError, match=r"batch\['sequence'\] may hold samples"):
        split({"sequence": tensor, "y": label()}, 2, expected=N)


# One microbatch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "number", "num_samples"),
    [({"x": image()}, 1, N), ({"x": image(1)}, 4, 1), (image(0), 4, 0), ([image(1), label(1)], 2, 1), ("word", 1, 0)],
)
def test_one_microbatch_is_the_batch_itself(batch, number, num_samples):
    made = split(batch, number)
    assert made.microbatches[0] is batch
    assert (len(made.microbatches), made.sizes, made.weights) == (1, [num_samples], [1.0])


# Views ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [((N, 3, 4, 5), torch.channels_last), ((N, 3, 2, 4, 5), torch.channels_last_3d), ((N, 3), torch.contiguous_format)],
)
def test_memory_formats_are_kept(shape, memory_format):
    batch = torch.rand(shape).contiguous(memory_format=memory_format)
    for piece in split(batch).microbatches:
        assert piece.is_contiguous(memory_format=memory_format)
        assert piece.stride() == batch.stride()


@pytest.mark.parametrize("is_enabled", [True, False])
def test_a_gradient_of_a_microbatch_reaches_the_batch(is_enabled):
    batch = image().requires_grad_()
    with torch.set_grad_enabled(is_enabled):
        pieces = split({"x": batch, "y": label()}).microbatches
    assert all(piece["x"].requires_grad for piece in pieces)
    for number, piece in enumerate(pieces):
        (piece["x"].sum() * number).backward()
    assert batch.grad[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2, 2]


def test_a_subclass_of_tensor_keeps_its_class_and_attributes():
    class Boxes(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))

    boxes = torch.rand(N, 4).as_subclass(Boxes)
    boxes.canvas = (32, 32)
    made = split({"boxes": boxes}, 2)
    assert [(type(piece["boxes"]), piece["boxes"].canvas) for piece in made.microbatches] == [(Boxes, (32, 32))] * 2
    merged = merge_values(made.microbatches, made.sizes, made.weights)["boxes"]
    assert (type(merged), merged.canvas) == (Boxes, (32, 32))


# A split_fn -------------------------------------------------------------------------------------------------


def graph_pieces(batch: Graphs, number: int) -> list[Graphs]:
    return [Graphs(batch.graphs[i::number]) for i in range(number)]


def test_a_split_fn_cuts_what_cannot_be_looked_into():
    splitter = BatchSplitter(split_fn=graph_pieces)
    batch = Graphs(clouds(7))
    made = splitter.split(batch, 3)
    assert (made.sizes, made.weights) == ([3, 2, 2], [3 / 7, 2 / 7, 2 / 7])
    assert splitter.count(batch) == 7
    assert splitter.split(batch, 1).microbatches[0] is batch


def test_a_split_fn_for_a_mapping_with_a_shape_or_an_object_with_a_length():
    def cut(batch: ShapedDict, number: int) -> list[ShapedDict]:
        columns = [batch["x"][:3], batch["x"][3:]]
        return [ShapedDict({"x": column}, [len(column)]) for column in columns]

    assert BatchSplitter(split_fn=cut).split(ShapedDict({"x": image()}, [N]), 4).sizes == [3, 5]
    assert BatchSplitter(split_fn=lambda b, _: [deque(list(b)[:1]), deque(list(b)[1:])]).split(
        deque("abc"), 2
    ).sizes == [1, 2]


def test_a_split_fn_may_cut_what_could_be_cut_without_it():
    made = BatchSplitter(split_fn=lambda batch, number: batch.chunk(number)).split(image(6), 4)
    assert made.sizes == [2, 2, 2]


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([], "split_fn returned 0 microbatches; expected at least 1 and at most 2"),
        ([image(3), image(3), image(2)], "split_fn returned 3 microbatches; expected at least 1 and at most 2"),
        ([image(4), image(3)], "[4, 3] samples, 7 together, for a batch of 8"),
        ([image(8), image(8)], "[8, 8] samples, 16 together, for a batch of 8"),
        ([image(8), image(0)], "no empty microbatch"),
        ([image(4), Metadata()], "cannot be counted (torch.Tensor into torch.Tensor); give a weight_fn"),
    ],
)
def test_what_a_split_fn_returns_is_checked(pieces, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        BatchSplitter(split_fn=lambda batch, number: pieces).split(image(), 2)


def test_pieces_that_cannot_be_counted_need_a_weight():
    def cut(batch: Holder, number: int) -> list[Holder]:
        return [Holder(piece) for piece in batch.data.chunk(number)]

    with pytest.raises(ValueError, match=r"cannot be counted \(.*Holder into .*Holder\); give a weight_fn"):
        BatchSplitter(split_fn=cut).split(Holder(image()), 2)
    made = BatchSplitter(split_fn=cut, weight_fn=lambda piece: len(piece.data)).split(Holder(image(6)), 4)
    assert (made.sizes, made.weights) == ([0, 0, 0], [1 / 3, 1 / 3, 1 / 3])


# Any nest ---------------------------------------------------------------------------------------------------

MANY = 24  # in at most 4 microbatches: more in each than any container below has entries


def leaf_of_rows(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(MANY).reshape(MANY, *[1] * len(shape)).expand(MANY, *shape).clone()


LEAVES = st.one_of(
    st.builds(leaf_of_rows, st.lists(st.integers(1, 3), max_size=3).map(tuple)),
    st.builds(lambda: np.arange(MANY)),
    st.builds(lambda: [str(i) for i in range(MANY)]),
    st.builds(lambda: tuple(str(i) for i in range(MANY))),
    st.builds(lambda: [torch.full((1 + i % 5, 2), i) for i in range(MANY)]),
    st.sampled_from([None, 4, 0.5, "a word", Colour.RED, True]),
    st.builds(lambda: torch.tensor(2)),
    st.builds(lambda: torch.rand(5)),  # auxiliary
)
NESTS = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=4),
        st.lists(parts, min_size=1, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), parts, min_size=1, max_size=4),
        st.builds(Pair, parts, parts),
        st.builds(FrozenRecord, parts, parts),
        st.dictionaries(st.text(max_size=3), parts, min_size=1, max_size=3).map(Encoding),
    ),
    max_leaves=8,
)


def assert_equal(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    elif isinstance(wanted, np.ndarray):
        assert np.array_equal(found, wanted)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            assert_equal(ours, theirs)
    elif isinstance(wanted, dict | UserDict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, FrozenRecord | Record):
        assert_equal((found.image, found.label), (wanted.image, wanted.label))
    else:
        assert found == wanted


@given(nest=NESTS, number=st.integers(2, 4))
def test_microbatches_of_any_nest_put_together_are_the_batch(nest, number):
    batch = {"x": leaf_of_rows((2,)), "nest": nest}
    try:
        made = split(batch, number, expected=MANY)
    except ValueError as error:  # some containers of auxiliary tensors alone look like the batch of another loader
        assume("may hold samples of its own" not in str(error))
        raise
    assert made.sizes == microbatch_sizes(MANY, number)
    assert joined(made.microbatches, lambda piece: piece["x"][:, 0]) == list(range(MANY))
    assert_equal(merge_values(made.microbatches, made.sizes, made.weights), batch)


def storages(batch: Any) -> set[int]:
    """Memory that is used: of tensors their storage, of arrays the array that owns it."""
    tensors = {node.untyped_storage().data_ptr() for node in walk(batch) if isinstance(node, torch.Tensor)}
    arrays = (node for node in walk(batch) if isinstance(node, np.ndarray))
    return tensors | {id(array if array.base is None else array.base) for array in arrays}


@given(nest=NESTS, number=st.integers(2, 4))
def test_microbatches_use_no_memory_of_their_own(nest, number):
    batch = {"x": leaf_of_rows((2,)), "nest": {"inner": nest, "y": leaf_of_rows(())}}
    try:
        made = split(batch, number, expected=MANY)
    except ValueError as error:
        assume("may hold samples of its own" not in str(error))
        raise
    assert storages(made.microbatches) == storages(batch)
