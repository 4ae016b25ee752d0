"""What all fused classes share: they are derived from a class of ``transformers`` as well."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn


class Part(nn.Module):
    """Goes before a class of ``transformers`` among the bases of a fused class."""

    @classmethod
    def fits(cls, module: Any) -> bool:
        """Return whether a module of that class computes what this class does. Default: it does."""
        return True

    @classmethod
    def of_transformers(cls) -> type:
        """Return the class of ``transformers``."""
        return next(kind for kind in cls.__mro__ if kind.__module__.startswith("transformers."))

    @classmethod
    def beside(cls, name: str) -> Any:
        """Return what the file of that class has under a name."""
        return getattr(sys.modules[cls.of_transformers().__module__], name)
