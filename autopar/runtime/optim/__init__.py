"""Optimizers on a rank: built, probed, stepped, clipped, scaled; moving averages of weights."""
