"""NVIDIA Apex: backends for norms, weight gradients and Adam.

This folder does not import the package; a backend does when it is used.
"""

from __future__ import annotations

from megalight.ops.adam import ADAM
from megalight.ops.linear.wgrad import WGRAD
from megalight.ops.norm import ADD_LAYER_NORM, ADD_RMS_NORM, LAYER_NORM, RMS_NORM
from megalight.plugins.apex import adam, norm, weight_gradient
from megalight.registry import Backend

NAME = "apex"
PRIORITY = 0
"""Unused: backends of plugins are chosen only by name."""


def register() -> None:
    """Add the backends."""
    # The same names in every registry: a user asks all ops for one package with one word.
    RMS_NORM.register(Backend(NAME, norm.rms_norm, PRIORITY, norm.rms_why_not))
    ADD_RMS_NORM.register(Backend(NAME, norm.add_rms_norm, PRIORITY, norm.rms_why_not))
    LAYER_NORM.register(Backend(NAME, norm.layer_norm, PRIORITY, norm.layer_why_not))
    ADD_LAYER_NORM.register(Backend(NAME, norm.add_layer_norm, PRIORITY, norm.layer_why_not))
    WGRAD.register(Backend(NAME, weight_gradient.accumulate, PRIORITY, weight_gradient.why_not))
    ADAM.register(Backend(NAME, adam.adam_step, PRIORITY, adam.why_not))
