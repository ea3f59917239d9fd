"""fsspec's file system for an address. fsspec is imported here, at the first remote file, and nowhere else."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

__all__ = ["connect", "is_web", "with_connections"]

_S3_CONNECTIONS = 10


def connect(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """Find the file system for an address; most make no connection before they are asked something.

    Args:
        url: Address, such as `s3://bucket/train.h5`.
        options: What the file system takes.

    Returns:
        The file system, and the object's name in it.

    Raises:
        ImportError: fsspec, or its package for this kind of store, is not installed.
        ValueError: No store has this kind of address, or the options do not suit it.
    """
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError as error:
        raise ImportError(
            f"{url} is not a local file, and reading it needs fsspec ({error}): pip install 'lightning_gpufeed[remote]'"
        ) from error
    try:
        fs, name = core.url_to_fs(url, **options)
    except ImportError as error:
        raise ImportError(f"{url}: the package for this kind of store is not installed: {error}") from error
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{url} with storage_options of {sorted(options)}: {error}. Expected an address that fsspec knows, such as "
            f"s3://bucket/train.h5, and the options of its file system."
        ) from error
    return fs, str(name)


def is_web(fs: Any) -> bool:
    """Whether a file system speaks plain HTTP, whose answers depend on what the server can do.

    Args:
        fs: From `connect`.

    Returns:
        True for `http://` and `https://`.
    """
    return "http" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def with_connections(url: str, options: Mapping[str, Any], num_threads: int) -> dict[str, Any]:
    """Options that allow as many connections as there are requests under way.

    Args:
        url: Address.
        options: As the user gave them; what they say about it stands.
        num_threads: Requests under way at the same time.

    Returns:
        The same with, for S3, a larger pool of connections than botocore's ten.
    """
    if num_threads <= _S3_CONNECTIONS or not url.startswith(("s3://", "s3a://")):
        return dict(options)
    return {**options, "config_kwargs": {"max_pool_connections": num_threads, **options.get("config_kwargs", {})}}
