"""ModelOpt: fake quantization, calibrated over all ranks.

Importing this folder does not import the package: that happens when a model is quantized.
"""

from __future__ import annotations

from megalight.parallel.transform import register as register_transform
from megalight.plugins.modelopt.auto_quantize import FormatSearch as FormatSearch
from megalight.plugins.modelopt.auto_quantize import LayerFormat as LayerFormat
from megalight.plugins.modelopt.calibration import Search as Search
from megalight.plugins.modelopt.calibration import needs_calibration as needs_calibration
from megalight.plugins.modelopt.calibration import uncalibrated as uncalibrated
from megalight.plugins.modelopt.presets import Preset as Preset
from megalight.plugins.modelopt.quantizers import Quantizers as Quantizers
from megalight.plugins.modelopt.quantizers import check_device as check_device


def register() -> None:
    """Add the transform, so that checkpoints of quantized models can be loaded."""
    register_transform(Quantizers)
