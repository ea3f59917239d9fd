"""Does something in the middle of forward as if it were done between two steps.

Private names of torch, each asserted in `tests/test_private_api.py`:

===========================================================  =========================================================
name                                                         what for
===========================================================  =========================================================
torch._C.DisableTorchFunction                                outside of modes such as a default device
torch._C._len_torch_dispatch_stack, _disable_current_modes   outside of modes that count, cache or fake operations
torch._C._are_functorch_transforms_active,                   outside of grad, vmap and the others of `torch.func`
temporarily_clear_interpreter_stack
===========================================================  =========================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["outside"]


@contextmanager
def outside() -> Iterator[None]:
    """Leave autocast, inference, recording of gradients, and every mode and transform, for a while.

    Yields:
        Nothing.
    """
    with ExitStack() as stack:
        if torch._C._are_functorch_transforms_active():
            stack.enter_context(temporarily_clear_interpreter_stack())
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C.DisableTorchFunction())
        yield
