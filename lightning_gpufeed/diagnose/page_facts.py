"""The lower end of the page: the machine, the loader and the files that were read, as lists of facts. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_gpufeed.diagnose.counters import EpochCounters, FileFacts, MachineFacts
from lightning_gpufeed.diagnose.page_svg import escaped
from lightning_gpufeed.diagnose.records import UNKNOWN, bytes_text, milliseconds_text, percent_text

__all__ = ["facts_sections"]

_MAX_FILES = 12


def facts_sections(counters: EpochCounters) -> str:
    """All sections of facts.

    Args:
        counters: Of the latest epoch.

    Returns:
        HTML.
    """
    machine, loader = _list(_machine(counters.machine)), _list(_loader(counters))
    cards = (
        f'<section class="cards">\n<div>\n<h2>Machine</h2>\n{machine}\n</div>\n<div>\n<h2>Loader</h2>\n{loader}\n</div>'
        "\n</section>"
    )
    return f"{cards}\n{_files(counters.loader.files)}"


def _list(facts: Iterable[tuple[str, str]]) -> str:
    """Names and values; the values are HTML already."""
    return "<dl>\n" + "\n".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts) + "\n</dl>"


def _machine(machine: MachineFacts) -> list[tuple[str, str]]:
    facts = [
        ("cores to use", f"{machine.num_cores:g}"),
        ("waiting for a core", percent_text(machine.cpu_pressure)),
        ("waiting for storage", percent_text(machine.io_pressure)),
        ("waiting for memory", percent_text(machine.memory_pressure)),
        ("device in use", percent_text(machine.device_utilisation)),
    ]
    if machine.device_total_bytes is not None:
        facts += [
            ("device memory", bytes_text(machine.device_total_bytes)),
            ("of it free", bytes_text(machine.device_free_bytes)),
            ("most held by tensors", bytes_text(machine.device_peak_bytes)),
        ]
    if machine.costs is not None:
        facts += [
            ("copy from page cache", _rate(machine.costs.read_seconds)),
            ("uint8 to float32", _rate(machine.costs.convert_seconds, "values")),
            ("hand over by a worker", _rate(machine.costs.ship_seconds)),
        ]
    return facts


def _loader(counters: EpochCounters) -> list[tuple[str, str]]:
    loader, batch = counters.loader, counters.batch
    if loader.num_workers:
        readers = f"{loader.num_workers} worker process{'es' if loader.num_workers != 1 else ''}"
    else:
        readers = "a thread that reads ahead" if loader.has_thread else "none: the training process reads"
    facts = [("class", f"<code>{escaped(loader.name)}</code>"), ("readers", readers)]
    if loader.num_workers:
        facts.append(("started by", _known(loader.start_method)))
        facts.append(("kept between epochs", "yes" if loader.is_persistent else "no"))
        facts.append(("batches ahead of each", _known(loader.prefetch_factor)))
    if counters.start_seconds > 0:
        facts.append(("start of the epoch", milliseconds_text(counters.start_seconds)))
    facts += [
        ("samples in a batch", _known(batch.num_samples if loader.batch_size is None else loader.batch_size)),
        ("size of a batch", bytes_text(batch.num_bytes) if batch.num_bytes else UNKNOWN),
        ("page-locked", {None: UNKNOWN, True: "yes", False: "no"}[batch.is_pinned or loader.pin_memory]),
    ]
    if batch.widened_bytes:
        facts.append(("floats from 8-bit numbers", bytes_text(batch.widened_bytes)))
    return facts


def _files(files: tuple[FileFacts, ...]) -> str:
    if not files:
        return ""
    shown = "\n".join(_file(file) for file in files[:_MAX_FILES])
    left_out = len(files) - _MAX_FILES
    more = f'\n<p class="muted">{left_out:,} more file{"s" if left_out != 1 else ""}.</p>' if left_out > 0 else ""
    return f"<section>\n<h2>File{'s' if len(files) != 1 else ''}</h2>\n{shown}{more}\n</section>"


def _file(file: FileFacts) -> str:
    """A path and what is known of what lies there."""
    dataset = UNKNOWN if file.key is None else f"<code>{escaped(file.key)}</code>"
    if file.dtype is not None:
        dataset += f", {escaped(file.dtype)}"
    chunks = "not chunked"
    if file.chunk_shape is not None:
        plural = "s share" if file.chunk_samples != 1 else " in"
        chunks = f"{' × '.join(map(str, file.chunk_shape))}: {file.chunk_samples:,} sample{plural} a chunk"
    facts = [
        ("dataset", dataset),
        ("chunks", chunks),
        ("filters", ", ".join(map(escaped, file.filters)) or "none"),
        ("read", "straight from the file" if file.is_direct else "chunk by chunk"),
        ("order", UNKNOWN if file.order is None else escaped(file.order)),
        ("in the page cache", percent_text(file.cached_share)),
    ]
    if file.command is not None:
        facts.append(("to make it fast", f"<code>{escaped(file.command)}</code>"))
    return f'<div class="file"><h3><code>{escaped(file.path)}</code></h3>\n{_list(facts)}\n</div>'


def _known(value: str | int | None) -> str:
    return UNKNOWN if value is None else escaped(f"{value:,}" if isinstance(value, int) else value)


def _rate(seconds: float, of: str = "") -> str:
    """What one core does in a second, from what one byte or value takes."""
    if seconds <= 0:
        return UNKNOWN
    return f"{1e-6 / seconds:,.0f} million {of}/s" if of else f"{bytes_text(1 / seconds)}/s"
