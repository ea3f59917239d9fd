"""`H5DataModule`: any arrays of equal length in HDF5 files, as batches for a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_gpufeed.datamodules.loading import (
    ahead_device,
    count_samples,
    describe_loader,
    make_loader,
    stage_splits,
)
from lightning_gpufeed.datamodules.resume import is_latest_in_work, shift_batch_progress
from lightning_gpufeed.device.feed import FeedStatistics
from lightning_gpufeed.device.transfer import device_of
from lightning_gpufeed.hdf5.arguments import LARGEST_SEED, whole_number
from lightning_gpufeed.hdf5.columns import WeightChoice
from lightning_gpufeed.hdf5.folds import choose_fold
from lightning_gpufeed.hdf5.keys import ArrayInfo, Split
from lightning_gpufeed.hdf5.loader import H5Loader
from lightning_gpufeed.hdf5.order import parse_shuffle
from lightning_gpufeed.hdf5.source import Batch, H5Source
from lightning_gpufeed.hdf5.splits import H5Splits, Paths, Samples, fields_by_name
from lightning_gpufeed.hdf5.weights import Weights

__all__ = ["ALL_SPLITS", "H5DataModule"]

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
    a path, or several  those files, several as one dataset; addresses in a store too
    a float             that fraction of the training samples, chosen by `seed` (by class: `stratify_by`)
    a list of ints      those samples of the training files; of booleans: those it marks; the name of a dataset of
                        these files: as it says, in either way
    None                the arrays of the training file whose names say so (`x_test`, `test/images`), if any
    ==================  =====================================================================================

    With `sample_weights` an epoch is not every training sample once but draws with replacement; the ranks share
    these in the same way, and they resume as exactly. With `fold` a part of the training samples is for validation:
    the fold of a column of the file, or one of folds that are made by `seed`, the same on every rank. Datasets named
    as weights, folds or sample numbers are part of a batch only if `keys` names them.

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
    Resuming in mid-epoch gives the weights of the run that was not interrupted; with another batch size or number of
    ranks it continues with exactly the samples that were left.

    Example:
        >>> dm = H5DataModule("train.h5", val=0.1, keys=["images", "labels"], batch_size=32)
        >>> trainer.fit(model, datamodule=dm)     # any Trainer, any LightningModule
        >>> dm = H5DataModule("train.h5", val="val.h5", sample_weights="balanced")
        >>> dm = H5DataModule("train.h5", num_folds=5, fold=0, group_by="patient")
    """

    def __init__(
        self,
        train: Paths | None = None,
        *,
        val: float | Samples | Paths | None = None,
        test: float | Samples | Paths | None = None,
        predict: Samples | Paths | None = None,
        keys: Mapping[str, str] | Sequence[str] | None = None,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        shuffle: bool | str | None = "full",
        seed: int = 0,
        drop_last: bool = False,
        train_indices: Samples | str | None = None,
        stratify_by: str | None = None,
        sample_weights: Weights | None = None,
        samples_per_epoch: int | None = None,
        weight_by: str | None = None,
        fold: int | None = None,
        folds: Sequence[int] | str | None = None,
        num_folds: int | None = None,
        group_by: str | None = None,
        device_transform: Callable[[Any], Any] | None = None,
        eval_device_transform: Callable[[Any], Any] | None = None,
        num_slots: int = 2,
        pin_memory: bool | None = None,
        isolate: bool = False,
        copy_ahead: bool = False,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        """Note the arguments; files are opened in `setup`.

        Args:
            train: File or files to train on.
            val: For validation: files, a fraction, sample numbers, a mask, or the name of a dataset with either.
            test: For testing; what it may be is as with `val`.
            predict: For prediction; None takes what `test` gives.
            keys: Datasets to use: names, or field name -> key. `{split}` in a key stands for `train`, `val`, `test`.
                None takes every array; those whose names say a split go to it, under the rest of the name.
            batch_size: Samples per rank and training step.
            eval_batch_size: Samples per rank and step in the other stages; None takes `batch_size`.
            shuffle: Training order: "full", "window", "window:N" or None. The other stages keep the file's order.
            seed: Decides the training order, the draws, the fractions, and the folds that are made.
            drop_last: Leave out training samples that do not fill a step on every rank.
            train_indices: Use only these samples of `train`: numbers, a mask, or the name of a dataset with either.
            stratify_by: Field of class numbers that fractions, and folds that are made, keep the proportions of.
            sample_weights: Draw training samples with replacement by these: a number for each sample of `train`, the
                name of the field or dataset with them, class -> weight, or "balanced": every class equally often.
            samples_per_epoch: Draws in an epoch, with `sample_weights`; None for as many as there are samples.
            weight_by: Field of the classes that `sample_weights` speaks of; None takes `stratify_by`, or finds it.
            fold: Which fold of the training samples is for validation, in place of `val`.
            folds: Fold number of each sample of `train`, or the name of the field or dataset that holds them.
            num_folds: Make so many folds, by `seed`, if there are none.
            group_by: Field or dataset whose equal values stay in one of the folds that are made, such as the patient.
            device_transform: Called with each training batch on the device; returns the batch to use.
            eval_device_transform: Called in the same way with each batch of the other stages.
            num_slots: Batches read ahead.
            pin_memory: Page-locked host buffers; None means yes with a GPU.
            isolate: Read in a process of its own: for training loops that hold the interpreter lock.
            copy_ahead: Copy training batches to the device ahead of their step, on a stream of their own.
            storage_options: What fsspec needs to reach addresses among the files, such as `s3://bucket/train.h5`.

        Raises:
            ValueError: An argument is out of range, or two do not fit together.
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
        self._weights = WeightChoice(sample_weights, samples_per_epoch, weight_by or stratify_by)
        self._splits = H5Splits(
            {"train": train, "val": val, "test": test, "predict": predict},
            keys=keys,
            choose_fields=self._choose_fields,
            train_indices=train_indices,
            seed=seed,
            stratify_by=stratify_by,
            fold=choose_fold(fold, folds, num_folds, group_by),
            columns=[self._weights.column] if self._weights.column else [],
            storage_options=storage_options,
        )
        self._num_slots = whole_number("num_slots", num_slots, 1)
        self._pin_memory = pin_memory
        self._isolate = isolate
        self._copy_ahead = copy_ahead
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
        if stage == "fit":
            self._resumed = None
        for split in stage_splits(stage):
            found = self._splits.get(split)
            if found is None and (stage, split) != ("fit", "val"):
                raise ValueError(self._no_data(split))
            if found is not None and split == "train":
                self._weights.read(*found)
        # Without validation data the hook looks like one that was never written: the Trainer then says nothing of it.
        self.__dict__.pop("val_dataloader", None)
        if self._splits.get("val") is None:
            self.__dict__["val_dataloader"] = super().val_dataloader

    def _choose_fields(
        self, path: str, split: Split, arrays: Sequence[ArrayInfo], is_own_file: bool
    ) -> dict[str, str] | None:
        """Field name -> key, from the arrays of one split, when no keys are named."""
        return fields_by_name(path, split, arrays)

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
        """Validation batches of this rank in the order of the file; a `ValueError` if there is no validation data."""
        return self._loader("val")

    def test_dataloader(self) -> H5Loader:
        """Test batches of this rank in the order of the file; a `ValueError` if there is no test data."""
        return self._loader("test")

    def predict_dataloader(self) -> H5Loader:
        """Prediction batches of this rank in the order of the file; a `ValueError` if there are no data for it."""
        return self._loader("predict")

    def _loader(self, split: Split) -> H5Loader:
        found = self._splits.get(split)
        if found is None:
            raise ValueError(self._no_data(split))
        source, is_train = found[0], split == "train"
        loader = make_loader(
            split,
            found,
            self.trainer,
            self.batch_size if is_train else self.eval_batch_size or self.batch_size,
            shuffle=self.shuffle,
            weights=self._weights.read(*found) if is_train else None,
            samples_per_epoch=self._weights.samples_per_epoch,
            seed=self.seed,
            drop_last=self.drop_last,
            num_slots=self._num_slots,
            pin_memory=self._pin_memory,
            isolate=self._isolate and is_train,
            device=ahead_device(self.trainer) if is_train and self._copy_ahead else None,
            to_batch=self._to_batch(source),
        )
        loader.on_batch = partial(setattr, self, "_latest_split", split)
        source.on_way = rank_zero_info
        if former := self._loaders.get(split):
            former.close()
        self._loaders[split] = loader
        trainer: Any = self.trainer  # one line, for the data that the run is about
        if not self._is_described and (split != "val" or trainer is None or trainer.state.fn != "fit"):
            self._is_described = True
            rank_zero_info(f"{type(self).__name__}: {describe_loader(split, found, loader)}")
        return loader

    def _no_data(self, split: Split) -> str:
        return f"{type(self).__name__} has no {split} data: give {split}=, or arrays whose names say {split!r}."

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
        opened = self._splits.opened().items()
        parts = [f"{split}: {count_samples(one)} samples of {', '.join(one[0].paths)}" for split, one in opened]
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
