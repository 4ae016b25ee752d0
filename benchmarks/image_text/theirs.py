"""The training step of `transformers` with a vision-language model: in a plain loop on one GPU, or under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.image_text.shapes import Shape
from megalight.models.vision.model import normalized
from megalight.models.vlm import VLMConfig
from megalight.models.vlm.hugging_face import config_to_transformers
from megalight.optim import AdamConfig


def reference(config: VLMConfig, device: str, trained: bool = False) -> nn.Module:
    """Return the model of `transformers`, in float32 with random weights, and a frozen tower unless it is trained."""
    import transformers

    values = config_to_transformers(config)
    kind = getattr(transformers, values.pop("architectures")[0])
    values.pop("model_type")
    torch.manual_seed(1)
    with torch.device(device):
        model: nn.Module = kind._from_config(kind.config_class(**values), attn_implementation="sdpa")
    tower_of(model).requires_grad_(trained)
    for name, parameter in model.named_parameters():
        if ".merger." in name:  # it belongs to their tower
            parameter.requires_grad_(True)
    return model.train()


def tower_of(model: Any) -> nn.Module:
    """Return their tower."""
    found: nn.Module = getattr(model.model, "vision_tower", None) or model.model.visual
    return found


def layers_of_tower(model: Any) -> Sequence[Any]:
    """Return the layers of their tower."""
    tower: Any = tower_of(model)
    if hasattr(tower, "blocks"):
        return list(tower.blocks)
    return list(getattr(tower, "vision_model", tower).encoder.layers)


def inputs_of(shape: Shape, device: str, rank: int = 0, ranks: int = 1) -> list[dict[str, Tensor]]:
    """Return a rank's micro-batches of :func:`benchmarks.image_text.ours.train` for `transformers`, on the device."""
    config, found = shape.config, list[dict[str, Tensor]]()
    batch, cuts = shape.batch(1, shape.rows * ranks)
    images, patch = len(shape.sizes) * shape.mbs, config.vision.patch_size
    for micro in range(rank * shape.micro, (rank + 1) * shape.micro):
        tokens = batch.tokens[micro * shape.mbs : (micro + 1) * shape.mbs].to(device)
        own = cuts[micro * images : (micro + 1) * images]
        asked = {"input_ids": tokens, "labels": tokens.masked_fill(tokens == config.image_token, -100)}
        if config.vision.dynamic is None:
            side = config.vision.image_size // patch
            pixels = torch.cat([normalized(torch.from_numpy(cut.pixels[-(side**2) :]), config.vision) for cut in own])
            square = pixels.view(len(own), side, side, 3, patch, patch).permute(0, 3, 1, 4, 2, 5)
            asked["pixel_values"] = square.reshape(len(own), 3, side * patch, side * patch).to(device)
        else:
            merge, frames = config.projector.merge, config.vision.dynamic.frames
            # Squares row by row, and every pixel in all frames.
            pixels = torch.cat(
                [
                    normalized(torch.from_numpy(cut.pixels), config.vision).view(cut.features, -1)[cut.source]
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


def compiled(model: Any) -> None:
    """Compile the layers of a model of `transformers` one by one, as far as the host need not read sizes in them."""
    # Sizes of the row before would count as dynamic, and those kernels are slower.
    torch._dynamo.reset()
    tower = [layer.mlp if hasattr(tower_of(model), "blocks") else layer for layer in layers_of_tower(model)]
    for layer in (*model.model.language_model.layers, *tower):
        # Not `layer.compile()`: it would trace the hooks that gather a layer, and anew for each of them.
        layer.forward = torch.compile(layer.forward)


def sharded(model: Any, level: str, half: bool) -> Callable[[bool], None] | None:
    """Shard a model over all ranks by FSDP2, layer by layer.

    Args:
        model: with float32 weights, which are the masters.
        level: as in ``DataParallelOptions``. Without parameters in it, a step gathers them once for a micro-batch, they
            stay whole until its backward pass. Without gradients in it, the last micro-batch of a step sums them over
            ranks; else each does.
        half: compute in bfloat16, and sum gradients over ranks in float32.

    Returns:
        a function to call with whether this is the last micro-batch of the step; None: nothing needs to know.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if half else {}
    again = level == "optim_grads_params"
    # Not the tower itself: they look up by its class which hidden states to keep, and sharding changes the class.
    for layer in (*model.model.language_model.layers, *layers_of_tower(model)):
        fully_shard(layer, reshard_after_forward=again, **options)
    fully_shard(model, **options)
    return model.set_requires_gradient_sync if level == "optim" else None


def train(
    model: Any,
    micros: Sequence[dict[str, Tensor]],
    device: str,
    steps: int,
    tick: Callable[[Tensor], None],
    lr: float,
    autocast: bool = False,
    before: Callable[[bool], None] | None = None,
) -> None:
    """Train the model of `transformers` on these micro-batches in every step.

    Args:
        model: it, maybe sharded.
        micros: its arguments for each micro-batch.
        device: the kind of device.
        steps: how many.
        tick: called after each step with the mean loss of this rank.
        lr: of AdamW.
        autocast: whether to compute in bfloat16.
        before: called before each micro-batch with whether it is the last one of the step.
    """
    adam = AdamConfig(lr=lr)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=lr, betas=adam.betas, eps=adam.eps, weight_decay=0.0, fused=device == "cuda"
    )
    for _ in range(steps):
        mean = torch.zeros((), device=device)
        for number, asked in enumerate(micros, start=1):
            if before is not None:
                before(number == len(micros))
            with torch.autocast(device, torch.bfloat16, enabled=autocast):
                loss = model(**asked, use_cache=False).loss
            (loss / len(micros)).backward()
            mean += loss.detach() / len(micros)
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tick(mean)
