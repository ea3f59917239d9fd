"""A training loop by hand in which memory runs out: the same batch again, the same numbers, no trace of the failure."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_gpufeed.recover import attempt
from lightning_gpufeed.recover.plan import RetryPlan
from lightning_gpufeed.recover.split_batch import BatchSplitter
from tests.recover.hand_loop import (
    DEVICE_TEXT,
    HOST_TEXT,
    PROBABLE_TEXT,
    Faults,
    HandLogs,
    HandLoop,
    LoggedWork,
    Net,
    cross_entropy_step,
    device_error,
    host_error,
    make_batches,
    probable_error,
)

PHASES = ["forward", "backward"]
Wanted = dict[tuple[int, int], tuple[str, int, Callable[[], BaseException]]]


def fails(*kinds: tuple[str, int, Callable[[], BaseException]], batch: int = 0) -> Wanted:
    """The first attempts of a batch, one after the other."""
    return {(batch, number): kind for number, kind in enumerate(kinds)}


def make_loop(wanted: Wanted, *, between: nn.Module | None = None, **options: Any) -> HandLoop:
    faults = Faults(wanted)
    return HandLoop(Net(faults, between), faults=faults, **options)


def same_bits(one: HandLoop, other: HandLoop) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.weights(), other.weights(), strict=True))


def assert_close(one: HandLoop, other: HandLoop) -> None:
    """Up to the rounding of sums over samples in another order."""
    for a, b in zip(one.weights(), other.weights(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


# What happens, in order ------------------------------------------------------------------------------------------


class Watched(LoggedWork):
    """Says at each undo whether an exception is being handled, and how many activations are alive."""

    def undo(self) -> None:
        assert self._faults is not None
        handled = sys.exc_info()[0]
        self._log.add(f"handling {handled.__name__ if handled else 'nothing'}, {self._faults.num_alive()} alive")
        super().undo()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Callable[[Wanted], HandLoop]:
    def make(wanted: Wanted, **options: Any) -> HandLoop:
        loop = make_loop(wanted, **options)
        real = attempt.release

        def release(device: torch.device) -> None:
            loop.log.add("release")
            real(device)

        monkeypatch.setattr(attempt, "release", release)
        monkeypatch.setattr("tests.recover.hand_loop.LoggedWork", Watched)
        return loop

    return make


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("make", [device_error, host_error])
def test_the_handler_is_left_the_attempt_let_go_of_and_undone_and_memory_released_before_the_next_try(
    watched, phase, make
):
    loop = watched(fails((phase, 0, make), (phase, 0, make), (phase, 1, make)))
    loop.train(make_batches(1))
    failed = ["handling nothing, 0 alive", "undo", "release"]
    looked = "release"  # once, before the first split: what it took to see whether the batch can be split
    assert loop.log.events == ["save", "run 1", *failed, "run 1", *failed, looked, "run 2", *failed, "run 4", "finish"]


def test_a_step_that_keeps_its_error_or_raises_another_from_it_keeps_no_tensor_by_that(watched):
    def step(module: Any, batch: Any, logs: HandLogs) -> torch.Tensor:
        activation = torch.ones(3)
        module.faults.activations.append(weakref.ref(activation))
        try:
            return cross_entropy_step(module, batch, logs)
        except RuntimeError as error:
            kept = error
            module.kept.append(error)
            raise RuntimeError("the step has failed") from kept

    loop = watched(fails(("forward", 0, device_error), ("forward", 0, device_error)), step=step)
    loop.train(make_batches(1))
    assert [event for event in loop.log.events if "alive" in event] == ["handling nothing, 0 alive"] * 2
    assert loop.module.kept[0].__traceback__ is None


# The same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("between", [nn.Tanh, nn.Dropout, lambda: nn.BatchNorm1d(8)], ids=["plain", "dropout", "norm"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_batch_that_fits_at_the_second_try_changes_nothing_to_the_last_bit(phase, between):
    """Dropout masks and what is drawn afterwards too."""
    torch.manual_seed(4)
    plain = make_loop({}, between=between())
    outcomes, drawn = plain.train(make_batches(3)), torch.rand(3)
    torch.manual_seed(4)
    loop = make_loop(fails((phase, 0, device_error), batch=1), between=between())
    assert [float(outcome) for outcome in loop.train(make_batches(3))] == [float(outcome) for outcome in outcomes]
    assert torch.equal(torch.rand(3), drawn)
    assert same_bits(loop, plain)
    assert loop.logs.rows == plain.logs.rows
    assert loop.plan.num_microbatches == 1


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("microbatch", [0, 1])
def test_a_batch_that_is_split_trains_as_one_that_was_split_from_the_start(phase, microbatch):
    loop = make_loop(
        fails((phase, 0, device_error), ("forward", 0, host_error), (phase, microbatch, device_error)),
        plan=RetryPlan(grow_after=None),
    )
    split = make_loop({}, plan=RetryPlan(4))
    whole = make_loop({})
    outcomes = [[float(outcome) for outcome in one.train(make_batches(3))] for one in (loop, split, whole)]
    assert loop.plan.num_microbatches == 4
    assert same_bits(loop, split)
    assert_close(loop, whole)
    assert outcomes[0] == outcomes[1]
    assert outcomes[0] == pytest.approx(outcomes[2], rel=1e-6)
    assert loop.logs.rows == split.logs.rows
    assert [key for key, _, _ in loop.logs.rows] == ["loss"] * 3
    assert [value for _, value, _ in loop.logs.rows] == pytest.approx(
        [value for _, value, _ in whole.logs.rows], rel=1e-6
    )


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("batch", [0, 1, 2])
def test_gradients_of_earlier_batches_of_an_accumulation_window_are_kept(phase, batch):
    loop = make_loop(fails(*[(phase, 0, device_error)] * 2, batch=batch), accumulate=3)
    whole = make_loop({}, accumulate=3)
    loop.train(make_batches(6))
    whole.train(make_batches(6))
    assert loop.events[0].num_microbatches == 2
    assert_close(loop, whole)


def test_batches_of_any_size_are_split_after_one_has_failed_and_none_loses_a_sample():
    sizes: list[int] = []

    def step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        sizes.append(len(batch[0]))
        return cross_entropy_step(module, batch, logs)

    batches = [make_batches(1, size)[0] for size in (16, 5, 32, 0, 1)]
    loop = make_loop(fails(*[("forward", 0, device_error)] * 2), step=step, split_check="skip")
    loop.train(batches)
    assert sizes == [16, 16, 8, 8, 5, 8, 8, 8, 8, 0, 1]


# Found sizes ------------------------------------------------------------------------------------------------------


def test_a_size_that_was_found_is_kept_and_larger_ones_are_tried_after_clean_batches():
    out = ("forward", 0, device_error)
    loop = make_loop({**fails(out, out, out), **fails(out, batch=7)}, plan=RetryPlan(grow_after=2))
    loop.train(make_batches(13))
    assert [event for event in loop.log.events if event.startswith("run")] == [
        *("run 1", "run 1", "run 2", "run 4"),
        *("run 4", "run 4"),
        *("run 2", "run 2"),
        *("run 1", "run 1"),
        *("run 1", "run 1"),  # the whole is known to fit by now: the same again
        *["run 1"] * 5,
    ]
    assert [event.step for event in loop.events] == [0, 7]


def test_the_users_number_is_used_from_the_start_and_not_looked_at_in_vain():
    loop = make_loop({}, plan=RetryPlan(4))
    loop.train(make_batches(2))
    assert loop.log.events == ["save", "run 4", "finish"] * 2
    assert loop.events == loop.notes == []


# What cannot be retried --------------------------------------------------------------------------------------------


class OwnError(Exception):
    """Nothing to do with memory."""


@pytest.mark.parametrize(
    "error",
    [
        OwnError("bug"),
        ValueError(DEVICE_TEXT),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled cuda error"),
        RuntimeError(f"Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: {HOST_TEXT}"),
        StopIteration(),
    ],
    ids=["bug", "text of another type", "illegal access", "collective", "worker", "end"],
)
def test_other_errors_are_raised_untouched_and_at_once(error):
    loop = make_loop(fails(("backward", 0, lambda: error)))
    with pytest.raises(type(error)) as caught:
        loop.train(make_batches(1))
    assert caught.value is error
    assert loop.log.events == ["save", "run 1"]
    notes = getattr(error, "__notes__", [])
    assert len(notes) == isinstance(error, RuntimeError)
    assert all(note.startswith("OOMRecovery: not an error to retry after; ") for note in notes)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_program_ends_it(error):
    loop = make_loop(fails(("forward", 0, device_error), ("forward", 0, error)))
    with pytest.raises(error):
        loop.train(make_batches(1))
    assert loop.log.events == ["save", "run 1", "undo", "run 1"]


def test_another_error_in_a_retry_says_that_it_was_one():
    loop = make_loop(fails(*[("forward", 0, device_error)] * 2, ("forward", 1, lambda: OwnError("bug"))))
    with pytest.raises(OwnError) as caught:
        loop.train(make_batches(1))
    [note] = caught.value.__notes__
    assert "a batch that had run out of memory was done again, in 2 microbatches of at most 8 samples" in note


def test_an_error_that_may_be_out_of_memory_is_retried_once_if_memory_is_low(monkeypatch):
    monkeypatch.setattr(attempt, "is_low", lambda device: True)
    once = make_loop(fails(("forward", 0, probable_error)))
    once.train(make_batches(1))
    assert once.log.events == ["save", "run 1", "undo", "run 1", "finish"]
    twice = make_loop(fails(*[("forward", 0, probable_error)] * 2))
    with pytest.raises(RuntimeError, match="CUDNN_STATUS_INTERNAL_ERROR") as caught:
        twice.train(make_batches(1))
    assert "it came again after memory was released" in caught.value.__notes__[0]
    assert twice.log.events == ["save", "run 1", "undo", "run 1", "undo", "give up"]


def test_with_enough_memory_it_is_an_error_like_any_other(monkeypatch):
    monkeypatch.setattr(attempt, "is_low", lambda device: False)
    loop = make_loop(fails(("forward", 0, probable_error)))
    with pytest.raises(RuntimeError, match=PROBABLE_TEXT) as caught:
        loop.train(make_batches(1))
    assert loop.log.events == ["save", "run 1"]
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(
    "kinds",
    [
        (device_error, probable_error),
        (device_error, device_error, probable_error),
        (probable_error, device_error, probable_error),
    ],
)
def test_one_that_comes_for_the_first_time_after_certain_ones_has_its_retry(monkeypatch, kinds):
    monkeypatch.setattr(attempt, "is_low", lambda device: True)
    loop = make_loop(fails(*[("forward", 0, kind) for kind in kinds]))
    loop.train(make_batches(1))
    assert loop.log.events[-1] == "finish"


# Giving up ----------------------------------------------------------------------------------------------------------


def test_a_microbatch_of_one_sample_that_fails_ends_it_with_the_first_error_and_all_that_was_tried():
    errors = [device_error() for _ in range(5)]
    loop = make_loop(fails(*[("backward", 0, lambda error=error: error) for error in errors]))
    before, batch = loop.weights(), make_batches(1, 4)[0]
    loop.logs.log("earlier", 1.0)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        loop.train([batch])
    assert caught.value is errors[0]
    assert loop.log.events == [*["save", "run 1", "undo", "run 1", "undo", "run 2", "undo", "run 4", "undo", "give up"]]
    [note] = caught.value.__notes__
    lines = note.splitlines()
    assert lines[:2] == [
        "OOMRecovery could not cure this: there is no smaller size to try.",
        "Tried, with the same batch:",
    ]
    assert [line.split(", asked")[0] for line in lines[2:6]] == [
        "  whole: out of memory in backward",
        "  whole: out of memory in backward",
        "  in 2 microbatches of at most 2 samples: out of memory in backward",
        "  in 4 microbatches of at most 1 samples: out of memory in backward",
    ]
    assert all("asked for 2 GiB, " in line and " were free" in line for line in lines[2:6])
    assert lines[6] == "Batch: batch[0] (4, 6), batch[1] (4,)"
    assert lines[7].startswith("Memory: cpu: ")
    assert lines[8:10] == ["A checkpoint was written.", "It came from:"]
    assert "hand_loop.py" in note
    assert loop.logs.rows == [("earlier", 1.0, None)]
    assert all(parameter.grad is None for parameter in loop.module.parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, loop.weights(), strict=True))


def test_too_many_failures_end_it():
    loop = make_loop(fails(*[("forward", 0, device_error)] * 9), plan=RetryPlan(max_retries=2))
    with pytest.raises(torch.OutOfMemoryError):
        loop.train(make_batches(1))
    assert [event for event in loop.log.events if event.startswith("run")] == ["run 1", "run 1", "run 2"]


def test_a_batch_that_was_changed_in_place_is_named_and_not_done_again():
    def step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        batch["x"].sub_(1)
        return F.cross_entropy(module(batch["x"]), batch["y"])

    x, y = make_batches(1)[0]
    loop = make_loop(fails(("forward", 0, device_error)), step=step)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        loop.train([{"x": x, "y": y}])
    assert "the batch cannot be done again, because batch['x'] was changed in place" in caught.value.__notes__[0]
    assert loop.log.events == ["save", "run 1", "undo", "give up"]


def test_entries_that_the_step_took_out_of_the_batch_are_there_in_every_attempt():
    def step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        y = batch.pop("y")
        return F.cross_entropy(module(batch.pop("x")), y)

    def batches() -> list[Any]:
        return [{"x": x, "y": y} for x, y in make_batches(2)]

    loop, whole = make_loop(fails(*[("forward", 0, device_error)] * 3), step=step), make_loop({}, step=step)
    loop.train(batches())
    whole.train(batches())
    assert loop.plan.num_microbatches == 4
    assert_close(loop, whole)


AMBIGUOUS = [[torch.ones(2, 6), torch.ones(2, 6)], [torch.ones(2, 6), torch.ones(2, 6)]]


def ambiguous_step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
    return module(torch.cat(batch[0])).square().mean()


def test_a_batch_whose_samples_cannot_be_told_apart_is_tried_whole_again_and_then_given_up_for_that():
    loop = make_loop(fails(*[("forward", 0, device_error)] * 2), step=ambiguous_step)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        loop.train([AMBIGUOUS])
    assert "cannot be told apart" in caught.value.__notes__[0]
    assert loop.log.events == ["save", "run 1", "undo", "run 1", "undo", "give up"]


def test_one_that_does_not_run_out_of_memory_needs_not_be_told_apart_though_others_were_split():
    def step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        is_odd = batch is AMBIGUOUS or isinstance(batch, list)
        return ambiguous_step(module, batch, logs) if is_odd else cross_entropy_step(module, batch, logs)

    loop = make_loop(fails(*[("forward", 0, device_error)] * 2), step=step)
    loop.train([make_batches(1)[0], AMBIGUOUS, make_batches(1)[0]])
    assert [event for event in loop.log.events if event.startswith("run")][-3:] == ["run 2", "run 1", "run 2"]


class Graphs:
    """A batch that cannot be looked into."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


def graph_step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
    return cross_entropy_step(module, (batch.x, batch.y), logs)


def split_graphs(batch: Graphs, number: int) -> list[Graphs]:
    return [Graphs(*parts) for parts in zip(batch.x.chunk(number), batch.y.chunk(number), strict=True)]


def test_batches_that_only_the_users_functions_know_are_split_by_them():
    splitter = BatchSplitter(split_fn=split_graphs, weight_fn=lambda batch: len(batch.y))
    loop = make_loop(fails(*[("backward", 0, device_error)] * 3), step=graph_step, splitter=splitter)
    whole = make_loop({}, step=graph_step)
    for one in (loop, whole):
        one.train([Graphs(*batch) for batch in make_batches(3)])
    assert [event for event in loop.log.events if event.startswith("run")] == [
        *("run 1", "run 1", "run 2", "run 4"),
        *("run 4", "run 4"),
    ]
    assert_close(loop, whole)


def test_a_function_of_the_user_that_does_not_split_further_ends_it():
    splitter = BatchSplitter(
        split_fn=lambda batch, number: split_graphs(batch, min(2, number)), weight_fn=lambda batch: len(batch.y)
    )
    loop = make_loop(fails(*[("forward", 0, device_error)] * 9), step=graph_step, splitter=splitter)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        loop.train([Graphs(*make_batches(1)[0])])
    assert "there is no smaller size to try" in caught.value.__notes__[0]
    assert [event for event in loop.log.events if event.startswith("run")] == ["run 1", "run 1", "run 2"]


def test_a_function_of_the_user_that_loses_samples_is_found_out():
    splitter = BatchSplitter(split_fn=lambda batch, number: [(batch[0][:3], batch[1][:3])] * number)
    loop = make_loop(fails(*[("forward", 0, device_error)] * 2), splitter=splitter)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        loop.train(make_batches(1))
    assert "split_fn returned microbatches of [3, 3] samples" in caught.value.__notes__[0]
    assert loop.log.events[-1] == "give up"


# Announced -----------------------------------------------------------------------------------------------------------


def test_each_batch_that_failed_is_announced_once_when_it_is_done():
    out = ("backward", 0, device_error)
    loop = make_loop({**fails(out, batch=1), **fails(("forward", 0, host_error), out, batch=3)})
    seen: list[str] = []
    loop.recovery._on_event = lambda event: seen.append(f"{loop.log.events[-1]}, {event.num_retries} retries")
    loop.train(make_batches(5))
    assert seen == ["finish, 1 retries", "finish, 2 retries"]
    assert loop.recovery.num_retries == 3


def test_an_event_says_what_failed_first_and_what_worked():
    out = ("backward", 0, device_error)
    loop = make_loop({**fails(out, batch=1), **fails(("forward", 0, host_error), out, out, batch=3)})
    loop.train(make_batches(4))
    same, split = loop.events
    assert (same.stage, same.step, same.phase, same.requested_bytes, same.rank) == ("fit", 1, "backward", 2**31, -1)
    assert (same.num_microbatches, same.microbatch_samples) == (1, 0)
    assert same.cure == "the same again after releasing memory"
    assert (split.step, split.phase, split.requested_bytes) == (3, "forward", 4194304)
    assert (split.num_retries, split.num_microbatches, split.microbatch_samples) == (3, 4, 4)
    assert split.cure == "4 microbatches of at most 4 samples (retry 3)"
    assert split.free_bytes is not None
    assert split.free_bytes > 0


def test_what_a_user_should_know_is_said():
    def step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        logs.log("spread", batch[0].std())
        return F.cross_entropy(module(batch[0] + torch.randn_like(batch[0]) * 0), batch[1])

    random_loop = make_loop(fails(*[("forward", 0, device_error)] * 2), step=step)
    random_loop.train(make_batches(1))
    assert "could not be checked" in random_loop.notes[0]

    def logging(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        logs.log("spread", batch[0].std())
        return cross_entropy_step(module, batch, logs)

    loop = make_loop(fails(*[("forward", 0, device_error)] * 2), step=logging)
    loop.train(make_batches(3))
    [note] = [note for note in loop.notes if "buffer" not in note]
    assert note.startswith("'spread' of a batch does not follow from its microbatches in any known way")


def test_memory_that_runs_out_while_a_batch_is_looked_at_counts_as_an_attempt():
    """The comparison runs parts of the size that failed; it is made again with smaller ones."""
    calls: list[int] = []

    def step(module: nn.Module, batch: Any, logs: HandLogs) -> torch.Tensor:
        calls.append(len(batch[0]))
        if len(batch[0]) > 4:
            raise device_error()
        return cross_entropy_step(module, batch, logs)

    loop, whole = make_loop({}, step=step), make_loop({})
    loop.train(make_batches(1))
    whole.train(make_batches(1))
    assert calls == [16, 16, 8, 4, 2, 2, 4, 4, 4, 4]
    assert [event for event in loop.log.events if event != "undo"] == ["save", "run 1", "run 1", "run 4", "finish"]
    assert_close(loop, whole)
