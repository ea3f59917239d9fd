"""A training without Lightning: which samples every step is on, what is counted, and what may interfere."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from lightning_gpufeed.echo.loader import REPEATED
from lightning_gpufeed.echo.plan import AdaptiveEcho, EchoRule, EchoTrace, FixedEcho, ReplayedEcho
from lightning_gpufeed.echo.trial import GeneratorStates
from tests.doubles import WAIT_SECONDS
from tests.echo.hand_loop import (
    READER,
    Batches,
    GatedSamples,
    HandLoop,
    ResumableBatches,
    Step,
    UnsizedBatches,
    reader_threads,
    wait_until,
)


def drawn(steps: list[Step]) -> str:
    """Fetch, pass and piece of every step; a star where a batch was fetched."""
    return " ".join(
        f"{piece.fetch}.{piece.pass_index}.{piece.piece_index}{'*' if piece.is_fetch else ''}" for _, piece, _ in steps
    )


def sizes(steps: list[Step]) -> list[int]:
    return [len(step.parts[0]) for step in steps]


def uses(steps: list[Step], part: int = 0) -> Counter[int]:
    return Counter(sample for step in steps for sample in step.parts[part])


# Every batch a fixed number of times -----------------------------------------------------------------------


def test_a_batch_is_fetched_once_and_passed_over_in_pieces():
    with HandLoop(FixedEcho(2), 2) as loop:
        loop.wrap(Batches(8))
        steps = loop.run_epoch()
    assert drawn(steps) == "0.0.0* 0.0.1 0.1.0 0.1.1 1.0.0* 1.0.1 1.1.0 1.1.1"
    assert sizes(steps) == [2] * 8
    assert loop.session.trace.to_dict() == {0: [2, 2]}


@settings(max_examples=40)
@given(
    num_samples=st.integers(1, 30),
    batch_size=st.integers(1, 9),
    factor=st.integers(1, 3),
    data=st.data(),
    has_length=st.booleans(),
)
def test_every_sample_is_used_factor_times_in_pieces_as_equal_as_possible(
    num_samples: int, batch_size: int, factor: int, data: st.DataObject, has_length: bool
) -> None:
    num_splits = data.draw(st.integers(1, batch_size))
    make = Batches if has_length else UnsizedBatches
    with HandLoop(FixedEcho(factor), num_splits) as loop:
        [wrapped] = loop.wrap(make(num_samples, batch_size))
        expected = len(wrapped) if has_length else None
        for _ in range(2):
            steps = loop.run_epoch()
            assert uses(steps) == dict.fromkeys(range(num_samples), factor)
            for first in range(0, num_samples, batch_size):
                batch = range(first, min(num_samples, first + batch_size))
                of_batch = [step for step in steps if step.parts[0][0] in batch]
                num_pieces = min(num_splits, len(batch))
                assert len(of_batch) == factor * num_pieces
                assert max(sizes(of_batch)) - min(sizes(of_batch)) <= 1
            # Counters: the length that is known at the end is the number of steps, and it was told of every change.
            if has_length:
                assert len(wrapped) == len(steps) == loop.num_processed
                assert expected is not None
                assert expected + sum(loop.changes) == len(steps)


@pytest.mark.parametrize(
    ("num_samples", "num_splits", "last"),
    [(812, 2, [150, 150]), (515, 4, [1, 1, 1]), (513, 2, [1]), (512 + 512, 2, [256, 256])],
)
def test_a_last_batch_loses_no_sample(num_samples, num_splits, last):
    with HandLoop(FixedEcho(2), num_splits) as loop:
        [wrapped] = loop.wrap(Batches(num_samples, 512))
        steps = loop.run_epoch()
        assert sizes(steps) == [512 // num_splits] * 2 * num_splits + last * 2
        assert uses(steps) == dict.fromkeys(range(num_samples), 2)
        assert len(wrapped) == len(steps)


def test_the_order_is_another_one_in_every_pass_batch_and_epoch():
    with HandLoop(FixedEcho(3)) as loop:
        loop.wrap([torch.arange(50), torch.arange(50)])
        for _ in range(2):
            loop.run_epoch()
    orders = [tuple(samples) for samples in loop.samples()]
    assert len(set(orders)) == len(orders) == 12
    assert all(order != tuple(range(50)) for order in orders)


def test_the_order_is_the_same_with_the_same_seed_and_another_one_with_another():
    def order(seed: int) -> list[Any]:
        with HandLoop(FixedEcho(2), 2, seed=seed) as loop:
            loop.wrap(Batches(40, 20))
            loop.run_epoch()
        return loop.samples()

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_a_whole_training_neither_reads_nor_touches_the_generators_of_the_process():
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        before = GeneratorStates.now()
        with HandLoop(FixedEcho(2), 2) as loop:
            loop.wrap(Batches(20), Batches(20))
            for _ in range(2):
                loop.run_epoch()
        assert GeneratorStates.now() == before
        orders.append(loop.steps)
    assert orders[0] == orders[1]


def test_an_epoch_that_is_left_early_is_followed_by_a_fetch():
    with HandLoop(FixedEcho(2), 2) as loop:
        [wrapped] = loop.wrap(Batches(12))
        assert drawn(loop.run_epoch(6)) == "0.0.0* 0.0.1 0.1.0 0.1.1 1.0.0* 1.0.1"
        assert loop.session.trace.to_dict() == {0: [2, 1]}
        assert drawn(loop.run_epoch(1)) == "0.0.0*"
        assert len(wrapped) == 12
        assert loop.session.trace.to_dict() == {0: [2, 1], 1: [1]}


def test_the_batch_is_let_go_with_its_last_step():
    # Before the next one is fetched: there are never two of them on the device.
    made: list[weakref.ref[torch.Tensor]] = []

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(3):
            batch = torch.arange(8)
            made.append(weakref.ref(batch))
            yield batch
            del batch

    with HandLoop(FixedEcho(2), 2) as loop:
        loop.wrap(batches(), can_read_ahead=False)
        loop.begin()
        for number in range(1, 9):
            loop.step()
            gc.collect()
            is_last = number % 4 == 0
            # The generator itself holds the batch until it is asked for the next one.
            assert loop.session.device_cache._batches == [] if is_last else len(loop.session.device_cache._batches) == 1
            assert sum(batch() is not None for batch in made) == 1


def test_what_is_not_fetched_is_not_handed_to_the_device_again():
    with HandLoop(FixedEcho(3), 2) as loop:
        loop.wrap(Batches(12))
        loop.begin()
        items = []
        while (item := loop.ask()) is not None:
            loop.train_on(loop.arm(item))
            items.append(item[0])
    assert sum(item is not REPEATED for item in items) == 3
    assert len(items) == 18


# Only while the next batch is not ready --------------------------------------------------------------------


def run_gated(loop: HandLoop, samples: GatedSamples, passes: list[int], num_splits: int = 1) -> None:
    """Let every batch come once the one before it has been passed over so many times."""
    loop.begin()
    for number, num_passes in enumerate(passes):
        for _ in range(num_passes * num_splits):
            assert loop.step() is not None
        if number + 1 in samples.gates:
            samples.gates[number + 1].set()
        wait_until(loop.wrapped[0].is_ready)
    assert loop.step() is None
    loop.end()


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("passes", [[1, 1, 1, 1], [3, 1, 2, 1], [4, 4, 4, 1]], ids=str)
def test_a_batch_is_used_again_only_while_the_next_one_is_not_ready(passes, num_splits):
    samples = GatedSamples(16, gated=[1, 2, 3])
    with HandLoop(AdaptiveEcho(9), num_splits) as loop:
        [wrapped] = loop.wrap(samples.loader())
        length = len(wrapped)
        assert length == 4 * num_splits
        run_gated(loop, samples, passes, num_splits)
        assert loop.session.trace.to_dict() == {0: passes}
        assert len(wrapped) == length + sum(loop.changes) == sum(passes) * num_splits
    assert [step.piece.fetch for step in loop.steps] == [
        fetch for fetch, number in enumerate(passes) for _ in range(number * num_splits)
    ]
    assert uses(loop.steps) == {sample: passes[sample // 4] for sample in range(16)}


def test_a_batch_is_used_no_more_often_than_the_limit_says():
    samples = GatedSamples(8, gated=[1])
    with HandLoop(AdaptiveEcho(3)) as loop:
        loop.wrap(samples.loader())
        loop.begin()
        for _ in range(3):
            assert loop.step() is not None
        asker = threading.Thread(target=loop.step)
        asker.start()  # waits for the batch
        samples.open_all()
        asker.join(WAIT_SECONDS)
        assert drawn(loop.steps) == "0.0.0* 0.1.0 0.2.0 1.0.0*"


def test_a_loader_that_keeps_up_gives_plain_training():
    loader = ResumableBatches(14)
    plain = [batch.tolist() for _ in range(2) for batch in ResumableBatches(14, epoch=-1)]
    with HandLoop(AdaptiveEcho(5)) as loop:
        loop.wrap(loader)
        for epoch in range(2):
            loop.begin()
            while loop.step() is not None:
                wait_until(loop.wrapped[0].is_ready)
            loop.end()
            assert loop.session.trace.to_dict()[epoch] == [1, 1, 1, 1]
    second_epoch = [batch.tolist() for batch in ResumableBatches(14, epoch=0)]
    assert loop.samples() == plain[:4] + second_epoch
    assert loop.changes == []


def test_in_pieces_a_loader_that_keeps_up_gives_every_sample_once():
    with HandLoop(AdaptiveEcho(5), 2) as loop:
        loop.wrap(Batches(14))
        loop.begin()
        while loop.step() is not None:
            wait_until(loop.wrapped[0].is_ready)
        loop.end()
    assert uses(loop.steps) == dict.fromkeys(range(14), 1)
    assert sizes(loop.steps) == [2, 2] * 3 + [1, 1]


def test_the_last_batch_is_used_again_only_while_it_is_not_known_to_be_the_last():
    gate = threading.Event()

    class LateEnd(UnsizedBatches):
        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            assert gate.wait(WAIT_SECONDS)

    with HandLoop(AdaptiveEcho(9)) as loop:
        loop.wrap(LateEnd(8), is_uninterrupted=True)
        loop.begin()
        while len(loop.steps) < 5:
            loop.step()
        gate.set()
        wait_until(loop.wrapped[0].is_ready)
        assert loop.step() is None
    assert drawn(loop.steps) == "0.0.0* 1.0.0* 1.1.0 1.2.0 1.3.0"


def test_every_loader_has_to_be_ready():
    both = [GatedSamples(8, gated=[1]), GatedSamples(8, gated=[1])]
    with HandLoop(AdaptiveEcho(9)) as loop:
        loop.wrap(*[samples.loader() for samples in both])
        loop.begin()
        loop.step()
        for wrapped, samples in zip(loop.wrapped, both, strict=True):
            samples.open_all()
            wait_until(wrapped.is_ready)
            loop.step()
    assert drawn(loop.steps) == "0.0.0* 0.1.0 1.0.0*"


@pytest.mark.parametrize("num_splits", [1, 2])
def test_a_recorded_training_is_repeated_exactly(num_splits):
    recorded, replayed = [], []
    samples = GatedSamples(16, gated=[1, 2, 3])
    with HandLoop(AdaptiveEcho(9), num_splits) as loop:
        loop.wrap(samples.loader())
        run_gated(loop, samples, [3, 1, 2, 1], num_splits)
        recorded, trace = loop.steps, loop.session.trace.to_dict()
    rule = ReplayedEcho(EchoTrace(trace), AdaptiveEcho(9))
    with HandLoop(rule, num_splits) as loop:
        [wrapped] = loop.wrap(Batches(16))  # now it is as fast as can be
        length = len(wrapped)
        replayed = loop.run_epoch()
        assert len(wrapped) == length + sum(loop.changes) == len(replayed)
    assert replayed == recorded


@pytest.mark.parametrize("is_open", [False, True])
def test_after_the_end_of_a_record_the_loader_decides_again(is_open):
    trace = EchoTrace({0: [3, 2]})
    trace.open_batch = (0, 1) if is_open else None  # the record was taken in the middle of the second batch
    samples = GatedSamples(16, gated=[2, 3])
    with HandLoop(ReplayedEcho(trace, AdaptiveEcho(4))) as loop:
        loop.wrap(samples.loader())
        loop.begin()
        for _ in range(6 if is_open else 5):  # as recorded, and one more while the next batch is not there
            loop.step()
        samples.gates[2].set()
        wait_until(loop.wrapped[0].is_ready)
        loop.step()
        loop.step()
        samples.open_all()
        wait_until(loop.wrapped[0].is_ready)
        loop.step()
    expected = "0.0.0* 0.1.0 0.2.0 1.0.0* 1.1.0 1.2.0 2.0.0* 2.1.0 3.0.0*"
    assert drawn(loop.steps) == (expected if is_open else expected.replace("1.2.0 ", ""))


def test_a_loader_that_draws_in_the_process_is_never_echoed_because_of_waiting():
    class Drawing:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> float:
            return index + 0.5 * torch.rand(1).item()

    def run(loop: HandLoop) -> None:
        loop.begin()
        while loop.step() is not None:
            torch.rand(3)  # dropout
        loop.end()

    torch.manual_seed(3)
    plain = []
    for batch in DataLoader(Drawing(), batch_size=4):
        torch.rand(3)
        plain.append(batch.tolist())
    torch.manual_seed(3)
    with HandLoop(AdaptiveEcho(9)) as loop:
        loop.wrap(DataLoader(Drawing(), batch_size=4))
        with pytest.warns(UserWarning, match="draws random numbers"):
            run(loop)
    assert loop.samples() == plain


def test_the_mean_factor_is_what_was_done():
    with HandLoop(FixedEcho(3)) as loop:
        assert loop.session.mean_factor == 3
    rule = ReplayedEcho(EchoTrace({0: [3, 1, 1]}), AdaptiveEcho(4))
    with HandLoop(rule) as loop:
        loop.wrap(Batches(8))
        loop.begin()
        assert loop.session.mean_factor == 1.0
        means = []
        while loop.step() is not None:
            means.append(loop.session.mean_factor)
    assert means == [1.0, 2.0, 3.0, 2.0]


# Several loaders -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_several_loaders_go_in_lockstep(mode):
    with HandLoop(FixedEcho(2), 2, mode=mode) as loop:
        wrapped = loop.wrap(Batches(16), Batches(16, 8))
        for _ in range(2):
            steps = loop.run_epoch()
            num_rounds = 2 if mode == "min_size" else 4
            assert [step.piece.fetch for step in steps] == [fetch for fetch in range(num_rounds) for _ in range(4)]
            assert uses(steps) == dict.fromkeys(range(4 * num_rounds), 2)
            lengths = [len(loader) for loader in wrapped]
            assert len(steps) == (min if mode == "min_size" else max)(lengths)
            if mode == "max_size":
                assert [step.parts[1] is None for step in steps] == [False] * 8 + [True] * 8
            if mode == "max_size_cycle":
                assert uses(steps, 1) == dict.fromkeys(range(16), 4)


def test_the_smallest_batch_decides_the_number_of_pieces():
    with HandLoop(FixedEcho(1), 4) as loop:
        wrapped = loop.wrap(Batches(12, 4), Batches(14, 6))
        steps = loop.run_epoch()
        assert [len(loader) for loader in wrapped] == [len(steps)] * 2
    assert drawn(steps) == "0.0.0* 0.0.1 0.0.2 0.0.3 1.0.0* 1.0.1 1.0.2 1.0.3 2.0.0* 2.0.1"
    assert [[len(part) for part in step.parts] for step in steps[-2:]] == [[2, 1], [2, 1]]
    for part, size in ((0, 12), (1, 14)):
        assert uses(steps, part) == dict.fromkeys(range(size), 1)


@pytest.mark.parametrize("sizes_of_loaders", [(10, 21), (21, 10), (9, 13), (13, 9)], ids=str)
@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_the_length_is_right_when_loaders_with_small_last_batches_go_together(mode, sizes_of_loaders):
    with HandLoop(FixedEcho(2), 4, mode=mode) as loop:
        wrapped = loop.wrap(*[DataLoader(range(size), batch_size=4) for size in sizes_of_loaders])
        length = (min if mode == "min_size" else max)(len(loader) for loader in wrapped)
        steps = loop.run_epoch()
        assert length + sum(loop.changes) == len(steps)
        assert (min if mode == "min_size" else max)(len(loader) for loader in wrapped) == len(steps)


def test_loaders_that_draw_beside_each_other_give_the_same_numbers_in_every_run():
    threads: list[str] = []

    class Drawing:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> float:
            threads.append(threading.current_thread().name)
            return index + torch.rand(1).item()

    def loaders() -> list[Any]:
        return [DataLoader(Drawing(), batch_size=3) for _ in range(2)]

    torch.manual_seed(3)
    plain = [[part.tolist() for part in parts] for parts in zip(*loaders(), strict=True)]
    torch.manual_seed(3)
    threads.clear()
    with HandLoop(AdaptiveEcho(9)) as loop:
        loop.wrap(*loaders())
        with pytest.warns(UserWarning, match="draws random numbers") as caught:
            loop.run_epoch()
    assert [step.parts for step in loop.steps] == plain
    assert READER not in threads
    assert len(caught) == 2  # one for each


def test_a_loader_that_is_told_whether_its_batch_is_in_work_is_told_right_whatever_other_threads_do():
    # One loader asks for itself; the state of the other one is being read in its thread at that moment.
    is_reading, gate = threading.Event(), threading.Event()

    class Asking(Batches):
        is_latest_in_work: Callable[[], bool] | None = None

        def state_dict(self) -> dict[str, bool]:
            assert self.is_latest_in_work is not None
            return {"again": self.is_latest_in_work()}

        def load_state_dict(self, state_dict: dict[str, bool]) -> None:
            pass

        def is_ready(self) -> bool:
            return True

    class SlowlyRead(ResumableBatches):
        def state_dict(self) -> dict[str, int]:
            if threading.current_thread().name == READER:
                is_reading.set()
                assert gate.wait(WAIT_SECONDS)
            return super().state_dict()

    asking = Asking(12)
    with HandLoop(FixedEcho(2)) as loop:
        loop.wrap(asking, SlowlyRead(12))
        loop.begin()
        loop.step()
        loop.step()
        assert asking.state_dict() == {"again": False}
        loop.step()  # the first one on a new batch: with echoes to come, it has to come again
        assert is_reading.wait(WAIT_SECONDS)
        try:
            assert asking.state_dict() == {"again": True}
        finally:
            gate.set()


# Counts, and the report ------------------------------------------------------------------------------------


def test_the_epoch_is_reported_with_the_steps_that_were_done():
    with HandLoop(FixedEcho(2), 2) as loop:
        loop.wrap(Batches(10))
        for epoch in range(2):
            loop.run_epoch()
            report = loop.session.report(epoch, 100.0)
            assert (report.num_fetches, report.num_passes, report.num_echo_steps) == (3, 6, 6)
            assert (report.epoch, report.elapsed_seconds, report.is_adaptive) == (epoch, 100.0, False)
            assert report.load_seconds == pytest.approx(loop.session.measures.times.seconds_per_batch, abs=1e-9)
            assert report.pass_seconds > 0


def test_a_step_that_was_asked_for_and_not_done_is_not_counted():
    with HandLoop(FixedEcho(2)) as loop:
        loop.wrap(Batches(12))
        loop.begin()
        loop.step()
        loop.ask()  # as a loop does that fetches ahead, and is ended then
        loop.end()
        assert loop.session.measures.counts() == [1, 1, 1, 0]
        assert loop.session.trace.to_dict() == {0: [1]}


def test_a_rule_that_waits_for_the_loader_is_reported_as_such():
    with HandLoop(AdaptiveEcho(2)) as loop:
        loop.wrap(Batches(4))
        loop.run_epoch()
        assert loop.session.report(0, 1.0).is_adaptive


# The order of calls ----------------------------------------------------------------------------------------


def test_a_loop_may_ask_one_step_ahead():
    # As Lightning does with loaders that have no length.
    with HandLoop(FixedEcho(2), 2) as loop:
        loop.wrap(UnsizedBatches(10))
        for _ in range(2):
            loop.begin()
            ahead = loop.ask()
            while (items := ahead) is not None:
                ahead = loop.ask()
                loop.train_on(loop.arm(items))
            loop.end()
    assert uses(loop.steps) == dict.fromkeys(range(10), 4)
    assert drawn(loop.steps[:10]) == "0.0.0* 0.0.1 0.1.0 0.1.1 1.0.0* 1.0.1 1.1.0 1.1.1 2.0.0* 2.0.1"


def test_a_step_that_no_loader_gave_an_item_for_is_none_of_ours():
    with HandLoop(FixedEcho(2)) as loop:
        loop.wrap(Batches(4))
        assert loop.session.arm() is None
        loop.begin()
        loop.step()
        assert loop.session.arm() is None


def test_an_iteration_of_which_no_step_was_made_is_begun_anew():
    # As a loop does that looks at the first batch before it trains.
    with HandLoop(FixedEcho(2)) as loop:
        loop.wrap(Batches(12))
        loop.begin()
        loop.ask()
        assert drawn(loop.run_epoch()) == "0.0.0* 0.1.0 1.0.0* 1.1.0 2.0.0* 2.1.0"


def test_a_step_that_fails_leaves_the_session_usable():
    class Odd(Batches):
        def batch(self, number: int) -> Any:
            if number == 1:
                raise ValueError("odd")
            return super().batch(number)

    with HandLoop(FixedEcho(2)) as loop:
        loop.wrap(Odd(12))
        loop.begin()
        loop.step()
        loop.step()
        with pytest.raises(ValueError, match="odd"):
            loop.step()
        loop.end()
        loop.wrap(Batches(12))
        assert len(loop.run_epoch()) == 6


def test_closing_ends_all_threads_and_may_be_done_twice():
    with HandLoop(FixedEcho(1)) as loop:
        loop.wrap(DataLoader(range(40), batch_size=4), DataLoader(range(40), batch_size=4))
        loop.begin()
        loop.step()
        loop.step()
        assert len(reader_threads()) == 2
        loop.session.close()
        assert reader_threads() == []


@pytest.mark.parametrize("rule", [FixedEcho(2), AdaptiveEcho(2)], ids=repr)
def test_fewer_samples_on_the_device_than_were_fetched_are_refused(rule: EchoRule):
    with HandLoop(rule, 4) as loop:
        loop.wrap(Batches(8))
        loop.begin()
        [item] = loop.ask() or []
        with pytest.raises(ValueError, match="the batch has 3 samples on the device, but was to be cut into 4 pieces"):
            loop.train_on(loop.arm([item[:3]]))


def test_more_samples_on_the_device_than_the_loader_gives_are_not_cut():
    # Two views of every sample, say: their places in the batch make them a pair.
    with HandLoop(FixedEcho(2), 2) as loop:
        loop.wrap(Batches(8))
        loop.begin()
        [item] = loop.ask() or []
        with pytest.raises(ValueError, match="num_splits is 2, but the samples of this batch cannot be told apart"):
            loop.train_on(loop.arm([torch.cat([item, item + 100])]))
