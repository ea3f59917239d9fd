"""What `import lightning_gpufeed` promises: these names, documented and typed, and the changelog's version.

A name joins the list below in the change that adds it to the package, and never leaves it silently.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import lightning_gpufeed

PUBLIC_NAMES = [
    "BatchEcho",
    "FeedError",
    "FeedMonitor",
    "GpuFeedError",
    "H5DataModule",
    "H5ImageDataModule",
    "H5Loader",
    "LayoutError",
    "OOMRecovery",
    "OOMRecoveryError",
    "OutOfOrderStrategy",
    "PackError",
    "SyncError",
    "__version__",
]
DOCUMENTED_NAMES = [name for name in PUBLIC_NAMES if name != "__version__"]  # a string carries no docstring

ROOT = Path(__file__).parents[1]
PACKAGE = Path(lightning_gpufeed.__file__).parent


def test_exactly_the_listed_names_are_public():
    assert sorted(lightning_gpufeed.__all__) == PUBLIC_NAMES


def test_every_public_name_exists():
    missing = [name for name in PUBLIC_NAMES if not hasattr(lightning_gpufeed, name)]
    assert missing == []


def test_nothing_else_is_reachable_under_a_public_looking_name():
    others = {
        name
        for name, value in vars(lightning_gpufeed).items()
        if not name.startswith("_") and not inspect.ismodule(value) and name not in PUBLIC_NAMES
    }
    assert others <= {"annotations"}  # of `from __future__ import annotations`


@pytest.mark.parametrize("name", DOCUMENTED_NAMES)
def test_every_public_name_has_a_docstring_of_its_own(name):
    documentation = vars(getattr(lightning_gpufeed, name)).get("__doc__")  # an inherited one does not count
    assert documentation is not None
    assert documentation.strip()


@pytest.mark.parametrize("name", DOCUMENTED_NAMES)
def test_every_public_name_is_defined_in_this_package(name):
    assert getattr(lightning_gpufeed, name).__module__.startswith("lightning_gpufeed.")


def test_every_error_is_caught_by_catching_the_root():
    errors = [getattr(lightning_gpufeed, name) for name in PUBLIC_NAMES if name.endswith("Error")]
    assert all(issubclass(error, lightning_gpufeed.GpuFeedError) for error in errors)


def test_the_first_section_of_the_changelog_states_the_version():
    first_section = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1]
    stated = re.findall(r"\b\d+\.\d+\.\d+\b", "\n".join(first_section.splitlines()[:3]))
    assert stated == [lightning_gpufeed.__version__]


def test_type_checkers_are_told_that_the_package_is_typed():
    assert (PACKAGE / "py.typed").is_file()
