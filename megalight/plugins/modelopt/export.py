"""Export of quantized models: ``transformers`` folders in ModelOpt's format, written, and read again as plain numbers.

TensorRT-LLM, vLLM and SGLang read such folders (``quantization="modelopt"``). ModelOpt's own functions choose the
format of each layer, compute its scales and pack its weight; names and files are ours.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from megalight import checkpoint
from megalight.checkpoint.disk.files import PathLike, sync_directory, write_file
from megalight.checkpoint.disk.publish import absolute, begin_folder, check_new
from megalight.checkpoint.foreign.transformers_folder import CONFIG, WEIGHTS
from megalight.checkpoint.sources import TensorSource
from megalight.errors import CheckpointError, ConfigurationError
from megalight.imports import version
from megalight.models.family import WeightConversion, family
from megalight.models.hugging_face.export import config_values, files_beside
from megalight.models.hugging_face.weights import WeightMap
from megalight.models.loading import companions_of, description, saved_model
from megalight.models.stored import StoredModel
from megalight.nn import LatentAttention, Linear
from megalight.nn.canonical import Section, canonical_tensors
from megalight.nn.embedding_and_head import Embedding
from megalight.nn.moe import Router
from megalight.plugins.modelopt.presets import modelopt
from megalight.plugins.modelopt.quantizer_sites import Matrix, matrices, places, rounds
from megalight.plugins.modelopt.quantizers import Quantizers

QUANT_CONFIG = "hf_quant_config.json"
MATRICES = (Linear, torch.nn.Linear, Embedding, torch.nn.Embedding, Router)
"""Layers with a matrix that readers could take for a quantized one."""
SCALES = {"k_bmm_quantizer": "k_proj.k_scale", "v_bmm_quantizer": "v_proj.v_scale"}
"""Quantizers of keys and values -> names of their scales in the module of attention."""
APART = {"fp8"}
"""Formats in which layers with one input keep their own scales of weights."""
E4M3_MAX = 448.0
"""What scales of keys and values count in, whatever their format is (ModelOpt's exporter for ``transformers``)."""


def export_quantized(path: str | os.PathLike[str], output: str | os.PathLike[str]) -> int:
    """Write the model of a quantized checkpoint. It is whole in the memory of this process.

    Args:
        path: a checkpoint that ``ModelOptQuantization`` wrote.
        output: the folder to write, which appears when it is complete.

    Returns:
        the number of quantized matrices; of a model whose keys and values alone are rounded, 0.

    Raises:
        CheckpointError: the checkpoint is incomplete, or not quantized, or not calibrated.
        ConfigurationError: ``transformers`` has no such model, or stores a quantized weight fused, stacked or
            transposed; a layer has sizes that the format cannot pack.
        MissingPackageError: ModelOpt is not installed.
    """
    target = absolute(output)
    check_new(target)
    opened = checkpoint.open(path)
    described = description(opened)
    known = family(described["family"])
    if known.weights is None:
        raise ConfigurationError(f"transformers has no models like those of the family {known.name}.")
    weights: WeightConversion = known.weights
    model = saved_model(opened)
    if not any(isinstance(transform, Quantizers) for transform in model.layout.transforms):
        raise CheckpointError(
            f"checkpoint {opened.path} is not quantized; calibrate it first (megalight quantize), or convert it "
            "--to transformers."
        )
    config = known.config.from_dict(described["config"])
    table = weights.map(config)
    held = tuple(f"{place.name}." for place in places(model.root))
    plain = {name: tensor for name, tensor in canonical_tensors(model.root).items() if not name.startswith(held)}
    tensors, layers, count = _pack(plain, table, model.root)
    cache = _put_scales(tensors, table, model.root)
    stored = StoredModel(known, config, TensorSource({}), companions_of(path))
    values = config_values(stored, {tensor.dtype for tensor in plain.values()})
    _write(target, tensors, files_beside(stored, values), _described(layers, cache))
    return count


def _pack(
    plain: dict[str, Tensor], table: WeightMap, root: torch.nn.Module
) -> tuple[dict[str, Tensor], dict[str, Any], int]:
    """Round all quantized matrices, those of stacked experts before the others.

    Args:
        plain: canonical tensors of the model; those of stacks are replaced by quantized values.

    Returns:
        tensors as files hold them; what ModelOpt describes layers by; the number of quantized matrices.
    """
    layers: dict[str, Any] = {}
    stacks = _stacks(table, root)
    scales = dict[str, Tensor]()
    for stack in stacks.values():
        scales |= _put_stack(plain, layers, table, stack, root)
    for module_path, module in root.named_modules():
        if isinstance(module, LatentAttention):
            _join_scales(root, module_path, module)
    tensors = table.write(plain) | scales
    count = sum(map(len, stacks.values()))
    for matrix in matrices(root):
        if matrix.weight_quantizer.is_enabled and (matrix.path, matrix.parameter) not in stacks:
            count += _put(tensors, layers, table, matrix, root)
    # Layers that keep their dtype are named too: readers must not take them for quantized ones.
    for layer_path, module in root.named_modules():
        if isinstance(module, MATRICES):
            for name in _names(layer_path, module):
                layers.setdefault(f"{_module(table, name)}.quantization", None)
    return tensors, layers, count


def _described(layers: dict[str, Any], cache: str | None) -> dict[str, Any]:
    """Return the description of a quantized model, in ModelOpt's form.

    Args:
        layers: what it describes layers by.
        cache: format of keys and values; None: they are not rounded.
    """
    return {
        "producer": {"name": "modelopt", "version": version("nvidia-modelopt")},
        "quantization": {
            "quant_algo": None,
            "kv_cache_quant_algo": None,
            **modelopt("torch.export.quant_utils").process_layer_quant_config(layers),
            **({"kv_cache_quant_algo": cache} if cache else {}),
        },
    }


def _write(
    target: PathLike, tensors: Mapping[str, Tensor], beside: Mapping[str, bytes], quantization: dict[str, Any]
) -> None:
    """Write the folder, which appears when it is complete.

    Args:
        beside: name of each file beside the weights -> its content. The configuration gets the description, too.
        quantization: the description of the quantized model.
    """
    converted = modelopt("torch.export.convert_hf_config").convert_hf_quant_config_format(quantization)
    partial = begin_folder(target)
    try:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        write_file(partial.folder / WEIGHTS, save(whole, {"format": "pt"}))
        write_file(partial.folder / QUANT_CONFIG, _json(quantization))
        for name, content in beside.items():
            if name == CONFIG:
                content = _json({**json.loads(content), "quantization_config": converted})
            write_file(partial.folder / name, content)
        sync_directory(partial.folder)
        partial.publish()
    except BaseException:
        partial.discard()
        raise


def _put(
    tensors: dict[str, Tensor], layers: dict[str, Any], table: WeightMap, matrix: Matrix, root: torch.nn.Module
) -> int:
    """Replace a matrix, which may be several fused ones, by quantized ones and scales; return their number."""
    utils = modelopt("torch.export.quant_utils")
    holder: Any = root.get_submodule(matrix.path)
    layer = _layer(matrix)
    _, first = rounds(matrix.weight_quantizer)[0]
    height = int((first.block_sizes or {}).get(-2, 1))
    form, block = _format(matrix), utils.get_weight_block_size(layer)
    scale, second = utils.get_weight_scaling_factor(layer), utils.get_weight_scaling_factor_2(layer)
    if block:
        # Until a quantizer has run, it does not know how many blocks a row has.
        scale = scale.reshape(len(layer.weight) // height, -1)
    beside = {
        "weight_scale_2": second,
        "input_scale": utils.get_activation_scaling_factor(layer),
        "pre_quant_scale": utils.get_prequant_scaling_factor(layer),
    }
    if matrix.index is None:
        names, sizes = _names(matrix.path, holder), getattr(holder, "section_sizes", [len(layer.weight)])
    else:
        names = _expert_names(matrix, root)
        sizes = [len(layer.weight) // len(names)] * len(names)
    start = 0
    for name, size in zip(names, sizes, strict=True):
        rows = slice(start, start + size)
        start += size
        module = _module(table, name)
        if size % height:
            raise ConfigurationError(f"{name} has {size} rows, which blocks of {height} rows do not divide ({form}).")
        # One scale for the whole layer, or some for each row or each block of rows.
        own = scale
        if scale.ndim and len(scale) * height == len(layer.weight):
            own = scale[rows.start // height : rows.stop // height]
        try:
            data = utils.to_quantized_weight(layer.weight.detach()[rows], own, form, second, block)
        except (AssertionError, NotImplementedError, ValueError) as error:
            raise ConfigurationError(f"{name} cannot be packed as {form}: {error}") from error
        tensors[f"{module}.weight"] = data
        # One number has no dims in these files, and squares of a weight have four.
        written = own[:, None, :, None] if height > 1 else own if block else own.squeeze()
        tensors[f"{module}.weight_scale"] = written.clone()
        for leaf, value in beside.items():
            if value is not None:
                tensors[f"{module}.{leaf}"] = value.squeeze().clone()
        layers[f"{module}.quantization"] = form
        layers[f"{module}.awq_block_size"] = block
    return len(names)


def _format(matrix: Matrix) -> str:
    """Return ModelOpt's name of a matrix's format.

    Raises:
        ConfigurationError: it has none.
    """
    try:
        return str(modelopt("torch.export.quant_utils").get_quantization_format(_layer(matrix)))
    except NotImplementedError as error:
        raise ConfigurationError(
            f"ModelOpt has no files for the format of {matrix.path} ({error}). Quantize with another preset for a "
            "folder."
        ) from error


def _join_scales(root: torch.nn.Module, path: str, attention: Any) -> None:
    """Give both layers that read the inputs of latent attention the same scales; engines compute them as one layer.

    ModelOpt does so, by this function, but for formats whose scales engines can join themselves. The values of the
    model change with scales of input features.
    """
    names = (f"{path}.{'q_up' if attention.q_down is None else 'q_down'}", f"{path}.kv_down")
    both = [matrix for matrix in matrices(root) if matrix.path in names and matrix.weight_quantizer.is_enabled]
    forms = {_format(matrix) for matrix in both}
    if len(both) < len(names) or len(forms) > 1 or forms & APART:
        return
    layers = [_layer(matrix) for matrix in both]
    modelopt("torch.export.quant_utils").preprocess_linear_fusion(layers)
    for matrix, layer in zip(both, layers, strict=True):
        matrix.weight.detach().copy_(layer.weight)


def _stacks(table: WeightMap, root: torch.nn.Module) -> dict[tuple[str, str], list[Matrix]]:
    """Return the quantized stacks of experts that ``transformers`` holds as one tensor each, by path and parameter."""
    found: dict[tuple[str, str], list[Matrix]] = {}
    for matrix in matrices(root):
        stacked = matrix.index is not None and table.theirs(_expert_names(matrix, root)[0]).stack
        if stacked and matrix.weight_quantizer.is_enabled:
            found.setdefault((matrix.path, matrix.parameter), []).append(matrix)
    return found


def _put_stack(
    plain: dict[str, Tensor], layers: dict[str, Any], table: WeightMap, stack: list[Matrix], root: torch.nn.Module
) -> dict[str, Tensor]:
    """Quantize the matrices of a stack, before they are stacked; return their scales, one for all experts.

    Raises:
        ConfigurationError: the format is another than FP8 with one scale.
    """
    utils, first = modelopt("torch.export.quant_utils"), stack[0]
    form = utils.get_quantization_format(_layer(first))
    whole = table.theirs(_expert_names(first, root)[0]).name
    if form != "fp8":
        raise ConfigurationError(
            f"{whole} in transformers is a stack of experts, which megalight convert writes in FP8 with one scale "
            f"alone, and these are {form}. Quantize with FP8_DEFAULT_CFG for a folder."
        )
    scale = torch.stack([utils.get_weight_scaling_factor(_layer(matrix)).squeeze() for matrix in stack]).amax()
    for matrix in stack:
        names = _expert_names(matrix, root)
        for name, part in zip(names, matrix.weight.detach().chunk(len(names)), strict=True):
            plain[name] = utils.to_quantized_weight(part, scale, form)
    layers[f"{whole.rpartition('.')[0]}.quantization"] = form
    return {
        f"{whole}_weight_scale": scale,
        f"{whole}_input_scale": utils.get_activation_scaling_factor(_layer(first)).squeeze().clone(),
    }


def _layer(matrix: Matrix) -> Any:
    """Return a matrix as a layer of ModelOpt's exporter."""
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(matrix.weight.detach(), requires_grad=False)
    layer.weight_quantizer, layer.input_quantizer = matrix.weight_quantizer, matrix.input_quantizer
    return layer


def _expert_names(matrix: Matrix, root: torch.nn.Module) -> list[str]:
    """Return the canonical names of one expert's matrices in a stack."""
    holder: Any = root.get_submodule(matrix.path)
    return [f"{matrix.path}.{matrix.index}.{name}.weight" for name in holder.projections[matrix.parameter]]


def _put_scales(tensors: dict[str, Tensor], table: WeightMap, root: torch.nn.Module) -> str | None:
    """Add the scales of keys and values; return their format."""
    found = set()
    for place in places(root):
        if place.kind not in SCALES or not place.quantizer.is_enabled:
            continue
        attention = place.path.removesuffix(".inner")
        found.add(modelopt("torch.export.quant_utils").get_kv_cache_dtype(root.get_submodule(place.path)))
        around = table.theirs(f"{attention}.k.weight").name.removesuffix(".weight").rpartition(".")[0]
        if place.has_amax:
            tensors[f"{around}.{SCALES[place.kind]}"] = place.quantizer.export_amax().float().squeeze() / E4M3_MAX
    return found.pop() if found else None


def _names(path: str, layer: Any) -> list[str]:
    """Return the canonical names of a layer's matrices."""
    around = path.rpartition(".")[0]
    sections: tuple[Section, ...] | None = getattr(layer, "sections", None)
    if sections is None:
        return [f"{path}.weight"]
    return [f"{around}.{section.name}.weight".lstrip(".") for section in sections]


def _module(table: WeightMap, name: str) -> str:
    """Return the module of ``transformers`` that holds a matrix.

    Raises:
        ConfigurationError: it holds others too, or in another form.
    """
    place = table.theirs(name)
    if place.rows is not None or place.stack or place.transposed or place.depthwise:
        raise ConfigurationError(
            f"{name} is part of {place.name} in transformers, which fuses, stacks or transposes it; ModelOpt's format "
            "has no form for that. Models like Llama and Qwen can be written."
        )
    return place.name.removesuffix(".weight")


def _json(values: Any) -> bytes:
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


# Reading: quantized weights as plain numbers


SCALE_SUFFIXES = ("weight_scale", "weight_scale_2", "input_scale", "pre_quant_scale", "k_scale", "v_scale")
"""Ends of the names of tensors that are no weights."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of a floating-point number of four bits; the highest bit is the sign."""


def plain_weights(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Return the weights of a folder, multiplied out: float32 where they are quantized.

    A model with these weights computes what the quantized one does, but for the rounding of inputs, keys and values.

    Args:
        folder: written by ``megalight convert --to modelopt``.

    Raises:
        CheckpointError: there is no such folder.
    """
    tensors: dict[str, Tensor] = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        tensors |= load_file(file)
    if not tensors:
        raise CheckpointError(f"{os.fspath(folder)} holds no *.safetensors; give a folder of megalight convert.")
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(SCALE_SUFFIXES)}
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        module, parting = name.removesuffix("weight_scale")[:-1], name.removesuffix("weight_scale")[-1]
        if parting == "_":
            # a stack of experts
            found[module] = tensors[module].float() * tensors[name].float()
            continue
        weight = decode(tensors[f"{module}.weight"], tensors[name], tensors.get(f"{module}.weight_scale_2"))
        if f"{module}.pre_quant_scale" in tensors:
            # it multiplies inputs
            weight *= tensors[f"{module}.pre_quant_scale"].float()
        found[f"{module}.weight"] = weight
    return found


def decode(data: Tensor, scale: Tensor, second: Tensor | None = None) -> Tensor:
    """Return a weight ``[out, in]`` in float32. Dtypes of quantized values and scales tell the format.

    Args:
        data: FP8 or INT8 ``[out, in]``; INT4 ``[out / 2, in]``, FP4 ``[out, in / 2]``, two in a byte, the first in its
            low half.
        scale: of the layer, of each row, of each block of a row, or of each square. MX formats have exponents of two,
            plus 127.
        second: for NVFP4, what multiplies the scales of blocks; for W4A8, the step of the rounding to FP8.
    """
    narrow = data.dtype == torch.uint8
    if scale.dtype == torch.uint8:
        steps = torch.exp2(scale.float() - 127)
        values = _fp4(data) if narrow else data.float()
    elif scale.dtype == torch.float8_e4m3fn:
        assert second is not None
        steps, values = scale.float() * second, _fp4(data)
    elif narrow:
        # The sign is the highest of four bits.
        signed = data.view(torch.int8)
        steps, values = scale.float(), torch.stack([signed << 4 >> 4, signed >> 4], 1).flatten(0, 1).float()
    else:
        steps, values = scale.float(), data.float()
    if steps.ndim == 4:
        # squares: [out / b, 1, in / b, 1]
        steps = steps.flatten(1).repeat_interleave(len(values) // len(steps), 0)
    if steps.ndim == 2:
        steps = steps.repeat_interleave(values.shape[1] // steps.shape[1], 1)
    elif steps.ndim == 1:
        steps = steps[:, None]
    weight = values * steps
    if second is not None and scale.dtype != torch.float8_e4m3fn:
        weight = (weight / second).to(torch.float8_e4m3fn).float() * second
    return weight


def _fp4(data: Tensor) -> Tensor:
    """Return the numbers of two quantized values in a byte, ``[out, in / 2] -> [out, in]``."""
    table = torch.tensor([*E2M1, *(-each for each in E2M1)], device=data.device)
    return table[torch.stack([data & 15, data >> 4], -1).flatten(-2).long()]
