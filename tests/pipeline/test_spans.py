"""Seconds by name, while they are wanted."""

from __future__ import annotations

import time

import torch

from lightning_gpufeed.pipeline.spans import Spans


def test_spans_of_a_name_add_up_and_are_taken_once():
    spans = Spans(torch.device("cpu"))
    spans.is_on = True
    for _ in range(2):
        with spans.measure("all"), spans.measure("busy"):
            time.sleep(0.01)
    seconds = spans.take()
    assert seconds["all"] >= seconds["busy"] >= 0.02
    assert spans.take() == {}


def test_nothing_counts_while_they_are_off():
    spans = Spans(torch.device("cpu"))
    with spans.measure("busy"):
        pass
    assert spans.take() == {}
