"""Files of Weights & Biases' offline runs, read to find out how far a run was logged.

A ``.wandb`` file is a LevelDB log: after 7 bytes, blocks of 32 KiB (the first one shorter) with chunks. A chunk has a
header of 7 bytes (checksum, length, kind), and is a whole record or its first, middle or last part. A record is a
protobuf message of wandb's, the same for all versions, since `wandb sync` uploads old files too.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autopar.train.timm_optional import needed

BLOCK_BYTES = 1 << 15
CHUNK_HEADER = struct.Struct("<IHB")  # checksum, length, kind
WHOLE, LAST = 1, 4  # kinds of chunks that end a record


def history(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a run's history, by name of figure; those before the first that a kill has cut off."""
    record_type = needed("wandb.proto.wandb_internal_pb2", "Wandb", "wandb", "tracking").Record
    for data in records(path.read_bytes()):
        record = record_type.FromString(data)
        if record.HasField("history"):
            items = record.history.item
            yield {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def records(data: bytes) -> Iterator[bytes]:
    """The whole records in the bytes of a file."""
    position, parts = CHUNK_HEADER.size, []  # the file's own header is as long as that of a chunk
    while position + CHUNK_HEADER.size <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < CHUNK_HEADER.size:  # a block ends with zeros where no header fits
            position += left
            continue
        _, length, kind = CHUNK_HEADER.unpack_from(data, position)
        start = position + CHUNK_HEADER.size
        position = start + length
        if kind == 0 or position > len(data):
            return
        parts.append(data[start:position])
        if kind in (WHOLE, LAST):
            yield b"".join(parts)
            parts = []
