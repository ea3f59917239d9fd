"""`gpufeed repack`: runs it and says what came out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from lightning_gpufeed.cli.messages import say
from lightning_gpufeed.cli.progress import show_progress
from lightning_gpufeed.hdf5.repack.repack import RepackProgress, RepackReport, repack
from lightning_gpufeed.hdf5.report import bytes_text

__all__ = ["run_repack"]

_NUM_LEFT_OUT_SHOWN = 10


def run_repack(arguments: dict[str, Any]) -> None:
    """Repack, list what was left out on stderr, and print a summary.

    Args:
        arguments: Those of `repack`.
    """
    with show_progress() as show:
        # Its progress has the same fields as that of `pack`.
        report = repack(**arguments, on_progress=cast(Callable[[RepackProgress], None], show))
    _list_left_out(report)
    print(_repacked_text(report))


def _list_left_out(report: RepackReport) -> None:
    for name, reason in report.left_out[:_NUM_LEFT_OUT_SHOWN]:
        say(f"left out: {name}: {reason}")
    if (rest := len(report.left_out) - _NUM_LEFT_OUT_SHOWN) > 0:
        say(f"left out: {rest:,} more of the same kinds")


def _repacked_text(report: RepackReport) -> str:
    sizes = f"{bytes_text(report.file_bytes)}, before {bytes_text(report.bytes_before)}"
    lines = [f"{report.path}: {sizes}, in {report.seconds:.1f} s"]
    if report.resumed_rows:
        lines[0] += f", going on after {report.resumed_rows:,} rows that an interrupted run had written"
    for key, array in report.arrays.items():
        parts = [f"{array.shape} {array.dtype}"]
        if array.rows_per_chunk is None or array.chunk_bytes is None:
            parts.append("copied as it is")
        else:
            parts.append(f"chunks of {array.rows_per_chunk:,} samples ({bytes_text(array.chunk_bytes)})")
        if array.chunk_before is not None:
            parts.append(f"before {array.chunk_before}")
        lines.append(f"  {key}: {', '.join(parts)}")
    if report.compared_bytes is not None:
        lines.append(f"  {bytes_text(report.compared_bytes)} read back, every value as in the source")
    return "\n".join(lines)
