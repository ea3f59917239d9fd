"""What user code did to a batch is noticed, named, and undone where it can be."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_gpufeed.device.samples import walk
from lightning_gpufeed.recover.batch_guard import BatchGuard
from lightning_gpufeed.recover.split_batch import BatchSplitter


class Pair(NamedTuple):
    image: Any
    label: Any


@dataclass
class Record:
    image: Any
    label: Any


@dataclass(frozen=True)
class FrozenRecord:
    image: Any
    label: Any


def batch_of(kind: Any) -> Any:
    return kind(image=torch.zeros(4, 3), label=torch.zeros(4))


def lists_of(**parts: Any) -> defaultdict[str, Any]:
    return defaultdict(list, parts)


def nested(image: Any, label: Any) -> list[Any]:
    return [image, (label,)]


KINDS = [dict, OrderedDict, UserDict, lists_of, Record]
make_kind = pytest.mark.parametrize("kind", KINDS, ids=["dict", "OrderedDict", "UserDict", "defaultdict", "dataclass"])


@pytest.mark.parametrize("kind", [*KINDS, Pair, FrozenRecord, nested])
def test_a_batch_that_was_only_used_has_not_changed(kind):
    batch = batch_of(kind)
    guard = BatchGuard(batch)
    for node in list(walk(batch)):
        if isinstance(node, torch.Tensor):
            node.float().sub(1).sum()
    assert guard.changed() == []
    assert type(guard.restored()) is type(batch)


def test_a_tensor_changed_in_place_is_named_by_its_path():
    batch = {"image": torch.zeros(4, 3), "deep": [torch.zeros(4), Pair(torch.zeros(4), torch.zeros(4))]}
    guard = BatchGuard(batch)
    batch["image"].sub_(1)
    batch["deep"][1].label[0] = 5
    assert guard.changed() == guard.changed_tensors() == ["batch['image']", "batch['deep'][1][1]"]
    assert guard.changed_containers() == []


def test_a_bare_tensor_is_the_batch():
    batch = torch.zeros(4)
    guard = BatchGuard(batch)
    assert guard.restored() is batch
    batch.add_(1)
    assert guard.changed() == ["batch"]


def test_a_change_of_a_view_or_of_a_microbatch_is_one_of_the_batch():
    batch = {"image": torch.zeros(4, 3), "label": torch.zeros(4)}
    guard = BatchGuard(batch)
    BatchSplitter().split(batch, 2).microbatches[1]["label"].add_(1)
    assert guard.changed() == ["batch['label']"]
    batch["image"].view(-1)[2:].zero_()
    assert guard.changed() == ["batch['image']", "batch['label']"]


def test_a_change_is_seen_even_of_a_tensor_that_was_taken_out_afterwards():
    batch = {"image": torch.zeros(4, 3), "label": torch.zeros(4)}
    guard = BatchGuard(batch)
    batch["image"].sub_(1)
    batch["image"] = batch.pop("image").half()
    assert guard.changed() == ["batch['image']", "batch['image'] was replaced"]


def test_tensors_without_a_version_are_passed_over():
    with torch.inference_mode():
        batch = {"image": torch.zeros(4), "label": torch.zeros(4)}
    guard = BatchGuard(batch)
    with torch.inference_mode():
        batch["image"].add_(1)
    assert guard.changed() == []
    assert guard.restored() == batch


@pytest.mark.parametrize("kind", KINDS[:4], ids=["dict", "OrderedDict", "UserDict", "defaultdict"])
def test_edits_of_a_mapping_are_named_and_undone(kind):
    batch = batch_of(kind)
    parts = dict(batch)
    guard = BatchGuard(batch)
    batch["image"] = batch["image"].half()
    batch["logits"] = torch.zeros(4)
    del batch["label"]
    assert guard.changed() == ["batch['image'] was replaced", "batch['label'] was removed", "batch['logits'] was added"]
    restored = guard.restored()
    assert type(restored) is type(batch)
    assert list(restored) == ["image", "label"]
    assert all(restored[key] is parts[key] for key in parts)


def test_edits_of_a_dataclass_are_named_and_undone():
    batch = batch_of(Record)
    image = batch.image
    guard = BatchGuard(batch)
    batch.image = None
    assert guard.changed() == ["batch.image was replaced"]
    assert guard.restored().image is image


def test_edits_of_a_list_are_named_and_undone():
    batch = {"images": [torch.zeros(2), torch.zeros(3)], "name": ["a", "b"]}
    images = list(batch["images"])
    guard = BatchGuard(batch)
    batch["images"].pop()
    batch["name"].append("c")
    assert guard.changed() == ["batch['images'][1] was removed", "batch['name'][2] was added"]
    restored = guard.restored()
    assert all(now is then for now, then in zip(restored["images"], images, strict=True))
    assert restored["name"] == ["a", "b"]


def test_edits_deep_inside_containers_that_cannot_be_edited_are_undone():
    inner = {"x": torch.zeros(4), "y": torch.zeros(4)}
    batch = (Pair(FrozenRecord(inner, 1), MappingProxyType({"z": inner})), 2)
    guard = BatchGuard(batch)
    del inner["x"]
    assert guard.changed() == ["batch[0][0].image['x'] was removed", "batch[0][1]['z']['x'] was removed"]
    restored = guard.restored()
    assert list(restored[0].image.image) == list(restored[0].label["z"]) == ["x", "y"]
    assert [type(node) for node in walk(restored)][:3] == [tuple, Pair, FrozenRecord]


@make_kind
def test_every_attempt_can_have_a_batch_of_its_own(kind):
    batch = batch_of(kind)
    guard = BatchGuard(batch)
    for _ in range(2):
        attempt = guard.restored()
        assert attempt is not batch
        if kind is Record:
            assert attempt.image.shape == (4, 3)
            attempt.image = None
        else:
            assert list(attempt) == ["image", "label"]
            attempt.clear()
    assert guard.changed() == []


class ShapedDict(UserDict):
    """A mapping of tensors that has the shape of its batch, and whose iteration gives samples instead of keys."""

    batch_size = torch.Size([4])

    def __iter__(self) -> Any:
        return (tensor for tensors in zip(*self.data.values(), strict=True) for tensor in tensors)

    def keys(self) -> Any:
        return self.data.keys()

    def items(self) -> Any:
        return self.data.items()


def test_what_cannot_be_rebuilt_is_left_as_it_is_and_its_changes_are_named():
    shaped = ShapedDict()
    shaped.data = {"x": torch.zeros(4, 3), "y": torch.zeros(4)}
    packed = pack_sequence([torch.zeros(3), torch.zeros(2)])
    batch = {"shaped": shaped, "packed": packed}
    guard = BatchGuard(batch)
    assert guard.changed() == []
    assert guard.restored()["shaped"] is shaped
    assert guard.restored()["packed"] is packed
    shaped.data["x"].add_(1)
    packed.data.add_(1)
    assert guard.changed() == ["batch['shaped']['x']", "batch['packed'][0]"]
    del shaped.data["y"]
    assert guard.changed() == ["batch['shaped']", "batch['packed'][0]"]


def test_arrays_numbers_and_strings_may_be_in_a_batch():
    batch = {"array": np.zeros(3), "epoch": 3, "text": "a", "none": None, "mask": torch.zeros(0)}
    guard = BatchGuard(batch)
    assert guard.changed() == []
    batch["epoch"] += 1
    assert guard.changed() == ["batch['epoch'] was replaced"]
    assert guard.restored()["epoch"] == 3
