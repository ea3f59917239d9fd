"""A folder of image files: one sub-folder per class, or no classes at all.

EXIF rotation is not applied, as in torchvision's `ImageFolder`.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5.sources.source import FieldSpec, RowError, SourceOptions, SourceRows, select_keys

if TYPE_CHECKING:
    from lightning_gpufeed.hdf5.sources.decode import DecodeError, Geometry

__all__ = ["IMAGE_SUFFIXES", "ImageFolderSource", "ImageListing", "list_images", "open_image_folder"]

IMAGE_SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".pbm", ".pnm", ".tif", ".tiff", ".gif")
)
_SPLIT_NAMES = frozenset(("train", "val", "valid", "validation", "test"))
# Below this many images, starting processes (they import this package, seconds) takes longer than decoding here.
_MIN_IMAGES_FOR_PROCESSES = 1000
# Images per task: enough to make the hand-over cheap, few enough to share the last ones evenly.
_MAX_TASK_IMAGES = 16


@contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let processes that start meanwhile never see Ctrl-C: this process answers it, and ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class ImageListing:
    """The images of a folder.

    Attributes:
        root: The folder.
        names: Paths below `root`, class by class, sorted.
        labels: int64 `(num_images,)`, index of the class; None without classes.
        class_names: Names of the sub-folders, sorted; empty without classes.
    """

    root: Path
    names: list[str]
    labels: npt.NDArray[np.int64] | None
    class_names: list[str]

    def identity(self) -> str:
        """Digest of names, sizes and times of last change."""
        digest = hashlib.sha256()
        for name in self.names:
            try:
                status = os.stat(self.root / name)
            except OSError:
                line = f"{name}\0unreadable\n"  # named when its turn comes
            else:
                line = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"
            digest.update(line.encode("utf-8", "surrogateescape"))
        return f"{os.path.realpath(self.root)}:{len(self.names)}:{digest.hexdigest()}"


def list_images(root: Path) -> ImageListing:
    """Find the images of a folder; hidden files are left out, links are followed.

    Args:
        root: The folder.

    Returns:
        The images, with classes when they lie in sub-folders.

    Raises:
        PackError: No images; images beside and inside sub-folders; a class without images; splits where
            classes were expected.
    """
    entries = _visible_entries(root)
    folders = [entry.name for entry in entries if entry.is_dir()]
    files = [entry.name for entry in entries if not entry.is_dir() and not _is_pipe(entry)]
    flat = [name for name in files if _is_image(name)]
    others = Counter(Path(name).suffix or "no suffix" for name in files if not _is_image(name))
    per_class = {name: _walk(root, name, (), others) for name in folders}
    if not flat and not any(per_class.values()):
        ignored = ", ".join(f"{count} x {suffix}" for suffix, count in others.most_common(5)) or "no files"
        raise PackError(
            f"no images in {root} (found: {ignored}); expected one sub-folder per class with files ending in "
            f"{', '.join(sorted(IMAGE_SUFFIXES))}"
        )
    if flat and any(per_class.values()):
        raise PackError(
            f"{root} holds images directly ({flat[0]}) and in sub-folders "
            f"({next(names[0] for names in per_class.values() if names)}); expected one or the other: "
            "move the former into a class folder"
        )
    if flat:
        return ImageListing(root, flat, None, [])
    _refuse_splits(root, folders)
    empty = [name for name, names in per_class.items() if not names]
    if empty:
        raise PackError(
            f"{root} has class folders without images: {', '.join(empty)}; each would take a label that no "
            "sample has. Fill or remove them"
        )
    labels = np.repeat(np.arange(len(folders)), [len(per_class[name]) for name in folders])
    names = [name for folder in folders for name in per_class[folder]]
    return ImageListing(root, names, labels.astype(np.int64), folders)


def _visible_entries(folder: Path) -> list[os.DirEntry[str]]:
    """Entries of a folder by name, without hidden ones."""
    with os.scandir(folder) as entries:
        return sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)


def _is_image(name: str) -> bool:
    """Whether the suffix is that of an image format."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def _is_pipe(entry: os.DirEntry[str] | Path) -> bool:
    """Whether reading it could wait for ever. What cannot be looked at is listed when it is read."""
    try:
        return not stat.S_ISREG(os.stat(entry).st_mode)
    except OSError:
        return False


def _walk(root: Path, folder: str, above: tuple[tuple[int, int], ...], others: Counter[str]) -> list[str]:
    """Images at any depth below a class folder; a link back to a folder above is not followed twice."""
    status = os.stat(root / folder)
    here = (status.st_dev, status.st_ino)
    if here in above:
        return []
    names: list[str] = []
    for entry in _visible_entries(root / folder):
        name = f"{folder}/{entry.name}"
        if entry.is_dir():
            names.extend(_walk(root, name, (*above, here), others))
        elif _is_image(entry.name) and not _is_pipe(entry):
            names.append(name)
        else:
            others[Path(entry.name).suffix or "no suffix"] += 1
    return names


def _refuse_splits(root: Path, folders: Sequence[str]) -> None:
    """Refuse `root/train/cat/1.jpg`, which would make "train" a class."""
    if len(folders) > 1 and _SPLIT_NAMES.issuperset(folder.lower() for folder in folders):
        raise PackError(
            f"the sub-folders of {root} are splits ({', '.join(folders)}), not classes; "
            f"pack each on its own, such as {root / folders[0]}"
        )


class ImageFolderSource:
    """Decoded images, `images` uint8, and their `labels` int64 where there are classes.

    Args:
        listing: The files.
        geometry: What becomes of each image.
        options: `keys` and `num_workers` count.

    Raises:
        PackError: No file can be opened as an image, or an unknown key.
    """

    is_thread_safe = True
    most_rows_per_read = 1024

    def __init__(self, listing: ImageListing, geometry: Geometry, options: SourceOptions) -> None:
        from lightning_gpufeed.hdf5.sources import decode

        self._listing, self._geometry, self._decode = listing, geometry, decode
        self._reference, self._size = self._first_size()
        self.num_samples = len(listing.names)
        self.identity = listing.identity()
        images = FieldSpec(geometry.sample_shape(self._size), np.dtype(np.uint8))
        available = {"images": images}
        if listing.labels is not None:
            available["labels"] = FieldSpec((), np.dtype(np.int64))
        keys = select_keys(list(available), options.keys, str(listing.root))
        self.fields = {key: available[key] for key in keys}
        known: dict[str, dict[str, Any]] = {
            "images": {"layout": geometry.layout},
            "labels": {"class_names": [_printable(name) for name in listing.class_names]},
        }
        self.attributes = {key: known[key] for key in keys}
        self._num_workers = self._count_workers(options.num_workers)
        self._pool = self._start_pool()

    def _first_size(self) -> tuple[str, tuple[int, int]]:
        """Name and final size of the first image whose header can be read."""
        reason = ""
        for name in self._listing.names:
            try:
                height, width = self._decode.file_size(str(self._listing.root / name))
            except Exception as error:  # as in decode_files: anything may come out of a damaged file
                reason = reason or f"{name}: {error}"
            else:
                return name, self._geometry.final(height, width)
        raise PackError(
            f"none of the {len(self._listing.names)} images in {self._listing.root} can be opened; {reason}"
        )

    def _count_workers(self, asked: int | None) -> int:
        """Number of decoding processes; 0 decodes here."""
        if asked is not None:
            return asked
        if self.num_samples < _MIN_IMAGES_FOR_PROCESSES:
            return 0
        num_cpus = len(os.sched_getaffinity(0))
        return num_cpus if num_cpus > 1 else 0

    def _start_pool(self) -> Executor | None:
        """The decoding processes, forked from a server that imports this package once for all of them."""
        if self._num_workers == 0 or "images" not in self.fields:
            return None
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([self._decode.__name__])
        return ProcessPoolExecutor(self._num_workers, context, initializer=self._decode.prepare_worker)

    def read(self, indices: npt.NDArray[np.int64]) -> SourceRows:
        """Decode images.

        An image of another size than the first, or a decoding process that dies, raises `PackError`.

        Args:
            indices: int64 `(num_rows,)`.

        Returns:
            The decoded rows; damaged files among the errors.
        """
        errors: list[RowError] = []
        values: dict[str, npt.NDArray[Any]] = {}
        if "images" in self.fields:
            values["images"], failures = self._decode_rows(indices)
            failed = indices[[failure.position for failure in failures]] if failures else indices[:0]
            errors = [
                RowError(int(index), self._name(index), failure.reason)
                for index, failure in zip(failed, failures, strict=True)
            ]
            indices = indices[~np.isin(indices, failed)]
        if "labels" in self.fields and self._listing.labels is not None:
            values["labels"] = self._listing.labels[indices]
        return SourceRows(indices, values, errors)

    def _name(self, index: int | np.int64) -> str:
        """Path of an image below the folder, printable."""
        return _printable(self._listing.names[index])

    def _decode_rows(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint8], list[DecodeError]]:
        """Decode in tasks spread over the processes; positions of failures count from the first index."""
        paths = [str(self._listing.root / self._listing.names[index]) for index in indices]
        if self._pool is None:
            results = [self._decode.decode_files(paths, self._geometry, self._size)]
            step = len(paths)
        else:
            step = max(1, min(_MAX_TASK_IMAGES, len(paths) // (2 * self._num_workers)))
            try:
                tasks = [paths[start : start + step] for start in range(0, len(paths), step)]
                decode_files, geometry, size = self._decode.decode_files, self._geometry, self._size
                with _interrupts_held_back():
                    futures = [self._pool.submit(decode_files, task, geometry, size) for task in tasks]
                results = [future.result() for future in futures]
            except BrokenProcessPool as error:
                first, last = self._name(indices[0]), self._name(indices[-1])
                raise PackError(
                    f"a decoding process died somewhere from {first} to {last}: out of memory, a crash in an "
                    'image library, or a script that calls pack() outside `if __name__ == "__main__":`. '
                    "num_workers=0 (--num-workers 0) decodes in this process"
                ) from error
        failures = [
            failure._replace(position=failure.position + task * step)
            for task, (_, task_failures) in enumerate(results)
            for failure in task_failures
        ]
        for failure in failures:
            if failure.is_misfit:
                self._refuse_misfit(self._name(indices[failure.position]), failure.reason)
        images = [images for images, _ in results]
        return images[0] if len(images) == 1 else np.concatenate(images), failures

    def _refuse_misfit(self, name: str, reason: str) -> None:
        """Say which two images differ, and how to make all alike."""
        if self._geometry.crop is not None:
            raise PackError(f"{name} {reason}; resize first: resize={self._geometry.crop!r} (--resize)")
        size = f"{self._size[0]} x {self._size[1]}"
        raise PackError(
            f"images differ in size: {self._reference} is {size} pixels, {name} {reason}; expected one size. "
            "Give resize=256, crop=224 (--resize, --crop) or another pair"
        )

    def close(self) -> None:
        """Stop the decoding processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def _printable(name: str) -> str:
    """A file name that is not valid UTF-8 made so, as HDF5 text has to be."""
    return name.encode("utf-8", "backslashreplace").decode()


def open_image_folder(root: Path, options: SourceOptions) -> ImageFolderSource:
    """A tree of image files.

    Args:
        root: The folder.
        options: All but `split` count.

    Returns:
        The source.

    Raises:
        PackError: No images, an unclear tree, or Pillow is missing.
    """
    options.refuse(("split",), f"{root}, a folder of images")
    listing = list_images(root)
    try:
        from lightning_gpufeed.hdf5.sources.decode import Geometry
    except ImportError as error:
        raise PackError(
            f"{root} holds images, and decoding them needs Pillow ({error}): pip install 'lightning_gpufeed[images]'"
        ) from error
    geometry = Geometry(options.resize, options.crop, options.mode, options.layout)
    return ImageFolderSource(listing, geometry, options)
