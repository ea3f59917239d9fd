"""Which errors are out-of-memory, and which of them a smaller step can cure."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.utilities.memory import is_oom_error

from lightning_gpufeed.errors import FeedError, OOMRecoveryError
from lightning_gpufeed.recover.classify import Diagnosis, Kind, classify
from tests.recover.error_texts import DEVICE, GIB, HOST, NEVER, OTHER, PROBABLE


def table(rows: dict[str, Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows.values(), ids=list(rows))


def raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@table(DEVICE)
@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_device_memory_that_ran_out_is_worth_a_retry(row, device_type):
    error_type, text, requested_bytes = row
    assert classify(error_type(text), device_type) == Diagnosis(Kind.DEVICE, None, requested_bytes)


@table(HOST)
def test_host_memory_that_ran_out_is_worth_a_retry_on_the_cpu_only(row):
    error_type, text, requested_bytes = row
    assert classify(error_type(text), "cpu") == Diagnosis(Kind.HOST, None, requested_bytes)
    on_accelerator = classify(error_type(text), "cuda")
    assert (on_accelerator.kind, on_accelerator.requested_bytes) == (Kind.NEVER, requested_bytes)
    assert on_accelerator.advice is not None
    assert "host" in on_accelerator.advice


@table(PROBABLE)
def test_a_text_that_often_hides_an_out_of_memory_is_only_probable(row):
    assert classify(RuntimeError(row), "cuda") == Diagnosis(Kind.PROBABLE, None, None)


@table(NEVER)
@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_a_fault_that_a_retry_cannot_cure_comes_with_advice(row, device_type):
    error_type, text, word = row
    diagnosis = classify(error_type(text), device_type)
    assert diagnosis.kind is Kind.NEVER
    assert diagnosis.advice is not None
    assert word in diagnosis.advice
    assert diagnosis.advice.endswith(".")


@table(OTHER)
@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_an_error_that_only_speaks_of_memory_is_none_of_ours(row, device_type):
    assert classify(row, device_type) == Diagnosis(Kind.OTHER, None, None)


def test_onednn_means_memory_on_the_cpu_and_perhaps_elsewhere():
    error = RuntimeError("could not create a primitive")
    kinds = {device_type: classify(error, device_type).kind for device_type in ("cpu", "xpu", "cuda")}
    assert kinds == {"cpu": Kind.HOST, "xpu": Kind.PROBABLE, "cuda": Kind.PROBABLE}


# What an error was raised from ----------------------------------------------------------------------------


def out_of_memory(text: str = "CUDA out of memory. Tried to allocate 2.00 GiB.") -> BaseException:
    return torch.OutOfMemoryError(text)


@pytest.mark.parametrize("error_type", [RuntimeError, ValueError, Exception])
def test_an_error_counts_as_what_it_was_raised_from(error_type):
    error = raised_from(error_type("step failed"), raised_from(KeyError("x"), out_of_memory()))
    assert classify(error, "cuda") == Diagnosis(Kind.DEVICE, None, 2 * GIB)


def test_an_error_in_the_handler_of_an_out_of_memory_is_a_fault_of_its_own():
    error = RuntimeError("the handler is wrong")
    error.__context__ = out_of_memory()
    assert classify(error, "cuda").kind is Kind.OTHER


def test_the_end_of_a_program_stays_one_whatever_it_was_raised_from():
    assert classify(raised_from(KeyboardInterrupt(), out_of_memory()), "cuda").kind is Kind.OTHER


def test_an_error_of_this_package_is_not_retried_though_it_names_an_out_of_memory_as_its_cause():
    for error_type in (OOMRecoveryError, FeedError):
        error = raised_from(RuntimeError("step"), raised_from(error_type("given up"), out_of_memory()))
        assert classify(error, "cuda") == Diagnosis(Kind.OTHER, None, None)


def test_the_root_decides_and_what_is_certain_goes_before_what_is_probable():
    probable = RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR")
    assert classify(
        raised_from(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), out_of_memory()), "cuda"
    ).kind is (Kind.DEVICE)
    assert classify(raised_from(torch.OutOfMemoryError("x"), probable), "cuda").kind is Kind.DEVICE
    assert classify(raised_from(MemoryError("on the device"), out_of_memory()), "cuda").kind is Kind.DEVICE
    assert classify(raised_from(torch.OutOfMemoryError("x"), MemoryError()), "cpu").kind is Kind.HOST


def test_causes_in_a_circle_come_to_an_end():
    error = out_of_memory()
    assert classify(raised_from(error, raised_from(RuntimeError("x"), error)), "cuda").kind is Kind.DEVICE
    assert classify(raised_from(error, error), "cuda").kind is Kind.DEVICE


class UnreadableError(RuntimeError):
    """An error with a `__str__` that fails."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_whose_text_cannot_be_read_is_judged_without_it():
    assert classify(UnreadableError(), "cuda").kind is Kind.OTHER
    assert classify(raised_from(UnreadableError(), out_of_memory()), "cuda").kind is Kind.DEVICE


def test_the_error_is_left_as_it_is():
    error = raised_from(RuntimeError("step"), out_of_memory())
    before = dict(vars(error)), error.args, error.__cause__, error.__traceback__
    classify(error, "cuda")
    assert (dict(vars(error)), error.args, error.__cause__, error.__traceback__) == before


# Any text -------------------------------------------------------------------------------------------------

MEMORY_TEXTS = [(row[0], row[1]) for row in [*DEVICE.values(), *HOST.values()]] + [
    (RuntimeError, text) for text in PROBABLE.values()
]
NEVER_TEXTS = [(row[0], row[1]) for row in NEVER.values()]
# No capital letter, underscore, bracket or colon: then no text has a sign but by a word that is left out here.
plain_text = st.text(st.sampled_from("abcdefghijklmnopqrstuvwxyz .,0123456789")).filter(
    lambda text: "out of memory" not in text and "allocat" not in text
)


@given(
    st.text() | plain_text,
    st.sampled_from([RuntimeError, ValueError, OSError, torch.AcceleratorError]),
    st.sampled_from(["cpu", "cuda"]),
)
def test_a_text_without_a_sign_is_none_of_ours(text, error_type, device_type):
    assert classify(error_type(text), device_type) == Diagnosis(Kind.OTHER, None, None)


@given(st.sampled_from(MEMORY_TEXTS), plain_text, plain_text, st.sampled_from([str, str.upper, str.lower]))
def test_words_around_a_sign_and_its_case_change_nothing(row, before, after, spelled):
    error_type, text = row
    longer = f"{before}\n{spelled(text)}\n{after}"
    assert classify(error_type(longer), "cpu").kind is classify(error_type(text), "cpu").kind


def is_never_with_advice(error: BaseException, device_type: str) -> bool:
    diagnosis = classify(error, device_type)
    return diagnosis.kind is Kind.NEVER and diagnosis.advice is not None


@given(st.sampled_from(NEVER_TEXTS), st.sampled_from(MEMORY_TEXTS), st.sampled_from(["cpu", "cuda"]), st.data())
def test_a_sign_of_never_wins_wherever_it_stands_in_the_causes(never, memory, device_type, data):
    errors = [never[0](never[1]), memory[0](memory[1]), ValueError("x")]
    links = data.draw(st.permutations(errors))
    for link, cause in itertools.pairwise(links):
        raised_from(link, cause)
    assert is_never_with_advice(links[0], device_type)


@given(
    st.sampled_from([text for error_type, text in NEVER_TEXTS if error_type is not torch.distributed.DistBackendError]),
    st.sampled_from(MEMORY_TEXTS),
    st.sampled_from(["cpu", "cuda"]),
    st.data(),
)
def test_a_sign_of_never_wins_wherever_it_stands_in_the_text(never_text, memory, device_type, data):
    text = "\n".join(data.draw(st.permutations([never_text, memory[1], "more"])))
    assert is_never_with_advice(memory[0](text), device_type)


@given(
    st.text(),
    st.sampled_from([RuntimeError, MemoryError, OSError, torch.OutOfMemoryError, Exception, BaseException]),
    st.text(),
    st.sampled_from(["", *(text for _, text in MEMORY_TEXTS + NEVER_TEXTS)]),
)
def test_no_error_is_too_odd_to_be_judged(text, error_type, device_type, sign):
    diagnosis = classify(error_type(text + sign + text), device_type)
    assert (diagnosis.advice is not None) == (diagnosis.kind is Kind.NEVER)


@given(
    st.integers(0, 10**60), st.integers(0, 10**30), st.sampled_from(["bytes", "B", "KB", "KiB", "EiB", "elephants", ""])
)
def test_a_size_is_read_or_left_out_and_never_breaks_the_answer(number, fraction, unit):
    diagnosis = classify(torch.OutOfMemoryError(f"Tried to allocate {number}.{fraction} {unit}."), "cuda")
    assert diagnosis.kind is Kind.DEVICE
    assert diagnosis.requested_bytes is None or diagnosis.requested_bytes >= 0


@pytest.mark.parametrize("number", ["9" * 400, "1" + ",000" * 200, "1." + "0" * 5000, "1e999"])
def test_a_number_that_no_machine_can_hold_is_left_out(number):
    error = torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {number} GiB.")
    assert classify(error, "cuda") == Diagnosis(Kind.DEVICE, None, None)


@given(st.integers(0, 10**15))
def test_a_number_of_bytes_is_read_exactly(number):
    assert classify(torch.OutOfMemoryError(f"Tried to allocate {number} bytes."), "cuda").requested_bytes == number


# Beside Lightning's own -----------------------------------------------------------------------------------


def names_lightning_accepts(rows: dict[str, tuple[type[Exception], str, Any]]) -> set[str]:
    return {name for name, row in rows.items() if is_oom_error(row[0](row[1]))}


def test_more_is_known_than_to_lightning_and_less_is_retried():
    missed = set(DEVICE) - names_lightning_accepts(DEVICE)
    assert missed >= {"hip", "xpu", "mps", "cublas", "cudnn", "triton on hip"}
    assert set(HOST) - names_lightning_accepts(HOST) >= {"numpy", "python", "torch on Windows"}
    assert names_lightning_accepts(NEVER) >= {"nccl, by type", "device memory in a worker", "pin-memory thread"}


def test_nothing_that_lightning_accepts_is_taken_for_another_error():
    assert not any(isinstance(error, Exception) and is_oom_error(error) for error in OTHER.values())
