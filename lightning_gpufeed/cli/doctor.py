"""`gpufeed doctor`: prints what is wrong with files."""

from __future__ import annotations

import json
from typing import Any

from lightning_gpufeed.hdf5.doctor.doctor import examine
from lightning_gpufeed.hdf5.doctor.findings import render_diagnosis

__all__ = ["run_doctor"]

EXIT_FINDINGS = 1


def run_doctor(arguments: dict[str, Any]) -> int:
    """Look at a file or a folder and print the findings.

    Args:
        arguments: `path`, `json` and `max_files`.

    Returns:
        The exit code: 1 if there is a warning or a problem, else 0.
    """
    diagnosis = examine(arguments["path"], max_files=arguments["max_files"])
    print(json.dumps(diagnosis.as_dict(), indent=2) if arguments["json"] else render_diagnosis(diagnosis))
    return 0 if diagnosis.is_sound else EXIT_FINDINGS
