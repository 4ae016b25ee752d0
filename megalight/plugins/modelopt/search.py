"""Calibration that searches scales of input features, by ModelOpt's own functions.

These are AWQ (https://arxiv.org/abs/2306.00978) and SmoothQuant (https://arxiv.org/abs/2211.10438).
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable

import torch

from megalight.errors import ConfigurationError
from megalight.parallel.model import ParallelModel
from megalight.plugins.modelopt.calibration import uncalibrated
from megalight.plugins.modelopt.package import modelopt
from megalight.plugins.modelopt.places import places, pre_quant_scale, quantized
from megalight.plugins.modelopt.presets import Preset

log = logging.getLogger(__name__)


class Search:
    """Finds what each quantizer holds, by passes over the same batches.

    Inputs of each layer are multiplied by a scale for each feature, and the weight's columns are divided by it.

    Args:
        model: a model with :class:`~megalight.plugins.modelopt.quantizers.Quantizers`, and with values.
        preset: a preset that searches.

    Raises:
        ConfigurationError: several ranks hold parts of a layer, or see different tokens.
    """

    def __init__(self, model: ParallelModel, preset: Preset) -> None:
        mesh = model.mesh
        several = {axis: mesh.size(axis) for axis in ("dp", "cp", "tp") if mesh.size(axis) > 1}
        if several or model.shards is not None:
            sizes = ", ".join(f"{axis}={size}" for axis, size in several.items()) or "sharded parameters"
            raise ConfigurationError(
                f"preset {preset.name!r} searches scales by the errors of whole layers on all data, and this run has "
                f"{sizes}. Calibrate on one device, or with pipeline_parallel alone; the checkpoint loads under any "
                "layout."
            )
        self.model, self.preset = model, preset
        self._layers = {path: layer for path, layer in quantized(model.root) if layer.weight_quantizer.is_enabled}

    def begin(self) -> None:
        """Let forward passes round nothing."""
        for place in places(self.model.root):
            place.quantizer.disable_quant()
            place.quantizer.reset_amax()
        for layer in self._layers.values():
            # What calibration finds is multiplied even if nothing is rounded, and it is NaN until then.
            del layer.input_quantizer._pre_quant_scale

    @torch.no_grad()
    def finish(self, passes: Callable[[], object]) -> list[str]:
        """Search, and round from now on. The values of weights change.

        Args:
            passes: runs all batches forward; it is called once or twice.

        Returns:
            the quantizers of this rank that found no finite values.
        """
        for place in places(self.model.root):
            place.quantizer.enable_quant()
        options = dict(self.preset.algorithm)
        function = getattr(modelopt("torch.quantization.model_calib"), options.pop("method"))
        said = io.StringIO()
        # It prints its progress.
        with contextlib.redirect_stdout(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(self.model.root, lambda model: passes(), **options)
        log.info("%s", said.getvalue().strip())
        missing = [f"{path}.input_quantizer" for path, layer in self._layers.items() if pre_quant_scale(layer) is None]
        return [*missing, *uncalibrated(self.model)]
