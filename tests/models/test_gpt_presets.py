"""Presets and arithmetic against published counts, published FLOPs, and the modules they describe."""

import pytest
import torch

from megalight.errors import MegalightError
from megalight.models.gpt import GPT, AttentionConfig, GPTConfig, MambaConfig, NormConfig, PositionConfig
from megalight.models.gpt.flops import flops_per_token, num_parameters
from megalight.models.gpt.presets import PRESETS, preset
from megalight.nn.moe import MoEConfig, RouterConfig, SharedConfig

PUBLISHED_PARAMETERS = {
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_next_80b_a3b": 79_674_391_296,
    "olmoe_1b_7b": 6_919_161_856,
    "deepseek_v2": 235_741_434_880,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 682_636_472_320,
    "kimi_k2": 1_026_408_209_408,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "gemma3_1b": 999_885_952,
    "gemma3_4b": 3_880_263_168,
    "gemma3_12b": 11_766_034_176,
    "gemma3_27b": 27_009_346_304,
    "llama4_scout": 107_769_861_120,
    "llama4_maverick": 400_711_848_960,
    "mamba2_130m": 128_989_632,
    "mamba2_370m": 368_346_624,
    "mamba2_780m": 780_161_280,
    "mamba2_1_3b": 1_343_757_312,
    "mamba2_2_7b": 2_702_599_680,
    "nemotron_h_8b": 8_100_852_736,
    "nemotron3_nano_30b_a3b": 31_577_937_344,
}
PUBLISHED_ACTIVE = {
    "mixtral_8x7b": 12.9,
    "mixtral_8x22b": 39.2,
    "qwen3_30b_a3b": 3.3,
    "qwen3_235b_a22b": 22.2,
    "olmoe_1b_7b": 1.3,
    "deepseek_v2": 21.4,
    "deepseek_v2_lite": 2.7,
    "llama4_scout": 17.2,
    "llama4_maverick": 17.2,
    "nemotron3_nano_30b_a3b": 3.6,
}
"""In billions, as the model cards say."""
PUBLISHED_GIGAFLOPS = [
    ("llama3_8b", 4096, 48.25),
    ("llama3_8b", 8192, 51.47),
    ("llama3_8b", 32768, 70.8),
    ("llama3_8b", 131072, 148.1),
    ("llama3_3b", 4096, 21.4),
    ("llama3_3b", 131072, 86.9),
    ("llama3_1b", 4096, 8.22),
    ("llama3_1b", 8192, 9.03),
    ("llama3_70b", 8192, 449),
    ("qwen3_32b", 4096, 204.8),
]


def built_parameters(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(config).parameters())


def test_every_preset_has_a_published_count():
    assert set(PRESETS) == set(PUBLISHED_PARAMETERS)


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameters(name):
    assert num_parameters(preset(name)) == PUBLISHED_PARAMETERS[name] == built_parameters(preset(name))


@pytest.mark.parametrize("name", PUBLISHED_ACTIVE)
def test_active_parameters(name):
    assert num_parameters(preset(name), active=True) / 1e9 == pytest.approx(PUBLISHED_ACTIVE[name], abs=0.08)


def test_parameters_of_qwen3_next_are_those_of_its_name():
    """The card says 80 billion, 79 of them beside the embedding and the head, and 3 billion active ones."""
    config = preset("qwen3_next_80b_a3b")
    tables = 2 * 151936 * 2048
    idle = 48 * (512 - 10) * 3 * 2048 * 512
    assert num_parameters(config, active=True) == num_parameters(config) - idle
    assert round((num_parameters(config) - tables) / 1e9) == 79
    assert round((num_parameters(config, active=True) - tables) / 1e9) == 3


def test_gates_are_counted():
    attention = AttentionConfig(output_gate=True, qkv_bias=True)
    sizes = {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "vocab_size": 61, "max_sequence_length": 32}
    config = GPTConfig(**sizes, num_kv_heads=2, attention=attention)
    assert num_parameters(config) == built_parameters(config)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_arithmetic_equals_the_module(bias, activation, norm, qk_norm):
    config = GPTConfig(
        num_layers=3,
        hidden_size=24,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        ffn_hidden_size=33,
        vocab_size=101,
        max_sequence_length=17,
        activation=activation,
        mlp_bias=bias,
        norm=NormConfig(kind=norm),
        position=PositionConfig(kind="learned" if bias else "rope"),
        attention=AttentionConfig(qkv_bias=bias, proj_bias=not bias, qk_norm=qk_norm),
    )
    assert num_parameters(config) == built_parameters(config)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_everything_beside_experts_counts(activation):
    moe = MoEConfig(
        num_experts=6,
        pattern=(False, True),
        router=RouterConfig(top_k=3, bias=True, score="sigmoid", expert_bias=True),
        shared=SharedConfig(ffn_hidden_size=7, gate=True),
        bias=True,
    )
    sizes = {"num_layers": 3, "hidden_size": 24, "num_heads": 4, "vocab_size": 101, "max_sequence_length": 17}
    config = GPTConfig(**sizes, activation=activation, mlp_bias=True, moe=moe)
    assert num_parameters(config) == built_parameters(config)
    with torch.device("meta"):
        model = GPT(config)
    idle = sum(p.numel() for p in model.layers["1"].mlp.experts.parameters()) // 2
    assert num_parameters(config, active=True) == num_parameters(config) - idle


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_experts_count_all_and_active(activation):
    sizes = {"num_layers": 5, "hidden_size": 24, "num_heads": 4, "vocab_size": 101, "max_sequence_length": 17}
    moe = MoEConfig(num_experts=6, ffn_hidden_size=10, pattern=(False, True), router=RouterConfig(top_k=3))
    config = GPTConfig(**sizes, activation=activation, moe=moe)
    assert num_parameters(config) == built_parameters(config)
    with torch.device("meta"):
        model = GPT(config)
    one = sum(p.numel() for p in model.layers["1"].mlp.experts.parameters()) // 6
    assert num_parameters(config) - num_parameters(config, active=True) == 2 * 3 * one
    dense = GPTConfig(**sizes, activation=activation)
    mlp = sum(p.numel() for p in model.layers["0"].mlp.parameters())
    extra = 2 * (3 * one + 6 * 24 - mlp)
    assert flops_per_token(config, 17) - flops_per_token(dense, 17) == 6 * extra


def test_convolutions_count_their_own():
    sizes = {"num_layers": 5, "hidden_size": 24, "num_heads": 4, "vocab_size": 101, "max_sequence_length": 17}
    attention = AttentionConfig(qkv_bias=True, proj_bias=True, qk_norm=True)
    config = GPTConfig(**sizes, attention=attention, mixer_pattern=("conv", "attention", "conv"), conv_kernel=4)
    assert num_parameters(config) == built_parameters(config)
    assert flops_per_token(config, 32) - flops_per_token(config, 16) == 2 * 12 * 24 * (32 - 16) / 2, "two layers'"


@pytest.mark.parametrize(("name", "length", "giga"), PUBLISHED_GIGAFLOPS)
def test_flops(name, length, giga):
    digits = len(str(giga).replace(".", ""))
    assert float(f"{flops_per_token(preset(name), length) / 1e9:.{digits}g}") == giga


def test_windows_cost_less():
    sizes = {"num_layers": 4, "hidden_size": 8, "num_heads": 2, "vocab_size": 16, "max_sequence_length": 64}
    full = GPTConfig(**sizes)
    half = GPTConfig(**sizes, attention=AttentionConfig(window=16, window_pattern=(True, False)))
    wide = GPTConfig(**sizes, attention=AttentionConfig(window=64))
    assert flops_per_token(wide, 64) == flops_per_token(full, 64)
    # exact mean of visible keys is (sum over i of min(i + 1, 17)) / 64; the rule counts to leading order
    assert flops_per_token(full, 64) - flops_per_token(half, 64) == 12 * 8 * 2 * (32 - (16 - 2))


def test_unknown_preset_lists_the_known():
    with pytest.raises(MegalightError, match=r"llama3_70b.*Did you mean 'llama3_8b'"):
        preset("llama3_8")


def test_flops_of_hybrids():
    """Projections, convolution and the scan's chunked products of Mamba-2, against the arithmetic by hand."""
    config = preset("nemotron_h_8b")
    weights = 24 * (4096 * (2 * 8192 + 2 * 1024 + 128) + 8192 * 4096 + 10240 * 4) + 24 * 2 * 4096 * 21504
    weights += 4 * 4096 * (2 * 4096 + 2 * 1024) + 4096 * 131072
    scan = 24 * (64 * (8 * 128 + 8192) + 2 * 8192 * 128)
    keys = 4 * 32 * 2 * 128 * 4096
    assert flops_per_token(config, 8192) == 6 * (weights + scan + keys)


@pytest.mark.parametrize("conv_bias", [False, True])
def test_hybrids_count_all_sublayers(conv_bias):
    sizes = {"num_layers": 5, "hidden_size": 24, "num_heads": 4, "vocab_size": 101, "max_sequence_length": 17}
    mamba = MambaConfig(num_heads=6, head_dim=5, state_size=7, num_groups=3, conv_bias=conv_bias)
    moe = MoEConfig(num_experts=6, ffn_hidden_size=10, router=RouterConfig(top_k=3))
    config = GPTConfig(**sizes, layer_pattern="M*E-M", mamba=mamba, moe=moe, activation="squared_relu")
    assert num_parameters(config) == built_parameters(config)
    mixed = GPTConfig(**sizes, mixer_pattern=("mamba", "attention"), mamba=mamba)
    assert num_parameters(mixed) == built_parameters(mixed)
