"""Published models, by name and size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megalight.models.gpt.config import GPTConfig, MultiTokenConfig, NormConfig
from megalight.models.gpt.mixer_config import (
    AttentionConfig,
    DeltaNetConfig,
    LatentConfig,
    MambaConfig,
    PositionConfig,
    TemperatureConfig,
)
from megalight.nn.moe import BalanceConfig, MoEConfig, RouterConfig, SharedConfig
from megalight.ops.rotary import RotaryScaling
from megalight.registry import Registry

PRESETS: Registry[GPTConfig] = Registry("GPT preset")
"""Name -> configuration. Other packages can add their own."""


def preset(name: str) -> GPTConfig:
    """Return the configuration of a published model.

    Raises:
        MegalightError: no such preset. The message lists the known ones.
    """
    return PRESETS[name]


def gpt2(num_layers: int, hidden_size: int, num_heads: int) -> GPTConfig:
    """Configure GPT-2 (https://huggingface.co/openai-community/gpt2) in one of its sizes, without dropout (0.1)."""
    return GPTConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        vocab_size=50257,
        max_sequence_length=1024,
        activation="gelu_tanh",
        mlp_bias=True,
        tie_embeddings=True,
        norm=NormConfig(kind="layer", eps=1e-5),
        position=PositionConfig(kind="learned"),
        attention=AttentionConfig(qkv_bias=True, proj_bias=True),
    )


def llama2(num_layers: int, hidden_size: int, num_heads: int, ffn_hidden_size: int) -> GPTConfig:
    """Configure Llama 2 (https://arxiv.org/abs/2307.09288), without grouped heads."""
    return GPTConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=32000,
        max_sequence_length=4096,
        norm=NormConfig(eps=1e-5),
    )


def llama3(
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    ffn_hidden_size: int,
    *,
    tie_embeddings: bool = False,
    rotary_factor: float = 8.0,
) -> GPTConfig:
    """Configure Llama 3.1 or 3.2 (https://huggingface.co/meta-llama): 8 key-value heads, 131072 tokens."""
    return GPTConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=8,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=128256,
        max_sequence_length=131072,
        tie_embeddings=tie_embeddings,
        norm=NormConfig(eps=1e-5),
        # The frequencies are those of a shorter context, stretched by this factor.
        position=PositionConfig(base=500000.0, scaling=RotaryScaling(kind="llama3", factor=rotary_factor)),
    )


def qwen2_5(
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_hidden_size: int,
    vocab_size: int = 151936,
    *,
    tie_embeddings: bool = False,
) -> GPTConfig:
    """Configure Qwen2.5 (https://arxiv.org/abs/2412.15115): biases of queries, keys and values."""
    return GPTConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=vocab_size,
        max_sequence_length=32768,
        tie_embeddings=tie_embeddings,
        norm=NormConfig(eps=1e-6),
        position=PositionConfig(base=1000000.0),
        attention=AttentionConfig(qkv_bias=True),
    )


def qwen3(
    num_layers: int, hidden_size: int, num_heads: int, ffn_hidden_size: int, *, tie_embeddings: bool = False
) -> GPTConfig:
    """Configure a dense Qwen3 (https://huggingface.co/Qwen): 8 key-value heads of 128 features, QK-norm."""
    return GPTConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=151936,
        max_sequence_length=40960,
        tie_embeddings=tie_embeddings,
        norm=NormConfig(eps=1e-6),
        position=PositionConfig(base=1000000.0),
        attention=AttentionConfig(qk_norm=True),
    )


def mixtral(num_layers: int, hidden_size: int, num_heads: int, ffn_hidden_size: int, length: int) -> GPTConfig:
    """Configure Mixtral (https://huggingface.co/mistralai): 8 experts, 2 for each token."""
    return GPTConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=8,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=32000,
        max_sequence_length=length,
        norm=NormConfig(eps=1e-5),
        position=PositionConfig(base=1000000.0),
        moe=MoEConfig(num_experts=8, router=RouterConfig(top_k=2), balance=BalanceConfig(aux_loss=0.02)),
    )


def qwen3_moe(
    num_layers: int, hidden_size: int, num_heads: int, ffn_hidden_size: int, expert_ffn_hidden_size: int
) -> GPTConfig:
    """Configure a Qwen3 with 128 experts, 8 for each token (https://huggingface.co/Qwen)."""
    return replace(
        qwen3(num_layers, hidden_size, num_heads, ffn_hidden_size),
        num_kv_heads=4,
        moe=MoEConfig(
            num_experts=128,
            ffn_hidden_size=expert_ffn_hidden_size,
            router=RouterConfig(top_k=8),
            # The global loss, as Qwen's report describes it (https://arxiv.org/abs/2505.09388).
            balance=BalanceConfig(global_aux_loss=1e-3),
        ),
    )


def qwen3_next() -> GPTConfig:
    """Configure Qwen3-Next-80B-A3B (https://huggingface.co/Qwen), without its layer for multi-token prediction.

    Three of four layers have Gated DeltaNet, the fourth gated attention; each has 512 experts, 10 for each token, and a
    gated shared one.
    """
    return GPTConfig(
        num_layers=48,
        hidden_size=2048,
        num_heads=16,
        num_kv_heads=2,
        head_dim=256,
        ffn_hidden_size=5120,  # of no layer: all have experts
        vocab_size=151936,
        max_sequence_length=262144,
        norm=NormConfig(eps=1e-6, around_zero=True),
        position=PositionConfig(base=10000000.0, fraction=0.25),
        attention=AttentionConfig(qk_norm=True, output_gate=True),
        mixer_pattern=("gated_delta_net",) * 3 + ("attention",),
        delta=DeltaNetConfig(num_heads=32, num_key_heads=16, head_dim=128, key_dim=128),
        moe=MoEConfig(
            num_experts=512,
            ffn_hidden_size=512,
            router=RouterConfig(top_k=10),
            shared=SharedConfig(ffn_hidden_size=512, gate=True),
            balance=BalanceConfig(global_aux_loss=1e-3),
        ),
    )


def olmoe() -> GPTConfig:
    """Configure OLMoE (https://huggingface.co/allenai/OLMoE-1B-7B-0924): 64 experts, 8 for each token."""
    return GPTConfig(
        num_layers=16,
        hidden_size=2048,
        num_heads=16,
        ffn_hidden_size=1024,
        vocab_size=50304,
        max_sequence_length=4096,
        norm=NormConfig(eps=1e-5),
        attention=AttentionConfig(qk_norm=True, qk_norm_whole=True),
        moe=MoEConfig(
            num_experts=64,
            # OLMoE takes the softmax over all experts, and does not normalize the chosen ones.
            router=RouterConfig(top_k=8, pre_softmax=True),
            balance=BalanceConfig(aux_loss=0.01, z_loss=0.001),
        ),
    )


def deepseek_v2(
    num_layers: int, hidden_size: int, num_heads: int, ffn_size: int, num_experts: int, expert_size: int, **sizes: Any
) -> GPTConfig:
    """Configure a DeepSeek-V2 (https://arxiv.org/abs/2405.04434); ``sizes``: ``q_rank`` and options of the router."""
    return GPTConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        ffn_hidden_size=ffn_size,
        vocab_size=102400,
        max_sequence_length=163840,
        norm=NormConfig(eps=1e-6),
        position=PositionConfig(
            interleaved=True,
            scaling=RotaryScaling("yarn", 40.0, original_length=4096, mscale=0.707, mscale_all_dim=0.707),
        ),
        mixer_pattern=("latent_attention",),
        latent=LatentConfig(kv_rank=512, q_rank=sizes.pop("q_rank", None)),
        moe=MoEConfig(
            num_experts=num_experts,
            ffn_hidden_size=expert_size,
            pattern=(False,) + (True,) * (num_layers - 1),
            router=RouterConfig(top_k=6, pre_softmax=True, **sizes),
            # two shared experts
            shared=SharedConfig(ffn_hidden_size=2 * expert_size),
            balance=BalanceConfig(seq_aux_loss=1e-3),
        ),
    )


def deepseek_v3() -> GPTConfig:
    """Configure DeepSeek-V3 (https://huggingface.co/deepseek-ai/DeepSeek-V3) with its multi-token prediction."""
    return GPTConfig(
        num_layers=61,
        hidden_size=7168,
        num_heads=128,
        ffn_hidden_size=18432,
        vocab_size=129280,
        max_sequence_length=163840,
        norm=NormConfig(eps=1e-6),
        position=PositionConfig(
            # Their checkpoints keep the features of a rotary pair side by side.
            interleaved=True,
            scaling=RotaryScaling("yarn", 40.0, original_length=4096, mscale=1.0, mscale_all_dim=1.0),
        ),
        mixer_pattern=("latent_attention",),
        latent=LatentConfig(kv_rank=512, q_rank=1536),
        moe=MoEConfig(
            num_experts=256,
            ffn_hidden_size=2048,
            pattern=(False,) * 3 + (True,) * 58,
            router=RouterConfig(top_k=8, score="sigmoid", num_groups=8, group_top_k=4, scale=2.5, expert_bias=True),
            shared=SharedConfig(ffn_hidden_size=2048),
            balance=BalanceConfig(seq_aux_loss=1e-4),
        ),
        mtp=MultiTokenConfig(),
    )


def kimi_k2() -> GPTConfig:
    """Configure Kimi-K2 (https://huggingface.co/moonshotai/Kimi-K2-Base): DeepSeek-V3 with more experts, no groups."""
    base = deepseek_v3()
    assert base.moe is not None
    return replace(
        base,
        num_heads=64,
        # Zero, because `replace` would carry the base's number over.
        num_kv_heads=0,
        vocab_size=163840,
        max_sequence_length=131072,
        position=PositionConfig(
            base=50000.0,
            interleaved=True,
            scaling=RotaryScaling("yarn", 32.0, original_length=4096, beta_fast=1.0, mscale=1.0, mscale_all_dim=1.0),
        ),
        moe=replace(
            base.moe,
            num_experts=384,
            pattern=(False,) + (True,) * 60,
            router=RouterConfig(top_k=8, score="sigmoid", scale=2.827, expert_bias=True),
        ),
        mtp=None,
    )


def gpt_oss(num_layers: int, num_experts: int) -> GPTConfig:
    """Configure GPT-OSS (https://huggingface.co/openai): sinks, every other layer with a window, biases everywhere."""
    return GPTConfig(
        num_layers=num_layers,
        hidden_size=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        ffn_hidden_size=2880,
        vocab_size=201088,
        max_sequence_length=131072,
        activation="quick_geglu",
        norm=NormConfig(eps=1e-5),
        position=PositionConfig(
            base=150000.0, scaling=RotaryScaling("yarn", 32.0, original_length=4096, round_range=False)
        ),
        attention=AttentionConfig(
            qkv_bias=True,
            proj_bias=True,
            softmax="learnable",
            window=127,  # and the token itself
            window_pattern=(True, False),
        ),
        moe=MoEConfig(
            num_experts=num_experts,
            router=RouterConfig(top_k=4, bias=True),
            bias=True,
            glu_offset=1.0,
            clamp=7.0,
        ),
    )


def gemma2(
    num_layers: int, hidden_size: int, num_heads: int, num_kv_heads: int, ffn_hidden_size: int, query_size: int = 256
) -> GPTConfig:
    """Configure Gemma-2 (https://huggingface.co/google): soft caps, a window in every other layer, norms after layers.

    Args:
        query_size: scores are divided by its square root.
    """
    return GPTConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=256 if query_size == 256 else 128,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=256000,
        max_sequence_length=8192,
        activation="geglu_tanh",
        tie_embeddings=True,
        embedding_multiplier=hidden_size**0.5,
        logit_softcap=30.0,
        norm=NormConfig(eps=1e-6, around_zero=True, after=True),
        attention=AttentionConfig(
            scale=None if query_size == 256 else query_size**-0.5,
            softcap=50.0,
            window=4095,  # and the token itself
            window_pattern=(True, False),
        ),
    )


def gemma3(
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    ffn_hidden_size: int,
    *,
    query_size: int = 256,
    vocab_size: int = 262208,
    length: int = 131072,
    window: int = 1024,
    factor: float | None = 8.0,
) -> GPTConfig:
    """Configure the language model of Gemma-3 (https://huggingface.co/google): QK-norm, windows in five of six layers.

    Args:
        query_size: scores are divided by its square root.
        window: tokens that layers with a window see, with the token itself.
        factor: of the linear scaling of rotary frequencies in layers without a window.
    """
    base = gemma2(num_layers, hidden_size, num_heads, num_kv_heads, ffn_hidden_size, query_size)
    return replace(
        base,
        vocab_size=vocab_size,
        max_sequence_length=length,
        logit_softcap=None,
        position=PositionConfig(
            base=1000000.0,
            local_base=10000.0,
            scaling=None if factor is None else RotaryScaling("linear", factor),
        ),
        attention=replace(
            base.attention,
            qk_norm=True,
            softcap=None,
            window=window - 1,
            window_pattern=tuple((layer + 1) % 6 > 0 for layer in range(num_layers)),
        ),
    )


def llama4(num_experts: int, length: int, step: int, factor: float | None) -> GPTConfig:
    """Configure the language model of Llama 4 (https://huggingface.co/meta-llama): one of many experts, long contexts.

    Three of four layers rotate and see chunks of 8192 tokens. The fourth sees all tokens and has no positions.

    Args:
        num_experts: experts of each layer that has some.
        length: the longest sequence.
        step: every so many layers, one has experts.
        factor: of the scaling of rotary frequencies. With it, queries and keys have L2 norms.
    """
    scaling = RotaryScaling(
        "llama3", factor or 1.0, low_frequency_factor=1.0, high_frequency_factor=1.0, original_length=8192
    )
    layers = range(48)
    rotates = tuple((layer + 1) % 4 > 0 for layer in layers)
    return GPTConfig(
        num_layers=48,
        hidden_size=5120,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=16384,
        vocab_size=202048,
        max_sequence_length=length,
        norm=NormConfig(eps=1e-5),
        position=PositionConfig(
            base=500000.0, interleaved=True, pattern=rotates, scaling=None if factor is None else scaling
        ),
        attention=AttentionConfig(
            qk_l2_norm=factor is not None,
            chunk=8192,
            window_pattern=rotates,
            temperature=TemperatureConfig(length=8192, scale=0.1),
        ),
        moe=MoEConfig(
            num_experts=num_experts,
            ffn_hidden_size=8192,
            pattern=tuple((layer + 1) % step == 0 for layer in layers),
            weigh_input=True,
            router=RouterConfig(top_k=1, score="sigmoid"),
            shared=SharedConfig(ffn_hidden_size=8192),
            balance=BalanceConfig(aux_loss=0.001),
        ),
    )


def mamba2(num_layers: int, hidden_size: int) -> GPTConfig:
    """Configure Mamba-2 (https://huggingface.co/state-spaces): heads of 64 features, one group, no other layers."""
    heads = 2 * hidden_size // 64
    return GPTConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=heads,
        head_dim=64,
        vocab_size=50288,
        max_sequence_length=1 << 20,
        tie_embeddings=True,
        layer_pattern="M" * num_layers,
        mamba=MambaConfig(num_heads=heads, num_groups=1),
        norm=NormConfig(eps=1e-5),
        position=PositionConfig(kind="none"),
    )


def nemotron_h_8b() -> GPTConfig:
    """Configure Nemotron-H-8B (https://huggingface.co/nvidia/Nemotron-H-8B-Base-8K): 4 of 52 layers have attention."""
    return GPTConfig(
        num_layers=52,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=21504,
        vocab_size=131072,
        max_sequence_length=8192,
        activation="squared_relu",
        layer_pattern="M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
        mamba=MambaConfig(num_heads=128),
        norm=NormConfig(eps=1e-5),
        position=PositionConfig(kind="none"),
    )


def nemotron3_nano() -> GPTConfig:
    """Configure Nemotron-3-Nano (https://huggingface.co/nvidia): experts in place of most MLPs, 6 of 128 per token."""
    return replace(
        nemotron_h_8b(),
        hidden_size=2688,
        num_kv_heads=2,
        ffn_hidden_size=1856,
        max_sequence_length=262144,
        layer_pattern="MEMEM*E" + 4 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME",
        mamba=MambaConfig(num_heads=64),
        moe=MoEConfig(
            num_experts=128,
            router=RouterConfig(top_k=6, score="sigmoid", scale=2.5, expert_bias=True),
            shared=SharedConfig(ffn_hidden_size=3712),
        ),
    )


for _name, _config in {
    "gpt2_small": gpt2(12, 768, 12),
    "gpt2_medium": gpt2(24, 1024, 16),
    "gpt2_large": gpt2(36, 1280, 20),
    "gpt2_xl": gpt2(48, 1600, 25),
    "llama2_7b": llama2(32, 4096, 32, 11008),
    "llama2_13b": llama2(40, 5120, 40, 13824),
    "llama3_1b": llama3(16, 2048, 32, 8192, tie_embeddings=True, rotary_factor=32.0),
    "llama3_3b": llama3(28, 3072, 24, 8192, tie_embeddings=True, rotary_factor=32.0),
    "llama3_8b": llama3(32, 4096, 32, 14336),
    "llama3_70b": llama3(80, 8192, 64, 28672),
    "llama3_405b": llama3(126, 16384, 128, 53248),
    "qwen2_5_0_5b": qwen2_5(24, 896, 14, 2, 4864, tie_embeddings=True),
    "qwen2_5_1_5b": qwen2_5(28, 1536, 12, 2, 8960, tie_embeddings=True),
    "qwen2_5_3b": qwen2_5(36, 2048, 16, 2, 11008, tie_embeddings=True),
    "qwen2_5_7b": qwen2_5(28, 3584, 28, 4, 18944, 152064),
    "qwen3_0_6b": qwen3(28, 1024, 16, 3072, tie_embeddings=True),
    "qwen3_1_7b": qwen3(28, 2048, 16, 6144, tie_embeddings=True),
    "qwen3_4b": qwen3(36, 2560, 32, 9728, tie_embeddings=True),
    "qwen3_8b": qwen3(36, 4096, 32, 12288),
    "qwen3_14b": qwen3(40, 5120, 40, 17408),
    "qwen3_32b": qwen3(64, 5120, 64, 25600),
    "mixtral_8x7b": mixtral(32, 4096, 32, 14336, 32768),
    "mixtral_8x22b": mixtral(56, 6144, 48, 16384, 65536),
    "qwen3_30b_a3b": qwen3_moe(48, 2048, 32, 6144, 768),
    "qwen3_235b_a22b": qwen3_moe(94, 4096, 64, 12288, 1536),
    "qwen3_next_80b_a3b": qwen3_next(),
    "olmoe_1b_7b": olmoe(),
    "deepseek_v2": deepseek_v2(
        60, 5120, 128, 12288, 160, 1536, q_rank=1536, num_groups=8, group_top_k=3, group_experts=1, scale=16.0
    ),
    "deepseek_v2_lite": deepseek_v2(27, 2048, 16, 10944, 64, 1408),
    "deepseek_v3": deepseek_v3(),
    "kimi_k2": kimi_k2(),
    "gpt_oss_20b": gpt_oss(24, 32),
    "gpt_oss_120b": gpt_oss(36, 128),
    "gemma2_2b": gemma2(26, 2304, 8, 4, 9216),
    "gemma2_9b": gemma2(42, 3584, 16, 8, 14336),
    "gemma2_27b": gemma2(46, 4608, 32, 16, 36864, 144),
    "gemma3_1b": gemma3(26, 1152, 4, 1, 6912, vocab_size=262144, length=32768, window=512, factor=None),
    "gemma3_4b": gemma3(34, 2560, 8, 4, 10240),
    "gemma3_12b": gemma3(48, 3840, 16, 8, 15360),
    "gemma3_27b": gemma3(62, 5376, 32, 16, 21504, query_size=168),
    "llama4_scout": llama4(16, 10485760, 1, 16.0),
    "llama4_maverick": llama4(128, 1048576, 2, None),
    "mamba2_130m": mamba2(24, 768),
    "mamba2_370m": mamba2(48, 1024),
    "mamba2_780m": mamba2(48, 1536),
    "mamba2_1_3b": mamba2(48, 2048),
    "mamba2_2_7b": mamba2(64, 2560),
    "nemotron_h_8b": nemotron_h_8b(),
    "nemotron3_nano_30b_a3b": nemotron3_nano(),
}.items():
    PRESETS.register(_name)(_config)
