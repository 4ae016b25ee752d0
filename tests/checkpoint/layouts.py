"""A small made-up model under any TP x DP layout, by hand-made specs: no parallel layers needed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megalight.checkpoint import View, views_of_parameters, views_of_shards
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardPiece, ShardSpec

SHAPES = {
    "embed.word.weight": (11, 6),
    "layers.0.attention.q.weight": (8, 6),
    "layers.0.attention.k.weight": (4, 6),
    "layers.0.attention.v.weight": (4, 6),
    "layers.0.attention.proj.weight": (6, 8),
    "layers.0.mlp.gate.weight": (12, 6),
    "layers.0.mlp.up.weight": (12, 6),
    "layers.0.norm.weight": (6,),
    "layers.0.conv.weight": (8, 3, 5),
    "temperature": (),
}
STATES = ("master", "exp_avg", "exp_avg_sq")


def full(name: str) -> Tensor:
    """The whole canonical tensor: every element of every tensor is another number."""
    model = name.removeprefix("model.").removeprefix("optimizer.")
    state = next((number for number, state in enumerate(STATES, 1) if model.startswith(state + ".")), 0)
    key = model.split(".", 1)[1] if state else model
    start = 1000 * list(SHAPES).index(key) + 100_000 * state
    numbers = torch.arange(start, start + prod(SHAPES[key]), dtype=torch.float64).reshape(SHAPES[key])
    return numbers.sqrt() if state else numbers.float()


@dataclass(frozen=True)
class Layout:
    world: int
    tp: int
    level: str

    def mesh(self, rank: int) -> ParallelMesh:
        return ParallelMesh(self.world, rank, tp=self.tp)


LAYOUTS = [
    Layout(world, tp, level)
    for world, tp in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4))
    for level in ("no_shard", "optim")
]


def specs(mesh: ParallelMesh) -> dict[str, ShardSpec]:
    """Local parameter name -> its spec on this rank."""
    tp, rank = mesh.tp, mesh.rank("tp")

    def rows(name: str, parts: int = tp, index: int = rank, start: int = 0, owner: bool = True) -> ShardPiece:
        shape = SHAPES[name]
        size = (shape[0] // parts, *shape[1:])
        return ShardPiece(name, shape, (index * size[0],) + (0,) * (len(shape) - 1), size, start, (), owner)

    def stacked(*pieces: ShardPiece) -> ShardSpec:
        return ShardSpec(pieces, (sum(p.size[0] for p in pieces), *pieces[0].size[1:]))

    def whole(name: str) -> ShardSpec:
        return ShardSpec.replicated(name, SHAPES[name], owner=rank == 0)

    attention, mlp = "layers.0.attention", "layers.0.mlp"
    q = rows(f"{attention}.q.weight")
    kv = (min(tp, 2), rank * min(tp, 2) // tp)  # two KV heads: with more ranks, groups of them hold the same head
    owner = rank % max(1, tp // 2) == 0
    k = rows(f"{attention}.k.weight", *kv, q.stop, owner)
    v = rows(f"{attention}.v.weight", *kv, k.stop, owner)
    gate = rows(f"{mlp}.gate.weight")
    vocabulary = -(-11 // tp)  # rounded up: the last rank's tail is padding
    real = max(0, min(vocabulary, 11 - rank * vocabulary))
    columns = (6, 8 // tp)
    return {
        "embed.word.weight": ShardSpec(
            (ShardPiece("embed.word.weight", (11, 6), (min(11, rank * vocabulary), 0), (real, 6)),), (vocabulary, 6)
        ),
        f"{attention}.qkv.weight": stacked(q, k, v),
        f"{attention}.proj.weight": ShardSpec(
            (ShardPiece(f"{attention}.proj.weight", (6, 8), (0, rank * columns[1]), columns),), columns
        ),
        f"{mlp}.gate_up.weight": stacked(gate, rows(f"{mlp}.up.weight", start=gate.stop)),
        "layers.0.norm.weight": whole("layers.0.norm.weight"),
        "layers.0.conv.weight": stacked(rows("layers.0.conv.weight")),
        "temperature": whole("temperature"),
    }


def local(spec: ShardSpec, prefix: str, filled: bool) -> Tensor:
    """The local parameter, filled from the canonical tensors, or with NaN; padding is always -1."""
    example = full(prefix + spec.pieces[0].name)
    parameter = torch.full(spec.shape, -1, dtype=example.dtype)
    for piece in spec.pieces:
        box = tuple(slice(o, o + s) for o, s in zip(piece.offset, piece.size, strict=True))
        piece.view(parameter).copy_(full(prefix + piece.name)[box] if filled else torch.tensor(torch.nan))
    return parameter


@dataclass
class Shard:
    """A flat interval of one bucket of parameters laid end to end with odd gaps."""

    slots: list[tuple[ShardSpec, int]]
    start: int
    stop: int
    replicas: tuple[int, ...] = (0,)
    place: int = 0

    def intervals(self) -> Iterator[tuple[ShardPiece, int, int, int]]:
        for spec, offset in self.slots:
            low, high = max(self.start, offset), min(self.stop, offset + spec.numel)
            for piece, first, last in spec.cut(low - offset, high - offset) if low < high else ():
                yield piece, first, last, offset + piece.start + first - self.start


class Model:
    """One rank's parameters and optimizer state."""

    def __init__(self, layout: Layout, rank: int, filled: bool) -> None:
        self.mesh = layout.mesh(rank)
        self.layout = layout
        self.specs = specs(self.mesh)
        self.parameters = {name: local(spec, "model.", filled) for name, spec in self.specs.items()}
        self.shards: list[Shard] = []
        self.states: dict[str, list[Tensor]] = {state: [] for state in STATES}
        names = list(self.specs)
        for bucket in (names[:4], names[4:]):
            slots, end = [], 0
            for name in reversed(bucket):
                slots.append((self.specs[name], end))
                end += self.specs[name].numel + 1
            dp, index = self.mesh.dp, self.mesh.rank("dp")
            size = -(-end // dp)
            start, stop = (index * size, (index + 1) * size) if layout.level == "optim" else (0, size * dp)
            held = () if layout.level == "optim" else (self.mesh.ranks("dp"), index)
            self.shards.append(Shard(slots, start, stop, *held))
            for state in STATES:
                flat = torch.full((size * dp,), -1.0, dtype=torch.float64)
                for spec, offset in slots:
                    values = local(spec, f"optimizer.{state}.", filled)
                    flat[offset : offset + spec.numel] = values.flatten()
                self.states[state].append(flat[start:stop].clone())

    def views(self) -> dict[str, View]:
        views = views_of_parameters(self.parameters.items(), self.specs, self.mesh, prefix="model.")
        for state, tensors in self.states.items():
            prefix = f"optimizer.{state}."
            views |= views_of_shards(tensors, self.shards, prefix=prefix)
        return views

    def differs(self, other: Model) -> list[str]:
        """What is not bitwise equal, padding included."""
        found = [name for name, value in self.parameters.items() if not torch.equal(value, other.parameters[name])]
        for state, tensors in self.states.items():
            pairs = zip(tensors, other.states[state], strict=True)
            found += [f"{state}{number}" for number, (a, b) in enumerate(pairs) if not torch.equal(a, b)]
        return found
