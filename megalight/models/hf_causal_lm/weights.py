"""Folders of any causal language model of ``transformers``: names in files are those of the model."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from megalight.checkpoint.disk.publish import place
from megalight.checkpoint.foreign.transformers_folder import read_config, tensor_names
from megalight.checkpoint.sources import TensorSource
from megalight.errors import CheckpointError
from megalight.first_rank import only_first
from megalight.models.config import compare
from megalight.models.family import WeightConversion
from megalight.models.hf_causal_lm.config import HFConfig
from megalight.models.hf_causal_lm.model import HFModel
from megalight.models.hugging_face.weights import NUMBER, TensorMapping, WeightMap

log = logging.getLogger(__name__)
log.addFilter(only_first)

NET = "net."
"""What canonical names begin with, before those of ``transformers``."""


def weight_map(config: HFConfig) -> WeightMap:
    """Return the table of a model: each tensor has its own name."""
    with torch.device("meta"):
        net = HFModel(config).net
    first: dict[int, str] = {}
    copies = {}
    for name, tensor in _saved(net):
        if (original := first.setdefault(id(tensor), name)) != name:
            copies[name] = original
    names = frozenset(NET + name for name in first.values())
    templates = {NUMBER.sub("N", name) for name in names}
    places = {template: TensorMapping(template.removeprefix(NET)) for template in templates}
    return WeightMap(places, copies=copies, held=names.__contains__)


def _saved(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield what a folder holds: parameters, tied ones under each of their names, and persistent buffers."""
    yield from net.named_parameters(remove_duplicate=False)
    kept = net.state_dict(keep_vars=True)
    yield from ((name, buffer) for name, buffer in net.named_buffers() if name in kept)


class HFConversion(WeightConversion):
    """Reads and writes folders of every causal language model that ``transformers`` has."""

    def reads(self, kind: str) -> bool:
        """Return whether ``transformers`` has a causal language model of this type."""
        try:
            from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        except ImportError:
            return False
        return kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    def config_of(self, folder: str | os.PathLike[str]) -> HFConfig:
        """Return the configuration of the model in a folder that ``save_pretrained`` wrote."""
        return HFConfig(dict(read_config(folder)))

    def source(self, folder: str | os.PathLike[str], config: Any, prefix: str, *, strict: bool = True) -> Any:
        """Open the folder as a source of tensors with canonical names.

        ``transformers`` converts some weights when it reads them, such as those of experts, which it stacks. Then
        each process reads them so, whole, into host memory.
        """
        table, unknown = weight_map(config), list[str]()
        table.ours(tensor_names(folder), unknown)
        if not unknown or not strict or compare(config.to_dict(), self.config_of(folder).to_dict(), "the folder"):
            return super().source(folder, config, prefix, strict=strict)
        from transformers import AutoModelForCausalLM

        log.info("%s: transformers converts its weights, and each process reads them whole", folder)
        loader: Any = AutoModelForCausalLM
        net, report = loader.from_pretrained(place(folder), output_loading_info=True)
        if report["missing_keys"] or report["unexpected_keys"]:
            raise CheckpointError(f"{folder} holds a model of other tensors: {report}")
        held = {name: t.detach() for name, t in _saved(net) if name not in table.copies}
        return TensorSource({f"{prefix}{NET}{name}": tensor for name, tensor in held.items()}, str(folder))


def write_config(config: HFConfig, kind: str | None) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    return {**config.values, "architectures": [config.architecture]}
