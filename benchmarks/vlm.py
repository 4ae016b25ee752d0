"""Training steps of vision-language models on one GPU: Megalight in bf16 and FP8, and `transformers` with compile.

    python benchmarks/vlm.py RESULT.json
    python benchmarks/vlm.py RESULT.json --rows qwen2.5-vl
    python benchmarks/vlm.py RESULT.json --small          # tiny models on the CPU

Two shapes, with half of the language model's layers and a frozen tower. ``llava-1.5``: CLIP-L/336 and 7B, rows of one
image (576 tokens) and text. ``qwen2.5-vl``: the tower of Qwen2.5-VL and 7B, rows of three images of different sizes and
text. Each row runs in a process of its own: AdamW, clipping at norm 1, float32 masters (`transformers`: float32 weights
under autocast, the tower in bf16), equal random pixels and tokens in every step. FP8 is in both towers. `transformers`
has no FP8 here; its layers are compiled one by one, those of the dynamic tower only in their MLPs, as its attention has
loops over windows.

Before a row is timed, a narrow twin with weights that `transformers` drew is trained for a few steps; its losses must
be those of `transformers` in float32 (`--unchecked` skips this).

Model FLOPs: 6 x matmul weights of the language model (with the head, without the embedding) + causal attention; of the
frozen tower forward alone: 2 x its weights + attention for each patch; projector 6 x, but no gradient of its input.
Recomputation is not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bench import call
from benchmarks.dense_step import PACKAGES
from benchmarks.meter import Meter, device_name, forget, peak_gib
from benchmarks.peers.megalight import Steps, Wrong, show
from benchmarks.roofline import RATES
from benchmarks.step import Step
from megalight.data.multimodal.batch import ImageTextBatch, with_cuts
from megalight.data.multimodal.forms import Cut
from megalight.data.multimodal.models import form_of
from megalight.imports import has, version
from megalight.models.vision.flops import Passes
from megalight.models.vision.pixels import normalised
from megalight.models.vlm import ProjectorConfig, VLMConfig
from megalight.models.vlm.flops import Trained, flops_of_images, flops_per_token
from megalight.models.vlm.hugging_face import config_to_transformers
from megalight.models.vlm.module import VLMModule
from megalight.models.vlm.presets import PRESETS
from megalight.optim import AdamConfig
from megalight.parallel.precision import LowPrecisionOptions
from megalight.plugins.precision import MegatronLowPrecision
from megalight.strategies import DataParallel, MegatronStrategy
from megalight.types import TokenBatch

CHECKED_STEPS = 4
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2, "fp8": 3e-2}
"""Precision -> relative difference of a twin's losses from float32 that rounding may cause."""
GAP = 8
"""Tokens of text before each image."""
FROZEN_TOWER = Trained(tower=Passes(0.0, inputs=False))
"""Nobody needs the gradient of the frozen tower's features."""


@dataclass(frozen=True)
class Shape:
    """A model and its batches.

    Attributes:
        config: the model.
        sizes: height and width of the images of a row, in pixels.
        seq: tokens of a row.
        mbs: rows of a micro-batch.
        micro: micro-batches of a step.
    """

    config: VLMConfig
    sizes: tuple[tuple[int, int], ...]
    seq: int
    mbs: int
    micro: int = 2

    def batch(self, seed: int, rows: int) -> tuple[ImageTextBatch, list[Cut]]:
        """Return random rows, and their images."""
        random, form, token = np.random.default_rng(seed), form_of(self.config), self.config.image_token
        cuts = [
            [form.divided(random.integers(0, 256, (*size, 3), np.uint8)) for size in self.sizes] for _ in range(rows)
        ]
        # Of one part of the vocabulary, so that there is something to learn.
        tokens = torch.from_numpy(random.integers(0, min(token, 1000), (rows, self.seq)))
        at = 0
        for cut in cuts[0]:
            at += GAP
            tokens[:, at : at + len(cut.source)] = token
            at += len(cut.source)
        labels = tokens.roll(-1, 1)
        mask = (labels != token).float()
        mask[:, -1] = 0
        return with_cuts(TokenBatch(tokens, labels, mask), cuts, token, form), [cut for own in cuts for cut in own]

    def flops(self, trained: Trained = FROZEN_TOWER) -> float:
        """Return the model FLOPs of a step."""
        config, rows = self.config, self.mbs * self.micro
        _, cuts = self.batch(0, 1)
        windows = [part for cut in cuts for part in cut.windows]
        images = flops_of_images(config, [len(cut.pixels) for cut in cuts], windows, trained)
        return rows * (self.seq * flops_per_token(config, self.seq, trained) + images)


def part(name: str, divisor: int) -> VLMConfig:
    """Return a preset with a part of its language model's layers."""
    config = PRESETS[name]
    return replace(config, language=replace(config.language, num_layers=config.language.num_layers // divisor))


SHAPES: dict[str, Callable[[], Shape]] = {
    "llava-1.5": lambda: Shape(part("llava_1_5_7b", 2), ((336, 336),), 1024, 8),
    "qwen2.5-vl": lambda: Shape(part("qwen2_5_vl_7b", 2), ((476, 644), (672, 1008), (448, 448)), 2048, 4),
}
WAYS = ("megalight bf16", "megalight fp8", "transformers bf16")
ROWS = tuple(f"{shape}, {way}" for shape in SHAPES for way in WAYS)


def twin(shape: Shape) -> Shape:
    """Return a narrow model of the same kind, with few layers and short rows."""
    config = shape.config
    dynamic = config.vision.dynamic
    language = replace(config.language, num_layers=2, hidden_size=256, num_heads=2, num_kv_heads=2, ffn_hidden_size=512)
    language = replace(language, vocab_size=2048, head_dim=128, max_sequence_length=512)
    vision = replace(
        config.vision,
        num_layers=2,
        hidden_size=2 * config.vision.head_dim,
        num_heads=2,
        ffn_hidden_size=320,
        dynamic=None if dynamic is None else replace(dynamic, full_layers=(1,)),
        image_size=0 if dynamic is not None else 112,
    )
    projector = ProjectorConfig(
        merge=config.projector.merge,
        norm=config.projector.norm,
        hidden_size=config.projector.merge**2 * vision.hidden_size if dynamic is not None else 0,
    )
    sizes = ((112, 112),) if dynamic is None else ((112, 168), (56, 140))
    small = replace(config, language=language, vision=vision, projector=projector, image_token=2047, video_token=None)
    return Shape(small, sizes, 256, 1, 2)


def tiny(shape: Shape) -> Shape:
    """Return a shape for the CPU."""
    small = twin(shape)
    language = replace(small.config.language, hidden_size=128, num_heads=1, num_kv_heads=1, ffn_hidden_size=64)
    language = replace(language, vocab_size=128)
    return replace(small, config=replace(small.config, language=language, image_token=127), seq=128)


def step_of(device: str) -> Step:
    """Return what the meter asks of a step."""
    return Step(device=device, steps=5, warmup=3) if device == "cuda" else Step(device="cpu", steps=2, warmup=1)


class Same(Dataset[ImageTextBatch]):
    """One batch, over and over."""

    def __init__(self, batch: ImageTextBatch, steps: int) -> None:
        self.batch, self.steps = batch, steps

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> ImageTextBatch:
        return self.batch


def options_of(shape: Shape, precision: str, device: str) -> dict[str, Any]:
    """Return the Trainer's arguments for a precision. On CPU, products in FP8 are emulated."""
    if precision != "fp8":
        return {"precision": "bf16-mixed" if precision == "bf16" else "32-true"}
    modules = ["attention.*", "mlp.*", "tower.attention.*"]
    if shape.config.vision.ffn_hidden_size % 16 == 0:  # 3420, of Qwen2.5-VL, is no multiple, as FP8 needs it
        modules.append("tower.mlp.*")
    low = LowPrecisionOptions(towers=("language", "vision"), modules=modules, emulate=device == "cpu")
    return {"plugins": [MegatronLowPrecision(low)]}


def train(
    shape: Shape,
    precision: str,
    device: str,
    steps: int,
    tick: Callable[[Any], None],
    begin: Callable[[], None] = lambda: None,
    **options: Any,
) -> None:
    """Train Megalight's model."""
    module = VLMModule(shape.config, freeze=["*.tower.*"], **options)
    batch, _ = shape.batch(1, shape.mbs * shape.micro)
    trainer = pl.Trainer(
        accelerator=device,
        devices=1,
        strategy=MegatronStrategy(micro_batch_size=shape.mbs, data_parallel=DataParallel(level="optim")),
        **options_of(shape, precision, device),
        max_steps=steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        callbacks=[Steps(begin, tick)],
    )
    trainer.fit(module, DataLoader(Same(batch, steps), batch_size=None, pin_memory=device == "cuda"))


def reference(config: VLMConfig, device: str) -> nn.Module:
    """Return the model of `transformers`, in float32 with random weights and a frozen tower."""
    import transformers

    values = config_to_transformers(config)
    kind = getattr(transformers, values.pop("architectures")[0])
    values.pop("model_type")
    torch.manual_seed(1)
    with torch.device(device):
        model: nn.Module = kind._from_config(kind.config_class(**values), attn_implementation="sdpa")
    tower_of(model).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if ".merger." in name:  # it belongs to their tower
            parameter.requires_grad_(True)
    return model.train()


def tower_of(model: Any) -> nn.Module:
    """Return their tower."""
    found: nn.Module = getattr(model.model, "vision_tower", None) or model.model.visual
    return found


def inputs_of(shape: Shape, device: str) -> list[dict[str, Tensor]]:
    """Return the micro-batches of :func:`train` for `transformers`, on the device."""
    config, found = shape.config, list[dict[str, Tensor]]()
    batch, cuts = shape.batch(1, shape.mbs * shape.micro)
    images, patch = len(shape.sizes) * shape.mbs, config.vision.patch_size
    for micro in range(shape.micro):
        tokens = batch.tokens[micro * shape.mbs : (micro + 1) * shape.mbs].to(device)
        own = cuts[micro * images : (micro + 1) * images]
        asked = {"input_ids": tokens, "labels": tokens.masked_fill(tokens == config.image_token, -100)}
        if config.vision.dynamic is None:
            side = config.vision.image_size // patch
            pixels = torch.cat([normalised(torch.from_numpy(cut.pixels[-(side**2) :]), config.vision) for cut in own])
            square = pixels.view(len(own), side, side, 3, patch, patch).permute(0, 3, 1, 4, 2, 5)
            asked["pixel_values"] = square.reshape(len(own), 3, side * patch, side * patch).to(device)
        else:
            merge, frames = config.projector.merge, config.vision.dynamic.frames
            # Squares row by row, and every pixel in all frames.
            pixels = torch.cat(
                [
                    normalised(torch.from_numpy(cut.pixels), config.vision).view(cut.features, -1)[cut.source]
                    for cut in own
                ]
            )
            pixels = pixels.view(-1, 3, 1, patch**2).expand(-1, -1, frames, -1).flatten(1)
            asked["pixel_values"] = pixels.to(device)
            grids = [[1, merge * cut.grid[0], merge * cut.grid[1]] for cut in own]
            asked["image_grid_thw"] = torch.tensor(grids, device=device)
            asked["mm_token_type_ids"] = (tokens == config.image_token).int()
        found.append(asked)
    return found


def train_theirs(
    model: Any, shape: Shape, precision: str, device: str, steps: int, tick: Callable[[float], None], lr: float
) -> None:
    """Train the model of `transformers` in a plain loop; ``tick`` gets the loss, if it asks for one."""
    adam = AdamConfig(lr=lr)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=lr, betas=adam.betas, eps=adam.eps, weight_decay=0.0, fused=device == "cuda"
    )
    micros = inputs_of(shape, device)
    for _ in range(steps):
        mean = torch.zeros((), device=device)
        for asked in micros:
            with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
                loss = model(**asked, use_cache=False).loss
            (loss / len(micros)).backward()
            mean += loss.detach() / len(micros)
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tick(mean)


def compiled(model: Any) -> None:
    """Compile the layers of a model of `transformers` one by one, as far as the host need not read sizes in them."""
    for layer in model.model.language_model.layers:
        layer.compile()
    tower = tower_of(model)
    for block in getattr(tower, "blocks", ()):
        block.mlp.compile()
    encoder = getattr(getattr(tower, "vision_model", tower), "encoder", None)
    for layer in getattr(encoder, "layers", ()):
        layer.compile()


def check(shape: Shape, way: str, precision: str, device: str) -> dict[str, Any]:
    """Train a narrow twin from equal weights, and return how far its losses are from `transformers` in float32.

    Raises:
        Wrong: too far.
    """
    small, lr = twin(shape), 1e-3
    model, exact, found = reference(small.config, device), list[float](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # type: ignore[operator]  # as all of their models have it
        train_theirs(model, small, "fp32", device, CHECKED_STEPS, lambda loss: exact.append(float(loss)), lr)
        if way == "megalight":
            optimizer = AdamConfig(lr=lr, weight_decay=0.0)
            tick = lambda strategy: found.append(float(strategy.report.loss))  # noqa: E731
            train(small, precision, device, CHECKED_STEPS, tick, weights=folder, optimizer=optimizer)
        else:
            again = reference(small.config, device)
            train_theirs(again, small, precision, device, CHECKED_STEPS, lambda loss: found.append(float(loss)), lr)
    worst = max(abs(a - b) / b for a, b in zip(found, exact, strict=True))
    print(f"twin: losses {show(found)}, in float32 {show(exact)}, relative difference {worst:.1e}", flush=True)
    if not worst < TOLERANCE[precision]:
        raise Wrong(f"the twin's losses differ from float32 by {worst:.1e}: {found}, {exact}")
    return {"twin_losses": found, "twin_losses_float32": exact, "twin_difference": worst}


def measure(row: str, device: str, unchecked: bool) -> dict[str, Any]:
    """Measure a row in this process."""
    name, words = row.split(", ")
    way, precision = words.split()
    shape, step = SHAPES[name](), step_of(device)
    if device == "cpu":
        shape, precision = tiny(shape), "fp32" if precision == "bf16" else precision
    if way == "transformers" and not has("transformers"):
        return {"row": row, "refused": "transformers is not installed"}
    checks = {} if unchecked else check(shape, way, precision, device)
    forget(step)
    meter = Meter(step)
    if way == "megalight":
        train(shape, precision, device, meter.total, lambda strategy: meter.tick(), meter.start)
    else:
        model = reference(shape.config, device)
        for parameter in model.parameters():
            if precision == "bf16" and not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
        if device == "cuda":
            compiled(model)
        meter.start()
        train_theirs(model, shape, precision, device, meter.total, lambda loss: meter.tick(), 1e-4)
    peak = peak_gib(step)
    seconds = meter.seconds()
    median, where = statistics.median(seconds), device_name(step)
    tokens, flops = shape.seq * shape.mbs * shape.micro, shape.flops()
    rate = flops / median / 1e12
    return {
        "row": row,
        "device": where,
        "seconds": median,
        "seconds_min": min(seconds),
        "seconds_max": max(seconds),
        "tflops": rate,
        "share_of_sustained": rate * 1e12 / RATES[where].gemm if where in RATES else None,
        "tokens": tokens,
        "image_tokens": int((shape.batch(0, 1)[0].tokens == shape.config.image_token).sum()) * shape.mbs * shape.micro,
        "tokens_per_second": tokens / median,
        "peak_gib": peak,
        "checks": checks,
    }


def in_process(row: str, small: bool, unchecked: bool, limit: float) -> dict[str, Any]:
    """Run a row in a process of its own; if it failed, return the end of what it said."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder) / "row.json", Path(folder) / "row.log"
        words = [sys.executable, str(Path(__file__).resolve()), str(out), "--one", row]
        words += ["--small"] * small + ["--unchecked"] * unchecked
        problem = call(words, {}, log, limit)
        if problem is None:
            found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
            return found
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        return {"row": row, "failed": "\n".join([problem, *lines[-25:]])}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Make a table, with the rate of each of our rows relative to `transformers` of its shape."""
    theirs = {row["row"].split(",")[0]: row for row in rows if "transformers" in row["row"] and "seconds" in row}
    lines = ["| | s/step | TFLOP/s | tokens/s | peak GiB | x transformers |", "| --- |" + " ---: |" * 5]
    for row in rows:
        if "seconds" not in row:
            lines.append(f"| {row['row']} | {(row.get('refused') or row['failed']).splitlines()[0]} | | | | |")
            continue
        peer = theirs.get(row["row"].split(",")[0])
        lines.append(
            f"| {row['row']} | {row['seconds']:.4f} | {row['tflops']:.1f} | {row['tokens_per_second']:.0f} | "
            f"{row['peak_gib']:.1f} | {'' if peer is None else format(peer['seconds'] / row['seconds'], '.2f')} |"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--rows", nargs="+", default=[""], help="rows whose names have one of these words in them")
    parser.add_argument("--small", action="store_true", help="tiny models on the CPU")
    parser.add_argument("--unchecked", action="store_true", help="do not train the twins")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds that a row may take")
    parser.add_argument("--one", choices=ROWS, help=argparse.SUPPRESS)
    a = parser.parse_args(words)
    if a.one:
        row = measure(a.one, "cpu" if a.small else "cuda", a.unchecked)
        a.result.write_text(json.dumps(row), encoding="utf-8")
        return 0
    chosen = [row for row in ROWS if any(word in row for word in a.rows)]
    rows = list[dict[str, Any]]()
    for row in map(partial(in_process, small=a.small, unchecked=a.unchecked, limit=a.limit), chosen):
        rows.append(row)
        record = {
            "command": " ".join(["benchmarks/vlm.py", "RESULT.json", *(words or sys.argv[1:])[1:]]),
            "versions": {"torch": torch.__version__, "cuda": torch.version.cuda}
            | {name: found for name in PACKAGES if (found := version(name))},
            "rows": rows,
        }
        a.result.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")  # a later row may end the call
        print(table(rows[-1:]).splitlines()[2], flush=True)
        if "failed" in row:
            print(row["failed"], flush=True)
    print(table(rows), flush=True)
    return any("failed" in row for row in rows)


if __name__ == "__main__":
    raise SystemExit(main())
