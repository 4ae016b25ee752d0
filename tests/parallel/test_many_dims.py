"""Parameters of more than two dims, split along any of them: initial values, real values, checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from megalight.checkpoint import views_of_parameters
from megalight.nn.canonical import CanonicalPart, canonical_tensors
from megalight.nn.init import Normal
from megalight.nn.init import initialize as initialize_whole
from megalight.parallel import shard
from megalight.parallel.apply import parallelize
from megalight.parallel.initial_values import initialize, materialize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.shard import ShardPiece, ShardSpec, check_cover
from megalight.parallel.styles import Style
from megalight.parallel.styles.style import Splitter


class Kernel(nn.Module):
    """One parameter of four dims, with stated initial values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, 4, 6, 8))
        self.initializers = {"weight": Normal(1.0)}


class Blocks(nn.Module):
    """A parameter ``[4, 3, 5]`` of four canonical tensors, which the module draws itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 3, 5))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)

    def canonical_parts(self, path: str, local: str) -> list[tuple[str, tuple[int, ...]]]:
        return [(f"{path}.{index}.{local}", (3, 5)) for index in range(4)]


class Held(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


@dataclass(frozen=True)
class Along(Style):
    """Splits ``weight`` along a dim."""

    dim: int

    def apply(self, splitter: Splitter, name: str, module: nn.Module) -> nn.Module:
        def rule(parts: Sequence[CanonicalPart], shape: tuple[int, ...], mesh: ParallelMesh) -> ShardSpec:
            if len(parts) == 1:
                return shard.along(parts, shape, mesh, dim=self.dim)
            here = parts[mesh.rank("tp") * len(parts) // mesh.tp :][: len(parts) // mesh.tp]
            pieces = [ShardPiece(p.name, p.shape, (0, 0), p.shape, p.start - here[0].start) for p in here]
            return ShardSpec(tuple(pieces), (len(here), *shape[1:]))

        weight = splitter.split(name, module, "weight", rule)
        assert weight is not None
        return Held(weight)


def models(module: type[nn.Module], dim: int, whole: nn.Module) -> list[tuple[nn.Module, dict[str, ShardSpec]]]:
    """The model of each of two ranks."""
    built = []
    for rank in range(2):
        model = copy.deepcopy(whole)
        specs = parallelize(model, ParallelizePlan({module: Along(dim)}), ParallelMesh(2, rank, tp=2))
        built.append((model, specs))
    return built


@pytest.mark.parametrize(("module", "dim"), [(Kernel, 0), (Kernel, 1), (Kernel, 2), (Kernel, 3), (Blocks, 0)])
def test_any_dim_of_any_parameter(module: type[nn.Module], dim: int) -> None:
    whole = nn.ModuleDict({"it": module().to("meta")})
    materialize(whole, "cpu")
    if module is Kernel:
        initialize_whole(whole, 5)
    else:
        initialize(whole, parallelize(whole, ParallelizePlan(), ParallelMesh()), 5)
    expected = {name: tensor.clone() for name, tensor in canonical_tensors(whole).items()}

    drawn = models(module, dim, nn.ModuleDict({"it": module().to("meta")}))
    for model, specs in drawn:
        materialize(model, "cpu")
        initialize(model, specs, 5)
    sliced = models(module, dim, whole)
    check_cover(ParallelMesh(2, tp=2), [specs for _, specs in sliced])

    found: dict[str, Tensor] = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    for rank, ((model, specs), (same, _)) in enumerate(zip(drawn, sliced, strict=True)):
        assert torch.equal(model["it"].weight, same["it"].weight)
        views = views_of_parameters(model.named_parameters(), specs, ParallelMesh(2, rank, tp=2))
        for name, view in views.items():
            for box in view.boxes:
                place = tuple(slice(o, o + s) for o, s in zip(box.offset, box.data.shape, strict=True))
                found[name][place] = box.data
    assert all(torch.equal(found[name], expected[name]) for name in expected)
