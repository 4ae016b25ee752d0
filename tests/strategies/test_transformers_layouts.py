"""Folders of ``transformers`` in and out under layouts: equal tensors, and the loss that ``transformers`` computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from megalight.inference import ParallelGPT
from megalight.models.gpt import GPTModule
from megalight.models.hugging_face.export import export
from megalight.models.stored import open_model
from megalight.strategies import MegatronStrategy
from megalight.types import PackedSequences, TokenBatch
from tests.strategies.test_layout_changes import Again
from tests.strategies.training import ADAM, CLIP, Losses
from tests.support.environment import trainer
from tests.support.reference_gpt import relative_error
from tests.support.workers import run

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
}
EXPERTS = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False}
GPT2 = {"vocab_size": 53, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.2}
DEEPSEEK: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "group_limited_greedy",
    "routed_scaling_factor": 4.0,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
}
QWEN3_NEXT: dict[str, Any] = {
    **EXPERTS,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 10,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "llama_tied": ("LlamaForCausalLM", {**SIZES, "tie_word_embeddings": True, "num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", {**SIZES, "sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", SIZES),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 8}),
    "smollm3": ("SmolLM3ForCausalLM", {**SIZES, "no_rope_layer_interval": 2, "pad_token_id": None}),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 8, "moe_intermediate_size": 24}),
    "olmoe": ("OlmoeForCausalLM", {**EXPERTS, "pad_token_id": None, "eos_token_id": 2}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", DEEPSEEK),
    "deepseek_v2_lite": ("DeepseekV2ForCausalLM", {**DEEPSEEK, "q_lora_rank": None, "topk_method": "greedy"}),
    "qwen3_next": ("Qwen3NextForCausalLM", QWEN3_NEXT),
    "gpt2": ("GPT2LMHeadModel", {**GPT2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "tp2pp2": (4, {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2}),
}

LOGITS: list[Any] = [
    ("olmoe", 2, LAYOUTS["tp2"][1]),
    pytest.param("olmoe", 4, {"tensor_parallel": 4, "sequence_parallel": True}, marks=pytest.mark.full),
    ("deepseek_v2", 2, LAYOUTS["tp2"][1]),
    ("deepseek_v2_lite", 2, LAYOUTS["pp2"][1]),
    ("qwen3_next", 2, LAYOUTS["tp2"][1]),
    pytest.param("qwen3_next", 4, LAYOUTS["tp2pp2"][1], marks=pytest.mark.full),
]


def batch() -> TokenBatch:
    ids = torch.randint(0, 53, (4, 17), generator=torch.Generator().manual_seed(4))
    return TokenBatch(ids[:, :-1], ids[:, 1:], torch.ones(4, 16))


class Fixed(GPTModule):
    """Sees one batch."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([batch()], batch_size=None)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def made(kind: str, folder: Path) -> Tensor:
    """Make the folder of a model, and return its logits."""
    torch.manual_seed(1)
    name, options = KINDS[kind]
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
        logits: Tensor = model(batch().tokens).logits
    model.save_pretrained(folder)
    return logits


def _in_and_out(layout: str, kinds: tuple[str, ...], root: Path) -> list[float]:
    """For each kind: start from its folder, save before the first step, export that, and return the first loss."""
    found = []
    for kind in kinds:
        losses, path = Losses(), root / f"{kind}-{layout}.ckpt"
        strategy = MegatronStrategy(micro_batch_size=2, **LAYOUTS[layout][1])
        runner = trainer(
            strategy,
            callbacks=[losses, Again(str(path))],
            precision="32-true",
            max_steps=1,
            gradient_clip_val=CLIP,
            limit_val_batches=0,
            use_distributed_sampler=False,
        )
        runner.fit(Fixed(None, optimizer=ADAM, weights=root / kind))
        export(open_model(path), root / f"{kind}-{layout}")
        found.append(losses.losses[0])
    return found


def check(layout: str, kinds: tuple[str, ...], root: Path) -> None:
    expected = []
    for kind in kinds:
        logits = made(kind, root / kind)
        expected.append(float(cross_entropy(logits.flatten(0, 1), batch().labels.flatten())))
    for losses in run(_in_and_out, LAYOUTS[layout][0], layout, kinds, root, timeout=600):
        for kind, found, loss in zip(kinds, losses, expected, strict=True):
            assert abs(found - loss) <= 1e-5 * loss, (kind, layout)
    for kind in kinds:
        before, after = (load_file(root / name / "model.safetensors") for name in (kind, f"{kind}-{layout}"))
        assert before.keys() == after.keys(), kind
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items()), kind


def test_a_family_in_and_out(tmp_path: Path) -> None:
    check("tp2pp2", ("qwen3",), tmp_path)


@pytest.mark.timeout(900)
@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_in_and_out(layout: str, tmp_path: Path) -> None:
    check(layout, tuple(KINDS), tmp_path)


def _logits(options: dict[str, Any], folder: Path) -> Tensor:
    strategy = MegatronStrategy(**options)
    runner = trainer(strategy, precision="32-true", limit_val_batches=1, use_distributed_sampler=False)
    runner.validate(Fixed(None, optimizer=ADAM, weights=folder), verbose=False)
    assert strategy.parallel_model is not None
    tokens = batch().tokens
    return ParallelGPT(strategy.parallel_model)(tokens.flatten(), PackedSequences.of_uniform(*tokens.shape)).logits


@pytest.mark.parametrize(("kind", "ranks", "options"), LOGITS, ids=str)
def test_logits(kind: str, ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    expected = made(kind, tmp_path / kind)
    for logits in run(_logits, ranks, options, tmp_path / kind):
        assert relative_error(logits.view_as(expected), expected) < 1e-5
