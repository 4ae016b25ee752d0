"""RMS norms, alone or with the sum before them."""

from __future__ import annotations

from torch import Tensor, nn

from megalight.models.fused.part import Part
from megalight.ops.norm import add_rms_norm, rms_norm


class Norm(Part):
    """Has the attributes of an RMS norm of ``transformers``."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None = None, with_sum: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Norm the last dim of ``[..., h]``.

        Args:
            hidden_states: the input, or one term of it.
            residual: the other term.
            with_sum: also return the sum that was normed; its gradient is added in the same kernel.
        """
        if not with_sum:
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)
        return add_rms_norm(hidden_states, residual, self.weight, self.variance_epsilon)
