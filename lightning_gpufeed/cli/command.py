"""The `gpufeed` command: `pack`, `repack`, `inspect`, `doctor`, `bench` and `plan`.

Results go to stdout; progress, warnings and errors to stderr. An error is one sentence; GPUFEED_DEBUG=1 adds the
traceback. Exit codes: 1 if `doctor` warns, 2 for what cannot be done as asked, 130 after Ctrl-C, 141 when nobody reads
the output, else 0.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ArgumentError

import lightning_gpufeed
from lightning_gpufeed.cli.doctor import run_doctor
from lightning_gpufeed.cli.messages import error_text, say, usage_text, warnings_as_lines
from lightning_gpufeed.cli.options import build_parser
from lightning_gpufeed.cli.plan import plan_model, read_layers, render_plan, save_picture, transformer_layers
from lightning_gpufeed.cli.progress import show_progress
from lightning_gpufeed.cli.repack import run_repack
from lightning_gpufeed.errors import GpuFeedError
from lightning_gpufeed.hdf5.inspection import inspect_file
from lightning_gpufeed.hdf5.journal import Journal, OutputPaths
from lightning_gpufeed.hdf5.report import bytes_text, render_report
from lightning_gpufeed.hdf5.writer import PackReport, pack, verify
from lightning_gpufeed.sync.costs import LinkCosts

__all__ = ["main"]

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

_NUM_SKIPPED_SHOWN = 10


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name; None takes those of this process.

    Returns:
        The exit code.

    Example:
        >>> main(["inspect", "nowhere.h5"])    # "error: ..." on stderr
        2
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    commands: dict[str, Callable[[dict[str, Any]], int | None]] = {
        "pack": _pack,
        "repack": run_repack,
        "inspect": _inspect,
        "doctor": run_doctor,
        "bench": _bench,
        "plan": _plan,
    }
    try:
        options = build_parser(lightning_gpufeed.__version__).parse_args(argv)
    except ArgumentError as error:
        return _fail(usage_text(error, argv, commands))
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    arguments = options[options.command].as_dict()
    try:
        with warnings_as_lines():
            code = commands[options.command](arguments)
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (GpuFeedError, ValueError, OSError) as error:
        if os.environ.get("GPUFEED_DEBUG"):
            traceback.print_exc()
        return _fail(error_text(error))
    except KeyboardInterrupt:
        say(_interrupted_text(arguments))
        return EXIT_INTERRUPTED
    return code or 0


def _fail(text: str) -> int:
    say(f"error: {text}")
    return EXIT_ERROR


# -- pack


def _pack(arguments: dict[str, Any]) -> None:
    with show_progress() as show:
        report = pack(**arguments, on_progress=show)
    _list_skipped(report)
    print(_packed_text(report))


def _list_skipped(report: PackReport) -> None:
    if not report.skipped:
        return
    say(f"{len(report.skipped):,} of the samples could not be read and were left out:")
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


# -- inspect, bench


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


def _bench(arguments: dict[str, Any]) -> None:
    # The facts of a loader are told by a module beside the callbacks, which bring Lightning along.
    from lightning_gpufeed.cli.bench import bench_file
    from lightning_gpufeed.cli.bench_report import render_bench

    is_json, step_milliseconds = arguments.pop("json"), arguments.pop("step_ms")
    report = bench_file(arguments.pop("file"), **arguments, step_seconds=step_milliseconds / 1000)
    print(json.dumps(report.as_dict(), indent=2) if is_json else render_bench(report))


def _plan(arguments: dict[str, Any]) -> None:
    if (arguments["file"] is None) == (arguments["layers"] is None):
        raise ValueError("expected either LAYERS.csv or --layers, and not both")
    for name in ("ranks", "microbatches", "hidden", "tokens", "layers"):
        if arguments[name] is not None and arguments[name] < 1:
            raise ValueError(f"--{name} is {arguments[name]}; expected at least 1")
    if arguments["tflops"] <= 0:
        raise ValueError(f"--tflops is {arguments['tflops']:g}; expected more than 0")
    layers = (
        read_layers(arguments["file"])
        if arguments["layers"] is None
        else transformer_layers(arguments["layers"], arguments["hidden"], arguments["tokens"], arguments["tflops"])
    )
    rate, cap = arguments["link_gbit"], arguments["memory_gb"]
    report = plan_model(
        layers,
        num_ranks=arguments["ranks"],
        num_microbatches=arguments["microbatches"],
        link=None if rate is None else LinkCosts(arguments["latency_us"] / 1e6, rate * 1e9 / 8),
        memory_cap_bytes=None if cap is None else round(cap * 1e9),
    )
    if arguments["svg"] is not None:
        save_picture(report, layers, arguments["svg"])
    print(json.dumps(report.as_dict(), indent=2) if arguments["json"] else render_plan(report, layers))
