"""nvidia-cudnn-frontend: attention by cuDNN's graphs, with windows, sinks, soft caps and packed sequences.

torch calls the same library, but only for dense attention without any of these. Importing this folder imports nothing
of the package; the backend does when it is asked.
"""

from __future__ import annotations

from megalight.ops.attention import ATTENTION
from megalight.ops.common import lazy
from megalight.plugins.cudnn_frontend.support import slower, why_not
from megalight.registry import Backend


def register() -> None:
    """Add the backend."""
    # Above our own kernels, below torch's call of cuDNN.
    # Lazy: hiding it from torch's compiler imports that compiler, which takes seconds.
    attention = lazy("megalight.plugins.cudnn_frontend.attention", "attention")
    ATTENTION.register(Backend("cudnn_frontend", attention, 27, why_not, slower=slower))
