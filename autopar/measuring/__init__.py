"""Operations timed on the device at hand, as they will run: compiled regions and their backwards, kept on disk."""

from autopar.measuring.deciding import decided
from autopar.measuring.timekeeper import timekeeper_for

__all__ = ["decided", "timekeeper_for"]
