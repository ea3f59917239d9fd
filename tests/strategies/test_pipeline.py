"""What `PipelineStrategy` decides by itself; what it does with other ranks is in test_pipeline_ranks.py."""

from __future__ import annotations

import pickle

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader

from lightning_gpufeed import OutOfOrderStrategy
from lightning_gpufeed.strategies.pipeline import PipelineStrategy
from tests.datamodules.models import make_trainer


class OfRank(LightningEnvironment):
    """As one of several ranks finds it."""

    def __init__(self, rank: int) -> None:
        """Only a number."""
        super().__init__()
        self.rank = rank

    def global_rank(self) -> int:
        return self.rank


def seed_rank(rank: int) -> int | None:
    strategy = OutOfOrderStrategy(pipeline_size=2, cluster_environment=OfRank(rank))
    loader = strategy.process_dataloader(DataLoader(torch.arange(4)))
    return None if loader.worker_init_fn is None else loader.worker_init_fn.keywords["rank"]


def test_workers_of_all_ranks_of_a_pipeline_are_seeded_alike_and_replicas_apart(monkeypatch):
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    assert [seed_rank(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_workers_are_left_alone_where_nobody_asked_for_seeds_or_somebody_seeds_them(monkeypatch):
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)
    assert seed_rank(1) is None
    monkeypatch.setenv("PL_SEED_WORKERS", "1")
    loader = DataLoader(torch.arange(4), worker_init_fn=print)
    strategy = OutOfOrderStrategy(pipeline_size=2, cluster_environment=OfRank(1))
    assert strategy.process_dataloader(loader).worker_init_fn is print


def test_a_rank_that_is_spawned_is_sent_the_same_pipeline():
    strategy = OutOfOrderStrategy(pipeline_size=2, num_microbatches=3, start_method="spawn")
    sent = pickle.loads(pickle.dumps(make_trainer(strategy=strategy, devices=2))).strategy
    assert type(sent) is PipelineStrategy
    assert sent._pipeline_options == strategy._pipeline_options
    assert sent._start_method == "spawn"


class Own(OutOfOrderStrategy):
    """A user's."""


class OwnPipeline(PipelineStrategy):
    """A user's."""


def test_a_class_of_the_users_own_is_never_silently_without_its_pipeline():
    assert type(OwnPipeline(pipeline_size=2)) is OwnPipeline
    with pytest.raises(ValueError, match="Own has a pipeline_size; expected it derived from PipelineStrategy"):
        Own(pipeline_size=2)


def test_the_strategy_is_a_pipeline_from_two_stages_on():
    assert type(OutOfOrderStrategy()) is OutOfOrderStrategy
    assert type(OutOfOrderStrategy(pipeline_size=1)) is OutOfOrderStrategy
    assert type(OutOfOrderStrategy(pipeline_size=2)) is PipelineStrategy
    with pytest.raises(ValueError, match="num_microbatches: of a pipeline, but pipeline_size is 1"):
        OutOfOrderStrategy(num_microbatches=4)
