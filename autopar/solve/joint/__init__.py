"""Cuts and shardings in one integer program."""
