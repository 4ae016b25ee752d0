"""Conversion of weights and configurations of BERT from ``transformers`` to ours and back.

Our names are canonical: ``layers.0.attention.q.weight``, not the fused ``qkv``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from megalight.errors import ConfigurationError
from megalight.models.bert.config import BertConfig
from megalight.models.config import DropoutConfig, InitConfig
from megalight.models.hugging_face.model_types import ModelType, ModelTypes
from megalight.models.hugging_face.weights import TensorMapping, WeightMap

PLACES = {
    "embed.word": "bert.embeddings.word_embeddings",
    "embed.position": "bert.embeddings.position_embeddings",
    "embed.token_type": "bert.embeddings.token_type_embeddings",
    "embed.norm": "bert.embeddings.LayerNorm",
    "layers.N.attention.q": "bert.encoder.layer.N.attention.self.query",
    "layers.N.attention.k": "bert.encoder.layer.N.attention.self.key",
    "layers.N.attention.v": "bert.encoder.layer.N.attention.self.value",
    "layers.N.attention.proj": "bert.encoder.layer.N.attention.output.dense",
    "layers.N.attention_norm": "bert.encoder.layer.N.attention.output.LayerNorm",
    "layers.N.mlp.up": "bert.encoder.layer.N.intermediate.dense",
    "layers.N.mlp.down": "bert.encoder.layer.N.output.dense",
    "layers.N.mlp_norm": "bert.encoder.layer.N.output.LayerNorm",
    "head.masked.dense": "cls.predictions.transform.dense",
    "head.masked.lm.norm": "cls.predictions.transform.LayerNorm",
    "head.masked.lm.output_layer": "cls.predictions.decoder",
    "head.order.pooler.dense": "bert.pooler.dense",
    "head.order.output": "cls.seq_relationship",
    "head.pooler.dense": "bert.pooler.dense",
}
"""Our module -> their module. ``N`` stands for a layer's index."""

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
BUFFERS = r"bert\.embeddings\.(position_ids|token_type_ids)"
ORDER = r"bert\.pooler\..*|cls\.seq_relationship\..*"
DECODER = "cls.predictions.decoder"
BIAS = "cls.predictions.bias"
"""The decoder's bias in files with a tied decoder weight. It is not read if the weight is not tied."""

WITH_ORDER = ("BertForPreTraining", "BertForNextSentencePrediction")
BARE = "BertModel"
"""The architecture without heads. Its names lack the prefix of the others."""


def weight_map(config: BertConfig) -> WeightMap:
    """Return where ``transformers`` keeps the tensors of a model.

    Without ``sentence_order``, pooler and sentence-order head are not read. A tied decoder weight is not read either.
    """
    if config.head != "pretraining":
        return _bare_map(config)
    # The pooler belongs to the head for the order here.
    places = {ours: TensorMapping(theirs) for ours, theirs in PLACES.items() if ours != "head.pooler.dense"}
    # `transformers` has the bias under two names. Files hold the first, the second, or both.
    copies, doubles = {BIAS: f"{DECODER}.bias"}, {f"{DECODER}.bias": (BIAS,)}
    if config.tie_embeddings:
        places["head.masked.lm.output_layer.bias"] = TensorMapping(BIAS)
        copies = {f"{DECODER}.bias": BIAS, f"{DECODER}.weight": "bert.embeddings.word_embeddings.weight"}
        # With a tied weight the decoder has no tensor of its own, and its bias is written once.
        doubles = {}
    return WeightMap(
        places,
        root="bert.",
        copies=copies,
        left_out=BUFFERS if config.sentence_order else f"{BUFFERS}|{ORDER}",
        renamed={r"\.gamma$": ".weight", r"\.beta$": ".bias"},  # names in the first published files
        doubles=doubles,
    )


def _bare_map(config: BertConfig) -> WeightMap:
    """Return the table of a model without heads, which reads folders of models with heads, too."""
    places = {
        ours: TensorMapping(theirs.removeprefix("bert.")) for ours, theirs in PLACES.items() if "head." not in ours
    }
    left_out = r"cls\..*|embeddings\.(position_ids|token_type_ids)"
    if config.head == "pooler":
        places["head.pooler.dense"] = TensorMapping("pooler.dense")
    else:
        left_out += r"|pooler\..*"
    renamed = {r"^bert\.": "", r"\.gamma$": ".weight", r"\.beta$": ".bias"}
    return WeightMap(places, left_out=left_out, renamed=renamed)


def without_pooler(config: BertConfig, names: Callable[[], Collection[str]]) -> BertConfig:
    """Return the configuration of a bare model without its pooler, if the folder has no such tensors."""
    if config.head == "pooler" and not any(name.endswith("pooler.dense.weight") for name in names()):
        return replace(config, head="none")
    return config


def from_transformers(tensors: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Convert a ``BertForPreTraining`` or ``BertForMaskedLM`` state dict to canonical tensors.

    Raises:
        CheckpointError: there is a tensor that such models do not have.
    """
    return weight_map(config).read(tensors)


def to_transformers(tensors: Mapping[str, Tensor], config: BertConfig) -> dict[str, Tensor]:
    """Convert canonical tensors to those of ``transformers``, which does not store a tied decoder weight.

    Raises:
        CheckpointError: there is a tensor that such models do not have.
    """
    return weight_map(config).write(tensors)


def _read(values: Mapping[str, Any]) -> BertConfig:
    """Convert a ``config.json``, whose ``architectures`` say which heads the weights have.

    Raises:
        ConfigurationError: an option is not supported here.
    """
    for option, plain in (
        ("is_decoder", False),
        ("add_cross_attention", False),
        ("position_embedding_type", "absolute"),
    ):
        if values.get(option, plain) != plain:
            raise ConfigurationError(f"{option} is {values[option]!r}; it has no counterpart here.")
    name = values.get("hidden_act", "gelu")
    if name not in ACTIVATIONS:
        raise ConfigurationError(f"hidden_act {name!r} has no counterpart here; known: {', '.join(ACTIVATIONS)}.")
    bare = values.get("architectures") == [BARE]
    dropout = values.get("hidden_dropout_prob", 0.1)
    return BertConfig(
        num_layers=values["num_hidden_layers"],
        hidden_size=values["hidden_size"],
        num_heads=values["num_attention_heads"],
        vocab_size=values["vocab_size"],
        max_sequence_length=values["max_position_embeddings"],
        ffn_hidden_size=values["intermediate_size"],
        num_token_types=values.get("type_vocab_size", 2),
        activation=ACTIVATIONS[name],
        norm_eps=values.get("layer_norm_eps", 1e-12),
        sentence_order=any(kind in WITH_ORDER for kind in values.get("architectures") or ()),
        tie_embeddings=bool(values.get("tie_word_embeddings", True)),
        head="pooler" if bare else "pretraining",
        dropout=DropoutConfig(
            hidden=dropout, embedding=dropout, attention=values.get("attention_probs_dropout_prob", 0.1)
        ),
        init=InitConfig(std=values.get("initializer_range", 0.02), scale_residual=False),
    )


def _write(config: BertConfig) -> dict[str, Any]:
    """Return the content of ``config.json``.

    Raises:
        ConfigurationError: the dropouts differ.
    """
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    if config.dropout.hidden != config.dropout.embedding:
        raise ConfigurationError(
            f"dropout.hidden is {config.dropout.hidden} and dropout.embedding {config.dropout.embedding}; "
            "transformers has one value for both"
        )
    return {
        "architectures": [_architecture(config)],
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_sequence_length,
        "intermediate_size": config.ffn_hidden_size,
        "type_vocab_size": config.num_token_types,
        "hidden_act": names.get(config.activation, config.activation),
        "layer_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_dropout_prob": config.dropout.hidden,
        "attention_probs_dropout_prob": config.dropout.attention,
        "initializer_range": config.init.std,
    }


def _architecture(config: BertConfig) -> str:
    if config.head != "pretraining":
        return BARE
    return "BertForPreTraining" if config.sentence_order else "BertForMaskedLM"


def _settings(config: BertConfig) -> dict[str, Any]:
    """Return plain values. A bare model is read with its pooler, which its folder may lack."""
    return config.to_dict() | {"head": "bare" if config.head != "pretraining" else config.head}


FAMILY = ModelTypes(
    (ModelType("bert", "BertForPreTraining", lambda config: True, weight_map, _read, _write),), _settings
)
config_from_transformers = FAMILY.read
config_to_transformers = FAMILY.write
READERS = FAMILY.readers
