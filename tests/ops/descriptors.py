"""Finds products whose blocks in shared memory depend on the way by which the machine came to them.

A product of Hopper reads where its blocks lie from uniform registers. An assembler that keeps one value for two
branches may set it in one of them only (docs/performance/log.md): then the other multiplies whatever lies there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_TARGET = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")
_ALWAYS = re.compile(r"(BRA(\.\w+)*\s+0x|EXIT|RET)")
_WIDE = {".64": 2, ".128": 4}


class Instruction(NamedTuple):
    """One instruction of SASS.

    Attributes:
        address: where it lies.
        text: what it says, with its predicate.
    """

    address: int
    text: str


def ambiguous(sass: str) -> list[str]:
    """Return the products, as text, that read a uniform register which more than one instruction may have written.

    Args:
        sass: what ``cuobjdump -sass`` prints.
    """
    listed = [Instruction(int(address, 16), text) for address, text in _LINE.findall(sass)]
    before = _predecessors(listed)
    written = [_written(text) for _, text in listed]
    found = []
    for index, (address, text) in enumerate(listed):
        for register in _read(text):
            sources = _sources(index, register, listed, before, written)
            if len(sources) > 1:
                where = ", ".join(f"{listed[source].address:#x}" for source in sorted(sources))
                found.append(f"{address:#x} {text}: UR{register} comes from {where}")
    return found


def _read(text: str) -> Iterator[int]:
    """Return the uniform registers of a product's blocks: two for each that lies in shared memory."""
    place = re.search(r"gdesc\[UR(\d+)\]", text)
    if "HGMMA" in text and place is not None:
        first = int(place.group(1))
        # The left factor comes first, if it is not in registers.
        left = re.search(r"HGMMA\S*\s+R\d+,\s*gdesc", text) is not None
        yield from range(first if left else first + 2, first + 4)


def _written(text: str) -> range:
    """Return the uniform registers that an instruction writes."""
    plain = _PREDICATE.sub("", text)
    found = re.match(r"(\S+)\s+UR(\d+)\s*,", plain)
    if found is None:
        return range(0)
    count = next((width for part, width in _WIDE.items() if part in found.group(1)), 1)
    return range(int(found.group(2)), int(found.group(2)) + count)


def _predecessors(listed: list[Instruction]) -> list[list[int]]:
    """Return, for each instruction, those that may be the one before it."""
    number = {address: index for index, (address, _) in enumerate(listed)}
    before: list[list[int]] = [[] for _ in listed]
    for index, (_, text) in enumerate(listed):
        target = _TARGET.search(text)
        if target is not None and (to := number.get(int(target.group(1), 16))) is not None:
            before[to].append(index)
        if not _ALWAYS.match(text) and index + 1 < len(listed):
            before[index + 1].append(index)
    return before


def _sources(
    index: int, register: int, listed: list[Instruction], before: list[list[int]], written: list[range]
) -> set[int]:
    """Return the instructions that may have written a register last."""
    seen, waiting, found = set(), list(before[index]), set()
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        if register in written[at]:
            found.add(at)
            if not listed[at].text.startswith("@"):
                continue
        waiting += before[at]
    return found
