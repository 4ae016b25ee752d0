"""Decode steps of models of ``transformers`` are recorded on a GPU, and give what steps without recordings give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalight.inference import DynamicEngine, SamplingParams
from megalight.models.fused import fuse

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512, "initializer_range": 0.2,
    "sliding_window": 24, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_local_experts": 4,
    "num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 128,
}  # fmt: skip
PROMPTS = [[5, 6, 7], [8], [*range(9, 70)], [3, 4] * 40]
NEW = 24


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3_text", "gpt_oss", "glm4", "qwen3_moe"])
def test_recorded_steps(family: str, fused: bool) -> None:
    kind = type(transformers.AutoConfig.for_model(family))
    known = {name: size for name, size in SIZES.items() if name in vars(kind()) or name in kind.attribute_map}
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(kind(**known), dtype=torch.bfloat16).eval()
    if fused:
        fuse(model)
    found = []
    for graphs in (0, 4):
        engine = DynamicEngine(model, num_blocks=64, block_size=16, max_sequences=4, cuda_graphs=graphs)
        for prompt in PROMPTS:
            engine.add(prompt, max_new_tokens=NEW, sampling_params=SamplingParams(temperature=0), log_probs=True)
        found.append([*engine.run().values()])
        # Experts may wait for the device; then steps run without graphs, and a warning says so.
        assert bool(engine.step_log.graphed) == bool(graphs) or family in ("gpt_oss", "qwen3_moe")
    for plain, recorded in zip(*found, strict=True):
        # Texts part where rounding decides; until then, probabilities agree.
        pairs = enumerate(zip(plain.tokens, recorded.tokens, strict=True))
        same = next((place for place, (a, b) in pairs if a != b), NEW)
        assert same >= 4
        torch.testing.assert_close(plain.log_probs[:same], recorded.log_probs[:same], atol=0.2, rtol=0.05)
