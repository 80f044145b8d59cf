"""Which weights a checkpoint holds, in sixteen characters."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

# Bytes read at both ends of every tensor: training changes all of them, and checkpoints of many gigabytes are told
# apart in a moment.
_SAMPLE = 4096


def checkpoint_fingerprint(directory: Path | str, *, without: tuple[str, ...] = ()) -> str:
    """A short hash of the names, types, shapes and sampled values of a checkpoint's safetensors.

    Tensors whose names begin with one of ``without`` do not count.

    Raises:
        FileNotFoundError: no safetensors in the directory.
        ValueError: a file that is not a safetensors file.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {directory}")
    entries: dict[str, bytes] = {}
    for file in files:
        entries.update(_tensors(file))
    digest = hashlib.sha256()
    for name in sorted(n for n in entries if not n.startswith(without)):
        digest.update(name.encode())
        digest.update(entries[name])
    return digest.hexdigest()[:16]


def language_fingerprint(target_dir: Path | str) -> str:
    """The fingerprint of a target's language tower: text behaviour does not change with the vision tower."""
    return checkpoint_fingerprint(target_dir, without=("visual.", "model.visual."))


def _tensors(file: Path) -> dict[str, bytes]:
    """Description and sampled bytes of every tensor (the format: header length, JSON header, data)."""
    with file.open("rb") as handle:
        try:
            length = int.from_bytes(handle.read(8), "little")
            header = json.loads(handle.read(length))
        except (ValueError, MemoryError, OverflowError) as error:
            raise ValueError(f"{file} is not a safetensors file") from error
        found = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            handle.seek(begin)
            values = handle.read(min(_SAMPLE, end - begin))
            handle.seek(max(begin, end - _SAMPLE))
            values += handle.read(min(_SAMPLE, end - begin))
            found[name] = f"{entry['dtype']}{entry['shape']}".encode() + values
        return found
