"""`BatchEcho` over every kind of batch and every kind of loader: nests, lists of samples, several loaders, workers."""

from __future__ import annotations

import multiprocessing
import threading
import types
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_gpufeed import BatchEcho
from tests.callbacks.echo_models import (
    Batches,
    EchoModel,
    Gate,
    StatefulBatches,
    Unsized,
    batch_of,
    echo,
    features,
    fit,
    gated_loader,
    numbered,
    plain_loader,
    wait_until,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:You defined a `validation_step` but have no `val_dataloader`:UserWarning"
)


def assert_echoed(steps: list[list[int]], batches: list[list[int]], factor: int, num_splits: int) -> None:
    """Every pass is a whole batch, in pieces as equal as possible."""
    steps = list(steps)
    for batch in batches:
        num_pieces = max(1, min(num_splits, len(batch)))
        for _ in range(factor):
            pieces, steps = steps[:num_pieces], steps[num_pieces:]
            assert sorted(sample for piece in pieces for sample in piece) == sorted(batch)
            assert max(map(len, pieces)) - min(map(len, pieces)) <= 1
    assert steps == []


IN_ORDER = [list(range(8)), list(range(8, 16)), list(range(16, 22))]


# Batches -----------------------------------------------------------------------------------------------------


Pair = namedtuple("Pair", ["inputs", "numbers"])


@dataclass
class Record:
    """A batch that is a dataclass, with something that belongs to the batch and not to a sample."""

    inputs: torch.Tensor
    numbers: torch.Tensor
    names: list[str]
    source: str = "file"
    scale: float = 0.5


@dataclass(frozen=True)
class Frozen:
    """One that cannot be written to."""

    inputs: torch.Tensor
    numbers: torch.Tensor


class Wrapped(OrderedDict[str, Any]):
    """A dict with an attribute, as `transformers.BatchEncoding` or a collate function of one's own has it."""

    note = ""


def wrapped(inputs: torch.Tensor, numbers: torch.Tensor) -> Wrapped:
    made = Wrapped(inputs=inputs, numbers=numbers)
    made.note = "kept"
    return made


def names_of(numbers: torch.Tensor) -> list[str]:
    return [f"sample {number}" for number in numbers.tolist()]


@dataclass(frozen=True)
class Kind:
    """How a batch is made of features and numbers, and taken apart again, with what else must hold of a piece."""

    make: Any
    unpack: Any
    holds: Any = lambda batch, numbers: True


KINDS: dict[str, Kind] = {
    "list": Kind(lambda x, n: [x, n], lambda b: b),
    "tuple": Kind(lambda x, n: (x, n), lambda b: b, lambda b, n: type(b) is tuple),
    "one tensor": Kind(lambda x, n: torch.cat([x, n[:, None]], 1), lambda b: (b[:, :5], b[:, 5])),
    "dict": Kind(
        lambda x, n: {"x": x, "n": n, "names": names_of(n), "epoch": 3, "weight": torch.tensor(2.0), "none": None},
        lambda b: (b["x"], b["n"]),
        lambda b, n: b["names"] == names_of(n) and b["epoch"] == 3 and b["weight"].item() == 2.0 and b["none"] is None,
    ),
    "nested dict": Kind(
        lambda x, n: {"inputs": {"left": x[:, :2], "right": {"x": x[:, 2:]}}, "meta": {"n": n, "names": names_of(n)}},
        lambda b: (torch.cat([b["inputs"]["left"], b["inputs"]["right"]["x"]], 1), b["meta"]["n"]),
        lambda b, n: b["meta"]["names"] == names_of(n),
    ),
    "dict in a tuple": Kind(
        lambda x, n: (x, {"n": n, "mask": n > 5}),
        lambda b: (b[0], b[1]["n"]),
        lambda b, n: torch.equal(b[1]["mask"], n > 5),
    ),
    "named tuple": Kind(Pair, lambda b: (b.inputs, b.numbers), lambda b, n: type(b) is Pair),
    "dataclass": Kind(
        lambda x, n: Record(x, n, names_of(n)),
        lambda b: (b.inputs, b.numbers),
        lambda b, n: b.names == names_of(n) and b.source == "file" and b.scale == 0.5,
    ),
    "frozen dataclass": Kind(Frozen, lambda b: (b.inputs, b.numbers), lambda b, n: type(b) is Frozen),
    "dict of its own type": Kind(
        wrapped, lambda b: (b["inputs"], b["numbers"]), lambda b, n: type(b) is Wrapped and b.note == "kept"
    ),
    "arrays beside tensors": Kind(
        lambda x, n: {"x": x, "n": n.numpy()},
        lambda b: (b["x"], torch.from_numpy(b["n"])),
        lambda b, n: isinstance(b["n"], np.ndarray),
    ),
    "strings beside a tensor": Kind(
        lambda x, n: (torch.cat([x, n[:, None]], 1), names_of(n)),
        lambda b: (b[0][:, :5], b[0][:, 5]),
        lambda b, n: list(b[1]) == names_of(n.long()),
    ),
    "a list of samples": Kind(
        lambda x, n: [(x[i], n[i], f"sample {n[i]}") for i in range(len(n))],
        lambda b: (torch.stack([x for x, _, _ in b]), torch.stack([n for _, n, _ in b])),
        lambda b, n: [name for _, _, name in b] == names_of(n),
    ),
    "a list of dicts": Kind(
        lambda x, n: [{"x": x[i], "n": n[i], "boxes": torch.zeros(int(n[i]) % 3, 4)} for i in range(len(n))],
        lambda b: (torch.stack([s["x"] for s in b]), torch.stack([s["n"] for s in b])),
        lambda b, n: [len(s["boxes"]) for s in b] == [int(i) % 3 for i in n],
    ),
    "lists of fields": Kind(
        lambda x, n: (list(x), [{"n": i, "boxes": torch.zeros(int(i) % 3, 4)} for i in n]),
        lambda b: (torch.stack(list(b[0])), torch.stack([target["n"] for target in b[1]])),
        lambda b, n: [len(target["boxes"]) for target in b[1]] == [int(i) % 3 for i in n],
    ),
}


class KindBatches(Batches):
    """Batches of a kind."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind

    def batch(self, number: int) -> Any:
        return self.kind.make(*super().batch(number))


class KindModel(EchoModel):
    """Trains on batches of a kind, and looks at all that is in a piece."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind

    def unpack(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kind.unpack(batch)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        # Lightning's own moving refuses frozen dataclasses, and loses attributes of a dict: a user moves these himself.
        if isinstance(batch, Frozen | Wrapped):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, numbers = self.unpack(batch)
        assert torch.equal(inputs, features(numbers.long()))
        assert self.kind.holds(batch, numbers)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("echo_factor", "num_splits"), [(2, 1), (2, 3), ("auto", 1), ("auto", 3)])
def test_every_kind_of_batch_is_cut_with_what_belongs_to_each_sample(name, echo_factor, num_splits):
    replay = {0: [2, 2, 2]} if echo_factor == "auto" else None
    model = KindModel(KINDS[name])
    fit(echo(echo_factor, num_splits=num_splits, replay=replay), KindBatches(KINDS[name]), model=model, max_epochs=1)
    assert_echoed(model.samples, IN_ORDER, 2, num_splits)


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bool, torch.int16, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
def test_every_type_of_number_is_cut_and_kept(dtype):
    class Typed(EchoModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert batch[2].dtype == dtype
            assert torch.equal(batch[2], (batch[1] % 2).to(dtype))
            return super().training_step(batch, batch_idx)

    class More(Batches):
        def batch(self, number: int) -> list[torch.Tensor]:
            inputs, numbers = super().batch(number)
            return [inputs, numbers, (numbers % 2).to(dtype)]

    model, _ = fit(echo(2, num_splits=3), More(), model=Typed(), max_epochs=1)
    assert_echoed(model.samples, IN_ORDER, 2, 3)


def test_images_keep_their_memory_format():
    class Images(Batches):
        def batch(self, number: int) -> list[torch.Tensor]:
            inputs, numbers = super().batch(number)
            images = numbers.float()[:, None, None, None].expand(-1, 3, 4, 4).contiguous()
            return [inputs, numbers, images.to(memory_format=torch.channels_last)]

    class Looking(EchoModel):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            assert batch[2].is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(batch[2][:, 0, 0, 0], batch[1].float())
            return super().training_step(batch, batch_idx)

    model, _ = fit(echo(2, num_splits=2), Images(), model=Looking(), max_epochs=1)
    assert len(model.steps) == 12


class Opaque:
    """A batch of somebody's own kind, that moves to a device by itself."""

    def __init__(self, inputs: torch.Tensor, numbers: torch.Tensor) -> None:
        self.inputs, self.numbers = inputs, numbers

    def to(self, device: Any, **_: Any) -> Opaque:
        """Move."""
        return Opaque(self.inputs.to(device), self.numbers.to(device))


OPAQUE = Kind(Opaque, lambda b: (b.inputs, b.numbers))


class Spoiling(KindModel):
    """Changes its batch in place after it was used."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        batch.inputs.zero_()


def test_a_batch_that_cannot_be_looked_into_is_echoed_whole_with_one_warning():
    model = Spoiling(OPAQUE)
    with pytest.warns(UserWarning, match=r"batches are echoed whole and in their own order, as .*Opaque") as caught:
        fit(echo(2), KindBatches(OPAQUE), model=model)
    assert len([warning for warning in caught if "echoed whole" in str(warning.message)]) == 1
    assert model.samples == [batch for batch in 2 * IN_ORDER for _ in range(2)]


def test_a_batch_that_cannot_be_looked_into_is_not_cut():
    with pytest.raises(ValueError, match=r"num_splits is 2, but the samples of a .*Opaque cannot be told apart"):
        fit(echo(2, num_splits=2), KindBatches(OPAQUE), model=KindModel(OPAQUE))


def test_tensors_of_different_lengths_are_not_cut_and_the_message_says_which():
    class Uneven(Batches):
        def batch(self, number: int) -> Any:
            inputs, numbers = super().batch(number)
            return {"x": inputs, "n": numbers[:-1]}

    with pytest.raises(ValueError, match=r"num_splits is 2, but the samples of this batch cannot be told apart") as e:
        fit(echo(2, num_splits=2), Uneven())
    assert "batch['x'] has shape (8, 5)" in str(e.value)
    assert "batch['n'] has shape (7,)" in str(e.value)


def test_a_hook_that_takes_samples_away_is_refused_where_pieces_get_empty():
    class Dropping(EchoModel):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [part[:2] for part in batch]

    with pytest.raises(ValueError, match=r"the batch has 2 samples on the device, but was to be cut into 3 pieces"):
        fit(echo(2, num_splits=3), model=Dropping())


class Doubling(EchoModel):
    """Gives two views of each sample, the second ones behind the first ones."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [torch.cat([part, part]) for part in batch]


def test_more_rows_than_a_batch_has_samples_are_not_torn_apart():
    # Rows i and i + 8 belong together here, which nobody can know.
    with pytest.raises(ValueError, match=r"num_splits is 2, but the samples of this batch cannot be told apart") as e:
        fit(echo(2, num_splits=2), model=Doubling())
    assert "counts the samples (batch_size 8)" in str(e.value)
    model = Doubling()
    with pytest.warns(UserWarning, match="batches are echoed whole and in their own order"):
        fit(echo(2), model=model, max_epochs=1)
    assert model.samples == [batch + batch for batch in IN_ORDER for _ in range(2)]


def test_a_hook_that_makes_another_structure_has_its_own_cut():
    class Restructuring(EchoModel):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return {"x": batch[0], "n": batch[1], "lambda": 0.5}

        def unpack(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            assert batch["lambda"] == 0.5
            return batch["x"], batch["n"]

    model, _ = fit(echo(2, num_splits=2), model=Restructuring(), max_epochs=1)
    assert_echoed(model.samples, IN_ORDER, 2, 2)


@pytest.mark.filterwarnings("ignore:train_dataloader yielded None:UserWarning")
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_loader_that_gives_no_batch_at_a_place_goes_on_with_the_next(num_splits):
    class Gaps(Batches):
        def batch(self, number: int) -> Any:
            return None if number == 1 else super().batch(number)

    model, trainer = fit(echo(2, num_splits=num_splits), Gaps(), max_epochs=1)
    assert_echoed(model.samples, [IN_ORDER[0], IN_ORDER[2]], 2, num_splits)
    assert trainer.global_step == 4 * num_splits


# Loaders -----------------------------------------------------------------------------------------------------


SIZES = [[8, 2, 1, 8, 3], [2, 8, 8], [8, 8, 1], [1, 1, 1, 1], [8, 1, 8, 1, 8], [3]]


def batches_of(sizes: list[int]) -> list[list[int]]:
    """Numbers in batches of these sizes."""
    numbers = iter(range(sum(sizes)))
    return [[next(numbers) for _ in range(size)] for size in sizes]


class Collating:
    """A collate function of one's own."""

    def __call__(self, samples: list[Any]) -> Any:
        return [torch.stack([x for x, _ in samples]), torch.stack([n for _, n in samples])]


def sampled(sizes: list[int]) -> DataLoader[Any]:
    """A loader with a batch sampler of one's own, whose batches are of these sizes."""
    return DataLoader(numbered(sum(sizes)), batch_sampler=batches_of(sizes), collate_fn=Collating())


class OwnSizes(Batches):
    """An iterable whose batches are of given sizes, of which nobody knows beforehand."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__(sum(sizes))
        del self.batch_size
        self.batches = batches_of(sizes)

    @property
    def num_batches(self) -> int:
        return len(self.batches)

    def batch(self, number: int) -> list[torch.Tensor]:
        return batch_of(self.batches[number])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("make", [sampled, OwnSizes])
@pytest.mark.parametrize("echo_factor", [1, 3, "auto"])
def test_batches_too_small_to_be_cut_in_the_middle_of_an_epoch_lose_no_sample_and_every_counter_agrees(
    sizes, make, echo_factor, capsys
):
    factor = echo_factor if isinstance(echo_factor, int) else 2
    replay = {epoch: [factor] * len(sizes) for epoch in (0, 1)} if echo_factor == "auto" else None
    steps = factor * sum(min(4, size) for size in sizes)
    lengths: list[float] = []

    class Asking(EchoModel):
        def on_train_epoch_start(self) -> None:
            lengths.append(self.trainer.num_training_batches)

    bar = TQDMProgressBar(refresh_rate=1)
    model, trainer = fit(
        [echo(echo_factor, num_splits=4, replay=replay), bar],
        make(sizes),
        model=Asking(),
        val=plain_loader(4, 2),
        enable_progress_bar=True,
    )
    for epoch in (0, 1):
        assert_echoed(model.in_epoch(epoch), batches_of(sizes), factor, 4)
    assert trainer.global_step == len(model.steps) == 2 * steps
    assert trainer.num_training_batches == bar.total_train_batches == steps
    assert model.validations == [(0, steps, steps), (1, 2 * steps, 2 * steps)]
    assert model.batch_indices == 2 * list(range(steps))
    # Before an epoch it is only known that batches are cut, not which of them cannot be.
    assert lengths[0] == lengths[1]
    assert f"{steps}/{steps}" in capsys.readouterr().out


class OwnSizesUnsized(OwnSizes):
    """The same without a length."""

    def __len__(self) -> int:
        """There is none."""
        raise TypeError("no length")


@settings(max_examples=40)
@given(data=st.data())
def test_whatever_is_echoed_of_whatever_batches_no_sample_is_lost_and_every_counter_agrees(data):
    sizes = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=5), label="sizes")
    num_splits = data.draw(st.integers(1, 5), label="num_splits")
    echo_factor = data.draw(st.sampled_from([1, 2, 3, "auto"]), label="echo_factor")
    has_length = data.draw(st.booleans(), label="has_length")
    accumulate = data.draw(st.integers(1, 4), label="accumulate")
    trace = {
        epoch: data.draw(st.lists(st.integers(1, 4), min_size=len(sizes), max_size=len(sizes)), label="passes")
        for epoch in (0, 1)
    }
    passes = trace if echo_factor == "auto" else {epoch: [echo_factor] * len(sizes) for epoch in (0, 1)}
    whole = {
        epoch: [
            batch
            for batch, times in zip(batches_of(sizes), passes[epoch], strict=True)
            for _ in range(times * max(1, min(num_splits, len(batch))))
        ]
        for epoch in (0, 1)
    }
    # Without a length the Trainer takes a limit for one, so a larger one would be wrong without echoes too.
    most = 40 if has_length else min(map(len, whole.values()))
    limit = data.draw(st.one_of(st.none(), st.integers(1, most)), label="limit")
    interval = data.draw(st.sampled_from([None, 1, 2, 3]), label="interval")
    given_settings: dict[str, Any] = {} if limit is None else {"limit_train_batches": limit}
    if interval is not None:
        # An interval that is longer than an epoch may be is refused, so count across epochs.
        given_settings |= {"val_check_interval": interval, "check_val_every_n_epoch": None}
    callback = echo(echo_factor, num_splits=num_splits, replay=trace if echo_factor == "auto" else None)
    model, trainer = fit(
        callback,
        (OwnSizes if has_length else OwnSizesUnsized)(sizes),
        val=plain_loader(4, 2),
        accumulate_grad_batches=accumulate,
        **given_settings,
    )
    steps = {epoch: batches[:limit] for epoch, batches in whole.items()}
    for epoch in (0, 1):
        mine = model.in_epoch(epoch)
        assert len(mine) == len(steps[epoch])
        assert all(set(samples) <= set(batch) for samples, batch in zip(mine, steps[epoch], strict=True))
        if len(mine) == len(whole[epoch]):
            counted = Counter(sample for samples in mine for sample in samples)
            assert counted == {
                sample: times for batch, times in zip(batches_of(sizes), passes[epoch], strict=True) for sample in batch
            }
    lengths = [len(steps[0]), len(steps[1])]
    assert trainer.global_step == sum(-(-length // accumulate) for length in lengths)
    if has_length:
        assert trainer.num_training_batches == lengths[1]
    if interval is None:
        assert [done for _, done, _ in model.validations] == [lengths[0], sum(lengths)]
    else:
        assert [done for _, done, _ in model.validations] == list(range(interval, sum(lengths) + 1, interval))


@pytest.mark.parametrize("limit", [1, 4, 5, 6, 7, 9, 12, 13, 20, 100])
@pytest.mark.parametrize("echo_factor", [1, 2])
def test_a_limit_in_steps_is_reached_also_where_batches_are_too_small_to_be_cut(limit, echo_factor):
    sizes = [8, 2, 1, 8, 8]
    steps = echo_factor * sum(min(4, size) for size in sizes)
    model, trainer = fit(
        echo(echo_factor, num_splits=4), sampled(sizes), val=plain_loader(4, 2), limit_train_batches=limit
    )
    assert [len(model.in_epoch(epoch)) for epoch in (0, 1)] == [min(limit, steps)] * 2
    assert trainer.global_step == 2 * min(limit, steps)
    assert [epoch for epoch, _, _ in model.validations] == [0, 1]


def test_accumulation_steps_at_the_end_of_an_epoch_whose_last_batch_is_too_small():
    sizes = [8, 8, 1]
    model, trainer = fit(echo(2, num_splits=4), sampled(sizes), accumulate_grad_batches=4)
    assert len(model.steps) == 2 * 18
    assert trainer.global_step == 2 * 5


class BatchDataset(Dataset[Any]):
    """Items are whole batches."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> Any:
        if number >= 3:
            raise IndexError(number)
        return batch_of(IN_ORDER[number])


class SampleStream(IterableDataset[Any]):
    """Samples one after another, shared among workers."""

    def __init__(self, num_samples: int = 22) -> None:
        self.num_samples = num_samples

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (
            (features(torch.tensor([number]))[0], torch.tensor(number))
            for number in range(first, self.num_samples, step)
        )


class SizedStream(SampleStream):
    """The same with a length."""

    def __len__(self) -> int:
        return self.num_samples


LOADERS: dict[str, Any] = {
    "batch_size=None": lambda: DataLoader(BatchDataset(), batch_size=None),
    "stream": lambda: DataLoader(SampleStream(), batch_size=8),
    "stream with a length": lambda: DataLoader(SizedStream(), batch_size=8),
    "stream of batches": lambda: DataLoader(SampleStream(), batch_size=8, collate_fn=Collating()),
    "one worker": lambda: plain_loader(num_workers=1),
    "persistent worker": lambda: plain_loader(num_workers=1, persistent_workers=True),
    "two persistent workers": lambda: plain_loader(num_workers=2, persistent_workers=True, prefetch_factor=1),
    "stream in a worker": lambda: DataLoader(SampleStream(), batch_size=8, num_workers=1),
    "stateful": lambda: StatefulBatches(),
    "unsized": lambda: Unsized(),
}


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined:UserWarning")
@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("echo_factor", [2, "auto"])
def test_every_kind_of_loader_is_echoed(name, echo_factor):
    plain, _ = fit(None, LOADERS[name](), max_epochs=3)
    replay = {epoch: [2, 2, 2] for epoch in range(3)} if echo_factor == "auto" else None
    model, trainer = fit(echo(echo_factor, num_splits=2, replay=replay), LOADERS[name](), max_epochs=3)
    for epoch in range(3):
        assert_echoed(model.in_epoch(epoch), plain.in_epoch(epoch), 2, 2)
    assert trainer.global_step == 36


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("max_steps", [1, 5, 13])
def test_workers_end_with_a_training_that_ends_in_the_middle_of_an_epoch(num_workers, persistent, max_steps):
    before = set(threading.enumerate())
    loader = plain_loader(80, 8, num_workers=num_workers, persistent_workers=persistent)
    model, _ = fit(echo(2, num_splits=2), loader, max_steps=max_steps, max_epochs=-1)
    assert len(model.steps) == max_steps
    assert not [thread for thread in threading.enumerate() if thread not in before and "gpufeed" in thread.name]


def test_workers_are_shut_down_only_when_nobody_waits_for_their_batch():
    # A thread that waits for a worker that was told to end would wait forever.
    gate = multiprocessing.get_context("fork").Event()
    before = set(threading.enumerate())
    log: list[str] = []

    class Watched(DataLoader[Any]):
        def __iter__(self) -> Any:
            iterator = super().__iter__()
            if "_shutdown_workers" not in vars(iterator):
                own = iterator._shutdown_workers

                def shutdown() -> None:
                    new = set(threading.enumerate()) - before
                    readers = [thread for thread in new if "gpufeed" in thread.name]
                    log.append(f"shut down with {len(readers)} readers")
                    own()

                iterator._shutdown_workers = shutdown
            return iterator

    class Slow(Dataset[Any]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, number: int) -> Any:
            if number >= 16:
                gate.wait(20)
            return features(torch.tensor([number]))[0], number

    class Ending(EchoModel):
        def on_train_epoch_end(self) -> None:
            threading.Timer(0.2, gate.set).start()

    loader = Watched(Slow(), batch_size=8, num_workers=1, persistent_workers=True, prefetch_factor=1)
    model, _ = fit(echo(2), loader, model=Ending(), max_steps=3, max_epochs=-1)
    assert len(model.steps) == 3
    assert set(log) == {"shut down with 0 readers"}


def test_an_empty_epoch_is_no_error():
    with pytest.warns(UserWarning, match="Total length of `.*` across ranks is zero"):
        model, trainer = fit(echo(2, num_splits=2), plain_loader(0, 8))
    assert model.steps == []
    assert trainer.global_step == 0


def test_a_loader_that_is_its_own_iterator_begins_again_in_every_epoch():
    class OwnIterator(Batches):
        def __iter__(self) -> Any:
            self.number = -1
            return self

        def __next__(self) -> Any:
            self.number += 1
            if self.number == 3:
                raise StopIteration
            return self.batch(self.number)

    model, _ = fit(echo(2, num_splits=2), OwnIterator(), max_epochs=3)
    for epoch in range(3):
        assert_echoed(model.in_epoch(epoch), IN_ORDER, 2, 2)


# Several loaders -----------------------------------------------------------------------------------------------


class Several(EchoModel):
    """Trains on a nest of several loaders' batches, and notes the samples of each."""

    def __init__(self, leaves: Any, **settings: Any) -> None:
        super().__init__(**settings)
        self.leaves = leaves
        self.together: list[list[list[int] | None]] = []

    def unpack(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [part for part in self.leaves(batch) if part is not None]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.together.append([None if part is None else part[1].tolist() for part in self.leaves(batch)])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Nothing: validation has a loader of its own."""


NESTS: dict[str, tuple[Any, Any]] = {
    "dict": (lambda a, b: {"a": a, "b": b}, lambda batch: [batch["a"], batch["b"]]),
    "list": (lambda a, b: [a, b], lambda batch: list(batch)),
    "tuple": (lambda a, b: (a, b), lambda batch: list(batch)),
    "nested": (lambda a, b: {"one": [a], "two": {"b": b}}, lambda batch: [batch["one"][0], batch["two"]["b"]]),
}


def loaders() -> tuple[Any, Any]:
    """12 samples in three batches of 4, and 15 in five batches of 3."""
    return plain_loader(12, 4), plain_loader(15, 3)


def rounds(mode: str) -> list[tuple[list[int] | None, list[int] | None]]:
    """What plain Lightning gives together."""
    a, b = [list(range(4 * i, 4 * i + 4)) for i in range(3)], [list(range(3 * i, 3 * i + 3)) for i in range(5)]
    if mode == "min_size":
        return list(zip(a, b, strict=False))
    if mode == "max_size_cycle":
        return list(zip([*a, *a[:2]], b, strict=True))
    return list(zip([*a, None, None], b, strict=True))


@pytest.mark.parametrize("nest", NESTS)
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
@pytest.mark.parametrize(("echo_factor", "num_splits"), [(2, 1), (2, 2), (3, 5), ("auto", 2)])
def test_several_loaders_are_echoed_together(nest, mode, echo_factor, num_splits):
    make, leaves = NESTS[nest]
    expected = rounds(mode)
    factor = 2 if echo_factor == "auto" else echo_factor
    replay = {epoch: [factor] * len(expected) for epoch in range(2)} if echo_factor == "auto" else None
    if num_splits > 3:
        with pytest.raises(ValueError, match=r"num_splits is 5; expected at most the DataLoader's batch_size, [34]"):
            fit(echo(echo_factor, num_splits=num_splits), CombinedLoader(make(*loaders()), mode), model=Several(leaves))
        return
    model, trainer = fit(
        echo(echo_factor, num_splits=num_splits, replay=replay),
        CombinedLoader(make(*loaders()), mode),
        model=Several(leaves),
    )
    assert trainer.global_step == len(model.together) == 2 * len(expected) * factor * num_splits
    for epoch in (0, 1):
        steps = model.together[epoch * len(model.together) // 2 :]
        for number in (0, 1):
            batches = [round_[number] for round_ in expected]
            mine = [step[number] for step in steps[: len(model.together) // 2]]
            for batch in batches:
                for _ in range(factor):
                    pieces, mine = mine[:num_splits], mine[num_splits:]
                    if batch is None:
                        assert pieces == [None] * num_splits
                    else:
                        assert sorted(sample for piece in pieces for sample in piece) == batch


@settings(max_examples=30)
@given(data=st.data())
def test_whatever_loaders_are_joined_no_round_is_lost_and_every_counter_agrees(data):
    lists = st.lists(st.integers(1, 6), min_size=1, max_size=4)
    sizes = data.draw(st.lists(lists, min_size=2, max_size=3), label="sizes")
    mode = data.draw(st.sampled_from(["min_size", "max_size_cycle", "max_size"]), label="mode")
    num_splits = data.draw(st.integers(1, 4), label="num_splits")
    echo_factor = data.draw(st.sampled_from([1, 2, 3, "auto"]), label="echo_factor")
    # A sized one knows its last batch (or does not, with sizes of its own); one without a length ends when it ends.
    kinds = [data.draw(st.sampled_from([OwnSizes, OwnSizesUnsized]), label="kind") for _ in sizes]
    batches = [batches_of(each) for each in sizes]
    num_rounds = (min if mode == "min_size" else max)(map(len, batches))
    together = [
        [
            each[number] if number < len(each) else each[number % len(each)] if mode == "max_size_cycle" else None
            for each in batches
        ]
        for number in range(num_rounds)
    ]
    trace = {
        epoch: data.draw(st.lists(st.integers(1, 3), min_size=num_rounds, max_size=num_rounds), label="passes")
        for epoch in (0, 1)
    }
    passes = trace if echo_factor == "auto" else {epoch: [echo_factor] * num_rounds for epoch in (0, 1)}

    def trained(callback: BatchEcho | None) -> tuple[Several, Any]:
        loaders_ = [kind(each) for kind, each in zip(kinds, sizes, strict=True)]
        joined = CombinedLoader(loaders_, mode)
        return fit(callback, joined, model=Several(list), val=plain_loader(4, 2), accumulate_grad_batches=2)  # type: ignore[return-value]

    plain, _ = trained(None)
    model, trainer = trained(echo(echo_factor, num_splits=num_splits, replay=trace if echo_factor == "auto" else None))
    lengths = []
    steps = list(model.together)
    for epoch in (0, 1):
        lengths.append(0)
        for round_, times in zip(together, passes[epoch], strict=True):
            num_pieces = max(1, min([num_splits, *(len(batch) for batch in round_ if batch is not None)]))
            for _ in range(times):
                mine, steps = steps[:num_pieces], steps[num_pieces:]
                lengths[-1] += num_pieces
                for place, batch in enumerate(round_):
                    parts = [step[place] for step in mine]
                    if batch is None:
                        assert parts == [None] * num_pieces
                    else:
                        assert sorted(sample for part in parts for sample in part) == batch  # type: ignore[union-attr]
    assert steps == []
    # Where a loader without a length is the shortest one, the Trainer does not see the end of an epoch come by itself.
    if [done for _, done, _ in plain.validations] == [num_rounds, 2 * num_rounds]:
        assert trainer.global_step == sum(-(-length // 2) for length in lengths)
        assert [done for _, done, _ in model.validations] == [lengths[0], sum(lengths)]


@pytest.mark.parametrize("mode", ["max_size_cycle", "max_size"])
def test_loaders_of_few_and_of_many_small_batches_are_counted_together(mode):
    joined = CombinedLoader([OwnSizes([1]), OwnSizes([1, 1, 1])], mode)
    model, trainer = fit(echo(2, num_splits=3), joined, model=Several(list), val=plain_loader(4, 2))
    assert trainer.global_step == len(model.together) == 12
    assert trainer.num_training_batches == 6
    assert [done for _, done, _ in model.validations] == [6, 12]


def test_several_loaders_are_permuted_each_in_its_own_way():
    model, _ = fit(
        echo(2), {"a": plain_loader(64, 32), "b": plain_loader(64, 32)}, model=Several(NESTS["dict"][1]), max_epochs=1
    )
    assert all(a != b for a, b in model.together)
    assert all(sorted(a) == sorted(b) for a, b in model.together)


def test_a_list_of_loaders_without_a_mode_cycles_the_shorter_one():
    model, _ = fit(echo(2, num_splits=2), list(loaders()), model=Several(list), max_epochs=1)
    assert len(model.together) == 5 * 4
    assert [
        sorted(step[0] + following[0])
        for step, following in zip(model.together[::2], model.together[1::2], strict=True)
    ] == [sorted(round_[0]) for round_ in rounds("max_size_cycle") for _ in range(2)]  # type: ignore[type-var]


@pytest.mark.parametrize("nest", ["dict", "list"])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_nest_of_a_single_loader_is_that_loader(nest, num_splits):
    make, leaves = {"dict": (lambda a: {"a": a}, lambda b: [b["a"]]), "list": (lambda a: [a], list)}[nest]
    model, _ = fit(echo(2, num_splits=num_splits), make(plain_loader()), model=Several(leaves), max_epochs=1)
    assert_echoed(model.samples, IN_ORDER, 2, num_splits)


def test_the_smallest_batch_of_several_loaders_decides_how_many_pieces_there_are():
    # Last batches: 4 of 12 and 1 of 9 samples.
    model, trainer = fit(
        echo(2, num_splits=4), [plain_loader(12, 4), plain_loader(9, 4)], model=Several(list), max_epochs=1
    )
    assert [[len(part) for part in step] for step in model.together] == [[1, 1]] * 16 + [[4, 1]] * 2
    assert trainer.global_step == trainer.num_training_batches == 18


def test_auto_waits_for_the_slowest_of_several_loaders():
    gate = Gate()
    callback = echo("auto")
    nest = {"slow": gated_loader(gate, 32, 8), "fast": plain_loader(32, 8)}
    model = Several(lambda batch: [batch["slow"], batch["fast"]])

    def after_step(model: Any) -> None:
        steps.append(len(model.steps))
        if steps[-1] in opens:
            gate.open(opens[steps[-1]])
            wait_for_both(model)
        elif steps[-1] > 6:
            wait_for_both(model)

    steps: list[int] = []
    opens = {1: 1, 4: 2, 6: 3}  # so three passes over batch 1, two over batch 2
    model.after_step = after_step
    fit(callback, nest, model=model, max_epochs=1)
    assert callback.trace == {0: [1, 3, 2, 1]}
    assert [step[0][0] // 8 for step in model.together] == [step[1][0] // 8 for step in model.together]


def wait_for_both(model: EchoModel) -> None:
    wait_until(lambda: all(loader.is_ready() for loader in model.trainer.train_dataloader.values()))


@pytest.mark.parametrize("name", ["transfer_batch_to_device", "on_before_batch_transfer"])
def test_a_hook_that_changes_the_nest_of_several_loaders_is_refused_with_the_cure(name):
    def merge(self: Any, batch: Any, *_: Any) -> Any:
        return [torch.cat([batch["a"][number], batch["b"][number]]) for number in (0, 1)]

    model = type("Merging", (EchoModel,), {name: merge})()
    with pytest.raises(ValueError, match=r"a transfer hook changed the nest of 2 loaders' batches") as error:
        fit(echo(2), dict(zip("ab", loaders(), strict=True)), model=model)
    assert "Change it in on_after_batch_transfer, which gets the pieces" in str(error.value)


def test_the_nest_can_be_changed_after_the_transfer():
    class Merging(EchoModel):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [torch.cat([batch["a"][number], batch["b"][number]]) for number in (0, 1)]

    model, _ = fit(echo(2), dict(zip("ab", loaders(), strict=True)), model=Merging(), max_epochs=1)
    assert model.sizes == [7] * 10


def test_readonly_mappings_are_told_apart_from_what_can_be_written_to():
    kind = Kind(
        lambda x, n: types.MappingProxyType({"x": x, "n": n}),
        lambda b: (b["x"], b["n"]),
        lambda b, n: isinstance(b, types.MappingProxyType),
    )
    model = KindModel(kind)
    fit(echo(2, num_splits=2), KindBatches(kind), model=model, max_epochs=1)
    assert_echoed(model.samples, IN_ORDER, 2, 2)
