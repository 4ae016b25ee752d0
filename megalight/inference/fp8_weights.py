"""Weights in e4m3 for generation: half the bytes that a decode step reads, and half the memory.

The linear layers inside of transformer layers are stored so (:mod:`megalight.ops.quantized_weight`); activations keep
their dtype. Weights that were published in FP8 keep their values and scales: those of DeepSeek and Qwen with a scale
per 128 x 128, and of ModelOpt with one for a weight, a row or a block. Others get a scale for each row. Embedding,
output layer, norms and routers stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.checkpoint.ranks import alone
from megalight.errors import ConfigurationError, nearest
from megalight.models.hf_causal_lm import HFModel
from megalight.models.hugging_face.folder import Folder
from megalight.models.loading import fp8_scales
from megalight.models.transforms.lora import matches
from megalight.models.transforms.quantized_base import DECODED, LAYERS, weights_of
from megalight.ops.quantized_weight import store, stored_of
from megalight.parallel.model import ParallelModel
from megalight.parallel.shard import ShardSpec
from megalight.parallel.source import Target

Quantization: TypeAlias = Literal["auto", "fp8", "none"]
"""``auto``: weights that were published in FP8 stay so (those of models of ``transformers`` with their own code are
widened); ``fp8``: all are stored so; ``none``: all are widened."""


def check_quantization(quantization: str) -> None:
    """Refuse other values.

    Raises:
        ConfigurationError: says the values.
    """
    known = get_args(Quantization)
    if quantization not in known:
        raise ConfigurationError(
            f"quantization is {quantization!r}; it must be {', '.join(known)}." + nearest(quantization, known)
        )


def quantize_weights(root: nn.Module) -> None:
    """Store the weights of linear layers in e4m3, with a scale for each row; those that are stored so stay."""
    for _, weight in _weights(root):
        if stored_of(weight) is None:
            weight.requires_grad_(False)
            store(weight, "fp8", weight.shape[-1])


def quantize_loaded(
    model: ParallelModel, folder: str | os.PathLike[str] | None, quantization: str, divided: bool
) -> None:
    """Store the weights of a model that was just read. All ranks of its mesh call this together.

    Args:
        model: the model, with its values.
        folder: the ``transformers`` folder that it was read from; None: a checkpoint of ours.
        quantization: see :data:`Quantization`.
        divided: whether all ranks call this together; otherwise this process alone holds the model.

    Raises:
        ConfigurationError: the model computes with code of ``transformers``.
    """
    if isinstance(model.root, HFModel):
        if quantization == "auto":
            return
        raise ConfigurationError(
            f"{type(model.root.net).__name__} is a model of transformers with its own code, whose weights are not "
            "stored in FP8 here; set quantization='none'."
        )
    scales = None if folder is None else fp8_scales(folder)
    if scales is not None and scales.tensors:
        with nullcontext(None) if divided else alone() as group:
            _keep(model, scales, group)
    if quantization == "fp8":
        quantize_weights(model.root)


def _weights(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    for path, module in root.named_modules():
        if isinstance(module, DECODED) and matches(path, LAYERS):
            for weight in weights_of(module):
                yield names[id(weight)], weight


def _keep(model: ParallelModel, source: Folder, group: ProcessGroup | None) -> None:
    """Store weights with the scales of their files."""
    found: list[tuple[nn.Parameter, Tensor]] = []
    targets: list[Target] = []
    for name, weight in _weights(model.root):
        if (blocks := _blocks(model.specs[name], source)) is None:
            continue
        # The rows of a stack one below the other.
        scales = torch.empty(weight.shape[:-1].numel(), blocks)
        found.append((weight, scales))
        width = weight.shape[-1] // blocks
        for piece in model.specs[name].pieces:
            first, (rows, columns) = piece.start // weight.shape[-1], piece.size
            data = scales[first : first + rows, : max(1, columns // width)]
            shape = source.tensors[piece.name].shape
            targets.append(Target(piece.name, shape, (piece.offset[0], piece.offset[1] // width), data))
    source.fill(targets, strict=False, process_group=group)
    for weight, scales in found:
        weight.requires_grad_(False)
        store(weight, "fp8", weight.shape[-1] // scales.shape[1], scales=scales.to(weight.device))


def _blocks(spec: ShardSpec, source: Folder) -> int | None:
    """Return how many scales each row of a local weight has; None: a part of it was not published in FP8."""
    counts = set()
    for piece in spec.pieces:
        scales = source.tensors.get(piece.name)
        if scales is None or len(piece.size) != 2:
            return None
        width = piece.shape[1] // scales.shape[1]
        # A scale for the whole row serves parts of it, too.
        if scales.shape[1] > 1 and (piece.offset[1] % width or piece.size[1] % width):
            return None
        counts.add(max(1, piece.size[1] // width))
    return counts.pop() if len(counts) == 1 else None
