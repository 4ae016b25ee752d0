"""Activation recompute: what a forward pass need not keep, because the backward pass makes it again.

Two mechanisms: a *region* (a layer, consecutive layers, attention proper, an MLP) keeps its inputs and runs again; an
output that is cheap to make (of a norm or an activation) is *discarded*, and the linear layer that reads it keeps how
to make it again. Both act on the ``forward`` of module instances: names of modules and parameters stay as they are.
"""

from megalight.parallel.recompute.apply import apply_recompute as apply_recompute
from megalight.parallel.recompute.apply import check_recompute as check_recompute
from megalight.parallel.recompute.options import Recompute as Recompute
