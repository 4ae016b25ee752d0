"""Adapters in the format of ``peft``: a folder with ``adapter_config.json`` and ``adapter_model.safetensors``.

The values of ``A`` and ``B`` are the same in both formats, so that both ways keep every bit.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isclose, sqrt
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from megalight import checkpoint
from megalight.checkpoint.disk.files import PathLike, sync_directory, write_file
from megalight.checkpoint.disk.publish import absolute, begin_folder, check_new, place
from megalight.checkpoint.foreign.transformers_folder import is_folder, json_of, read_config
from megalight.checkpoint.ranks import alone
from megalight.checkpoint.sources import FullPrecision, TensorSource
from megalight.checkpoint.view import views_of_source
from megalight.errors import CheckpointError, ConfigurationError, nearest
from megalight.models.family import Family, WeightConversion, family, family_of_transformers
from megalight.models.hugging_face.weights import TensorMapping
from megalight.models.loading import (
    BASE,
    PREFIX,
    check_held,
    companions_of,
    description,
    initial_config,
    initial_source,
    saved_config,
    serving,
    shapes_of,
)
from megalight.models.transforms import describe
from megalight.models.transforms.lora import DoRA, LoRA, linear_layers, matches
from megalight.models.transforms.saved import chosen_adapter, tensors_of
from megalight.nn.adapter import DEFAULT, parse_tensor_name, tensor_name
from megalight.nn.canonical import canonical_tensors, parts
from megalight.parallel.source import Target
from megalight.parallel.transform import apply_transforms

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
ROOT = "base_model.model."
"""Prefix of all names in a file of ``peft``, before the name in ``transformers``."""

COPY = ".base_layer.weight"
"""End of names of weights of the base that ``peft`` saves along: heads and embeddings that have adapters."""

MAGNITUDE = "magnitude_vector"

DEFAULTS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    # Others begin by changing the base, so that their adapters belong to what is left of it.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "mica"),
    "lora_bias": (False, None),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "use_bdlora": (None, False),
    "use_qalora": (False, None),
}
"""Settings of ``peft`` that change what a model computes, and the values of them that we have."""

OF_STACKS = "target_parameters", "rank_pattern", "alpha_pattern"
"""Those that adapters of stacked experts have."""

NUMBER, SWITCH = (int, float), (bool, type(None))
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "r": ((int,), "a whole number"),
    "lora_alpha": (NUMBER, "a number"),
    "lora_dropout": (NUMBER, "a number"),
    "use_rslora": (SWITCH, "true or false"),
    "use_dora": (SWITCH, "true or false"),
}
"""Settings that are read, their types and the word for them."""


def is_adapter(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` looks like a folder that ``save_pretrained`` of ``peft`` wrote."""
    return (place(path) / CONFIG).is_file()


def export_adapter(path: str | os.PathLike[str], output: str | os.PathLike[str], adapter: str | None = None) -> int:
    """Write an adapter of a checkpoint as a folder that ``PeftModel.from_pretrained`` reads.

    Args:
        path: the checkpoint. Its base is not read.
        output: the folder to write, which appears when it is complete.
        adapter: the adapter's name, which the folder does not hold. None: the only one.

    Returns:
        the number of adapted weights.

    Raises:
        CheckpointError: the checkpoint is incomplete or has no adapters, not this one, or several and none is named;
            or ``output`` is there already.
        ConfigurationError: ``transformers`` has no such model, or stores an adapted weight fused with others; or
            ``peft`` cannot adapt these experts.
    """
    opened = checkpoint.open(path)
    described = description(opened)
    transforms = serving(described)
    if not transforms or not all(isinstance(each, LoRA) for each in transforms):
        kinds = ", ".join(type(each).__name__ for each in transforms) or "no adapters"
        raise CheckpointError(f"checkpoint {opened.path} has {kinds}; a folder of peft holds one LoRA.")
    lora, known = chosen_adapter(opened, adapter), family(described["family"])
    config = saved_config(described, opened.path)
    modules, transposed, experts, _ = _modules(known, config)
    source = FullPrecision(opened)
    parsed = {name: parse_tensor_name(name.removeprefix(PREFIX)) for name in tensors_of(opened, lora.adapter)}
    adapted = {each[0] for each in parsed.values() if each is not None}
    if fused := sorted(adapted - modules.keys()):
        raise ConfigurationError(
            f"{fused[0]} is part of a fused or stacked weight in transformers, where peft adapts only the whole. Merge "
            "the adapters instead (megalight merge)."
        )
    has_experts = not adapted.isdisjoint(experts)
    if has_experts:
        check_export(lora, adapted, modules, experts)
    tensors: dict[str, Tensor] = {}
    targets: list[str] = []
    with alone() as group:
        for name, each in parsed.items():
            assert each is not None
            stored, (around, matrix, _) = source.tensors[name], each
            data = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
            source.fill([Target(name, stored.shape, (0,) * data.ndim, data)], strict=False, process_group=group)
            # peft leaves the last name of magnitudes out.
            leaf = MAGNITUDE if matrix == MAGNITUDE else f"{matrix}.weight"
            tensors[f"{ROOT}{modules[around]}.lora_{leaf}"] = data
            targets += [modules[around]] if matrix == "A" else []
    # Where peft puts gate and up of experts together, it doubles rank and alpha, which keeps their quotient alone.
    plain = has_experts and lora.rank_stabilized
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if known.generates else None,
        "base_model_name_or_path": None,
        "r": lora.rank,
        "lora_alpha": lora.alpha * math.sqrt(lora.rank) if plain else lora.alpha,
        "lora_dropout": lora.dropout,
        "use_rslora": lora.rank_stabilized and not plain,
        "use_dora": isinstance(lora, DoRA),
        "target_modules": targets,
        "fan_in_fan_out": any(name in transposed for name in targets),
        "bias": "none",
        "inference_mode": True,
    }
    target = absolute(output)
    check_new(target)
    partial = begin_folder(target)
    try:
        write_file(partial.folder / WEIGHTS, save(tensors, {"format": "pt"}))
        write_file(partial.folder / CONFIG, (json.dumps(values, indent=2) + "\n").encode())
        sync_directory(partial.folder)
        partial.publish()
    except BaseException:
        partial.discard()
        raise
    return len(targets)


def import_adapter(
    folder: str | os.PathLike[str],
    base: str | os.PathLike[str],
    output: str | os.PathLike[str],
    adapter: str = DEFAULT,
) -> int:
    """Write a folder of ``peft`` as a checkpoint that holds one adapter alone.

    Args:
        folder: what ``save_pretrained`` of a ``PeftModel`` wrote.
        base: the model that it adapts: a folder of ``transformers`` or a checkpoint. Only its configuration is read.
        output: the checkpoint to write.
        adapter: the name that the adapter gets.

    Returns:
        the number of adapted weights.

    Raises:
        CheckpointError: a file is missing or damaged, or the adapters are of another base model.
        ConfigurationError: they are of a kind that we do not have, or of an embedding.
    """
    values = _read_config(place(folder))
    known, config = _base(base)
    modules, _, experts, fused = _modules(known, config)
    assert known.weights is not None
    table = known.weights.map(config)
    places = {theirs: {ours: TensorMapping(theirs)} for ours, theirs in modules.items()} | fused
    tensors: dict[str, Tensor] = {}
    stacks: dict[str, Tensor] = {}
    for key, tensor in _read_weights(place(folder)).items():
        module, _, leaf = key.removeprefix(ROOT).rpartition(".lora_")
        # Models that read images have other names in memory than in files.
        if module not in places:
            module = table.spelled(f"{module}.weight").removesuffix(".weight")
        if key.endswith(COPY):
            _check_copy(key, tensor, base, known, config, folder)
        elif leaf.startswith("embedding_"):
            raise ConfigurationError(f"{folder} adapts {module}, an embedding; adapters of those are not read. {MERGE}")
        elif module in places:
            # Parts of a fused weight have the same A, and each its rows of B.
            for ours, part in places[module].items():
                matrix = leaf.removesuffix(".weight")
                rows = tensor if matrix == "A" else TensorMapping(module, part.rows).part(tensor).contiguous()
                tensors[tensor_name(ours, matrix, adapter)] = rows
        elif values.get("target_parameters") and experts:
            stacks[key.removeprefix(ROOT)] = tensor
        else:
            raise CheckpointError(
                f"{folder} adapts {module!r}, which the base {base} does not have.{nearest(module, places)} Name the "
                "base that the adapters were trained on."
            )
    tensors |= cut(stacks, values["r"], experts.values(), adapter, folder)
    if not tensors:
        raise CheckpointError(f"{folder} holds no adapters; copy it again.")
    adapted = {name.rpartition(".lora_")[0] for name in tensors}
    targets = sorted({experts[name].target if name in experts else name for name in adapted})
    with torch.device("meta"):
        layers = [name for sections in dict(linear_layers(known.model(config))).values() for name in sections]
    # A tower's layers have names that end like those of the language model.
    others = [name for name in layers if name not in targets and any(matches(name, each) for each in targets)]
    lora = (DoRA if values.get("use_dora") else LoRA)(
        values["r"], targets, float(values["lora_alpha"]), float(values["lora_dropout"]),
        bool(values.get("use_rslora")), others, adapter,
    )  # fmt: skip
    _check_shapes(known, config, lora, tensors, f"{folder}", f"{base}")
    held = TensorSource({PREFIX + name: tensor for name, tensor in tensors.items()})
    common = {"family": known.name, "config": config.to_dict(), "transforms": describe([lora]), BASE: False}
    with alone() as group:
        checkpoint.save(
            output,
            views_of_source(held, held.tensors, None, group),
            common={"model": common},
            files=companions_of(base),
            process_group=group,
        )
    return len(adapted)


def _base(path: str | os.PathLike[str]) -> tuple[Family, Any]:
    """Return the family and the configuration of a base model."""
    if is_folder(path):
        known = family_of_transformers(read_config(path))
    else:
        known = family(description(checkpoint.open(path))["family"])
    config = initial_config(path, known)
    check_held(config, shapes_of(path), path)
    return known, config


def _check_copy(
    key: str, tensor: Tensor, base: str | os.PathLike[str], known: Family, config: Any, folder: str | os.PathLike[str]
) -> None:
    """Check a weight that ``peft`` saves beside adapters of a head or an embedding: it is that of the base.

    Raises:
        CheckpointError: it differs, as that of a base that was changed in between.
    """
    assert known.weights is not None
    source = initial_source(base, known, config)
    theirs = key.removeprefix(ROOT).removesuffix(COPY) + ".weight"
    for name in known.weights.map(config).ours([theirs]):
        shape, dtype = source.tensors[PREFIX + name].shape, getattr(torch, source.tensors[PREFIX + name].dtype)
        held = torch.empty(shape, dtype=dtype)
        with alone() as group:
            source.fill([Target(PREFIX + name, shape, (0,) * len(shape), held)], strict=False, process_group=group)
        narrow = min(dtype, tensor.dtype, key=lambda kind: kind.itemsize)
        if not torch.equal(held.to(narrow), tensor.to(narrow)):
            raise CheckpointError(
                f"{key} in {folder} is another weight than {theirs} of the base {base}. Name the base that the "
                f"adapters were trained on. {MERGE}"
            )


def _modules(
    known: Family, config: Any
) -> tuple[dict[str, str], set[str], dict[str, ExpertLayer], dict[str, dict[str, TensorMapping]]]:
    """Return our matrices -> their modules, where they are one and the same.

    Returns also which of theirs are ``[in, out]``, which of ours are experts', and their modules of which ours are
    parts, with the place of each.
    """
    if known.weights is None:
        raise ConfigurationError(f"transformers has no models like those of the family {known.name}, nor has peft.")
    weights: WeightConversion = known.weights
    table = weights.map(config)
    with torch.device("meta"):
        model = known.model(config)
    stacked = {part.name for part in parts(model) if model.get_parameter(part.parameter).ndim == 3}
    found, transposed, experts, fused = {}, set(), {}, dict[str, dict[str, TensorMapping]]()
    for name, tensor in canonical_tensors(model).items():
        if not name.endswith(".weight") or tensor.ndim != 2:
            continue
        place, own = table.theirs(name), name.removesuffix(".weight")
        if place.rows is None and not place.stack:
            module = found[own] = place.name.removesuffix(".weight")
            transposed |= {module} if place.transposed else set()
            if name in stacked:
                stack, index, projection = own.rsplit(".", 2)
                experts[own] = ExpertLayer(stack, int(index), projection, (tensor.shape[0], tensor.shape[1]))
        elif not place.stack:
            fused.setdefault(place.name.removesuffix(".weight"), {})[own] = place
    # A tied head has no weight of its own, and may have adapters all the same.
    copies = {copy.removesuffix(".weight") for copy in table.copies}
    found |= {ours: theirs.name for ours, theirs in table.places.items() if theirs.name in copies}
    return found, transposed, experts, fused


def _read_config(folder: PathLike) -> dict[str, Any]:
    values = json_of(folder / CONFIG)
    stacks = values.get("target_parameters")
    for name, possible in DEFAULTS.items():
        if stacks and name in OF_STACKS:
            continue
        if values.get(name, possible[0]) not in possible:
            raise ConfigurationError(
                f"{folder} has {name}={values[name]!r}; only {possible[0]!r} can be read. Merge these adapters into "
                "their base with peft (merge_and_unload), and read the merged model."
            )
    optional = {"lora_dropout": 0.0}
    for name, (types, what) in TYPES.items():
        value = values.setdefault(name, optional.get(name))
        # JSON's true is an int to Python.
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise CheckpointError(f"{folder / CONFIG} has {name}={value!r}; it must be {what}.")
    if stacks:
        check_config(values, folder)
    return values


def _read_weights(folder: PathLike) -> Mapping[str, Tensor]:
    file = folder / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist; weights are only read from safetensors files.")
    try:
        return load(file.read_bytes())
    except Exception as error:  # the package raises its own kinds
        raise CheckpointError(f"{file} cannot be read as safetensors ({error}); copy it again.") from error


def _check_shapes(known: Family, config: Any, lora: LoRA, tensors: Mapping[str, Tensor], where: str, base: str) -> None:
    """Check that the adapters are those that ``lora`` makes in the base model."""
    with torch.device("meta"):
        model = known.model(config)
    (made,) = apply_transforms(model, [lora])
    shapes = {name: tuple(tensor.shape) for name, tensor in canonical_tensors(model).items() if name in made}
    wrong: Iterable[str] = (
        f"{name} is {tuple(tensor.shape)} there and {shapes.get(name, 'absent')} in the base"
        for name, tensor in sorted(tensors.items())
        if shapes.get(name) != tuple(tensor.shape)
    )
    missing = [name for name in shapes if name not in tensors]
    if problem := next(iter(wrong), None) or (f"{missing[0]} is missing" if missing else None):
        raise CheckpointError(f"the adapters in {where} do not fit the base {base}: {problem}. Name the right base.")


GATE_UP, DOWN = "gate_up_proj", "down_proj"


PARTS = "gate", "up"
"""What ``gate_up_proj`` holds, one after the other."""


MERGE = "Merge these adapters into their base with peft (merge_and_unload), and read the merged model."


@dataclass(frozen=True)
class ExpertLayer:
    """A projection of an expert, a linear layer of its own in files of ``transformers``.

    Version 5 of ``transformers`` stacks the experts of a layer: ``gate_up_proj [E, 2 f, h]``, ``down_proj [E, h,
    f]``. A folder that is written has a pair ``A, B`` for each projection of each expert, which ``peft`` stacks. A
    folder that ``peft`` saved has one pair for a whole stack, which is cut here.

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
