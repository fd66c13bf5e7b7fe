"""Sharding strategies of each group of operations, and their costs."""
