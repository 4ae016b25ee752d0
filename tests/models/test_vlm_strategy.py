"""Vision-language models under MegatronStrategy: every layout trains the same model as one device by hand."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.utils.data import DataLoader

from megalight.callbacks import Adapters
from megalight.data.multimodal.batch import ImageTextBatch
from megalight.errors import LayoutError
from megalight.models.config import DropoutConfig
from megalight.models.gpt import AttentionConfig
from megalight.models.transforms import LoRA
from megalight.models.vlm import VLM
from megalight.models.vlm.module import VLMModule
from megalight.models.vlm.task import pack_images
from megalight.nn.init import initialize
from megalight.nn.moe import MoEConfig
from megalight.optim import GroupRule
from megalight.parallel.context.attention import ContextAttention, ContextOptions
from megalight.parallel.context.spec import ContextGroups
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.transform import apply_transforms
from megalight.plugins.precision import MegatronLowPrecision
from megalight.strategies import DataParallelOptions, MegatronFSDPStrategy, MegatronStrategy, MegatronTowersStrategy
from tests.models.vlm_samples import (
    CONFIG,
    GEMMA,
    HUGE,
    INTERN,
    LANGUAGE,
    NAFLEX,
    QWEN,
    QWEN3,
    RADIO,
    TILES,
    batch,
    small,
)
from tests.strategies.training import (
    ADAM,
    CLIP,
    SEED,
    From,
    Gradients,
    Losses,
    assert_same_gradients,
    assert_same_run,
    canonical,
    gathered,
    whole,
)
from tests.support.environment import trainer
from tests.support.workers import run

CONFIGS = {
    "llava": CONFIG,
    "deep": replace(CONFIG, language=replace(LANGUAGE, num_layers=4, tie_embeddings=True)),
    # As SigLIP: no class token, a bias of patches, a norm at the end.
    "aligned": CONFIG,
    # As LLaVA-OneVision: SigLIP, whose norm at the end is not read, and a learned row after each image.
    "onevision": replace(
        small(class_token=False, patch_bias=True, input_norm=False, image_size=9, margin=1),
        newline=True,
        language=replace(LANGUAGE, num_layers=4, attention=AttentionConfig(qkv_bias=True)),
    ),
    "qwen": QWEN,
    "deep_qwen": replace(QWEN, language=replace(QWEN.language, num_layers=4)),
    "wide": replace(
        QWEN,
        language=replace(QWEN.language, hidden_size=64, ffn_hidden_size=64),
        vision=replace(QWEN.vision, hidden_size=32, ffn_hidden_size=32),
    ),
    "odd": replace(
        QWEN,
        language=replace(QWEN.language, hidden_size=64, ffn_hidden_size=64),
        vision=replace(QWEN.vision, hidden_size=32, ffn_hidden_size=26),
    ),
    "qwen3": QWEN3,
    "deep_qwen3": replace(QWEN3, language=replace(QWEN3.language, num_layers=4)),
    "gemma": GEMMA,
    "intern": INTERN,
    "experts": replace(
        QWEN,
        language=replace(QWEN.language, moe=MoEConfig(num_experts=4, ffn_hidden_size=12, pattern=(False, True))),
    ),
    "frozen": CONFIG,
    "dropping": replace(
        CONFIG,
        vision=replace(CONFIG.vision, dropout=DropoutConfig(hidden=0.1, attention=0.1)),
        language=replace(LANGUAGE, dropout=DropoutConfig(hidden=0.1)),
    ),
    "tiles": TILES,
    "naflex": NAFLEX,
    "radio": RADIO,
    # As DINOv2 with registers: a class token, too, and each patch is a token.
    "registers": small(register_tokens=2, patch_bias=True, input_norm=False, layer_scale=0.5),
    "plain": small(class_token=False, patch_bias=True, input_norm=False, output_norm=True, activation="gelu_tanh"),
}
FREEZE = {
    "aligned": ("*.tower.*", "model.layers.*", "model.head.*", "model.embed.word.*"),
    "frozen": ("*.tower.*", "*.projector.*"),
}
"""Name of a case -> what is not trained: in the first, all but the projector, as in LLaVA's first stage."""
ADAPTERS: dict[str, dict[str, Any]] = {
    "tower_adapters": {"targets": ["tower.layers.*", "projector.*"]},
    "language_adapters": {"targets": ["layers.*"], "exclude": ["embed.*"]},
    "both_adapters": {"targets": ["layers.*"]},
}
RATES = {"rates": {"*.tower.*": 0.1, "*.projector.*": 10.0, "*.embed.word.*": 0.5}}
"""Name of a case -> pattern -> factor of the learning rate."""
CONFIGS |= dict.fromkeys((*ADAPTERS, *RATES), CONFIG)
WITH_ROWS = {f"{name}_rows": CONFIGS[name] for name in ("llava", "deep", "deep_qwen", "deep_qwen3", "experts", "gemma")}
"""Models whose batches tell which tokens have a loss."""
CONFIGS |= WITH_ROWS
COUNTS = {
    "mixed": [(1, 0, 2, 3), (0, 0, 1, 0)],
    "none": [(0, 0, 0, 0)],
    "one": [(0, 0, 0, 1)],
    "many": [(4, 4, 3, 4), (4, 0, 4, 4)],
    "huge": [(HUGE, 0, 1, 1), (0, 1, 0, HUGE)],
    "six": [(1, 0, 2, 3), (0, 0, 1, 0), (3, 1, 0, 1)] * 2,
    # Every step has the same shapes.
    "same": [(1, 1, 1, 1)] * 4,
    "same_huge": [(HUGE, HUGE, HUGE, HUGE)] * 4,
    # The third micro-batch has other images than the rest.
    "nearly_same": [(1, 1, 2, 1)] * 4,
    # Shapes of the first of two replicas stay the same, those of the second one change once.
    "other_replica": [(1, 1, 1, 1)] * 3 + [(1, 1, 2, 1)] * 3,
}
"""Images of each row of each step."""


def rows_of(name: str, counts: tuple[int, ...], step: int) -> ImageTextBatch:
    """Return the global batch of a step."""
    found = batch(counts, seed=step, config=CONFIGS[name])
    return found.with_rows() if name in WITH_ROWS else found


class Shares(torch.utils.data.Dataset[ImageTextBatch]):
    """This rank's share of each step's global batch."""

    def __init__(self, name: str, counts: str, replicas: int, rank: int) -> None:
        self.name, self.counts, self.replicas, self.rank = name, COUNTS[counts], replicas, rank

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, step: int) -> Any:
        whole_batch = rows_of(self.name, self.counts[step], step)
        return whole_batch.split(len(whole_batch) // self.replicas)[self.rank]


class WithData(VLMModule):
    """A VLMModule that brings its own data."""

    case = ("llava", "mixed")

    def train_dataloader(self) -> DataLoader[Any]:
        share = self.trainer.strategy.distributed_sampler_kwargs
        rows = Shares(*self.case, share["num_replicas"], share["rank"])
        return DataLoader(rows, batch_size=None, sampler=From(self.trainer.global_step, len(rows)))


def fit(name: str, counts: str, options: dict[str, Any], also: Sequence[Callback] = ()) -> dict[str, Any]:
    """Train in every rank of the pool; losses, norms, initial and final weights, first gradients."""
    options, shared = dict(options), dict[str, Any]()
    if (low := options.pop("low", None)) is not None:
        options["precision_plugin"], shared["precision"] = MegatronLowPrecision(low, "64-true"), None
    if options.get("sharded"):
        strategy: Any = MegatronFSDPStrategy(**{key: value for key, value in options.items() if key != "sharded"})
    else:
        kind = options.pop("kind", MegatronTowersStrategy if "tower" in options else MegatronStrategy)
        strategy = kind(**{"data_parallel": DataParallelOptions(), **options})
    losses, gradients = Losses(), Gradients()
    rules = tuple(GroupRule(pattern, lr_scale=scale) for pattern, scale in RATES.get(name, {}).items())
    module = WithData(CONFIGS[name], optimizer=replace(ADAM, rules=rules), seed=SEED, freeze=FREEZE.get(name, ()))
    module.case = (name, counts)
    callbacks: list[Any] = [losses, *also] if options.get("sharded") else [losses, gradients, *also]
    if name in ADAPTERS:
        callbacks.append(Adapters(rank=3, alpha=6.0, **ADAPTERS[name]))
    shared |= {"use_distributed_sampler": False, "gradient_clip_val": CLIP, "limit_val_batches": 0}
    trainer(strategy, callbacks=callbacks, max_steps=len(COUNTS[counts]), **shared).fit(module)
    final = gathered(strategy, module)
    return {
        "losses": losses.losses,
        "norms": losses.norms,
        "initial": losses.initial,
        "final": final,
        "gradients": gradients.first,
    }


@functools.cache
def by_hand(name: str, counts: str) -> dict[str, Any]:
    """The same run with torch alone: one device, whole batches, torch's own AdamW and clipping."""
    config = CONFIGS[name]
    model = VLM(config).double()
    if name in ADAPTERS:
        apply_transforms(model, [LoRA(rank=3, alpha=6.0, **ADAPTERS[name])])
    initialize(model, SEED, "model.")
    named = {f"model.{key}": parameter for key, parameter in model.named_parameters()}
    for key in (key for pattern in FREEZE.get(name, ()) for key in fnmatch.filter(named, pattern)):
        named[key].requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    rows = [
        {
            "params": [parameter],
            "weight_decay": ADAM.weight_decay if parameter.ndim > 1 else 0.0,
            "lr": ADAM.lr * next((s for glob, s in RATES.get(name, {}).items() if fnmatch.fnmatch(key, glob)), 1.0),
        }
        for key, parameter in named.items()
        if parameter.requires_grad
    ]
    optimizer = torch.optim.AdamW(rows, lr=ADAM.lr, betas=ADAM.betas, eps=ADAM.eps)
    initial, losses, norms, gradients = whole(model), [], [], {}
    for step, each in enumerate(COUNTS[counts]):
        found = batch(each, seed=step, config=config)
        images, source = found.parts()
        packed_images = None
        if images.lengths:
            packed_images = pack_images(config, images, source.flatten(), 1)
        output = model(
            found.tokens.flatten(), found.sequences, labels=found.labels.flatten(), packed_images=packed_images
        )
        loss = (output.losses * found.loss_mask.flatten()).sum() / found.loss_mask.sum()
        optimizer.zero_grad(set_to_none=False)
        for parameter in trained:  # of the tower too, where no row has an image
            parameter.grad = torch.zeros_like(parameter)
        if loss.requires_grad:  # not where only the tower is trained, and no row has an image
            loss.backward()
        gradients = gradients or canonical(model, {n: p.grad for n, p in model.named_parameters() if p.requires_grad})
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return {"losses": losses, "norms": norms, "initial": initial, "final": whole(model), "gradients": gradients}


SP = {"tensor_parallel": 2, "sequence_parallel": True}
ALL_GATHER = ContextOptions("all_gather")
CHOSEN = [
    ("llava", "mixed", 1, {"micro_batch_size": 1}),
    ("plain", "mixed", 2, {**SP, "micro_batch_size": 2}),
    ("aligned", "mixed", 4, {**SP, "micro_batch_size": 1}),
    ("tower_adapters", "mixed", 2, {**SP, "micro_batch_size": 2}),
    ("language_adapters", "mixed", 2, {**SP, "micro_batch_size": 1}),
    (
        "qwen",
        "mixed",
        2,
        {**SP, "recompute": RecomputeOptions(vision=RecomputeOptions(granularity="full")), "micro_batch_size": 2},
    ),
    ("gemma", "mixed", 2, {**SP, "micro_batch_size": 2}),
    ("intern", "mixed", 2, {**SP, "micro_batch_size": 2}),
    ("naflex", "mixed", 2, {**SP, "micro_batch_size": 2}),
    ("radio", "mixed", 2, {**SP, "micro_batch_size": 2}),
    # The head is a stage by itself, or the last layer is with it; shares of tokens do not skip.
    ("deep_rows", "mixed", 2, {"pipeline_parallel": 2, "pipeline_layout": "Etttt|L", "micro_batch_size": 1}),
    ("experts_rows", "mixed", 2, {**SP, "expert_parallel": 2, "micro_batch_size": 2}),
    ("rates", "mixed", 2, {**SP, "micro_batch_size": 2}),
    ("llava_rows", "mixed", 2, {"sharded": True, "micro_batch_size": 1}),
    ("llava_rows", "mixed", 2, {"context_parallel": 2, "micro_batch_size": 2}),
    ("deep_rows", "mixed", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2, "micro_batch_size": 1}),
    ("deep_rows", "mixed", 2, {"recompute": RecomputeOptions(granularity="full", num_layers=2), "micro_batch_size": 1}),
    ("intern", "many", 2, {"context_parallel": 2, "micro_batch_size": 2}),
    ("qwen3", "huge", 2, {**SP, "micro_batch_size": 2}),
    ("registers", "mixed", 2, {**SP, "micro_batch_size": 2}),
    ("qwen", "one", 2, {"context_parallel": 2, "context": ALL_GATHER, "micro_batch_size": 1}),
]
FULL = [
    # The tower is a stage by itself, before all layers.
    ("deep_qwen", "mixed", 2, {"pipeline_parallel": 2, "pipeline_layout": "E|ttttL", "micro_batch_size": 1}),
    ("llava", "one", 2, {"micro_batch_size": 2}),
    ("llava", "mixed", 2, {"context_parallel": 2, "micro_batch_size": 2}),
    ("llava", "one", 2, {"sharded": True, "micro_batch_size": 1}),
    ("onevision", "mixed", 2, {**SP, "micro_batch_size": 2}),
    ("tiles", "mixed", 4, {"context_parallel": 2, "micro_batch_size": 1}),
    ("deep_qwen", "one", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2, "micro_batch_size": 1}),
    ("qwen3", "mixed", 2, {**SP, "micro_batch_size": 2}),
    ("qwen3", "one", 2, {"context_parallel": 2, "micro_batch_size": 2}),
    ("intern", "one", 2, {"context_parallel": 2, "micro_batch_size": 2}),
    ("registers", "mixed", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("deep_qwen_rows", "mixed", 4, {"tensor_parallel": 2, "pipeline_parallel": 2, "micro_batch_size": 1}),
    ("qwen", "mixed", 1, {"micro_batch_size": 1}),
    ("tiles", "mixed", 2, {**SP, "micro_batch_size": 2}),
    ("onevision", "mixed", 2, {"context_parallel": 2, "micro_batch_size": 2}),
    ("llava_rows", "mixed", 1, {"micro_batch_size": 4}),
    ("deep_qwen3_rows", "mixed", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("experts_rows", "mixed", 2, {"expert_parallel": 2, "micro_batch_size": 1}),
    ("gemma_rows", "mixed", 2, {"tensor_parallel": 2, "micro_batch_size": 1}),
    ("llava", "mixed", 2, {"tensor_parallel": 2, "micro_batch_size": 2}),
    ("llava", "mixed", 2, {"micro_batch_size": 1}),
    ("llava", "mixed", 4, {**SP, "pipeline_parallel": 2, "micro_batch_size": 1}),
    ("onevision", "mixed", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("tower_adapters", "one", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("qwen", "mixed", 4, {**SP, "context_parallel": 2, "micro_batch_size": 2}),
    ("qwen3", "mixed", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("gemma", "mixed", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("tiles", "one", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("tiles", "mixed", 2, {"sharded": True, "micro_batch_size": 2}),
    ("llava", "many", 2, {**SP, "micro_batch_size": 1}),
    ("llava", "many", 4, {"micro_batch_size": 1}),
    ("qwen", "huge", 4, {"micro_batch_size": 1}),
    ("qwen", "huge", 2, {"context_parallel": 2, "micro_batch_size": 2}),
    ("deep_qwen", "huge", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2, "micro_batch_size": 1}),
    ("naflex", "one", 4, {"context_parallel": 2, "pipeline_parallel": 2, "micro_batch_size": 1}),
    ("radio", "none", 2, {**SP, "micro_batch_size": 1}),
    ("radio", "one", 2, {"context_parallel": 2, "micro_batch_size": 2}),
    ("registers", "mixed", 2, {"sharded": True, "micro_batch_size": 1}),
    ("deep", "mixed", 4, {**SP, "pipeline_parallel": 2, "pipeline_layout": "E|t|tt|tL", "micro_batch_size": 1}),
    ("qwen3", "mixed", 2, {"tensor_parallel": 2, "micro_batch_size": 1}),
    ("qwen3", "none", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("qwen3", "mixed", 4, {**SP, "pipeline_parallel": 2, "micro_batch_size": 1}),
    ("deep_qwen3", "mixed", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2, "micro_batch_size": 1}),
    ("qwen3", "mixed", 4, {**SP, "context_parallel": 2, "micro_batch_size": 2}),
    ("qwen3", "mixed", 2, {"recompute": RecomputeOptions(granularity="full"), "micro_batch_size": 1}),
    (
        "qwen3",
        "mixed",
        2,
        {"recompute": RecomputeOptions(vision=RecomputeOptions(granularity="full")), "micro_batch_size": 1},
    ),
    ("qwen3", "mixed", 2, {"sharded": True, "micro_batch_size": 1}),
    ("gemma", "one", 2, {"tensor_parallel": 2, "micro_batch_size": 1}),
    ("gemma", "none", 2, {**SP, "micro_batch_size": 1}),
    ("gemma", "mixed", 2, {"micro_batch_size": 1}),
    ("gemma", "mixed", 4, {**SP, "pipeline_parallel": 2, "micro_batch_size": 1}),
    ("gemma", "mixed", 2, {"recompute": RecomputeOptions(granularity="full"), "micro_batch_size": 1}),
    ("gemma", "mixed", 2, {"sharded": True, "micro_batch_size": 1}),
    ("intern", "mixed", 2, {"tensor_parallel": 2, "micro_batch_size": 1}),
    ("intern", "none", 2, {**SP, "micro_batch_size": 1}),
    ("intern", "one", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("intern", "mixed", 2, {"micro_batch_size": 1}),
    ("intern", "mixed", 4, {**SP, "context_parallel": 2, "micro_batch_size": 2}),
    ("intern", "mixed", 2, {"sharded": True, "micro_batch_size": 1}),
    ("qwen", "mixed", 2, {"tensor_parallel": 2, "micro_batch_size": 1}),
    ("qwen", "none", 2, {**SP, "micro_batch_size": 1}),
    ("qwen", "one", 2, {**SP, "micro_batch_size": 1}),
    ("qwen", "mixed", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("qwen", "none", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("deep_qwen", "mixed", 4, {**SP, "pipeline_parallel": 2, "virtual_pipeline": 2, "micro_batch_size": 1}),
    ("qwen", "mixed", 2, {"context_parallel": 2, "micro_batch_size": 2}),
    ("qwen", "mixed", 2, {"micro_batch_size": 1}),
    ("qwen", "one", 4, {"micro_batch_size": 1}),
    ("qwen", "mixed", 4, {**SP, "micro_batch_size": 1}),
    ("qwen", "mixed", 2, {"sharded": True, "micro_batch_size": 1}),
    ("qwen", "mixed", 4, {"sharded": True, "tensor_parallel": 2, "micro_batch_size": 1}),
    ("qwen", "mixed", 2, {"recompute": RecomputeOptions(granularity="full"), "micro_batch_size": 1}),
    ("tower_adapters", "none", 2, {**SP, "micro_batch_size": 1}),
    ("tower_adapters", "mixed", 2, {"context_parallel": 2, "micro_batch_size": 2}),
    ("tower_adapters", "mixed", 4, {**SP, "pipeline_parallel": 2, "micro_batch_size": 1}),
    ("language_adapters", "mixed", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("language_adapters", "one", 2, {"context_parallel": 2, "micro_batch_size": 1}),
    ("both_adapters", "mixed", 1, {"micro_batch_size": 4}),
    ("both_adapters", "mixed", 4, {**SP, "micro_batch_size": 1}),
    ("rates", "mixed", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("rates", "one", 4, {"micro_batch_size": 1}),
    ("rates", "mixed", 2, {"sharded": True, "micro_batch_size": 1}),
    ("onevision", "mixed", 1, {"micro_batch_size": 4}),
    ("onevision", "none", 2, {**SP, "micro_batch_size": 1}),
    ("onevision", "one", 2, {**SP, "micro_batch_size": 1}),
    ("onevision", "mixed", 2, {"tensor_parallel": 2, "micro_batch_size": 1}),
    ("onevision", "none", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("onevision", "one", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2, "micro_batch_size": 1}),
    ("onevision", "none", 2, {"context_parallel": 2, "micro_batch_size": 1}),
    ("onevision", "one", 2, {"context_parallel": 2, "context": ALL_GATHER, "micro_batch_size": 1}),
    ("onevision", "mixed", 4, {**SP, "pipeline_parallel": 2, "micro_batch_size": 1}),
    ("onevision", "mixed", 4, {**SP, "context_parallel": 2, "micro_batch_size": 2}),
    ("onevision", "one", 2, {"micro_batch_size": 2}),
    ("onevision", "mixed", 2, {"sharded": True, "micro_batch_size": 1}),
    ("plain", "mixed", 1, {"micro_batch_size": 4}),
    ("llava", "none", 1, {}),
    ("llava", "none", 2, {**SP, "micro_batch_size": 1}),
    ("llava", "none", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("llava", "one", 2, {**SP, "micro_batch_size": 1}),
    ("llava", "one", 2, {"pipeline_parallel": 2, "micro_batch_size": 2}),
    ("llava", "one", 4, {"micro_batch_size": 1}),
    ("llava", "mixed", 2, {**SP, "micro_batch_size": 4}),
    ("llava", "mixed", 2, {**SP, "micro_batch_size": 1}),
    ("deep", "mixed", 2, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("deep", "mixed", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2, "micro_batch_size": 1}),
    ("deep", "one", 2, {"pipeline_parallel": 2, "virtual_pipeline": 2, "micro_batch_size": 1}),
    ("deep", "mixed", 4, {**SP, "pipeline_parallel": 2, "virtual_pipeline": 2, "micro_batch_size": 1}),
    ("deep", "mixed", 4, {"pipeline_parallel": 2, "micro_batch_size": 1}),
    ("llava", "mixed", 4, {**SP, "micro_batch_size": 1}),
    ("llava", "one", 4, {**SP, "micro_batch_size": 2}),
    ("plain", "mixed", 4, {"tensor_parallel": 4, "sequence_parallel": True, "micro_batch_size": 2}),
    ("plain", "one", 2, {"context_parallel": 2, "context": ALL_GATHER, "micro_batch_size": 1}),
    ("llava", "none", 2, {"context_parallel": 2, "micro_batch_size": 1}),
    ("llava", "mixed", 4, {**SP, "context_parallel": 2, "micro_batch_size": 2}),
    ("deep", "mixed", 4, {"pipeline_parallel": 2, "context_parallel": 2, "micro_batch_size": 1}),
    ("llava", "mixed", 4, {"context_parallel": 2, "micro_batch_size": 1}),
    ("llava", "mixed", 2, {"recompute": RecomputeOptions(granularity="full"), "micro_batch_size": 1}),
    ("llava", "mixed", 2, {"sharded": True, "micro_batch_size": 2}),
    ("llava", "mixed", 4, {"sharded": True, "tensor_parallel": 2, "micro_batch_size": 1}),
]


PARTS = {
    "tower_adapters": {"tower", "projector"},
    "language_adapters": {"layers"},
    "both_adapters": {"tower", "layers"},
}
"""Name of a case -> the parts that have adapters."""


@pytest.mark.parametrize("layout", [*CHOSEN, *(pytest.param(each, marks=pytest.mark.full) for each in FULL)], ids=str)
def test_layout_trains_the_same_model(layout: tuple[str, str, int, dict[str, Any]]) -> None:
    name, counts, ranks, options = layout
    found, expected = run(fit, ranks, name, counts, options, timeout=240), by_hand(name, counts)
    for rank in found:
        assert rank["losses"] == found[0]["losses"], "ranks report different losses"
    if not options.get("sharded"):
        assert_same_gradients(found[0]["gradients"], expected["gradients"])
    assert_same_run(found[0], expected)
    if name in ADAPTERS:
        before, after = found[0]["initial"], found[0]["final"]
        assert all(".lora_" in key for key, value in after.items() if (value != before[key]).any())
        adapted = {key for key in after if ".lora_" in key}
        assert {next(part for part in ("tower", "projector", "layers") if part in key) for key in adapted} == PARTS[
            name
        ]


def test_images_whose_tokens_see_each_other_are_not_divided() -> None:
    with torch.device("meta"):
        name, inner = "layers.0.attention.inner", VLM(GEMMA).layers["0"].attention.inner
    with pytest.raises(LayoutError, match=rf"{name}: tokens of an image see each other .* set context_parallel=1"):
        ContextAttention(inner, name, "auto", ContextGroups(ParallelMesh(2, 0, cp=2)))
