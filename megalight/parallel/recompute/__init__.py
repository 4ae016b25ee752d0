"""Activation recompute: the forward pass does not keep activations, and the backward pass computes them again.

There are two mechanisms. A *region* (a layer, consecutive layers, the attention core, an MLP) keeps its inputs and runs
again. An output that is cheap to compute (of a norm or an activation) is *discarded*: the linear layer that reads it
keeps a recipe to compute it again. Both replace the ``forward`` of module instances, so the names of modules and
parameters do not change.
"""

from megalight.parallel.recompute.apply import apply_recompute as apply_recompute
from megalight.parallel.recompute.apply import check_recompute as check_recompute
from megalight.parallel.recompute.options import RecomputeOptions as RecomputeOptions
