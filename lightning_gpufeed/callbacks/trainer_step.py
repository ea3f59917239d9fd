"""The step of a Trainer, taken apart so that it can be done again: where we stand in Lightning's private code.

Each name is watched by tests/test_private_api.py.

===========================================================  ==================================================
`fit_loop.epoch_loop.automatic_optimization._make_closure`   makes what an optimizer step runs; ours recovers
`Closure._step_fn`, `_backward_fn`, `_zero_grad_fn`          its three parts
`automatic_optimization._training_step`                      runs `training_step` on the batch in its arguments
`automatic_optimization.optim_progress.optimizer.zero_grad`  counts how often gradients were zeroed
`fit_loop._should_accumulate`                                whether the gradients of this batch are kept
`trainer._results`                                           where `self.log` writes; a dict of metrics, with `log`
`trainer._logger_connector._current_fx`                      whose values were reset last
`LightningModule._current_fx_name`                           the hook that is running
`precision_plugin.scaler._per_optimizer_states`              which optimizers' gradients were unscaled
`strategy._ddp_comm_hook`, `_model_averaging_period`         what else changes gradients or weights between ranks
===========================================================  ==================================================
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies.single_xla import SingleDeviceXLAStrategy
from lightning.pytorch.strategies.xla import XLAStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from lightning_gpufeed.recover.logged import LogCall
from lightning_gpufeed.recover.merge import merge_values
from lightning_gpufeed.recover.split_batch import Split

__all__ = [
    "OF_LIGHTNING",
    "HookedLogs",
    "OnceHooks",
    "RecoveringClosure",
    "loader_samples",
    "merge_results",
    "obstacle_to_recovery",
    "reset_scaler",
    "take_step_over",
    "with_batch",
    "zero_grad_once",
]


OF_LIGHTNING = frozenset(vars(LightningModule()))
"""Attributes of a module that are not the user's."""


def obstacle_to_recovery(trainer: Trainer, pl_module: LightningModule, *, is_training: bool) -> str | None:
    """Why steps of this Trainer cannot be done again.

    Args:
        trainer: It.
        pl_module: Its module.
        is_training: Whether there are training steps among them.

    Returns:
        A reason with its cure, or None.
    """
    strategy = trainer.strategy
    has_own_steps = isinstance(strategy, DeepSpeedStrategy | XLAStrategy | SingleDeviceXLAStrategy)
    if has_own_steps or not isinstance(strategy, SingleDeviceStrategy | DDPStrategy):
        return (
            f"{type(strategy).__name__} does steps, or keeps parts of the model, in ways that cannot be repeated; "
            f"expected one device or DDPStrategy"
        )
    if hasattr(strategy, "pipeline_session"):
        return (
            "with pipeline_size the ranks of a model send each other activations within a step, and those that had the "
            "memory would not send them again; expected one device or DDPStrategy. More num_microbatches take less"
        )
    if not is_training:
        return None
    if hasattr(strategy, "gradient_sync"):
        return (
            f"{type(strategy).__name__} sends gradients while backward still runs, and a second attempt would send "
            "them again; expected one device or DDPStrategy"
        )
    if not pl_module.automatic_optimization:
        return (
            "with manual optimization training_step itself steps the optimizers, which cannot be undone; expected "
            "automatic_optimization = True"
        )
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        return "training_step takes dataloader_iter, and what it has taken cannot be taken again; expected a batch"
    if trainer.world_size > 1 and isinstance(strategy, DDPStrategy):
        if strategy._ddp_comm_hook is not None:
            return "a communication hook changes what is reduced, in the middle of backward; expected no ddp_comm_hook"
        if strategy._model_averaging_period is not None:
            return "the strategy averages models after steps of its own; expected no model_averaging_period"
    return None


def loader_samples(trainer: Trainer) -> int | None:
    """Batch size of the loader that is running, if it says.

    Args:
        trainer: A Trainer.

    Returns:
        Samples in a full batch, or None.
    """
    loader: Any = trainer.train_dataloader if trainer.training else None
    if trainer.validating or trainer.sanity_checking:
        loader = trainer.val_dataloaders
    elif trainer.testing:
        loader = trainer.test_dataloaders
    elif trainer.predicting:
        loader = trainer.predict_dataloaders
    sizes = {getattr(one, "batch_size", None) for one in (loader if isinstance(loader, list) else [loader])}
    size = sizes.pop() if len(sizes) == 1 else None
    return size if isinstance(size, int) else None


# The closure ----------------------------------------------------------------------------------------------


class RecoveringClosure(Closure):
    """Training step, zero_grad and backward, done by somebody who can do them again.

    Attributes:
        kwargs: Arguments of `training_step`, the batch first.
        batch_idx: Number of the batch.
        is_done: Whether it has run to its end.
    """

    def __init__(
        self,
        own: Closure,
        kwargs: OrderedDict[str, Any],
        batch_idx: int,
        do: Callable[[RecoveringClosure], ClosureResult],
    ) -> None:
        """Take the place of a closure.

        Args:
            own: Lightning's.
            kwargs: Arguments of `training_step`, the batch first.
            batch_idx: Number of the batch.
            do: Does what it would have done.
        """
        super().__init__(own._step_fn, own._backward_fn, own._zero_grad_fn)
        self.kwargs, self.batch_idx, self._do = kwargs, batch_idx, do
        self.is_done = False

    @property
    def batch(self) -> Any:
        """What the step is on."""
        return next(iter(self.kwargs.values()))

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Run it."""
        self.is_done = False
        result = self._do(self)
        self.is_done = True
        return result


def take_step_over(
    trainer: Trainer, make: Callable[[Closure, OrderedDict[str, Any], int], Closure]
) -> Callable[[], None]:
    """Let all closures of the training be made by us.

    Args:
        trainer: A Trainer.
        make: Lightning's closure, arguments of `training_step` and number of the batch -> the closure that is used.

    Returns:
        Gives the loop its own method back.
    """
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    own = loop._make_closure

    def make_closure(kwargs: OrderedDict[str, Any], optimizer: Any, batch_idx: int) -> Closure:
        return make(own(kwargs, optimizer, batch_idx), kwargs, batch_idx)

    loop.__dict__["_make_closure"] = make_closure
    return lambda: loop.__dict__.pop("_make_closure", None)


def zero_grad_once(closure: Closure, loop: Any) -> Callable[[], None] | None:
    """The closure's way to zero gradients, uncounted if it breaks off.

    Args:
        closure: Lightning's or ours.
        loop: The one of automatic optimization.

    Returns:
        None inside an accumulation window.
    """
    own = closure._zero_grad_fn
    if own is None:
        return None

    def zero_grad() -> None:
        progress = loop.optim_progress.optimizer.zero_grad
        was = progress.state_dict()
        try:
            own()
        except BaseException:
            progress.load_state_dict(was)
            raise

    return zero_grad


def with_batch(kwargs: OrderedDict[str, Any], batch: Any) -> OrderedDict[str, Any]:
    """Arguments of `training_step` with another batch."""
    first = next(iter(kwargs))
    return OrderedDict(kwargs, **{first: batch})


def merge_results(results: Sequence[ClosureResult], split: Split, reduction: str, note: Callable[[str], None]) -> Any:
    """What `training_step` gave for each microbatch, as for the batch.

    Args:
        results: Of each.
        split: How the batch was cut.
        reduction: "mean" or "sum": how losses add up.
        note: Told of what could not be put together.

    Returns:
        A result without graph. Outputs other than the loss that do not add up are lists of what each gave.
    """
    losses = [
        result.loss if reduction == "sum" else result.loss * weight
        for result, weight in zip(results, split.weights, strict=True)
        if result.loss is not None
    ]
    extra: dict[str, Any] = {}
    for key in results[0].extra:
        values = [result.extra.get(key) for result in results]
        try:
            extra[key] = merge_values(values, split.sizes, split.weights)
        except ValueError:
            note(f"{key!r} that training_step returns is a list of what each microbatch of a split batch gave")
            extra[key] = values
        if any(isinstance(value, float) or (isinstance(value, torch.Tensor) and value.ndim == 0) for value in values):
            note(f"{key!r} that training_step returns is the mean over the microbatches of a split batch")
    merged = type(results[0])(None, extra=extra)
    merged.loss = torch.stack(losses).sum(0) if len(losses) == len(results) else None
    return merged


class OnceHooks:
    """Lets `on_before_backward` be called for the first microbatch of a batch only, `on_after_backward` for the last.

    A hook that adds noise to gradients or divides them would otherwise do so once per microbatch.
    """

    def __init__(self, trainer: Trainer, pl_module: LightningModule, note: Callable[[str], None]) -> None:
        """Note whose hooks they are.

        Args:
            trainer: Its callbacks.
            pl_module: And its module.
            note: Told what a user should know.
        """
        self._trainer, self._module, self._note = trainer, pl_module, note

    @contextmanager
    def around(self, is_first: bool, is_last: bool) -> Iterator[None]:
        """One backward pass.

        Args:
            is_first: Of the batch.
            is_last: Of the batch.

        Yields:
            Nothing.
        """
        names = ([] if is_first else ["on_before_backward"]) + ([] if is_last else ["on_after_backward"])
        owners = [*self._trainer.callbacks, self._module]  # type: ignore[attr-defined]
        if is_first and not is_last:
            self._note_loss(owners)
        was = [(owner, name, owner.__dict__.get(name)) for owner in owners for name in names]
        for owner, name, _ in was:
            owner.__dict__[name] = _do_nothing
        try:
            yield
        finally:
            for owner, name, own in was:
                if own is None:
                    del owner.__dict__[name]
                else:
                    owner.__dict__[name] = own

    def _note_loss(self, owners: list[Any]) -> None:
        bases = (Callback.on_before_backward, LightningModule.on_before_backward)
        users = [owner for owner in owners if getattr(type(owner), "on_before_backward", None) not in bases]
        if users:
            names = ", ".join(type(owner).__name__ for owner in users)
            self._note(
                f"on_before_backward of {names} gets the share of the first microbatch in the place of the loss of a "
                f"batch that is split"
            )


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """A hook that is not called this time."""


# Logging --------------------------------------------------------------------------------------------------


class HookedLogs:
    """What `self.log` of the running loop writes to."""

    def __init__(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note whose.

        Args:
            trainer: A Trainer.
            pl_module: Its module.
        """
        self._trainer, self._module = trainer, pl_module
        # Prediction has no results; nothing can be logged there.
        self._results: Any = _NoResults() if trainer._results is None else trainer._results

    def save(self) -> None:
        """Note what has been logged so far; values are replaced when they change, so references are enough."""
        self._entries = {key: (metric, dict(metric.__dict__)) for key, metric in self._results.items()}
        self._attributes = dict(self._results.__dict__)
        self._current_fx = self._trainer._logger_connector._current_fx
        self._fx_name = self._module._current_fx_name
        self._forward = self._module.__dict__.get("forward")

    def put_back(self) -> None:
        """Forget what was logged since."""
        results = self._results
        for key in [key for key in results if key not in self._entries]:
            del results[key]
        for metric, attributes in self._entries.values():
            metric.__dict__.clear()
            metric.__dict__.update(attributes)
        results.__dict__.clear()
        results.__dict__.update(self._attributes)
        self._trainer._logger_connector._current_fx = self._current_fx
        self._module._current_fx_name = self._fx_name
        # A data-parallel wrapper routes a step through `forward` of the module; one that failed is still in its place.
        if self._forward is None:
            self._module.__dict__.pop("forward", None)
        else:
            self._module.__dict__["forward"] = self._forward

    def begin(self) -> list[LogCall]:
        """Keep calls from now on in the list returned, instead of making them."""
        calls: list[LogCall] = []

        def log(fx: str, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            reduce_fx = kwargs.get("reduce_fx", torch.mean)
            reduce_name = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "mean")
            if isinstance(value, torch.Tensor):
                value = value.detach().clone()
            calls.append(
                LogCall(
                    f"{fx}.{name}", value, reduce_name.lower(), kwargs.get("batch_size"), ((fx, name, args), kwargs)
                )
            )

        self._results.__dict__["log"] = log
        return calls

    def end(self) -> None:
        """Make calls again."""
        self._results.__dict__.pop("log", None)

    def apply(self, call: LogCall) -> None:
        """Make one call."""
        (fx, name, args), kwargs = call.rest
        self._results.log(fx, name, call.value, *args, **{**kwargs, "batch_size": call.batch_size})

    def metrics(self) -> list[Any]:
        """Metric objects that were logged, which need not be in the module."""
        return [entry.value for entry in self._results.values() if not entry.is_tensor]


class _NoResults(dict[str, Any]):
    """What is logged where nothing can be."""


def reset_scaler(trainer: Trainer, optimizer: Any) -> None:
    """Let gradients be unscaled again in a step that broke off; the scale and its growth stay.

    Args:
        trainer: A Trainer.
        optimizer: Whose step it was.
    """
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        scaler._per_optimizer_states.pop(id(optimizer), None)
