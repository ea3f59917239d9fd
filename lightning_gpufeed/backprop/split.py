"""Splits the backward of a model's layers: input gradients at once, weight gradients in an order of one's choice.

::

    loss.backward()       I6 ─► W6 ─► I5 ─► W5 ─► … ─► I3 ─► I2 ─► I1 ─┐     W3, W2, W1 wait in a queue
    splitter.finish()                                                  └─► W1 ─► W2 ─► W3    into .grad

Only layers that wait are touched; all others are autograd's own business. A weight gradient reaches `.grad` through
autograd's node of the parameter, so hooks on parameters run as they would have, only later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gpufeed.backprop.engine import Anchor, at_end_of_backward, backward_number, is_transformed
from lightning_gpufeed.backprop.kernels import Kernels, find_kernels, is_splittable
from lightning_gpufeed.backprop.node import Note, SplitCall, autocast
from lightning_gpufeed.backprop.order import BackwardOrder
from lightning_gpufeed.backprop.tasks import Call, TaskKey, TaskQueue, kept_by

__all__ = ["WeightGradSplitter", "splittable_layers"]


def splittable_layers(model: nn.Module) -> tuple[tuple[str, ...], dict[str, str]]:
    """Which layers' weight gradients can wait.

    Args:
        model: Any module.

    Returns:
        Their names in the order of `named_modules`, and for each other layer with parameters of its own the reason.
    """
    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    names, reasons = [], {}
    for name, module in model.named_modules():
        own = [parameter for parameter in module._parameters.values() if parameter is not None]
        if not own:
            continue
        reason = is_splittable(module)
        if reason is None and any(uses[id(parameter)] > 1 for parameter in own):
            reason = "its weight is another layer's too"
        if reason is None and _has_hooks(module):
            reason = "it has hooks on its backward"
        if reason is None:
            names.append(name)
        else:
            reasons[name] = reason
    return tuple(names), reasons


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


class WeightGradSplitter:
    """Postpones weight gradients of a model's layers; exact, and never more of them than fit.

    What stays bitwise equal: outputs, all gradients, hooks on parameters and their order per parameter. What differs is
    when a gradient is in `.grad`: after `finish`, and not yet after `backward`.

    A call of a layer that cannot be split exactly (a layout that is not contiguous, complex numbers, torch.func,
    torch.compile) is autograd's. `backward(create_graph=True)` ends in a `DeferredGradientError`, and so does
    `torch.autograd.grad(..., create_graph=True)` under autocast; with `inputs=`, and in `torch.autograd.grad`, no
    weight gradient of a layer that waits is computed. On a CUDA device it is computed on
    the stream that is current where it is run.

    Not bitwise, as sums are rounded in another place: a layer used several times in one graph, under several autocast
    contexts, both inside and outside of a reentrant checkpoint, or with `retain_graph=True`; under autocast a leaf that
    requires a gradient and goes into several layers. A layer whose weight gets gradients from elsewhere too, as from a
    tied head that is a function, is split in one backward only, and noticed there: two gradients of one backward are
    added before the sum of earlier ones by autograd, and after it here, which differs only where there are earlier
    ones.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
        >>> with WeightGradSplitter(model, BackwardOrder(last=("0", "2"))) as splitter:
        ...     model(torch.ones(2, 3)).sum().backward()
        ...     waiting = splitter.num_pending
        ...     splitter.finish()
        >>> waiting, model[0].weight.grad is not None
        (2, True)

    Source:
        Oh et al., Out-of-order backprop, EuroSys 2022: the weight gradient of a layer feeds nothing but its own update.
    """

    def __init__(
        self,
        model: nn.Module,
        order: BackwardOrder,
        *,
        memory_cap_bytes: int | None = None,
        on_grad: Callable[[str], None] | None = None,
        on_input_grad: Callable[[str], None] | None = None,
    ) -> None:
        """Split from the next forward on, until `close`.

        Args:
            model: Its layers' forward is replaced on the instances. A deep copy of one has its own forward again.
            order: Which layers wait, and until when. One that cannot be split is autograd's; see `reasons`.
            memory_cap_bytes: What waiting layers may keep alive: inputs and output gradients. Beyond it the one that
                has waited longest is computed at once. None: no limit.
            on_grad: Told the name of a layer whose weight gradient is in `.grad`.
            on_input_grad: Told the name of a layer whose input gradient is computed, and whose weight gradient waits.

        Raises:
            ValueError: The order names a layer that the model does not have, or the cap is below 0.
        """
        if memory_cap_bytes is not None and memory_cap_bytes < 0:
            raise ValueError(f"memory_cap_bytes is {memory_cap_bytes}; expected 0 or more, or None for no limit.")
        modules = dict(model.named_modules())
        wanted = order.deferred | order.after.keys()
        unknown = sorted(wanted - modules.keys())
        if unknown:
            raise ValueError(f"The order names {', '.join(unknown)}; the model has no such module.")
        names, reasons = splittable_layers(model)
        self.reasons = {name: reasons.get(name, "it has no weight") for name in sorted(wanted - set(names))}
        self._order, self._cap, self._on_grad, self._on_input_grad = order, memory_cap_bytes, on_grad, on_input_grad
        # A layer that others wait for is split too, to know when it is there; its own weight gradient does not wait.
        self._after = {name: run if name in order.deferred else (name, *run) for name, run in order.after.items()}
        self._queue = TaskQueue()
        self.peak_bytes = 0
        """The most that waited at a time."""
        self.is_deferring = True
        """False: what a backward leaves waiting is computed at its end, before the call of it returns."""
        self._ending = -1
        self._is_running = False
        self._missing: dict[str, int] = {}
        self._anchors: dict[torch.device, Anchor] = {}
        self._layers = {name: _SplitLayer(name, modules[name], self) for name in names if name in wanted}
        self.is_open = True

    @property
    def names(self) -> tuple[str, ...]:
        """The layers that wait."""
        return tuple(name for name in self._layers if name in self._order.deferred and name not in self.reasons)

    def is_split(self, name: str) -> bool:
        """Whether a layer's weight gradient is computed apart from its input gradient, at once or later.

        Args:
            name: Of any module.

        Returns:
            True for those that wait, and for those that others wait for.
        """
        return name in self._layers and name not in self.reasons

    @property
    def num_pending(self) -> int:
        """Weight gradients that wait at the moment."""
        return len(self._queue)

    @property
    def pending_bytes(self) -> int:
        """What they keep alive: inputs, output gradients, and weights of less precision under autocast."""
        return self._queue.num_bytes

    def is_incomplete(self, name: str) -> bool:
        """Whether a layer's weight gradient is still to come, so that what is in `.grad` is from elsewhere.

        Args:
            name: Of a layer.

        Returns:
            False for a layer that is not split.
        """
        layer = self._layers.get(name)
        if layer is None or self._is_running:
            return False
        return layer.num_calls > 0 or any(task.name == name for task in self._queue)

    def arrived(
        self, layer: _SplitLayer, weight: nn.Parameter, bias: nn.Parameter | None, call: Call, number: int
    ) -> None:
        """An input gradient is computed; note what its weight gradient needs, and compute those whose time has come.

        Args:
            layer: Whose.
            weight: That was computed with.
            bias: Likewise.
            call: What is needed.
            number: Of the backward pass.
        """
        if layer.foreign_number == number:
            self._leave(layer)
        self._queue.add(layer.name, weight, bias, number, call)
        if not self.is_deferring and self._ending != number:
            self._ending = number
            at_end_of_backward(self.finish)
        if self._on_input_grad is not None:
            self._on_input_grad(layer.name)
        if self._cap is not None and self._queue.num_bytes > self._cap:
            self._compute((layer.name,))  # larger than what may wait at all
        if due := self._after.get(layer.name):
            self._compute(due)
        self.peak_bytes = max(self.peak_bytes, self._queue.num_bytes)

    def make_room(self, weight: nn.Parameter, call: Call) -> None:
        """Compute what has waited longest until one more call may wait.

        Args:
            weight: Of the call's layer.
            call: The one.
        """
        if self._cap is None:
            return
        num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept_by(call, weight))
        for task in self._queue:
            if self._queue.num_bytes + num_bytes <= self._cap:
                return
            if task.calls:
                self._compute((task.name,))

    def _compute(self, names: Iterable[str]) -> None:
        """Weight gradients; of layers with calls to come only the sum so far, as autograd adds up before `.grad`."""
        names = [name for name in names if name in self._layers]
        self._run(name for name in names if not self._layers[name].num_calls)
        for task in self._queue:
            if task.calls and task.name in names:
                self._queue.fold(task)

    def waiting(self) -> tuple[TaskKey, ...]:
        """Tell weight gradients of one backward pass from those of another: what waits at the moment, oldest first.

        Returns:
            A key for each, for `run_only`.
        """
        return self._queue.keys()

    def run_only(self, waiting: Iterable[TaskKey]) -> None:
        """Compute some of those that wait, such as all of one backward pass.

        Args:
            waiting: Keys as of `waiting`; those that wait no more are left out.
        """
        self._run_keys([key for key in waiting if key in self._queue])

    def run(self, *names: str) -> None:
        """Compute weight gradients now, those of them that wait.

        Args:
            names: Of layers, in the order in which to compute.
        """
        self._run(names)

    def finish(self) -> None:
        """Compute all that waits, in the order's way; what the order does not expect comes last, oldest first.

        After an error nothing waits any more.
        """
        if len(self._queue):
            expected = dict.fromkeys(self._order.last)
            self._run([*expected, *dict.fromkeys(task.name for task in self._queue if task.name not in expected)])

    def _run(self, names: Iterable[str]) -> None:
        self._run_keys(self._queue.keys(names))

    def _run_keys(self, keys: Sequence[TaskKey]) -> None:
        self._is_running = True
        self._missing = {}
        for task in self._queue.of(keys):
            self._missing[task.name] = self._missing.get(task.name, 0) + task.num_grads
        try:
            self._queue.run_keys(keys)
        finally:
            self._is_running = False

    def added(self, layer: _SplitLayer, number: int) -> None:
        """Autograd has added to the gradient of a layer's parameter.

        Args:
            layer: Whose.
            number: Of the backward pass.
        """
        if self._is_running:
            self._missing[layer.name] -= 1
            if self._on_grad is not None and not self._missing[layer.name]:
                self._on_grad(layer.name)
            return
        layer.foreign_number = number
        if any((task.name, task.number) == (layer.name, number) for task in self._queue):
            self._leave(layer)

    def _leave(self, layer: _SplitLayer) -> None:
        layer.restore()
        self.reasons[layer.name] = "its weight gets gradients from elsewhere too"

    def discard(self) -> None:
        """Forget what waits, as after a backward that has failed."""
        self._queue.clear()

    def close(self) -> None:
        """Give the layers their own forward back. What still waits can be computed yet, but `on_grad` is not told."""
        self.is_open = False
        for layer in self._layers.values():
            layer.restore()
            layer.unhook()

    def __enter__(self) -> WeightGradSplitter:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def anchor(self, device: torch.device) -> Anchor:
        """The anchor of a device.

        Args:
            device: Where outputs are.

        Returns:
            One and the same for all layers there.
        """
        if device not in self._anchors:
            self._anchors[device] = Anchor(device)
        return self._anchors[device]


class _SplitLayer:
    """In the place of a layer's forward. A deep copy of the layer, pickled or not, has its own forward again."""

    def __init__(self, name: str, module: nn.Module, splitter: WeightGradSplitter) -> None:
        self.name, self._module, self._splitter = name, module, splitter
        self._forward = type(module).forward.__get__(module)
        module.__dict__.pop("forward", None)  # a copy of one that was split has its own as an attribute
        self.num_calls = 0
        """Calls whose backward has not come, of graphs that are still alive."""
        module.__dict__["forward"] = self
        self.foreign_number = -1
        """The latest backward pass in which autograd itself came to the weight or the bias."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._see)  # type: ignore[no-untyped-call]
            for parameter in module._parameters.values()
            if parameter is not None and parameter.requires_grad
        ]

    def _see(self, _: Tensor) -> None:
        self._splitter.added(self, backward_number())

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")

    def restore(self) -> None:
        if self._module.__dict__.get("forward") is self:
            del self._module.__dict__["forward"]

    def unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def parameters(self) -> tuple[nn.Parameter, nn.Parameter | None]:
        module: Any = self._module
        return module.weight, module._parameters.get("bias")

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        kernels = self._kernels(arguments, options)
        if kernels is None:
            return self._forward(*arguments, **options)
        x: Tensor = arguments[0]
        weight, bias = self.parameters()
        device = weight.device
        dtype, is_cast_shared = None, False
        if torch.is_autocast_enabled(device.type) and not isinstance(self._module, nn.Embedding):
            dtype, is_cast_shared = torch.get_autocast_dtype(device.type), torch.is_autocast_cache_enabled()
            x = autocast(x, dtype)
        anchor = self._splitter.anchor(device)
        note = Note(self, weight, bias, kernels, is_cast_shared)
        output: Tensor = SplitCall.apply(note, dtype, anchor, x, anchor.tensor)  # type: ignore[no-untyped-call]
        return output

    def _kernels(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Kernels | None:
        if options or len(arguments) != 1 or not self._splitter.is_open or not torch.is_grad_enabled():
            return None
        weight, bias = self.parameters()
        if type(weight) is not nn.Parameter or not weight.requires_grad or is_transformed():
            return None
        if bias is not None and type(bias) is not nn.Parameter:
            return None
        return find_kernels(self._module, arguments[0], arguments[1:])

    def arrived(self, note: Note, call: Call) -> None:
        self._splitter.make_room(note.weight, call)  # while the layer still has this call to come
        note.uncount()
        self._splitter.arrived(self, note.weight, note.bias, call, backward_number())
