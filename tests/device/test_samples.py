"""Taking samples out of nested batches: each kind of container, what is shared, and what is refused."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from lightning_gpufeed.device.samples import (
    batch_form,
    copy_batch,
    count_samples,
    has_host_items,
    take_samples,
    tensor_addresses,
)

N = 7
INDEX = [5, 0, 3]


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


@dataclass
class CountedRecord:
    image: Any
    label: Any
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = len(self.image)


class Words(UserDict):
    """A mapping that is no dict, with an attribute of its own, as tokenizers give it."""

    def __init__(self, data: dict[str, Any], language: str = "en") -> None:
        super().__init__(data)
        self.language = language


class Tags(dict):
    """A dict with an attribute of its own."""

    source = "camera"


class OwnStore(MutableMapping):
    """A mapping that keeps its entries where a shallow copy shares them."""

    def __init__(self, data: dict[str, Any]) -> None:
        self._entries = dict(data)

    def __getitem__(self, key: str) -> Any:
        return self._entries[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Opaque:
    """Somebody's own batch: it moves to a device, and nobody else knows what is in it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def to(self, device: torch.device) -> Opaque:
        return Opaque(self.data.to(device))


class Metadata:
    """An object that does not move: it belongs to the batch."""


def image(num_samples: int = N) -> torch.Tensor:
    """Sample i is a row of i."""
    return torch.arange(num_samples).float()[:, None].expand(-1, 2).clone()


def label(num_samples: int = N) -> torch.Tensor:
    return torch.arange(num_samples)


def rows(batch: Any, index: list[int] = INDEX) -> Any:
    """Take samples of a batch of rows."""
    return take_samples(batch, "rows", torch.tensor(index, dtype=torch.int64), index)


def parts(batch: Any) -> tuple[Any, Any]:
    """Image and label, however the container keeps them."""
    if isinstance(batch, list | tuple):
        return batch[0], batch[1]
    if hasattr(batch, "keys"):
        return batch["image"], batch["label"]
    return batch.image, batch.label


# Every kind of container ---------------------------------------------------------------------------------

CONTAINERS = {
    "dict": lambda x, y: {"image": x, "label": y},
    "OrderedDict": lambda x, y: OrderedDict(image=x, label=y),
    "defaultdict": lambda x, y: defaultdict(list, image=x, label=y),
    "dict subclass": lambda x, y: Tags(image=x, label=y),
    "UserDict": lambda x, y: UserDict(image=x, label=y),
    "UserDict subclass": lambda x, y: Words({"image": x, "label": y}),
    "mapping of its own store": lambda x, y: OwnStore({"image": x, "label": y}),
    "list": lambda x, y: [x, y],
    "tuple": lambda x, y: (x, y),
    "NamedTuple": Pair,
    "namedtuple": OldPair,
    "dataclass": Record,
    "frozen dataclass": FrozenRecord,
    "frozen dataclass with slots": SlottedRecord,
    "dataclass with a field outside of init": CountedRecord,
}
make_container = pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())


@make_container
def test_a_container_keeps_its_kind_and_each_part_gives_the_same_samples(make):
    batch = make(image(), label())
    assert batch_form(batch) == "rows"
    assert count_samples(batch, "rows") == N
    taken = rows(batch)
    assert type(taken) is type(batch)
    x, y = parts(taken)
    assert x.tolist() == [[i, i] for i in INDEX]
    assert y.tolist() == INDEX


@make_container
def test_the_batch_is_as_it_was_after_samples_were_taken_and_changed(make):
    batch = make(image(), label())
    for changed in (rows(batch), copy_batch(batch)):
        assert not tensor_addresses(changed) & tensor_addresses(batch)
        for part in parts(changed):
            part.fill_(-1)
    x, y = parts(batch)
    assert x.tolist() == image().tolist()
    assert y.tolist() == label().tolist()


@make_container
def test_a_container_inside_a_container_is_looked_into(make):
    batch = {"inner": make(image(), label()), "outer": (label(),)}
    taken = rows(batch)
    assert type(taken["inner"]) is type(batch["inner"])
    x, y = parts(taken["inner"])
    assert (x[:, 0].tolist(), y.tolist(), taken["outer"][0].tolist()) == (INDEX, INDEX, INDEX)


def test_a_single_tensor_is_a_batch():
    assert batch_form(label()) == "rows"
    assert rows(label()).tolist() == INDEX


def test_a_single_array_is_a_batch():
    batch = np.arange(N)
    assert batch_form(batch) == "rows"
    assert rows(batch).tolist() == INDEX
    assert isinstance(rows(batch), np.ndarray)


def test_a_defaultdict_keeps_its_factory_and_the_order_of_its_keys():
    taken = rows(defaultdict(list, label=label(), image=image()))
    assert taken.default_factory is list
    assert list(taken) == ["label", "image"]


def test_a_mapping_keeps_its_attributes():
    assert rows(Words({"image": image()}, language="fr")).language == "fr"


def test_a_mapping_that_cannot_be_written_is_made_anew():
    taken = rows({"inner": MappingProxyType({"image": image()})})
    assert type(taken["inner"]) is MappingProxyType
    assert taken["inner"]["image"][:, 0].tolist() == INDEX


def test_a_dataclass_keeps_a_field_that_its_init_does_not_take():
    taken = rows(CountedRecord(image(), label()))
    assert taken.size == N  # a number belongs to the batch; nothing is worked out anew


# What is beside the tensors --------------------------------------------------------------------------------


def test_what_belongs_to_the_batch_is_passed_on_as_it_is():
    metadata = Metadata()
    batch = {
        "image": image(),
        "epoch": 3,
        "scale": 0.5,
        "is_train": True,
        "nothing": None,
        "source": "camera",
        "long text": "x" * N,  # as many characters as samples, but no list
        "bytes": b"x" * N,
        "metadata": metadata,
        "dtype": torch.float16,
        "empty": [],
    }
    taken = rows(batch)
    assert taken.pop("image")[:, 0].tolist() == INDEX
    del batch["image"]
    assert taken == batch
    assert taken["metadata"] is metadata


def test_a_list_of_strings_goes_with_its_samples():
    names = [f"sample {i}" for i in range(N)]
    for made in (names, tuple(names)):
        taken = rows({"image": image(), "name": made})
        assert type(taken["name"]) is type(made)
        assert list(taken["name"]) == [names[i] for i in INDEX]


def test_entries_of_any_kind_go_with_their_samples_and_stay_the_same_objects():
    metadata = [Metadata() for _ in range(N)]
    boxes = [[(i, i + 1)] * i for i in range(N)]
    taken = rows((image(), metadata, {"boxes": boxes}))
    assert all(entry is metadata[i] for entry, i in zip(taken[1], INDEX, strict=True))
    assert taken[2]["boxes"] == [boxes[i] for i in INDEX]


def test_a_list_of_another_length_belongs_to_the_batch():
    classes = ["cat", "dog"]
    assert rows({"image": image(), "classes": classes})["classes"] == classes


def test_a_constant_of_as_many_entries_as_a_short_batch_has_samples_is_not_mixed_up():
    # The same key held a constant in the batches before: three numbers, whatever the number of samples.
    batch = {"image": image(3), "shape": (3, 32, 64)}
    assert rows(batch, [2, 0])["shape"] == (3, 32, 64)


def test_arrays_go_with_their_samples_as_copies():
    batch = {"image": image(), "array": np.arange(N) * 10, "words": np.array([f"w{i}" for i in range(N)], dtype=object)}
    taken = rows(batch)
    assert taken["array"].tolist() == [10 * i for i in INDEX]
    assert taken["words"].tolist() == [f"w{i}" for i in INDEX]
    taken["array"][:] = -1
    assert batch["array"].tolist() == [10 * i for i in range(N)]


def test_tensors_and_arrays_without_dimensions_are_copied_whole():
    batch = {"image": image(), "temperature": torch.tensor(3.5), "array": np.array(2.5)}
    assert count_samples(batch, "rows") == N
    for taken in (rows(batch), copy_batch(batch)):
        assert taken["temperature"].item() == 3.5
        assert taken["array"].item() == 2.5
        taken["temperature"].zero_()
        taken["array"][...] = 0
    assert batch["temperature"].item() == 3.5
    assert batch["array"].item() == 2.5


@pytest.mark.parametrize(
    "dtype",
    ["uint8", "uint16", "uint32", "int64", "bool", "bfloat16", "float8_e4m3fn", "complex64"],
)
def test_every_dtype_can_be_taken_from(dtype):
    batch = label().to(getattr(torch, dtype))
    taken = rows(batch)
    assert taken.dtype == batch.dtype
    assert [taken[i].item() for i in range(3)] == [batch[i].item() for i in INDEX]


def test_no_samples_are_a_batch_of_none():
    taken = rows({"image": image(), "array": np.arange(N), "name": list("abcdefg")}, [])
    assert taken["image"].shape == (0, 2)
    assert taken["array"].shape == (0,)
    assert taken["name"] == []


# Any nest --------------------------------------------------------------------------------------------------


def leaf_of_tensor(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(N).reshape(N, *[1] * len(shape)).expand(N, *shape).clone()


LEAVES = st.one_of(
    st.builds(leaf_of_tensor, st.lists(st.integers(1, 3), max_size=3).map(tuple)),
    st.builds(lambda: np.arange(N)),
    st.builds(lambda: [str(i) for i in range(N)]),
    st.builds(lambda: tuple(str(i) for i in range(N))),
    st.sampled_from([None, 4, 0.5, "a word"]),
    st.builds(lambda: torch.tensor(2)),
)
# At most four entries, so that a container is never as long as a list of one entry for each sample.
NESTS = st.recursive(
    LEAVES,
    lambda parts: st.one_of(
        st.lists(parts, min_size=1, max_size=4),
        st.lists(parts, min_size=1, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=3), parts, min_size=1, max_size=4),
        st.builds(Pair, parts, parts),
        st.builds(FrozenRecord, parts, parts),
        st.dictionaries(st.text(max_size=3), parts, min_size=1, max_size=3).map(UserDict),
    ),
    max_leaves=8,
)


def assert_holds(taken: Any, node: Any, index: list[int]) -> None:
    """Every leaf holds the samples asked for, or is what belongs to the batch."""
    assert type(taken) is type(node)
    if isinstance(node, torch.Tensor | np.ndarray) and node.ndim:
        assert taken.shape == (len(index), *node.shape[1:])
        assert taken.dtype == node.dtype
        assert taken.reshape(len(index), -1)[:, 0].tolist() == index
    elif isinstance(node, torch.Tensor):
        assert torch.equal(taken, node)
    elif isinstance(node, list | tuple) and len(node) == N:
        assert list(taken) == [str(i) for i in index]
    elif isinstance(node, list | tuple):
        assert len(taken) == len(node)
        for ours, theirs in zip(taken, node, strict=True):
            assert_holds(ours, theirs, index)
    elif isinstance(node, dict | UserDict):
        assert list(taken) == list(node)
        for key in node:
            assert_holds(taken[key], node[key], index)
    elif isinstance(node, FrozenRecord):
        assert_holds(taken.image, node.image, index)
        assert_holds(taken.label, node.label, index)
    else:
        assert taken is node


@given(nest=NESTS, index=st.lists(st.integers(0, N - 1), min_size=1, max_size=N))
def test_any_nest_gives_the_samples_asked_for_in_every_leaf(nest: Any, index: list[int]) -> None:
    batch = {"first": label(), "nest": nest}  # one tensor at least, so that there is something to count
    taken = rows(batch, index)
    assert_holds(taken, batch, index)
    assert not tensor_addresses(taken) & tensor_addresses(batch)
    assert_holds(batch, batch, list(range(N)))


@given(nest=NESTS)
def test_a_copy_of_any_nest_is_equal_and_shares_nothing(nest: Any) -> None:
    batch = {"first": label(), "nest": nest}
    copied = copy_batch(batch)
    assert_holds(copied, batch, list(range(N)))
    assert not tensor_addresses(copied) & tensor_addresses(batch)


# Memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [((N, 3, 4, 5), torch.channels_last), ((N, 3, 2, 4, 5), torch.channels_last_3d)],
    ids=["channels_last", "channels_last_3d"],
)
def test_channels_last_is_kept(shape, memory_format):
    batch = torch.rand(shape).contiguous(memory_format=memory_format)
    taken = rows(batch)
    assert taken.is_contiguous(memory_format=memory_format)
    assert not taken.is_contiguous()
    assert torch.equal(taken, batch[INDEX])
    assert copy_batch(batch).is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("shape", [(N, 3, 4, 5), (N, 3, 2, 4, 5), (N, 3), (N, 3, 4), (N,)], ids=str)
def test_what_is_contiguous_stays_so(shape):
    batch = torch.rand(shape)
    assert rows(batch).is_contiguous()
    assert torch.equal(rows(batch), batch[INDEX])


def test_channels_last_with_a_gradient_is_taken_from_as_well():
    batch = torch.rand(N, 3, 4, 5).contiguous(memory_format=torch.channels_last).requires_grad_()
    taken = rows(batch)
    assert torch.equal(taken, batch[INDEX])
    assert taken.is_contiguous(memory_format=torch.channels_last)


def test_rows_that_share_their_memory_are_separate_in_the_copy():
    batch = torch.arange(N)[:, None].expand(N, 4)
    taken = rows(batch)
    taken[0].zero_()
    assert taken[1:].tolist() == [[0] * 4, [3] * 4]
    assert batch[:, 0].tolist() == list(range(N))


def test_only_the_samples_asked_for_are_copied():
    batch = torch.rand(1000, 10)
    taken = rows(batch)
    assert taken.untyped_storage().nbytes() == 3 * 10 * 4


def test_addresses_tell_the_same_memory_apart_from_equal_contents():
    tensor, array = torch.zeros(4), np.zeros(4)
    assert tensor_addresses({"a": [tensor]}) == tensor_addresses((tensor.view(2, 2),))
    assert tensor_addresses(torch.from_numpy(array)) == tensor_addresses([array])
    assert not tensor_addresses(tensor) & tensor_addresses(tensor.clone())
    assert tensor_addresses([torch.empty(0), np.empty(0), 3, "a", None]) == set()


# Lists of samples, lists of fields -------------------------------------------------------------------------


def clouds(num_samples: int = N) -> list[torch.Tensor]:
    """Samples of different lengths."""
    return [torch.full((2 + i, 3), float(i)) for i in range(num_samples)]


def taken_numbers(samples: Any) -> list[int]:
    return [int(sample.flatten()[0]) for sample in samples]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_of_samples_is_cut_between_them(kind):
    batch = kind((cloud, i) for i, cloud in enumerate(clouds()))
    assert batch_form(batch, N) == "items"
    assert count_samples(batch, "items") == N
    taken = take_samples(batch, "items", torch.tensor(INDEX), INDEX)
    assert type(taken) is kind
    assert [i for _, i in taken] == INDEX
    assert taken_numbers(cloud for cloud, _ in taken) == INDEX


def test_a_list_of_dicts_is_cut_between_them():
    batch = [{"points": cloud, "name": str(i)} for i, cloud in enumerate(clouds())]
    assert batch_form(batch, N) == batch_form(batch) == "items"
    taken = take_samples(batch, "items", torch.tensor(INDEX), INDEX)
    assert [sample["name"] for sample in taken] == [str(i) for i in INDEX]


def test_a_list_of_tensors_of_different_lengths_is_a_list_of_samples():
    assert batch_form(clouds(), N) == batch_form(clouds()) == "items"


@pytest.mark.parametrize(
    "make",
    [lambda x, y: {"points": x, "label": y}, lambda x, y: (x, y), Pair, Record],
    ids=["dict", "tuple", "NamedTuple", "dataclass"],
)
def test_lists_side_by_side_are_cut_alike(make):
    batch = make(clouds(), list(range(N)))
    assert batch_form(batch, N) == "fields"
    assert count_samples(batch, "fields") == N
    taken = take_samples(batch, "fields", torch.tensor(INDEX), INDEX)
    assert type(taken) is type(batch)
    points, labels = (
        taken.values() if isinstance(taken, dict) else taken if isinstance(taken, tuple) else vars(taken).values()
    )
    assert labels == INDEX
    assert taken_numbers(points) == INDEX


@pytest.mark.parametrize("form", ["items", "fields"])
def test_samples_in_lists_share_no_tensor_with_the_batch(form):
    batch = list(zip(clouds(), clouds(), strict=True)) if form == "items" else (clouds(), clouds())
    taken = take_samples(batch, form, torch.tensor(INDEX), INDEX)
    assert not tensor_addresses(taken) & tensor_addresses(batch)


def test_a_list_of_tensors_of_one_length_is_a_list_of_fields():
    assert batch_form([image(), label()], N) == "rows"
    assert batch_form([image(), label()]) == "rows"
    assert batch_form((image(2), label(2)), 2) == "rows"  # as many fields as samples


def test_crops_of_every_sample_are_fields_if_the_number_of_samples_says_so():
    assert batch_form({"crops": [image(), image()], "label": label()}, N) == "rows"
    assert batch_form(([image(), image()], label()), N) == "rows"


def test_a_short_batch_has_fewer_samples_than_expected():
    assert batch_form((image(3), label(3)), N) == "rows"
    assert batch_form({"image": image(3), "name": list("abc")}, N) == "rows"


def test_lists_of_any_entries_need_their_numbers_on_the_host():
    assert not has_host_items({"image": image(), "epoch": 3, "classes": ["cat", "dog"]}, "rows")
    assert not has_host_items([image(), label()], "rows")
    assert has_host_items({"image": image(), "name": list("abcdefg")}, "rows")
    assert has_host_items((image(), {"deep": np.arange(N)}), "rows")
    assert has_host_items(clouds(), "items")
    assert has_host_items((clouds(), clouds()), "fields")


# Refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        # Two samples of two entries, or two fields of two samples?
        ([(torch.rand(3, 4), 1), (torch.rand(3, 4), 2)], 2),
        (((torch.rand(5), torch.rand(4)), (torch.rand(3), torch.rand(2))), 2),
        # Eight samples of two entries, or two fields of ... no: eight pairs are no two samples.
        ([(cloud, i) for i, cloud in enumerate(clouds())], None),
        ([(cloud, i) for i, cloud in enumerate(clouds())], 2 * N),
        # Are three channels three samples?
        ({"image": [torch.rand(3, 4, 4)] * N, "name": ["a"] * N}, None),
        ({"image": [torch.rand(3, 4, 4)] * 3, "name": ["a"] * 3}, 3),
        (([torch.rand(3, 4, 4)] * 3, ["a"] * 3), 3),
        ([torch.rand(3, 4, 4)] * 3, 3),
        ([{"image": torch.rand(3, 4, 4)}] * 3, 3),
        ({"inputs": {"image": [torch.rand(3, 4, 4)] * N}, "name": ["a"] * N}, N),
        ([(torch.rand(3, 4, 4), 1)] * N, None),
    ],
    ids=[
        "two pairs",
        "two pairs of tensors",
        "pairs, of how many",
        "pairs, fewer than usual",
        "dict of lists, of how many",
        "dict of as many lists as channels",
        "tuple of as many lists as channels",
        "as many images as channels",
        "as many dicts as channels",
        "lists deep inside",
        "pairs of images, of how many",
    ],
)
def test_a_batch_that_can_be_read_in_two_ways_is_refused(batch, expected):
    with pytest.raises(ValueError, match="the samples of this batch cannot be told apart"):
        batch_form(batch, expected)


@pytest.mark.parametrize("batch", [torch.rand(2 * N, 3), (torch.rand(2 * N, 3), torch.rand(2 * N))])
def test_more_rows_than_the_loader_puts_into_a_batch_are_not_taken_for_samples(batch):
    # Two views of each sample one after the other: their places in the batch make them a pair.
    with pytest.raises(ValueError, match="cannot be told apart"):
        batch_form(batch, N)


def test_the_message_says_what_is_where_and_what_was_expected():
    with pytest.raises(ValueError, match=r"cannot be told apart") as caught:
        batch_form({"image": torch.rand(4, 2), "boxes": {"a": torch.rand(9, 4)}, "names": ["x"] * 4}, 4)
    assert str(caught.value) == (
        "the samples of this batch cannot be told apart: batch['image'] has shape (4, 2), batch['boxes']['a'] has "
        "shape (9, 4), batch['names'] is a list of 4. Expected tensors whose first dimension counts the samples "
        "(batch_size 4), or lists with one entry each."
    )


def test_the_message_shows_a_few_of_many_tensors():
    with pytest.raises(ValueError, match=r"batch\[5\] has shape \(6,\) \.\.\. *\. Expected") as caught:
        batch_form([*(torch.rand(i + 1) for i in range(50)), 3], 4)
    assert "batch[6]" not in str(caught.value)


@pytest.mark.parametrize(
    ("batch", "named"),
    [(5, "a int"), ("text", "a str"), (None, "a NoneType"), ({}, "a dict"), ([], "is a list of 0"), ((), "list of 0")],
    ids=repr,
)
def test_a_batch_without_tensors_is_refused(batch, named):
    with pytest.raises(ValueError, match=named):
        batch_form(batch)


def test_words_without_a_number_of_samples_are_refused():
    with pytest.raises(ValueError, match="batch is a list of 2"):
        batch_form(["a", "b"])
    assert batch_form(["a", "b"], 2) == "items"


def test_only_tensors_without_dimensions_are_refused():
    with pytest.raises(ValueError, match=r"batch\['loss'\] has shape \(\)"):
        batch_form({"loss": torch.tensor(1.0)})


def nested_tensor(layout: torch.layout) -> torch.Tensor:
    return torch.nested.nested_tensor(clouds(3), layout=layout)


UNKNOWN = {
    "packed sequence": (
        lambda: pack_sequence(clouds(3), enforce_sorted=False),
        r"torch\.nn\.utils\.rnn\.PackedSequence",
    ),
    "jagged tensor": (lambda: nested_tensor(torch.jagged), "nested or sparse tensor"),
    "sparse tensor": (lambda: torch.eye(N).to_sparse(), "nested or sparse tensor"),
    "compressed sparse tensor": (lambda: torch.eye(N).to_sparse_csr(), "nested or sparse tensor"),
    "opaque object": (lambda: Opaque(image()), r"\.Opaque cannot be told apart"),
}


# torch warns that two of its layouts may change.
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("place", [lambda x: x, lambda x: {"deep": [x], "image": image()}], ids=["alone", "deep"])
@pytest.mark.parametrize(("make", "named"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_what_moves_to_a_device_but_has_no_rows_is_refused_and_can_be_copied(make, named, place):
    batch = place(make())
    with pytest.raises(ValueError, match=named):
        batch_form(batch, N)
    copied = copy_batch(batch)
    assert type(copied) is type(batch)


def test_a_copy_of_an_opaque_batch_shares_no_memory():
    batch = Opaque(image())
    copied = copy_batch({"inner": batch})["inner"]
    copied.data.zero_()
    assert batch.data.tolist() == image().tolist()


def test_a_copy_of_a_packed_sequence_shares_no_memory_and_is_one():
    batch = pack_sequence(clouds(3), enforce_sorted=False)
    copied = copy_batch(batch)
    copied.data.zero_()
    assert batch.data.sum() > 0
    assert type(copied) is type(batch)


def test_a_record_or_mapping_that_moves_itself_is_still_looked_into():
    @dataclass
    class Movable:
        image: torch.Tensor

        def to(self, device: torch.device) -> Movable:
            return Movable(self.image.to(device))

    assert batch_form(Movable(image())) == "rows"
    assert rows(Movable(image())).image[:, 0].tolist() == INDEX


@pytest.mark.parametrize(
    ("batch", "form", "what"),
    [
        ((torch.rand(4), torch.rand(5)), "rows", "tensors of one length in every batch"),
        (([1, 2], [1]), "fields", "lists of one length in every batch"),
        ({"a": [1, 2], "b": torch.rand(2)}, "fields", "lists of one length in every batch"),
    ],
)
def test_a_batch_unlike_the_ones_before_is_refused(batch, form, what):
    with pytest.raises(ValueError, match=f"not made like the ones before it: .*{what}"):
        count_samples(batch, form)
