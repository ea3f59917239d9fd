"""A loader that draws by weight: the same draws whatever the ranks and batch sizes, resumed exactly or not at all."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from lightning_gpufeed.errors import FeedError
from lightning_gpufeed.hdf5.draws import make_shuffle, resume_shuffle
from lightning_gpufeed.hdf5.loader import H5Loader
from lightning_gpufeed.hdf5.order import FullShuffle, NoShuffle, WeightedShuffle, WindowShuffle
from tests.contracts import consumed, exactly, joined

NUM_SAMPLES = 30
WEIGHTS = np.arange(NUM_SAMPLES) % 7 + np.arange(NUM_SAMPLES) / 10

pytestmark = pytest.mark.filterwarnings("ignore:batch_size .* is more than the dataset has:UserWarning")


def write(path: Path, numbers: Any, **options: Any) -> Path:
    """Images whose every pixel is the number of the sample."""
    images = np.broadcast_to(np.asarray(numbers, np.uint8)[:, None, None], (len(numbers), 9, 9))
    with h5py.File(path, "w") as h5_file:
        h5_file.create_dataset("x", data=images, **options)
        h5_file["n"] = numbers
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("draws") / "data.h5", np.arange(NUM_SAMPLES), chunks=(4, 9, 9))


@pytest.fixture
def make(path: Path) -> Iterator[Callable[..., H5Loader]]:
    loaders: list[H5Loader] = []

    def make(source: Any = path, **options: Any) -> H5Loader:
        loaders.append(H5Loader(source, **{"batch_size": 4, "weights": WEIGHTS, **options}))
        return loaders[-1]

    yield make
    for loader in loaders:
        loader.close()


def steps_of(loader: H5Loader) -> list[list[int]]:
    """The samples of each batch; both fields have to tell the same."""
    steps = []
    for batch in loader:
        steps.append(batch["n"].tolist())
        assert batch["x"][:, 3, 5].tolist() == steps[-1]
    return steps


def test_an_epoch_is_the_draws_of_its_shuffle_and_each_epoch_has_others(make):
    loader = make(seed=5)
    assert len(loader) == 8
    epochs = [joined(steps_of(loader)) for _ in range(2)]
    shuffle = WeightedShuffle(WEIGHTS)
    assert epochs == [shuffle.permutation(NUM_SAMPLES, 5, epoch).tolist() for epoch in range(2)]
    assert 0 not in epochs[0]  # its weight is 0


@pytest.mark.parametrize("samples_per_epoch", [1, 11, 200])
def test_an_epoch_has_as_many_draws_as_asked_for(make, samples_per_epoch):
    loader = make(samples_per_epoch=samples_per_epoch)
    assert loader.num_samples == samples_per_epoch
    steps = steps_of(loader)
    assert len(steps) == len(loader) == -(-samples_per_epoch // 4)
    assert joined(steps) == WeightedShuffle(WEIGHTS).permutation(samples_per_epoch, 0, 0).tolist()


def test_what_does_not_fill_a_step_is_left_out_if_asked(make):
    steps = steps_of(make(samples_per_epoch=11, drop_last=True))
    assert joined(steps) == WeightedShuffle(WEIGHTS).permutation(11, 0, 0)[:8].tolist()


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("samples_per_epoch", [None, 9, 40])
def test_all_ranks_together_use_exactly_the_draws_of_one_process(make, world_size, samples_per_epoch):
    ranks = [
        steps_of(make(rank=rank, world_size=world_size, samples_per_epoch=samples_per_epoch, seed=3))
        for rank in range(world_size)
    ]
    steps = zip(*ranks, strict=True)  # the same number of them on every rank
    together = joined(joined(step) for step in steps)
    assert together == joined(steps_of(make(samples_per_epoch=samples_per_epoch, seed=3)))


@pytest.mark.parametrize("shuffle", ["full", "window:5", None])
@pytest.mark.parametrize("other", [{}, {"batch_size": 7}, {"shuffle": "window:9", "seed": 8}], ids=str)
def test_a_resumed_epoch_goes_on_with_the_draws_that_were_left(make, shuffle, other):
    whole = [joined(steps_of(loader)) for loader in [make(shuffle=shuffle, seed=2)] for _ in range(2)]
    loader = make(shuffle=shuffle, seed=2)
    used = 0
    for batch in loader:
        used += len(batch["n"])
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = make(**{"shuffle": shuffle, "seed": 2, **other})
        resumed.load_state_dict(state)
        assert joined(steps_of(resumed)) == (whole[0][used:] or whole[1])


def test_a_resume_with_other_ranks_goes_on_with_the_draws_that_were_left(make):
    whole = joined(steps_of(make(samples_per_epoch=50)))
    loaders = [make(samples_per_epoch=50, rank=rank, world_size=2) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    used = joined(next(iterator)["n"].tolist() for _ in range(3) for iterator in iterators)
    assert loaders[0].state_dict() == loaders[1].state_dict()
    rest = []
    for rank in range(3):
        resumed = make(samples_per_epoch=50, rank=rank, world_size=3)
        resumed.load_state_dict(loaders[0].state_dict())
        rest.append(steps_of(resumed))
    assert used + joined(joined(step) for step in zip(*rest, strict=True)) == whole


def test_only_samples_chosen_are_drawn_each_by_its_own_weight(make):
    indices = np.array([20, 3, 11, 5])
    drawn = consumed(make(indices=indices, samples_per_epoch=500), "n")
    assert drawn == indices[WeightedShuffle(WEIGHTS[indices]).permutation(500, 0, 0)].tolist()
    counts = np.array([drawn.count(number) for number in indices])
    expected = 500 * WEIGHTS[indices] / WEIGHTS[indices].sum()
    assert (np.abs(counts - expected) <= 5 * np.sqrt(expected)).all()
    assert len(consumed(make(indices=indices), "n")) == 4


def test_in_a_window_the_draws_go_along_the_file(make, tmp_path):
    packed = write(tmp_path / "gzip.h5", np.arange(NUM_SAMPLES), chunks=(4, 9, 9), compression="gzip")
    drawn = joined(steps_of(make(packed, shuffle="window:6", samples_per_epoch=120)))
    assert sorted(drawn) == sorted(WeightedShuffle(WEIGHTS).permutation(120, 0, 0).tolist())
    places = np.argsort(np.argsort(drawn, kind="stable"), kind="stable")
    assert np.abs(places - np.arange(120)).max() < 6 + max(np.bincount(drawn))


def test_a_loader_with_weights_can_be_pickled(make):
    loader = make(seed=1)
    with pickle.loads(pickle.dumps(loader)) as sent:
        assert steps_of(sent) == steps_of(loader)


def test_several_files_are_drawn_from_as_one(make, tmp_path):
    paths = [write(tmp_path / f"{n}.h5", np.arange(10 * n, 10 * n + 10), chunks=(n + 1, 9, 9)) for n in range(3)]
    assert steps_of(make(paths)) == steps_of(make())


# Saved positions ---------------------------------------------------------------------------------------------


def refusal(loader: H5Loader, state: dict[str, Any]) -> str:
    before = loader.state_dict()
    with pytest.raises(FeedError) as error:
        loader.load_state_dict(state)
    assert loader.state_dict() == before  # nothing was taken over
    return str(error.value)


END = (
    ": the draws cannot be continued with others. Use the same weights over the same samples, or start without the "
    "loader's state."
)


def test_a_position_over_other_weights_is_refused(make):
    state = make().state_dict()
    digests = [WeightedShuffle(weights).digest for weights in (WEIGHTS, WEIGHTS**2)]
    assert refusal(make(weights=WEIGHTS**2), state) == (
        f"the position was saved with sampling weights of digest {digests[0]}, but this loader has weights of digest "
        f"{digests[1]}{END}"
    )
    assert refusal(make(weights=None), state) == (
        f"the position was saved with sampling weights of digest {digests[0]}, but this loader has none{END}"
    )
    assert refusal(make(), make(weights=None).state_dict()) == (
        f"the position was saved without sampling weights, but this loader has weights of digest {digests[0]}{END}"
    )


def test_a_position_in_an_epoch_of_another_length_is_refused(make):
    assert refusal(make(samples_per_epoch=50), make().state_dict()) == (
        "the position was saved in an epoch of 30 draws, but samples_per_epoch is 50 now. Use the same number, or "
        "start without the loader's state."
    )


def test_a_position_over_other_samples_of_the_same_weights_is_refused(make):
    options = {"weights": np.ones(NUM_SAMPLES)}
    state = make(indices=np.arange(10), **options).state_dict()
    assert "order cannot be continued over other data" in refusal(make(indices=np.arange(10, 20), **options), state)


def test_weights_in_another_unit_are_the_same_weights(make):
    loader = make(weights=WEIGHTS * 1024)
    loader.load_state_dict(make().state_dict())
    assert steps_of(loader) == steps_of(make())


def test_the_order_of_a_saved_position_is_taken_over_with_the_weights_at_hand():
    here = WeightedShuffle(WEIGHTS)
    state = {"shuffle": f"weighted:{here.digest}:window:12", "num_samples": 30}
    assert resume_shuffle(here, 30, state) == WeightedShuffle(WEIGHTS, WindowShuffle(12))
    assert resume_shuffle(NoShuffle(), 30, {"shuffle": "full", "num_samples": 30}) == FullShuffle()


@pytest.mark.parametrize("text", ["weighted", "weighted:", "random", "weighted:12:full"])
def test_a_saved_shuffle_of_no_known_form_is_refused(text):
    with pytest.raises(ValueError, match="is not understood; expected"):
        resume_shuffle(FullShuffle(), 30, {"shuffle": text, "num_samples": 30})


# Arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"weights": None, "samples_per_epoch": 5},
            "samples_per_epoch is 5, but there are no sampling weights: without them an epoch is every sample once. "
            "Give weights (all equal ones draw every sample alike), or leave it off.",
        ),
        ({"samples_per_epoch": 0}, "samples_per_epoch is 0; expected at least 1."),
        ({"samples_per_epoch": 2.5}, "samples_per_epoch is 2.5; expected a whole number."),
        (
            {"weights": [1.0] * 29},
            "there are 29 sampling weights; expected 30, one for each sample of the file(s).",
        ),
        (
            {"weights": [1.0], "indices": [4]},
            "there are 1 sampling weights; expected 30, one for each sample of the file(s), whether it is used or not.",
        ),
        ({"weights": [0] * 30}, "all 30 sampling weights are 0, so no sample can be drawn; expected one above 0."),
        (
            {"samples_per_epoch": 2, "world_size": 3},
            "2 samples cannot be shared by 3 ranks without repeating one. Use fewer ranks, or more samples.",
        ),
    ],
    ids=str,
)
def test_weights_a_loader_cannot_use_are_refused(make, options, message):
    with pytest.raises(ValueError, match=exactly(message)):
        make(**options)


def test_without_weights_a_shuffle_is_what_it_was():
    assert make_shuffle("window:3", None, None, 9, None) == (WindowShuffle(3), 9)
    assert make_shuffle(None, None, None, 9, np.array([1, 2])) == (NoShuffle(), 2)
