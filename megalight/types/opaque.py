"""Objects that pass through recorded or repeated work as they are."""

from __future__ import annotations


class Opaque:
    """Nothing that is computed has another form because of what such an object holds: it is the same, or another one.

    Its tensors stay where they are, and recorded work reads and writes them there.
    """
