"""Tensors of layers that other ranks have: they take no memory, and are never mistaken for values.

A meta tensor alone is not enough: torch leaves out `real.add_(meta)` without a word, and reads garbage with
`real[meta]`. So a foreign tensor is a meta tensor of a class of its own, which refuses to be mixed with real ones.

`torch.utils.swap_tensors` keeps the identity of a Parameter, but refuses one with a weak reference to it (every
`nn.LSTM` has them), loses its tensor hooks, and takes away the attributes that a user has put on it. So only what it
does underneath is used: the contents are exchanged, and the hooks are put back.

Private names of torch, each asserted in `tests/test_private_api.py`:

====================================================  ==============================================================
name                                                  what for
====================================================  ==============================================================
torch._C._swap_tensor_impl                            another content under the same Python object
Tensor._backward_hooks, _post_accumulate_grad_hooks   dicts of a tensor's hooks; setting them puts the hooks on again
====================================================  ==============================================================
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from lightning_gpufeed.errors import ScheduleError

__all__ = ["is_foreign", "lent", "make_foreign", "make_real"]

_PLACE = "_gpufeed_place"
_CLASS = "_gpufeed_class"
_OVER_ALL = {
    ("torch.nn.utils.clip_grad", "clip_grad_norm_"),
    ("lightning.pytorch.utilities.grads", "grad_norm"),
    ("pytorch_lightning.utilities.grads", "grad_norm"),
}
"""Functions that take a norm over the gradients of all parameters that they are given."""
_READS = ("item", "tolist", "numpy", "equal", "__array__", "__float__", "__int__", "__bool__", "__format__")


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in the arguments of a call."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_in(one)


def _refuse(arguments: Any, name: str) -> NoReturn:
    """A sentence about the first foreign tensor among the arguments."""
    tensor = next(one for one in _tensors_in(arguments) if is_foreign(one))
    place = getattr(tensor, _PLACE, f"a tensor of shape {tuple(tensor.shape)}, of a layer of another rank")
    raise ScheduleError(
        f"{name} needs the values of {place}, which this rank of the pipeline does not have. Only the layers' own "
        "forward and the optimizer may use them. Leave this out, do it before the training starts (in setup) or after "
        "it has ended (in on_fit_end), or take the values out of a checkpoint."
    )


def _guarded(cls: Any, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
    """What torch calls in the place of a function that has a foreign tensor among its arguments."""
    kwargs = kwargs or {}
    if func is torch.equal:
        return args[0] is args[1]
    name = getattr(func, "__name__", str(func))
    if func in (Tensor.cpu, Tensor.cuda):
        return args[0]
    if func is Tensor.to:
        return _moved(args, kwargs)
    # To write into it is fine: a rank that has the layer does the same, and there it counts.
    target = next(iter([*args, *kwargs.values()]), None)
    is_in_place = name.endswith("_") and not name.endswith("__")
    is_write = is_in_place and isinstance(target, Tensor) and is_foreign(target)
    if not is_write and any(not one.is_meta for one in _plain(args, kwargs)):
        _refuse([args, kwargs], name)
    try:
        return Tensor.__torch_function__.__func__(cls, func, types, args, kwargs)  # type: ignore[attr-defined]
    except (RuntimeError, TypeError):  # meta tensors have no values
        if name in _READS:
            _refuse([args, kwargs], name)
        raise


def _plain(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """Those among the arguments that are not foreign."""
    return (one for one in _tensors_in([args, kwargs]) if not is_foreign(one))


def _moved(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`tensor.to(...)`: another dtype, but no other device."""
    if not isinstance(args[0], Tensor) or not is_foreign(args[0]):
        return args[0].to(args[1].dtype)  # a real tensor that shall be like a foreign one
    values = [*args[1:], *kwargs.values()]
    dtypes = [one.dtype if isinstance(one, Tensor) else one for one in values]
    dtype = next((one for one in dtypes if isinstance(one, torch.dtype)), args[0].dtype)
    return args[0] if dtype == args[0].dtype else args[0].type(dtype)


def _no_values(self: Tensor, *_: Any) -> NoReturn:
    _refuse(self, "Saving")


def _no_gradient(self: Tensor) -> None:
    """None, but to those who would take a norm over all gradients for what it is not."""
    frames = (sys._getframe(1), sys._getframe(2))  # a comprehension may have a frame of its own
    if any((frame.f_globals.get("__name__"), frame.f_code.co_name) in _OVER_ALL for frame in frames):
        raise ScheduleError(
            f"A norm over all gradients was asked for, and {getattr(self, _PLACE, 'a parameter')} has its gradient on "
            "another rank of the pipeline. Use self.clip_gradients(...) of the LightningModule or gradient_clip_val of "
            "the Trainer, which take all ranks together; in a loop by hand PipelineSession.clip_grad_norm."
        )


class _ForeignParameter(nn.Parameter):
    """A parameter of another rank's layer. It has no gradient, and that is known without asking torch."""

    grad = property(_no_gradient, lambda self, value: None if value is None else _refuse(self, "A gradient"))
    __torch_function__ = classmethod(_guarded)
    __reduce_ex__ = _no_values


class _ForeignBuffer(Tensor):
    """A buffer of another rank's layer."""

    __torch_function__ = classmethod(_guarded)
    __reduce_ex__ = _no_values


def is_foreign(tensor: Tensor) -> bool:
    """Whether a tensor has no values on this rank.

    Args:
        tensor: Any.

    Returns:
        True between `make_foreign` and `make_real`.
    """
    return issubclass(type(tensor), (_ForeignParameter, _ForeignBuffer))


def make_foreign(tensor: Tensor, place: str) -> None:
    """Take the memory of a parameter or a buffer away, and its gradient.

    The object stays the same, and so do shape, strides, dtype, requires_grad, hooks and the user's attributes. A
    backward through a graph that was built before raises `ScheduleError` in the place of losing the gradient.

    Args:
        tensor: A leaf; nothing happens to one that is foreign already.
        place: What it is and where, for messages.
    """
    if is_foreign(tensor):
        return
    tensor.grad = None
    if tensor.requires_grad and tensor.is_leaf:
        torch.autograd.graph.get_gradient_edge(tensor).node.register_prehook(_stopping(place))
    empty = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
    )
    _exchange(tensor, empty)
    setattr(tensor, _PLACE, place)
    setattr(tensor, _CLASS, type(tensor))
    _cover(tensor)


def make_real(tensor: Tensor, values: Tensor) -> None:
    """Give a foreign tensor values again.

    Args:
        tensor: Nothing but its values is changed in one that is not foreign.
        values: Its memory is the tensor's from now on.
    """
    _uncover(tensor)
    values.requires_grad_(tensor.requires_grad)
    _exchange(tensor, values)
    for name in (_PLACE, _CLASS):
        tensor.__dict__.pop(name, None)


@contextmanager
def lent(tensors: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Give tensors other contents for a while.

    Args:
        tensors: Pairs of a tensor and of real values of any shape.

    Yields:
        Nothing; afterwards each has what it had before.
    """
    done: list[tuple[Tensor, Tensor, bool]] = []
    try:
        for tensor, values in tensors:
            was_foreign = is_foreign(tensor)
            if was_foreign:
                _uncover(tensor)
            values.requires_grad_(tensor.requires_grad)
            _exchange(tensor, values)
            done.append((tensor, values, was_foreign))
        yield
    finally:
        for tensor, values, was_foreign in reversed(done):
            _exchange(tensor, values)
            if was_foreign:
                _cover(tensor)


def _stopping(place: str) -> Callable[[Any], None]:
    def stop(_: Any) -> None:
        raise ScheduleError(
            f"A backward arrived at {place}, which was used before its memory was given to another rank of the "
            "pipeline. Run a backward before the training starts, or after it has ended."
        )

    return stop


def _cover(tensor: Tensor) -> None:
    tensor.__class__ = _ForeignParameter if isinstance(tensor, nn.Parameter) else _ForeignBuffer


def _uncover(tensor: Tensor) -> None:
    if is_foreign(tensor):
        tensor.__class__ = getattr(tensor, _CLASS, nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor)


def _exchange(tensor: Tensor, content: Tensor) -> None:
    """Both keep their Python object, with its class, attributes and hooks."""
    hooks, post_hooks = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    torch._C._swap_tensor_impl(tensor, content)
    tensor._backward_hooks, tensor._post_accumulate_grad_hooks = hooks, post_hooks
