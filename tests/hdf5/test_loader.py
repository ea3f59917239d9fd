"""The loader as a training loop uses it: every sample once, exact resume, batches that stay what they were."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_gpufeed.device.feed as feed_module
from lightning_gpufeed.device.feed import FeedStatistics
from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.loader import H5Loader
from lightning_gpufeed.hdf5.order import FullShuffle, WindowShuffle
from lightning_gpufeed.hdf5.source import H5Source
from lightning_gpufeed.hdf5.window import window_order
from tests.contracts import check_resume, consumed, exactly, joined
from tests.doubles import EventLog, parking_condition, run_forked

NUM_SAMPLES = 47


def images(numbers: Any) -> np.ndarray:
    """uint8 (n, 3, 6, 6) whose every pixel is the number of the sample."""
    return np.broadcast_to(np.asarray(numbers, np.uint8)[:, None, None, None], (len(numbers), 3, 6, 6)).copy()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a file with images x and the number n of each sample; options are those of `create_dataset` for x."""

    def write(name: str = "data.h5", num_samples: int = NUM_SAMPLES, *, first: int = 0, **options: Any) -> Path:
        numbers = np.arange(first, first + num_samples)
        with h5py.File(tmp_path / name, "w") as h5_file:
            h5_file.create_dataset("x", data=images(numbers), **options)
            h5_file["n"] = numbers
        return tmp_path / name

    return write


@pytest.fixture
def path(write) -> Path:
    return write()


@pytest.fixture
def make(path: Path) -> Iterator[Callable[..., H5Loader]]:
    """Make loaders that are closed at the end of the test; of batches of 5 if nothing else is said."""
    loaders: list[H5Loader] = []

    def make(*arguments: Any, **options: Any) -> H5Loader:
        loaders.append(H5Loader(*(arguments or (path,)), **{"batch_size": 5, **options}))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()
        loader.close()


def numbers_of(batch: dict[str, Any]) -> list[int]:
    """The samples of a batch; every field has to tell the same."""
    found = batch["n"].tolist()
    assert batch["x"].dtype == torch.uint8
    assert torch.equal(batch["x"], torch.from_numpy(images(found)))
    return found


def by_steps(loaders: list[H5Loader]) -> list[list[list[int]]]:
    """One epoch of several ranks: step -> rank -> samples. All ranks take equally many steps."""
    epochs = [[numbers_of(batch) for batch in loader] for loader in loaders]
    return [list(step) for step in zip(*epochs, strict=True)]


@contextmanager
def suppress_closed() -> Iterator[None]:
    """Let nothing pass but the error of a closed reader."""
    try:
        yield
    except FeedError as error:
        if str(error) != "the reader is closed; open another one.":
            raise


def flat(steps: list[list[list[int]]]) -> list[int]:
    return [number for step in steps for share in step for number in share]


STORED = {
    "one block": {},
    "chunks": {"chunks": (4, 3, 6, 6)},
    "compressed": {"chunks": (4, 3, 6, 6), "compression": "gzip"},
    "split samples": {"chunks": (4, 1, 6, 6)},
}


# One epoch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ["window", "window:8", None])
@pytest.mark.parametrize("stored", STORED.values(), ids=STORED.keys())
def test_an_epoch_holds_every_sample_once_with_all_its_fields(write, make, stored, shuffle):
    loader = make(write("stored.h5", **stored), shuffle=shuffle)
    batches = [numbers_of(batch) for batch in loader]
    assert [len(batch) for batch in batches] == [5] * 9 + [2]
    assert sorted(joined(batches)) == list(range(NUM_SAMPLES))
    if shuffle is None:
        assert joined(batches) == list(range(NUM_SAMPLES))


def test_the_order_is_that_of_the_shuffle_for_this_seed_and_epoch(make):
    loader = make(shuffle=FullShuffle(), seed=3)
    for epoch in range(3):
        order = FullShuffle().permutation(NUM_SAMPLES, 3, epoch)
        assert loader.order(epoch).tolist() == consumed(loader, "n") == order.tolist()


def test_a_window_goes_through_the_chunks_in_an_order_of_its_own(make):
    loader = make(shuffle=WindowShuffle(8), seed=3)
    groups = loader.source.blocks(np.arange(NUM_SAMPLES))
    for epoch in range(3):
        order = window_order(groups, 8, 3, epoch)
        assert loader.order(epoch).tolist() == consumed(loader, "n") == order.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [1, 4, 7, 15])
@pytest.mark.parametrize("shuffle", ["full", None])
def test_ranks_share_every_epoch_exactly(make, world_size, batch_size, shuffle):
    loaders = [
        make(rank=rank, world_size=world_size, batch_size=batch_size, shuffle=shuffle) for rank in range(world_size)
    ]
    alone = make(shuffle=shuffle)
    for _ in range(2):
        lengths = {len(loader) for loader in loaders}
        steps = by_steps(loaders)
        assert lengths == {len(steps)}
        assert flat(steps) == consumed(alone, "n")  # in the order that one rank would take
        for step in steps[:-1]:
            assert [len(share) for share in step] == [batch_size] * world_size
        sizes = [len(share) for share in steps[-1]]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("world_size", "batch_size", "used"), [(1, 5, 45), (2, 6, 36), (3, 15, 45), (1, 47, 47)])
def test_drop_last_leaves_out_what_fills_no_step(make, world_size, batch_size, used):
    loaders = [
        make(rank=rank, world_size=world_size, batch_size=batch_size, drop_last=True) for rank in range(world_size)
    ]
    for _ in range(2):
        steps = by_steps(loaders)
        assert all(len(share) == batch_size for step in steps for share in step)
        assert len(set(flat(steps))) == len(flat(steps)) == used


def test_several_files_are_one_epoch(write, make):
    stored = list(STORED.values())
    sizes = [3, 1, 5, 2, 4] * 3 + [1, 1]
    paths, first = [], 0
    for number, size in enumerate(sizes):
        options = stored[number % 2]  # raw, as one block and in chunks
        options = options if options.get("chunks", (0,))[0] <= size else {}
        paths.append(write(f"part{number:02}.h5", size, first=first, **options))
        first += size
    assert len(paths) == 17
    assert sorted(joined(numbers_of(batch) for batch in make(paths))) == list(range(47))


def test_raw_and_compressed_files_are_one_epoch(write, make):
    paths = [write("raw.h5", 20), write("packed.h5", 27, first=20, **STORED["compressed"])]
    assert sorted(joined(numbers_of(batch) for batch in make(paths, shuffle="window"))) == list(range(47))


def test_text_and_arrays_of_varying_length_come_as_lists(tmp_path, make):
    with h5py.File(tmp_path / "rich.h5", "w") as h5_file:
        h5_file["n"] = np.arange(10)
        h5_file["text"] = [f"sample {number}" for number in range(10)]
        lengths = h5_file.create_dataset("lengths", (10,), h5py.vlen_dtype("i4"))
        for number in range(10):
            lengths[number] = range(number)
    for batch in make(tmp_path / "rich.h5", batch_size=4):
        found = batch["n"].tolist()
        assert batch["text"] == [f"sample {number}" for number in found]
        assert [values.tolist() for values in batch["lengths"]] == [list(range(number)) for number in found]


def test_fields_may_be_named_and_renamed(path, make):
    assert list(next(iter(make(path, keys=["n"])))) == ["n"]
    assert list(next(iter(make(path, keys={"image": "x", "number": "n"})))) == ["image", "number"]


def test_a_batch_may_be_given_another_form(make):
    batches = list(make(to_batch=lambda batch: tuple(batch["n"].tolist()), shuffle=None, batch_size=20))
    assert batches == [tuple(range(20)), tuple(range(20, 40)), tuple(range(40, 47))]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, tuple], ids=lambda kind: kind.__name__)
def test_chosen_samples_come_in_the_order_given(make, kind):
    loader = make(indices=kind([9, 3, 3, 46, 0]), shuffle=None, batch_size=2)
    assert loader.num_samples == 5
    assert [numbers_of(batch) for batch in loader] == [[9, 3], [3, 46], [0]]


def test_chosen_samples_are_shuffled_among_themselves(make):
    chosen = np.arange(5, 35)
    loader = make(indices=chosen, seed=2)
    first, second = consumed(loader, "n"), consumed(loader, "n")
    assert sorted(first) == sorted(second) == chosen.tolist()
    assert first != second
    assert first == chosen[FullShuffle().permutation(30, 2, 0)].tolist()


def test_what_feeding_an_epoch_cost_is_counted(make):
    loader = make(batch_size=10)
    assert loader.statistics == FeedStatistics()
    for number, _ in enumerate(loader, start=1):
        assert loader.statistics.num_batches == number
    assert (loader.statistics.num_batches, loader.statistics.num_samples) == (5, NUM_SAMPLES)
    assert loader.statistics.num_bytes == NUM_SAMPLES * (3 * 6 * 6 + 8)
    next(iter(loader))
    assert loader.statistics.num_batches == 1


def test_the_default_device_of_torch_does_not_matter(write, make):
    # Many programs say so once, for their model; samples are read into host memory all the same.
    torch.set_default_device("meta")
    for stored in STORED.values():
        loader = make(write("device.h5", **stored), shuffle="window")
        digest = loader.state_dict()["digest"]
        batches = list(loader)
        assert {tensor.device.type for batch in batches for tensor in batch.values()} == {"cpu"}
        assert loader.state_dict()["digest"] == digest
        loader.close()


# Epochs --------------------------------------------------------------------------------------------------


def test_epochs_differ_and_follow_from_the_seed(make):
    first, second = ([consumed(loader, "n") for _ in range(3)] for loader in (make(seed=4), make(seed=4)))
    assert first == second
    assert len({tuple(epoch) for epoch in first}) == 3
    assert consumed(make(seed=5), "n") != first[0]


def test_an_epoch_can_be_set(make):
    epochs = [consumed(make(), "n")]
    loader = make()
    epochs = [consumed(loader, "n") for _ in range(4)]
    loader.set_epoch(2)
    assert consumed(loader, "n") == epochs[2]
    assert consumed(loader, "n") == epochs[3]  # and counts on from there
    loader.set_epoch(0)
    loader.set_epoch(1)
    assert consumed(loader, "n") == epochs[1]


def test_lightning_and_deepspeed_set_the_epoch_through_the_sampler(make):
    loader, other = make(), make()
    loader.batch_sampler.sampler.set_epoch(3)
    other.set_epoch(3)
    assert consumed(loader, "n") == consumed(other, "n")
    assert loader.batch_sampler.batch_size == 5


def test_an_epoch_left_early_is_followed_by_the_next(make):
    loader, other = make(), make()
    for _ in loader:
        break
    consumed(other, "n")
    assert consumed(loader, "n") == consumed(other, "n")


def test_a_second_iteration_ends_the_first_and_says_so(make):
    loader = make()
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    with pytest.raises(FeedError) as error:
        next(first)
    assert str(error.value) == (
        "this iteration was ended because another one over the same loader began, or the loader was closed. "
        "Make a second H5Loader to read twice at the same time."
    )
    assert len(list(second)) == 9


def test_an_iteration_that_was_not_begun_ends_no_other(make):
    loader = make()
    first = iter(loader)
    iter(loader)
    assert len(list(first)) == 10


def test_an_iteration_that_is_over_stays_over(make):
    loader = make()
    first = iter(loader)
    list(first)
    consumed(loader, "n")
    assert list(first) == []


def test_two_loaders_share_a_source_beside_each_other(path, make):
    with closing(H5Source(path)) as source:
        pairs = zip(make(source, shuffle=None), make(source, seed=1), strict=True)
        orders = list(zip(*[(numbers_of(a), numbers_of(b)) for a, b in pairs], strict=True))
    assert sorted(joined(orders[0])) == sorted(joined(orders[1])) == list(range(NUM_SAMPLES))


def test_the_length_is_the_number_of_batches(make):
    loader = make()
    assert len(loader) == 10
    for _ in loader:
        assert len(loader) == 10
    assert len(loader) == 10


def test_the_length_stays_that_of_a_whole_epoch_after_a_resume_with_other_sizes(make):
    loader = make()
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    resumed = make(batch_size=9)  # 20 samples are used, 27 are left: the last 3 batches of 6
    resumed.load_state_dict(loader.state_dict())
    assert len(resumed) == 6
    assert len(list(resumed)) == 3
    assert len(resumed) == 6
    assert len(list(resumed)) == 6


# Readiness and closing -----------------------------------------------------------------------------------


def test_the_loader_tells_whether_the_next_batch_is_ready(make, monkeypatch):
    log = EventLog()
    monkeypatch.setattr(feed_module.threading, "Condition", parking_condition(log, "gpufeed-reader"))
    loader = make()
    assert not loader.is_ready()  # nothing has been started
    iterator = iter(loader)
    assert not loader.is_ready()
    next(iterator)
    log.wait_for("parked")
    assert loader.is_ready()
    list(iterator)
    assert not loader.is_ready()  # the next epoch has not been started


def test_closing_ends_the_thread_and_the_iteration(make):
    loader = make()
    iterator = iter(loader)
    next(iterator)
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "gpufeed-reader"]
    with pytest.raises(FeedError, match="or the loader was closed"):
        next(iterator)
    assert len(consumed(loader, "n")) == NUM_SAMPLES  # iterating again opens the files again


def test_a_loader_is_a_context(path):
    with H5Loader(path, 5) as loader:
        next(iter(loader))
    # The leak check around every test finds what is left open.


def test_closing_a_loader_leaves_a_source_that_was_given_open(path, make):
    with closing(H5Source(path)) as source:
        first, second = make(source), make(source)
        iterator = iter(second)
        next(iterator)
        consumed(first, "n")
        first.close()
        assert len(list(iterator)) == 9


def test_dropping_a_loader_in_the_middle_leaves_nothing(path):
    loader = H5Loader(path, 5)
    iterator = iter(loader)
    batch = next(iterator)
    del loader, iterator
    gc.collect()
    numbers_of(batch)  # the batch is still the caller's


def test_a_source_closed_under_a_running_epoch_gives_right_batches_or_an_error(path, make):
    with closing(H5Source(path)) as source:
        loader = make(source)
        for _ in range(20):
            with suppress_closed():
                for batch in loader:
                    source.close()
                    numbers_of(batch)


# Resume --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"batch_size": 3},
        {"batch_size": 47},
        {"num_slots": 5},
        {"seed": 9},
        {"shuffle": None},
    ],
    ids=str,
)
@pytest.mark.parametrize("shuffle", ["full", "window:8", None])
def test_a_resume_goes_on_exactly_at_every_step(make, shuffle, other):
    def make_one(**options: Any) -> H5Loader:
        return make(**{"batch_size": 10, "shuffle": shuffle, "seed": 4, **options})

    check_resume(make_one, other=other, field="n", num_samples=NUM_SAMPLES)


@settings(max_examples=25)
@given(st.data())
def test_a_resume_goes_on_exactly_with_other_numbers_of_ranks(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("resume") / "data.h5"
    num_samples = data.draw(st.integers(4, 60), "num_samples")
    with h5py.File(path, "w") as h5_file:
        h5_file["n"] = np.arange(num_samples)
    order = FullShuffle().permutation(num_samples, 0, 0).tolist()
    used: list[int] = []
    state = None
    while len(used) < num_samples:
        world_size = data.draw(st.integers(1, min(4, num_samples - len(used))), "world_size")
        batch_size = data.draw(st.integers(1, num_samples // world_size), "batch_size")
        loaders = [H5Loader(path, batch_size, rank=rank, world_size=world_size) for rank in range(world_size)]
        if state is not None:
            for loader in loaders:
                loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders]
        steps = len(loaders[0]) - loaders[0].position.steps_done
        for _ in range(data.draw(st.integers(1, steps), "steps")):
            used += [number for iterator in iterators for number in next(iterator)["n"].tolist()]
        states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
        assert all(one == states[0] for one in states)  # any rank may save it
        state = states[0]
        for loader in loaders:
            loader.close()
    assert used == order


def test_a_state_may_be_loaded_after_the_iteration_was_asked_for(make):
    # Lightning asks for the iterator first and loads the state afterwards.
    loader = make()
    iterator = iter(loader)
    used = [numbers_of(next(iterator)) for _ in range(3)]
    resumed = make()
    later = iter(resumed)
    resumed.load_state_dict(loader.state_dict())
    assert joined(used) + joined(numbers_of(batch) for batch in later) == consumed(make(), "n")


def test_what_was_read_ahead_is_not_counted_as_used(make):
    loader = make(num_slots=5)
    iterator = iter(loader)
    next(iterator)
    assert loader.state_dict()["samples_consumed"] == 5


def test_a_resume_keeps_the_position_when_the_same_epoch_is_set(make):
    loader = make()
    iterator = iter(loader)
    next(iterator)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(0)
    assert len(list(resumed)) == 9


def test_a_resume_with_drop_last_leaves_out_the_same_rest(make):
    loader = make(drop_last=True, batch_size=10)
    whole = consumed(loader, "n")
    loader.set_epoch(0)
    iterator = iter(loader)
    next(iterator)
    resumed = make(drop_last=True, batch_size=10)
    resumed.load_state_dict(loader.state_dict())
    assert consumed(resumed, "n") == whole[10:]
    assert len(consumed(resumed, "n")) == 40


def test_a_rest_too_small_for_the_ranks_is_left_out_with_a_warning(make):
    loader = make(batch_size=45)
    next(iter(loader))
    resumed = make(rank=1, world_size=3)
    resumed.load_state_dict(loader.state_dict())
    resumed.set_epoch(0)
    message = (
        "the rest of this epoch, 2 sample(s), is less than one for each of the 3 ranks and is left out. It was begun "
        "with fewer ranks."
    )
    with pytest.warns(UserWarning, match=exactly(message)):
        assert list(resumed) == []
    assert len(list(resumed)) == 3


def test_a_state_holds_plain_numbers_and_text(make):
    loader = make(shuffle="window:8", seed=3)
    next(iter(loader))
    state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    digest = state.pop("digest")
    assert len(digest) == 16
    assert state == {
        "version": 1,
        "num_samples": NUM_SAMPLES,
        "seed": 3,
        "shuffle": "window:8",
        "window": {"chunks": state["window"]["chunks"], "num_lanes": 1, "lane_samples": 1},
        "step_samples": 5,
        "epoch": 0,
        "samples_consumed": 5,
        "steps_done": 1,
    }


def test_a_state_of_the_same_data_stored_in_another_way_is_accepted(write, make):
    loader = make()
    iterator = iter(loader)
    next(iterator)
    copy = write("copy.h5", chunks=(8, 3, 6, 6))
    resumed = make(copy)
    resumed.load_state_dict(loader.state_dict())
    assert consumed(resumed, "n") == joined(numbers_of(batch) for batch in iterator)


@pytest.mark.parametrize(
    "options", [{"num_samples": 46}, {"first": 1}, {"indices": range(47)}, {"indices": range(46, -1, -1)}], ids=str
)
def test_a_state_of_other_data_is_refused(write, make, options):
    loader = make()
    next(iter(loader))
    indices = options.pop("indices", None)
    other = make(write("other.h5", **options), indices=None if indices is None else list(indices))
    state = loader.state_dict()
    with pytest.raises(FeedError) as error:
        other.load_state_dict(state)
    assert str(error.value) == (
        f"the position was saved over 47 samples (digest {state['digest']}), but {other.source.paths[0]} gives "
        f"{other.num_samples} (digest {other.state_dict()['digest']}): the order cannot be continued over other data. "
        f"Use the same files and split, or start without the loader's state."
    )


def test_a_state_of_other_chosen_samples_is_refused(make):
    loader = make(indices=list(range(20)))
    next(iter(loader))
    with pytest.raises(FeedError, match="the order cannot be continued over other data"):
        make(indices=list(range(20, 40))).load_state_dict(loader.state_dict())
    make(indices=np.arange(20, dtype=np.uint8)).load_state_dict(loader.state_dict())


@pytest.mark.parametrize("state", [{}, {"version": 2}, {"_snapshot": {}, "_steps_since_snapshot": 3}], ids=str)
def test_a_state_of_another_kind_is_refused(make, state):
    message = f"the loader state has version {state.get('version')!r}; expected 1. Was it saved by another loader?"
    with pytest.raises(ValueError, match=exactly(message)):
        make().load_state_dict(state)


# Batches stay what they were -----------------------------------------------------------------------------


KEEP = {
    "the batch": lambda batch: batch,
    "one field": lambda batch: {"x": batch["x"]},
    "a row": lambda batch: {"x": batch["x"][1:2]},
    "a transposed view": lambda batch: {"x": batch["x"].permute(0, 2, 3, 1)[..., :1]},
    "a numpy array": lambda batch: {"x": batch["x"].numpy()},
    "a part of a numpy array": lambda batch: {"x": batch["x"].numpy()[1:, :, 2]},
    "by way of dlpack": lambda batch: {"x": torch.from_dlpack(batch["x"])},
    "the storage": lambda batch: {"x": torch.empty(0, dtype=torch.uint8).set_(batch["x"].untyped_storage())},
}


@pytest.mark.parametrize("keep", KEEP.values(), ids=KEEP.keys())
def test_a_batch_of_which_anything_is_held_is_never_overwritten(make, keep):
    loader = make(num_slots=1)
    held, expected = [], []
    for _ in range(2):
        for batch in loader:
            part = keep(batch)
            held.append(part)
            expected.append(torch.as_tensor(part["x"]).clone())
            del batch, part
    for part, values in zip(held, expected, strict=True):
        assert torch.equal(torch.as_tensor(part["x"]), values)


def test_a_batch_that_was_changed_in_place_does_not_change_the_file_or_the_next_epoch(path, make):
    before = path.read_bytes()
    loader = make()
    for batch in loader:
        for tensor in batch.values():
            tensor.fill_(0)
    assert sorted(joined(numbers_of(batch) for batch in loader)) == list(range(NUM_SAMPLES))
    assert path.read_bytes() == before


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_buffers_are_used_again(make, num_slots):
    loader = make(num_slots=num_slots, batch_size=4)
    places = set()
    for _ in range(5):
        for batch in loader:
            places.add(batch["x"].data_ptr())
    # The ring, the batch in the caller's hands, and the one before it, which is dropped only after the next is taken.
    assert len(places) <= num_slots + 2


def test_all_fields_of_a_batch_lie_at_aligned_places(make):
    for batch in make():
        assert [tensor.data_ptr() % 64 for tensor in batch.values()] == [0, 0]


# Arguments and warnings ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; expected at least 1."),
        ({"rank": 2, "world_size": 2}, "rank is 2; expected 0 to 1 for world_size 2."),
        ({"rank": -1}, "rank is -1; expected 0 to 0 for world_size 1."),
        ({"num_slots": 0}, "num_slots is 0; expected at least 1."),
        ({"seed": -1}, "seed is -1; expected 0 to 4294967295."),
        ({"seed": 2**32}, "seed is 4294967296; expected 0 to 4294967295."),
        (
            {"shuffle": "random"},
            "shuffle='random' is not understood; expected 'full', 'window', 'window:N' (N samples) or None.",
        ),
        (
            {"batch_size": 48, "drop_last": True},
            "drop_last leaves no step: the dataset has 47 samples and one step takes 48 (batch_size 48 x 1 ranks). "
            "Make batch_size smaller, or leave drop_last off.",
        ),
        (
            {"world_size": 48},
            "47 samples cannot be shared by 48 ranks without repeating one. Use fewer ranks, or more samples.",
        ),
        ({"indices": [0, 47]}, "indices run from 0 to 47; expected 0 to 46, the samples in the file(s)."),
        ({"indices": [-1, 3]}, "indices run from -1 to 3; expected 0 to 46, the samples in the file(s)."),
        ({"indices": []}, "indices has shape (0,) and type float64; expected a 1-D array of integers."),
        ({"indices": np.array([], int)}, "indices is empty; expected at least one sample."),
        ({"indices": [[1, 2]]}, "indices has shape (1, 2) and type int64; expected a 1-D array of integers."),
        ({"indices": [True] * 47}, "indices has shape (47,) and type bool; expected a 1-D array of integers."),
    ],
    ids=lambda value: str(value)[:60],
)
def test_arguments_out_of_range_are_refused(path, options, message):
    with pytest.raises(ValueError, match=exactly(message)):
        H5Loader(path, **{"batch_size": 5, **options})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to pin memory for")
def test_pinned_memory_needs_a_gpu(path):
    message = "pin_memory=True, but torch finds no GPU to pin memory for; leave it at None."
    with pytest.raises(ValueError, match=exactly(message)):
        H5Loader(path, 5, pin_memory=True)


def warnings_of(action: Callable[[], Any]) -> list[tuple[str, str]]:
    """Text and place of the warnings that an action gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [(str(warning.message), warning.filename) for warning in caught]


@pytest.mark.parametrize(("batch_size", "world_size"), [(48, 1), (24, 2)])
def test_a_batch_larger_than_the_dataset_is_warned_of_where_the_loader_is_made(path, batch_size, world_size):
    [(text, place)] = warnings_of(lambda: H5Loader(path, batch_size, world_size=world_size))
    assert text == (
        f"batch_size {batch_size} on {world_size} rank(s) is more than the dataset has (47 samples): every epoch is "
        f"one smaller batch."
    )
    assert place == __file__


def test_a_batch_larger_than_the_dataset_is_all_of_it(path):
    with pytest.warns(UserWarning, match="every epoch is one smaller batch"), H5Loader(path, 1000) as loader:
        assert [len(batch["n"]) for batch in loader] == [NUM_SAMPLES]


def test_a_full_shuffle_of_compressed_data_is_warned_of(write):
    path = write("packed.h5", **STORED["compressed"])
    source = H5Source(path, cache_bytes=0)  # larger than what is kept whole
    [(text, place)] = warnings_of(lambda: H5Loader(source, 5))
    assert text == (
        "a full shuffle decodes a whole chunk for nearly every sample of this file (n: read once and kept in memory; "
        "x: chunks (chunks pass through gzip and are decoded by several threads)). Use shuffle='window', or make the "
        f"file fast once with: gpufeed repack {path} OUT.h5"
    )
    assert place == __file__


@pytest.mark.parametrize(
    ("stored", "options"),
    [
        ("compressed", {"shuffle": "window"}),
        ("compressed", {"shuffle": "full"}),
        ("compressed", {"shuffle": None}),
        ("compressed", {"keys": ["n"]}),
        ("chunks", {}),
        ("one block", {"batch_size": 47}),
    ],
)
def test_nothing_is_warned_of_without_need(write, stored, options):
    path = write("quiet.h5", **STORED[stored])
    assert warnings_of(lambda: H5Loader(path, **{"batch_size": 5, **options})) == []


def test_a_missing_file_is_missing_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.h5"):
        H5Loader(tmp_path / "gone.h5", 5)


# Files that change ---------------------------------------------------------------------------------------


def rewrite(path: Path) -> None:
    with h5py.File(path, "r+") as h5_file:
        h5_file["n"][0] = 5
    os.utime(path, ns=(path.stat().st_mtime_ns + 1,) * 2)


def append(path: Path) -> None:
    with h5py.File(path, "a") as h5_file:
        h5_file["more"] = np.zeros(1000)


def replace(path: Path) -> None:
    path.with_name("other").write_bytes(path.read_bytes())
    path.with_name("other").rename(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (rewrite, "was written to"),
        (append, "changed its size from"),
        (replace, "was replaced by another file"),
        (Path.unlink, "is gone"),
        (lambda path: os.truncate(path, 3000), "changed its size from"),
    ],
    ids=["rewritten", "appended", "replaced", "deleted", "truncated"],
)
@pytest.mark.parametrize("stored", ["one block", "compressed"])
def test_a_file_that_changes_between_epochs_is_noticed_when_the_next_begins(write, make, stored, change, words):
    path = write("changing.h5", **STORED[stored])
    loader = make(path, shuffle="window")
    consumed(loader, "n")
    # A reader holds the file open, and HDF5 would not let a writer in.
    loader.source.close()
    change(path)
    for _ in range(2):  # however often one tries
        with pytest.raises(FeedError) as error:
            next(iter(loader))
        assert str(error.value).startswith(f"{path} {words}")
        assert str(error.value).endswith(
            "since it was opened, so its samples may lie elsewhere now. Build the loader or DataModule again to use "
            "the new file."
        )


@pytest.mark.parametrize("change", [replace, Path.unlink], ids=["replaced", "deleted"])
@pytest.mark.parametrize("stored", ["one block", "compressed"])
def test_a_file_that_is_replaced_or_deleted_during_an_epoch_is_read_to_its_end(write, make, stored, change):
    path = write("changing.h5", **STORED[stored])
    loader = make(path, shuffle="window", num_slots=1)
    iterator = iter(loader)
    found = numbers_of(next(iterator))
    change(path)
    found += joined(numbers_of(batch) for batch in iterator)
    assert sorted(found) == list(range(NUM_SAMPLES))
    with pytest.raises(FeedError):
        next(iter(loader))


# Other processes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_running", [False, True])
def test_a_loader_can_be_pickled_whatever_it_is_doing(make, is_running):
    loader = make(seed=2)
    if is_running:
        iterator = iter(loader)
        next(iterator)
    copy = pickle.loads(pickle.dumps(loader))
    copy.set_epoch(0)
    loader.set_epoch(0)
    assert consumed(copy, "n") == consumed(loader, "n")
    copy.close()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_loader_sent_to_another_process_reads_the_same_there(make, method):
    loader = make(seed=2)
    next(iter(loader))
    loader.set_epoch(3)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        there = pool.submit(consumed, loader, "n").result(timeout=60)
    assert consumed(loader, "n") == there


PROCESS_SETUP = """
import os, re, time
import h5py, numpy as np, torch
from lightning_gpufeed.hdf5.loader import H5Loader
torch.set_num_threads(1)
os.chdir({folder!r})

def write(name, **options):
    with h5py.File(name, "w") as h5_file:
        h5_file.create_dataset("x", data=np.ones((64, 1 << 20), options.pop("dtype", "u1")), **options)

def anonymous_bytes():
    text = open("/proc/self/status").read()
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", text)[1]) * 1024

def wait_until(is_so):  # without end: a case that hangs is killed
    while not is_so():
        time.sleep(0.001)
"""

PROCESS_CASES = {
    # 64 MiB in batches of 2 MiB.
    "memory": """
write("a.h5")
loader = H5Loader("a.h5", 2, num_slots=3)
start = anonymous_bytes()
ends = []
for epoch in range(5):
    for batch in loader:
        pass
    ends.append(anonymous_bytes() - start)
print(*ends)
""",
    "memory, compressed": """
write("b.h5", chunks=(1, 1 << 20), compression="gzip", compression_opts=1)
loader = H5Loader("b.h5", 2, num_slots=3, shuffle="window:4")
loader.source._cache_bytes = 8 << 20
start = anonymous_bytes()
ends = []
for epoch in range(5):
    for batch in loader:
        pass
    ends.append(anonymous_bytes() - start)
print(*ends)
""",
    # Cut in the middle of a copy, the file would end the process. With one slot, none is under way while a batch is
    # ready.
    "truncated": """
write("c.h5")
loader = H5Loader("c.h5", 2, num_slots=1, shuffle=None)
iterator = iter(loader)
next(iterator)
wait_until(loader.is_ready)
os.truncate("c.h5", 1 << 20)
for batch in iterator:
    assert (batch["x"] == 1).all()
""",
    "truncated, through HDF5": """
write("d.h5", dtype=">i2")
loader = H5Loader("d.h5", 2, num_slots=1, shuffle=None)
iterator = iter(loader)
next(iterator)
wait_until(loader.is_ready)
os.truncate("d.h5", 1 << 20)
for batch in iterator:
    assert (batch["x"] == 1).all()
""",
    "end of the program": """
write("e.h5")
loader = H5Loader("e.h5", 2, num_slots=3)
iterator = iter(loader)
next(iterator)
""",
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return run_forked(PROCESS_SETUP.format(folder=str(tmp_path_factory.mktemp("processes"))), PROCESS_CASES)


BUFFERS = 5 * (3 << 20)  # of 3 rows of 1 MiB: the ring of 3 and the two in the caller's hands
OVERHEAD = 4 << 20  # the thread's stack and heap, and what Python itself takes


@pytest.mark.parametrize(
    ("case", "bound", "drift"),
    [
        ("memory", BUFFERS + OVERHEAD, 4 << 20),
        # The cache besides, and HDF5 keeps a chunk as it is stored and as it is decoded, on the heap of each thread.
        ("memory, compressed", BUFFERS + (8 << 20) + 2 * OVERHEAD, 8 << 20),
    ],
)
def test_memory_is_bounded_by_the_ring_and_flat_over_epochs(ended, case, bound, drift):
    assert ended[case].code == 0, ended[case].text
    grown = [int(number) for number in ended[case].text.split()]
    assert max(grown) < bound < 64 << 20  # the file has 64 MiB
    # One of the first two may have done with a buffer less, or with less of the heap.
    assert grown[4] - max(grown[:2]) < drift


@pytest.mark.parametrize("case", ["truncated", "truncated, through HDF5"])
def test_a_file_cut_during_an_epoch_is_an_error_in_the_loop_and_not_a_dead_process(ended, case):
    assert ended[case].code == 1, ended[case]
    assert ended[case].last_line.startswith("lightning_gpufeed.errors.FeedError: "), ended[case].text
    assert "Write new data to another file and rename it" in ended[case].last_line


def test_a_program_ends_beside_a_running_epoch(ended):
    assert (ended["end of the program"].code, ended["end of the program"].text) == (0, "")


def test_batches_copied_ahead_are_those_in_host_memory(write):
    path = write("ahead.h5", **STORED["chunks"])
    with H5Loader(path, 5) as host, H5Loader(path, 5, device="cpu") as ahead:
        for one, other in zip(host, ahead, strict=True):
            assert list(one) == list(other)
            assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("stored", ["chunks", "compressed"])
def test_a_process_of_its_own_reads_the_same_batches(write, stored):
    path = write("isolated.h5", **STORED[stored])
    with (
        H5Loader(path, 5, seed=4, shuffle="window:8") as here,
        H5Loader(path, 5, seed=4, shuffle="window:8", isolate=True) as there,
    ):
        for _ in range(2):
            for one, other in zip(here, there, strict=True):
                assert list(one) == list(other)
                assert all(torch.equal(one[name], other[name]) for name in one)
        iterator = iter(there)
        next(iterator)
        state = there.state_dict()
        rest = [numbers_of(batch) for batch in iterator]
        there.load_state_dict(state)
        assert [numbers_of(batch) for batch in there] == rest


def test_draws_of_a_window_over_a_shuffled_subset_read_each_chunk_once(write):
    source = H5Source(write("draws.h5", **STORED["compressed"]), ["x"], cache_bytes=0)
    chosen = np.random.default_rng(0).permutation(NUM_SAMPLES)
    with H5Loader(source, 5, shuffle="window:9", indices=chosen, weights=np.ones(NUM_SAMPLES)) as loader:
        list(loader)
    assert source._readers["x"].num_block_reads <= len(np.unique(source.blocks(np.arange(NUM_SAMPLES))))
    source.close()


def test_a_resumed_epoch_keeps_its_lanes_and_the_next_has_those_of_todays_ranks(write):
    path = write("lanes.h5", **STORED["chunks"])
    with H5Loader(path, 4, shuffle="window:9") as alone:
        iterator = iter(alone)
        next(iterator)
        state = alone.state_dict()
        with H5Loader(path, 4, shuffle="window:9", world_size=2, rank=0) as resumed:
            fresh = resumed.order(1).tolist()
            resumed.load_state_dict(state)
            assert resumed.order(0).tolist() == alone.order(0).tolist()
            assert resumed.order(1).tolist() == fresh != alone.order(1).tolist()


def test_what_was_open_in_the_parent_is_let_go_of_in_a_forked_process(write):
    path = write("forked.h5", **STORED["compressed"])
    with H5Loader(H5Source(path, ["x"], cache_bytes=0), 3, shuffle="window:9") as loader:
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
            process = os.fork()
            if not process:
                with contextlib.suppress(BaseException):
                    loader.source.close()
                    loader.close()
                    os._exit(0)
                os._exit(1)
            assert os.waitpid(process, 0)[1] == 0
        loader.source.close()
