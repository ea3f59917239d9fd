"""A gloo group that sends one message after the other, in the order in which they were given.

A group from `new_group` has two threads, so two messages share the link and the more urgent one comes later than it
could. NCCL keeps the order by itself.

Private names of torch, each asserted in `tests/test_private_api.py`:

=============================================  =====================================================================
name                                           what for
=============================================  =====================================================================
ProcessGroupGloo._Options, its _threads,       how many messages are sent at a time, through which network interface
_devices and _timeout
=============================================  =====================================================================
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from torch import distributed

__all__ = ["group_in_order"]

_NAME = "gloo_in_order"


def group_in_order(timeout: timedelta | None = None) -> Any:
    """A group of all ranks; every rank has to call this.

    Args:
        timeout: How long a rank waits for the others before it fails; None is what the backend takes.

    Returns:
        The process group: of one thread if gloo is the default backend, otherwise as `new_group` makes it.
    """
    if distributed.get_backend() != distributed.Backend.GLOO:
        return distributed.new_group(timeout=timeout)
    if _NAME not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(_NAME, _of_one_thread, devices=["cpu"])
    return distributed.new_group(backend=_NAME, timeout=timeout)


def _of_one_thread(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    kind: Any = distributed.ProcessGroupGloo
    options = kind._Options()
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options._devices = [kind.create_device(interface=name) for name in names] or [kind.create_default_device()]
    options._threads, options._timeout = 1, timeout
    return kind(store, rank, size, options)
