"""Both ranks of tests of meetings: trainings that are none, but leave behind what trainings do.

Run by `tests.doubles.run_ranks`; each rank is a fork.
"""

from __future__ import annotations

import json
import os
import sys
import time
import types
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

SHORT, LONG = timedelta(seconds=0.2), timedelta(seconds=60)


def total(value: int, group: Any) -> int:
    """Summed over both ranks."""
    box = torch.tensor([value])
    distributed.all_reduce(box, group=group)
    return int(box)


def is_there(group: Any) -> bool:
    """Whether a group has not been given back."""
    try:
        distributed.get_backend(group)
    except ValueError:
        return False
    return True


class Rank:
    """One of the two."""

    def __init__(self, rank: int, folder: Path, meeting: Any) -> None:
        self.rank, self.folder, self.meeting = rank, folder, meeting

    def error_of(self, act: Callable[[], None]) -> str:
        """The error's type and text, or nothing."""
        try:
            act()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def meets_well(self) -> Any:
        """Nothing has happened before."""
        self.meeting.meet(LONG)
        found = self.meeting.everyone() is distributed.group.WORLD
        self.meeting.part(is_well=True)
        return found

    def has_made_other_groups(self) -> Any:
        """One rank has, before it failed in a way that none of ours has seen."""
        if self.rank == 0:
            distributed.new_group([0])
        self.meeting.meet(LONG)
        found = total(1, distributed.new_group(timeout=timedelta(seconds=5)))
        self.meeting.part(is_well=True)
        return found

    def comes_late(self) -> Any:
        """The other one has given up by then; the next time both are there."""
        sign = self.folder / "given up"
        end = time.monotonic() + 60
        while self.rank == 1 and not sign.exists() and time.monotonic() < end:
            time.sleep(0.01)
        error = self.error_of(lambda: self.meeting.meet(SHORT))
        sign.touch()
        return [error, self.meets_well()]

    def left_a_message(self) -> Any:
        """One rank has failed, while the other one waits for it in the default group, and goes on."""
        box = torch.tensor([100])
        work = distributed.all_reduce(box, async_op=True) if self.rank == 0 else None
        self.meeting.part(is_well=self.rank == 0)
        self.meeting.meet(LONG)
        found = total(1, self.meeting.everyone())
        first = self.meeting.everyone()
        self.meeting.part(is_well=self.rank == 1)
        self.meeting.meet(LONG)
        again = total(1, self.meeting.everyone())
        self.meeting.part(is_well=True)
        if work is None:
            distributed.all_reduce(box)
        else:
            work.wait()
        return [found, again, is_there(first), int(box)]

    def leaves_a_group_in_use(self) -> Any:
        """It is given back once what was begun in it has ended."""
        group, box = distributed.new_group(timeout=LONG), torch.tensor([1])
        work = distributed.all_reduce(box, group=group, async_op=True) if self.rank == 0 else None
        if work is not None:
            self.meeting.leave([group], [work])
        found = []
        for _ in range(2):
            self.meeting.meet(LONG)
            found.append(is_there(group))
            self.meeting.part(is_well=True)
            total(0, self.meeting.everyone())  # both have looked
            if work is not None:
                work.wait()
            elif len(found) == 1:
                distributed.all_reduce(box, group=group)
                self.meeting.leave([group])
        return found

    def begins_anew_with_another_default_group(self) -> Any:
        """What was wrong with the last one is forgotten with it, and nothing keeps it alive."""
        self.meeting.meet(LONG)
        self.meeting.part(is_well=False)
        distributed.destroy_process_group()
        join(self.rank, self.folder / "second store")
        return self.meets_well()


def join(rank: int, store: Path) -> None:
    """Become a rank."""
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(store), 2), rank=rank, world_size=2, timeout=LONG
    )


def run_rank(rank: int, folder: Path, meeting: Any) -> None:
    """One case after the other, in the same processes."""
    join(rank, folder / "store")
    one = Rank(rank, folder, meeting)
    cases = [one.meets_well, one.has_made_other_groups, one.comes_late, one.left_a_message]
    cases += [one.leaves_a_group_in_use, one.begins_anew_with_another_default_group]
    found = {}
    for case in cases:
        found[case.__name__] = case()
        (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def main(folder: Path) -> None:
    """Import what both need once, and then be both ranks."""
    package = types.ModuleType("lightning_gpufeed")  # without its root module, which imports Lightning for seconds
    package.__path__ = [str(Path(__file__).parents[2] / "lightning_gpufeed")]
    sys.modules["lightning_gpufeed"] = package
    from lightning_gpufeed.pipeline import meeting

    torch.set_num_threads(1)
    child = os.fork()
    run_rank(int(child == 0), folder, meeting)
    if child:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(json.loads(Path(sys.argv[1]).read_text())["out"]))
