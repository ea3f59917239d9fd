"""What a device computes in which order in backward, and in which order the gradients are sent. Pure: a value.

::

    layers          0   1   2   3                                   forward order
    conventional    device  B3 B2 B1 B0                             then the optimizer steps
                    link       3  2  1  0
    reverse_first_k(2), across iterations
                    device  B3 B2 I1 I0 W0 W1 | F0 F1 F2 F3         layer i waits for its own gradient only
                    link       3  2        0  1

Where the norm of all gradients has to be known before the first update, each sum is made in two halves::

    scattered       device  B3 B2 B1 B0          | F0 F1 F2 F3
                    link       3  2  1  0  norm  0 1 2 3            each rank sums a part of a bucket; then parts go out

Text form, for logs, YAML and other ranks: when the optimizer steps; the actions; the buckets in the order of issue,
each with its pieces as layer:begin-end in bytes::

    cross; B3 B2 I1 I0 W0 W1; 3:0-4096 2:0-4096 0:0-4096 1:0-512+1:512-4096
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.sync.costs import LayerCosts

__all__ = [
    "Action",
    "Bucket",
    "Piece",
    "SyncPlan",
    "conventional",
    "peak_deferred_bytes",
    "reverse_first_k",
    "validate",
]

_CROSS, _SCATTER, _BARRIER, _NOTHING = "cross", "scatter", "barrier", "-"
_REPLAN = "The plan is one of another model; make one for this."


class Action(NamedTuple):
    """One thing that the device does in backward.

    Attributes:
        kind: "I" the input gradient, "W" the weight gradient, "B" both at once.
        layer: Its place in forward, from 0.
    """

    kind: Literal["I", "W", "B"]
    layer: int

    def __str__(self) -> str:
        """As in the text form of a plan."""
        return f"{self.kind}{self.layer}"


class Piece(NamedTuple):
    """A part of one layer's gradient.

    Attributes:
        layer: Its place in forward, from 0.
        begin_byte: Where the part begins in the gradient.
        end_byte: Where it ends; not part of it.
    """

    layer: int
    begin_byte: int
    end_byte: int

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.end_byte - self.begin_byte

    def __str__(self) -> str:
        """As in the text form of a plan."""
        return f"{self.layer}:{self.begin_byte}-{self.end_byte}"


Bucket = tuple[Piece, ...]
"""What is reduced in one call."""


@dataclass(frozen=True)
class SyncPlan:
    """The order of a step, the same on all ranks.

    A plan is only a value: `validate` says whether it can be carried out for a model.

    Attributes:
        backward: The device's actions, in order. A "B" has its weight gradient ready at its end.
        buckets: In the order of issue. The link takes one at a time, first in, first out.
        cross_iteration: False: the optimizer steps when all buckets have arrived, as in DDP. True: a layer is updated
            right before its next forward, which waits only for that layer's pieces.
        is_scattered: True, of a plan that crosses: in backward each rank sums a part of each bucket, then the norm is
            known, and then parts are gathered in the order in which forward needs them.

    Example:
        >>> plan = SyncPlan.parse("cross; I1 I0 W0 W1; 0:0-8 1:0-4 1:4-8")
        >>> plan.buckets[1]
        (Piece(layer=1, begin_byte=0, end_byte=4),)
        >>> SyncPlan.parse(str(plan)) == plan
        True
    """

    backward: tuple[Action, ...]
    buckets: tuple[Bucket, ...]
    cross_iteration: bool = False
    is_scattered: bool = False

    @property
    def gathers(self) -> tuple[int, ...]:
        """Numbers of the buckets in the order in which a scattered plan gathers them: by what forward needs first."""
        return tuple(sorted(range(len(self.buckets)), key=lambda n: min(piece.layer for piece in self.buckets[n])))

    @property
    def deferred(self) -> tuple[int, ...]:
        """Layers whose weight gradient is not computed with the input gradient, in the order in which it is."""
        return tuple(action.layer for action in self.backward if action.kind == "W")

    def __str__(self) -> str:
        """The form that `parse` reads."""
        backward = " ".join(map(str, self.backward)) or _NOTHING
        buckets = " ".join("+".join(map(str, bucket)) for bucket in self.buckets) or _NOTHING
        when = _SCATTER if self.is_scattered else _CROSS if self.cross_iteration else _BARRIER
        return f"{when}; {backward}; {buckets}"

    @classmethod
    def parse(cls, text: str) -> SyncPlan:
        """Read the text form.

        Args:
            text: What `str` of a plan gives.

        Returns:
            The plan, equal to the one that was written.

        Raises:
            ValueError: The text is no plan.
        """
        parts = [part.split() for part in text.split(";")]
        if len(parts) != 3 or parts[0] not in ([_CROSS], [_SCATTER], [_BARRIER]):
            raise ValueError(
                f"{_short(text)} is no plan; expected '{_CROSS}', '{_SCATTER}' or '{_BARRIER}', the actions and the "
                f"buckets, with ';' between, such as 'cross; B1 I0 W0; 1:0-8 0:0-8'."
            )
        actions = () if parts[1] == [_NOTHING] else tuple(_parse_action(word) for word in parts[1])
        buckets = () if parts[2] == [_NOTHING] else tuple(_parse_bucket(word) for word in parts[2])
        return cls(actions, buckets, parts[0] != [_BARRIER], parts[0] == [_SCATTER])


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _parse_action(word: str) -> Action:
    match = re.fullmatch(r"(I|W|B)([0-9]+)", word)
    if match is None:
        raise ValueError(f"{_short(word)} is no action; expected I, W or B and the number of a layer, such as 'I0'.")
    kind: Literal["I", "W", "B"] = "I" if match[1] == "I" else "W" if match[1] == "W" else "B"
    return Action(kind, int(match[2]))


def _parse_bucket(word: str) -> Bucket:
    pieces = []
    for part in word.split("+"):
        match = re.fullmatch(r"([0-9]+):([0-9]+)-([0-9]+)", part)
        if match is None:
            raise ValueError(f"{_short(part)} is no piece; expected layer:begin-end in bytes, such as '3:0-4096'.")
        pieces.append(Piece(int(match[1]), int(match[2]), int(match[3])))
    return tuple(pieces)


def conventional(layers: Sequence[LayerCosts], bucket_bytes: int) -> SyncPlan:
    """What DDP does: backward from the last layer to the first, buckets in the same order, then one optimizer step.

    Args:
        layers: In forward order.
        bucket_bytes: A bucket is closed when it holds that much; 1 gives each layer its own.

    Returns:
        The plan.

    Raises:
        ValueError: `bucket_bytes` is not positive.

    Example:
        >>> layers = [LayerCosts(name, 1.0, 1.0, 1.0, gradient_bytes=8) for name in "abc"]
        >>> str(conventional(layers, bucket_bytes=16))
        'barrier; B2 B1 B0; 2:0-8+1:0-8 0:0-8'
    """
    order = range(len(layers) - 1, -1, -1)
    return SyncPlan(tuple(Action("B", i) for i in order), _filled(layers, order, bucket_bytes))


def reverse_first_k(
    layers: Sequence[LayerCosts],
    k: int,
    bucket_bytes: int,
    cross_iteration: bool = True,
    is_weight_first: bool = False,
) -> SyncPlan:
    """The first layers' weight gradients wait until backward's end, and come in the order in which forward needs them.

    The other layers keep the link busy during backward. Those that cannot wait stay where they are.

    Args:
        layers: In forward order.
        k: How many of the first layers wait: 0 to all.
        bucket_bytes: A bucket is closed when it holds that much. No bucket holds both layers that wait and others.
        cross_iteration: Whether the next forward starts before all has arrived.
        is_weight_first: Whether a layer that does not wait computes its weight gradient before its input gradient, so
            that it can be sent earlier.

    Returns:
        The plan.

    Raises:
        ValueError: `k` or `bucket_bytes` is out of range.

    Source:
        Oh et al., Out-of-order backprop, EuroSys 2022: reverse first-k scheduling.

    Example:
        >>> layers = [LayerCosts(name, 1.0, 1.0, 1.0, gradient_bytes=8) for name in "abc"]
        >>> str(reverse_first_k(layers, k=2, bucket_bytes=1))
        'cross; B2 I1 I0 W0 W1; 2:0-8 0:0-8 1:0-8'
    """
    if not 0 <= k <= len(layers):
        raise ValueError(f"k is {k}; expected 0 to {len(layers)}, the number of layers.")
    order = range(len(layers) - 1, -1, -1)
    can_wait = [layer.is_deferrable and layer.gradient_bytes > 0 for layer in layers]
    waiting = [i for i in range(k) if can_wait[i]]
    others = [i for i in order if i >= k or not can_wait[i]]
    chain: list[Action] = []
    for i in order:
        if not can_wait[i] or (i >= k and not is_weight_first):
            chain.append(Action("B", i))
        else:
            chain += [Action("I", i)] if i < k else [Action("W", i), Action("I", i)]
    buckets = _filled(layers, others, bucket_bytes) + _filled(layers, waiting, bucket_bytes)
    return SyncPlan((*chain, *(Action("W", i) for i in waiting)), buckets, cross_iteration)


def _filled(layers: Sequence[LayerCosts], order: Iterable[int], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Whole gradients in buckets that are closed at a size."""
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes is {bucket_bytes}; expected at least 1.")
    buckets: list[list[Piece]] = [[]]
    held = 0
    for i in order:
        if not layers[i].gradient_bytes:
            continue
        if held >= bucket_bytes:
            buckets.append([])
            held = 0
        buckets[-1].append(Piece(i, 0, layers[i].gradient_bytes))
        held += layers[i].gradient_bytes
    return tuple(tuple(bucket) for bucket in buckets if bucket)


def peak_deferred_bytes(backward: Iterable[Action], layers: Sequence[LayerCosts]) -> int:
    """Most memory that weight gradients that wait keep alive at a time.

    A weight gradient right after its input gradient has not waited.

    Args:
        backward: Actions of a plan.
        layers: In forward order.

    Returns:
        Bytes, on top of what backward needs without any waiting.

    Example:
        >>> layers = [LayerCosts(name, 1.0, 1.0, 1.0, gradient_bytes=8, deferred_bytes=100) for name in "abc"]
        >>> peak_deferred_bytes(SyncPlan.parse("cross; B2 I1 I0 W0 W1; -").backward, layers)
        100
    """
    held = peak = 0
    done: set[int] = set()  # weight gradients
    waiting: set[int] = set()
    latest: int | None = None  # whose input gradient came just now
    for kind, layer in backward:
        is_next = kind == "W" and layer == latest
        if latest is not None and not is_next:
            waiting.add(latest)
            held += layers[latest].deferred_bytes
            peak = max(peak, held)
        latest = layer if kind == "I" and layer not in done else None
        if kind == "W":
            done.add(layer)
            if layer in waiting:
                waiting.remove(layer)
                held -= layers[layer].deferred_bytes
    return peak


def validate(plan: SyncPlan, layers: Sequence[LayerCosts], memory_cap_bytes: int | None = None) -> None:
    """Check that a plan can be carried out for a model: each gradient is computed after what it needs, and sent once.

    Args:
        plan: To check.
        layers: In forward order.
        memory_cap_bytes: Most that weight gradients that wait may keep alive; None for no limit.

    Raises:
        ScheduleError: The plan cannot be carried out, or holds more memory.
    """
    _check_actions(plan.backward, layers)
    _check_buckets(plan.buckets, layers)
    if plan.is_scattered and not plan.cross_iteration:
        raise ScheduleError("The plan is scattered and does not cross; expected cross_iteration=True with it.")
    peak = peak_deferred_bytes(plan.backward, layers)
    if memory_cap_bytes is not None and peak > memory_cap_bytes:
        raise ScheduleError(
            f"The weight gradients that wait keep {peak} bytes alive; expected at most {memory_cap_bytes}. "
            f"Let fewer of layers {', '.join(map(str, sorted(plan.deferred)))} wait, or raise the cap."
        )


def _check_actions(backward: Sequence[Action], layers: Sequence[LayerCosts]) -> None:
    """Each gradient of each layer once, and not before the gradient that it is made of."""
    done: set[tuple[str, int]] = set()
    for action in backward:
        kind, layer = action
        if not 0 <= layer < len(layers):
            raise ScheduleError(f"{action}: there is no layer {layer}; expected 0 to {len(layers) - 1}. {_REPLAN}")
        name = layers[layer].name
        if kind != "B" and not layers[layer].is_deferrable:
            raise ScheduleError(
                f"{action}: layer {layer} ({name}) has both gradients from one call; expected B{layer} in its place."
            )
        for part in "IW" if kind == "B" else kind:
            if (part, layer) in done:
                raise ScheduleError(
                    f"{action}: expected each gradient of layer {layer} ({name}) once; leave out this one."
                )
            done.add((part, layer))
        if layer + 1 < len(layers) and ("I", layer + 1) not in done:
            raise ScheduleError(
                f"{action} needs the input gradient of layer {layer + 1} ({layers[layer + 1].name}); "
                f"expected I{layer + 1} or B{layer + 1} before it."
            )
    for layer, costs in enumerate(layers):
        for part in "IW":
            if (part, layer) not in done:
                raise ScheduleError(
                    f"There is no {part} of layer {layer} ({costs.name}); expected {part}{layer} or B{layer}."
                )


def _check_buckets(buckets: Sequence[Bucket], layers: Sequence[LayerCosts]) -> None:
    """Every byte of every gradient in exactly one piece."""
    pieces: list[list[Piece]] = [[] for _ in layers]
    for place, bucket in enumerate(buckets):
        if not bucket:
            raise ScheduleError(f"Bucket {place} has no piece; expected at least one. Leave the bucket out.")
        for piece in bucket:
            if not 0 <= piece.layer < len(layers):
                raise ScheduleError(
                    f"{piece}: there is no layer {piece.layer}; expected 0 to {len(layers) - 1}. {_REPLAN}"
                )
            size = layers[piece.layer].gradient_bytes
            if not 0 <= piece.begin_byte < piece.end_byte <= size:
                raise ScheduleError(
                    f"{piece}: the gradient of layer {piece.layer} ({layers[piece.layer].name}) has {size} bytes; "
                    f"expected a piece inside it, with at least one. {_REPLAN}"
                )
            pieces[piece.layer].append(piece)
    for layer, costs in enumerate(layers):
        end = 0
        for piece in sorted(pieces[layer]):
            if piece.begin_byte != end:
                raise ScheduleError(
                    f"{piece}: expected the piece to begin at byte {end}, where the one before it ends."
                )
            end = piece.end_byte
        if end != costs.gradient_bytes:
            raise ScheduleError(
                f"Bytes {end} to {costs.gradient_bytes} of layer {layer} ({costs.name}) are in no bucket; "
                f"expected every byte in one. Add the piece {Piece(layer, end, costs.gradient_bytes)}."
            )
