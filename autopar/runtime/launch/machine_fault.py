"""Exceptions of a rank whose cause may be its machine, so that errors can point to ``autopar doctor``."""

from __future__ import annotations

import errno

COMPILERS = ("torch._inductor", "torch._dynamo", "triton")  # modules of exceptions
# No process, no open file, no memory, no space on the disk.
EXHAUSTED = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC)


def may_be_of_machine(error: BaseException) -> bool:
    """Whether a compiler failed or the system refused a resource, in an error or one of its causes."""
    cause: BaseException | None = error
    while cause is not None:
        if type(cause).__module__.startswith(COMPILERS) or (isinstance(cause, OSError) and cause.errno in EXHAUSTED):
            return True
        cause = cause.__cause__
    return False
