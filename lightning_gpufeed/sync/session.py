"""Out-of-order gradient sync for a training loop: forward, backward, step, and what crosses from one to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn, optim

from lightning_gpufeed.backprop.engine import at_end_of_backward
from lightning_gpufeed.backprop.split import splittable_layers
from lightning_gpufeed.errors import SyncError
from lightning_gpufeed.sync.awaited import AwaitedParameters
from lightning_gpufeed.sync.candidates import PlanOptions
from lightning_gpufeed.sync.deferral import Deferral
from lightning_gpufeed.sync.hooks import ModelHooks, compiled_parts
from lightning_gpufeed.sync.layers import SyncLayer, find_layers, sparse_parameters
from lightning_gpufeed.sync.optimizers import PendingSteps
from lightning_gpufeed.sync.outside import outside
from lightning_gpufeed.sync.plan import SyncPlan
from lightning_gpufeed.sync.ranks import Ranks
from lightning_gpufeed.sync.reducer import Reducer, without_gradient
from lightning_gpufeed.sync.tuner import Tuner
from lightning_gpufeed.sync.usage import Usage

__all__ = ["GradientSync"]

_PATIENCE_SECONDS = 5.0


class GradientSync:
    """Keeps the replicas of a model on several ranks equal.

    What stays bitwise equal to `DistributedDataParallel` with two ranks: every gradient, parameter and buffer, whoever
    reads it, at any time outside of backward. With more ranks sums are rounded in another order. What differs is when
    things happen: a gradient arrives, and its parameter is updated, no later than when it is used.

    Example:
        A loop by hand, in each of several processes of a group::

            sync = GradientSync(model, Ranks(timeout), PlanOptions())
            for x, y in batches:
                sync.forward_begins()          # buffers as on rank 0; a new plan, if there is one
                loss = criterion(model(x), y)  # each parameter is updated right before it is used
                optimizer.zero_grad()
                sync.backward_begins(loss)     # what forward has not used is updated now
                loss.backward()                # gradients are sent as they come
                sync.backward_ends()           # weight gradients that waited; all gradients are on the wire
                sync.step(optimizer)           # taken as gradients arrive, or at once: the same result
            sync.close()

    Source:
        Oh et al., Out-of-order backprop, EuroSys 2022; updates in the next forward as in ByteScheduler (Peng et al.,
        SOSP 2019).
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        options: PlanOptions,
        *,
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        can_defer: bool = True,
        reduces_untold: bool = False,
        on_message: Callable[..., None] = lambda message, figures=None: None,
    ) -> None:
        """Make all ranks start from the parameters and buffers of rank 0.

        Args:
            model: On its device, the same on all ranks.
            ranks: Who takes part.
            options: What plan to use, or that the best is to be found.
            find_unused_parameters: Whether a parameter may have no gradient in a step, on some ranks or on all.
            broadcast_buffers: Whether each forward starts from rank 0's buffers.
            can_defer: Whether weight gradients may wait, and updates cross into the next forward.
            reduces_untold: Whether gradients are also reduced in a backward that `backward_begins` was not called for.
                If not, they stay this rank's own, as in an inner loop of a training step.
            on_message: Told what was decided, on every rank: a line, and for a decision its figures.

        Raises:
            SyncError: The ranks have different models.
            ValueError: The options name more layers than the model has.
        """
        self.model, self.ranks, self._options = model, ranks, options
        self._find_unused, self._reduces_untold, self._on_message = find_unused_parameters, reduces_untold, on_message
        self._has_buffers = broadcast_buffers and any(True for _ in model.buffers())
        self.can_cross = can_defer
        """Whether the next step may be taken in the next forward; else it is an ordinary one."""
        self.is_syncing = True
        """False during those microbatches of an accumulation that are not the last."""
        self.are_buffers_due, self._is_in_backward, self._is_step_over = True, False, False
        self._num_microbatches = 0
        self._awaited = AwaitedParameters(self._arrive)
        self.steps = PendingSteps(self.synchronize)
        """Of optimizers; `steps.watch_state` has to be told of each."""
        self._deferral = Deferral(model, options.memory_cap_bytes)
        options.check(sum(any(True for _ in part.parameters(recurse=False)) for part in model.modules()))
        # The name under which DistributedDataParallel looks for them, with a dot before those of the model itself.
        self._ignored = {name.removeprefix(".") for name in getattr(model, "_ddp_params_and_buffers_to_ignore", ())}
        ranks.check_same(model, self._ignored)
        ranks.broadcast(model, self._ignored)
        self._compiled, is_borderless = compiled_parts(model)
        self.can_defer = can_defer and not is_borderless
        self._hooks = ModelHooks(model, self._before_forward, self._after_grad)
        self._restart()

    @property
    def peak_deferred_bytes(self) -> int:
        """Most that weight gradients that wait have kept alive at a time."""
        return self._deferral.peak_bytes

    @property
    def plan(self) -> SyncPlan:
        """What is done in the current step; numbers `layers`."""
        return self._tuner.plan

    @property
    def layers(self) -> list[SyncLayer]:
        """What the plan numbers: in forward order once that is known."""
        return self._tuner.layers

    @property
    def is_settled(self) -> bool:
        """Whether the plan will stay."""
        return self._tuner.is_settled

    @property
    def num_pending(self) -> int:
        """Parameters whose gradient or update is still to come."""
        return len(self._awaited)

    def _restart(self) -> None:
        """Learn about the model: at first, and when another parameter requires a gradient."""
        names, _ = splittable_layers(self.model)
        names = tuple(name for name in names if self.can_defer and name not in self._compiled)
        self._parameters = list(self.model.parameters())
        self._trainable = {id(one) for one in self._parameters if one.requires_grad}
        layers = find_layers(self.model, names, self._ignored)
        self._tuner = Tuner(
            layers,
            self._options,
            self.ranks,
            can_defer=self.can_defer,
            can_cross=self._may_cross,
            scatters=self._scatters,
            on_message=self._on_message,
        )
        self._hooks.watch(self.model)
        self._install()
        self._usage: Usage | None = Usage(layers)

    def _install(self) -> None:
        """Use the tuner's plan from the next forward on. Nothing is pending."""
        self.ranks.check_equal(str(self.plan), "plan")
        self._layer_of = {id(one): i for i, layer in enumerate(self.layers) for one in layer.parameters}
        self._reducer = self._make_reducer(
            is_late=self._tuner.late,
            sparse=sparse_parameters(self.model),
            find_unused_parameters=self._find_unused,
        )
        places = {layer.module_name: i for i, layer in enumerate(self.layers)}
        self._deferral.use(self._tuner.backward_order(), places, self._tuner.times)

    def _make_reducer(self, **options: Any) -> Reducer:
        group = self.ranks.group if self.plan.cross_iteration else self.ranks.unordered_group
        return Reducer(self.layers, self.plan.buckets, group, **options)

    def _may_cross(self) -> bool:
        return self.can_cross

    def _scatters(self) -> bool:
        return False

    def _crosses(self) -> bool:
        """Whether the step under way is taken in the next forward."""
        return self.plan.cross_iteration and self._may_cross() and self.can_defer

    def forward_begins(self) -> None:
        """A forward begins, in training or not.

        Raises:
            SyncError: Another rank is gone.
        """
        if self._is_step_over and torch.is_grad_enabled():
            self._is_step_over = False
            self._next_step()
        if not torch.is_grad_enabled():
            self.synchronize()  # kernels for inference are chosen by asking what a parameter is
        else:
            self._num_microbatches += 1
            self._deferral.open(self.is_syncing)
            self._note("forward")
            if self.can_defer and self._usage is not None and not self._usage.first_use:
                self._awaited.hold(one for layer in self.layers for one in layer.parameters)
        if self._has_buffers and self.are_buffers_due:
            self.ranks.broadcast_buffers(self.model, self._ignored)
        # As in DistributedDataParallel: not after a forward that no gradient of which is reduced.
        self.are_buffers_due = torch.is_grad_enabled() and self.is_syncing

    def backward_begins(self, loss: Tensor | None = None) -> None:
        """Forward is over. What it has not used is updated now.

        Args:
            loss: Where backward will begin. In the first step it is looked through for parameters that are used more
                than once, whose weight gradients do not wait then, as their parts would be added in another order.

        Raises:
            SyncError: Another rank is gone.
        """
        self.synchronize()
        self._note("backward")
        if self._usage is not None:
            self._usage.is_in_backward = True
            if loss is not None:
                self._usage.look_at(loss)
        self._is_in_backward = True
        self._deferral.discard()  # of a backward that has failed
        self._deferral.defer(True)
        if self.is_syncing:
            self._reducer.begin()

    def backward_ends(self) -> None:
        """Backward is over: weight gradients that waited are computed, and the last gradients sent.

        Raises:
            SyncError: Another rank is gone, or a parameter has no gradient and `find_unused_parameters` is not set.
        """
        self._deferral.finish()
        self._deferral.defer(False)
        self._is_in_backward = False
        if self._usage is not None:
            self._usage.is_in_backward = False
        if not self.is_syncing:
            return
        missing = self._reducer.end()
        if missing:
            raise SyncError(without_gradient(missing))
        self._is_step_over = True
        self._note("copied")
        if self._crosses():
            for parameter in self._awaited.hold(one for layer in self.layers for one in layer.parameters):
                self._reducer.wait(self._layer_of[id(parameter)])
        else:
            for layer in range(len(self.layers)):
                self._reducer.wait(layer)
        self._note("waited")

    def step(self, optimizer: optim.Optimizer) -> None:
        """Take an optimizer's step: for each parameter as soon as its gradient is there and it is used.

        Args:
            optimizer: One that is separable, see `why_inseparable`. The step is that of now, whatever a scheduler does
                to its groups meanwhile.
        """
        if self.steps.num_left:  # the one before is not taken yet
            self.synchronize()
        if len(self._awaited):
            self.steps.ask(optimizer, self._awaited)
        else:
            self._note("update")
            optimizer.step()
            self._note("updated")

    def _note(self, what: str) -> None:
        if self._tuner.times is not None:
            self._tuner.times.note(what)

    def synchronize(self) -> None:
        """Wait for all gradients, and take all steps that were asked for. Does nothing if nothing is pending.

        Raises:
            SyncError: Another rank is gone.
        """
        for parameter in self._awaited.held():
            self._awaited.settle(parameter)
        if num_lost := self.steps.num_left:
            self.steps.forget()
            raise SyncError(
                f"The updates of {num_lost} parameters were not taken although all gradients have arrived; expected "
                "none to be left. Use strategy='ddp' and report this."
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forward and backward as if nobody watched: no gradient is sent, none waits, nothing is measured.

        Yields:
            Nothing. Nothing may be pending.
        """
        was_syncing, self.is_syncing = self.is_syncing, False
        try:
            with self._deferral.paused():
                yield
        finally:
            self.is_syncing = was_syncing

    def abandon(self) -> None:
        """After an error: take the steps whose gradients arrive within seconds, and forget the rest.

        Another rank may be gone; if it is not, it has sent what this one waits for.
        """
        held = [] if self._usage is not None else self._awaited.held()
        deadline = time.monotonic() + _PATIENCE_SECONDS
        with suppress(SyncError):  # a message that has failed is no longer on its way either
            for parameter in held:
                if self._reducer.is_arrived_by(self._layer_of[id(parameter)], deadline):
                    self._awaited.settle(parameter)
        if self.steps.num_left:
            self._on_message(
                f"{self.steps.num_left} parameters keep their values of before the last step on rank "
                f"{self.ranks.rank}, as their gradients did not arrive; go on from a checkpoint."
            )
        self._awaited.release(self._awaited.held())
        self.steps.forget()
        self._deferral.discard()
        self._is_in_backward = False

    def close(self) -> None:
        """Leave the model as it was, but for what it has learned."""
        try:
            self.synchronize()
        finally:
            if self._usage is not None:
                self._usage.close()
            self._deferral.close()
            self._hooks.close()
            self.steps.close()

    def _next_step(self) -> None:
        """Between two steps: whatever is new takes effect."""
        usage, self._usage = self._usage, None
        if usage is not None:
            usage.close()
        is_new = self._tuner.next(usage, self._num_microbatches)
        self._num_microbatches = 0
        with torch._C.DisableTorchFunctionSubclass():
            is_other = any(one.requires_grad and id(one) not in self._trainable for one in self._parameters)
        if is_other:
            self.synchronize()
            self._restart()
        elif is_new:
            self.synchronize()
            self._install()

    def _arrive(self, parameter: nn.Parameter) -> None:
        """A parameter is about to be used: it, and those after it that have arrived too."""
        if self._usage is not None:
            self._usage.first_use.append(parameter)
            self._awaited.release([parameter])
            return
        try:
            with outside():
                self._arrive_outside(parameter)
        except SyncError:  # the model can be read all the same
            self._awaited.release(self._awaited.held())
            self.steps.forget()
            raise

    def _arrive_outside(self, parameter: nn.Parameter) -> None:
        first = self._layer_of[id(parameter)]
        chosen = list(self.layers[first].parameters)
        self._reducer.wait(first)
        for layer in range(first + 1, len(self.layers)):
            if self.layers[layer].parameters[0] in self._awaited:
                if not self._reducer.is_arrived(layer):
                    break
                self._reducer.wait(layer)
                chosen += self.layers[layer].parameters
        chosen = self._awaited.release(chosen)  # without those of a class of their own, which have been waited for
        self._arrived(chosen)
        self.steps.take(chosen)

    def _arrived(self, parameters: Sequence[nn.Parameter]) -> None:
        """Gradients are there; updates come next."""

    def _before_forward(self, parameters: tuple[nn.Parameter, ...]) -> None:
        if len(self._awaited):
            for parameter in parameters:
                self._awaited.settle(parameter)
        if self._tuner.times is not None and (layer := self._layer_of.get(id(parameters[0]))) is not None:
            self._tuner.times.note("F", layer)

    def _after_grad(self, parameter: Tensor) -> None:
        layer = self._layer_of.get(id(parameter))
        if layer is None or not self.is_syncing or not (self._is_in_backward or self._reduces_untold):
            return
        if not self._is_in_backward:  # a backward that the loop did not tell of
            self.backward_begins()
            at_end_of_backward(self.backward_ends)
        if self._usage is not None:
            self._usage.accumulated(parameter)
        if self._tuner.times is not None and not self._deferral.is_split(self.layers[layer].module_name):
            self._tuner.times.note("B", layer)
        if not self._deferral.is_incomplete(self.layers[layer].module_name):
            self._reducer.see(layer)
