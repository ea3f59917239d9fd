"""Neighbouring layers as one, so that a deep model can be searched like one of few layers. Pure.

::

    layers    0  1  2 | 3  4 | 5  6  7
    blocks       0    |  1   |    2         as I2 I1 W2 ...
                                            the layers' order is I7 I6 I5  I4 I3  W5 W6 W7 ...
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gpufeed.sync.costs import LayerCosts
from lightning_gpufeed.sync.plan import Action

__all__ = ["block_costs", "expanded", "grouped"]


def grouped(layers: Sequence[LayerCosts], most: int) -> list[range]:
    """Neighbours in blocks of about the same share of the compute, of the bytes and of the number of layers.

    Args:
        layers: In forward order.
        most: Blocks.

    Returns:
        The layers of each block, in forward order. None is empty.

    Example:
        >>> sizes = [1, 1, 1, 1, 100, 1]
        >>> grouped([LayerCosts("layer", 1.0, 1.0, 1.0, gradient_bytes=size) for size in sizes], most=3)
        [range(0, 3), range(3, 4), range(4, 6)]
    """
    seconds = sum(layer.compute_seconds for layer in layers) or 1.0
    size = sum(layer.gradient_bytes for layer in layers) or 1
    shares = [layer.compute_seconds / seconds + layer.gradient_bytes / size + 1 / len(layers) for layer in layers]
    total, before = sum(shares), 0.0
    blocks: dict[int, list[int]] = {}
    for i, share in enumerate(shares):
        blocks.setdefault(min(most - 1, int((before + share / 2) / total * most)), []).append(i)
        before += share
    return [range(block[0], block[-1] + 1) for block in blocks.values()]


def block_costs(layers: Sequence[LayerCosts], block: range) -> LayerCosts:
    """Layers as one. The weight gradients that cannot wait count with the input gradient, if others can.

    Args:
        layers: In forward order.
        block: Which of them.

    Returns:
        The block as a layer.

    Example:
        >>> layers = [LayerCosts("conv", 3.0, 2.0, 1.0, 8), LayerCosts("norm", 3.0, 2.0, 1.0, 8, is_deferrable=False)]
        >>> block_costs(layers, range(2)).input_grad_seconds
        5.0
    """
    inside = [layers[i] for i in block]
    waiting = [layer for layer in inside if layer.is_deferrable]
    fixed = sum(layer.weight_grad_seconds for layer in inside if not layer.is_deferrable) if waiting else 0.0
    return LayerCosts(
        f"{inside[0].name} .. {inside[-1].name}",
        sum(layer.forward_seconds for layer in inside),
        sum(layer.input_grad_seconds for layer in inside) + fixed,
        sum(layer.weight_grad_seconds for layer in waiting or inside),
        sum(layer.gradient_bytes for layer in inside),
        sum(layer.deferred_bytes for layer in waiting),
        bool(waiting),
    )


def expanded(order: Sequence[Action], blocks: Sequence[range], layers: Sequence[LayerCosts]) -> list[Action]:
    """The layers' order from that of blocks: each does what its block does; those that wait are done as in forward.

    Args:
        order: Of blocks, as if they were layers.
        blocks: The layers of each.
        layers: In forward order.

    Returns:
        The order of the layers, with I and W apart where both are computed at once but need not be.

    Example:
        >>> layers = [LayerCosts(name, 1.0, 1.0, 1.0, gradient_bytes=8) for name in "abcd"]
        >>> order = expanded([Action("I", 1), Action("B", 0), Action("W", 1)], [range(2), range(2, 4)], layers)
        >>> " ".join(map(str, order))
        'I3 I2 I1 W1 I0 W0 W2 W3'
    """
    expanded: list[Action] = []
    done: set[int] = set()  # blocks whose input gradient is there
    for place, (kind, block) in enumerate(order):
        is_next = place + 1 < len(order) and order[place + 1] == ("W", block)
        if kind == "W" and block in done:  # it waited, or is part of what is below
            if order[place - 1] != ("I", block):
                expanded += [Action("W", i) for i in blocks[block] if layers[i].is_deferrable]
            continue
        if kind == "I" and block in done:
            continue
        done.add(block)
        for i in reversed(blocks[block]):
            if not layers[i].is_deferrable:
                expanded.append(Action("B", i))
            elif kind == "W":  # before the input gradient, which follows at once here
                expanded += [Action("W", i), Action("I", i)]
            else:
                expanded += [Action("I", i), Action("W", i)] if kind == "B" or is_next else [Action("I", i)]
    return expanded
