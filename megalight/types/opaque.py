"""Marks objects that recorded or repeated work uses without a copy."""

from __future__ import annotations


class Opaque:
    """A base class for arguments that are compared by identity, whatever they hold.

    Two calls have the same form only if both get the same object. Its tensors keep their addresses, and recorded work
    reads and writes them there.
    """
