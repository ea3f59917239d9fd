"""What is advised: nothing that is already so, commands that can be pasted, and ranges that say what is not known."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings

from lightning_gpufeed.diagnose.counters import BatchFacts, EpochCounters, FileFacts, LoaderFacts
from lightning_gpufeed.diagnose.judgement import Cause, Cure, Verdict
from lightning_gpufeed.diagnose.load_model import LoadModel
from lightning_gpufeed.diagnose.verdict import judge
from tests.diagnose.feeds import (
    CHUNKED,
    COMPRESSED,
    EPOCHS,
    FLOATS,
    OWN,
    ROWS,
    UINT8,
    WIDENED,
    epoch_of,
    steps_of,
    workers,
)

INLINE = workers(0)
BUSY: dict[str, Any] = {"user": 0.8, "system": 0.15, "queue": 0.05}
KERNEL: dict[str, Any] = {"user": 0.15, "system": 0.8, "queue": 0.05}
ASLEEP: dict[str, Any] = {"user": 0.02, "system": 0.03, "queue": 0.0}
RAW = replace(CHUNKED, is_direct=True, order="full", command=None)
SMALL = BatchFacts(num_samples=64, num_bytes=4096)
START: dict[str, Any] = {
    "loader": replace(workers(4), is_persistent=False), "start_seconds": 10.0, "steps": steps_of(0.02)
}  # fmt: skip


def cures_of(**told: Any) -> tuple[Cure, ...]:
    return judge(epoch_of(**told)).cures


def first(**told: Any) -> Cure:
    return cures_of(**told)[0]


def named(name: str, **told: Any) -> Cure:
    [found] = [cure for cure in cures_of(**told) if cure.name == name]
    return found


def commands(text: str) -> list[list[str]]:
    """What stands between backticks, as a shell takes it."""
    return [shlex.split(one) for one in re.findall(r"`([^`]*)`", text)]


# Which cure comes first ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("H5DataModule", {**KERNEL, "loader": workers(2, files=(ROWS,))}),
        ("H5DataModule", {**KERNEL, "read_ratio": 32.0, "loader": workers(2, files=(CHUNKED,))}),
        ("chunk order", {**KERNEL, "read_ratio": 16.0, "loader": workers(2, files=(replace(COMPRESSED, order=None),))}),
        ("smaller samples", {**KERNEL, "read_ratio": 32.0}),  # of files nothing is known
        ("chunk order", {**BUSY, "loader": replace(OWN, files=(COMPRESSED,)), "read_ratio": 0.0}),
        ("uint8 on the host", {**KERNEL, "batch": WIDENED, "read_ratio": 0.25, "steps": steps_of(0.6, idle=0.6)}),
        ("transform on the device", {**BUSY, "batch": FLOATS, "read_ratio": 0.25, "steps": steps_of(0.6, idle=0.6)}),
        ("1 worker", {**BUSY, "loader": INLINE, "steps": steps_of(0.4, step_seconds=0.02), "main_user": 0.6}),
        ("4 workers", {**ASLEEP, "loader": workers(2)}),
        ("local copy", {**ASLEEP, "loader": replace(OWN, files=(RAW,))}),
        ("2 workers", {"user": 0.1, "system": 0.0, "queue": 0.9, "loader": workers(16)}),
        (
            "no workers",
            {"user": 0.01, "system": 0.01, "queue": 0.0, "steps": steps_of(0.3, ready_seconds=5.9), "batch": SMALL},
        ),
        ("pin_memory", {"steps": steps_of(0.0, copy=0.4)}),
        ("uint8 on the host", {"steps": steps_of(0.0, copy=0.4), "batch": replace(WIDENED, is_pinned=True)}),
        ("host code", {"steps": steps_of(0.0, hooks=0.4)}),
        ("fewer synchronisations", {"steps": steps_of(0.0, sync_seconds=8.0), "num_ranks": 2}),
        ("persistent_workers", START),
    ],
)
def test_the_first_cure_is_the_one_for_the_cause(name: str, told: dict[str, Any]) -> None:
    assert first(**told).name == name


def test_a_gain_can_be_done_by_hand() -> None:
    copying = steps_of(0.0, copy=0.4)
    for cure, gain in [
        (first(**START), (10 + 20) / (1.5 + 20)),  # a seventh of the start is left
        (first(steps=copying), 1 / (1 - 0.2)),  # half of the copy
        (first(steps=copying, batch=replace(WIDENED, is_pinned=True)), 1 / (1 - 0.3)),  # three quarters
        (first(steps=steps_of(0.0, hooks=0.4)), 1 / (1 - 0.2)),
        (first(steps=steps_of(0.0, idle=0.4)), 1 / (1 - 0.2)),
    ]:
        assert cure.gain == pytest.approx(gain)
        assert cure.low < cure.gain


def test_read_amplification_is_worth_what_reading_took() -> None:
    # All that the readers do is reading in the kernel: with an order by chunks a 32nd is left, and the step's own time.
    loader = workers(2, files=(CHUNKED,))
    cure = named("chunk order", user=0.0, system=1.0, queue=0.0, read_ratio=32.0, loader=loader)
    assert cure.high == pytest.approx(1 / 0.4)
    assert cure.low > 1.0


# What is already so ----------------------------------------------------------------------------------------


def has_advice_that_is_already_so(counters: EpochCounters, cure: Cure) -> str | None:
    """The first thing that a cure tells to do although it is done, or cannot be done."""
    loader, text = counters.loader, cure.action
    number = re.search(r"num_workers=(\d+)", text)
    checks = {
        "workers": number is not None and (int(number.group(1)) == loader.num_workers or loader.is_own),
        "persistent": text.startswith("DataLoader(persistent_workers") and loader.is_persistent,
        "pinned": "pin_memory" in text and (counters.batch.is_pinned or bool(loader.pin_memory) or loader.is_own),
        "our own loader": loader.is_own and ("DataLoader(" in text or re.search(r"H5DataModule(?! in|\()", text)),
        "uint8": "uint8" in cure.name and not counters.batch.widened_bytes,
        "prefetch without workers": "prefetch_factor" in text and not loader.num_workers,
        "window": "shuffle='window'" in text and not any(one.order == "full" for one in loader.files),
        "transform of our own": loader.is_own and "transform" in cure.name,
        "nothing to copy": cure.name == "H5DataModule" and not counters.batch.num_bytes,
    }
    return next((name for name, is_so in checks.items() if is_so), None)


@settings(max_examples=80)
@given(EPOCHS)
def test_nothing_is_advised_that_is_already_so(counters: EpochCounters) -> None:
    for cure in judge(counters).cures:
        assert has_advice_that_is_already_so(counters, cure) is None, cure


@pytest.mark.parametrize(
    "told",
    [
        {**BUSY, "loader": OWN},
        {**KERNEL, "loader": replace(OWN, files=(RAW,))},
        {**BUSY, "loader": replace(OWN, files=(COMPRESSED,)), "batch": WIDENED},
        {**BUSY, "loader": replace(OWN, files=(replace(COMPRESSED, order="window:4096"),)), "read_ratio": 4.0},
        {**ASLEEP, "loader": replace(OWN, files=(RAW,))},
        {"user": 0.1, "system": 0.1, "queue": 0.0, "loader": OWN, "steps": steps_of(0.15)},
        {"steps": steps_of(0.0, copy=0.4), "loader": OWN, "batch": WIDENED},
        {"steps": steps_of(0.0, copy=0.4), "loader": workers(2, pin_memory=True)},
        {"user": 0.1, "system": 0.1, "queue": 0.0, "loader": replace(INLINE, has_thread=True), "steps": steps_of(0.15)},
        {**BUSY, "loader": INLINE, "batch": BatchFacts()},
        {**BUSY, "loader": workers(2), "batch": BatchFacts(), "cores": 64.0},
    ],
)
def test_neither_here(told: dict[str, Any]) -> None:
    counters = epoch_of(**told)
    for whole in (counters, replace(counters, readers=None), replace(counters, training_thread=None)):
        for cure in judge(whole).cures:
            assert has_advice_that_is_already_so(whole, cure) is None, cure


def test_a_file_with_one_sample_per_chunk_is_not_to_be_written_anew_as_such() -> None:
    # A crop is delivered of each sample.
    text = named("smaller samples", **KERNEL, read_ratio=5.0, loader=workers(2, files=(ROWS,))).action
    assert "one sample per chunk" not in text
    assert "FILE.h5" not in text
    assert commands(text)[0][:3] == ["gpufeed", "pack", ROWS.path]


def test_a_reading_thread_of_somebody_else_does_not_keep_workers_away() -> None:
    for loader in (workers(2), INLINE):
        cures = cures_of(**BUSY, loader=replace(loader, has_thread=True), cores=8.0)
        assert any("num_workers=" in cure.action for cure in cures)


@pytest.mark.parametrize(("wait", "most"), [(0.2, 8), (0.6, 16), (0.95, 64)])
def test_no_more_workers_are_asked_for_than_keep_up(wait: float, most: int) -> None:
    cure = first(**BUSY, loader=workers(4), cores=64.0, steps=steps_of(wait), batch=FLOATS)
    wanted = int(cure.name.split()[0])
    assert 4 < wanted <= most
    assert cure.gain == pytest.approx(1 / (1 - wait), rel=0.3)


# Commands --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["data/train.h5", "/data/with a blank/it's.h5", "/data/$HOME & y;z.h5"])
@pytest.mark.parametrize("is_own", [False, True])
def test_a_command_that_is_pasted_names_the_file(path: str, is_own: bool) -> None:
    file = replace(COMPRESSED, path=path, command=f"gpufeed pack {shlex.quote(path)} OUT.h5" if is_own else None)
    loader = replace(OWN, files=(file,)) if is_own else workers(2, files=(replace(file, order=None),))
    text = named("chunk order", **BUSY, loader=loader, read_ratio=0.0 if is_own else 32.0).action
    assert commands(text)[0][:4] == ["gpufeed", "pack", path, "OUT.h5"]


PLACEHOLDERS = ("SOURCE", "FILE.h5", "package.module:dataset")


def all_commands(verdict: Verdict) -> list[list[str]]:
    return [command for cure in verdict.cures for command in commands(cure.action)]


@settings(max_examples=50)
@given(EPOCHS)
def test_every_command_can_be_pasted(counters: EpochCounters) -> None:
    verdict = judge(counters)
    for cure in verdict.cures:
        assert cure.action.count("`") % 2 == 0
        assert ("gpufeed " in cure.action) == ("`gpufeed " in cure.action), "a command without an end"
    for command in all_commands(verdict):
        assert command[:2] == ["gpufeed", "pack"]
        assert command[3] == "OUT.h5"
        assert command[2] in (*PLACEHOLDERS, *(one.path for one in counters.loader.files), "data/train.h5")
        assert (command[2] == "FILE.h5") <= all(one.key is None for one in counters.loader.files)


@pytest.mark.parametrize(
    ("dtype", "command", "num_bytes"),
    [
        ("uint8", "gpufeed pack data/train.h5 OUT.h5", 3 * 224 * 224),
        ("uint8", None, 3 * 224 * 224),
        ("float32", "gpufeed pack data/train.h5 OUT.h5 --keep-dtype", 3 * 224 * 224 * 4),
        ("float32", "gpufeed pack data/train.h5 OUT.h5 --scale 255", 3 * 224 * 224),  # becomes bytes
        ("int64", "gpufeed pack data/train.h5 OUT.h5 --keep-dtype --shuffle", 3 * 224 * 224 * 8),
    ],
)
def test_one_sample_per_chunk_has_the_size_of_a_sample_as_it_is_written(dtype, command, num_bytes) -> None:
    file = replace(CHUNKED, dtype=dtype, command=command)
    text = named("chunk order", **KERNEL, read_ratio=32.0, loader=workers(2, files=(file,))).action
    [words] = commands(text)
    assert words[words.index("--chunk-bytes") + 1] == str(num_bytes)


def test_of_several_files_the_slow_one_is_written_anew() -> None:
    slow = replace(COMPRESSED, path="b.h5", command="gpufeed pack b.h5 OUT.h5")
    loader = replace(OWN, files=(replace(RAW, path="a.h5"), slow))
    verdict = judge(epoch_of(**BUSY, loader=loader, read_ratio=0.0))
    assert commands(verdict.cures[0].action) == [["gpufeed", "pack", "b.h5", "OUT.h5"]]
    assert not any("a.h5" in one for one in verdict.figures)


def test_our_loader_that_decodes_is_told_to_use_a_packed_file() -> None:
    loader = replace(OWN, files=(replace(COMPRESSED, order="window:4096"),))
    assert commands(first(**BUSY, loader=loader, read_ratio=0.0).action) == [shlex.split(COMPRESSED.command or "")]


def test_decoding_in_workers_is_done_once_by_packing() -> None:
    rows = replace(ROWS, filters=("gzip",), command="gpufeed pack data/rows.h5 OUT.h5")
    loader = workers(2, files=(rows,))
    cures = cures_of(**BUSY, read_ratio=0.5, loader=loader)
    assert ["gpufeed", "pack", "data/rows.h5", "OUT.h5"] in commands(cures[0].action)
    assert not any(cure.name == "transform on the device" for cure in cures)


def test_a_folder_of_pictures_can_be_decoded_once_too() -> None:
    # Few bytes read, much user time, and nothing known of any file.
    cures = cures_of(**BUSY, read_ratio=0.05, batch=WIDENED)
    assert any("gpufeed pack" in cure.action for cure in cures)


def test_where_the_host_has_no_core_to_move_a_transform_to_it_is_done_once() -> None:
    told = {"user": 0.85, "system": 0.1, "queue": 0.05, "batch": FLOATS, "read_ratio": 0.25, "main_user": 0.4}
    on_host = cures_of(**told)
    on_device = cures_of(**told | {"steps": steps_of(0.6, idle=0.6)})
    assert on_host[0].name == "transform once"
    assert commands(on_host[0].action)[0][:2] == ["gpufeed", "pack"]
    assert on_device[0].name == "transform on the device"
    assert on_host[0].low <= 1.0  # it may be random


@pytest.mark.parametrize("file", [FileFacts("v5.mat"), FileFacts("gone.h5")])
def test_a_file_that_could_not_be_looked_into_is_not_promised_to_be_fed(file: FileFacts) -> None:
    for base in (BUSY, KERNEL):
        for cure in cures_of(**base, loader=workers(2, files=(file,))):
            assert f"H5DataModule on {file.path}" not in cure.action


# Ranges ----------------------------------------------------------------------------------------------------


def without(counters: EpochCounters, name: str) -> EpochCounters:
    usage, thread = counters.readers, counters.training_thread
    match name:
        case "costs":
            return replace(counters, machine=replace(counters.machine, costs=None))
        case "readers" | "training_thread" | "main":
            return replace(counters, **{name: None})
        case "queue of the training":
            return replace(counters, training_thread=thread and replace(thread, queue_seconds=None))
        case _:
            return replace(counters, readers=usage and replace(usage, **{name: None}))


MISSING = ["costs", "readers", "training_thread", "queue of the training", "read_bytes", "queue_seconds"]


@settings(max_examples=50)
@given(EPOCHS)
def test_a_missing_counter_widens_the_range_of_a_cure(counters: EpochCounters) -> None:
    counters = replace(counters, machine=replace(counters.machine, cpu_pressure=None))
    whole = judge(counters)
    known = {cure.action: cure for cure in whole.cures}
    for name in MISSING:
        verdict = judge(without(counters, name))
        for cure in verdict.cures:
            before = known.get(cure.action)
            if (
                before is None
                or verdict.cause is not whole.cause
                or (name == "queue_seconds" and "worker" in cure.name)
            ):
                continue  # of workers whose sleep is unknown see below
            # "No gain" is where ranges begin; the number of bytes that are handed over is a guess of some percent.
            assert cure.low <= max(1.0, before.low) * 1.02, (name, cure, before)
            assert cure.high >= before.high * 0.98, (name, cure, before)


def test_workers_that_may_sleep_for_all_that_is_known_may_not_be_enough() -> None:
    # Loading that takes 12 of 20 s: on a core for 1.2 of them, asleep for the rest or waiting for a core.
    told = {"user": 0.05, "system": 0.05, "loader": INLINE, "cores": 8.0, "steps": steps_of(0.6, step_seconds=20.0)}
    asleep, unknown = (LoadModel(epoch_of(**told, queue=queue)).cure_by_workers("", "", 1) for queue in (0.0, None))
    assert asleep.gain == pytest.approx(20 / 12)
    assert unknown.low <= asleep.low <= asleep.high <= unknown.high


@pytest.mark.parametrize(
    "told",
    [
        {**KERNEL, "read_ratio": 32.0},
        {**KERNEL, "batch": WIDENED, "read_ratio": 0.25},
        {**KERNEL},
        {**BUSY, "loader": INLINE},
        {**BUSY, "loader": INLINE, "cores": 1.0},
        {**BUSY, "loader": workers(1), "cores": 8.0, "batch": WIDENED},
    ],
)
def test_of_readers_that_were_not_watched_anything_from_no_gain_to_no_waiting_is_left_open(told) -> None:
    counters = replace(epoch_of(**told), readers=None)
    cures = judge(counters).cures
    assert cures
    for cure in cures:
        assert cure.low <= 1.0, cure
        assert cure.high >= 1 / 0.4 - 1e-9, cure


def test_a_device_cannot_decode_so_moving_the_transform_there_may_gain_nothing() -> None:
    told = {**BUSY, "batch": FLOATS, "read_ratio": 0.25, "steps": steps_of(0.6, idle=0.6)}
    assert named("transform on the device", **told).low <= 1.0


def test_where_the_host_computes_a_transform_gains_nothing_from_moving_into_the_step() -> None:
    cures = cures_of(**BUSY, batch=FLOATS, read_ratio=0.25)
    assert "transform on the device" not in [cure.name for cure in cures]
    assert cures[0].name == "transform once"


def test_our_loader_does_not_make_a_transform_vanish() -> None:
    # A transform on the host has to go somewhere: to the device, or into the file once.
    assert named("H5DataModule", **BUSY, batch=FLOATS, read_ratio=0.25).low <= 1.0


@pytest.mark.parametrize("batch", [UINT8, FLOATS, BatchFacts()], ids=["uint8", "floats", "none"])
def test_what_is_not_widened_is_not_to_be_narrowed(batch: BatchFacts) -> None:
    for base in (BUSY, KERNEL, ASLEEP, {"steps": steps_of(0.0, copy=0.4)}):
        for loader in (INLINE, workers(2), workers(16), OWN):
            assert not any("uint8" in one.name for one in cures_of(**base, batch=batch, loader=loader))


def test_a_cure_that_gains_next_to_nothing_is_not_named() -> None:
    for wait in (0.05, 0.06, 0.2, 0.9):
        assert all(one.gain >= 1.03 for one in cures_of(**BUSY, steps=steps_of(wait)))
    # One core that is always busy: nothing but less work helps.
    alone: LoaderFacts = workers(1)
    assert not any("worker" in one.name for one in cures_of(**BUSY, loader=alone, cores=1.0, main_user=0.05))


def test_a_step_that_only_computes_has_no_cure() -> None:
    verdict = judge(epoch_of(steps=steps_of(0.01)))
    assert (verdict.cause, verdict.cures) == (Cause.COMPUTE, ())
