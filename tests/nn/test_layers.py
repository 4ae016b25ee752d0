"""Single layers: what the parity tests of whole models do not see."""

import math
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megalight.errors import ConfigurationError
from megalight.nn import (
    MLP,
    Activation,
    Attention,
    Embedding,
    InnerAttention,
    LayerContext,
    LayerNorm,
    Linear,
    LMHead,
    RMSNorm,
    Rotary,
    Temperature,
    TokenEmbedding,
    TransformerLayer,
)
from megalight.nn import norm as norms
from megalight.nn.init import initialize
from megalight.nn.layer import PostNormLayer, drop
from megalight.nn.mlp import ACTIVATIONS
from megalight.nn.norm import norm_and_sum
from megalight.ops.activation import KINDS
from megalight.types import PackedSequences


def filled(module: nn.Module) -> nn.Module:
    initialize(module.double(), 1)
    return module


def test_every_activation_exists():
    assert {kind for kind, _ in ACTIVATIONS.values()} <= set(KINDS)
    for name, (_, gated) in ACTIVATIONS.items():
        assert Activation(name)(torch.randn(3, 8)).shape == (3, 4 if gated else 8)
    with pytest.raises(ConfigurationError, match="Did you mean 'geglu'"):
        MLP(4, 8, "gegelu")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_temperatures_are_rounded_once(dtype):
    """The factor itself is exact in half precision too."""
    torch.manual_seed(0)
    q, positions = torch.randn(40, 2, 8).to(dtype), torch.arange(40)
    factor = torch.tensor([1 + 0.1 * math.log(1 + (t + 1) // 8) for t in range(40)], dtype=torch.float64)
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    expected = (q.to(wide) * factor.to(wide)[:, None, None]).to(dtype)
    found = Temperature(8, 0.1)(q, positions)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(wide).eps, atol=0)


def test_split_layers_work_unchanged():
    """Half of the heads and of the MLP, put in by hand, give one term of the sum."""
    torch.manual_seed(0)
    sequences = PackedSequences.of_lengths([3, 5])
    hidden = torch.randn(8, 12, dtype=torch.float64)
    context = LayerContext(sequences, {"all": Rotary(4)(sequences.positions, torch.float64)})
    whole = filled(Attention(12, 4, 2, 4, InnerAttention(), rotary="all", std=0.3, proj_std=0.3))
    q, k, v = whole.qkv.weight.split([16, 8, 8])
    total = 0
    for half in range(2):
        part = Attention(12, 4, 2, 4, InnerAttention(), rotary="all").double()
        weight = torch.cat([q[half * 8 :][:8], k[half * 4 :][:4], v[half * 4 :][:4]])
        part.qkv.weight, part.qkv.section_sizes = nn.Parameter(weight), [8, 4, 4]
        part.proj.weight = nn.Parameter(whole.proj.weight[:, half * 8 :][:, :8])
        total = total + part(hidden, context)
    torch.testing.assert_close(total, whole(hidden, context), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm, nn.LayerNorm])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_norm_of_a_sum(kind: type[nn.Module], dtype: torch.dtype):
    """Any norm, and a sum of two types, which is of the wider one."""
    torch.manual_seed(0)
    x, residual = torch.randn(5, 8, dtype=dtype), torch.randn(5, 8, dtype=torch.float64)
    norm = kind(8).double()
    nn.init.uniform_(norm.weight)
    if getattr(norm, "bias", None) is not None:
        nn.init.uniform_(norm.bias)
    normed, total = norm_and_sum(norm, x, residual)
    assert total.dtype == torch.float64
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, norm(x + residual))
    if dtype == torch.float64 and isinstance(norm, RMSNorm | LayerNorm):
        assert all(map(torch.equal, norm(x, residual), (normed, total)))
    normed, same = norm_and_sum(norm, residual)
    assert torch.equal(same, residual)
    assert torch.equal(normed, norm(residual))


def test_residual_sums_are_part_of_norms(monkeypatch: pytest.MonkeyPatch):
    """So that no kernel adds beside them but at a layer's end."""
    called: list[str] = []
    for name in ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm"):
        original = getattr(norms, name)
        monkeypatch.setattr(norms, name, lambda *a, n=name, f=original, **k: called.append(n) or f(*a, **k))
    context, hidden = LayerContext(PackedSequences.of_lengths([3, 5])), torch.randn(8, 12, dtype=torch.float64)
    parts = Attention(12, 4, 2, 3, InnerAttention()), MLP(12, 16)
    pre = filled(TransformerLayer(RMSNorm(12), parts[0], RMSNorm(12), parts[1]))
    pre(hidden, context)
    assert called == ["add_rms_norm"] * 2
    called.clear()
    filled(PostNormLayer(parts[0], LayerNorm(12), parts[1], LayerNorm(12)))(hidden, context)
    assert called == ["add_layer_norm"] * 2


def test_norms_keep_half_precision():
    x = torch.randn(5, 6, dtype=torch.bfloat16)
    for norm in (RMSNorm(6), LayerNorm(6), LayerNorm(6, bias=False)):
        initialize(norm, 0)
        halved = norm.bfloat16()(x)
        assert halved.dtype == torch.bfloat16
        expected = norm.double()(x.double())
        assert (halved.double() - expected).norm() < 0.01 * expected.norm()


def test_rotary_tables_are_exact_far_out():
    positions = torch.tensor([0, 1, 100_003])
    table = Rotary(8, base=500000.0)(positions, torch.bfloat16)
    angle = 100_003 * 500000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert table.cos.dtype == torch.float32
    torch.testing.assert_close(table.cos[2], angle.cos().float(), rtol=0, atol=1e-7)
    assert Rotary(8)(positions, torch.float64).sin.dtype == torch.float64


def test_embedding_drops_in_training_only():
    embed = filled(TokenEmbedding(Embedding(7, 4), Embedding(5, 4), multiplier=3.0, dropout=0.5)).eval()
    tokens, positions = torch.tensor([6, 0]), torch.tensor([4, 1])
    expected = 3.0 * embed.word.weight[tokens] + embed.position.weight[positions]
    torch.testing.assert_close(embed(tokens, positions), expected)
    dropped = embed.train()(tokens, positions)
    assert ((dropped == 0) | torch.isclose(dropped, 2 * expected)).all()


def test_head_gives_losses_or_logits():
    head = filled(LMHead(RMSNorm(6), Linear(6, 9, std=1.0), softcap=2.0))
    hidden = torch.randn(4, 6, dtype=torch.float64)
    labels = torch.tensor([0, 8, 3, -100])
    logits = head(hidden)
    assert logits.abs().max() < 2
    torch.testing.assert_close(head(hidden, labels), F.cross_entropy(logits, labels, reduction="none"))


def test_layer_is_a_residual():
    layer = TransformerLayer(RMSNorm(8), Attention(8, 2, 2, 4, InnerAttention()), RMSNorm(8), MLP(8, 12), dropout=0.5)
    filled(layer)
    with torch.no_grad():
        layer.attention.proj.weight.zero_()
        layer.mlp.down.weight.zero_()
    hidden = torch.randn(5, 8, dtype=torch.float64)
    assert torch.equal(layer(hidden, LayerContext(PackedSequences.of_lengths([2, 3]))), hidden)


class Dropped(nn.Dropout):
    pass


def test_a_dropout_that_drops_nothing_is_not_called():
    calls: list[nn.Module] = []
    x = torch.ones(4, 8)

    def count(kind: type[nn.Dropout], p: float) -> int:
        dropout, before = kind(p), len(calls)
        with patch.object(nn.Dropout, "forward", lambda self, x: calls.append(self) or x):
            assert drop(dropout, x) is x
        return len(calls) - before

    assert count(nn.Dropout, 0.0) == 0
    assert count(nn.Dropout, 0.5) == 1
    assert count(Dropped, 0.0) == 1  # it may do anything
    hooked = nn.Dropout(0.0)
    hooked.register_forward_hook(lambda module, inputs, out: calls.append(module))
    assert drop(hooked, x) is x
    assert calls[-1] is hooked


def test_the_probability_of_a_layers_dropout_may_change():
    layer = TransformerLayer(RMSNorm(8), Attention(8, 2, 2, 4, InnerAttention()), RMSNorm(8), MLP(8, 12))
    filled(layer)
    hidden, context = torch.randn(5, 8, dtype=torch.float64), LayerContext(PackedSequences.of_lengths([2, 3]))
    assert torch.equal(layer(hidden, context), layer.eval()(hidden, context))
    layer.train()
    layer.attention_dropout.p = layer.mlp_dropout.p = 1.0
    assert torch.equal(layer(hidden, context), hidden)


def test_layers_print_what_they_are():
    text = repr(TransformerLayer(LayerNorm(8), Attention(8, 2, 1, 4, InnerAttention(window=3)), RMSNorm(8), MLP(8, 12)))
    for expected in ("8 -> 16 (q|k|v)", "window=3", "8 -> 24 (gate|up)", "silu, gated=True", "8, eps=1e-05"):
        assert expected in text
    assert "base=10000" in repr(Rotary(8))
    assert "7 -> 4" in repr(Embedding(7, 4))
