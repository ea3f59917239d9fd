"""`H5DataModule`: any arrays of equal length in HDF5 files, as batches for a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_gpufeed.datamodules.resume import is_latest_in_work, shift_batch_progress
from lightning_gpufeed.device.feed import FeedStatistics
from lightning_gpufeed.device.transfer import device_of
from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.arguments import LARGEST_SEED, whole_number
from lightning_gpufeed.hdf5.keys import ArrayInfo, Split
from lightning_gpufeed.hdf5.loader import H5Loader
from lightning_gpufeed.hdf5.order import parse_shuffle
from lightning_gpufeed.hdf5.source import Batch, H5Source
from lightning_gpufeed.hdf5.splits import H5Splits, Paths

__all__ = ["ALL_SPLITS", "H5DataModule"]

_STAGE_SPLITS: dict[str, tuple[Split, ...]] = {
    "fit": ("train", "val"),
    "validate": ("val",),
    "test": ("test",),
    "predict": ("predict",),
}
ALL_SPLITS: tuple[Split, ...] = ("train", "val", "test", "predict")


class H5DataModule(LightningDataModule):
    """Feeds arrays of equal length from HDF5 files to a Trainer, as dicts of tensors.

    Each batch is read by one background thread into pinned host memory (with a GPU) while the step before it
    runs, and leaves the host in the file's own type. Under a distributed strategy the ranks share every epoch
    exactly: no sample lost, none twice, in validation and test too, and the same number of steps everywhere.
    Nothing has to be set for that, and `Trainer(use_distributed_sampler=...)` has no effect on it.

    Where the data of a split comes from:

    ==================  =====================================================================================
    given               meaning
    ==================  =====================================================================================
    a path, or several  those files, several as one dataset
    a float             that fraction of the training samples, chosen by `seed` (by class: `stratify_by`)
    a list of ints      those samples of the training files
    None                the arrays of the training file whose names say so (`x_test`, `test/images`), if any
    ==================  =====================================================================================

    ====================================  ===================================================================
    Hook                                  what it does
    ====================================  ===================================================================
    setup                                 reads layouts, finds keys, divides the splits, refuses bad files
    train/val/test/predict_dataloader     an `H5Loader` for this rank
    on_after_batch_transfer               `device_transform` (training) or `eval_device_transform`, then the
                                          LightningModule's own hook of that name
    state_dict, load_state_dict           the position in the training epoch
    teardown                              ends threads, closes files
    ====================================  ===================================================================

    What stays bitwise equal: a training over this DataModule equals one over a `TensorDataset` in the same order.
    Resuming in the middle of an epoch gives the weights of the run that was not interrupted; with another batch
    size or number of ranks it continues with exactly the samples that were left.

    Example:
        >>> dm = H5DataModule("train.h5", val=0.1, keys=["x", "y"], batch_size=256)    # doctest: +SKIP
        >>> Trainer(max_epochs=5).fit(model, datamodule=dm)                            # doctest: +SKIP
    """

    def __init__(
        self,
        train: Paths | None = None,
        *,
        val: float | Sequence[int] | Paths | None = None,
        test: float | Sequence[int] | Paths | None = None,
        predict: Sequence[int] | Paths | None = None,
        keys: Mapping[str, str] | Sequence[str] | None = None,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        shuffle: bool | str | None = "full",
        seed: int = 0,
        drop_last: bool = False,
        train_indices: Sequence[int] | None = None,
        stratify_by: str | None = None,
        device_transform: Callable[[Any], Any] | None = None,
        eval_device_transform: Callable[[Any], Any] | None = None,
        num_slots: int = 2,
        pin_memory: bool | None = None,
    ) -> None:
        """Note the arguments; files are opened in `setup`.

        Args:
            train: File or files to train on.
            val: For validation; see the table above.
            test: For testing.
            predict: For prediction; None takes what `test` gives.
            keys: Datasets to use: names, or field name -> key. `{split}` in a key stands for `train`, `val`, `test`.
                None takes every array; those whose names say a split go to that split, under the rest of the name.
            batch_size: Samples per rank and training step.
            eval_batch_size: The same for the other stages, None takes `batch_size`.
            shuffle: Training order: "full", "window", "window:N" or None. The other stages keep the file's order.
            seed: Decides the training order and the fractions.
            drop_last: Leave out training samples that do not fill a step on every rank.
            train_indices: Use only these samples of `train` (fractions are then taken from them).
            stratify_by: Field of class numbers that fractions keep the proportions of.
            device_transform: Called with each training batch on the device; returns the batch to use.
            eval_device_transform: The same for the other stages.
            num_slots: Batches read ahead.
            pin_memory: Page-locked host buffers; None means yes with a GPU.

        Raises:
            ValueError: An argument is out of range.
        """
        super().__init__()
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.eval_batch_size = None if eval_batch_size is None else whole_number("eval_batch_size", eval_batch_size, 1)
        parse_shuffle(shuffle)
        self.shuffle = shuffle
        self.seed = whole_number("seed", seed, 0, LARGEST_SEED)
        self.drop_last = drop_last
        self.device_transform = device_transform
        self.eval_device_transform = eval_device_transform
        self._splits = H5Splits(
            {"train": train, "val": val, "test": test, "predict": predict},
            keys=keys,
            choose_fields=self._choose_fields,
            train_indices=train_indices,
            seed=seed,
            stratify_by=stratify_by,
        )
        self._num_slots = whole_number("num_slots", num_slots, 1)
        self._pin_memory = pin_memory
        self._loaders: dict[Split, H5Loader] = {}
        self._resumed: dict[str, Any] | None = None
        self._is_described = False
        self._latest_split: Split = "train"

    # What each split is made of --------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Open what a stage needs; safe to call again.

        Args:
            stage: "fit", "validate", "test" or "predict"; None opens whatever there is.

        Raises:
            FileNotFoundError: A file is missing.
            LayoutError: A file cannot be used.
            ValueError: The splits do not fit together.
        """
        if stage is None:
            for split in ALL_SPLITS:
                self._splits.get(split)
            return
        # The Trainer gives an enumeration whose members compare equal to these names.
        name = next((name for name in _STAGE_SPLITS if stage == name), None)
        if name is None:
            raise ValueError(f"stage is {stage!r}; expected one of {', '.join(_STAGE_SPLITS)}.")
        if name == "fit":
            self._resumed = None
        for split in _STAGE_SPLITS[name]:
            if self._splits.get(split) is None and (name, split) != ("fit", "val"):
                raise ValueError(self._no_data(split))
        # Without validation data the hook has to look like one that was never written: the Trainer then says
        # nothing of it, as with any DataModule that has none.
        self.__dict__.pop("val_dataloader", None)
        if self._splits.get("val") is None:
            self.__dict__["val_dataloader"] = super().val_dataloader

    def _choose_fields(
        self, path: str, split: Split, arrays: Sequence[ArrayInfo], is_own_file: bool
    ) -> dict[str, str] | None:
        """Field name -> key, from the arrays of one split, when no keys are named."""
        fields: dict[str, str] = {}
        for array in arrays:
            if array.field_name in fields:
                raise LayoutError(
                    f"{path}: {fields[array.field_name]!r} and {array.key!r} both could be the field "
                    f"{array.field_name!r} of {split!r}. Name the datasets with keys=."
                )
            fields[array.field_name] = array.key
        return fields

    # Loaders ---------------------------------------------------------------------------------------------

    def train_dataloader(self) -> H5Loader:
        """Training batches of this rank.

        Returns:
            A loader that stands where a loaded checkpoint left off.

        Raises:
            ValueError: There is no training data.
        """
        loader = self._loader("train")
        loader.is_latest_in_work = partial(is_latest_in_work, self.trainer, loader.position)
        if self._resumed is not None:
            # Once the Trainer names a later epoch, only seed and shuffle of the state are left in force.
            loader.load_state_dict(self._resumed)
        return loader

    def val_dataloader(self) -> H5Loader:
        """Validation batches of this rank.

        Returns:
            A loader in the order of the file.

        Raises:
            ValueError: There is no validation data.
        """
        return self._loader("val")

    def test_dataloader(self) -> H5Loader:
        """Test batches of this rank.

        Returns:
            A loader in the order of the file.

        Raises:
            ValueError: There is no test data.
        """
        return self._loader("test")

    def predict_dataloader(self) -> H5Loader:
        """Prediction batches of this rank.

        Returns:
            A loader in the order of the file.

        Raises:
            ValueError: There is neither prediction nor test data.
        """
        return self._loader("predict")

    def _loader(self, split: Split) -> H5Loader:
        found = self._splits.get(split)
        if found is None:
            raise ValueError(self._no_data(split))
        source, indices = found
        is_train = split == "train"
        trainer: Any = self.trainer
        is_overfitting = trainer is not None and trainer.overfit_batches > 0
        world_size, rank = self._share()
        batch_size = self.batch_size if is_train else self.eval_batch_size or self.batch_size
        if not is_train:
            # One smaller batch is nothing to warn about here.
            num_samples = source.num_samples if indices is None else len(indices)
            batch_size = min(batch_size, max(1, -(-num_samples // world_size)))
        loader = self._make_loader(
            split,
            source,
            batch_size,
            # Overfitting means the same batches every time.
            shuffle=self.shuffle if is_train and not is_overfitting else None,
            seed=self.seed,
            rank=rank,
            world_size=world_size,
            drop_last=self.drop_last and is_train,
            indices=indices,
            num_slots=self._num_slots,
            pin_memory=self._pin_memory,
            to_batch=self._to_batch(source),
        )
        loader.on_batch = partial(setattr, self, "_latest_split", split)
        if split in self._loaders:
            self._loaders[split].close()
        self._loaders[split] = loader
        # One line, for the data that the run is about.
        if not self._is_described and (split != "val" or trainer is None or trainer.state.fn != "fit"):
            self._is_described = True
            text = "; ".join(source.engine_lines)
            rank_zero_info(f"{type(self).__name__}: {loader.num_samples} {split} samples; {text}")
        return loader

    def _make_loader(self, split: Split, source: H5Source, batch_size: int, **options: Any) -> H5Loader:
        """A loader; what is wrong with it names the split."""
        try:
            return H5Loader(source, batch_size, **options)
        except ValueError as error:
            raise ValueError(f"{split} data ({', '.join(source.paths)}): {error}") from error

    def _no_data(self, split: Split) -> str:
        return f"{type(self).__name__} has no {split} data: give {split}=, or arrays whose names say {split!r}."

    def _share(self) -> tuple[int, int]:
        """Number of data-parallel ranks and which one this is, as the strategy says."""
        share = self.trainer.distributed_sampler_kwargs if self.trainer is not None else None
        return (1, 0) if share is None else (int(share["num_replicas"]), int(share["rank"]))

    def _to_batch(self, source: H5Source) -> Callable[[Batch], Any] | None:
        """What turns the dict into the batch of a step; None leaves the dict."""
        return None

    def feed_statistics(self, split: Split = "train") -> FeedStatistics:
        """What feeding the latest epoch of a split cost on this rank.

        Args:
            split: "train", "val", "test" or "predict".

        Returns:
            Counts and seconds; all zero before the first batch.
        """
        return self._loaders[split].statistics if split in self._loaders else FeedStatistics()

    def __str__(self) -> str:
        """The splits known so far, with their sizes."""
        parts = []
        for split, (source, indices) in self._splits.opened().items():
            num_samples = source.num_samples if indices is None else len(indices)
            parts.append(f"{split}: {num_samples} samples of {', '.join(source.paths)}")
        return f"{type(self).__name__}(batch_size={self.batch_size}; {'; '.join(parts) or 'not set up yet'})"

    # On the device ---------------------------------------------------------------------------------------

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Work that belongs on the device: preparation, transform, then the LightningModule's own hook.

        Args:
            batch: The batch on the device, in the file's own types.
            dataloader_idx: Given by the Trainer.

        Returns:
            The batch for the step.
        """
        batch = self._prepare(batch)
        trainer = self.trainer
        transform = self.device_transform if self._running_split() == "train" else self.eval_device_transform
        if transform is not None:
            if isinstance(transform, nn.Module):
                transform.to(device_of(batch))
            batch = self._transform(transform, batch)
        module = trainer.lightning_module if trainer is not None else None
        if module is not None and is_overridden("on_after_batch_transfer", module):
            # Lightning asks either the DataModule or the module; here the module's own hook is not lost.
            batch = module.on_after_batch_transfer(batch, dataloader_idx)
        return batch

    def _running_split(self) -> Split:
        """Which data the latest batch is of: several Trainers, or none, may use the same DataModule."""
        return self._latest_split

    def _prepare(self, batch: Any) -> Any:
        """What every batch goes through on the device."""
        return batch

    def _transform(self, transform: Callable[[Any], Any], batch: Any) -> Any:
        """Apply a user's transform to a batch."""
        return transform(batch)

    # Position --------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Position in the training epoch, the same on every rank.

        Lightning keeps the loader's own state too, but drops it when `configure_optimizers` asked for
        `estimated_stepping_batches`; this one arrives always.

        Returns:
            Empty before training.
        """
        return {"train": self._loaders["train"].state_dict()} if "train" in self._loaders else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved position; outside of training there is nothing to continue.

        Args:
            state_dict: From `state_dict`.

        Raises:
            FeedError: The position was saved over other data.
            ValueError: The state is of another kind.
        """
        trainer: Any = self.trainer
        if "train" not in state_dict or (trainer is not None and trainer.state.fn != "fit"):
            return
        loader = self._loader("train")
        loader.load_state_dict(state_dict["train"])
        self._resumed = dict(state_dict["train"])
        if trainer is not None:
            shift_batch_progress(trainer, loader.position.steps_done - self._resumed["steps_done"])

    def teardown(self, stage: str) -> None:
        """End threads and close files; the next `setup` opens them again.

        Args:
            stage: Given by the Trainer.
        """
        self.__dict__.pop("val_dataloader", None)
        for loader in self._loaders.values():
            loader.close()
        for source, _ in self._splits.opened().values():
            source.close()
