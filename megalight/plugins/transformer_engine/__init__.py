"""NVIDIA TransformerEngine: attention, norms, activations, weight gradients and Adam by its kernels.

Importing this folder imports nothing of the package; a backend does when its name is asked for.
"""

from __future__ import annotations

from megalight.ops.activation import ACTIVATION, GATED
from megalight.ops.adam import ADAM
from megalight.ops.attention import ATTENTION
from megalight.ops.fp8_attention import FP8_ATTENTION
from megalight.ops.linear import WGRAD
from megalight.ops.linear.low_precision import LOW_PRECISION
from megalight.ops.norm import ADD_LAYER_NORM, ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from megalight.parallel.graphs.modules import GRAPH_BACKENDS, GraphBackend
from megalight.plugins.transformer_engine import attention, graphs, kernels, low_precision
from megalight.registry import Backend

NAME = "transformer_engine"
PRIORITY = 0
"""Unused: backends of plugins are chosen only by name."""


def register() -> None:
    """Add the backends, of ops and of what lies above them."""
    ATTENTION.register(Backend(NAME, attention.attention, PRIORITY, attention.why_not))
    FP8_ATTENTION.register(Backend(NAME, attention.make, PRIORITY, attention.fp8_attention_why_not))
    RMS_NORM.register(Backend(NAME, kernels.rms_norm, PRIORITY, kernels.rms_why_not))
    ADD_RMS_NORM.register(Backend(NAME, kernels.add_rms_norm, PRIORITY, kernels.rms_why_not))
    LAYER_NORM.register(Backend(NAME, kernels.layer_norm, PRIORITY, kernels.layer_why_not))
    ADD_LAYER_NORM.register(Backend(NAME, kernels.add_layer_norm, PRIORITY, kernels.layer_why_not))
    GATED.register(Backend(NAME, kernels.gated, PRIORITY, kernels.gated_why_not))
    ACTIVATION.register(Backend(NAME, kernels.activation, PRIORITY, kernels.activation_why_not))
    WGRAD.register(Backend(NAME, kernels.accumulate, PRIORITY, kernels.weight_gradient_why_not))
    ADAM.register(Backend(NAME, kernels.adam_step, PRIORITY, kernels.adam_why_not))
    LOW_PRECISION.register(NAME)(low_precision.TransformerEngineProducts)
    GRAPH_BACKENDS.register(NAME)(GraphBackend(graphs.TransformerEngineGraphs, graphs.graphs_why_not))
