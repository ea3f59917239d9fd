"""What every implementation of an engine has to hold, stated once and used by the tests of each.

A check takes the implementation and what it must agree with, and fails with the case that it does not hold in.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.hdf5.loader import H5Loader
from lightning_gpufeed.hdf5.order import EpochPlan, NoShuffle, Shuffle, parse_shuffle
from lightning_gpufeed.hdf5.readers.reader import FieldReader

GARBAGE = 0xA5
"""What memory holds before a reader writes to it, so that a byte left out shows."""


def as_bytes(values: torch.Tensor | npt.NDArray[Any]) -> bytes:
    """The values in memory order: equal bytes are equal values, NaN and minus zero too."""
    array = values.numpy() if isinstance(values, torch.Tensor) else values
    return np.ascontiguousarray(array).tobytes()


def exactly(message: str) -> str:
    """A pattern for `pytest.raises(match=...)` that the whole message has to be."""
    return rf"\A{re.escape(message)}\Z"


def joined(parts: Iterable[list[int]]) -> list[int]:
    """The parts one after the other."""
    return list(itertools.chain.from_iterable(parts))


def index_cases(num_samples: int, seed: int = 0) -> dict[str, npt.NDArray[np.int64]]:
    """Orders in which somebody may want samples."""
    random = np.random.default_rng(seed)
    every = np.arange(num_samples)
    return {
        "all in order": every,
        "all backwards": every[::-1].copy(),
        "a permutation": random.permutation(num_samples),
        "with repeats": random.integers(0, num_samples, 2 * num_samples),
        "one sample three times": np.full(3, num_samples - 1),
        "the first alone": every[:1],
        "the last alone": every[-1:],
        "none": every[:0],
    }


def check_reader(reader: FieldReader, expected: npt.NDArray[Any]) -> None:
    """A reader copies exactly the samples asked for, in the order asked for, and nothing beside them.

    Args:
        reader: An open reader.
        expected: (num_samples, *sample_shape): every sample, of native byte order.
    """
    dtype = torch.from_numpy(np.empty(0, expected.dtype)).dtype
    sample_shape = expected.shape[1:]
    for case, indices in index_cases(len(expected)).items():
        # The reader gets the middle of a larger tensor: what lies around it must stay.
        num_bytes = (len(indices) + 2) * int(np.prod(sample_shape, dtype=int)) * expected.itemsize
        memory = torch.full((num_bytes,), GARBAGE, dtype=torch.uint8)
        around = memory.view(dtype).view(len(indices) + 2, *sample_shape)
        before = as_bytes(memory)
        reader.read_into(indices, around[1:-1])
        assert as_bytes(around[1:-1]) == as_bytes(expected[indices]), case
        edge = num_bytes // (len(indices) + 2)
        assert as_bytes(memory)[:edge] == before[:edge], case
        assert edge == 0 or as_bytes(memory)[-edge:] == before[-edge:], case


def check_shuffle(shuffle: Shuffle) -> None:
    """A shuffle is a permutation, a function of its three arguments alone, and has a text form.

    Args:
        shuffle: Any value of `lightning_gpufeed.hdf5.order`.
    """
    for num_samples in (1, 2, 3, 64, 1000):
        order = shuffle.permutation(num_samples, 5, 2)
        assert order.dtype == np.int64
        assert sorted(order.tolist()) == list(range(num_samples))
        np.random.seed(num_samples)  # the global generators have no say
        torch.manual_seed(num_samples)
        np.testing.assert_array_equal(shuffle.permutation(num_samples, 5, 2), order)
    is_shuffled = not isinstance(shuffle, NoShuffle)
    for seed, epoch in [(5, 3), (6, 2), (2, 5), (0, 0)]:
        assert np.array_equal(shuffle.permutation(1000, seed, epoch), order) != is_shuffled
    assert parse_shuffle(str(shuffle)) == shuffle


def check_epoch_plan(plan: EpochPlan) -> None:
    """All ranks together take every position exactly once, in order, in the same number of steps.

    Args:
        plan: Any plan.
    """
    end = plan.start
    for step in range(plan.num_steps):
        first, stop = plan.bounds(step)
        assert first == end
        parts = [plan.rank_bounds(step, rank) for rank in range(plan.world_size)]
        assert [part[0] for part in parts] == [first, *(part[1] for part in parts[:-1])]
        assert parts[-1][1] == stop
        sizes = [last - begin for begin, last in parts]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) >= 1
        assert max(sizes) <= plan.most_rows
        is_last = step == plan.num_steps - 1
        assert is_last or set(sizes) == {plan.batch_size}
        assert max(sizes) <= plan.batch_size + (1 if is_last else 0)
        end = stop
    assert plan.num_left_out == plan.num_samples - end
    remaining = plan.num_samples - plan.start
    if plan.drop_last:
        assert plan.num_left_out == remaining % plan.step_samples
    elif remaining >= plan.world_size:
        assert plan.num_left_out == 0
    else:
        assert plan.num_steps == 0


def check_division(pool: npt.NDArray[np.int64], taken: npt.NDArray[np.int64], rest: npt.NDArray[np.int64]) -> None:
    """Two parts together are the whole, none of them empty, the rest in the order of the pool.

    Args:
        pool: What was divided.
        taken: One part.
        rest: The other.
    """
    assert len(taken)
    assert sorted([*taken.tolist(), *rest.tolist()]) == sorted(pool.tolist())
    in_taken = set(taken.tolist())
    assert rest.tolist() == [sample for sample in pool.tolist() if sample not in in_taken]


def check_resume(make: Callable[..., H5Loader], *, other: Mapping[str, Any], field: str, num_samples: int) -> None:
    """From every position of two epochs a new loader hands out exactly what the old one had left, in its order.

    Args:
        make: Makes a loader of one rank; called with the arguments of `other` for the one that resumes.
        other: Arguments that differ after the resume, such as the batch size.
        field: Field that holds the number of the sample.
        num_samples: Samples in an epoch.
    """
    with make() as loader:
        epochs = [consumed(loader, field) for _ in range(3)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(num_samples))] * 3
    with make() as loader:
        for epoch in range(2):
            used = 0
            for batch in loader:
                used += len(batch[field])
                with make(**other) as resumed:
                    resumed.load_state_dict(loader.state_dict())
                    num_left = len(resumed) - resumed.position.steps_done
                    batches = [batch[field].tolist() for batch in resumed]
                    # An epoch that is used up is followed by the next.
                    assert joined(batches) == (epochs[epoch][used:] or epochs[epoch + 1]), (epoch, used)
                    assert num_left == (len(batches) if used < num_samples else 0)


def consumed(loader: H5Loader, field: str) -> list[int]:
    """One epoch of a loader, as the numbers its field holds.

    Args:
        loader: Iterated to the end of the epoch.
        field: A field of one integer per sample.

    Returns:
        The numbers in the order handed out.
    """
    return [int(number) for batch in loader for number in batch[field].reshape(-1)]
