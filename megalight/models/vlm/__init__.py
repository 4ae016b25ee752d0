"""Vision-language models: a vision tower, a projector and a language model of ours (LLaVA)."""

from importlib import import_module

from megalight.imports import lazy_members
from megalight.models.family import Family, WeightConversion, register
from megalight.models.vlm.config import ProjectorConfig as ProjectorConfig
from megalight.models.vlm.config import VLMConfig as VLMConfig
from megalight.models.vlm.hugging_face import READERS, config_from_transformers, config_to_transformers, weight_map
from megalight.models.vlm.hugging_face.image_processor import processed, processor_files
from megalight.models.vlm.hugging_face.llava import with_unread
from megalight.models.vlm.model import VLM as VLM
from megalight.models.vlm.model import TowerPart
from megalight.models.vlm.plan import tower_plan
from megalight.models.vlm.plan import vlm_plan as vlm_plan
from megalight.models.vlm.presets import PRESETS
from megalight.parallel.model_plans import PLANS

register(
    Family(
        name="vlm",
        config=VLMConfig,
        model=VLM,
        plan=vlm_plan,
        presets=PRESETS,
        module=lambda: import_module("megalight.models.vlm.module").VLMModule,
        weights=WeightConversion(
            tuple(READERS),
            config_from_transformers,
            weight_map,
            config_to_transformers,
            processed=processed,
            processors=processor_files,
            with_unread=with_unread,
        ),
        generates=True,
    )
)
PLANS.register(f"{TowerPart.__module__}.{TowerPart.__qualname__}")(tower_plan)

# Late: it imports Lightning, which the model itself does not need.
__getattr__ = lazy_members(__name__, {"VLMModule": "megalight.models.vlm.module"})
