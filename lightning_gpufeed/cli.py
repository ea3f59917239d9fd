"""The `gpufeed` command: `gpufeed pack SOURCE OUT.h5` and `gpufeed inspect FILE`.

Results go to stdout; progress, warnings and errors to stderr. An error is one sentence; GPUFEED_DEBUG=1 adds the
traceback. Exit codes: 2 for what cannot be done as asked, 130 after Ctrl-C, 141 when nobody reads the output, else 0.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

import lightning_gpufeed
from lightning_gpufeed.errors import GpuFeedError
from lightning_gpufeed.hdf5.inspection import inspect_file
from lightning_gpufeed.hdf5.journal import Journal, OutputPaths
from lightning_gpufeed.hdf5.report import bytes_text, render_report
from lightning_gpufeed.hdf5.writer import PackProgress, PackReport, pack, verify

__all__ = ["main"]

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_PLAIN_LINE_SECONDS = 5.0
_NUM_SKIPPED_SHOWN = 10

_HELP = argparse.RawDescriptionHelpFormatter

_SOURCES = """\
SOURCE is one of
  a folder of images, one sub-folder per class (or images alone, without labels)
  a .npy or .npz file, or an HDF5 file, which gets other chunks
  an idx file of MNIST's kind, or a folder of them (--split train or test)
  package.module:name of a Dataset, or of a function that returns one

A kill or Ctrl-C loses nothing: the same command goes on where it stopped.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; None takes those of this process.

    Returns:
        The exit code.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        options = _build_parser().parse_args(argv)
    except ArgumentError as error:
        return _fail(_usage_text(error, argv))
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    command: Callable[[dict[str, Any]], None] = {"pack": _pack, "inspect": _inspect}[options.command]
    arguments = options[options.command].as_dict()
    try:
        with _warnings_as_lines():
            command(arguments)
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (GpuFeedError, ValueError, OSError) as error:
        if os.environ.get("GPUFEED_DEBUG"):
            traceback.print_exc()
        return _fail(_error_text(error))
    except KeyboardInterrupt:
        _say(_interrupted_text(arguments))
        return EXIT_INTERRUPTED
    return 0


# -- arguments


def _build_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="gpufeed",
        description="Keeps GPUs fed from HDF5 files.",
        version=lightning_gpufeed.__version__,
        exit_on_error=False,
        formatter_class=_HELP,
    )
    commands = parser.add_subcommands(required=True, dest="command", metavar="COMMAND", title="commands")
    text = f"Pack a source into one HDF5 file that trains fast.\n\n{_SOURCES}"
    packing = ArgumentParser(description=text, formatter_class=_HELP)
    _add_pack_options(packing)
    commands.add_subcommand("pack", packing, help="pack images or arrays into one HDF5 file that trains fast")
    text = "Say what is in an HDF5 file, how fast it is read, and what would make that faster."
    inspecting = ArgumentParser(description=text, formatter_class=_HELP)
    _add_inspect_options(inspecting)
    commands.add_subcommand("inspect", inspecting, help="say how fast an HDF5 file is read, and what would help")
    return parser


def _add_pack_options(parser: ArgumentParser) -> None:
    """The keyword arguments of `pack`; what is not given stays at its default there."""
    add = parser.add_argument
    add("source", metavar="SOURCE", help="what to pack, see above")
    add("out", metavar="OUT.h5", help="file to write")
    add("--keys", type=_names, metavar="A,B", help="fields to take (default: all)")
    add("--split", choices=["train", "test"], help="which pair of a folder of idx files")
    add("--resize", type=_pixels, metavar="P", help="shorter side of images in pixels, or exactly HEIGHTxWIDTH")
    add("--crop", type=_pixels, metavar="P", help="centred square in pixels, or HEIGHTxWIDTH")
    add("--mode", choices=["RGB", "L"], default="RGB", help="colour or grey images (default: RGB)")
    add("--layout", choices=["NCHW", "NHWC"], default="NCHW", help="axis order of images (default: NCHW)")
    add("--scale", type=_number, metavar="F", help="store float images as round(value * F): 255 for values in [0, 1]")
    add("--quantize", type=_range, metavar="auto|LOW,HIGH", help="store the nearest of 256 steps between two values")
    add("--keep-dtype", action="store_true", help="store images as they are instead of as uint8")
    add("--shuffle", action="store_true", help="write the samples in a random order")
    add("--seed", type=_whole, default=0, metavar="N", help="decides that order (default: 0)")
    add("--chunk-bytes", type=_whole, default=512 * 1024, metavar="N", help="most bytes of a chunk (default: 524288)")
    add("--num-workers", type=_whole, metavar="N", help="processes that decode images (default: one per CPU)")
    add(
        "--on-error",
        choices=["raise", "skip"],
        default="raise",
        help="at an unreadable image: stop, or list it",
    )
    add("--verify", action="store_true", help="read the file back and compare checksums")
    add("--no-resume", dest="resume", action="store_false", help="begin anew after an interrupted run")
    add("--overwrite", action="store_true", help="replace OUT.h5 if it exists, when the new file is complete")


def _add_inspect_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("file", metavar="FILE", help="an HDF5 file")
    add("--json", action="store_true", help="print the report as JSON")
    add(
        "--probe-seconds",
        type=_number,
        default=1.0,
        metavar="S",
        help="time to measure for (default: 1; 0: not)",
    )
    add("--verify", action="store_true", help="read the whole file and compare the checksums that pack noted")


# Each of these is called with the text first, and then with its own result to check it.


def _whole(given: str | int) -> int:
    try:
        return int(given)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given!r} is not a whole number") from None


def _number(given: str | float) -> float:
    try:
        return float(given)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given!r} is not a number") from None


def _pixels(given: str | int | tuple[int, int]) -> int | tuple[int, int]:
    if not isinstance(given, str):
        return given
    sides = given.split("x")
    if not all(side.isdecimal() for side in sides) or len(sides) > 2:
        raise argparse.ArgumentTypeError(f"{given!r} is no size; expected pixels as 256, or HEIGHTxWIDTH as 224x320")
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def _range(given: str | tuple[float, float]) -> str | tuple[float, float]:
    if not isinstance(given, str) or given == "auto":
        return given
    try:
        low, high = map(float, given.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{given!r} is no range; expected auto, or LOW,HIGH as 0,4095") from None
    return low, high


def _names(given: str | list[str]) -> list[str]:
    return [name for name in given.split(",") if name] if isinstance(given, str) else given


# -- commands


def _pack(arguments: dict[str, Any]) -> None:
    with _progress() as show:
        report = pack(**arguments, on_progress=show)
    _list_skipped(report)
    print(_packed_text(report))


def _inspect(arguments: dict[str, Any]) -> None:
    report = inspect_file(arguments["file"], probe_seconds=arguments["probe_seconds"])
    if arguments["json"]:
        verified = {"verified_chunks": verify(arguments["file"])} if arguments["verify"] else {}
        print(json.dumps(report.as_dict() | verified, indent=2))
        return
    print(render_report(report))
    if arguments["verify"]:
        sys.stdout.flush()
        print(f"verified    {verify(arguments['file']):,} chunks match their checksums")


def _list_skipped(report: PackReport) -> None:
    if not report.skipped:
        return
    _say(f"{len(report.skipped):,} of the samples could not be read and were left out:")
    for name, reason in report.skipped[:_NUM_SKIPPED_SHOWN]:
        print(f"  {name}: {reason}", file=sys.stderr)
    if len(report.skipped) > _NUM_SKIPPED_SHOWN:
        rest = len(report.skipped) - _NUM_SKIPPED_SHOWN
        print(f"  and {rest:,} more; all names are in _gpufeed/skipped of {report.path}", file=sys.stderr)


def _packed_text(report: PackReport) -> str:
    size = bytes_text(report.file_bytes)
    lines = [f"{report.path}: {report.num_samples:,} samples, {size}, in {report.seconds:.1f} s"]
    for key, field in report.fields.items():
        chunk = f"chunks of {field.rows_per_chunk:,} samples ({bytes_text(field.chunk_bytes)})"
        parts = [f"{field.shape} {field.dtype}", chunk]
        if "class_names" in field.attributes:
            parts.append(f"{len(field.attributes['class_names'])} classes")
        lines.append(f"  {key}: {', '.join(parts)}")
    if report.resumed_rows:
        lines[0] += f", going on after {report.resumed_rows:,} that an interrupted run had dealt with"
    if report.verified_chunks is not None:
        lines.append(f"  {report.verified_chunks:,} chunks read back, all as written")
    return "\n".join(lines)


# -- progress


@contextmanager
def _progress() -> Iterator[Callable[[PackProgress], None]]:
    """A bar on a terminal, else a line every few seconds."""
    if not sys.stderr.isatty():
        yield _PlainLines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TextColumn("{task.fields[rate]}"))
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("opening", total=None, rate="")
        pace = _Pace()

        def show(now: PackProgress) -> None:
            bar.update(task, description=now.stage, total=now.rows_total, completed=now.rows_done, rate=pace.text(now))

        yield show


class _PlainLines:
    """Prints how far packing is, not too often."""

    def __init__(self) -> None:
        self._pace = _Pace()
        self._last = time.monotonic()

    def __call__(self, now: PackProgress) -> None:
        pace = self._pace.text(now)
        if time.monotonic() - self._last >= _PLAIN_LINE_SECONDS:
            self._last = time.monotonic()
            _say(", ".join(filter(None, [f"{now.stage} {now.rows_done:,} of {now.rows_total:,} samples", pace])))


class _Pace:
    """Rates since the first call of a stage, so that an interrupted run's share does not count."""

    def __init__(self) -> None:
        self._first: PackProgress | None = None
        self._start = 0.0

    def text(self, now: PackProgress) -> str:
        """Rates and the time that is left."""
        if self._first is None or self._first.stage != now.stage:
            self._first, self._start = now, time.monotonic()
        seconds = time.monotonic() - self._start
        num_rows = now.rows_done - self._first.rows_done
        if not (num_rows and seconds):
            return ""
        left = round((now.rows_total - now.rows_done) * seconds / num_rows)
        rates = [f"{num_rows / seconds:,.0f} samples/s"]
        if num_bytes := now.bytes_written - self._first.bytes_written:
            rates.append(f"{bytes_text(num_bytes / seconds)}/s")
        return ", ".join([*rates, f"{left // 3600}:{left // 60 % 60:02}:{left % 60:02} left"])


# -- messages


def _say(text: str) -> None:
    print(f"gpufeed: {text}", file=sys.stderr)


def _fail(text: str) -> int:
    _say(f"error: {text}")
    return EXIT_ERROR


def _usage_text(error: ArgumentError, argv: Sequence[str]) -> str:
    """What is wrong with the arguments, and where to look."""
    command = next((word for word in argv if word in ("pack", "inspect")), None)
    text = str(error) if argv else "no command was given"
    if command is not None:
        text = text.replace(f"{command}.", "")  # jsonargparse's own name for an argument of a command
    return f"{text}; see gpufeed {f'{command} ' if command else ''}--help"


def _error_text(error: Exception) -> str:
    """The error's own words; those of the operating system with the file first."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def _interrupted_text(arguments: dict[str, Any]) -> str:
    """What is left behind and how to go on."""
    if "out" not in arguments:
        return "interrupted"
    paths = OutputPaths.of(arguments["out"])
    journal = Journal.load(paths.journal)
    if journal is None or not journal.position:
        return "interrupted; nothing was kept yet, so the same command begins anew"
    again = "the same command" if arguments["resume"] else "the same command without --no-resume"
    return f"interrupted; {paths.partial} keeps {journal.position:,} samples, and {again} goes on from there"


@contextmanager
def _warnings_as_lines() -> Iterator[None]:
    """Show warnings that are meant for the user as one line each."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if issubclass(category, UserWarning):
            _say(f"warning: {message}")

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield
