"""What torch's autograd engine says about the backward pass that is under way.

Private names of torch, each asserted in `tests/test_private_api.py`:

==========================================  ===============================================================
name                                        what for
==========================================  ===============================================================
torch._C._current_graph_task_id             one number per call of backward
torch._C._will_engine_execute_node          whether that call accumulates gradients in leaves
torch._C._are_functorch_transforms_active   whether vmap, grad or jvp of torch.func is at work
torch._C._get_tracing_state                 whether torch.jit.trace is
torch.autograd.forward_ad._current_level    whether derivatives are taken forward; -1 if not
Variable._execution_engine.queue_callback   something to do when the call of backward under way has ended
==========================================  ===============================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable, forward_ad

__all__ = ["AccumulationHook", "Anchor", "at_end_of_backward", "backward_number", "count_uses", "is_transformed"]


def backward_number() -> int:
    """A number that is the same throughout one call of backward, and another in each; -1 outside of any."""
    return torch._C._current_graph_task_id()


class AccumulationHook:
    """Has something done whenever backward has added to a parameter's gradient, after all hooks on the parameter."""

    def __init__(self, parameter: nn.Parameter, callback: Callable[[nn.Parameter], None]) -> None:
        """From now on, until `remove`.

        Args:
            parameter: One that requires a gradient.
            callback: Called with it.
        """
        grad_fn: Any = parameter.view_as(parameter).grad_fn
        self._node = grad_fn.next_functions[0][0]  # lives as long as somebody holds it
        self._handle = self._node.register_hook(lambda *_: callback(parameter))

    def remove(self) -> None:
        """No longer."""
        self._handle.remove()
        self._node = None


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have something done when the backward pass under way has ended, and before the call of it returns.

    Args:
        callback: Called once, in the thread that called backward.
    """
    Variable._execution_engine.queue_callback(callback)


def count_uses(tensor: Tensor) -> dict[int, int]:
    """How many operations of a graph use each leaf.

    Args:
        tensor: Where backward would begin.

    Returns:
        For the `id` of each leaf the number of gradients that backward adds up for it, or for the one copy of it that
        autocast has made. What a reentrant checkpoint hides is not there.
    """
    num_edges: dict[Any, int] = {tensor.grad_fn: 0}
    users: dict[Any, Any] = {}
    stack: list[Any] = [] if tensor.grad_fn is None else [tensor.grad_fn]
    while stack:
        node = stack.pop()
        for following, _ in node.next_functions:
            if following is None:
                continue
            if following not in num_edges:
                num_edges[following] = 0
                stack.append(following)
            num_edges[following] += 1
            users[following] = node
    uses: dict[int, int] = {}
    for node, number in num_edges.items():
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            is_cast = number == 1 and users[node].name().startswith("ToCopyBackward")
            uses[id(leaf)] = num_edges[users[node]] if is_cast else number
    return uses


def is_transformed() -> bool:
    """Whether tensors are not what they seem: under torch.func, forward derivatives, torch.compile, torch.jit.trace."""
    return (
        torch._C._are_functorch_transforms_active()
        or torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


class Anchor:
    """A leaf that makes what it goes into require a gradient, and gets none itself."""

    def __init__(self, device: torch.device) -> None:
        """On one device, so that the engine need not wait for another.

        Args:
            device: Where the outputs are.
        """
        with torch.inference_mode(False), torch.enable_grad():
            self.tensor: Tensor = torch.empty(0, device=device, requires_grad=True)
            grad_fn: Any = self.tensor.view_as(self.tensor).grad_fn
        self._node = grad_fn.next_functions[0][0]

    def is_reached(self) -> bool:
        """Whether the backward pass under way accumulates in leaves: `backward()`, and not `torch.autograd.grad`."""
        return torch._C._will_engine_execute_node(self._node)
