"""Callbacks for a Lightning Trainer."""

from __future__ import annotations

from lightning_gpufeed.callbacks.batch_echo import BatchEcho

__all__ = ["BatchEcho"]
