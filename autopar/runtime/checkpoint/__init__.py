"""Checkpoints: what a rank saves, and how it comes back under another plan."""
