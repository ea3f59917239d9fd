"""Ends the waiting of a PyTorch Lightning user's GPU, without changing the mathematics."""

from __future__ import annotations

__version__ = "0.1.0"
