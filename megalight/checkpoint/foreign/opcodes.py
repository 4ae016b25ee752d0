"""The instructions of a pickle, checked before any of them is run: none may ask for more memory than the pickle has.

Python's unpickler in C makes room for what an instruction claims before it looks for the bytes: a pickle of 20 bytes
that stores an object as number 4,294,967,295 takes 64 GiB. Codes and arguments are those of ``pickletools``.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable

SIZES = {ord(each.code): each.arg.n if each.arg else 0 for each in pickletools.opcodes}
"""Bytes of each instruction's argument; below zero where the argument begins with its length."""

LENGTHS: dict[int, Callable[[bytes], int]] = {
    pickletools.TAKEN_FROM_ARGUMENT1: lambda field: field[0],
    pickletools.TAKEN_FROM_ARGUMENT4: lambda field: int.from_bytes(field[:4], "little", signed=True),
    pickletools.TAKEN_FROM_ARGUMENT4U: lambda field: int.from_bytes(field[:4], "little"),
    pickletools.TAKEN_FROM_ARGUMENT8U: lambda field: int.from_bytes(field[:8], "little"),
}
"""How an argument gives its own length, from its first 8 bytes."""

FIELDS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
"""Bytes of that length."""

PUT, LONG_BINPUT, FRAME, GLOBAL, INST, STOP = (ord(code) for code in ("p", "r", "\x95", "c", "i", "."))

DIGITS = 20
"""Digits of the longest number of a stored object."""


def check(data: bytes) -> None:
    """Check what each instruction claims.

    Raises:
        ValueError: it claims more bytes than there are, or a place for an object beyond all that could be stored; or
            there is no such instruction, or no end.
    """
    place, end = 0, len(data)
    while place < end:
        code = data[place]
        size = SIZES.get(code)
        if size is None:
            raise ValueError(f"byte {place} is {code}, which is no instruction of a pickle")
        if code == STOP:
            return
        start = place + 1
        if size >= 0:
            start += size
            claimed = int.from_bytes(data[place + 1 : start], "little")
            if code == FRAME and claimed > end - start:
                raise ValueError(f"at byte {place} a frame claims {claimed} bytes, and {end - start} are left")
            if code == LONG_BINPUT:
                _check_number(claimed, place)
        elif size == pickletools.UP_TO_NEWLINE:
            for _ in range(2 if code in (GLOBAL, INST) else 1):
                start = data.find(b"\n", start) + 1
                if not start:
                    raise ValueError(f"the line at byte {place} has no end")
            if code == PUT:
                line = data[place + 1 : start].strip()
                _check_number(int(line) if len(line) <= DIGITS else end, place)
        else:
            field = data[start : start + 8]
            start += FIELDS[size]
            if start > end:
                raise ValueError(f"the argument at byte {place} is cut")
            length = LENGTHS[size](field)
            if not 0 <= length <= end - start:
                raise ValueError(f"at byte {place} an object claims {length} bytes, and {end - start} are left")
            start += length
        place = start
    raise ValueError("it ends before its last instruction")


def _check_number(number: int, place: int) -> None:
    # Objects are numbered one after the other, and each takes an instruction: so no number is beyond the bytes before.
    if not 0 <= number <= place:
        raise ValueError(f"at byte {place} an object gets the number {number}, beyond all objects before")
