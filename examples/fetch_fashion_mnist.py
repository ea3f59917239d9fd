"""Brings the four files of Fashion-MNIST into a folder, without an account: each way that can work, in turn.

1. A folder that has them already: the one asked for, `FASHION_MNIST_DIR`, or where Debian's package puts them.
2. Debian's package `dataset-fashion-mnist`, downloaded and unpacked without being installed (no root).
3. The data set's own public address, each file held against the checksum published there.

Fashion-MNIST: Xiao, Rasul, Vollgraf, arXiv 1708.07747; MIT licence.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path

# MD5 as published beside the public address.
FILES = {
    "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
}
PUBLIC_ADDRESS = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
DEBIAN_PACKAGE = "dataset-fashion-mnist"
DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")


def fetch(folder: Path, say: Callable[[str], None] = print) -> Path:
    """Make sure that `folder`, or another one, holds the four files; returns the folder that does."""
    tried = []
    for place in (folder, os.environ.get("FASHION_MNIST_DIR"), DEBIAN_FOLDER):
        if place and is_complete(Path(place)):
            say(f"Fashion-MNIST: found in {place}")
            return Path(place)
    folder.mkdir(parents=True, exist_ok=True)
    for way in (_from_debian, _from_public_address):
        try:
            way(folder, say)
            if is_complete(folder):
                return folder
        except (OSError, subprocess.SubprocessError) as error:
            tried.append(f"{way.__name__.removeprefix('_').replace('_', ' ')}: {_reason(error)}")
            say(f"  that did not work: {tried[-1]}")
    raise SystemExit(
        "Fashion-MNIST could not be fetched (" + "; ".join(tried) + "). "
        "Put its four .gz files into a folder and name it: FASHION_MNIST_DIR=folder make demo"
    )


def is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _from_debian(folder: Path, say: Callable[[str], None]) -> None:
    """Download and unpack Debian's package; nothing is installed and nothing needs root."""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise OSError("there is no apt-get here")
    say(f"Fashion-MNIST: downloading Debian's package {DEBIAN_PACKAGE} (31 MB) and unpacking it, without installing it")
    with tempfile.TemporaryDirectory() as scratch:
        options = ["-qq", "-o", "APT::Sandbox::User="]
        if _apt(["download", DEBIAN_PACKAGE], options, scratch).returncode:
            # The package lists may be missing or old; fresh ones go to the scratch folder.
            state, cache = Path(scratch, "state"), Path(scratch, "cache")
            for part in (state / "lists" / "partial", cache / "archives" / "partial"):
                part.mkdir(parents=True)
            options += ["-o", f"Dir::State={state}", "-o", "Dir::State::status=/var/lib/dpkg/status"]
            options += ["-o", f"Dir::Cache={cache}"]
            _apt(["update"], options, scratch).check_returncode()
            _apt(["download", DEBIAN_PACKAGE], options, scratch).check_returncode()
        (package,) = Path(scratch).glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", str(package), scratch], check=True, timeout=120)
        for name in FILES:
            shutil.copyfile(Path(scratch + str(DEBIAN_FOLDER), name), folder / name)


def _apt(command: list[str], options: list[str], scratch: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["apt-get", *options, *command], cwd=scratch, timeout=300, check=False, text=True, capture_output=True
    )


def _from_public_address(folder: Path, say: Callable[[str], None]) -> None:
    """Download the files from the data set's own address."""
    say(f"Fashion-MNIST: downloading from {PUBLIC_ADDRESS} (31 MB)")
    for name, md5 in FILES.items():
        with urllib.request.urlopen(f"{PUBLIC_ADDRESS}/{name}", timeout=60) as reply:
            data = reply.read()
        found = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if found != md5:
            raise OSError(f"{name} arrived with MD5 {found}, published is {md5}")
        aside = folder / f"{name}.partial"
        aside.write_bytes(data)
        aside.replace(folder / name)


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr or str(error)).strip().splitlines()[-1][:200]
    return str(error)
