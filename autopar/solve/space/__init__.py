"""Which points are searched?

A point is a mesh, a number of microbatches, a ZeRO stage, and a schedule. Input: the user's constraints and the
machine. Output: `Candidate`, a point with its sharding, cuts and simulated step, or the reason why it does not fit.

Files in reading order: `constraints.py`, `meshes.py` (factorisations of the devices), `points.py`, `lower_bounds.py`
(of a point's step), `candidates.py` (a point's cuts and simulated step), `explore.py` (meshes and points, in order).
"""
