"""Imports of a process that compiles regions, for its fork server: torch's compiler, which takes seconds to import."""

import torch._inductor.compile_fx  # noqa: F401  # not public, as all that torch.compile imports at its first call

import autopar.measure.compile_ahead  # noqa: F401
