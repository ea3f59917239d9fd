"""Gives what the last stage computes to all ranks, so that each can compute the loss; each microbatch's on its own.

A check goes along: do all ranks have the same batch? A loader that shuffles on each rank by itself would train the
first stage on other samples than the last, without any error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from lightning_gpufeed.errors import ScheduleError
from lightning_gpufeed.pipeline.call import Call
from lightning_gpufeed.pipeline.links import Links
from lightning_gpufeed.pipeline.nested import NestedSpec, TensorSpec, concatenate, flatten
from lightning_gpufeed.pipeline.program import Program

__all__ = ["OutputSharing", "fingerprint"]

_MOST_SAMPLED = 256
_FIRST_CHECKED, _CHECKED_EVERY = 8, 64


class OutputSharing:
    """From one rank to all of the pipeline, batch after batch."""

    def __init__(self, links: Links, source: int, num_stages: int, device: torch.device) -> None:
        """Nothing is known yet.

        Args:
            links: To the other ranks.
            source: Place of the rank that has the last stage.
            num_stages: Of the pipeline.
            device: Where outputs are.
        """
        self._links, self._source, self._device, self._border = links, source, device, num_stages - 1
        self._is_source = links.groups.place == source
        self._specs: dict[Hashable, NestedSpec] = {}
        self._num_calls, self._is_early = 0, False
        self._waits: list[Callable[[], None]] = []
        self._parts: dict[int, tuple[NestedSpec, list[Tensor]]] = {}

    def begin(self, call: Call, program: Program) -> None:
        """Before the forwards: post what is known to come.

        Args:
            call: The batch.
            program: What is about to be carried out; outputs are shared in its order.
        """
        self._waits, self._parts = [], {}
        self._num_calls += 1
        self._check_batch(call)
        # NCCL would have a kernel wait on the device for each message that is posted and not there yet.
        self._is_early = self._device.type == "cpu" and all(key in self._specs for key in call.batch.keys)
        keys = call.batch.keys
        if self._is_early and self._is_source:
            call.batch.on_output = lambda microbatch, output: self._give(keys[microbatch], output)
        elif self._is_early:
            for microbatch in self._order(program):
                self._take(microbatch, keys[microbatch])

    def _order(self, program: Program) -> list[int]:
        actions = program.ranks[self._source]
        return [one.microbatch for one in actions if one.kind == "F" and one.stage == self._border]

    def collect(self, call: Call, program: Program, note: Callable[[], int] | None = None) -> tuple[Any, int]:
        """After the forwards.

        Args:
            call: The batch.
            program: That was carried out.
            note: What the rank of the last stage has to say beside; only its own is asked.

        Returns:
            The whole output, on every rank, cut off from any graph; and the note, 0 without one.

        Raises:
            ScheduleError: Ranks have different batches, or the output cannot be put together.
        """
        call.batch.on_output = None
        unknown = [key for key in dict.fromkeys(call.batch.keys) if key not in self._specs]
        if unknown:
            told = {}
            if self._is_source:
                told = {call.batch.keys[place]: NestedSpec.of(one) for place, one in call.batch.outputs.items()}
            self._specs.update(self._links.share_object(told, self._source))
        if not self._is_early:
            for microbatch in self._order(program):
                if self._is_source:
                    self._give(call.batch.keys[microbatch], call.batch.outputs[microbatch])
                else:
                    self._take(microbatch, call.batch.keys[microbatch])
        said = torch.zeros(1, dtype=torch.int64, device=self._device)
        if note is not None:
            said += note() if self._is_source else 0
            self._waits.append(self._links.share([said], self._source))
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()
        if self._is_source:
            parts = [call.batch.outputs[place] for place in range(len(call.sizes))]
            call.batch.outputs = {}
        else:
            given = [self._parts[place] for place in range(len(call.sizes))]
            for spec, tensors in given:
                for tensor, its in zip(tensors, spec.tensors, strict=True):
                    tensor.requires_grad_(its.requires_grad)
            parts = [spec.build(tensors) for spec, tensors in given]
            self._parts = {}
        with torch.no_grad():
            return concatenate(parts, call.sizes), 0 if note is None else int(said)

    def _give(self, key: Hashable, output: Any) -> None:
        self._links.tell_spec(self._border, key, NestedSpec.of(output), None)
        leaves = [leaf.detach() for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
        tensors = [TensorSpec.of(leaf).laid_out(leaf) for leaf in leaves]
        self._waits.append(self._links.share(tensors, self._source))

    def _take(self, microbatch: int, key: Hashable) -> None:
        spec = self._specs[key]
        tensors = [its.empty(self._device) for its in spec.tensors]
        self._parts[microbatch] = spec, tensors
        self._waits.append(self._links.share(tensors, self._source))

    def _check_batch(self, call: Call) -> None:
        is_read = self._device.type == "cpu" or (
            self._num_calls <= _FIRST_CHECKED or self._num_calls % _CHECKED_EVERY == 0
        )
        own = fingerprint(call.value, is_read=is_read)
        if self._links.share_number(own, self._source) != own:
            raise ScheduleError(
                "The ranks of one pipeline were given different batches; expected the same batch on all of them. Let "
                "Lightning's own sampler distribute (use_distributed_sampler=True), have a loader of your own shard "
                "by replica and not by rank, and draw with the same seed on all of them (seed_everything)."
            )


def fingerprint(value: Any, *, is_read: bool = True) -> int:
    """A number that differs, most likely, if a batch does.

    Args:
        value: Any nest.
        is_read: Whether to look at values; where tensors are on a device, that waits for it.

    Returns:
        Made from the shapes, and from up to 256 elements of each tensor.
    """
    digest = hashlib.blake2b(digest_size=7)
    for leaf in flatten(value)[0]:
        if not isinstance(leaf, Tensor):
            digest.update(repr(leaf).encode() if isinstance(leaf, int) else b"/")
            continue
        digest.update(repr(tuple(leaf.shape)).encode())
        if leaf.numel() and is_read and not leaf.requires_grad:  # what layers give may be rounded otherwise
            flat = leaf.detach().reshape(-1) if leaf.is_contiguous() else leaf.detach().flatten()
            some = flat[:: max(1, flat.numel() // _MOST_SAMPLED)].contiguous().cpu()
            digest.update(some.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "big")
