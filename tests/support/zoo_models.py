"""Rows of the zoo matrix: families of timm, torchvision, Hugging Face and diffusers."""

from __future__ import annotations

from support import zoo_timm
from support.zoo_hugging_face import HUGGING_FACE
from support.zoo_row import ZooRow
from support.zoo_torchvision import TORCHVISION

ROWS: tuple[ZooRow, ...] = (*zoo_timm.ROWS, *TORCHVISION, *HUGGING_FACE)
