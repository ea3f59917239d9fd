"""Carries out a program on one rank: computes each action, sends what others wait for, receives what it needs."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_gpufeed.pipeline.action import Action
from lightning_gpufeed.pipeline.links import Links
from lightning_gpufeed.pipeline.nested import NestedSpec, TensorSpec, flatten
from lightning_gpufeed.pipeline.program import Message, Program
from lightning_gpufeed.pipeline.randomness import Draws
from lightning_gpufeed.pipeline.spans import Spans
from lightning_gpufeed.pipeline.stage import Held, Stage

__all__ = ["Executor", "Pass"]

_AHEAD = {"cpu": 3}
"""How many messages are posted before they are needed. On devices one: NCCL has a kernel wait for each."""


@dataclass(eq=False)
class Pass:
    """One batch on its way through the pipeline.

    Attributes:
        inputs: Of the first stage, for each microbatch.
        keys: For each microbatch what all shapes follow from.
        draws: Random numbers.
        has_backward: Whether gradients follow.
        output_grads: For a microbatch's output the gradients, in the order of its tensors that require one; asked on
            the rank of the last stage alone.
        on_output: Told each microbatch's output there.
        outputs: Of the last stage, if it is here.
        input_grads: Of the first stage, if it is here: for each microbatch those of the tensors that require one.
        num_live: Activations in memory.
        held: What backward needs.
        here: What passes between two stages of this rank.
    """

    inputs: Sequence[Any]
    keys: Sequence[Hashable]
    draws: Draws
    has_backward: bool
    output_grads: Callable[[int], Sequence[Tensor | None]] | None = None
    on_output: Callable[[int, Any], None] | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    input_grads: dict[int, list[Tensor]] = field(default_factory=dict)
    num_live: int = 0
    held: dict[tuple[int, int], Held] = field(default_factory=dict)
    here: dict[tuple[bool, int, int], Any] = field(default_factory=dict)


class Executor:
    """One rank's part of a pipeline.

    Attributes:
        peak_activations: Most of `live_activations` at a time.
        spans: How long this rank computes ("busy"), while that is measured.
    """

    def __init__(self, stages: Mapping[int, Stage], links: Links, device: torch.device, num_stages: int) -> None:
        """Nothing is on its way.

        Args:
            stages: Of this rank, by their place in the pipeline.
            links: To the other ranks.
            device: Where activations are.
            num_stages: Of the pipeline.
        """
        self._stages, self._links, self._device, self._num_stages = dict(stages), links, device, num_stages
        self._place = links.groups.place
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self.peak_activations = 0
        self.spans = Spans(device)

    @property
    def live_activations(self) -> int:
        """Forwards whose weight gradients are not there yet: one is that of one stage and one microbatch."""
        return sum(one.num_live for one in self._passes)

    def run(self, program: Program, one: Pass, on_stage_done: Callable[[int], None] | None = None) -> None:
        """Do all that the program has for this rank.

        Args:
            program: What to do.
            one: With which batch; what comes out is noted there.
            on_stage_done: Told a stage whose weight gradients are all there.

        Raises:
            ScheduleError: Shapes are not what they were.
            SyncError: Another rank is gone.
        """
        self._passes.add(one)
        inbox = _Inbox(program, self._place, self._links, one, _AHEAD.get(self._device.type, 1))
        for action, needs, gives, ends_stage in program.steps(self._place):
            inbox.post_ahead()
            arrived = None if needs is None else inbox.take(needs)
            if action.kind == "F":
                self._forward(action, gives, one, arrived)
            elif action.kind == "W":
                self._weight_grad(action, one)
            else:
                self._input_grad(action, gives, one, arrived)
            if ends_stage and on_stage_done is not None:
                on_stage_done(action.stage)

    def _forward(self, action: Action, message: Message | None, one: Pass, arrived: Any) -> None:
        stage, _, microbatch = action
        value = arrived
        if stage == 0:
            value = one.inputs[microbatch]
        elif value is None:
            value = one.here.pop((False, stage, microbatch))
        with self.spans.measure("busy"):
            output, held = self._stages[stage].forward(value, microbatch, one.draws, has_backward=one.has_backward)
        if held is not None:
            one.held[stage, microbatch] = held
            one.num_live += 1
            self.peak_activations = max(self.peak_activations, self.live_activations)
        if stage + 1 == self._num_stages:
            one.outputs[microbatch] = output
            if one.on_output is not None:
                one.on_output(microbatch, output)
            return
        target = None if message is None else message.target
        self._links.tell_spec(stage, one.keys[microbatch], NestedSpec.of(output), target)
        if message is None:
            one.here[False, stage + 1, microbatch] = output
        else:
            leaves = [leaf.detach() for leaf in flatten(output)[0] if isinstance(leaf, Tensor)]
            self._links.send(message, [TensorSpec.of(leaf).laid_out(leaf) for leaf in leaves])

    def _input_grad(self, action: Action, message: Message | None, one: Pass, arrived: Any) -> None:
        stage, kind, microbatch = action
        grads = arrived
        if stage + 1 == self._num_stages:
            assert one.output_grads is not None
            grads = one.output_grads(microbatch)
        elif grads is None:
            grads = one.here.pop((True, stage, microbatch))
        held = one.held[stage, microbatch]
        with self.spans.measure("busy"):
            found = self._stages[stage].input_grad(held, grads)
        if stage == 0:
            one.input_grads[microbatch] = [_or_zeros(grad, leaf) for grad, leaf in found]
        elif message is None:
            one.here[True, stage - 1, microbatch] = [grad for grad, _ in found]
        else:
            tensors = [TensorSpec.of(leaf).laid_out(_or_zeros(grad, leaf)) for grad, leaf in found]
            if len(found) > 1:
                flags = [grad is not None for grad, _ in found]
                tensors.append(torch.tensor(flags, dtype=torch.uint8, device=self._device))
            self._links.send(message, tensors)
        if kind == "B":
            self._weight_grad(action, one)
        elif not held.waiting:
            one.num_live -= 1

    def _weight_grad(self, action: Action, one: Pass) -> None:
        held = one.held.pop((action.stage, action.microbatch))
        if held.waiting or action.kind == "B":
            one.num_live -= 1
        with self.spans.measure("busy"):
            self._stages[action.stage].weight_grad(held)


def _or_zeros(grad: Tensor | None, leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if grad is None else grad


class _Inbox:
    """What will arrive, posted in the order in which it is sent."""

    def __init__(self, program: Program, place: int, links: Links, one: Pass, num_ahead: int) -> None:
        self._links, self._pass, self._num_ahead = links, one, num_ahead
        self._coming = {source: deque(messages) for source, messages in program.arrivals(place).items()}
        self._needed = [step.needs for step in program.steps(place) if step.needs is not None]
        self._num_taken = self._num_posted = 0
        self._posted: dict[Message, tuple[NestedSpec, Callable[[], list[Tensor]]]] = {}

    def post_ahead(self) -> None:
        """Post what is needed next, as far as it is known what that will be."""
        end = min(len(self._needed), self._num_taken + self._num_ahead)
        while self._num_posted < end and self._post(self._needed[self._num_posted], has_to=False):
            self._num_posted += 1

    def take(self, message: Message) -> Any:
        """Wait for the next message that is needed; a nest for activations, a list for gradients."""
        self._post(message, has_to=True)
        self._num_taken += 1
        self._num_posted = max(self._num_posted, self._num_taken)
        spec, wait = self._posted.pop(message)
        tensors = wait()
        if message.is_grad and len(tensors) > 1:
            *tensors, flags = tensors
            return [tensor if is_there else None for tensor, is_there in zip(tensors, flags.tolist(), strict=True)]
        if message.is_grad:
            return tensors
        for tensor, its in zip(tensors, spec.tensors, strict=True):
            tensor.requires_grad_(its.requires_grad)
        return spec.build(tensors)

    def _post(self, message: Message, *, has_to: bool) -> bool:
        queue = self._coming[message.source]
        while message not in self._posted:
            following = queue[0]
            key = self._pass.keys[following.microbatch]
            spec = self._links.known_spec(following.border, key)
            if spec is None:
                if not has_to:
                    return False
                spec = self._links.ask_spec(following.border, key, following.source, self._pass.keys)
            queue.popleft()
            tensors = [its for its in spec.tensors if its.requires_grad or not following.is_grad]
            if following.is_grad and len(tensors) > 1:  # and which of them are there
                tensors.append(TensorSpec((len(tensors),), torch.uint8, requires_grad=False))
            self._posted[following] = (spec, self._links.receive(following, tensors))
        return True
