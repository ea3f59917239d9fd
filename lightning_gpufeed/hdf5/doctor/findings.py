"""What `examine` found out, as values, and as text of at most 100 columns."""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

__all__ = ["Diagnosis", "FileFindings", "Finding", "Severity", "render_diagnosis"]

_WIDTH = 100
_INDENT = 10


class Severity(StrEnum):
    """How bad it is: nothing, worth knowing, slow or unsafe, or wrong."""

    OK = "ok"
    NOTICE = "notice"
    WARNING = "warning"
    PROBLEM = "problem"

    @property
    def rank(self) -> int:
        """0 for what is good, larger for worse."""
        return list(Severity).index(self)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        severity: How bad it is.
        check: What was looked at, in a word or two.
        seen: What was seen.
        why: Why it matters, one sentence; empty where nothing is wrong.
        cure: The one line that cures it, None where there is nothing to cure.
        key: The dataset it is about, None if it is about the file or the machine.
    """

    severity: Severity
    check: str
    seen: str
    why: str = ""
    cure: str | None = None
    key: str | None = None


@dataclass(frozen=True)
class FileFindings:
    """What was found in one file.

    Attributes:
        path: The file, as it was named or met.
        findings: The worst first.
    """

    path: str
    findings: tuple[Finding, ...]

    @property
    def worst(self) -> Severity:
        """The worst of the findings."""
        return worst_of(self.findings)


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found.

    Attributes:
        path: The file or folder that was asked about.
        is_folder: Whether it is a folder.
        machine: Findings about this process and machine.
        files: One entry per file, by name.
        num_left: Files of the folder that were not looked at because there were too many; at least so many.
    """

    path: str
    is_folder: bool
    machine: tuple[Finding, ...]
    files: tuple[FileFindings, ...]
    num_left: int = 0

    @property
    def worst(self) -> Severity:
        """The worst of all findings."""
        return worst_of([*self.machine, *(finding for file in self.files for finding in file.findings)])

    @property
    def is_sound(self) -> bool:
        """Whether there are notices at most."""
        return self.worst.rank <= Severity.NOTICE.rank

    def as_dict(self) -> dict[str, Any]:
        """The findings in strings, numbers, lists and dicts, as JSON can hold them."""
        plain: dict[str, Any] = dataclasses.asdict(self)
        return plain | {"worst": self.worst}


def worst_of(findings: Iterable[Finding]) -> Severity:
    """The worst severity.

    Args:
        findings: Any number.

    Returns:
        `Severity.OK` if there are none.
    """
    return max((finding.severity for finding in findings), key=lambda one: one.rank, default=Severity.OK)


def render_diagnosis(diagnosis: Diagnosis) -> str:
    """Lay the findings out for people; only a path or a command that is longer exceeds 100 columns.

    Args:
        diagnosis: From `examine`.

    Returns:
        Lines without a trailing newline.
    """
    if not diagnosis.is_folder:
        findings = [*diagnosis.files[0].findings, *diagnosis.machine]
        bad = [one for one in findings if one.severity is not Severity.OK]
        ordered = [*sorted(bad, key=lambda one: -one.severity.rank), *_merged(findings)]
        return "\n".join([diagnosis.path, *(line for one in ordered for line in _lines(one))])
    lines = [diagnosis.path, *(line for one in diagnosis.machine for line in _lines(one)), ""]
    for file in diagnosis.files:
        shown = [one for one in file.findings if one.severity is not Severity.OK]
        lines += [file.path if shown else f"{file.path}: ok", *(line for one in shown for line in _lines(one))]
    return "\n".join([*lines, "", _summary(diagnosis)])


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """What is good, once for all arrays of which the same is said."""
    together: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        if one.severity is Severity.OK:
            together.setdefault((one.check, one.seen), []).append(one)
    return [
        dataclasses.replace(same[0], key=", ".join(one.key for one in same if one.key) or None)
        for same in together.values()
    ]


def _lines(finding: Finding) -> Iterator[str]:
    """One finding; its cure stays on a line of its own, so that it can be copied."""
    subject = finding.check if finding.key is None else f"{finding.key}: {finding.check}"
    yield from _wrap(finding.severity, f"{subject}: {finding.seen}")
    if finding.severity is Severity.OK:
        return
    if finding.why:
        yield from _wrap("", f"why: {finding.why}")
    if finding.cure is not None:
        yield f"{'':{_INDENT}}cure: {finding.cure}"


def _wrap(label: str, text: str) -> list[str]:
    """A label in the left column and text beside it."""
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"{label:{_INDENT}}",
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(diagnosis: Diagnosis) -> str:
    """How many files are how bad."""
    counts = Counter(file.worst for file in diagnosis.files)
    words = {
        Severity.OK: "ok",
        Severity.NOTICE: "with notices",
        Severity.WARNING: "with warnings",
        Severity.PROBLEM: "with problems",
    }
    parts = [f"{counts[severity]:,} {text}" for severity, text in words.items() if counts[severity]]
    num_files = len(diagnosis.files)
    left = f"; more than {num_files:,} are there, raise --max-files to look at the rest" if diagnosis.num_left else ""
    return f"{num_files:,} {'file' if num_files == 1 else 'files'}: {', '.join(parts)}{left}"
