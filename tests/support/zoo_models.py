"""Rows of the zoo matrix for torchvision and Hugging Face."""

from __future__ import annotations

from support.zoo_hugging_face import HUGGING_FACE
from support.zoo_row import ZooRow
from support.zoo_torchvision import TORCHVISION

__all__ = ["ROWS", "ZooRow"]

ROWS: tuple[ZooRow, ...] = (*TORCHVISION, *HUGGING_FACE)
