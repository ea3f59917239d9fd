from __future__ import annotations

from types import SimpleNamespace

from lightning_gpufeed.strategies.figures import log_figures
from tests.datamodules.models import MemoryLogger

FIGURES = {"gpufeed/sync/gain": 1.5}


def logged(figures: dict[str, float], *, is_global_zero: bool) -> list[list[tuple[int | None, dict[str, float]]]]:
    loggers = [MemoryLogger(), MemoryLogger()]
    log_figures(SimpleNamespace(is_global_zero=is_global_zero, loggers=loggers, global_step=7), figures)
    return [logger.logged for logger in loggers]


def test_every_logger_gets_figures_once_at_the_step_that_the_training_has_come_to():
    assert logged(FIGURES, is_global_zero=True) == [[(7, FIGURES)], [(7, FIGURES)]]


def test_other_ranks_log_nothing():
    assert logged(FIGURES, is_global_zero=False) == [[], []]


def test_no_figures_make_no_row():
    assert logged({}, is_global_zero=True) == [[], []]


def test_after_a_training_there_is_nobody_to_tell():
    log_figures(None, FIGURES)
