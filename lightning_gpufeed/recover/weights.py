"""Weights that a step changes by itself, before any optimizer does: a momentum teacher, a target network, a clamp.

Trained weights are only watched: a step that changes them cannot be undone, and says so. Frozen ones are copied if they
are seen to change, so a teacher that moves at the begin of a step moves once.
"""

from __future__ import annotations

import torch
from torch import nn

from lightning_gpufeed.recover.attributes import can_be_copied_into

__all__ = ["WeightStates"]

FEW_BYTES = 16 * 2**20
"""Up to so many bytes of frozen weights are copied in every step, on their device."""
PROBED_BYTES = 256 * 2**20
"""Up to so many bytes of frozen weights are compared by value in the first batches; beyond, by torch's count alone."""


class WeightStates:
    """What the weights of a module are before a batch."""

    def __init__(self, module: nn.Module) -> None:
        """Find them.

        Args:
            module: Its submodules too.
        """
        weights = [(name, weight) for name, weight in module.named_parameters() if can_be_copied_into(weight)]
        self._trained = [(name, weight) for name, weight in weights if weight.requires_grad]
        self._frozen = [(name, weight) for name, weight in weights if not weight.requires_grad]
        self._trained_marks: list[tuple[int, int]] = []
        self._frozen_marks: list[tuple[int, int]] = []
        # Of the frozen ones: all at first, then those that move.
        self._copied: list[int] = list(range(len(self._frozen)))
        self._copies: list[torch.Tensor] = []
        self._num_saves = 0
        self._is_few = sum(weight.numel() * weight.element_size() for _, weight in self._frozen) <= FEW_BYTES

    @torch.no_grad()
    def save(self) -> None:
        """Note them as they are now."""
        self._trained_marks = [_mark(weight) for _, weight in self._trained]
        if not self._frozen:
            return
        if self._num_saves == 1 and not self._is_few:
            self._keep_moving()
        self._frozen_marks = [_mark(weight) for _, weight in self._frozen]
        sources = [self._frozen[i][1].detach() for i in self._copied]
        if self._num_saves == 0:
            is_small = sum(source.numel() * source.element_size() for source in sources) <= PROBED_BYTES
            self._copied = self._copied if is_small else []
            self._copies = self._copied_or_not(sources if is_small else [])
        elif self._copied:
            is_alike = [copy.shape == source.shape for copy, source in zip(self._copies, sources, strict=True)]
            if all(is_alike):
                torch._foreach_copy_(self._copies, sources)
            else:
                self._copies = self._copied_or_not(sources)
        self._num_saves += 1

    def _copied_or_not(self, sources: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies, large ones on the host; none where memory is short, as a training that runs must not end for that."""
        try:
            return [source.clone() if self._is_few else source.to("cpu", copy=True) for source in sources]
        except (RuntimeError, MemoryError):
            self._copied = []
            return []

    def _keep_moving(self) -> None:
        """After the first batch: only those that it has changed are copied from now on."""
        moved = [
            i
            for i, copy in zip(self._copied, self._copies, strict=True)
            if not torch.equal(self._frozen[i][1].detach().to("cpu"), copy)
        ]
        marked = [i for i, (_, weight) in enumerate(self._frozen) if _mark(weight) != self._frozen_marks[i]]
        kept = dict(zip(self._copied, self._copies, strict=True))
        self._copied = [i for i in sorted({*moved, *marked}) if i in kept]
        self._copies = [kept[i] for i in self._copied]

    def changed_trained(self) -> list[str]:
        """Names of trained weights that were changed since, without an optimizer."""
        return [
            name
            for (name, weight), mark in zip(self._trained, self._trained_marks, strict=True)
            if _mark(weight) != mark
        ]

    @torch.no_grad()
    def put_back(self) -> list[str]:
        """Give frozen weights the values they had.

        Returns:
            Names of those that have changed and cannot be put back, and of trained ones that have changed.
        """
        lost = self.changed_trained()
        for i, copy in zip(self._copied, self._copies, strict=True):
            weight = self._frozen[i][1]
            is_marked = _mark(weight) != self._frozen_marks[i]
            if weight.shape == copy.shape:
                if is_marked or not torch.equal(weight.detach().to(copy.device), copy):
                    weight.detach().copy_(copy)
            else:
                weight.data = copy.to(weight.device, copy=True)
        copied = set(self._copied)
        for i, (name, weight) in enumerate(self._frozen):
            if i in copied:
                self._frozen_marks[i] = _mark(weight)
            elif _mark(weight) != self._frozen_marks[i]:
                lost.append(name)
        return lost


def _mark(weight: torch.Tensor) -> tuple[int, int]:
    """Changes with nearly everything that is done to a tensor; `.data.mul_()` leaves no mark."""
    return (-1 if weight.is_inference() else weight._version, weight.data_ptr())
