"""Adapters of experts in the format of ``peft``.

Earlier releases of ``transformers`` had a linear layer for each projection of each expert. Version 5 stacks them:
``gate_up_proj [E, 2 f, h]`` and ``down_proj [E, h, f]``. Folders with a pair ``A, B`` for each layer of an expert are
written here; ``peft`` puts them together where experts are stacked. What it saves then has one pair for a whole
stack, which is cut here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isclose, sqrt
from typing import Any

from torch import Tensor

from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.transforms.dora import DoRA
from megalight.models.transforms.lora import LoRA
from megalight.nn.adapter import tensor_name

GATE_UP, DOWN = "gate_up_proj", "down_proj"
PARTS = "gate", "up"
"""What ``gate_up_proj`` holds, one after the other."""
MERGE = "Merge these adapters into their base with peft (merge_and_unload), and read the merged model."


@dataclass(frozen=True)
class ExpertLayer:
    """A projection of an expert, a linear layer of its own in files of ``transformers``.

    Attributes:
        stack: the path of our stack of experts.
        index: the expert's.
        projection: ``gate``, ``up`` or ``down``.
        shape: of its weight, ``[out, in]``.
    """

    stack: str
    index: int
    projection: str
    shape: tuple[int, int]

    @property
    def target(self) -> str:
        """The name under which all experts of the stack are adapted."""
        return f"{self.stack}.{self.projection}"


def check_export(
    lora: LoRA, adapted: Collection[str], modules: Mapping[str, str], experts: Mapping[str, ExpertLayer]
) -> None:
    """Check that ``peft`` can put the adapters of experts together.

    Args:
        lora: the adapter.
        adapted: our names of the adapted matrices, some of them of experts.
        modules: our names of all matrices -> their modules.
        experts: our names of those of experts.

    Raises:
        ConfigurationError: it is a DoRA; a projection of some experts has no adapter; or a layer that is not an
            expert's has the name of their layers.
    """
    merge = "Merge the adapters instead (megalight merge)."
    if isinstance(lora, DoRA):
        raise ConfigurationError(f"peft has no DoRA for experts. {merge}")
    if missing := [name for name in experts if name not in adapted]:
        raise ConfigurationError(
            f"{missing[0]} has no adapter; peft adapts gate, up and down of all experts together, or none. {merge}"
        )
    leaves = {modules[name].rpartition(".")[2] for name in experts}
    others = [name for name in adapted if name not in experts and modules[name].rpartition(".")[2] in leaves]
    if others:
        raise ConfigurationError(
            f"{others[0]} is {modules[others[0]]} in transformers, and peft takes adapters of that name for those of "
            f"experts. {merge}"
        )


def check_config(values: Mapping[str, Any], folder: object) -> None:
    """Check the settings of a folder with adapters of whole stacks (``target_parameters``).

    Raises:
        ConfigurationError: a parameter is not one of stacked experts, or its adapters are scaled in another way.
    """
    for name in values["target_parameters"]:
        if str(name).rpartition(".")[2] not in (GATE_UP, DOWN):
            raise ConfigurationError(
                f"{folder} adapts the parameter {name!r}; only {GATE_UP} and {DOWN} of experts can be read. {MERGE}"
            )
    ranks, alphas = (values.get(f"{each}_pattern") or {} for each in ("rank", "alpha"))
    power = sqrt if values.get("use_rslora") else float
    for pattern in {*ranks, *alphas}:
        rank, alpha = ranks.get(pattern, values["r"]), alphas.get(pattern, values["lora_alpha"])
        twice = pattern.endswith(GATE_UP) and rank == 2 * values["r"] > 0 and isinstance(alpha, int | float)
        if not (twice and isclose(alpha / power(rank), values["lora_alpha"] / power(values["r"]))):
            raise ConfigurationError(
                f"{folder} has rank {rank} and alpha {alpha} for {pattern!r}; only twice r={values['r']} with the same "
                f"scale can be read, and for {GATE_UP} alone. {MERGE}"
            )


def cut(
    tensors: Mapping[str, Tensor], rank: int, experts: Iterable[ExpertLayer], adapter: str, folder: object
) -> Iterator[tuple[str, Tensor]]:
    """Yield our tensors, by name, of adapters of whole stacks.

    A pair of ``gate_up_proj`` becomes two: ``gate`` and ``up`` have the same ``A``, and a half of ``B`` each. If it has
    twice the rank, ``peft`` put it together from two pairs, and these are returned.

    Args:
        tensors: what the file holds of stacks, by name: ``A [E r, in]`` and ``B [out, r E]``.
        rank: ``r`` of the folder.
        experts: the projections of all experts of the base.
        adapter: the name that the adapter gets.
        folder: for messages.

    Raises:
        CheckpointError: the shapes are those of no stack in the base.
        ConfigurationError: a pair of twice the rank was trained as a whole, so that it is not two pairs.
    """
    # Paths differ between releases of transformers, but the numbers of layers do not.
    stacks: dict[tuple[str, ...], list[ExpertLayer]] = {}
    for layer in experts:
        stacks.setdefault(_numbers(layer.stack), []).append(layer)
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        path, _, matrix = name.removesuffix(".weight").rpartition(".lora_")
        pairs.setdefault(path, {})[matrix] = tensor
    for path, pair in pairs.items():
        layers = stacks.get(_numbers(path), [])
        count = 1 + max((layer.index for layer in layers), default=0)
        shapes = {layer.projection: layer.shape for layer in layers}
        if pair.keys() != {"A", "B"} or not layers or not _fits(pair, count):
            raise CheckpointError(f"{folder} adapts {path!r}, which is no such stack in the base. Name its base.")
        down = pair["A"].reshape(count, -1, pair["A"].shape[1])
        # The expert counts fastest there.
        up = pair["B"].reshape(len(pair["B"]), -1, count).permute(2, 0, 1)
        size, width = (up.shape[1], down.shape[2]), down.shape[1]
        # The inner one of two stacks is called `base_layer`, whichever it is, but its shape shows it.
        if size == shapes["down"] and width == rank:
            found = {"down": (down, up)}
        elif size == (2 * shapes["up"][0], shapes["up"][1]) and width == rank:
            found = {part: (down, half) for part, half in zip(PARTS, up.chunk(2, 1), strict=True)}
        elif size == (2 * shapes["up"][0], shapes["up"][1]) and width == 2 * rank:
            halves = [half.chunk(2, 2) for half in up.chunk(2, 1)]
            if halves[0][1].any() or halves[1][0].any():
                raise ConfigurationError(
                    f"{folder} has rank {width} for {path}, trained as a whole, and rank {rank} elsewhere; ranks that "
                    f"differ by layer cannot be read. {MERGE}"
                )
            found = {
                part: (half, halves[place][place])
                for place, (part, half) in enumerate(zip(PARTS, down.chunk(2, 1), strict=True))
            }
        else:
            raise CheckpointError(
                f"{folder} adapts {path!r} with A {tuple(pair['A'].shape)} and B {tuple(pair['B'].shape)}, which fit "
                "no stack of the base. Name its base."
            )
        for layer in layers:
            if layer.projection in found:
                for matrix, stacked in zip("AB", found[layer.projection], strict=True):
                    name = f"{layer.stack}.{layer.index}.{layer.projection}"
                    yield tensor_name(name, matrix, adapter), stacked[layer.index].contiguous()


def _fits(pair: Mapping[str, Tensor], count: int) -> bool:
    """Return whether two tensors are matrices of so many experts."""
    a, b = pair["A"], pair["B"]
    return a.ndim == b.ndim == 2 and len(a) > 0 and len(a) % count == 0 and len(a) == b.shape[1]


def _numbers(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split(".") if part.isdecimal())
