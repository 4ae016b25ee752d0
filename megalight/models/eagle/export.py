"""Drafts to the format that serving engines read (vLLM, SGLang, TensorRT-LLM: ``LlamaForCausalLMEagle3``)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from megalight import checkpoint
from megalight.checkpoint.foreign.transformers_folder import CONFIG, WEIGHTS
from megalight.errors import CheckpointError, ConfigurationError
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
        path: the folder, which is not there yet.
        dtype: dtype of the weights. None: as they were saved.

    Raises:
        CheckpointError: the source is not complete, or ``path`` is there.
        ConfigurationError: the source holds another model.
    """
    opened, target = checkpoint.open(source), Path(path)
    if not holds_draft(source):
        raise ConfigurationError(
            f"{source} holds no draft model of the family eagle; for other families, use megalight.models.export."
        )
    if target.exists():
        raise CheckpointError(f"{target} is there already; remove it, or name another folder.")
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
    # Complete, or not there under its name.
    partial = target.with_name(f".{target.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
    (partial / CONFIG).write_text(json.dumps(values_of(config, dtype), indent=2) + "\n", encoding="utf-8")
    partial.rename(target)


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
