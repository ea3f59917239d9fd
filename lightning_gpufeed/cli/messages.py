"""What the command says on stderr: a line each."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jsonargparse import ArgumentError

__all__ = ["error_text", "say", "usage_text", "warnings_as_lines"]


def say(text: str) -> None:
    """Print a line that is no result.

    Args:
        text: Without a line break.
    """
    print(f"gpufeed: {text}", file=sys.stderr)


def usage_text(error: ArgumentError, argv: Sequence[str], commands: Collection[str]) -> str:
    """What is wrong with the arguments, and where to look.

    Args:
        error: From the parser.
        argv: What was typed.
        commands: Those there are.

    Returns:
        One sentence.
    """
    command = next((word for word in argv if word in commands), None)
    text = str(error) if argv else "no command was given"
    if command is not None:
        text = text.replace(f"{command}.", "")  # jsonargparse's own name for an argument of a command
    return f"{text}; see gpufeed {f'{command} ' if command else ''}--help"


def error_text(error: Exception) -> str:
    """What went wrong.

    Args:
        error: Any.

    Returns:
        The error's own words; those of the operating system with the file first.
    """
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show warnings that are meant for the user as one line each."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, UserWarning):
            say(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield
