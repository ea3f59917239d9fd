"""Claim: HDF5 feeds a training loop as fast as the best format made for it, and far faster than it is usually read.

    python benchmarks/feed.py [--sections warm cold ...] [--peers DIR] [--rounds 5] [--svg FILE] [--json FILE] [--quick]

Every way to read is an arm, and each arm runs in a process of its own, peers in their own virtual environments
(made by feed_peers.sh; what cannot be installed is skipped with a line). All arms of a table take turns, round by
round, there and back, and the median over the rounds is shown. Batches are 256 uint8 tensors on the host.

bound       The bytes of the HDF5 file, read from first to last into one reused buffer of 1 MiB (`preadv`).
usual       A `DataLoader` over one h5py read per sample, no workers: as most people write it.
proof       In a first round, which does not count, every arm's every sample is compared with what was written by a
            checksum of its bytes and its label; in those that count, by the labels: each once.
classes     How many of 100 classes meet in a batch, when the file is sorted by class; 1.00: as a true shuffle.

warm        All in the page cache. Each peer in its fullest shuffle and, where that is another one, as it comes.
cold        Before each epoch all files of an arm are taken out of the page cache, and that they are is looked up.
compressed  gzip-4, lz4, zstd-3; h5py decodes each chunk once, too. Rates are of decoded bytes. The bound decodes what
            is in memory, with two threads, and puts nothing together.
lock        Beside a trainer that holds Python's lock: a loop of pure Python, and one of small operations of torch. One
            takes its own batches, one every 28 steps, the others are threads beside an arm that reads as fast as it
            can. Counted are the steps alone (taking batches that are in memory) and beside the arm, and for which part
            of the time the trainer was ready but had no core, and waited (for a batch, or for the lock). Neighbours
            are processes that read nothing: what they cost is the machine's.
remote      A web server on this machine that answers after 20 ms: H5Loader against h5py over fsspec.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import feed_data
import feed_plot
import feed_table
from feed_arms import ARMS, Arm, Fleet, Measured, Server, say
from feed_data import Workload
from feed_store import late_store

SECTIONS = ("warm", "cold", "compressed", "lock", "remote")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
TRAINERS: dict[str, dict[str, Any]] = {
    "taking": {"trainer": "torch", "steps": 28},
    "torch": {"trainer": "torch"},
    "python": {"trainer": "python"},
}
"""What is asked of an arm for each; 28 steps take about 4 ms: 64,000 images a second."""
LOCK_SECONDS, QUICK_LOCK_SECONDS = 2.0, 0.3
PAUSE_SECONDS = 0.02


class Bench:
    """What is measured, over which files, by which arms."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.data: Path = options.data / ("quick" if options.quick else "full")
        self.sizes = feed_data.QUICK_SIZES if options.quick else feed_data.SIZES
        self.logs = self.data / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)

    def arms(self, section: str) -> list[Arm]:
        wanted = [arm for arm in ARMS if section in arm.sections]
        # Without these no ratio can be told.
        kept = ("bound", "decoding", "usual", "ours", "chunks", "in a row", "neighbour")
        if self.options.quick:
            first = {(arm.script, arm.kind): arm for arm in reversed(wanted)}
            wanted = [arm for arm in wanted if arm in first.values() and (section == "warm" or arm.kind in kept)]
        if self.options.arms:
            named = self.options.arms
            wanted = [arm for arm in wanted if arm.kind in kept or any(part in arm.name for part in named)]
        return wanted

    def workload(self, name: str) -> Workload:
        if name == "C":
            num_samples = feed_data.QUICK_SMOOTH if self.options.quick else feed_data.NUM_SMOOTH
            return feed_data.make_workload(self.data / name, (num_samples, *feed_data.SIZES["B"][1:]), is_smooth=True)
        return feed_data.make_workload(self.data / name, self.sizes[name])

    def fleet(self, section: str, workload: Workload) -> Fleet:
        say(f"{section}, {workload.folder.name}, {workload.h5_name}: starting")
        return Fleet(self.arms(section), workload, self.options.peers, self.logs)

    def warm(self) -> Iterator[tuple[str, Measured]]:
        for name in self.sizes:
            fleet = self.fleet("warm", self.workload(name))
            fleet.prove()
            for number in range(1, self.options.rounds + 1):
                fleet.round(number, {}, _bring_in)
            fleet.close()
            yield name, fleet.measured

    def cold(self) -> Iterator[tuple[str, Measured]]:
        for name in self.sizes:
            fleet = self.fleet("cold", self.workload(name))

            def evict(server: Server, fleet: Fleet = fleet) -> dict[str, Any]:
                for other in list(fleet.servers):
                    fleet.ask(other, {"do": "drop"})
                feed_data.evict(server.path)
                return _share_in_memory(server)

            fleet.prove()
            for number in range(1, self.options.rounds + 1):
                fleet.round(number, {}, evict)
            fleet.close()
            yield name, fleet.measured

    def compressed(self) -> Iterator[tuple[str, Measured]]:
        workload = self.workload("C")
        for name in feed_data.FILTERS[:1] if self.options.quick else feed_data.FILTERS:
            h5_name = feed_data.compressed_h5(workload, name)
            fleet = self.fleet("compressed", Workload.load(workload.folder, h5_name))
            # A chunk is decoded for each sample where samples are read one by one: some of them will do.
            fleet.prove(seconds=1.0)
            for number in range(1, self.options.rounds + 1):
                fleet.round(number, {}, usual_seconds=1.0 if self.options.quick else 3.0)
            fleet.close()
            yield name, fleet.measured

    def lock(self) -> Iterator[tuple[str, Measured]]:
        workload = self.workload("A")
        seconds = QUICK_LOCK_SECONDS if self.options.quick else LOCK_SECONDS
        for name, request in TRAINERS.items():
            fleet = self.fleet("lock", workload)
            if "steps" in request:
                fleet.leave_out("bound")  # it reads all or nothing
            fleet.prove()
            for number in range(1, self.options.rounds + 1):
                fleet.round(number, {"seconds": seconds, **request})
            fleet.close()
            yield name, fleet.measured

    def remote(self) -> Iterator[tuple[str, Measured]]:
        workload = self.workload("A")
        with late_store(workload.folder, PAUSE_SECONDS) as address:
            os.environ["GPUFEED_STORE"] = address
            fleet = self.fleet("remote", workload)
            fleet.prove(seconds=1.0)
            for number in range(1, self.options.rounds + 1):
                fleet.round(number, {"seconds": 1.0 if self.options.quick else 4.0})
            fleet.close()
        yield "store", fleet.measured


def _bring_in(server: Server) -> dict[str, Any]:
    feed_data.bring_in(server.path)
    return _share_in_memory(server)


def _share_in_memory(server: Server) -> dict[str, Any]:
    return {"cached_share": feed_data.cached_share(server.path)}


def measure(bench: Bench, begin: float) -> feed_table.Results:
    """All sections; what is there is written after each table, so that a long run may be ended."""
    options = bench.options
    names = [*bench.sizes, *(["C"] if "compressed" in options.sections else [])]
    sizes = {name: feed_data.describe(bench.workload(name)) for name in names}
    results = feed_table.Results({}, sizes, feed_table.machine(), 0.0, options.rounds)
    for section in options.sections:
        of = results.sections[section] = {}
        for on, measured in getattr(bench, section)():
            of[on] = measured
            results.seconds = time.perf_counter() - begin
            if options.json:
                options.json.write_text(json.dumps(feed_table.dump(results), indent=1))
    return results


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--arms", nargs="+", help="only peers with one of these texts in their name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", type=Path, default=CACHE / "gpufeed-peers", help="where feed_peers.sh put them")
    parser.add_argument("--make-peers", action="store_true", help="run feed_peers.sh first (network, minutes, 8 GB)")
    parser.add_argument("--data", type=Path, default=CACHE / "gpufeed-feed", help="where files are kept (15 GB)")
    parser.add_argument("--svg", type=Path, help="write a bar plot")
    parser.add_argument("--json", type=Path, help="write every round")
    parser.add_argument("--from-json", type=Path, help="measure nothing, show what --json wrote")
    parser.add_argument("--quick", action="store_true", help="see that it runs; its numbers mean nothing")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    return options


def main() -> None:
    options = arguments()
    begin = time.perf_counter()
    if options.from_json:
        results = feed_table.load(json.loads(options.from_json.read_text()))
    else:
        if options.make_peers:
            script = Path(__file__).with_name("feed_peers.sh")
            environment = {**os.environ, "PYTHON": sys.executable}
            subprocess.run(["bash", script, options.peers], env=environment, stdout=sys.stderr, check=False)
        results = measure(Bench(options), begin)
    if options.quick:
        print("A quick run: that it runs is all that it shows.\n")
    print(feed_table.report(results))
    if options.svg:
        options.svg.write_text(feed_plot.draw(results))


if __name__ == "__main__":
    main()
