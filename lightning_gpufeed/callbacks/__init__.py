"""Callbacks for a Lightning Trainer."""

from __future__ import annotations

from lightning_gpufeed.callbacks.batch_echo import BatchEcho
from lightning_gpufeed.callbacks.feed_monitor import FeedMonitor
from lightning_gpufeed.callbacks.oom_recovery import OOMRecovery

__all__ = ["BatchEcho", "FeedMonitor", "OOMRecovery"]
