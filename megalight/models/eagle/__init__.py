"""EAGLE-3: draft models for speculative decoding, trained beside the frozen model that they serve."""

from importlib import import_module

from megalight.imports import lazy_members
from megalight.models.eagle.architecture import read_architecture as read_architecture
from megalight.models.eagle.architecture import read_vocabulary as read_vocabulary
from megalight.models.eagle.config import EagleConfig as EagleConfig
from megalight.models.eagle.model import DraftModel as DraftModel
from megalight.models.eagle.plan import eagle_plan as eagle_plan
from megalight.models.eagle.serving_format import export_draft as export_draft
from megalight.models.eagle.serving_format import import_draft as import_draft
from megalight.models.family import Family, register
from megalight.registry import Registry

register(
    Family(
        name="eagle",
        config=EagleConfig,
        model=DraftModel,
        plan=eagle_plan,
        presets=Registry("EAGLE preset"),
        module=lambda: import_module("megalight.models.eagle.module").EagleModule,
    )
)

# Late: it imports Lightning, which the model itself does not need.
__getattr__ = lazy_members(__name__, {"EagleModule": "megalight.models.eagle.module"})
