"""EAGLE-3: draft models for speculative decoding, trained beside the frozen model that they serve."""

from importlib import import_module
from typing import Any

from megalight.models.eagle.architecture import read_architecture as read_architecture
from megalight.models.eagle.architecture import read_vocabulary as read_vocabulary
from megalight.models.eagle.config import EagleConfig as EagleConfig
from megalight.models.eagle.model import DraftModel as DraftModel
from megalight.models.eagle.plan import eagle_plan as eagle_plan
from megalight.models.eagle.serving_format import export_draft as export_draft
from megalight.models.eagle.serving_format import import_draft as import_draft
from megalight.models.family import FAMILIES, Family, register
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


def __getattr__(name: str) -> Any:
    """Import ``EagleModule`` on first use, because it imports Lightning and the model itself does not need it."""
    if name == "EagleModule":
        return FAMILIES["eagle"].module()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
