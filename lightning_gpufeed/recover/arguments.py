"""Checks of what a user gives."""

from __future__ import annotations

from typing import Any

__all__ = ["check_choices", "check_kinds"]


def check_choices(mode: Any, loss_reduction: Any, split_check: Any, scale_lr: Any) -> None:
    """Refuse words that are none of those known, and those that do not go together.

    Args:
        mode: Of recovery.
        loss_reduction: Of the loss.
        split_check: What to do about a loss that does not follow from its parts.
        scale_lr: Only with mode "shrink_loader", and needed there.

    Raises:
        ValueError: What was given, what was expected.
    """
    _one_of("mode", mode, ("microbatch", "shrink_loader"))
    _one_of("loss_reduction", loss_reduction, ("mean", "sum"))
    _one_of("split_check", split_check, ("refuse", "warn", "skip"))
    if mode == "microbatch" and scale_lr is not None:
        raise ValueError(
            f"scale_lr is {scale_lr!r}, but mode is 'microbatch', which keeps the batch and its learning rate; "
            f"expected None."
        )
    if mode == "shrink_loader" and scale_lr not in ("linear", "sqrt", "keep"):
        raise ValueError(
            f"scale_lr is {scale_lr!r} and mode is 'shrink_loader'; expected 'linear', 'sqrt' or 'keep': what becomes "
            f"of the learning rate when batches get smaller is for you to say."
        )


def check_kinds(weight_fn: Any, split_fn: Any, **switches: Any) -> None:
    """Refuse what is no function, and what is no switch.

    Args:
        weight_fn: A function or None.
        split_fn: A function or None.
        **switches: True or False.

    Raises:
        ValueError: What was given, what was expected.
    """
    for name, function in (("weight_fn", weight_fn), ("split_fn", split_fn)):
        if function is not None and not callable(function):
            raise ValueError(f"{name} is {function!r}; expected a function of a batch, or None.")
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; expected True or False.")


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected {' or '.join(repr(one) for one in allowed)}.")
