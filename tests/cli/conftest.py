"""What the tests of the command share: an empty directory to work in, and the command itself."""

from __future__ import annotations

import pytest

from lightning_gpufeed.cli import main
from tests.doubles import thin_package


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current directory, empty."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GPUFEED_DEBUG", raising=False)
    return tmp_path


@pytest.fixture
def run(capsys):
    """Run the command in this process; gives exit code, stdout and stderr."""

    def call(*argv):
        code = main([str(one) for one in argv])
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def thin(tmp_path):
    """A path for `start` where the package is without its root module, which imports Lightning and takes seconds."""
    return thin_package(tmp_path / "thin")
