"""Makes a lost page of a mapped file an error in place of the end of the process.

A file that is cut short while it is mapped has pages without a file behind them; touching one raises SIGBUS, which
kills. Looking at the file's size before each copy leaves a gap: it may be cut during the copy. Here the signal is
taken, for the mappings that ask for it::

    copy ── touches a lost page ── SIGBUS ── whose mapping is it?
                                               one of ours: note it as lost, put zeros in its place, go on copying
                                               no one's:    the former handler's turn, as if this one were not there
    copy ends ── is_lost(token)? ── refuse what was copied

The signal comes from the copying instruction itself, in the thread that copies, whichever that is (torch's own
workers too), outside of any memory allocation and with the interpreter lock given back: so the handler may be Python.
It must not be used for mappings that are read while the lock is held by somebody who waits for that very thread.

Source: man pages sigaction(2), signal-safety(7); C headers of glibc and musl for the two structures.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import platform
import signal
import sys
import threading

__all__ = ["guard", "is_guarded", "is_lost", "release", "watch", "why_not_guarded"]

_PAGE = mmap.PAGESIZE
_BUS_ADRERR = 2  # no object behind the address: cut short, or it could not be read from the disk
_SA_SIGINFO = 4
_ADDRESS_AT = 16  # in siginfo_t, after three ints and a gap
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_TRIES = 3
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)


class _Action(ctypes.Structure):
    """struct sigaction of glibc and musl on 64-bit machines."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint64 * 16),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


# Called with the interpreter lock: inside the handler it must not change hands.
_libc = ctypes.PyDLL(None, use_errno=True)
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_libc.sigaction.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)

# Token -> first address, address behind the end. Single dict operations are atomic, in the handler too.
_ranges: dict[int, tuple[int, int]] = {}
_lost: set[int] = set()
_tokens = itertools.count(1)
_installing = threading.Lock()
_now = _Action()
_former: list[_Action] = []
"""Whom this handler was put before, the latest last: it may have been put in front of several, one after the other."""


def why_not_guarded() -> str | None:
    """Say what stands against guarding mappings in this process.

    Returns:
        The reason in words, None if `guard` works.
    """
    machine = platform.machine()
    if sys.platform != "linux" or sys.maxsize < 2**32 or machine not in ("x86_64", "aarch64"):
        return f"lost pages are handled on 64-bit Linux on x86_64 and aarch64 only, not on {sys.platform} {machine}"
    return None


def is_guarded() -> bool:
    """Whether mapped files can be read without risk for the process here.

    Returns:
        True if `guard` works.
    """
    return why_not_guarded() is None


def guard(address: int, num_bytes: int) -> int:
    """Watch over a read-only mapping: pages of it that are lost read as zeros from then on.

    Args:
        address: Where it begins; the start of a page.
        num_bytes: Its length.

    Returns:
        A token for `is_lost` and `release`.

    Raises:
        OSError: Lost pages cannot be handled here; see `why_not_guarded`.
    """
    if reason := why_not_guarded():
        raise OSError(reason)
    token = next(_tokens)
    _ranges[token] = (address, address + -(-num_bytes // _PAGE) * _PAGE)
    watch()
    return token


def release(token: int) -> None:
    """Stop watching over a mapping. To be called before it is unmapped: its addresses may be another's then.

    Args:
        token: From `guard`. One that was released already is allowed.
    """
    _ranges.pop(token, None)
    _lost.discard(token)


def is_lost(token: int) -> bool:
    """Whether a page of the mapping was lost, so that zeros were read in place of it since.

    Args:
        token: From `guard`.

    Returns:
        True if so.
    """
    return token in _lost


def watch() -> None:
    """Make sure that the signal comes here first; to be called before reading, for others may have taken it meanwhile.

    `faulthandler.enable()` and `signal.signal()` are such others. Costs about a microsecond.

    Raises:
        OSError: The system refuses to set a handler.
    """
    if _is_first():
        return
    with _installing:
        if _is_first():
            return
        former = _Action()
        _set(None, former)
        _former.append(former)
        ours = _Action(handler=_address_of_handler, flags=_SA_SIGINFO)
        # Not on an alternate stack: it would be too small for Python.
        _set(ours, None)


def _is_first() -> bool:
    # One structure for all: whoever fills it in between, it says what is true now.
    _set(None, _now)
    return bool(_now.handler == _address_of_handler)


def _set(new: _Action | None, old: _Action | None) -> None:
    """Call sigaction for SIGBUS."""
    places = [None if action is None else ctypes.addressof(action) for action in (new, old)]
    if _libc.sigaction(signal.SIGBUS, *places):
        number = ctypes.get_errno()
        raise OSError(number, f"sigaction: {os.strerror(number)}")


def _handle(_number: int, info: int, _context: int) -> None:
    """The handler of SIGBUS."""
    code = ctypes.c_int.from_address(info + 8).value
    # In the main thread, Ctrl-C may come to light in here; the copy ends in an error anyway.
    for _ in range(_TRIES):
        try:
            if code == _BUS_ADRERR and _replace(ctypes.c_uint64.from_address(info + _ADDRESS_AT).value):
                return
            break
        except BaseException:
            continue
    _pass_on()
    if code <= 0:  # sent by somebody, not by an instruction that will fault again
        signal.raise_signal(signal.SIGBUS)


def _replace(address: int) -> bool:
    """Put zeros in the place of the mapping that an address lies in, if it is one of ours."""
    for token, (start, end) in list(_ranges.items()):
        if start <= address < end:
            # Noted first: whoever reads zeros finds it noted.
            _lost.add(token)
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
            return bool(_libc.mmap(start, end - start, mmap.PROT_READ, flags, -1, 0) == start)
    return False


def _pass_on() -> None:
    """Give the signal back to whom this handler was put before, for good or until `watch` is called again.

    A former handler may give it to the one before itself, which may be this one: then the next is asked.
    """
    if _is_first():  # else another thread passed it on while this one waited for the interpreter lock
        _set(_former.pop() if _former else _Action(), None)


_handler = _HANDLER(_handle)
_address_of_handler = ctypes.cast(_handler, ctypes.c_void_p).value


def _after_fork() -> None:
    global _installing
    _installing = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
