"""Arguments of `OutOfOrderStrategy` that have no place there, or a wrong value."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from lightning_gpufeed.pipeline.plan import PipelineOptions
from lightning_gpufeed.sync.candidates import PlanOptions

__all__ = ["check_arguments", "pipeline_options"]

_WITHOUT_MEANING = {"static_graph", "gradient_as_bucket_view"}
"""Arguments of DistributedDataParallel that change nothing here: both are so by themselves."""

_START_METHODS = ("popen", "spawn", "fork", "forkserver")


def check_arguments(others: Collection[str], verify_every: Any, start_method: Any) -> None:
    """Make sure that no argument is passed over in silence, and that values are what they may be.

    Args:
        others: Names of arguments that the strategy does not have itself.
        verify_every: As given.
        start_method: As given.

    Raises:
        ValueError: An argument is of `DDPStrategy`, and has no place here; or a value is wrong.
    """
    _check_others(others)
    if isinstance(verify_every, bool) or not isinstance(verify_every, int) or verify_every < 0:
        raise ValueError(f"verify_every is {verify_every!r}; expected a whole number from 0 on.")
    if start_method not in _START_METHODS:
        raise ValueError(f"start_method is {start_method!r}; expected {', '.join(map(repr, _START_METHODS))}.")


def _check_others(names: Collection[str]) -> None:
    """None is passed over in silence."""
    if "bucket_cap_mb" in names:
        raise ValueError("bucket_cap_mb is given; expected bucket_bytes, in bytes, or 'auto'.")
    refused = sorted(set(names) - _WITHOUT_MEANING)
    if refused:
        raise ValueError(
            f"{', '.join(refused)}: gradients are reduced without DistributedDataParallel here, so there is no "
            "place for it. Expected the arguments of OutOfOrderStrategy; DDPStrategy takes the others."
        )


def pipeline_options(
    options: PipelineOptions, pipeline_module: str | None, sync: PlanOptions, verify_every: int
) -> PipelineOptions | None:
    """What is asked for of a pipeline.

    Args:
        options: Of the pipeline.
        pipeline_module: Likewise.
        sync: Of data parallel training.
        verify_every: Likewise.

    Returns:
        None if no pipeline is asked for.

    Raises:
        ValueError: An argument of the one is given for the other.
    """
    if options.pipeline_size == 1:
        default = PipelineOptions(1, memory_cap_bytes=options.memory_cap_bytes)
        names = [one.name for one in fields(options) if getattr(options, one.name) != getattr(default, one.name)]
        given = ["activation_checkpointing" if name == "is_checkpointed" else name for name in names]
        given += ["pipeline_module"] * (pipeline_module is not None)
        if given:
            raise ValueError(
                f"{', '.join(given)}: of a pipeline, but pipeline_size is 1; expected a pipeline_size from 2 on, or "
                "none of them."
            )
        return None
    if sync != PlanOptions(memory_cap_bytes=sync.memory_cap_bytes) or verify_every:
        raise ValueError(
            f"reverse_first_k, cross_iteration, bucket_bytes, overlap_clipping and verify_every are of data parallel "
            f"training, and pipeline_size is {options.pipeline_size}; expected them left out. In a pipeline each "
            "stage's gradients are reduced as soon as they are complete."
        )
    return options
