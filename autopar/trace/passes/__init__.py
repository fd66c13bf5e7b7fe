"""Rewrites of a traced graph: random operations, autocast, bfloat16 parameters."""
