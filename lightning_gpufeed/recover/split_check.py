"""Does the loss of a batch follow from the losses of its parts? Looked at once, before a batch is split.

A mean over samples does. A loss that compares samples of a batch with each other (contrastive ones), or a mean over
tokens when samples have different numbers of them, does not: training on microbatches would be another training, and
nothing would say so. One part that fits is compared with its own halves: loss, gradients, and all that is logged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from lightning_gpufeed.device.samples import copy_batch
from lightning_gpufeed.recover.classify import Kind, classify
from lightning_gpufeed.recover.gradients import GradientStates
from lightning_gpufeed.recover.logged import LogCall, find_rules
from lightning_gpufeed.recover.snapshot import GeneratorStates
from lightning_gpufeed.recover.split_batch import BatchSplitter, Split
from lightning_gpufeed.recover.states import without_randomness
from lightning_gpufeed.recover.work import MOVES_ONCE, StepWork

__all__ = ["Finding", "check_split"]

TOLERANCE = 1e-3
"""Relative. float32 sums in another order differ by about 1e-6 of their terms, a wrong weight by far more."""
HALF_TOLERANCE = 3e-2
"""The same with half precision, whose terms have 8 to 11 bits."""

MAX_PARTS = 4
"""Parts of a batch that are looked at before something is left open."""


@dataclass(frozen=True)
class Finding:
    """What the comparison has shown.

    Attributes:
        mismatch: Why the batch may not be split; None: nothing against it.
        unknown: Why nothing could be said; None: it was compared.
        unmerged: Logged values of the whole that do not follow from those of the parts.
        open: Logged values that were zero, so that any way fits.
        buffers: Buffers that one pass changes.
        changed: Trained weights that a pass has changed by itself, which is not undone.
    """

    mismatch: str | None = None
    unknown: str | None = None
    unmerged: tuple[str, ...] = ()
    open: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()


def check_split(
    work: StepWork,
    split: Split,
    splitter: BatchSplitter,
    device: torch.device,
    *,
    is_half: bool = False,
    first: int = 0,
) -> Finding:
    """Compare a part with its halves; afterwards everything is as it was.

    Dropout and batch normalisation are switched to evaluation meanwhile, as they differ from pass to pass, or between a
    whole and its parts, by their nature.

    Args:
        work: Of a batch, saved or undone.
        split: The batch in microbatches; one is compared, others if it left something open.
        splitter: That made them.
        device: Of the training.
        is_half: Whether it computes in half precision.
        first: Which microbatch to begin with, counted round.

    Returns:
        What was found. Rules for logged values are put into `work.rules`.
    """
    finding = Finding()
    begin = first % len(split.microbatches)
    for part in (*split.microbatches[begin:], *split.microbatches[:begin])[:MAX_PARTS]:
        finding = _check_part(work, part, splitter, device, HALF_TOLERANCE if is_half else TOLERANCE)
        if finding.mismatch or finding.unknown or finding.changed or not finding.open:
            break
    return finding


def _check_part(
    work: StepWork, part: object, splitter: BatchSplitter, device: torch.device, tolerance: float
) -> Finding:
    try:
        halves = splitter.split(part, 2)
    except ValueError as error:
        return Finding(unknown=str(error))
    if len(halves.microbatches) < 2:
        return Finding(unknown="a microbatch is one sample, which has no parts to compare it with")
    gradients = GradientStates(work.states.parameters) if work.has_backward else None
    if gradients is not None:
        gradients.before_change()
    try:
        return _compared(work, part, halves, device, tolerance)
    finally:
        if gradients is not None:
            gradients.put_back()
        work.states.put_back()
        work.logs.put_back()


def _compared(work: StepWork, part: object, halves: Split, device: torch.device, tolerance: float) -> Finding:
    for is_all in (False, True):
        with without_randomness(work.states.module, is_all=is_all):
            generators = GeneratorStates(device)
            try:
                whole = _observed(work, [part], [1.0])
                buffers = tuple(work.states.buffers.changed_names())
                changed = work.states.weights.changed_trained()
                if changed:
                    return Finding(changed=tuple(changed))
                if generators.has_moved():
                    generators.put_back()
                    continue
                moved = work.states.buffers.values(buffers)
                parts = _observed(work, halves.microbatches, halves.weights)
                # After the second half, which began from the same: what is equal does not depend on the data.
                is_alike = [torch.equal(*pair) for pair in zip(moved, work.states.buffers.values(buffers), strict=True)]
                mismatch = _mismatch(whole, parts, tolerance)
                # A step with a state or generator of its own differs from itself as well.
                is_steady = mismatch is None or _mismatch(whole, _observed(work, [part], [1.0]), tolerance) is None
            except Exception as error:
                if classify(error, device.type).kind is not Kind.OTHER:
                    raise
                # Not every step can be run as in evaluation, or on so few samples.
                return Finding(unknown=f"the step does not run on a part by itself ({type(error).__name__}: {error})")
        if not is_steady:
            break
        rules, unmerged, is_open = find_rules(whole.logged[0], parts.logged, halves.weights, tolerance)
        work.rules.update(rules)
        once = [name for name, alike in zip(buffers, is_alike, strict=True) if alike]
        work.rules.update({f"{MOVES_ONCE}{name}": "max" for name in once})
        buffers = tuple(name for name in buffers if name not in once)
        return Finding(mismatch, unmerged=tuple(unmerged), open=tuple(is_open), buffers=buffers)
    return Finding(unknown="no two passes of the step over the same part are the same, so it draws random numbers")


@dataclass(frozen=True)
class _Observed:
    """What passes gave: loss, what each of them logged, gradients in host memory."""

    loss: float | None
    logged: list[list[LogCall]]
    gradients: list[torch.Tensor | None]


def _observed(work: StepWork, microbatches: Sequence[object], weights: Sequence[float]) -> _Observed:
    """Passes over copies, as a step may change its batch."""
    parameters = work.states.parameters
    for parameter in parameters:
        parameter.grad = None
    loss, logged = work.observe([copy_batch(microbatch) for microbatch in microbatches], weights)
    gradients = [None if parameter.grad is None else _on_host(parameter) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return _Observed(loss, logged, gradients)


def _on_host(parameter: nn.Parameter) -> torch.Tensor:
    gradient = parameter.grad
    assert gradient is not None
    gradient = gradient.detach()
    return gradient.to_dense().cpu() if gradient.layout is not torch.strided else gradient.cpu()


def _mismatch(whole: _Observed, parts: _Observed, tolerance: float) -> str | None:
    if whole.loss is None or parts.loss is None:
        return None
    difference = whole_square = parts_square = 0.0
    for of_whole, of_parts in zip(whole.gradients, parts.gradients, strict=True):
        if of_whole is not None:
            whole_square += _norm(of_whole) ** 2
        if of_parts is not None:
            parts_square += _norm(of_parts) ** 2
        if of_whole is not None and of_parts is not None:
            difference += _norm(of_whole.float() - of_parts.float()) ** 2
        else:
            difference += sum(_norm(gradient) ** 2 for gradient in (of_whole, of_parts) if gradient is not None)
    size = max(whole_square, parts_square) ** 0.5
    if 0 < size < math.inf:
        # They are what is trained with. The loss itself may be small by cancellation, where its rounding is large.
        error = difference**0.5 / size
        is_same = error <= tolerance
    else:
        error = 0.0
        scale = max(abs(whole.loss), abs(parts.loss))
        is_same = not math.isfinite(scale) or abs(whole.loss - parts.loss) <= tolerance * scale
    if is_same:
        return None
    return (
        f"the loss of a batch does not follow from the losses of its parts: {whole.loss:.6g} for a part as a whole, "
        f"{parts.loss:.6g} from its two halves; gradients differ by {error:.2g} of their size"
    )


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.float()))
