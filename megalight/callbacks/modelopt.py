"""Post-training quantization and quantization-aware training with ModelOpt."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor

from megalight.checkpoint.disk.publish import absolute, check_new
from megalight.checkpoint.ranks import Ranks
from megalight.errors import ConfigurationError, DataError, integer
from megalight.models.module import MegalightModule
from megalight.plugins.modelopt import (
    FormatSearch,
    LayerFormat,
    Preset,
    Quantizers,
    Search,
    check_device,
    needs_calibration,
    uncalibrated,
)


class ModelOptQuantization(pl.Callback):
    """Quantizes linear layers with a preset of ModelOpt, calibrated on validation batches.

    ``trainer.validate`` calibrates in its first run, which reports the loss without quantization; later runs report the
    loss with it. ``trainer.fit`` calibrates in its sanity check and then trains with rounded weights and inputs
    (quantization-aware training). Presets that search (AWQ, SmoothQuant) change weights then. A checkpoint that holds
    calibrated quantizers needs no calibration.

    Args:
        preset: name of a preset in ``modelopt.torch.quantization``, or of a recipe in ModelOpt's library, without
            ``.yaml`` (``general/ptq/fp8_default-kv_fp8``).
        head: also quantize the output layer, which presets leave out.
        kv: also round keys and values, by this preset: ``FP8_KV_CFG``, or ``NVFP4_KV_CFG`` on CUDA.
        measure: after calibration, run its batches again, and print loss and perplexity, ``exp(loss)``, before and
            with quantization.
        save_to: folder for a checkpoint of the calibrated model, also in remote storage; None: none is written here.
        layers: other presets for some layers: a mapping from globs over their paths (``layers.0.mlp.down``) to presets,
            or to ``none`` for those that keep their dtype, later ones first; or a file of
            :class:`~megalight.callbacks.AutoQuantize`, which holds one.

    Raises:
        ConfigurationError: before processes start: a preset is unknown, not supported, or names no layer of the model;
            ``layers`` cannot be read; the module is no MegalightModule. In set-up: the trainer has no batches to
            calibrate on, or its device cannot round to the format. Before the first batch: ``save_to`` is given, and
            the model is calibrated already.
        MissingPackageError: ModelOpt is not installed.
    """

    def __init__(
        self,
        preset: str = "FP8_DEFAULT_CFG",
        head: bool = False,
        kv: str | None = None,
        measure: bool = False,
        save_to: str | os.PathLike[str] | None = None,
        layers: Mapping[str, str] | str | os.PathLike[str] | None = None,
    ) -> None:
        self.transform = Quantizers(preset, head, kv, layers_of(layers))
        self.measure = measure
        self.save_to = save_to
        self._calibration: Search | None = None
        self._batches: list[Any] = []
        self._calibrates = False

    def attach(self, module: pl.LightningModule) -> None:
        """Add the transform to the model that the module will build. Called before processes start."""
        if not isinstance(module, MegalightModule):
            raise ConfigurationError(
                f"{type(module).__name__} is a plain LightningModule, which has built its layers already; "
                "quantization needs a MegalightModule, whose build_model makes the model. Derive from it, or leave "
                "ModelOptQuantization out."
            )
        # Called before processes start, and again in each of them.
        if self.transform not in module.transforms:
            module.transforms.append(self.transform)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Add the transform before the model is built."""
        if stage == "validate" and trainer.limit_val_batches == 0:
            raise ConfigurationError(
                "ModelOptQuantization calibrates on validation batches, and limit_val_batches is 0. Raise it; some "
                "hundred sequences are usual."
            )
        for preset in self.transform.read().values():
            check_device(preset, trainer.strategy.root_device)
        # For trainers without our strategy's early checks.
        self.attach(pl_module)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin to calibrate, unless a checkpoint has brought what calibration finds."""
        model = _parallel_model(trainer)
        # Of all ranks: a pipeline stage without quantized layers takes part in the messages of the others.
        any_rank = trainer.strategy.any_rank  # type: ignore[attr-defined]
        # Formats that find all scales in each pass have nothing to calibrate, and are saved as they are.
        needs_none = not self._calibrates and not any_rank(needs_calibration(model))
        if any_rank(bool(uncalibrated(model))) or needs_none:
            if self.save_to is not None:
                # Before the passes: a save replaces a checkpoint of the same name, which may be another model's.
                target = absolute(self.save_to)
                Ranks().first(f"checking {target}", lambda: check_new(target))
            engine = trainer.strategy.engine  # type: ignore[attr-defined]
            self._calibration = Search(model, self.transform.read().values(), engine=engine)
            self._calibration.begin()
            self._calibrates = True
        else:
            self._check_unused(trainer)

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the batch, if it is needed again."""
        if self._calibration is not None and (self.measure or self._calibration.reads_again):
            self._batches.append(batch)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """End calibration, and write the checkpoint if one is wanted."""
        if self._calibration is None:
            return
        batches, self._batches = self._batches, []

        def passes() -> list[tuple[Tensor, Tensor]]:
            return [trainer.strategy.replay(batch) for batch in batches]  # type: ignore[attr-defined]

        unseen = self._calibration.finish(passes)
        # Only now: if a pass fails, `on_exception` ends what it has begun.
        self._calibration = None
        # A stage of a pipeline may be alone in this, and the others would wait for it while they save.
        if trainer.strategy.any_rank(bool(unseen)):  # type: ignore[attr-defined]
            named = f" ({', '.join(unseen[:3])})" if unseen else ", all on other ranks"
            raise DataError(
                f"calibration gave no data, or values that are not finite, to {len(unseen) or 'some'} "
                f"quantizers{named}. Give at least one batch; a layer that its model does not call cannot be quantized."
            )
        if self.measure:
            sums, counts = (float(sum(values)) for values in zip(*passes(), strict=True))
            if trainer.is_global_zero:
                print(format_change(float(trainer.callback_metrics["val_loss"]), sums / counts), flush=True)
        if self.save_to is not None:
            # A string: Path would make a local folder of the address of remote storage.
            trainer.save_checkpoint(os.fspath(self.save_to))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Leave nothing of a calibration that has failed: the next validation begins another one."""
        self._batches = []
        if self._calibration is not None:
            self._calibration.abandon()
            self._calibration = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse to train a model that was not calibrated: its quantizers would return NaN."""
        model = _parallel_model(trainer)
        if trainer.strategy.any_rank(bool(uncalibrated(model))):  # type: ignore[attr-defined]
            raise ConfigurationError(
                f"the quantizers are not calibrated: num_sanity_val_steps={trainer.num_sanity_val_steps}, or there is "
                "no validation data. Set num_sanity_val_steps to the number of batches to calibrate on, or go on from "
                "a checkpoint of a calibrated model (megalight quantize)."
            )

        self._check_unused(trainer)

    def _check_unused(self, trainer: pl.Trainer) -> None:
        """Refuse ``save_to`` for a model that came calibrated: nothing would be written."""
        # A run that resumes has written it in its first part.
        resumes = trainer.state.fn == "fit" and trainer.ckpt_path is not None
        if self.save_to is not None and not self._calibrates and not resumes:
            raise ConfigurationError(
                f"save_to={os.fspath(self.save_to)}: the model comes from a checkpoint that is calibrated already, so "
                "nothing is calibrated and nothing would be written. Leave save_to out, or start from weights without "
                "quantizers."
            )

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse an empty validation, after which the model is as it was.

        Raises:
            DataError: there was no batch.
        """
        # Lightning calls no hook of validation then, and the run would end as if all were well.
        if stage == "validate" and not any(trainer.num_val_batches):
            raise DataError(
                "there is no validation batch, so nothing was calibrated and nothing was saved. Give data.split a "
                "second part that holds documents."
            )


def layers_of(given: Mapping[str, str] | str | os.PathLike[str] | None) -> tuple[tuple[str, str], ...]:
    """Return pairs of a glob and a preset, also from a file.

    Raises:
        ConfigurationError: the file is missing or holds something else.
    """
    if given is None or isinstance(given, Mapping):
        return tuple((given or {}).items())
    try:
        found = json.loads(Path(given).read_text())["layers"]
        return tuple((str(glob), str(preset)) for glob, preset in found.items())
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigurationError(
            f"layers={os.fspath(given)!r} is no file with presets of layers ({type(error).__name__}: {error}). Give "
            "one that AutoQuantize wrote, or a mapping from globs to presets."
        ) from error


def format_change(before: float, after: float) -> str:
    """Return losses and perplexities of a model before and with quantization, as a line."""
    return (
        f"perplexity {math.exp(before):.3f} before, {math.exp(after):.3f} quantized "
        f"(loss {before:.4f}, {after:.4f}: {after - before:+.4f})"
    )


def _parallel_model(trainer: pl.Trainer) -> Any:
    model = getattr(trainer.strategy, "parallel_model", None)
    if model is None:
        raise ConfigurationError(
            f"ModelOptQuantization needs a strategy of Megalight; {type(trainer.strategy).__name__} does not apply "
            "transforms to split models. Use MegatronStrategy."
        )
    return model


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
        if score_batches is not None:
            integer("score_batches", score_batches)
        self.formats, self.exclude = tuple(formats), tuple(exclude)
        self.effective_bits = effective_bits
        self.output = Path(output)
        self.score_batches = score_batches
        self.found: dict[str, LayerFormat] = {}
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
