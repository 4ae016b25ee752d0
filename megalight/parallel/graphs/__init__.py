"""CUDA graphs: GPU work that is recorded once and replayed, so that the host launches it with one call."""

from megalight.ops.common import serve_all
from megalight.parallel.graphs.modules import GRAPH_BACKENDS, GraphBackend, ModuleGraphs

GRAPH_BACKENDS.register("own")(GraphBackend(ModuleGraphs, serve_all))
