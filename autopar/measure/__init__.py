"""Clocks and processes that measure: a machine for its cost model, compiled regions for a plan."""
