"""Shrinks a CUDA shared library to some GPU architectures, or to some kernels: what is to be
carried.

What is left out of ``.nv_fatbin`` is overwritten with zeros in place. Offsets, headers and section
sizes stay, so the library loads as before but compresses far better (TransformerEngine 2.11.0's
core: 463 MB, 8.8 MB with xz when only sm_90 is kept). Little-endian ELF64 only.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

_MAGIC = 0xBA55ED50
_KIND_CUBIN = 2  # 1: PTX
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, header size, payload size
_ENTRY = struct.Struct("<HHIQ")  # kind, unknown, header size, payload size
_ARCHITECTURE_OFFSET = 28  # u32 inside the entry header
_ELF_SECTION = struct.Struct("<IIQQQQIIQQ")
_NOT_HERE = 100  # an architecture that no kept one can run: sm_100, Blackwell
# of a kernel of FlashAttention 3, mangled: its main loop's head size follows the tuple of tile
# sizes
_HEAD_SIZE = re.compile(rb"CollectiveMainloopFwdSm90ILi\d+EN4cute5tupleI.*?EEELi(\d+)ENS_")


class FatbinError(ValueError):
    """Not a library whose GPU code can be read, or one without code for an architecture that is to
    be kept."""


@dataclass(frozen=True)
class _Entry:
    kind: int
    architecture: int
    header: int
    offset: int
    size: int


def slim(library: Path, keep: Collection[int], strict: bool = False) -> dict[str, int]:
    """Zeroes the code of all other architectures in the file ``library``.

    Args:
        keep: architectures whose machine code stays, e.g. {90}. A container without any is left
            whole, so that nothing loses its only code.
        strict: nothing of such a container stays, PTX neither: a launch of its kernels finds no
        image.

    Returns:
        ``containers``, ``total_bytes`` of GPU code, ``kept_bytes``.

    Raises:
        FatbinError: the file has no GPU code, its entries do not add up, or none of it is for
        ``keep``.
    """
    total = kept = count = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as image:
        for count, (start, end) in enumerate(_containers(image, *_section(image)), 1):  # noqa: B007  # its last value
            entries = list(_entries(image, start, end))
            wanted = [
                entry
                for entry in entries
                if entry.kind == _KIND_CUBIN and entry.architecture in keep
            ]
            if not wanted and not strict:
                wanted = entries
            for entry in entries:
                total += entry.size
                if entry in wanted:
                    kept += entry.size
                elif wanted:
                    _blank(image, entry)
                else:
                    _hide(image, entry)
        image.flush()
    if kept == total:
        raise FatbinError(
            f"{library}: nothing to leave out, or no code for sm_{sorted(keep)}: {total} bytes "
            "in all"
        )
    return {"containers": count, "total_bytes": total, "kept_bytes": kept}


def slim_heads(library: Path, keep: Collection[int]) -> dict[str, int]:
    """Zeroes the kernels of FlashAttention 3 in the file ``library`` that are for other head sizes,
    and says that they are for another architecture: then a launch finds no kernel image, as on any
    GPU for which there is no code.

    Its machine code is not compressed, so that the kernels' mangled names tell what an entry holds.
    Entries without such a name, which all head sizes share, stay.

    Returns:
        ``total_bytes`` of GPU code, ``kept_bytes``.

    Raises:
        FatbinError: a head size has no kernel.
    """
    total = kept = 0
    found: set[int] = set()
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as image:
        for start, end in _containers(image, *_section(image)):
            for entry in list(_entries(image, start, end)):
                sizes = {
                    int(size)
                    for size in _HEAD_SIZE.findall(image, entry.offset, entry.offset + entry.size)
                }
                found |= sizes
                total += entry.size
                if not sizes or sizes & set(keep):
                    kept += entry.size
                else:
                    _hide(image, entry)
        image.flush()
    if lacking := sorted(set(keep) - found):
        raise FatbinError(
            f"{library}: no kernel for head sizes {lacking}; there are {sorted(found)}"
        )
    return {"total_bytes": total, "kept_bytes": kept}


def _blank(image: mmap.mmap, entry: _Entry) -> None:
    image[entry.offset : entry.offset + entry.size] = bytes(entry.size)


def _hide(image: mmap.mmap, entry: _Entry) -> None:
    """Blanks it and says that it is for another architecture: zeros must not be compiled as PTX."""
    _blank(image, entry)
    struct.pack_into("<I", image, entry.header + _ARCHITECTURE_OFFSET, _NOT_HERE)


def _section(image: mmap.mmap) -> tuple[int, int]:
    """(start, end) of .nv_fatbin in the file."""
    if image[:5] != b"\x7fELF\x02":
        raise FatbinError("not an ELF64 file")
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    sections = [_ELF_SECTION.unpack_from(image, table + i * entry_size) for i in range(count)]
    names = sections[names_index][4]
    for section in sections:
        start = names + section[0]
        if image[start : image.find(b"\0", start)] == b".nv_fatbin":
            return section[4], section[4] + section[5]
    raise FatbinError("no .nv_fatbin section: the library holds no GPU code")


def _containers(image: mmap.mmap, start: int, end: int) -> Iterator[tuple[int, int]]:
    """(first byte, end) of the payload of each container."""
    position = start
    while position + _CONTAINER.size <= end:
        magic, _, header, size = _CONTAINER.unpack_from(image, position)
        if magic != _MAGIC:
            position += 8
            continue
        payload_end = position + header + size
        yield position + header, payload_end
        position = payload_end + (-payload_end % 8)


def _entries(image: mmap.mmap, start: int, end: int) -> Iterator[_Entry]:
    """The machine-code and PTX entries of one container; they must fill it exactly."""
    position = start
    while position < end:
        kind, _, header, size = _ENTRY.unpack_from(image, position)
        (architecture,) = struct.unpack_from("<I", image, position + _ARCHITECTURE_OFFSET)
        yield _Entry(kind, architecture, position, position + header, size)
        position += header + size
    if position != end:
        raise FatbinError(f"entries end at {position:#x}, their container at {end:#x}")
