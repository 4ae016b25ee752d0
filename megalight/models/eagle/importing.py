"""Drafts from the format that serving engines read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import torch
from safetensors.torch import load_file
from torch import Tensor

from megalight.checkpoint.foreign.transformers_folder import CONFIG, WEIGHTS, is_folder, read_config
from megalight.checkpoint.ranks import alone
from megalight.checkpoint.sources.combine import Held
from megalight.errors import CheckpointError, ConfigurationError
from megalight.models.eagle.architecture import config_of, ids_of
from megalight.models.eagle.base import BaseModel
from megalight.models.eagle.config import EagleConfig
from megalight.models.eagle.engine_format import LAYERS, architecture_of, names_of
from megalight.models.eagle.model import DraftModel
from megalight.models.family import family
from megalight.models.gpt import GPTConfig
from megalight.models.saved import PREFIX
from megalight.models.stored import StoredModel, open_model, save_model
from megalight.nn.canonical import canonical_tensors
from megalight.parallel.source import Target

HEAD = "head.output_layer.weight"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def is_draft(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` looks like a folder with a draft for serving engines."""
    return is_folder(path) and any(name in LAYERS for name in read_config(path).get("architectures") or ())


def import_draft(
    source: str | os.PathLike[str], path: str | os.PathLike[str], base: str | os.PathLike[str] | None = None
) -> None:
    """Write a checkpoint of a draft. Its weights keep every bit.

    Args:
        source: a folder with ``config.json`` and ``model.safetensors``.
        path: the checkpoint, which is not there yet.
        base: the model that the draft serves. It is needed for a draft that does not say which hidden states it reads
            (they are then the usual ones of this base), and for a draft without an output layer (it uses that of the
            base).

    Raises:
        CheckpointError: a file is missing, or its tensors are not those of the configuration.
        ConfigurationError: the folder holds no draft, has an option without a counterpart here, or needs ``base``.
    """
    if not is_draft(source):
        raise ConfigurationError(f"{source} holds no draft; {CONFIG} of one names {' or '.join(LAYERS)}.")
    file = os.path.join(source, WEIGHTS)
    if not os.path.isfile(file):
        raise CheckpointError(f"{source} has no {WEIGHTS}; copy the folder again.")
    tensors = load_file(file)
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids = () if offsets is None else ids_of(offsets)
    if ids and mask is not None and mask.nonzero().flatten().tolist() != list(ids):
        raise CheckpointError(f"{file}: d2t and t2d name different ids; copy the folder again.")
    config = _config(source, ids)
    if not config.auxiliary_layers:
        config = _usual(config, source, base)
    with torch.device("meta"):
        wanted = canonical_tensors(DraftModel(config))
    values = _renamed(tensors, config)
    if HEAD not in values and not config.draft_ids:
        # Engines let such a draft predict with the output layer of its base.
        config, values[HEAD] = replace(config, head="base"), _head_of(source, base)
    if values.keys() != wanted.keys():
        lost, extra = sorted(wanted.keys() - values.keys()), sorted(values.keys() - wanted.keys())
        raise CheckpointError(
            f"{file} does not hold the tensors of its {CONFIG}: it lacks {lost[:4]}, and {extra[:4]} have no "
            "counterpart. A draft here reads the embedding of its base, and has one layer."
        )
    for name, tensor in values.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(
                f"{file}: {name} has the shape {list(tensor.shape)}, and {CONFIG} needs {list(wanted[name].shape)}."
            )
    held = Held({PREFIX + name: tensor for name, tensor in values.items()})
    save_model(StoredModel(family("eagle"), config, held, {}), path)


def _config(source: str | os.PathLike[str], ids: tuple[int, ...]) -> EagleConfig:
    values = read_config(source)
    inner = values.pop("eagle_config", None) or {}
    if layers := values.pop(LAYER_IDS, None):
        # Engines count hidden states after so many layers; architectures count outputs of layers.
        inner = {**inner, LAYER_IDS: [layer - 1 for layer in layers]}
    for key in ("hidden_size", "vocab_size", "max_position_embeddings"):
        if not values.get(key):
            raise CheckpointError(f"{source}/{CONFIG} has no {key}; copy the folder again.")
    if not ids and values.get("draft_vocab_size") not in (None, values["vocab_size"]):
        raise CheckpointError(
            f"{source}/{CONFIG} has draft_vocab_size={values['draft_vocab_size']}, and {WEIGHTS} has no d2t, which "
            "says which ids these are; copy the folder again."
        )
    # A map of all ids says nothing.
    return config_of(
        {"has_lm_head": True, **values, **inner}, f"{source}/{CONFIG}", () if len(ids) == values["vocab_size"] else ids
    )


def _usual(config: EagleConfig, source: object, base: str | os.PathLike[str] | None) -> EagleConfig:
    if base is None:
        raise ConfigurationError(
            f"{source}/{CONFIG} does not say which hidden states of its base the draft reads; name it by base (--base)."
        )
    served = open_model(base).config
    if not isinstance(served, GPTConfig):
        raise ConfigurationError(f"the base in {base} is no model of the family gpt, and drafts serve these.")
    return replace(config, auxiliary_layers=config.beside(served).auxiliary_layers)


def _head_of(source: object, base: str | os.PathLike[str] | None) -> Tensor:
    """Return the weight of the output layer of the base."""
    if base is None:
        raise ConfigurationError(
            f"{source}/{WEIGHTS} has no lm_head, so the draft predicts with that of its base; name it by base (--base)."
        )
    head = BaseModel(base).head_source()
    ((name, stored),) = head.tensors.items()
    weight = torch.empty(tuple(stored.shape), dtype=getattr(torch, stored.dtype))
    with alone() as group:
        head.fill([Target(name, tuple(stored.shape), (0, 0), weight)], process_group=group)
    return weight


def _renamed(tensors: Mapping[str, Tensor], config: EagleConfig) -> dict[str, Tensor]:
    """Return the tensors by our names; those without a counterpart keep theirs."""
    names = {f"{theirs}.weight": f"{ours}.weight" for ours, theirs in names_of(config).items()}
    layer, found = LAYERS[architecture_of(config)], {}
    for name, tensor in tensors.items():
        # Either beginning is in use.
        used = next((prefix for prefix in LAYERS.values() if name.startswith(prefix)), "")
        ours = layer + name.removeprefix(used) if used else name
        found[names.get(ours, name)] = tensor
    return found
