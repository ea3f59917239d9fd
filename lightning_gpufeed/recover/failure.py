"""An attempt that ran out of memory, kept without anything that would keep its tensors alive."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field

import torch

from lightning_gpufeed.device.headroom import free_bytes
from lightning_gpufeed.recover.classify import Diagnosis, Kind

__all__ = ["Failure", "add_advice", "forget", "note_failure"]


@dataclass(eq=False)
class Failure:
    """An attempt that ran out of memory, without anything that would keep its tensors alive.

    Attributes:
        error: The exception, without traceback.
        phase: Where it came from.
        requested_bytes: What could not be had, if it says so.
        free_bytes: What was free then, if known.
        where: The innermost lines of the traceback, as text.
        kind: Which kind of error it is.
    """

    error: BaseException
    phase: str
    requested_bytes: int | None
    free_bytes: int | None
    where: str = field(repr=False)
    kind: Kind = Kind.DEVICE


def forget(error: BaseException) -> None:
    """Take the tracebacks off an exception and all it was raised from, and clear their frames.

    Args:
        error: Not being handled any more.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one.__traceback__ = None
        waiting += [one.__cause__, one.__context__]


def note_failure(error: BaseException, diagnosis: Diagnosis, phase: str, device: torch.device) -> Failure:
    """Write down what is to be known of a failure; to be called in the handler.

    Args:
        error: What was caught.
        diagnosis: Of it.
        phase: Where it came from.
        device: Of the training.

    Returns:
        What is kept when the exception is forgotten.
    """
    lines = traceback.format_list(traceback.extract_tb(error.__traceback__)[-3:])
    return Failure(error, phase, diagnosis.requested_bytes, free_bytes(device), "".join(lines).rstrip(), diagnosis.kind)


def add_advice(error: BaseException, diagnosis: Diagnosis) -> None:
    """Let an error that no retry can cure say what can, once.

    Args:
        error: It.
        diagnosis: Of it.
    """
    note = f"OOMRecovery: not an error to retry after; {diagnosis.advice}"
    if diagnosis.advice and note not in getattr(error, "__notes__", ()):
        error.add_note(note)
