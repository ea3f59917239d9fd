"""In which order the weight gradients that wait are computed. Pure: names in, names out.

::

    layers          1   2   3   4   5   6                     forward order
    conventional    I6 W6 I5 W5 I4 W4 I3 W3 I2 W2 I1 W1
    reverse_first_k(3)
                    I6 W6 I5 W5 I4 W4 I3 I2 I1 W1 W2 W3       the layers that the next forward needs first come first
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["BackwardOrder", "conventional", "from_actions", "reverse_first_k"]


@dataclass(frozen=True)
class BackwardOrder:
    """What runs when. A layer that is in neither part is not deferred.

    Attributes:
        after: For a layer's name, whose weight gradients are computed once its input gradient is there.
        last: Whose weight gradients are computed when the chain of input gradients has reached its end, in this order.
    """

    after: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    last: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Each layer has one place.

        Raises:
            ValueError: One has several.
        """
        names = [*self.last, *(name for run in self.after.values() for name in run)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"{', '.join(twice)}: expected one place for each layer in the order, got several.")

    @property
    def deferred(self) -> frozenset[str]:
        """The layers whose weight gradients wait."""
        return frozenset(self.last).union(*self.after.values())


def conventional() -> BackwardOrder:
    """Nothing waits: what autograd does by itself.

    Returns:
        The order.
    """
    return BackwardOrder()


def reverse_first_k(names: Sequence[str], k: int) -> BackwardOrder:
    """The first layers' weight gradients wait until the end, then come in the order in which forward needs them.

    Args:
        names: Of layers, in the order of forward.
        k: How many wait: 0 to all of them.

    Returns:
        The order.

    Raises:
        ValueError: `k` is out of range.

    Source:
        Oh et al., Out-of-order backprop, EuroSys 2022: reverse first-k scheduling.

    Example:
        >>> reverse_first_k(["a", "b", "c"], 2).last
        ('a', 'b')
    """
    if not 0 <= k <= len(names):
        raise ValueError(f"k is {k}; expected 0 to {len(names)}, the number of layers that can wait.")
    return BackwardOrder(last=tuple(names[:k]))


def from_actions(actions: Iterable[tuple[str, str]]) -> BackwardOrder:
    """The order that a list of actions says.

    Args:
        actions: Pairs of "I" or "W" and a layer's name, in the order of backward. A W right after the I of the same
            layer is no waiting.

    Returns:
        The order.

    Raises:
        ValueError: An action is neither, comes twice, or a W comes before its I.

    Example:
        >>> from_actions([("I", "b"), ("I", "a"), ("W", "b"), ("W", "a")]).last
        ('b', 'a')
    """
    after: dict[str, list[str]] = {}
    latest, done = "", set()
    for kind, name in actions:
        if kind == "I":
            if name in after:
                raise ValueError(f"I {name} comes twice; expected each layer's input gradient once.")
            latest = name
            after[name] = []
        elif kind == "W":
            if name not in after:
                raise ValueError(f"W {name} comes before I {name}; expected the input gradient first.")
            if name in done:
                raise ValueError(f"W {name} comes twice; expected each layer's weight gradient once.")
            done.add(name)
            after[latest].append(name)
        else:
            raise ValueError(f"{kind!r} is no action; expected 'I' or 'W'.")
    last: list[str] = []
    if latest and after[latest] != [latest]:
        last = after.pop(latest)
    runs = {name: tuple(run) for name, run in after.items() if run and run != [name]}
    return BackwardOrder(runs, tuple(last))
