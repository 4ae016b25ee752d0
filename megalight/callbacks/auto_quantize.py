"""A format of ModelOpt for each layer, within a number of bits per weight."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from megalight.checkpoint.ranks import Ranks
from megalight.errors import ConfigurationError
from megalight.plugins.modelopt import Choice, FormatSearch, Preset, check_device


class AutoQuantize(pl.Callback):
    """Finds the formats of layers that harm the loss least, by ModelOpt's ``auto_quantize`` over all ranks.

    ``trainer.validate`` reports the loss without quantization, calibrates each format on its batches, and scores each
    layer in each format by a forward and a backward pass. The file holds a preset for each layer:
    ``ModelOptQuantization(layers=file)`` quantizes by it.

    Args:
        formats: presets of ModelOpt; each layer gets one of them, or keeps its dtype.
        effective_bits: bits per weight, at most, in the mean over all linear layers. Those that keep their dtype, such
            as the output layer, count with 16.
        output: the file to write (JSON).
        exclude: globs over paths of layers that keep their dtype.
        score_batches: number of batches to score on; None: all of validation.

    Raises:
        ConfigurationError: a value is out of range, or no format is as narrow as ``effective_bits``. In set-up: a
            preset is unknown or not supported, the trainer has no batches, or its device cannot round to a format.
        MissingPackageError: ModelOpt is not installed.
    """

    def __init__(
        self,
        formats: Sequence[str],
        output: str | os.PathLike[str],
        effective_bits: float = 4.8,
        exclude: Sequence[str] = (),
        score_batches: int | None = None,
    ) -> None:
        if isinstance(formats, str) or not formats:
            raise ConfigurationError(f"formats={formats!r}; give a list of presets, such as [FP8_DEFAULT_CFG].")
        if not 0 < effective_bits <= 16:
            raise ConfigurationError(f"effective_bits={effective_bits}; it must be above 0 and at most 16.")
        if score_batches is not None and score_batches < 1:
            raise ConfigurationError(f"score_batches={score_batches}; it must be at least 1.")
        self.formats, self.exclude = tuple(formats), tuple(exclude)
        self.effective_bits = effective_bits
        self.output = Path(output)
        self.score_batches = score_batches
        self.found: dict[str, Choice] = {}
        self._batches: list[Any] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check what can be checked before batches are read."""
        if stage != "validate":
            raise ConfigurationError(
                f"AutoQuantize runs in trainer.validate, and this is {stage!r}. Quantize by its file there: "
                "ModelOptQuantization(layers=...)."
            )
        if trainer.limit_val_batches == 0:
            raise ConfigurationError("AutoQuantize needs validation batches, and limit_val_batches is 0. Raise it.")
        presets = [Preset.read(name, head=False) for name in self.formats]
        for preset in presets:
            check_device(preset, trainer.strategy.root_device)
        least = min(presets, key=lambda preset: preset.bits)
        if least.bits > self.effective_bits:
            raise ConfigurationError(
                f"effective_bits={self.effective_bits}, and the narrowest format, {least.name}, has {least.bits:g}. "
                "Add a narrower one, or raise effective_bits."
            )
        if getattr(trainer.strategy, "probe", None) is None:
            raise ConfigurationError(
                f"AutoQuantize needs a strategy of Megalight, which runs passes again; "
                f"{type(trainer.strategy).__name__} does not. Use MegatronStrategy."
            )

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the batch."""
        self._batches.append(batch)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Search, print the result and write it."""
        strategy: Any = trainer.strategy
        batches, self._batches = self._batches, []
        presets = [Preset.read(name, head=False) for name in self.formats]
        search = FormatSearch(strategy.parallel_model, presets, self.exclude)
        search.calibrate(lambda: [strategy.replay(batch) for batch in batches])
        search.score(lambda: [strategy.probe(batch) for batch in batches[: self.score_batches]])
        self.found = search.choose(self.effective_bits)
        Ranks().first(f"writing {self.output}", lambda: self._write(search.bits))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Forget the batches of a validation that has failed: another one brings its own."""
        self._batches = []

    def _write(self, bits: Mapping[str, float]) -> None:
        total = sum(choice.numel for choice in self.found.values())
        used = sum(choice.numel * bits.get(choice.preset, 16.0) for choice in self.found.values()) / total
        for path, choice in self.found.items():
            scores = ", ".join(f"{name} {score:.3g}" for name, score in choice.scores.items())
            print(f"{path}: {choice.preset} ({scores})", flush=True)
        print(f"{used:.3f} bits per weight, of at most {self.effective_bits:g}", flush=True)
        values = {
            "effective_bits": used,
            "layers": {path: choice.preset for path, choice in self.found.items()},
            "scores": {path: dict(choice.scores) for path, choice in self.found.items()},
        }
        self.output.parent.mkdir(parents=True, exist_ok=True)
        self.output.write_text(json.dumps(values, indent=2) + "\n")
