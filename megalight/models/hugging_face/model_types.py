"""Model types of ``transformers``: how their configurations and tensors become ours and back."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from megalight.errors import ConfigurationError, MegalightError
from megalight.models.config import MAX_LAYERS, compare
from megalight.models.hugging_face.weights import WeightMap


class Config(Protocol):
    """What the configurations of all families have."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain nested values."""


C = TypeVar("C", bound=Config)

INTEGERS = """
attention_chunk_size conv_kernel decoder_sparse_step depth first_k_dense_replace floor_scale full_attention_interval
hidden_size image_token_id image_token_index in_channels in_chans interleave_moe_layer_step intermediate_size
intermediate_size_mlp kv_lora_rank linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads
linear_num_value_heads linear_value_head_dim mamba_head_dim mamba_num_heads max_position_embeddings max_window_layers
mm_tokens_per_image moe_intermediate_size moe_shared_expert_intermediate_size n_embd n_group n_groups n_head n_inner
n_layer n_positions n_routed_experts n_shared_experts no_rope_layer_interval num_attention_heads num_channels
num_experts num_experts_per_tok num_heads num_hidden_layers num_key_value_heads num_local_experts num_mtp_layers
num_nextn_predict_layers num_position_embeddings original_max_position_embeddings out_hidden_size q_lora_rank
qk_nope_head_dim qk_rope_head_dim shared_expert_intermediate_size sliding_window sliding_window_pattern
spatial_merge_size ssm_state_size state_size temporal_patch_size topk_group type_vocab_size v_head_dim
video_token_id video_token_index vocab_size window_size head_dim attention_head_dim
"""
NUMBERS = """
attention_dropout attention_factor attention_probs_dropout_prob attn_logit_softcapping attn_pdrop attn_scale beta_fast
beta_slow downsample_ratio embd_pdrop factor final_logit_softcapping hidden_dropout_prob high_freq_factor
initializer_range layer_norm_eps layer_norm_epsilon layer_scale_init_value low_freq_factor mscale mscale_all_dim
partial_rotary_factor query_pre_attn_scalar resid_pdrop rms_norm_eps rope_local_base_freq rope_theta
routed_scaling_factor time_step_floor time_step_max time_step_min
"""
FLAGS = """
attention_bias mlp_bias mrope_interleaved multimodal_projector_bias norm_topk_prob
rope_interleave scale_attn_weights tie_word_embeddings truncate use_absolute_position_embeddings use_bias use_conv_bias
use_mean_pooling use_qk_norm use_sliding_window
"""
WORDS = """
activation_function hidden_act hidden_activation hybrid_override_pattern model_type norm_type projector_hidden_act
rope_type topk_method type vision_aspect_ratio vision_feature_select_strategy
"""
LISTS = """
architectures deepstack_visual_indexes fullatt_block_indexes image_grid_pinpoints layer_types layers_block_type
mlp_only_layers moe_layers mrope_section no_rope_layers time_step_limit
"""
PARTS = "full_attention quantization_config rope_parameters rope_scaling sliding_attention text_config vision_config"
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    key: (types, what)
    for keys, types, what in (
        (INTEGERS, (int,), "an integer of at least 0"),
        (NUMBERS, (int, float), "a number of at least 0"),
        (FLAGS, (bool,), "true or false"),
        (WORDS, (str,), "a word"),
        (LISTS, (list, tuple), "a list"),
        (PARTS, (Mapping,), "an object with keys of its own"),
        ("attn_temperature_tuning", (bool, int), "true or false"),  # Llama 4 has 4
        ("image_size patch_size", (int, list, tuple), "an integer, or a list of two"),
    )
    for key in keys.split()
}
"""Key of a ``config.json`` that is read -> types of its value, and the word for them."""

NULLS = """
architectures attention_chunk_size attention_factor attn_logit_softcapping beta_fast beta_slow factor
final_logit_softcapping full_attention_interval head_dim image_grid_pinpoints layer_types layers_block_type
mlp_only_layers moe_layers mrope_interleaved mrope_section mscale mscale_all_dim n_group n_inner no_rope_layers
num_key_value_heads num_mtp_layers num_nextn_predict_layers original_max_position_embeddings partial_rotary_factor
q_lora_rank quantization_config rope_local_base_freq rope_parameters rope_scaling rope_theta rope_type sliding_window
sliding_window_pattern time_step_limit topk_group truncate type video_token_id video_token_index vision_config
"""
NULLABLE = frozenset(NULLS.split())
"""Those that may be null: no such part, or what follows from other values."""

COUNTS = re.compile(r"(n|num)_.*(layer|expert)s?")
"""Names of settings that say how many layers or experts there are."""


@dataclass(frozen=True)
class ModelType(Generic[C]):
    """One ``model_type`` of ``transformers``.

    Attributes:
        model_type: the word in ``config.json``.
        architecture: the class that ``transformers`` makes of it.
        suits: configuration -> whether a model with it may be of this kind. It may say yes too often: a written
            configuration is read back, and differences are found.
        places: configuration -> where the files keep its tensors.
        read: content of ``config.json`` -> configuration.
        write: configuration -> content of ``config.json``, without ``model_type`` and ``architectures``.
        also_read: further values of ``model_type`` that ``read`` converts.
    """

    model_type: str
    architecture: str
    suits: Callable[[C], bool]
    places: Callable[[C], WeightMap]
    read: Callable[[Mapping[str, Any]], C]
    write: Callable[[C], dict[str, Any]]
    also_read: tuple[str, ...] = ()


class ModelTypes(Generic[C]):
    """All model types of a family.

    Args:
        kinds: the model types. Those with parts that few have come first: a model is of the first kind that suits it.
        settings: configuration -> plain values, equal for configurations that mean the same model.
        no_kind: configuration -> what to say of a model that no kind suits.

    Attributes:
        readers: ``model_type`` in ``config.json`` -> the kind that reads it.
    """

    def __init__(
        self,
        kinds: Sequence[ModelType[C]],
        settings: Callable[[C], dict[str, Any]] = lambda config: config.to_dict(),
        no_kind: Callable[[C], str] = lambda config: "this configuration",
    ) -> None:
        self.kinds = tuple(kinds)
        self.settings = settings
        self.no_kind = no_kind
        self.readers = {name: kind for kind in self.kinds for name in (kind.model_type, *kind.also_read)}

    def weight_map(self, config: C) -> WeightMap:
        """Return where ``transformers`` keeps the tensors of a model.

        Raises:
            ConfigurationError: no kind suits the model.
        """
        return self._suiting(config)[0].places(config)

    def read(self, values: Mapping[str, Any]) -> C:
        """Convert the ``config.json`` of a ``transformers`` model to our configuration.

        Raises:
            ConfigurationError: the model type or an option is not supported here.
        """
        kind = values.get("model_type")
        if not isinstance(kind, str) or kind not in self.readers:
            raise ConfigurationError(f"model_type is {kind!r}; weights of {', '.join(self.readers)} can be read.")
        check_types(values)
        _check_counts(values)
        try:
            return self.readers[kind].read(values)
        # Any key may lack, so it is caught here instead of being asked for everywhere.
        except KeyError as missing:
            raise ConfigurationError(f"the configuration of the {kind} model lacks {missing}; copy it again.") from None
        except MegalightError:
            raise
        # A word or null where a number belongs: each conversion fails in its own way.
        except (TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
            raise ConfigurationError(
                f"the configuration of the {kind} model has a value of a wrong kind ({error}); copy it again."
            ) from error

    def write(self, config: C, model_type: str | None = None) -> dict[str, Any]:
        """Return the content of ``config.json`` for a model.

        Each kind of model is written and read back. The first kind that gives ``config`` again is taken.

        Args:
            config: the model.
            model_type: the kind to try first: that of the model that training began with.

        Raises:
            ConfigurationError: no kind can express the configuration. The message names what the nearest one cannot.
        """
        failed: list[tuple[str, list[str]]] = []
        # The kind that training began with comes first: several can say the same configuration.
        for kind in sorted(self._suiting(config), key=lambda kind: kind.model_type != model_type):
            name = kind.model_type
            try:
                values = {"model_type": name, "architectures": [kind.architecture], **kind.write(config)}
                # Written values are read back: whatever `transformers` cannot say shows as a difference.
                back = self.settings(self.read(values))
            except ConfigurationError as error:
                failed.append((name, [str(error)]))
                continue
            differences = compare(self.settings(config), back, f"transformers' {name}")
            if not differences:
                return values
            failed.append((name, differences))
        # The kind with the fewest differences is the one that the user most likely means.
        name, differences = min(failed, key=lambda each: len(each[1]))
        raise ConfigurationError(f"no model of transformers has this configuration. Nearest: {'; '.join(differences)}.")

    def _suiting(self, config: C) -> list[ModelType[C]]:
        """Return the kinds that the model may be of, at least one."""
        kinds = [kind for kind in self.kinds if kind.suits(config)]
        if not kinds:
            raise ConfigurationError(
                f"no model of transformers has {self.no_kind(config)}; known kinds of models: "
                f"{', '.join(kind.model_type for kind in self.kinds)}."
            )
        # Kinds that keep tensors elsewhere than the first one lack the parts that it has.
        return [kind for kind in kinds if kind.places is kinds[0].places]


def check_types(values: Mapping[str, Any], inside: str = "") -> None:
    """Refuse values of other types than those in :data:`TYPES`, before any of them is read.

    Args:
        values: the content of a ``config.json``.
        inside: what names of keys begin with in messages: the part that ``values`` is.

    Raises:
        ConfigurationError: the message names the key, its value and the type.
    """
    for key, value in values.items():
        if isinstance(value, Mapping):
            check_types(value, f"{inside}{key}.")
        if key not in TYPES or (value is None and key in NULLABLE):
            continue
        types, what = TYPES[key]
        # JSON's true is an int to Python.
        good = isinstance(value, types) and (bool in types or not isinstance(value, bool))
        if not good or (isinstance(value, int | float) and value < 0):
            step = f"Write {value:.0f}" if isinstance(value, float) and value.is_integer() else "Copy the file again"
            said = json.dumps(value, default=str)
            raise ConfigurationError(f"{inside}{key} is {said}; it must be {what}. {step}.")


def _check_counts(values: Mapping[str, Any]) -> None:
    """Refuse numbers of layers and experts that no model has, before lists of so many are made."""
    # Models of several parts have a configuration of each inside theirs.
    for part in (values, *(each for each in values.values() if isinstance(each, Mapping))):
        for name, value in part.items():
            # Tables of labels have numbers as names.
            if COUNTS.fullmatch(str(name)) and isinstance(value, int) and value > MAX_LAYERS:
                raise ConfigurationError(
                    f"{name} is {value}; at most {MAX_LAYERS} are read. Copy the configuration again."
                )
