"""Find the modules that are recorded one by one: layers, or blocks in them, of a model and of its vision tower."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import nn

from megalight.errors import ConfigurationError
from megalight.nn.moe import MoE
from megalight.parallel.graphs.backends import Named
from megalight.parallel.layers import depth_layers_of, layers_of, tower_layers_of
from megalight.strategies.megatron import MegatronStrategy

log = logging.getLogger(__name__)


def roots_of(strategy: MegatronStrategy) -> list[nn.Module]:
    """Return the parts of the model on this rank that run by themselves: its chunks, and a tower beside them."""
    model = strategy.parallel_model
    return [*strategy.chunks, *(() if model is None or model.grafted is None else (model.grafted.root,))]


def lanes_of(strategy: MegatronStrategy, scope: str, towers: bool) -> list[list[Named]]:
    """Return the modules of each chunk, and then those of a tower, in the order in which they run.

    Args:
        towers: whether towers are recorded, too. They are no part of the schedule of chunks.

    Raises:
        ConfigurationError: as :func:`parts_of`.
    """
    chunks, roots = strategy.chunks, roots_of(strategy)
    lanes = [parts_of(chunk, scope) for chunk in chunks]
    # A tower beside is in the tree of the first chunk, too, where it does not run.
    holders = roots[len(chunks) :] or chunks
    return lanes + [found for root in holders if towers and (found := tower_parts_of(root, scope))]


def parts_of(chunk: nn.Module, scope: str) -> list[Named]:
    """Return the layers of a chunk, or their attention (and routers, with scope ``router``), by name and in order.

    Raises:
        ConfigurationError: the chunk has no layers, or they have no attention.
    """
    if tower_layers_of(chunk) and not hasattr(chunk, "layers"):  # a tower on ranks of its own
        return []
    by_index = layers_of(chunk, f"CUDAGraph(scope={scope!r})")
    layers = [(f"layers.{index}", layer) for index, layer in by_index.items()] + list(depth_layers_of(chunk).items())
    return [part for name, layer in layers for part in _parts(name, layer, scope)]


def tower_parts_of(chunk: nn.Module, scope: str) -> list[Named]:
    """Return the same of the vision tower in a chunk; nothing without a tower, or if these parts are recomputed whole.

    Parts without a gradient are left out: frozen layers before the first that is trained.
    """
    layers = tower_layers_of(chunk)
    if not layers:
        return []
    tower = chunk.get_submodule("embed.tower")
    behind = "layers.", "output_norm."
    differs = any(p.requires_grad for name, p in tower.named_parameters() if not name.startswith(behind))
    found = list[Named]()
    for name, layer in layers.items():
        found += [part for part in _parts(name, layer, scope) if differs or _trained(part[1])]
        differs = differs or _trained(layer)
    if any("forward" in module.__dict__ for module in (*layers.values(), *(module for _, module in found))):
        log.info("the vision tower is not recorded with scope=%r, as such parts of it are recomputed whole", scope)
        return []
    return found


def _parts(name: str, layer: nn.Module, scope: str) -> Iterator[Named]:
    if scope == "layer":
        yield name, layer
        return
    if not isinstance(getattr(layer, "attention", None), nn.Module):
        raise ConfigurationError(
            f"{name} ({type(layer).__name__}) has no module `attention`; give it that name, or use scope='layer'"
        )
    yield f"{name}.attention", layer.attention  # type: ignore[misc]
    if scope == "router" and isinstance(mlp := getattr(layer, "mlp", None), MoE):
        yield f"{name}.mlp.router", mlp.router


def _trained(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
