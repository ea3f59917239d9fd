"""The shape of the repository: small files, a test file per module, nothing of one machine in it.

import-linter (`make check`) holds the directions of imports; here only that no part escapes its contracts.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_gpufeed"
MODULES = sorted(PACKAGE.rglob("*.py"))
TEST_FILES = sorted((ROOT / "tests").rglob("test_*.py"))

MAX_LINES = 400

# Test files about the whole rather than about one module.
ABOUT_THE_WHOLE = {
    "test_bugs.py",
    "test_composition.py",
    "test_composition_users.py",
    "test_conftest.py",
    "test_documentation.py",
    "test_equivalence.py",
    "test_examples.py",
    "test_gpu_check.py",
    "test_launchers.py",
    "test_lightning_cli.py",
    "test_loggers.py",
    "test_precisions.py",
    "test_private_api.py",
    "test_public_api.py",
    "test_structure.py",
}
# Tests about a whole part of the package.
ABOUT_A_PART = {
    "datamodules/test_bad_input.py",
    "datamodules/test_cli_yaml.py",
    "datamodules/test_distributed.py",
    "gpu/test_feed_gpu.py",
    "gpu/test_precisions_gpu.py",
    "hdf5/test_corpus.py",
    "hdf5/test_wild.py",
}

ADAPTERS = {"callbacks", "datamodules", "strategies"}  # the only parts that may import Lightning, beside ...
ABOVE_THE_ADAPTERS = {"__main__", "cli"}  # ... what imports them

# An absolute path that names a place on one machine, under the usual roots of Linux, macOS and Windows.
MACHINE_PATH = re.compile(r"(?<![\w.<>$}])/(?:tmp|work|root|opt|mnt|srv|home|Users)/[\w.]|\b[A-Z]:\\Users\\")

# Written in two parts, so that this file does not hold what it looks for.
REGISTRY_HOSTS = re.compile(
    "|".join(
        re.escape(f"{name}.{domain}")
        for name, domain in [
            ("pypi", "org"),
            ("pythonhosted", "org"),
            ("download.pytorch", "org"),
            ("npmjs", "org"),
            ("anaconda", "org"),
            ("deb.debian", "org"),
        ]
    )
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def names_in(folder: Path) -> set[str]:
    """Give the modules and packages directly in a folder; a private module `_x` counts as `x`."""
    modules = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    packages = {path.parent.name for path in folder.glob("*/__init__.py")}
    return {name if name.startswith("__") else name.lstrip("_") for name in modules | packages}


def tracked_files() -> list[Path]:
    """Give what git tracks, and what it would track: a file that is about to be committed counts."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("only git knows which files belong to the repository, and this is no git checkout")
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def lines_that_match(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in tracked_files():
        content = path.read_bytes()
        if b"\0" in content:  # not text
            continue
        for number, line in enumerate(content.decode().splitlines(), start=1):
            if pattern.search(line):
                found.append(f"{relative(path)}:{number}: {line.strip()}")
    return found


def test_no_module_is_longer_than_can_be_read_in_one_go():
    lengths = {relative(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_every_folder_of_modules_is_a_package_and_so_seen_by_import_linter():
    folders = {path.parent for path in MODULES}
    assert [relative(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_no_module_is_a_drawer_for_odds_and_ends():
    names = {"utils", "util", "common"}
    assert [relative(path) for path in PACKAGE.rglob("*") if path.stem.strip("_") in names] == []


@pytest.mark.parametrize("path", TEST_FILES, ids=relative)
def test_every_test_file_belongs_to_a_module_of_the_same_name(path):
    folder = path.parent.relative_to(ROOT / "tests")
    if (folder == Path() and path.name in ABOUT_THE_WHOLE) or (folder / path.name).as_posix() in ABOUT_A_PART:
        return
    if folder.parts[:1] == ("gpu",):  # tests that need a device, in the order of the package
        folder = Path(*folder.parts[1:])
    subject = path.stem.removeprefix("test_")
    modules = names_in(PACKAGE / folder)
    # test_reader.py, or test_reader_engines.py where one file about the reader would be too long
    assert any(subject == module or subject.startswith(f"{module}_") for module in modules), (
        f"{relative(path)} should be named after one of {sorted(modules)}; "
        "if it is about the whole or a part, add it to ABOUT_THE_WHOLE or ABOUT_A_PART"
    )


def test_every_part_below_the_adapters_is_forbidden_to_import_lightning():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [forbidden] = [contract for contract in contracts if contract["type"] == "forbidden"]
    held = {name.removeprefix("lightning_gpufeed.") for name in forbidden["source_modules"]}
    assert held == names_in(PACKAGE) - ADAPTERS - ABOVE_THE_ADAPTERS


def test_no_file_holds_a_path_of_one_machine():
    assert lines_that_match(MACHINE_PATH) == []


@pytest.mark.parametrize("line", ["open('/{}/x.h5')", '"/{}/x"', "(/{}/x)", " /{}/x", "file:///{}/x"])
@pytest.mark.parametrize("place", ["tmp", "work", "root", "home", "Users"])
def test_a_path_of_one_machine_is_recognised(line, place):
    assert MACHINE_PATH.search(line.format(place))


@pytest.mark.parametrize("line", ["tests/data/x", "https://host/home/x", "$HOME/data/x", "/proc/self/fd"])
def test_a_relative_path_or_an_address_is_not_taken_for_one(line):
    assert not MACHINE_PATH.search(line)


def test_no_file_names_the_host_of_a_package_registry():
    assert lines_that_match(REGISTRY_HOSTS) == []


def test_the_host_of_a_package_registry_is_recognised():
    assert REGISTRY_HOSTS.search("https://files." + "pythonhosted" + ".org/packages/x.whl")
