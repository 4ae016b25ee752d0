"""Vision transformers, which turn images into features: towers of models that also read text."""

from megalight.models.vision.config import VisionConfig as VisionConfig
from megalight.models.vision.model import PackedImages as PackedImages
from megalight.models.vision.model import VisionTower as VisionTower
