"""GPT: decoder-only language models in the styles of Llama, Qwen and GPT-2."""

from importlib import import_module

from megalight.imports import lazy_members
from megalight.models.config import DropoutConfig as DropoutConfig
from megalight.models.config import InitConfig as InitConfig
from megalight.models.family import Family, WeightConversion, register
from megalight.models.gpt.config import GPTBackendConfig as GPTBackendConfig
from megalight.models.gpt.config import GPTConfig as GPTConfig
from megalight.models.gpt.config import MultiTokenConfig as MultiTokenConfig
from megalight.models.gpt.config import NormConfig as NormConfig
from megalight.models.gpt.hugging_face import (
    READERS,
    config_from_transformers,
    config_to_transformers,
    weight_map,
    without_missing_depths,
)
from megalight.models.gpt.mixer_config import AttentionConfig as AttentionConfig
from megalight.models.gpt.mixer_config import DeltaNetConfig as DeltaNetConfig
from megalight.models.gpt.mixer_config import LatentConfig as LatentConfig
from megalight.models.gpt.mixer_config import MambaConfig as MambaConfig
from megalight.models.gpt.mixer_config import PositionConfig as PositionConfig
from megalight.models.gpt.mixer_config import TemperatureConfig as TemperatureConfig
from megalight.models.gpt.model import GPT as GPT
from megalight.models.gpt.model import GPTOutput as GPTOutput
from megalight.models.gpt.plan import gpt_plan as gpt_plan
from megalight.models.gpt.presets import PRESETS

register(
    Family(
        name="gpt",
        config=GPTConfig,
        model=GPT,
        plan=gpt_plan,
        presets=PRESETS,
        module=lambda: import_module("megalight.models.gpt.module").GPTModule,
        weights=WeightConversion(
            tuple(READERS), config_from_transformers, weight_map, config_to_transformers, without_missing_depths
        ),
        generates=True,
    )
)

# Late: it imports Lightning, which the model itself does not need.
__getattr__ = lazy_members(__name__, {"GPTModule": "megalight.models.gpt.module"})
