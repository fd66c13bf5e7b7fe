"""Which sharding strategy does every group run?

Input: a `StrategyGraph`. Output: `Shardings`, the index of a strategy per group with a proven bound.

Files in reading order: `cost.py` (cost of given strategies), `variables.py` (binaries and agreement on shared
weights), `program.py` (objective), `solve.py` (one sharding, or several from fastest to smallest), `stages.py` (which
of several each stage of a pipeline has).
"""
