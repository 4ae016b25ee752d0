"""Our fused ops inside models of ``transformers``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from megalight.errors import ConfigurationError
from megalight.models.fused import FAMILIES, fuse
from megalight.parallel.transform import ModelTransform, register


@register
@dataclass(frozen=True)
class Fused(ModelTransform):
    """Lets modules of known families of ``transformers`` run our ops: see :func:`megalight.models.fused.fuse`."""

    name: ClassVar[str] = "fused"

    def change(self, model: nn.Module) -> None:
        """Change the classes of the known modules. Names, parameters and plans stay.

        Raises:
            ConfigurationError: there is none.
        """
        if not fuse(model):
            raise ConfigurationError(
                f"FusedOps finds no decoder layer in {type(model).__name__} that it knows: it serves models of "
                f"transformers of the families {', '.join(FAMILIES)}, and Megalight's own models run fused ops "
                "anyway. Remove FusedOps."
            )
