"""What is kept of an attempt that ran out of memory holds none of its tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from lightning_gpufeed.recover.classify import Kind, classify
from lightning_gpufeed.recover.failure import Failure, forget, note_failure
from tests.recover.hand_loop import CPU, DEVICE_TEXT, HOST_TEXT

Held = "weakref.ref[torch.Tensor]"


def plain(held: list[Held]) -> None:
    activation = torch.ones(3)
    held.append(weakref.ref(activation))
    raise torch.OutOfMemoryError(DEVICE_TEXT)


def with_cause(held: list[Held]) -> None:
    activation = torch.ones(3)
    held.append(weakref.ref(activation))
    try:
        plain(held)
    except RuntimeError as error:
        raise RuntimeError("step failed") from error


def with_context(held: list[Held]) -> None:
    activation = torch.ones(3)
    held.append(weakref.ref(activation))
    try:
        plain(held)
    except RuntimeError:
        raise torch.OutOfMemoryError(DEVICE_TEXT) from None  # hidden, and held all the same


def kept_in_its_own_frame(held: list[Held]) -> None:
    """A cycle: the frame holds the error, which holds the frame."""
    activation = torch.ones(3)
    held.append(weakref.ref(activation))
    try:
        plain(held)
    except RuntimeError as error:
        kept = error
        raise kept from None


def out_of_a_generator(held: list[Held]) -> None:
    def rows() -> Iterator[int]:
        activation = torch.ones(3)
        held.append(weakref.ref(activation))
        yield 1
        plain(held)

    sum(rows())


def in_a_circle(held: list[Held]) -> None:
    try:
        plain(held)
    except RuntimeError as error:
        error.__cause__ = error
        raise


WAYS = [plain, with_cause, with_context, kept_in_its_own_frame, out_of_a_generator, in_a_circle]


def caught(way: Callable[[list[Held]], None], held: list[Held]) -> BaseException:
    try:
        way(held)
    except RuntimeError as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_an_attempt_is_alive_after_its_error_was_forgotten_though_the_error_is(way):
    held: list[Held] = []
    gc.disable()  # a cycle would not be collected in time either
    try:
        error = caught(way, held)
        assert any(reference() is not None for reference in held)
        forget(error)
        assert [reference() for reference in held] == [None] * len(held)
    finally:
        gc.enable()
    assert error.__traceback__ is None


def test_nothing_is_alive_though_somebody_has_kept_the_traceback():
    """A logger, a debugger: the frames are there still, and empty."""
    held: list[Held] = []
    error = caught(plain, held)
    traceback = error.__traceback__
    forget(error)
    assert [reference() for reference in held] == [None]
    assert traceback is not None


def test_tracebacks_of_all_that_it_was_raised_from_are_gone():
    error = caught(with_cause, [])
    forget(error)
    links = []
    link: BaseException | None = error
    while link is not None:
        links.append(link.__traceback__)
        link = link.__cause__
    assert links == [None, None]


def test_frames_that_are_still_running_keep_what_they_hold():
    activation = torch.ones(3)
    try:
        raise RuntimeError("here")
    except RuntimeError as error:
        kept = error
    forget(kept)
    assert activation.sum() == 3


def test_an_error_that_was_never_raised_can_be_forgotten():
    error = RuntimeError("new")
    forget(error)
    assert error.__traceback__ is None


def noted(text: str, phase: str = "backward") -> Failure:
    try:
        raise RuntimeError(text)
    except RuntimeError as error:
        return note_failure(error, classify(error, "cpu"), phase, CPU)


def test_what_is_to_be_known_of_a_failure_is_written_down():
    failure = noted(HOST_TEXT)
    assert (failure.phase, failure.requested_bytes, failure.kind) == ("backward", 4194304, Kind.HOST)
    assert failure.free_bytes is not None
    assert failure.free_bytes > 0
    assert "in noted\n    raise RuntimeError(text)" in failure.where
    assert noted("DefaultCPUAllocator: not enough memory").requested_bytes is None


def test_only_the_innermost_lines_are_written_down():
    def deep(number: int) -> None:
        if number == 0:
            raise torch.OutOfMemoryError(DEVICE_TEXT)
        deep(number - 1)

    try:
        deep(9)
    except RuntimeError as error:
        failure = note_failure(error, classify(error, "cpu"), "forward", CPU)
    assert failure.where.count("in deep") == 3
    assert "raise torch.OutOfMemoryError" in failure.where
