"""The `gpufeed` command line."""

from __future__ import annotations

from lightning_gpufeed.cli.command import main

__all__ = ["main"]
