"""Decides how to run a pipeline from what one rank measures with the first batch: all ranks decide the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import distributed, nn
from torch.utils.checkpoint import checkpoint

from lightning_gpufeed.errors import SyncError
from lightning_gpufeed.pipeline.link import Link, probe_link
from lightning_gpufeed.pipeline.links import PipelineGroups
from lightning_gpufeed.pipeline.measure import MeasuredLayers, measure_layers
from lightning_gpufeed.pipeline.meeting import everyone
from lightning_gpufeed.pipeline.nested import batch_size, microbatch_sizes, split
from lightning_gpufeed.pipeline.overhead import stage_overhead_seconds
from lightning_gpufeed.pipeline.peers import lost_peer
from lightning_gpufeed.pipeline.plan import PipelineOptions, PipelinePlan, plan_training

__all__ = ["measured_plan", "visiting"]


def measured_plan(
    layers: Sequence[nn.Module], value: Any, options: PipelineOptions, groups: PipelineGroups, device: torch.device
) -> PipelinePlan:
    """Measure the layers on rank 0, and the links; every rank has to call this.

    Args:
        layers: Of the whole model, with all values.
        value: A batch for the first of them.
        options: What is asked for.
        groups: Of this rank.
        device: Where this rank computes. On a CUDA device one layer is there at a time.

    Returns:
        The plan, the same on all ranks of all pipelines.

    Raises:
        ScheduleError: There are fewer layers than stages, or nothing keeps within the cap.
        SyncError: Rank 0 could not measure; it raises what a layer has raised. Or another rank is gone.
    """
    with lost_peer("measuring the link"):
        link = probe_link(groups.output, device, groups.place, options.pipeline_size)
    box: list[Any] = [None]
    error: Exception | None = None
    if distributed.get_rank() == 0:
        try:
            found = _measured(layers, value, options, device)
            box = [(found.as_lists(), found.stage_seconds, astuple(link))]
        except Exception as caught:  # which the others are to hear of
            error, box = caught, [f"{type(caught).__name__}: {caught}"]
    with lost_peer("waiting for what rank 0 has measured"):
        distributed.broadcast_object_list(box, 0, everyone())
    if error is not None:
        raise error
    if isinstance(box[0], str):
        raise SyncError(f"Rank 0 could not measure the layers of the pipeline: {box[0][:200]}")
    rows, stage_seconds, of_link = box[0]
    measured = replace(MeasuredLayers.from_lists(rows), stage_seconds=stage_seconds)
    return plan_training(options, len(layers), measured, Link(*of_link))


def _measured(
    layers: Sequence[nn.Module], value: Any, options: PipelineOptions, device: torch.device
) -> MeasuredLayers:
    num_samples = batch_size(value) or 1
    sizes = microbatch_sizes(num_samples, min(options.microbatches, num_samples))
    with visiting(layers, device):
        run = [_Checkpointed(layer) for layer in layers] if options.is_checkpointed else layers
        microbatch = split(value, sizes)[0]
        found = measure_layers(run, microbatch)
        return replace(found, stage_seconds=stage_overhead_seconds(run, microbatch, found))


class _Checkpointed(nn.Module):
    """Runs a layer a second time in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: Any) -> Any:
        return checkpoint(self.layer, value, use_reentrant=False)


@contextmanager
def visiting(layers: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """Have layers on the device one at a time, each while it is run.

    Args:
        layers: On the host.
        device: Where to run them.

    Yields:
        Nothing.
    """
    here: list[nn.Module] = []

    def come(layer: nn.Module, _: Any) -> None:
        if here != [layer]:
            for other in here:
                other.cpu()
            here[:] = [layer.to(device)]

    handles = [] if device.type == "cpu" else [layer.register_forward_pre_hook(come) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for layer in here:
            layer.cpu()
