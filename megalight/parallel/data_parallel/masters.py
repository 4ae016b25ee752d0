"""The dtype of masters: the tensors that the optimizer updates."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel.layout import Kind


def masters_of(kind: Kind, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the masters of parameters of one kind.

    Args:
        wanted: a dtype, for parameters whose values it holds exactly; None: float32 or wider.
    """
    # Small updates vanish in half precision: a step is often below half a unit in the last place of the weight. So
    # float32, unless somebody asks for less.
    if wanted is not None and _holds(wanted, kind):
        return wanted
    return torch.promote_types(kind.param_dtype, torch.float32)


def check_masters(kinds: Sequence[Kind], wanted: torch.dtype | None) -> None:
    """Check that some parameters can have the masters that were asked for.

    Raises:
        ConfigurationError: none can, or parameters are codes.
    """
    if wanted is None or not kinds:
        return
    name = str(wanted).removeprefix("torch.")
    if wanted.itemsize < 4 and any(kind.codes is not None for kind in kinds):
        raise ConfigurationError(
            f"data_parallel.master_dtype={name!r} with weights stored as 8-bit codes (primary_weights), which are cast "
            "from float32 masters; leave one of the two out."
        )
    if not any(_holds(wanted, kind) for kind in kinds):
        found = ", ".join(sorted({str(kind.param_dtype).removeprefix("torch.") for kind in kinds}))
        raise ConfigurationError(
            f"data_parallel.master_dtype={name!r} and weights in {found}, whose values such masters cannot hold. Leave "
            "it out, or train bfloat16 weights: Trainer(precision='bf16-true'), or 'bf16-mixed' with MegatronStrategy."
        )


def _holds(wanted: torch.dtype, kind: Kind) -> bool:
    return torch.promote_types(kind.param_dtype, wanted) == wanted
