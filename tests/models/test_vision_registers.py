"""Towers with registers against ``transformers``, and their padding in 8 bits."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megalight.models.vision import VisionConfig
from megalight.models.vlm import VLM, VLMConfig
from megalight.models.vlm.task import pack_images
from megalight.nn.init import initialize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.precision import LowPrecisionOptions, apply_low_precision
from tests.models.vlm_samples import CONFIG, INTERN, RADIO, batch
from tests.support.reference_gpt import relative_error

transformers = pytest.importorskip("transformers")

VISION = VisionConfig(
    num_layers=2,
    hidden_size=24,
    num_heads=3,
    ffn_hidden_size=48,
    image_size=12,
    patch_size=4,
    register_tokens=3,
    activation="gelu",
    patch_bias=True,
    input_norm=False,
    output_norm=True,
    layer_scale=1.0,
    norm_eps=1e-6,
)
"""As DINOv2 with registers (https://arxiv.org/abs/2309.16588)."""
THEIRS = {
    "patch.weight": "embeddings.patch_embeddings.projection.weight",
    "patch.bias": "embeddings.patch_embeddings.projection.bias",
    "class_token.weight": "embeddings.cls_token",
    "registers.weight": "embeddings.register_tokens",
    "position.weight": "embeddings.position_embeddings",
    "attention_norm": "norm1",
    "attention.proj": "attention.output.dense",
    "attention_post_norm": "layer_scale1",
    "mlp_norm": "norm2",
    "mlp.up": "mlp.fc1",
    "mlp.down": "mlp.fc2",
    "mlp_post_norm": "layer_scale2",
    "output_norm": "layernorm",
}
"""Our name of a tensor, or of a module, -> theirs."""


def test_features_are_those_of_transformers() -> None:
    config = transformers.Dinov2WithRegistersConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, mlp_ratio=2, image_size=12, patch_size=4
    )
    config.num_register_tokens, config.layerscale_value = 3, 0.5
    torch.manual_seed(1)
    reference = transformers.Dinov2WithRegistersModel._from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    whole = VLMConfig(language=CONFIG.language, vision=VISION, image_token=CONFIG.image_token)
    model = VLM(whole).double()
    initialize(model, 1, "model.")
    tower = model.embed.tower
    state = reference.state_dict()
    with torch.no_grad():
        for name, parameter in tower.named_parameters():
            parameter.copy_(_theirs(name, state).view_as(parameter))
    found = batch((1, 0, 2), config=whole)
    images, source = found.parts()
    packed_images = pack_images(whole, images, source.flatten(), 1)
    ours = tower(packed_images)[0][packed_images.patches]
    pixels = images.pixels.view(3, 3, 3, 3, 4, 4).permute(0, 3, 1, 4, 2, 5).reshape(3, 3, 12, 12)
    with torch.no_grad():
        expected = reference(pixels).last_hidden_state[:, 4:].flatten(0, 1)
    assert relative_error(ours, expected) < 1e-12
    ours.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in tower.parameters())


def _theirs(name: str, state: dict[str, torch.Tensor]) -> torch.Tensor:
    if not name.startswith("layers."):
        module, _, kind = name.partition(".")
        return state[THEIRS.get(name) or f"{THEIRS[module]}.{kind}"]
    _, index, rest = name.split(".", 2)
    layer, (module, _, kind) = f"encoder.layer.{index}", rest.rpartition(".")
    if module == "attention.qkv":
        parts = [f"{layer}.attention.attention.{part}.{kind}" for part in ("query", "key", "value")]
        return torch.cat([state[part] for part in parts])
    kind = "lambda1" if module.endswith("post_norm") else kind
    return state[f"{layer}.{THEIRS[module]}.{kind}"]


@pytest.mark.parametrize("kind", ["class", "registers"])
def test_products_in_8_bits_need_no_padding_of_class_tokens_and_registers(kind: str) -> None:
    """Images of 17 or 19 rows: casts fill up with zeros to what products take, whatever the number of rows."""
    config = {"class": INTERN, "registers": RADIO}[kind]
    config = replace(config, vision=replace(config.vision, hidden_size=32, ffn_hidden_size=32))
    model = VLM(config).double()
    initialize(model, 1, "model.")
    options = LowPrecisionOptions("rowwise", towers=("vision",), emulate=True)
    apply_low_precision(model, options, ParallelMesh())
    images, source = batch((1, 0, 2), config=config).parts()
    found = []
    for multiple in (1, 16):  # of rows of features: fills up to 4 and to 64 rows of patches
        model.zero_grad()
        part = pack_images(config, images, source.flatten(), multiple)
        assert part.sequences.num_tokens % (4 * multiple) == 0
        assert (part.sequences.num_tokens % 16 == 0) == (multiple == 16)
        last, *_ = model.embed.tower(part)
        features = model.embed.projector(last, part.patches)[:12]
        features.square().sum().backward()
        found.append([features, *[p.grad for p in model.embed.tower.parameters()]])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tensor", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("context", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [7, 16, 24])
def test_rows_divide_for_sequence_and_context_parallelism_together(tensor: int, context: int, length: int) -> None:
    """Both at once, as by the least common multiple, and no more: 8 bits ask for nothing on top (see above)."""
    text = batch((1, 0, 1), length=24)
    lengths = tuple((part, 24 - part) for part in (length % 24 or 12, 5, 12))
    text = replace(text, document_lengths=lengths)
    shares = [text.context_share(rank, context, tensor) for rank in range(context)]
    rows = {share.sequences.pad_to(tensor).num_tokens for share in shares}
    assert len(rows) == 1, "shares differ"
    (each,) = rows
    assert each % tensor == 0
    if context == 1:
        assert each == math.ceil(72 / tensor) * tensor
        return
    # Two chunks of each document, so twice their number; then even, and whole shares of the ranks.
    chunks = sum(math.ceil(part / (2 * context)) for row in lengths for part in row)
    assert each == math.ceil(2 * chunks / math.lcm(2, tensor)) * math.lcm(2, tensor)
    assert each * context % math.lcm(2 * context, tensor * context) == 0
