from __future__ import annotations

from datetime import timedelta

import pytest
import torch
from torch import distributed, nn

from lightning_gpufeed.errors import SyncError
from lightning_gpufeed.sync.ranks import Ranks
from tests.sync.one_rank import one_rank


def test_a_rank_knows_its_place(ranks):
    assert (ranks.rank, ranks.num_ranks, ranks.device) == (0, 1, torch.device("cpu"))


def test_gradients_have_a_group_of_their_own(ranks):
    assert ranks.group is not distributed.group.WORLD
    ranks.close()
    distributed.barrier()  # the default one is still there


def test_one_rank_agrees_with_itself(ranks):
    assert ranks.decided({"plan": [1, 2]}) == {"plan": [1, 2]}
    assert ranks.mean([1.0, 2.5]) == [1.0, 2.5]
    assert ranks.maximum([True, 0.5]) == [1.0, 0.5]
    assert ranks.mean([]) == []


def test_a_model_of_one_rank_is_the_same_everywhere(ranks):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    ranks.check_same(model)
    ranks.broadcast(model)
    ranks.broadcast_buffers(model)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


@pytest.mark.parametrize(
    ("most_bytes", "sizes"),
    [
        (1 << 22, [1 << 14, 1 << 17, 1 << 20, 1 << 22]),
        (1 << 17, [1 << 14, 1 << 17]),
        (1000, [1000]),
        (0, [4]),
        (7, [4]),
    ],
)
def test_the_link_is_measured_with_messages_up_to_the_size_of_all_gradients(ranks, most_bytes, sizes):
    samples = ranks.probe_link(most_bytes)
    assert [size for size, _ in samples] == [size for size in sizes for _ in range(4)]
    assert all(seconds > 0 for _, seconds in samples)


def test_a_timeout_is_that_of_the_group_of_gradients():
    with one_rank():
        ranks = Ranks(timedelta(seconds=77))
        backend = ranks.group._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=77)


def test_a_text_that_is_another_on_another_rank_is_an_error_with_this_rank_s(ranks, monkeypatch):
    ranks.check_equal("barrier; B0; 0:0-8", "plan")
    monkeypatch.setattr(ranks, "maximum", lambda numbers: [numbers[0] + 1, numbers[1]])  # as if another had more
    with pytest.raises(SyncError, match=r"The ranks have different plans: rank 0 has 'barrier; B0; 0:0-8'"):
        ranks.check_equal("barrier; B0; 0:0-8", "plan")
