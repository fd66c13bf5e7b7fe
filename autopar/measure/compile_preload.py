"""Imports of a process that compiles regions, for its fork server: torch's compiler, which takes seconds to import."""

import autopar.measure.compile_ahead  # noqa: F401
