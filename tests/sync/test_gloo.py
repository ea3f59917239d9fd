from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import distributed

from lightning_gpufeed.sync.gloo import group_in_order
from tests.sync.one_rank import one_rank

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _group():
    with one_rank():
        yield


def test_a_group_sends_one_message_after_the_other():
    backend = group_in_order()._get_backend(CPU)
    assert type(backend) is distributed.ProcessGroupGloo
    assert backend.options._threads == 1


@pytest.mark.parametrize("seconds", [7, 700])
def test_a_timeout_is_kept(seconds):
    backend = group_in_order(timedelta(seconds=seconds))._get_backend(CPU)
    assert backend.options._timeout == timedelta(seconds=seconds)


def test_without_a_timeout_it_is_that_of_the_backend():
    ordinary = distributed.new_group()._get_backend(CPU).options._timeout
    assert group_in_order()._get_backend(CPU).options._timeout == ordinary


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32], ids=str)
def test_it_reduces_what_gloo_reduces(dtype):
    group = group_in_order()
    works = [distributed.all_reduce(torch.ones(3, dtype=dtype), group=group, async_op=True) for _ in range(5)]
    works[-1].wait()
    assert all(work.is_completed() for work in works)


def test_interfaces_are_those_that_gloo_was_told_to_use(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    backend = group_in_order()._get_backend(CPU)
    assert len(backend.options._devices) == 1


def test_several_groups_may_be_made_and_destroyed():
    for _ in range(3):
        group = group_in_order()
        distributed.all_reduce(torch.ones(1), group=group)
        distributed.destroy_process_group(group)
