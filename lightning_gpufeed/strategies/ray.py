"""`RayOutOfOrderStrategy`: `OutOfOrderStrategy` in the workers of a Ray `TorchTrainer`. Needs the extra `[ray]`."""

from __future__ import annotations

from typing import Any

from lightning_gpufeed.strategies.out_of_order import OutOfOrderStrategy
from lightning_gpufeed.strategies.pipeline import PipelineStrategy

try:
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment
except ImportError as error:
    raise ImportError(
        f"RayOutOfOrderStrategy works in Ray Train, which cannot be imported here ({error}); expected Ray with its "
        "'train' extra. Install it: pip install 'lightning_gpufeed[ray]'"
    ) from error

__all__ = ["RayOutOfOrderStrategy", "RayPipelineStrategy"]


class RayOutOfOrderStrategy(OutOfOrderStrategy, RayDDPStrategy):
    """`OutOfOrderStrategy` in the place of `RayDDPStrategy`, in the workers of a `ray.train.torch.TorchTrainer`.

    Ray starts the processes, gives each its device and opens the process group; what is computed and sent in which
    order is as in `OutOfOrderStrategy`, whose arguments it takes. Ray's `prepare_trainer` and `RayTrainReportCallback`
    take it for the `RayDDPStrategy` that it also is; checkpoints are ordinary ones, so a worker that was lost is
    started again by `FailureConfig` and goes on from the last of them.

    What stays bitwise equal to `RayDDPStrategy` with two workers: parameters, gradients, buffers, optimizer and
    scheduler state, logged values, checkpoints. With more workers sums are rounded in another order. With
    `pipeline_size` from 2 on it is as in `PipelineStrategy`.

    ==================================  =============================================================================
    Hook                                what it does
    ==================================  =============================================================================
    setup_environment                   refuses a Trainer without Ray's environment; the process group is Ray's
    root_device                         the worker's, as Ray says
    distributed_sampler_kwargs          a share for each worker; in a pipeline one for all workers of it
    all others                          as in `OutOfOrderStrategy`
    ==================================  =============================================================================

    Example::

        from lightning_gpufeed.strategies.ray import RayOutOfOrderStrategy

        def train():  # runs in every worker
            trainer = Trainer(
                devices="auto",
                accelerator="auto",
                strategy=RayOutOfOrderStrategy(),
                plugins=[RayLightningEnvironment()],
                callbacks=[RayTrainReportCallback()],
                enable_checkpointing=False,  # Ray keeps them
            )
            prepare_trainer(trainer).fit(Model(), datamodule=H5ImageDataModule("train.h5"))

        TorchTrainer(train, scaling_config=ScalingConfig(num_workers=8, use_gpu=True)).fit()

    Source:
        Oh et al., Out-of-order backprop, EuroSys 2022.
    """

    def __init__(self, *args: Any, pipeline_size: int = 1, **kwargs: Any) -> None:
        """Check the arguments.

        Args:
            *args: Of `OutOfOrderStrategy`.
            pipeline_size: Workers that share a model. From 2 on this is a `RayPipelineStrategy`.
            **kwargs: Of `OutOfOrderStrategy`. `timeout` is how long gradients are waited for; of all else it is Ray's.

        Raises:
            ValueError: A value is out of range, or says how to start processes, which Ray has done.
        """
        if type(self) is RayOutOfOrderStrategy and pipeline_size != 1:
            self.__class__ = RayPipelineStrategy
        super().__init__(*args, pipeline_size=pipeline_size, **kwargs)
        given = ["process_group_backend"] * (self._process_group_backend is not None)
        given += ["start_method"] * (self._start_method != "popen")
        if given:
            raise ValueError(
                f"{', '.join(given)}: Ray starts the workers and opens their process group; expected it left out. Give "
                "TorchTrainer(torch_config=TorchConfig(backend=..., timeout_s=...)) instead."
            )

    def setup_environment(self) -> None:
        """As in `OutOfOrderStrategy`, in the process group that Ray has opened.

        Raises:
            ValueError: The Trainer does not know of Ray, so each worker would train alone; or the workers cannot be
                shared out among pipelines.
        """
        if not isinstance(self.cluster_environment, RayLightningEnvironment):
            raise ValueError(
                f"{type(self).__name__} found {type(self.cluster_environment).__name__}; expected "
                "RayLightningEnvironment, which knows the other workers. Give it to the Trainer, and have Ray look at "
                "that: prepare_trainer(Trainer(strategy=..., plugins=[RayLightningEnvironment()]))."
            )
        options = self._pipeline_options
        if options is not None and self.world_size % options.pipeline_size:
            raise ValueError(
                f"pipeline_size is {options.pipeline_size}, and there are {self.world_size} workers; expected a "
                "multiple of it. Change ScalingConfig(num_workers=...) or pipeline_size."
            )
        super().setup_environment()


class RayPipelineStrategy(RayOutOfOrderStrategy, PipelineStrategy):
    """Pipeline parallel training in Ray's workers: what `RayOutOfOrderStrategy(pipeline_size=...)` is from 2 on.

    Workers with ranks next to each other are one pipeline, and Ray gives those of one machine ranks next to each other.
    What stays equal to training on one device is as in `PipelineStrategy`.
    """

    @property
    def num_processes(self) -> int:
        """Workers; Ray does not tell the Trainer of machines."""
        return self.world_size // self.num_nodes
