"""One rank of a real process group that trains with a hand-written loop. Started by test_vote.py, once per rank.

    LOCAL_RANK=RANK python vote_worker.py NUM_RANKS FOLDER

Each scenario gives a value that is written to FOLDER/<name>.<rank>.json.
"""

from __future__ import annotations

import json
import os
import sys
import types
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from lightning_gpufeed.device.vote import HostVote
from lightning_gpufeed.echo.plan import AdaptiveEcho, FixedEcho
from tests.echo.hand_loop import Batches, GatedSamples, HandLoop, UnsizedBatches, wait_until


def votes(rank: int, num_ranks: int) -> dict[str, Any]:
    """Votes on numbers, beside other use of the ranks' own group."""
    vote = HostVote()
    same = torch.tensor([rank])
    distributed.all_reduce(same)
    result = {
        "rank": vote.rank,
        "num_ranks": vote.num_ranks,
        "smallest": vote.minimum(10 + rank, 20 - rank),
        "far": vote.minimum(2**62 + rank, -(2**40) * (rank + 1)),
        "largest": vote.maximum(10 + rank, 20 - rank, -(2**62) - rank),
        "many": [vote.minimum(number * (-1) ** (number + rank)) for number in range(20)],
        "num_votes": vote.num_votes,
        "sum": int(same),
    }
    vote.close()
    vote.close()
    return {**result, "after": vote.minimum(rank), "rank_after": vote.rank}


def collected(rank: int, num_ranks: int) -> dict[str, Any]:
    """What each has to say, of any size and kind, between votes on numbers."""
    vote = HostVote()
    state = torch.get_rng_state()
    values = [vote.collect({"rank": rank, "text": "x" * 100_000 * rank, "values": [None, 2.5, (rank,)]})]
    smallest = vote.minimum(7 - rank)
    values += [vote.collect(None if rank else ["only rank 0"]), vote.collect(types.SimpleNamespace(rank=rank))]
    kept = vote.num_votes
    vote.close()
    return {
        "ranks": [one["rank"] for one in values[0]],
        "lengths": [len(one["text"]) for one in values[0]],
        "values": [one["values"] for one in values[0]],
        "smallest": smallest,
        "second": values[1],
        "objects": [one.rank for one in values[2]],
        "num_votes": kept,
        "is_drawn": not torch.equal(torch.get_rng_state(), state),
        "after": vote.collect(rank),
    }


def run(loop: HandLoop) -> dict[str, Any]:
    """One epoch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = loop.run_epoch()
    return {
        "steps": [numbers_of(step.piece) for step in steps],
        "samples": [step.parts[0] for step in steps],
        "changes": loop.changes,
        "warnings": [str(warning.message) for warning in caught],
    }


def numbers_of(piece: Any) -> list[int]:
    """Where a piece is."""
    return [piece.fetch, piece.pass_index, piece.piece_index]


def pieces(rank: int, num_ranks: int) -> dict[str, Any]:
    """Batches of which the last one is smaller on one rank than on the other."""
    with HandLoop(FixedEcho(2), 4) as loop:
        loop.wrap(Batches(11 - 2 * rank, 4))
        return run(loop)


def orders(rank: int, num_ranks: int) -> dict[str, Any]:
    """The same batch on every rank."""
    with HandLoop(FixedEcho(1)) as loop:
        loop.wrap(Batches(30, 30))
        return run(loop)


def uneven(rank: int, num_ranks: int) -> dict[str, Any]:
    """Loaders without length, one of which ends sooner."""
    with HandLoop(FixedEcho(2), 2) as loop:
        loop.wrap(UnsizedBatches(12 - 4 * rank))
        return run(loop)


def speeds(rank: int, num_ranks: int) -> dict[str, Any]:
    """Echoes by need: the next batch of rank 0 comes late each time."""
    passes = [3, 1, 2, 1]
    samples = GatedSamples(16, gated=[1, 2, 3] if rank == 0 else [])
    with HandLoop(AdaptiveEcho(9)) as loop:
        loop.wrap(samples.loader())
        loop.begin()
        for number, num_passes in enumerate(passes):
            for step in range(num_passes):
                loop.step()
                if rank > 0:
                    wait_until(loop.wrapped[0].is_ready)
                elif step == num_passes - 1:
                    if number + 1 in samples.gates:
                        samples.gates[number + 1].set()
                    wait_until(loop.wrapped[0].is_ready)
        assert loop.step() is None
        loop.end()
        return {"steps": [numbers_of(step.piece) for step in loop.steps], "trace": loop.session.trace.to_dict()[0]}


def slowest(rank: int, num_ranks: int) -> dict[str, Any]:
    """The report is about the rank that waits longest."""
    with HandLoop(FixedEcho(1)) as loop:
        loop.wrap(Batches(4))
        loop.run_epoch()
        loop.session.measures.times.num_batches = 1
        loop.session.measures.times.seconds = 1.5 + rank
        return {"load_seconds": loop.session.report(0, 1.0).load_seconds}


def in_vain(rank: int, num_ranks: int) -> dict[str, Any]:
    """One rank votes, the other one does not; this leaves the group unusable."""
    vote, folder = HostVote(timedelta(seconds=2)), Path(sys.argv[2])
    if rank > 0:
        wait_until((folder / "in_vain.0.json").exists)
        return {}
    try:
        vote.minimum(1)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": "none"}


SCENARIOS: list[Callable[[int, int], dict[str, Any]]] = [
    votes,
    collected,
    pieces,
    orders,
    uneven,
    speeds,
    slowest,
    in_vain,
]


def main(rank: int, num_ranks: int, folder: Path) -> None:
    """Run all scenarios in one process group."""
    store = distributed.FileStore(str(folder / "store"), num_ranks)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    for scenario in SCENARIOS:
        (folder / f"{scenario.__name__}.{rank}.json").write_text(json.dumps(scenario(rank, num_ranks)))
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(os.environ["LOCAL_RANK"]), int(sys.argv[1]), Path(sys.argv[2]))
