"""The options of each command, and the texts that they are read from."""

from __future__ import annotations

import argparse
import re

from jsonargparse import ArgumentParser

__all__ = ["build_parser"]

_HELP = argparse.RawDescriptionHelpFormatter

_SOURCES = """\
SOURCE is one of
  a folder of images, one sub-folder per class (or images alone, without labels)
  a .npy or .npz file, or an HDF5 file, which gets other chunks
  an idx file of MNIST's kind, or a folder of them (--split train or test)
  package.module:name of a Dataset, or of a function that returns one

A kill or Ctrl-C loses nothing: the same command goes on where it stopped.
"""


_REPACKS = """\
Keys, types, lengths and attributes stay; several files are joined along the first axis. Nothing is rounded: to store
floats as uint8, or images in another order, see gpufeed pack. Every value is compared with its source in the end.

A kill or Ctrl-C loses nothing: the same command goes on where it stopped.
"""


_FINDINGS = """\
Locks, the file system, memory, workers, filters, chunks and values. Each finding says what was seen, why it matters and
the line that cures it. The exit code is 1 if there is a warning or a problem, 0 if there are notices at most.
"""


_PHASES = """\
No model is needed. The first pass over the file, or half of the time if it takes longer, is kept apart: it may come
from storage. The rest is judged as FeedMonitor judges a training. With --step-ms it is halved again: in its second
half a step of that length is pretended after each batch.
"""


_LAYERS = """\
LAYERS.csv has a line per layer in the order of forward, for one microbatch, with the columns
  name, forward_ms, input_grad_ms, weight_grad_ms, gradient_mb, activation_mb

With --ranks every pipeline schedule is simulated; with --link-gbit and one rank, the orders of data parallel training.
"""


def build_parser(version: str) -> ArgumentParser:
    """Make the parser of the whole command line.

    Args:
        version: Printed by --version.

    Returns:
        The parser; it raises `ArgumentError` for what makes no sense.
    """
    parser = ArgumentParser(
        prog="gpufeed",
        description="Keeps GPUs fed from HDF5 files.",
        version=version,
        exit_on_error=False,
        formatter_class=_HELP,
    )
    commands = parser.add_subcommands(required=True, dest="command", metavar="COMMAND", title="commands")
    text = f"Pack a source into one HDF5 file that trains fast.\n\n{_SOURCES}"
    packing = ArgumentParser(description=text, formatter_class=_HELP)
    _add_pack_options(packing)
    commands.add_subcommand("pack", packing, help="pack images or arrays into one HDF5 file that trains fast")
    text = f"Write HDF5 files anew with chunks that hold whole samples, every value as it is.\n\n{_REPACKS}"
    repacking = ArgumentParser(description=text, formatter_class=_HELP)
    _add_repack_options(repacking)
    commands.add_subcommand("repack", repacking, help="give HDF5 files a layout that is read fast, every value kept")
    text = f"Look for what makes HDF5 files slow, unsafe or wrong to train from.\n\n{_FINDINGS}"
    examining = ArgumentParser(description=text, formatter_class=_HELP)
    _add_doctor_options(examining)
    commands.add_subcommand("doctor", examining, help="say what is wrong with HDF5 files, and what cures it")
    text = "Say what is in an HDF5 file, how fast it is read, and what would make that faster."
    inspecting = ArgumentParser(description=text, formatter_class=_HELP)
    _add_inspect_options(inspecting)
    commands.add_subcommand("inspect", inspecting, help="say how fast an HDF5 file is read, and what would help")
    text = f"Feed batches of an HDF5 file as in a training, and say what limits the rate.\n\n{_PHASES}"
    benching = ArgumentParser(description=text, formatter_class=_HELP)
    _add_bench_options(benching)
    commands.add_subcommand("bench", benching, help="say how fast an HDF5 file can be fed, and what limits that")
    text = f"Find the fastest order of a step for a model, before there is a training.\n\n{_LAYERS}"
    planning = ArgumentParser(description=text, formatter_class=_HELP)
    _add_plan_options(planning)
    commands.add_subcommand("plan", planning, help="find the fastest order of a step for a model, by simulation")
    return parser


def _add_plan_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("file", nargs="?", metavar="LAYERS.csv", help="measured layers, see above")
    add("--layers", type=_whole, metavar="N", help="in place of a file: blocks of a transformer")
    add("--hidden", type=_whole, default=1024, metavar="N", help="their width (default: 1024)")
    add("--tokens", type=_whole, default=4096, metavar="N", help="tokens of a microbatch (default: 4096)")
    add("--tflops", type=_number, default=100.0, metavar="F", help="what a device does in a second (default: 100)")
    add("--ranks", type=_whole, default=1, metavar="N", help="devices that share a model (default: 1: no pipeline)")
    add("--microbatches", type=_whole, default=1, metavar="N", help="of a batch (default: 1)")
    add("--link-gbit", type=_number, metavar="F", help="rate of the link between devices in Gbit/s")
    add("--latency-us", type=_number, default=20.0, metavar="F", help="of a message, in microseconds (default: 20)")
    add("--memory-gb", type=_number, metavar="F", help="most memory for activations on a device")
    add("--svg", metavar="FILE", help="write the best schedule as a picture")
    add("--json", action="store_true", help="print the report as JSON")


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


def _add_repack_options(parser: ArgumentParser) -> None:
    """The keyword arguments of `repack`."""
    add = parser.add_argument
    add("sources", nargs="+", metavar="FILE", help="HDF5 files, joined in this order")
    add("out", metavar="OUT.h5", help="file to write")
    add("--keys", type=_names, metavar="A,B", help="arrays to take (default: all)")
    add("--compress", choices=["gzip", "lz4", "zstd"], help="compress the chunks (default: not, which is fastest)")
    add("--chunk-bytes", type=_whole, default=512 * 1024, metavar="N", help="most bytes of a chunk (default: 524288)")
    add("--no-verify", dest="verify", action="store_false", help="do not compare the new file with its sources")
    add("--no-resume", dest="resume", action="store_false", help="begin anew after an interrupted run")
    add("--overwrite", action="store_true", help="replace OUT.h5 if it exists, when the new file is complete")


def _add_doctor_options(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("path", metavar="FILE|DIR", help="an HDF5 file, or a folder whose HDF5 files are all looked at")
    add("--json", action="store_true", help="print the findings as JSON")
    add("--max-files", type=_whole, default=1000, metavar="N", help="most files of a folder (default: 1000)")


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


def _add_bench_options(parser: ArgumentParser) -> None:
    """The keyword arguments of `bench_file`, with the pretended step in milliseconds."""
    add = parser.add_argument
    add("file", metavar="FILE", help="an HDF5 file")
    add("--keys", type=_names, metavar="A,B", help="fields to feed (default: the largest, and all that go with it)")
    add("--batch-size", type=_whole, default=256, metavar="N", help="samples per batch (default: 256)")
    add(
        "--shuffle",
        type=_order,
        default="full",
        metavar="full|window|window:N|none",
        help="order of the samples (default: full)",
    )
    add("--seconds", type=_number, default=5.0, metavar="S", help="time to measure for (default: 5)")
    add(
        "--step-ms",
        type=_number,
        default=0.0,
        metavar="F",
        help="milliseconds of a pretended step, to see whether it would wait (default: 0: none)",
    )
    add("--json", action="store_true", help="print the report as JSON")


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


def _order(given: str) -> str:
    if not re.fullmatch(r"full|window|window:[1-9]\d*|none", given):
        raise argparse.ArgumentTypeError(
            f"{given!r} is no order; expected full, window, window:N with N samples as window:4096, or none"
        )
    return given


def _names(given: str | list[str]) -> list[str]:
    return [name for name in given.split(",") if name] if isinstance(given, str) else given
