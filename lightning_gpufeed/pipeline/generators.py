"""Schedules that are known, for any number of ranks and microbatches. Pure.

Two ranks, three microbatches, one column for each of F, I and W::

    gpipe           F0 F1 F2 .  .  .  B0--- B1--- B2---
                    .  F0 F1 F2 B0--- B1--- B2--- .  .

    one_f_one_b     F0 F1 .  .  B0--- F2 B1--- .  B2---     fewer activations at a time
                    .  F0 B0--- F1 B1--- F2 B2--- .  .

    fast_forward    F0 F1 F2 .  .  I0 W0 I1 W1 I2 W2        input gradients sent before any weight gradient
                    .  F0 F1 F2 I0 I1 I2 W0 W1 W2 .

    zero_bubble     F0 F1 .  I0 W0 F2 I1 W1 I2 W2           both
                    .  F0 I0 F1 I1 W0 F2 I2 W1 W2

How much longer a step is than the work of a rank, where F, I and W are the seconds of all layers of a rank, the same on
each; P ranks with v stages; at least as many microbatches; sends that cost nothing. And how many activations a rank
holds at most, in those that one microbatch has on it:

=============  ===================================  ===================================
schedule       longer by                            activations
=============  ===================================  ===================================
gpipe          (P-1) (F+I+W) / v                    M, all microbatches
one_f_one_b    (P-1) (F+I+W)                        P - rank
interleaved    (P-1) (F+I+W) / v                    P + (P-1) / v on the first rank
fast_forward   (P-1) (F+I) / v                      M, all microbatches
zero_bubble    (P-1) max(F, I, F+I-W) / v           P
zbv            (P-1) max(F, I) / 2, or more         P
=============  ===================================  ===================================

That of zbv is exact for F = I = W: each rank works without a pause, and only begins and ends at another time. That of
zero_bubble may be more if M is no multiple of P.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_gpufeed.pipeline.fill import MemoryRule, fill
from lightning_gpufeed.pipeline.orders import along_a_v, alternating, breadth_first, depth_first, groups
from lightning_gpufeed.pipeline.schedule import Schedule
from lightning_gpufeed.pipeline.simulate import Sends, StageCosts

__all__ = ["fast_forward", "gpipe", "interleaved", "one_f_one_b", "zbv", "zero_bubble"]

Costs = StageCosts | Sequence[StageCosts]


def gpipe(num_ranks: int, num_microbatches: int, num_virtual: int = 1) -> Schedule:
    """All forwards, then all backwards.

    Args:
        num_ranks: That share the model.
        num_microbatches: Of a batch.
        num_virtual: Stages on each rank. Stage s is on rank s mod `num_ranks`; all microbatches go through one of a
            rank's stages before the next.

    Returns:
        The schedule.

    Raises:
        ValueError: A number is not positive.

    Source:
        Huang et al., GPipe, NeurIPS 2019; with several stages, Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022.

    Example:
        >>> print(gpipe(2, 2))
        2 microbatches; stages on ranks 0 1
        0F0 0F1 0B0 0B1
        1F0 1F1 1B0 1B1
    """
    _check(num_ranks, num_microbatches, num_virtual)
    placement = _looped(num_ranks, num_virtual)
    ranks = (tuple(breadth_first(stages, num_microbatches, "B")) for stages in _stages(placement, num_ranks))
    return Schedule(tuple(ranks), placement, num_microbatches)


def one_f_one_b(num_ranks: int, num_microbatches: int, num_virtual: int = 1) -> Schedule:
    """A forward and a backward in turn, so that a rank holds few activations.

    Args:
        num_ranks: That share the model.
        num_microbatches: Of a batch.
        num_virtual: Stages on each rank: one.

    Returns:
        The schedule.

    Raises:
        ValueError: A number is not positive, or there are several stages on a rank.

    Source:
        Narayanan et al., PipeDream, SOSP 2019; without its stale weights, Fan et al., DAPPLE, PPoPP 2021.

    Example:
        >>> print(one_f_one_b(2, 3))
        3 microbatches; stages on ranks 0 1
        0F0 0F1 0B0 0F2 0B1 0B2
        1F0 1B0 1F1 1B1 1F2 1B2
    """
    if num_virtual != 1:
        raise ValueError(f"num_virtual is {num_virtual}; expected 1 for 1F1B. Use interleaved for several on a rank.")
    return interleaved(num_ranks, num_microbatches)


def interleaved(num_ranks: int, num_microbatches: int, num_virtual: int = 1) -> Schedule:
    """1F1B with several stages on each rank, which makes the wait at both ends of a step shorter.

    Args:
        num_ranks: That share the model.
        num_microbatches: Of a batch. Best a multiple of `num_ranks`: they go round in groups of about that many.
        num_virtual: Stages on each rank; with one it is plain 1F1B. Stage s is on rank s mod `num_ranks`.

    Returns:
        The schedule.

    Raises:
        ValueError: A number is not positive.

    Source:
        Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, SC 2021, section 2.2.

    Example:
        >>> print(interleaved(2, 2, num_virtual=2))
        2 microbatches; stages on ranks 0 1 0 1
        0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    _check(num_ranks, num_microbatches, num_virtual)
    placement = _looped(num_ranks, num_virtual)
    hops = 1 if num_virtual == 1 else 2  # what comes back needs longer than what goes out to the next rank
    ranks = (
        tuple(alternating(stages, num_ranks, num_microbatches, "B", hops * (num_ranks - 1 - rank)))
        for rank, stages in enumerate(_stages(placement, num_ranks))
    )
    return Schedule(tuple(ranks), placement, num_microbatches)


def fast_forward(
    num_ranks: int,
    num_microbatches: int,
    num_virtual: int = 1,
    *,
    placement: Literal["modulo", "linear"] = "modulo",
    costs: Costs = StageCosts(),  # noqa: B008 - a frozen value
    send_seconds: Sends = 0.0,
) -> Schedule:
    """GPipe's order with input gradients first: a stage sends one on before it computes the weight gradient.

    The last stage (with "linear", all stages of the last rank) puts off every weight gradient; any other stage lets one
    microbatch's wait at most.

    Args:
        num_ranks: That share the model.
        num_microbatches: Of a batch.
        num_virtual: Stages on each rank.
        placement: "modulo": stage s is on rank s mod `num_ranks`. "linear": a rank's stages follow each other, which
            takes fewer messages, but several stages on a rank do not help then.
        costs: Of each stage, or of every stage; equal ones if not given.
        send_seconds: From each stage to the next, or from every stage.

    Returns:
        The schedule.

    Raises:
        ValueError: A number is not positive, there is no such placement, or the costs are not those of the stages.

    Source:
        Oh et al., Out-of-order backprop, EuroSys 2022: gradient fast-forwarding and modulo allocation.

    Example:
        >>> print(fast_forward(2, 2))
        2 microbatches; stages on ranks 0 1
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1F1 1I0 1I1 1W0 1W1
    """
    _check(num_ranks, num_microbatches, num_virtual)
    num_stages = num_ranks * num_virtual
    if placement == "modulo":
        stage_to_rank, order, num_free = _looped(num_ranks, num_virtual), breadth_first, 1
    elif placement == "linear":
        stage_to_rank, order, num_free = tuple(s // num_virtual for s in range(num_stages)), depth_first, num_virtual
    else:
        raise ValueError(f"placement is {placement!r}; expected 'modulo' or 'linear'.")
    given = [order(stages, num_microbatches, "I") for stages in _stages(stage_to_rank, num_ranks)]
    rule = MemoryRule(max_waiting=(*[1] * (num_stages - num_free), *[None] * num_free))
    return fill(given, stage_to_rank, num_microbatches, rule, costs, send_seconds)


def zero_bubble(
    num_ranks: int,
    num_microbatches: int,
    num_virtual: int = 1,
    *,
    costs: Costs = StageCosts(),  # noqa: B008 - a frozen value
    send_seconds: Sends = 0.0,
) -> Schedule:
    """1F1B in which weight gradients fill the waits: ZB-H1, also called ZB1P; with several stages, interleaved.

    No rank holds more activations than the first rank of 1F1B: as many as `num_ranks` microbatches have in all of its
    stages, and a few more where the microbatches are no multiple of the ranks. An activation counts until its weight
    gradient is done.

    Args:
        num_ranks: That share the model.
        num_microbatches: Of a batch.
        num_virtual: Stages on each rank. Stage s is on rank s mod `num_ranks`.
        costs: Of each stage, or of every stage; equal ones if not given.
        send_seconds: From each stage to the next, or from every stage.

    Returns:
        The schedule.

    Raises:
        ValueError: A number is not positive, or the costs are not those of the stages.

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.1.

    Example:
        >>> print(zero_bubble(2, 3))
        3 microbatches; stages on ranks 0 1
        0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    _check(num_ranks, num_microbatches, num_virtual)
    stage_to_rank = _looped(num_ranks, num_virtual)
    given = [
        alternating(stages, num_ranks, num_microbatches, "I", num_ranks - 1 - rank)
        for rank, stages in enumerate(_stages(stage_to_rank, num_ranks))
    ]
    most = max(map(len, groups(num_ranks, num_microbatches)))
    rule = MemoryRule(max_live=(num_virtual - 1) * most + num_ranks)
    return fill(given, stage_to_rank, num_microbatches, rule, costs, send_seconds)


def zbv(
    num_ranks: int,
    num_microbatches: int,
    num_virtual: int = 2,
    *,
    costs: Costs = StageCosts(),  # noqa: B008 - a frozen value
    send_seconds: Sends = 0.0,
) -> Schedule:
    """Two stages on each rank, placed as a V: forward goes down all ranks and comes back up, so the first has the loss.

    Args:
        num_ranks: That share the model.
        num_microbatches: Of a batch; best twice as many as ranks or more.
        num_virtual: Stages on each rank: two.
        costs: Of each stage, or of every stage; equal ones if not given.
        send_seconds: From each stage to the next, or from every stage.

    Returns:
        The schedule.

    Raises:
        ValueError: A number is not positive, there are not two stages on a rank, or the costs are not those of the
            stages.

    Source:
        Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 6 (ZB-V).

    Example:
        >>> print(zbv(2, 2))
        2 microbatches; stages on ranks 0 1 1 0
        0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
        1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """
    _check(num_ranks, num_microbatches, num_virtual)
    if num_virtual != 2:
        raise ValueError(
            f"num_virtual is {num_virtual}; expected 2, one for each side of a V. Use zero_bubble for other numbers."
        )
    stage_to_rank = (*range(num_ranks), *reversed(range(num_ranks)))
    given = [along_a_v(rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    return fill(given, stage_to_rank, num_microbatches, MemoryRule(max_live=2 * num_ranks), costs, send_seconds)


def _check(num_ranks: int, num_microbatches: int, num_virtual: int) -> None:
    """Numbers that are counts."""
    numbers = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "num_virtual": num_virtual}
    for name, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; expected a whole number, at least 1.")


def _looped(num_ranks: int, num_virtual: int) -> tuple[int, ...]:
    """The rank of each stage where stages are dealt out like cards."""
    return tuple(stage % num_ranks for stage in range(num_ranks * num_virtual))


def _stages(stage_to_rank: Sequence[int], num_ranks: int) -> list[list[int]]:
    """The stages of each rank."""
    return [[stage for stage, owner in enumerate(stage_to_rank) if owner == rank] for rank in range(num_ranks)]
