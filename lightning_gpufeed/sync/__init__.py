"""Gradients on the wire: which gradient is computed when and sent when, and what a step takes then. Pure so far."""
