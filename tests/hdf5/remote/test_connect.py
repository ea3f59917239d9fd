"""File systems for addresses: as many connections as requests, unless the user says otherwise."""

from __future__ import annotations

import fsspec
import pytest

from lightning_gpufeed.hdf5.remote.connect import connect, is_web, with_connections

POOL = "max_pool_connections"


@pytest.mark.parametrize(
    ("url", "options", "num_threads", "expected"),
    [
        ("s3://b/a.h5", {"key": "x"}, 16, {"key": "x", "config_kwargs": {POOL: 16}}),
        ("s3a://b/a.h5", {"config_kwargs": {"s3": 1}}, 32, {"config_kwargs": {POOL: 32, "s3": 1}}),
        ("s3://b/a.h5", {"config_kwargs": {POOL: 3}}, 16, {"config_kwargs": {POOL: 3}}),
        ("s3://b/a.h5", {}, 10, {}),
        ("gs://b/a.h5", {"token": "x"}, 16, {"token": "x"}),
    ],
    ids=["s3", "s3a", "as given", "ten will do", "others"],
)
def test_s3_gets_a_connection_for_every_request(url, options, num_threads, expected):
    assert with_connections(url, options, num_threads) == expected


def test_the_file_system_and_the_name_in_it_are_those_of_fsspec():
    fs, name = connect("memory://folder/a.h5", {})
    assert fs is fsspec.filesystem("memory")
    assert name == "/folder/a.h5"
    assert not is_web(fs)
    assert is_web(connect("https://host/a.h5", {})[0])


def test_a_package_that_is_missing_is_named():
    fsspec.register_implementation("absent", "no_such_package.Store", clobber=True, errtxt="Install no_such_package")
    with pytest.raises(ImportError, match=r"absent://a\.h5: the package for this kind .*: Install no_such_package"):
        connect("absent://a.h5", {})
