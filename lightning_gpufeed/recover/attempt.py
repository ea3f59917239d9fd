"""The retry: leave the handler, let go of the failed attempt, undo, release, do the same batch again.

The order matters. While an exception is handled, or kept with its traceback, the frames it came through hold every
activation of the attempt; a cache that is emptied before they are gone gives nothing back.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import distributed

from lightning_gpufeed.device.headroom import describe_memory, is_low, release
from lightning_gpufeed.device.vote import HostVote
from lightning_gpufeed.errors import OOMRecoveryError
from lightning_gpufeed.recover.batch_guard import BatchGuard, changed_in_place
from lightning_gpufeed.recover.batch_reading import described
from lightning_gpufeed.recover.classify import Diagnosis, Kind, classify
from lightning_gpufeed.recover.failure import Failure, add_advice, forget, note_failure
from lightning_gpufeed.recover.plan import RetryPlan
from lightning_gpufeed.recover.report import OOMEvent, bytes_text
from lightning_gpufeed.recover.split_batch import BatchSplitter, Split
from lightning_gpufeed.recover.split_check import check_split
from lightning_gpufeed.recover.work import StepWork

__all__ = ["Recovery"]

MUCH = 2**62
UNCOUNTED_SAMPLES = 2**30
"""Taken for a batch whose samples cannot be counted: it can be split as often as its function gives more parts."""
TALKS = "the step itself, or a hook in its backward pass, talks to the other ranks"
MAX_CHECKS = 5
"""Batches that are looked at before their first split, if logged values leave something open."""


class Recovery:
    """Does steps so that running out of memory costs an attempt.

    Attributes:
        plan: Into how many microbatches.
        num_retries: Attempts after a first one, in all.
    """

    def __init__(
        self,
        stage: str,
        plan: RetryPlan,
        splitter: BatchSplitter,
        device: torch.device,
        *,
        vote: HostVote | None = None,
        split_check: Literal["refuse", "warn", "skip"] = "refuse",
        is_half: bool = False,
        on_event: Callable[[OOMEvent], None],
        on_note: Callable[[str], None],
        on_give_up: Callable[[], str],
    ) -> None:
        """Put the parts together.

        Args:
            stage: "fit", "validate", "test" or "predict".
            plan: Its own for each stage.
            splitter: Splits batches.
            device: Of the training.
            vote: Of the ranks that train together; None: this process decides alone.
            split_check: What to do if the loss does not follow from its parts.
            is_half: Whether it computes in half precision.
            on_event: Told of each batch that failed at first.
            on_note: Told what a user should know.
            on_give_up: Called with everything undone before the last error is raised; says what it did.
        """
        self.stage, self.plan, self.splitter, self.device = stage, plan, splitter, device
        self._vote = vote if vote is not None and vote.num_ranks > 1 else None
        self._split_check, self._is_half = split_check, is_half
        self._on_event, self._on_note, self._on_give_up = on_event, on_note, on_give_up
        self._has_checked = split_check == "skip"
        self._has_learned, self._num_checks = False, 0
        self._has_talked = False
        self._lost: list[str] = []
        self._num_splits, self._has_warned = 0, False
        self.num_retries = 0

    def run(self, work: StepWork, batch: Any, step: int) -> Any:
        """Do a step; again, in smaller parts, as often as memory runs out.

        Args:
            work: What to do with the batch.
            batch: On its device.
            step: Which one it is, for people.

        Returns:
            What the step gave.

        Raises:
            OOMRecoveryError: The batch cannot be trained on in parts, or another rank cannot go on.
        """
        if work.guard is None:
            work.guard = BatchGuard(batch)
        else:  # done again from its begin
            batch = work.guard.restored()
        guard = work.guard
        work.save()
        split = self._split(batch, None)
        failures: _Failures = []
        ballot = _Ballot()
        while True:
            outcome, failure = self._attempt(work, split, bool(failures))
            ballot = ballot.updated(self._agree(work, failure, split))
            if not ballot.has_failed:
                break
            failures.append((failure, len(split.microbatches), max(split.sizes)))
            self._lost = work.undo()
            if self._has_talked:
                self._give_up(batch, failures, f"{TALKS}: one that does it again would talk to what the others do next")
            release(self.device)
            split = self._next(batch, guard, failures, ballot)
            self.num_retries += 1
        work.finish()
        self.plan.settle(ballot.num_samples, ballot.num_microbatches, len(failures))
        if failures:
            self._on_event(self._event(step, ballot, failures, split))
        for note in work.notes:
            self._on_note(note)
        return outcome

    # One attempt ------------------------------------------------------------------------------------------

    def _split(self, batch: Any, num_microbatches: int | None) -> Split:
        """The batch in so many microbatches; None: as the plan says."""
        if num_microbatches is None:
            self._learn(batch)
            if self.plan.num_microbatches == 1:
                return Split([batch], [0], [1.0])
            try:
                num_microbatches = self.plan.num_for(self._count(batch))
            except ValueError as error:
                if self.plan.fewest == 1:  # it may fit whole
                    return Split([batch], [0], [1.0])
                self._tell_others(error)
                raise
        return Split([batch], [0], [1.0]) if num_microbatches == 1 else self.splitter.split(batch, num_microbatches)

    def _count(self, batch: Any) -> int:
        """Samples in a batch; many, where only a `split_fn` and a `weight_fn` know."""
        try:
            return self.splitter.count(batch)
        except ValueError:
            if self.splitter.can_split_uncounted:
                return UNCOUNTED_SAMPLES
            raise

    def _learn(self, batch: Any) -> None:
        """Understand the first batch, which is a full one; a last one of an epoch can be taken for something else."""
        if not self._has_learned:
            self._has_learned = True
            with suppress(ValueError):  # said when a batch has to be split
                self.splitter.count(batch)

    def _attempt(self, work: StepWork, split: Split, is_retry: bool) -> tuple[Any, Failure | None]:
        """Try once. What is returned of a failure keeps none of its tensors alive."""
        try:
            if len(split.microbatches) > 1 and self._is_check_due(is_retry):
                self._check(work, split)
            return work.run(split), None
        except Exception as error:
            diagnosis = classify(error, self.device.type)
            if not self._may_retry(diagnosis):
                add_advice(error, diagnosis)
                if is_retry:
                    error.add_note(
                        f"OOMRecovery: this came when a batch that had run out of memory was done again, "
                        f"{_how(len(split.microbatches), max(split.sizes))}."
                    )
                self._tell_others(error)
                raise
            failure = note_failure(error, diagnosis, work.phase, self.device)
        forget(failure.error)
        return None, failure

    def _may_retry(self, diagnosis: Diagnosis) -> bool:
        if diagnosis.kind is Kind.PROBABLE:
            return is_low(self.device)
        return diagnosis.kind in (Kind.DEVICE, Kind.HOST)

    def _is_check_due(self, is_retry: bool) -> bool:
        """At the first split, the 10th, the 100th ...: padding, which changes weights, may be missing in the first."""
        if self._split_check == "skip" or self._has_warned:
            return False
        self._num_splits += not is_retry or self._num_splits == 0
        is_power_of_ten = not is_retry and str(self._num_splits).rstrip("0") == "1"
        return not self._has_checked or is_power_of_ten

    def _check(self, work: StepWork, split: Split) -> None:
        """May batches be split at all?"""
        is_half = self._is_half or any(parameter.dtype.itemsize == 2 for parameter in work.states.parameters)
        finding = check_split(work, split, self.splitter, self.device, is_half=is_half, first=self._num_checks)
        release(self.device)
        self._num_checks += 1
        self._has_checked = not finding.open or self._num_checks == MAX_CHECKS
        if finding.changed:
            self._lost = list(finding.changed)
            # Nothing is saved: the pass has changed them already.
            raise OOMRecoveryError(f"the batch cannot be split into microbatches: {self._changes_weights()}.")
        if finding.unknown is not None:
            self._on_note(f"whether the loss of a batch follows from its parts could not be checked: {finding.unknown}")
        for name in finding.buffers:
            self._on_note(
                f"the buffer {name!r} is changed by every pass, so once per microbatch of a batch that is split"
            )
        for key in finding.unmerged:
            self._on_note(
                f"{key!r} of a batch does not follow from its microbatches in any known way; their weighted mean is "
                f"logged for batches that are split"
            )
        if finding.mismatch is None:
            return
        cure = (
            "if it is a mean over something else than samples, give weight_fn=(batch -> how many of those); if it is a "
            "sum, loss_reduction='sum'; if it compares the samples of a batch with each other, it cannot be split: use "
            "a smaller batch or cache the gradients of the embeddings"
        )
        if self._split_check == "warn":
            self._has_warned = True
            self._on_note(f"{finding.mismatch}. Trained on in microbatches all the same, as split_check='warn'; {cure}")
            return
        # check_split has put everything back
        raise OOMRecoveryError(
            f"the batch cannot be split into microbatches: {finding.mismatch}. Expected a mean over samples; {cure}. "
            f"split_check='warn' splits it all the same. {self._on_give_up()}".rstrip()
        )

    # What the ranks agree on ------------------------------------------------------------------------------

    def _agree(self, work: StepWork, failure: Failure | None, split: Split) -> list[int]:
        """One vote, in the same place on every rank."""
        self._has_talked |= work.has_talked
        has_failed = failure is not None
        requested = failure.requested_bytes if failure is not None else None
        free = failure.free_bytes if failure is not None else None
        numbers = [
            int(has_failed),
            0,
            sum(split.sizes),
            len(split.microbatches),
            -1 if requested is None else requested,
            -1 if free is None else MUCH - free,
            self._vote.rank if has_failed and self._vote is not None else -1,
            ["forward", "backward"].index(failure.phase) if failure is not None else -1,
        ]
        if self._vote is None:
            return numbers
        *numbers, has_talked = self._vote.maximum(*numbers, int(work.has_talked))
        if has_talked:
            work.undo()
            raise OOMRecoveryError(
                f"OOMRecovery cannot work here: {TALKS}. A rank that runs out of memory in it cannot do it again "
                f"alone. Expected collectives outside training_step only (self.log(sync_dist=True) may be there); "
                f"train without OOMRecovery, or gather outside."
            )
        if numbers[1]:
            work.undo()
            self._on_give_up()
            raise OOMRecoveryError(
                "another rank has stopped with an error while this one was in the same step; its own message says why."
            )
        return numbers

    def _tell_others(self, error: BaseException) -> None:
        """An error that ends the training of this rank ends it on the others too, instead of letting them wait."""
        is_of_group = isinstance(error, getattr(distributed, "DistError", ()))
        if self._vote is not None and not is_of_group and not isinstance(error, StopIteration):
            self._vote.maximum(0, 1, 0, 0, -1, -1, -1, -1, 0)

    def _next(self, batch: Any, guard: BatchGuard, failures: _Failures, ballot: _Ballot) -> Split:
        """The next attempt; raises if there is none."""
        obstacle = self._obstacle(guard, [failure for failure, _, _ in failures])
        batch = guard.restored()
        if not obstacle:
            try:
                ballot.num_samples = max(ballot.num_samples, self._count(batch))
            except ValueError as error:
                # At the same size it can still be tried.
                ballot.obstacle = str(error)
        if self._vote is not None:
            ballot.num_samples, is_stuck, is_whole = self._vote.maximum(
                ballot.num_samples, int(bool(obstacle)), int(bool(ballot.obstacle))
            )
            obstacle = obstacle or ("another rank cannot do its batch again" if is_stuck else "")
            ballot.obstacle = ballot.obstacle or ("another rank cannot split its batch" if is_whole else "")
        number = self.plan.after_failure(max(1, ballot.num_samples), ballot.num_microbatches, len(failures))
        if obstacle or number is None or (number > 1 and ballot.obstacle):
            self._give_up(batch, failures, obstacle or ballot.obstacle or "there is no smaller size to try")
        try:
            split = self._split(batch, number)
        except ValueError as error:
            self._tell_others(error)
            self._give_up(batch, failures, str(error))
        if self._vote is None and len(failures) > 1 and len(split.microbatches) <= failures[-1][1]:
            self._give_up(batch, failures, "there is no smaller size to try")
        return split

    def _obstacle(self, guard: BatchGuard, failures: list[Failure | None]) -> str:
        """Why the batch may not be done again on this rank; empty if it may."""
        changed = changed_in_place(guard)
        if changed or self._lost:
            return changed or self._changes_weights()
        is_probable = [failure is not None and failure.kind is Kind.PROBABLE for failure in failures]
        return "it came again after memory was released" if is_probable[-2:] == [True, True] else ""

    def _changes_weights(self) -> str:
        return (
            f"the step itself changes weights ({', '.join(self._lost[:4])}), which cannot be undone; change them in "
            f"on_train_batch_end, or in a callback"
        )

    def _give_up(self, batch: Any, failures: _Failures, reason: str) -> NoReturn:
        """Raise the first error again, with all that was tried."""
        first = next((failure for failure, _, _ in failures if failure is not None), None)
        did = "" if self._lost else self._on_give_up()
        lines = [f"OOMRecovery could not cure this: {reason.rstrip('.')}.", "Tried, with the same batch:"]
        for failure, number, size in failures:
            what = _how(number, size)
            if failure is None:
                lines.append(f"  {what}: another rank ran out of memory")
                continue
            free = f", {bytes_text(failure.free_bytes)} were free" if failure.free_bytes is not None else ""
            lines.append(
                f"  {what}: out of memory in {failure.phase}, asked for {bytes_text(failure.requested_bytes)}{free}"
            )
        lines += [f"Batch: {described(batch)}", f"Memory: {describe_memory(self.device)}"]
        if did:
            lines.append(did)
        if first is None:
            raise OOMRecoveryError("\n".join(["another rank ran out of memory.", *lines]))
        lines.append(f"It came from:\n{first.where}")
        first.error.add_note("\n".join(lines))
        raise first.error

    def _event(self, step: int, ballot: _Ballot, failures: _Failures, split: Split) -> OOMEvent:
        number = ballot.num_microbatches
        tries = "" if len(failures) == 1 else f" (retry {len(failures)})"
        cure = (
            f"the same again after releasing memory{tries}"
            if number == failures[0][1]
            else f"{number} microbatches of at most {max(split.sizes)} samples{tries}"
        )
        return OOMEvent(
            self.stage,
            step,
            ballot.phase,
            ballot.requested_bytes,
            ballot.free_bytes,
            ballot.rank,
            len(failures),
            number,
            max(split.sizes),
            cure,
        )


def _how(num_microbatches: int, largest: int) -> str:
    return "whole" if num_microbatches == 1 else f"in {num_microbatches} microbatches of at most {largest} samples"


_Failures = list[tuple[Failure | None, int, int]]
"""Of each failed attempt: what failed on this rank, if anything; microbatches; samples in the largest."""


@dataclass
class _Ballot:
    """What all ranks know of a batch so far; of the failures, the first."""

    has_failed: bool = False
    num_samples: int = 0
    num_microbatches: int = 1
    requested_bytes: int | None = None
    free_bytes: int | None = None
    rank: int = -1
    phase: str = ""
    obstacle: str = ""

    def updated(self, numbers: list[int]) -> _Ballot:
        """With the numbers of one more attempt."""
        failed, _, num_samples, num_microbatches, requested, free, rank, phase = numbers
        self.has_failed, self.num_microbatches = bool(failed), num_microbatches
        self.num_samples = max(self.num_samples, num_samples)
        if failed and not self.phase:
            self.requested_bytes = requested if requested >= 0 else None
            self.free_bytes = MUCH - free if free >= 0 else None
            self.rank, self.phase = rank, ["forward", "backward"][phase]
        return self
