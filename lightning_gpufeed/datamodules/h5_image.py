"""`H5ImageDataModule`: images in HDF5 files, uint8 until the device, as batches for a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from lightning_gpufeed.datamodules.h5 import ALL_SPLITS, H5DataModule
from lightning_gpufeed.datamodules.normalisation import (
    compute_on_all_ranks,
    find_normalisation,
    training_statistics,
)
from lightning_gpufeed.device.images import ImagePreparation
from lightning_gpufeed.errors import LayoutError
from lightning_gpufeed.hdf5.image_field import affine_of, class_names_of, common_layout, image_layout
from lightning_gpufeed.hdf5.keys import ArrayInfo, Split, find_image_key, find_label_key, list_arrays
from lightning_gpufeed.hdf5.layout import H5DatasetLayout
from lightning_gpufeed.hdf5.source import Batch, H5Source
from lightning_gpufeed.hdf5.splits import Paths, Samples
from lightning_gpufeed.hdf5.weights import Weights

__all__ = ["H5ImageDataModule"]

Statistic = float | Sequence[float] | Literal["auto"] | None

_TRUE_PRECISIONS = {"64": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class H5ImageDataModule(H5DataModule):
    """Feeds images and their labels or masks from HDF5 files to a Trainer.

    Images stay uint8 on the host and on the way to the device: a quarter of the bytes of float32. On the
    device they become floating point, (N, C, H, W), normalised, in the Trainer's precision, and only then go through
    `device_transform`.

    A step gets `(images, labels)`; `images` alone if the file has no labels; a dict with the keys `image`,
    `label` and those of `extra_keys` if more fields are asked for. Integer labels and masks arrive as int64,
    which the loss functions expect.

    What stays bitwise equal: in 32-bit precision (and under autocast) images equal `x / 255`, minus mean, divided by
    standard deviation, in float32; see `ImagePreparation`. (Images stored as floats are rounded by Lightning before
    they are normalised if the Trainer runs in half precision.) Everything else is as in `H5DataModule`, whose arguments
    apply here too.

    Example:
        >>> dm = H5ImageDataModule("train.h5", val="val.h5", batch_size=32)
        >>> trainer.fit(model, datamodule=dm)     # any Trainer, any LightningModule
        >>> dm.image_shape, dm.num_classes
        ((3, 16, 16), 10)
    """

    def __init__(
        self,
        train: Paths | None = None,
        *,
        val: float | Samples | Paths | None = None,
        test: float | Samples | Paths | None = None,
        predict: Samples | Paths | None = None,
        image_key: str | None = None,
        label_key: str | None = None,
        extra_keys: Sequence[str] = (),
        image_layout: Literal["auto", "NCHW", "NHWC", "NHW"] = "auto",
        mean: Statistic = None,
        std: Statistic = None,
        channels_last: bool = False,
        num_classes: int | None = None,
        batch_size: int = 64,
        eval_batch_size: int | None = None,
        shuffle: bool | str | None = "full",
        seed: int = 0,
        drop_last: bool = False,
        train_indices: Samples | str | None = None,
        stratify: bool = False,
        sample_weights: Weights | None = None,
        samples_per_epoch: int | None = None,
        fold: int | None = None,
        folds: Sequence[int] | str | None = None,
        num_folds: int | None = None,
        group_by: str | None = None,
        device_transform: Callable[..., Any] | None = None,
        eval_device_transform: Callable[..., Any] | None = None,
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
            image_key: Dataset of the images; found by shape and name if None. `{split}` stands for the split's name.
            label_key: Dataset of the labels or masks; found if None, "" for none.
            extra_keys: Further datasets to deliver; batches are then dicts.
            image_layout: Axes of the stored images; "auto" reads the attribute `layout`, else judges by the shape.
            mean: Per channel, in units of the image scaled to 0..1. None takes the file's attribute if there is
                one, else does not normalise; "auto" computes it over the training samples if there is none.
            std: Standard deviation per channel; what it may be is as with `mean`.
            channels_last: Deliver images in channels-last memory order.
            num_classes: Number of classes; None takes the length of the attribute `class_names`. Labels are
                checked against it.
            batch_size: Samples per rank and training step.
            eval_batch_size: Samples per rank and step in the other stages; None takes `batch_size`.
            shuffle: Training order: "full", "window", "window:N" or None.
            seed: Decides the training order, the draws, the fractions, and the folds that are made.
            drop_last: Leave out training samples that do not fill a step on every rank.
            train_indices: Use only these samples of `train`: numbers, a mask, or the name of a dataset with either.
            stratify: Fractions, and folds that are made, keep the proportions of the classes.
            sample_weights: Draw training samples by these; "balanced" draws every class equally often. As in
                `H5DataModule`; classes may be given by name too.
            samples_per_epoch: Draws in an epoch, with `sample_weights`.
            fold: Which fold is for validation.
            folds: Fold number of each sample, or the name of the dataset that holds them.
            num_folds: Make so many folds.
            group_by: Dataset whose equal values stay in one of the folds that are made.
            device_transform: Called with the images of each training batch on the device, returns the images to use.
                Where the label is a mask it is called with `(images, masks)` and returns both.
            eval_device_transform: Called in the same way in the other stages.
            num_slots: Batches read ahead.
            pin_memory: Page-locked host buffers; None means yes with a GPU.
            isolate: Read in a process of its own: for training loops that hold the interpreter lock.
            copy_ahead: Copy training batches to the device ahead of their step, on a stream of their own.
            storage_options: What fsspec needs to reach addresses among the files.

        Raises:
            ValueError: An argument is out of range.
        """
        super().__init__(
            train,
            val=val,
            test=test,
            predict=predict,
            keys=None,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            train_indices=train_indices,
            stratify_by="label" if stratify else None,
            sample_weights=sample_weights,
            samples_per_epoch=samples_per_epoch,
            weight_by="label",
            fold=fold,
            folds=folds,
            num_folds=num_folds,
            group_by=group_by,
            device_transform=device_transform,
            eval_device_transform=eval_device_transform,
            num_slots=num_slots,
            pin_memory=pin_memory,
            isolate=isolate,
            copy_ahead=copy_ahead,
            storage_options=storage_options,
        )
        if image_layout not in ("auto", "NCHW", "NHWC", "NHW"):
            raise ValueError(f"image_layout={image_layout!r}; expected 'auto', 'NCHW', 'NHWC' or 'NHW'.")
        if isinstance(extra_keys, str):
            raise ValueError(f"extra_keys is {extra_keys!r}; expected a list of names.")
        self._image_layout = image_layout
        self._extra_keys = tuple(extra_keys)
        self._image_key = image_key
        self._label_key = label_key
        self._mean = mean
        self._std = std
        self._channels_last = channels_last
        self._num_classes = num_classes
        self._preparations: dict[Split, ImagePreparation] = {}
        self._mean_and_std: dict[str, tuple[float, ...] | None] | None = None

    # What is known of the images -------------------------------------------------------------------------

    @property
    def num_classes(self) -> int | None:
        """Number of classes: as given, else by the file's class names; None if neither says."""
        names = self.class_names
        return self._num_classes if self._num_classes is not None else len(names) if names else None

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes by number, from the files; None if they have none."""
        for split in ALL_SPLITS:
            self._splits.get(split)
        return class_names_of(source for source, _ in self._splits.opened().values())

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the images a step gets."""
        layout = self._layout_of("image")
        if layout is None:
            raise ValueError("image_shape is known once there is data: give train=, val=, test= or predict=.")
        shape = layout.sample_shape
        order = image_layout(layout, self._image_layout)
        if order == "NHW":
            return (1, shape[0], shape[1])
        return (shape[2], shape[0], shape[1]) if order == "NHWC" else (shape[0], shape[1], shape[2])

    @property
    def mean(self) -> tuple[float, ...] | None:
        """Per channel mean that images are normalised with, None for none. Known after `setup`."""
        return None if self._mean_and_std is None else self._mean_and_std["mean"]

    @property
    def std(self) -> tuple[float, ...] | None:
        """Per channel standard deviation that images are normalised with, None for none. Known after `setup`."""
        return None if self._mean_and_std is None else self._mean_and_std["std"]

    def _layout_of(self, field: str) -> H5DatasetLayout | None:
        """Layout of a field in the first file there is."""
        for split in ("train", "val", "test", "predict"):
            found = self._splits.get(split)
            if found is not None and field in found[0].fields:
                return found[0].fields[field][0]
        return None

    def _choose_fields(
        self, path: str, split: Split, arrays: Sequence[ArrayInfo], is_own_file: bool
    ) -> dict[str, str] | None:
        """Find what is not named, the images, the labels or both, among the arrays of one split."""
        named = [key for key in (self._image_key, self._label_key, *self._extra_keys) if key]
        if named and not is_own_file and not any("{split}" in key for key in named):
            # A name that stands for one split says nothing of another.
            return None
        image_key = self._image_key and self._image_key.replace("{split}", split).strip("/")
        label_key = self._label_key and self._label_key.replace("{split}", split).strip("/")
        extra = {key: key.replace("{split}", split).strip("/") for key in self._extra_keys}
        name = image_key or label_key
        if name and None in (image_key, label_key):
            # What is found has to belong to what is named, whichever split that is of.
            known = {array.key: array for array in list_arrays(path)}
            if name not in known:  # opening it says so, with the keys there are
                return {"image" if image_key else "label": name}
            belonging = [array for array in known.values() if array.split == known[name].split]
            arrays = [array for array in belonging if not self._splits.is_column(array)]
        arrays = [array for array in arrays if array.key not in extra.values()]
        if image_key is None:
            image_key = find_image_key(path, [array for array in arrays if array.key != label_key])
        if label_key is None:
            label_key = find_label_key(path, arrays, image_key)
        fields = {"image": image_key} | ({"label": label_key} if label_key else {})
        return fields | {name.replace("{split}", "").strip("_-./ ") or name: key for name, key in extra.items()}

    # Setup -----------------------------------------------------------------------------------------------

    def setup(self, stage: str | None = None) -> None:
        """Open what a stage needs, check labels, find the normalisation; safe to call again.

        Args:
            stage: "fit", "validate", "test" or "predict"; None opens whatever there is.

        Raises:
            FileNotFoundError: A file is missing.
            LayoutError: A file cannot be used, or a label is out of range.
            ValueError: The splits do not fit together.
        """
        super().setup(stage)
        for source, indices in self._splits.opened().values():
            self._check_labels(source, indices)
        class_names_of(source for source, _ in self._splits.opened().values())
        for split, (source, _) in self._splits.opened().items():
            if split not in self._preparations:
                self._preparations[split] = self._make_preparation(split, source)

    def _check_labels(self, source: H5Source, indices: npt.NDArray[np.int64] | None) -> None:
        """Refuse a class number that no output of a model stands for."""
        spec = source.specs.get("label")
        if self.num_classes is None or spec is None or spec.row_bytes > 8 or spec.dtype.is_floating_point:
            return
        used = np.arange(source.num_samples) if indices is None else indices
        labels = source.read_field("label", used).numpy().reshape(-1).astype(np.int64)
        wrong = np.flatnonzero((labels < 0) | (labels >= self.num_classes))
        if wrong.size:
            raise LayoutError(
                f"{', '.join(source.paths)}: label {labels[wrong[0]]} of sample {used[wrong[0]]} is out of range: "
                f"{self.num_classes} classes have the labels 0 to {self.num_classes - 1} ({wrong.size} sample(s) are "
                f"wrong). Correct the labels or num_classes."
            )

    def _make_preparation(self, split: Split, source: H5Source) -> ImagePreparation:
        """How the images of one split are prepared: its own axes and scale, the normalisation of the training."""
        layout = common_layout(source)
        affine = affine_of(layout)
        return ImagePreparation(
            layout=image_layout(layout, self._image_layout),
            scale=None if affine is None else affine.scale,
            offset=0.0 if affine is None else affine.offset,
            dtype=self._precision(),
            channels_last=self._channels_last,
            mean=self._normalisation()["mean"],
            std=self._normalisation()["std"],
        )

    def _normalisation(self) -> dict[str, tuple[float, ...] | None]:
        """Mean and standard deviation: given, of the training file, or computed; found once."""
        if self._mean_and_std is None:
            layout = self._layout_of("image")
            assert layout is not None
            given = {"mean": self._mean, "std": self._std}
            self._mean_and_std = find_normalisation(given, layout, self.image_shape[0], self._statistics)
        return self._mean_and_std

    def _statistics(self) -> dict[str, Any]:
        """Mean and standard deviation of the training images, the same on every rank."""
        return compute_on_all_ranks(
            self.trainer, lambda: training_statistics(self._splits.get("train"), self._image_layout)
        )

    def _precision(self) -> torch.dtype:
        """Type of the images for the Trainer's precision; autocast works from float32."""
        precision = "32" if self.trainer is None else str(self.trainer.precision)
        return next((dtype for name, dtype in _TRUE_PRECISIONS.items() if precision.startswith(name)), torch.float32)

    # Batches ---------------------------------------------------------------------------------------------

    def _to_batch(self, source: H5Source) -> Callable[[Batch], Any] | None:
        names = tuple(source.fields)
        return _Parts(names) if set(names) <= {"image", "label"} else None

    def _prepare(self, batch: Any) -> Any:
        """Images to floating point, labels to what a loss expects."""
        prepare = self._preparations.get(self._running_split())
        if prepare is None:
            raise RuntimeError(
                f"a {self._running_split()} batch arrived, but no {self._running_split()} data was set up. Call "
                f"setup(), or use a Trainer."
            )
        prepare.dtype = self._precision()
        if isinstance(batch, torch.Tensor):
            return prepare(batch)
        if isinstance(batch, Mapping):
            ready = dict(batch, image=prepare(batch["image"]))
            return ready | ({"label": self._label(batch["label"])} if "label" in batch else {})
        return prepare(batch[0]), self._label(batch[1])

    def _label(self, label: Any) -> Any:
        if not isinstance(label, torch.Tensor):
            return label
        return label.to(self._precision()) if label.dtype.is_floating_point else label.to(torch.int64)

    def _transform(self, transform: Callable[..., Any], batch: Any) -> Any:
        """Transform the images, and the masks with them."""
        if isinstance(batch, torch.Tensor):
            return transform(batch)
        is_dict = isinstance(batch, dict)
        image, label = (batch["image"], batch.get("label")) if is_dict else batch
        if isinstance(label, torch.Tensor) and label.ndim >= 3:
            image, label = transform(image, label)
        else:
            image = transform(image)
        if not is_dict:
            return image, label
        return dict(batch, image=image) | ({"label": label} if "label" in batch else {})


@dataclass(frozen=True)
class _Parts:
    """The image alone, or image and label as a pair."""

    names: tuple[str, ...]

    def __call__(self, batch: Batch) -> Any:
        return batch["image"] if len(self.names) == 1 else (batch["image"], batch["label"])
