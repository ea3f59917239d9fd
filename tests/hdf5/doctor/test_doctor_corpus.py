"""Files that other programs wrote: looked at without a failure, and told what is true of them.

The files come from the test suites of other HDF5 libraries and are not part of this repository. They are looked for
in the folder that the environment variable GPUFEED_HDF5_CORPUS names, else beside the repository.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lightning_gpufeed.errors import PackError
from lightning_gpufeed.hdf5.doctor.doctor import examine
from lightning_gpufeed.hdf5.doctor.findings import Diagnosis, Severity, render_diagnosis
from lightning_gpufeed.hdf5.repack.repack import repack

ROOT = Path(__file__).parents[3]
CORPUS = Path(os.environ.get("GPUFEED_HDF5_CORPUS", ROOT.parent / "shared" / "data" / "hdf5_corpus"))
FILES = sorted(path for path in CORPUS.glob("*") if path.suffix in (".h5", ".hdf5", ".mat", ".nc"))

if not FILES:
    pytest.skip(f"no HDF5 files of other programs in {CORPUS}", allow_module_level=True)

LARGE_BYTES = 1 << 20
"""Of a file that announces more than any memory holds, only the layout is looked at."""


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    """All files at once."""
    folder = Path.cwd()
    os.chdir(CORPUS)  # external raw files are named relative to the current directory
    try:
        return examine(CORPUS)
    finally:
        os.chdir(folder)


def test_every_file_is_looked_at(diagnosis):
    assert {Path(file.path).name for file in diagnosis.files} >= {
        path.name for path in FILES if path.suffix in (".h5", ".hdf5")
    }


def test_no_check_fails_on_any_file(diagnosis):
    failed = [(file.path, one.seen) for file in diagnosis.files for one in file.findings if one.check == "doctor"]
    assert failed == []


def test_every_finding_says_why_it_matters_and_what_cures_it(diagnosis):
    for file in diagnosis.files:
        for finding in file.findings:
            if finding.severity is not Severity.OK:
                assert finding.why, (file.path, finding)
                assert finding.cure, (file.path, finding)
                assert "\n" not in finding.cure
    assert render_diagnosis(diagnosis).count("\n") > len(FILES)


def test_what_is_known_of_some_files_is_found(diagnosis):
    found = {Path(file.path).name: {one.check for one in file.findings} for file in diagnosis.files}
    assert "plug-in" in found["jhdf__bitshuffle_datasets.hdf5"]
    assert "link" in found["jhdf__external_link.hdf5"]
    assert "types" in found["pytables__smpl_compound_chunked.h5"]
    assert "missing" in found["jhdf__test_odd_datasets_earliest.hdf5"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_is_repacked_with_every_value_or_refused_by_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(CORPUS)
    if "max_dimension" in path.name:
        pytest.skip("it announces more samples than any disk holds")
    message = None
    try:
        # Every value is compared with what h5py reads, in the call itself.
        report = repack(path, tmp_path / "out.h5")
    except PackError as error:
        message = str(error)
    if message is None:
        assert report.arrays
        assert report.compared_bytes is not None
    else:
        assert str(path) in message
        assert sorted(tmp_path.iterdir()) == []
