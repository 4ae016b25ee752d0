"""Mamba-2 and Gated DeltaNet: their ops, a mixer, and layers of a hybrid, beside the packages that serve them.

FLOPs follow :mod:`megalight.models.gpt.flops`: six for each weight of projections and convolution, and six for each
multiplication of the scan's chunked products, with chunks of 128 tokens whatever a kernel's are.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.mixing import Case, Way, backends, need, packages, random, values
from benchmarks.mixing.delta import delta_layer, rule_flops
from benchmarks.mixing.megatron_core import hybrid_layers
from megalight.models.gpt import GPT, DeltaNetConfig, GPTConfig, MambaConfig
from megalight.models.gpt.flops import flops_per_token
from megalight.models.gpt.presets import preset
from megalight.nn import LayerContext, run_layers
from megalight.ops.causal_conv import CAUSAL_CONV, causal_conv
from megalight.ops.delta_rule import DELTA_RULE, delta_rule
from megalight.ops.gated_norm import GATED_NORM, gated_norm
from megalight.ops.ssd import SSD, ssd
from megalight.types import PackedSequences

PATTERN = "M-M-M-M*-"
"""The first layers of Nemotron-H-8B."""
CHECKED = 300
"""The plain path of ``transformers`` takes half a GiB for every chunk of tokens."""


def layer_flops(config: GPTConfig, tokens: int) -> float:
    """Return the operations of forward and backward of all layers, without embedding and head."""
    return tokens * (flops_per_token(config, tokens) - 6.0 * config.vocab_size * config.hidden_size)


class Shapes:
    """Layers of Nemotron-H-8B and of Qwen3-Next, or tiny ones."""

    def __init__(self, small: bool, device: str) -> None:
        self.device, self.tokens = device, 96 if small else 8192
        config = replace(preset("nemotron_h_8b"), num_layers=len(PATTERN), layer_pattern=PATTERN, vocab_size=128)
        self.delta = DeltaNetConfig(num_heads=32, num_key_heads=16, head_dim=128, key_dim=128)
        self.delta_hidden = 32 if small else 2048
        if small:
            config = replace(
                config,
                hidden_size=32,
                num_heads=4,
                num_kv_heads=2,
                head_dim=8,
                ffn_hidden_size=64,
                mamba=MambaConfig(num_heads=8, head_dim=8, state_size=16, num_groups=2),
            )
            self.delta = DeltaNetConfig(num_heads=4, num_key_heads=2, head_dim=8, key_dim=8)
        assert config.mamba is not None
        self.config, self.mamba = config, config.mamba
        self.model: GPT = values(GPT(config).to("meta"), device)

    def alone(self, tokens: int) -> PackedSequences:
        return PackedSequences.of_lengths([tokens], self.device)

    def conv(self) -> Case:
        """Return the convolution of a mixer, over a part of the projection's output."""
        channels, taps = self.mamba.conv_size, self.mamba.conv_kernel
        wide = channels + self.mamba.inner_size + self.mamba.num_heads
        weight, bias = random(self.device, channels, taps), random(self.device, channels)

        def make(tokens: int, backend: str) -> Way:
            sequences = self.alone(tokens)

            def fn(rows: Tensor) -> Tensor:
                part = rows[:, self.mamba.inner_size : self.mamba.inner_size + channels]
                return causal_conv(
                    part, weight.to(rows.dtype), bias.to(rows.dtype), sequences, silu=True, backend=backend
                )

            return Way(fn)

        unit = 2.0 * self.tokens * channels
        # The gradient of the whole projection's output is written: zeros beside the part.
        rest = 2.0 * self.tokens * wide
        return Case(
            "convolution",
            (2 * unit, 4 * unit + rest),
            self.tokens,
            lambda tokens: [random(self.device, tokens, wide)],
            backends(CAUSAL_CONV, make),
            lambda tokens: make(tokens, "reference"),
            packages(CAUSAL_CONV, make),
            unit="bytes",
        )

    def norm(self) -> Case:
        """Return the gated norm of a mixer."""
        size, group = self.mamba.inner_size, self.mamba.inner_size // self.mamba.norm_groups
        weight = random(self.device, size).requires_grad_()

        def make(tokens: int, backend: str, dtype: torch.dtype = torch.bfloat16) -> Way:
            scale = weight.detach().to(dtype).requires_grad_()
            return Way(lambda y, z: gated_norm(y, z, scale, group, 1e-5, backend=backend), (scale,))

        unit = 2.0 * self.tokens * size
        return Case(
            "gated norm",
            (3 * unit, 8 * unit),
            self.tokens,
            lambda tokens: [random(self.device, tokens, size) for _ in range(2)],
            backends(GATED_NORM, make),
            lambda tokens: make(tokens, "reference", torch.float64),
            unit="bytes",
        )

    def scan(self) -> Case:
        """Return the scan of a mixer."""
        heads, size, groups, width = (
            self.mamba.num_heads,
            self.mamba.head_dim,
            self.mamba.num_groups,
            self.mamba.state_size,
        )
        a = -torch.linspace(1, 16, heads, device=self.device)
        d = torch.ones(heads, device=self.device)

        def inputs(tokens: int) -> list[Tensor]:
            x = random(self.device, tokens, heads, size)
            dt = F.softplus(torch.randn(tokens, heads, device=self.device) - 4)
            return [x, dt, *(random(self.device, tokens, groups, width) * width**-0.5 for _ in range(2))]

        def make(tokens: int, backend: str, dtype: torch.dtype = torch.float32) -> Way:
            sequences = self.alone(tokens)
            rates, skip = a.to(dtype), d.to(dtype)
            return Way(lambda x, dt, b, c: ssd(x, dt, rates, b, c, skip, sequences, backend=backend))

        def attention(tokens: int) -> Way:
            need("fla")
            from fla.ops.simple_gla import chunk_simple_gla

            def fn(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
                keys, queries = (t.repeat_interleave(heads // groups, 1)[None] for t in (b, c))
                value = (x * dt[..., None]).to(x.dtype)[None]
                out, _ = chunk_simple_gla(queries, keys, value, g=(dt * a)[None], scale=1.0)
                return (out[0] + d[:, None] * x).to(x.dtype)

            return Way(fn)

        within = 64.0 * (groups * width + heads * size)
        work = 2.0 * self.tokens * (within + 2 * heads * size * width)
        return Case(
            "scan",
            (work, 3 * work),
            self.tokens,
            inputs,
            backends(SSD, make, skip=() if self.device == "cpu" else ("reference",)),
            lambda tokens: make(tokens, "reference", torch.float64),
            {**packages(SSD, make), "flash-linear-attention": attention},
        )

    def rule(self) -> Case:
        """Return the delta rule of Qwen3-Next."""
        delta = self.delta

        def inputs(tokens: int) -> list[Tensor]:
            q, k = (random(self.device, tokens, delta.num_key_heads, delta.key_dim) for _ in range(2))
            v = random(self.device, tokens, delta.num_heads, delta.head_dim)
            decay = -F.softplus(torch.randn(tokens, delta.num_heads, device=self.device))
            beta = torch.rand(tokens, delta.num_heads, device=self.device)
            return [F.normalize(q, dim=-1) * delta.key_dim**-0.5, F.normalize(k, dim=-1), v, decay, beta]

        def make(tokens: int, backend: str) -> Way:
            sequences = self.alone(tokens)
            return Way(lambda q, k, v, decay, beta: delta_rule(q, k, v, decay, beta, sequences, backend=backend))

        work = rule_flops(delta, self.tokens)
        return Case(
            "delta rule",
            (work, 3 * work),
            self.tokens,
            inputs,
            backends(DELTA_RULE, make),
            lambda tokens: make(tokens, "reference"),
            packages(DELTA_RULE, make),
        )

    def ours(self, layers: nn.ModuleDict, tokens: int, choices: tuple[tuple[str, str], ...] = ()) -> Way:
        context = self.model.context(self.alone(tokens), next(layers.parameters()).dtype)
        return Way(lambda hidden: run_layers(layers, hidden, context), tuple(layers.parameters()), choices)

    def layers(self, name: str, count: int) -> Case:
        """Return the first ``count`` layers."""
        layers = nn.ModuleDict({str(i): self.model.layers[str(i)] for i in range(count)})
        exact = copy.deepcopy(layers).double()
        config = replace(self.config, num_layers=count, layer_pattern=PATTERN[:count])
        work = layer_flops(config, self.tokens)
        return Case(
            name,
            (work / 3, work),
            self.tokens,
            lambda tokens: [random(self.device, tokens, config.hidden_size)],
            {
                "auto": lambda tokens: self.ours(layers, tokens),
                "plain parts": lambda tokens: self.ours(layers, tokens, PLAIN),
            },
            lambda tokens: self.ours(exact, tokens),
            {
                "transformers": lambda tokens: transformers_layers(config, layers, self.device),
                "mamba-ssm": lambda tokens: combined_layers(config, layers),
                "megatron-core": lambda tokens: hybrid_layers(config, layers),
            },
            aim=1.2,
            checked=CHECKED,
            tolerance=4e-2,
        )

    def cases(self) -> Iterator[Case]:
        yield self.conv()
        yield self.norm()
        yield self.layers("Mamba-2 layer", 1)
        yield self.layers("hybrid, 9 layers", len(PATTERN))
        yield self.scan()
        yield self.rule()
        yield delta_layer(self.delta, self.delta_hidden, self.tokens, self.device)

    def said(self, times: dict[str, float]) -> list[str]:
        """Return nothing: the rows say all."""
        return []


PLAIN = tuple((op, "reference") for op in ("causal_conv", "gated_norm"))
"""The parts beside the scan in plain torch."""


def transformers_layers(config: GPTConfig, layers: nn.ModuleDict, device: str) -> Way:
    """Return the same layers of ``transformers``, which take fast kernels where these are."""
    need("transformers")
    from transformers.models.nemotron_h.configuration_nemotron_h import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHBlock

    mamba = config.mamba
    assert mamba is not None
    kinds = {"M": "mamba", "*": "attention", "-": "mlp"}
    theirs = NemotronHConfig(
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_layers,
        layers_block_type=[kinds[symbol] for symbol in config.layer_pattern],
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.ffn_hidden_size,
        mlp_hidden_act="relu2",
        mamba_num_heads=mamba.num_heads,
        mamba_head_dim=mamba.head_dim,
        ssm_state_size=mamba.state_size,
        n_groups=mamba.num_groups,
        conv_kernel=mamba.conv_kernel,
        chunk_size=128,
        layer_norm_epsilon=config.norm.eps,
        attn_implementation="sdpa",
    )
    blocks: Any = nn.ModuleList([NemotronHBlock(theirs, index) for index in range(config.num_layers)])
    blocks = blocks.to(device, torch.bfloat16).train()
    with torch.no_grad():
        for block, ours in zip(blocks, layers.values(), strict=True):
            fill(block, ours)

    def fn(hidden: Tensor) -> Tensor:
        out = hidden[None]
        for block in blocks:
            out = block(out)
        return out[0]

    return Way(fn, tuple(blocks.parameters()))


def fill(block: Any, ours: Any) -> None:
    """Copy the weights of a layer into a block of ``transformers``."""
    weights = dict(ours.named_parameters())
    block.norm.weight.copy_(next(value for name, value in weights.items() if name.endswith("_norm.weight")))
    mixer = block.mixer
    if hasattr(ours, "mamba"):
        mixer.in_proj.weight.copy_(ours.mamba.in_proj.weight)
        mixer.conv1d.weight.copy_(ours.mamba.conv.weight[:, None])
        mixer.conv1d.bias.copy_(ours.mamba.conv.bias)
        mixer.A_log.copy_(ours.mamba.scan.A_log)
        mixer.D.copy_(ours.mamba.scan.D)
        mixer.dt_bias.copy_(ours.mamba.scan.dt_bias)
        mixer.norm.weight.copy_(ours.mamba.norm.weight)
        mixer.out_proj.weight.copy_(ours.mamba.proj.weight)
    elif hasattr(ours, "attention"):
        parts = torch.split(ours.attention.qkv.weight, ours.attention.qkv.section_sizes)
        for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
            mixer.get_submodule(name).weight.copy_(part)
        mixer.o_proj.weight.copy_(ours.attention.proj.weight)
    else:
        for name in ("up", "down"):
            mixer.get_submodule(f"{name}_proj").weight.copy_(ours.mlp.get_submodule(name).weight)


def combined_layers(config: GPTConfig, layers: nn.ModuleDict) -> Way:
    """Return our layers with the mixers of ``mamba-ssm``: its one op for all of a mixer."""
    need("mamba_ssm", "causal_conv1d")
    from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined

    mamba = config.mamba
    assert mamba is not None

    def mixed(mixer: Any, hidden: Tensor) -> Tensor:
        out: Tensor = mamba_split_conv1d_scan_combined(
            F.linear(hidden[None], mixer.in_proj.weight),
            mixer.conv.weight,
            mixer.conv.bias,
            mixer.scan.dt_bias,
            -mixer.scan.A_log.exp(),
            D=mixer.scan.D,
            chunk_size=256,
            activation="silu",
            rmsnorm_weight=mixer.norm.weight,
            rmsnorm_eps=mixer.norm.eps,
            outproj_weight=mixer.proj.weight,
            headdim=mamba.head_dim,
            ngroups=mamba.num_groups,
            norm_before_gate=False,
        )
        return out[0]

    def fn(hidden: Tensor) -> Tensor:
        for layer in layers.values():
            if hasattr(layer, "mamba"):
                hidden = hidden + mixed(layer.mamba, layer.mamba_norm(hidden))
            else:
                hidden = run_layers(
                    nn.ModuleDict({"0": layer}),
                    hidden,
                    LayerContext(PackedSequences.of_lengths([len(hidden)], hidden.device)),
                )
        return hidden

    return Way(fn, tuple(layers.parameters()))
