"""Drafts to the format that serving engines read (vLLM, SGLang, TensorRT-LLM: ``LlamaForCausalLMEagle3``)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import torch
from safetensors.torch import save

from megalight import checkpoint
from megalight.checkpoint.disk.files import sync_directory, write_file
from megalight.checkpoint.disk.publish import absolute, begin_folder, check_new
from megalight.checkpoint.foreign.transformers_folder import CONFIG, WEIGHTS
from megalight.errors import ConfigurationError
from megalight.models.eagle.config import EagleConfig
from megalight.models.eagle.engine_format import names_of, values_of
from megalight.models.saved import saved_model
from megalight.nn.canonical import canonical_tensors


def export_draft(
    source: str | os.PathLike[str], path: str | os.PathLike[str], dtype: torch.dtype | None = torch.bfloat16
) -> None:
    """Write a draft as a folder with ``config.json`` and ``model.safetensors``.

    It has no embedding: engines take that of the base.

    Args:
        source: a checkpoint of a draft.
        path: the folder to write, which appears when it is complete.
        dtype: dtype of the weights. None: as they were saved.

    Raises:
        CheckpointError: the source is not complete, or ``path`` is there or cannot be written. Nothing is left of a
            folder whose writing failed.
        ConfigurationError: the source holds another model.
    """
    target = absolute(path)
    check_new(target)
    opened = checkpoint.open(source)
    if not holds_draft(source):
        raise ConfigurationError(
            f"{source} holds no draft model of the family eagle; for other families, use megalight.models.export."
        )
    model = saved_model(opened).root
    config: EagleConfig = model.config  # type: ignore[assignment]
    dtype = dtype or next(model.parameters()).dtype
    tensors, names = {}, names_of(config)
    for name, tensor in canonical_tensors(model).items():
        module, _, leaf = name.rpartition(".")
        tensor = in_order(tensor, config.auxiliary_layers) if module == "fuse" else tensor
        tensors[f"{names[module]}.{leaf}"] = tensor.to(dtype).contiguous()
    ids = torch.tensor(config.draft_ids or range(config.vocab_size))
    # The token of row `i` is `i + d2t[i]`; `t2d` says which tokens have a row.
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    partial = begin_folder(target)
    try:
        write_file(partial.folder / WEIGHTS, save(tensors, {"format": "pt"}))
        content = json.dumps(values_of(config, dtype), indent=2) + "\n"
        write_file(partial.folder / CONFIG, content.encode())
        sync_directory(partial.folder)
        partial.publish()
    except BaseException:
        partial.discard()
        raise


def holds_draft(source: str | os.PathLike[str]) -> bool:
    """Return whether a folder is a checkpoint of a draft."""
    if not checkpoint.is_complete(source):
        return False
    return bool(checkpoint.open(source).common.get("model", {}).get("family") == "eagle")


def in_order(weight: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
    """Return the weight ``[h, n h]`` of ``fuse`` for the same hidden states in ascending order, each of them once."""
    # Engines collect the states while the layers run, whatever the order in the configuration.
    blocks = dict.fromkeys(sorted(layers), torch.zeros(()).to(weight))
    for after, block in zip(layers, weight.chunk(len(layers), 1), strict=True):
        blocks[after] = blocks[after] + block
    return torch.cat(list(blocks.values()), 1)
