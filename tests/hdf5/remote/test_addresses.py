"""Loaders over files in a store: the same batches as from the disk, and what cannot be read there."""

from __future__ import annotations

import pickle
import threading
import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from lightning_gpufeed import H5DataModule, H5Loader
from lightning_gpufeed.errors import FeedError, LayoutError
from lightning_gpufeed.hdf5.inspection import inspect_file
from lightning_gpufeed.hdf5.remote.addresses import (
    SharedBytes,
    absolute,
    hold_open,
    know,
    open_address,
    remember,
    remote_file,
    size_of,
)
from lightning_gpufeed.hdf5.remote.remote_file import RemoteFile
from lightning_gpufeed.hdf5.source import H5Source
from tests.hdf5.remote_stores import WebStore, serve

NUM_SAMPLES = 60


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    random = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("store") / "train.h5"
    with h5py.File(path, "w") as h5_file:
        images = random.integers(0, 9, (NUM_SAMPLES, 3, 20, 20), dtype=np.uint8)
        h5_file.create_dataset("plain", data=images, chunks=(8, 3, 20, 20))
        h5_file.create_dataset("packed", data=images[::-1], chunks=(8, 3, 20, 20), compression="gzip")
        h5_file["block"] = images
        h5_file.create_dataset("split", data=images, chunks=(8, 3, 7, 20))
        h5_file["labels"] = np.arange(NUM_SAMPLES) % 4
        h5_file["big"] = np.arange(NUM_SAMPLES).astype(">i4")
        h5_file["names"] = [f"sample {number}" for number in range(NUM_SAMPLES)]
        h5_file.create_dataset("scaled", data=images.astype("i4"), chunks=(8, 3, 20, 20), scaleoffset=8)
    return path


@pytest.fixture(scope="module")
def store(path: Path):
    with serve(WebStore({"/train.h5": path.read_bytes()})) as store:
        yield store


@pytest.fixture
def url(store: WebStore, tmp_path, monkeypatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return f"{store.address}/train.h5"


KEYS = ["plain", "packed", "block", "split", "labels", "big", "names"]


@pytest.mark.parametrize("shuffle", ["full", "window:16", None])
def test_batches_from_a_store_are_those_from_the_disk(path, url, shuffle):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with H5Loader(path, 7, keys=KEYS, shuffle=shuffle) as here, H5Loader(url, 7, keys=KEYS, shuffle=shuffle) as far:
            assert len(here) == len(far)
            if shuffle != "window:16":  # a contiguous field has other blocks than a chunk
                assert here.order(0).tolist() == far.order(0).tolist()
            for one, other in zip(here, far, strict=True):
                assert list(one) == list(other) == KEYS
                for name in KEYS:
                    same = one[name] == other[name]
                    assert same if name == "names" else torch.equal(one[name], other[name])


def test_opening_several_fields_takes_few_requests(store, url):
    store.log.clear()
    H5Source(url, KEYS)
    assert len(store.log) < 25


def test_each_chunk_is_fetched_once_in_an_epoch_and_not_again_in_the_next(path, store, url):
    with H5Loader(url, 8, keys=["packed"], shuffle="window:16") as loader:
        list(loader)
        store.log.clear()
        list(loader)
        assert sum(stop - start for start, stop in store.ranges) < path.stat().st_size // 10  # from the disk cache


def test_a_source_of_a_store_goes_to_another_process_as_it_is(path, url):
    source = pickle.loads(pickle.dumps(H5Source(url, ["plain", "labels"])))
    with h5py.File(path) as h5_file:
        expected = h5_file["plain"][[3, 40]]
    assert (source.read_new(np.array([3, 40]))["plain"].numpy() == expected).all()
    source.close()


def test_what_only_hdf5_can_read_is_refused_with_the_way_out(url):
    with pytest.raises(LayoutError, match=r"'scaled' can only be read by HDF5 .*gpufeed repack COPY\.h5 OUT\.h5"):
        H5Source(url, ["scaled"])


def test_an_object_replaced_between_epochs_is_refused(path):
    with (
        serve(WebStore({"/a.h5": path.read_bytes()})) as store,
        H5Loader(f"{store.address}/a.h5", 8, keys=["plain"]) as loader,
    ):
        list(loader)
        changed = bytearray(path.read_bytes())
        changed[-1] ^= 1
        store.objects["/a.h5"] = bytes(changed)
        with pytest.raises(FeedError, match="was replaced"):
            list(loader)


def test_a_datamodule_takes_addresses(url):
    datamodule = H5DataModule(url, val=0.2, keys=["plain", "labels"], batch_size=8)
    datamodule.setup("fit")
    batches = [*datamodule.train_dataloader(), *datamodule.val_dataloader()]
    assert sum(len(batch["labels"]) for batch in batches) == NUM_SAMPLES
    datamodule.teardown("fit")


def test_an_address_can_be_inspected(url):
    report = inspect_file(url, probe_seconds=0)
    assert {one.key for one in report.datasets} >= set(KEYS) - {"names"}


def test_addresses_stay_as_they_are_and_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("s3://bucket/a.h5") == "s3://bucket/a.h5"
    assert absolute("a.h5") == str(tmp_path / "a.h5")


def test_options_for_the_store_reach_it(store, path, monkeypatch):
    # Two addresses of one server, so that nothing is known of the second from the tests before.
    url = store.address.replace("127.0.0.1", "localhost") + "/train.h5"
    options = {"client_kwargs": {"headers": {"X-Token": "abc"}}}
    store.headers.clear()
    datamodule = H5DataModule(url, keys=["labels"], batch_size=8, storage_options=options)
    datamodule.setup("fit")
    assert sum(len(batch["labels"]) for batch in datamodule.train_dataloader()) == NUM_SAMPLES
    datamodule.teardown("fit")
    assert store.headers
    assert all(headers.get("X-Token") == "abc" for headers in store.headers)


def test_a_file_held_open_is_opened_once_by_its_own_thread_alone(path):
    content = path.read_bytes()
    with serve(WebStore({"/a.h5": content, "/b.h5": content})) as store:
        one, other = f"{store.address}/a.h5", f"{store.address}/b.h5"
        with hold_open(one), open_address(one) as h5_file:
            with hold_open(one), open_address(one) as again:
                assert again is h5_file
            with open_address(one) as again:
                assert again is h5_file
            # Another address is another file, held open or not.
            with hold_open(other), open_address(other) as second:
                assert second is not h5_file


def test_another_thread_opens_an_address_for_itself_once_it_is_not_held_any_more(path):
    log: list[str] = []

    def look(url: str) -> None:
        with open_address(url):
            log.append("opened")

    with serve(WebStore({"/a.h5": path.read_bytes()})) as store:
        url = f"{store.address}/a.h5"
        with hold_open(url):
            thread = threading.Thread(target=look, args=(url,))
            thread.start()
            thread.join(0.05)  # time to go wrong
            log.append("let go")
        thread.join(20)
    assert log == ["let go", "opened"]


def test_a_path_is_not_held_open(path):
    with hold_open(str(path)):
        assert size_of(str(path)) == path.stat().st_size


def test_a_reader_that_closes_leaves_the_connection_to_others(path):
    content = path.read_bytes()
    with serve(WebStore({"/a.h5": content})) as store:
        url = f"{store.address}/a.h5"
        assert size_of(url) == len(content)
        ours, theirs = SharedBytes(url), SharedBytes(url)
        session = remote_file(url)._session
        ours.close()
        assert remote_file(url)._session is session
        out = bytearray(20)
        theirs.read_into(8, memoryview(out))
        assert bytes(out) == content[8:28]


def test_options_are_kept_until_others_are_given():
    url = "s3://bucket/of_options.h5"
    (first,) = know([url, "a.h5"], {"key": 1})
    assert know([url], None) == (first,)
    assert remote_file(url) is first
    (second,) = know([url], {"key": 2})
    assert second is not first
    remember([first])  # from another process: what was said here counts
    assert remote_file(url) is second
    remember([RemoteFile("s3://bucket/sent.h5")])
    assert remote_file("s3://bucket/sent.h5").url == "s3://bucket/sent.h5"


def test_a_home_folder_is_written_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert absolute("~/a.h5") == str(tmp_path / "a.h5")


def test_a_store_that_tells_no_version_is_warned_of(path):
    with serve(WebStore({"/a.h5": path.read_bytes()}, has_etags=False, has_times=False)) as store:
        url = f"{store.address}/a.h5"
        with pytest.warns(UserWarning, match=f"{url}: its store tells no mark of a version"):
            H5Source(url, ["labels"])


def test_bytes_that_make_no_sense_are_explained_by_a_replaced_object(path):
    with serve(WebStore({"/a.h5": path.read_bytes()}, has_etags=False, has_times=False)) as store:
        with pytest.warns(UserWarning, match="no mark of a version"):
            source = H5Source(f"{store.address}/a.h5", ["packed"], cache_bytes=0)
        source.read_new(np.array([0]))
        store.objects["/a.h5"] = bytes(path.stat().st_size + 100)
        with pytest.raises(FeedError, match="changed its size"):
            source.read_new(np.array([50]))
        source.close()
