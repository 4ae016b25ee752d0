"""How tensor-parallel layers hide their communication."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from megalight.errors import LayoutError, nearest

MAX_CTAS = 16
"""Default number of SMs that messages of ``pipelined`` may occupy."""


@dataclass(frozen=True, kw_only=True)
class TensorOptions:
    """How the collectives of split layers run beside their products. With tp=1 nothing has an effect.

    Attributes:
        overlap: a backend's name (``plain``, ``pipelined``, ``symmetric``), or ``auto``: ``symmetric`` if steps or
            layers are recorded as CUDA graphs and it can serve the layer, else ``plain``. Or a mapping from globs over
            names of split linear layers (``"*.mlp.gate_up"``) to backends; the first match decides, and layers without
            a match use ``auto``.
        pieces: number of pieces into which a product is cut, if its communication runs during it; under sequence
            parallelism a divisor of tp. None: chosen by the sizes of each product
            (:mod:`megalight.parallel.tensor.overlap.pipelined`).
        max_ctas: largest number of SMs that the messages of ``pipelined`` may occupy under NCCL; other
            backends refuse a number. None: 16.
        keep_gathered: keep the gathered input of a layer for its weight gradient, instead of gathering it again in the
            backward pass. This keeps ``tp`` times as much memory.

    Raises:
        LayoutError: ``pieces`` or ``max_ctas`` is below 1.
    """

    overlap: str | Mapping[str, str] = "auto"
    pieces: int | None = None
    max_ctas: int | None = None
    keep_gathered: bool = False

    def __post_init__(self) -> None:
        for name in ("pieces", "max_ctas"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LayoutError(f"TensorOptions.{name}={value}; it must be at least 1.")

    def kind_of(self, name: str) -> str:
        """Return the backend's name for the split layer ``name``."""
        if isinstance(self.overlap, str):
            return self.overlap
        return next((kind for pattern, kind in self.overlap.items() if fnmatch.fnmatchcase(name, pattern)), "auto")

    def check(self, names: Iterable[str], tp: int, sequence_parallel: bool) -> None:
        """Raise if an option cannot have an effect on the split layers ``names``.

        Raises:
            LayoutError: a pattern matches none of them; ``pieces`` does not divide ``tp``; ``keep_gathered`` is set,
                but nothing is gathered.
        """
        names = list(names)
        # A glob that matches nothing is a misspelled name, and its layers would go on with `auto` unnoticed.
        for pattern in [] if isinstance(self.overlap, str) else self.overlap:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                raise LayoutError(
                    f"the pattern {pattern!r} of TensorOptions.overlap matches no split layer; correct or remove it. "
                    f"There are {', '.join(names[:3]) or 'none'}{' ...' if names[3:] else ''}."
                    + nearest(pattern, names)
                )
        if sequence_parallel and self.pieces is not None and tp % self.pieces:
            raise LayoutError(
                f"TensorOptions.pieces={self.pieces} does not divide tp={tp}: a piece holds the tokens of whole ranks. "
                "Choose a divisor, or leave it out."
            )
        if self.keep_gathered and not sequence_parallel:
            raise LayoutError(
                "TensorOptions.keep_gathered=True needs sequence parallelism: without it, inputs are whole and nothing "
                "is gathered. Leave it out."
            )
