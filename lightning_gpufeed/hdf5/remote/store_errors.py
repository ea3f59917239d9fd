"""What went wrong with a request to a store: whether to try again, and what to tell the user. Pure."""

from __future__ import annotations

import errno

from lightning_gpufeed.errors import FeedError

__all__ = ["explain", "is_final", "root_of"]

_PASSING_STATUS = (408, 425, 429)


def root_of(error: BaseException) -> BaseException:
    """The error that counts: fsspec's web file system says "not found" whatever went wrong.

    Args:
        error: What was raised.

    Returns:
        The error below a `FileNotFoundError` where that one says more, else the error itself.
    """
    below = error.__cause__
    if not isinstance(error, FileNotFoundError) or below is None:
        return error
    says_more = (
        isinstance(below, OSError | TimeoutError)
        or type(below).__module__.startswith("aiohttp")
        or _status(below) is not None
    )
    return below if says_more else error


def is_final(error: BaseException) -> bool:
    """Whether another attempt would end alike.

    Args:
        error: From `root_of`.

    Returns:
        False for what passes: lost connections, time limits, servers that are overloaded.
    """
    status = _status(error)
    if status is not None:
        return 400 <= status < 500 and status not in _PASSING_STATUS
    never = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, FeedError, ImportError)
    return _is_refusal(error) or isinstance(error, (*never, ValueError, TypeError, AttributeError, NotImplementedError))


def explain(error: BaseException, url: str, what: str, num_attempts: int) -> Exception:
    """The error to raise for one that ended all attempts.

    Args:
        error: From `root_of`.
        url: The object.
        what: What could not be done, such as `bytes 0 to 9 cannot be read`.
        num_attempts: How often it was tried.

    Returns:
        `FileNotFoundError`, `PermissionError` or `FeedError`.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, FileNotFoundError) or _status(error) in (404, 410):
        return FileNotFoundError(
            errno.ENOENT, f"{what}: there is no such object ({text}). Look at its name and at storage_options", url
        )
    if _is_refusal(error):
        return PermissionError(
            errno.EACCES,
            f"{what}: the store refuses access ({text}). Give credentials in the environment or in storage_options",
            url,
        )
    times = "once" if num_attempts == 1 else f"{num_attempts} times"
    return FeedError(
        f"{url}: {what}, tried {times}: {text}. Look at the store and the connection to it, then go on from the latest "
        f"checkpoint; time limits are set in storage_options."
    )


def _is_refusal(error: BaseException) -> bool:
    """Whether credentials are missing or do not suffice."""
    is_named = type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "TokenRetrievalError")
    return isinstance(error, PermissionError) or is_named or _status(error) in (401, 403)


def _status(error: BaseException) -> int | None:
    """The status of a web server's answer."""
    for name in ("status", "code", "status_code"):
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    return None
