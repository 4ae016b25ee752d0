"""The logistic function in kernels, in few instructions."""

from __future__ import annotations

from megalight.ops.jit import LOG2E, Value, jit, tl


@jit
def sigmoid(x: Value) -> Value:
    """Return ``1 / (1 + exp(-x))`` of float32 values, within some units of the last digit.

    Division and powers of e take further instructions for numbers near the ends of their range. A power of 2 and a
    reciprocal root do not; where the power overflows, the root is 0, as is the result.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return root * root
