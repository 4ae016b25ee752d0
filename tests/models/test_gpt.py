"""GPT against an independent reference: losses, logits and every gradient, in float64."""

import pytest
import torch

from megalight.errors import DataError
from megalight.models.gpt import (
    GPT,
    AttentionConfig,
    DropoutConfig,
    GPTConfig,
    InitConfig,
    NormConfig,
    PositionConfig,
    TemperatureConfig,
)
from megalight.nn.init import initialize
from megalight.types import PackedSequences
from tests.support.reference_gpt import (
    canonical_gradients,
    canonical_params,
    reference_logits,
    reference_losses,
    relative_error,
)

SIZES = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_heads": 4,
    "vocab_size": 61,
    "max_sequence_length": 32,
    "ffn_hidden_size": 40,
}
BIASES = {"attention": AttentionConfig(qkv_bias=True, proj_bias=True), "mlp_bias": True}
STYLES = {
    "llama": {"num_kv_heads": 2},
    "mha": {},
    "mqa": {"num_kv_heads": 1, "head_dim": 10},
    "qwen2": {"num_kv_heads": 2, "attention": AttentionConfig(qkv_bias=True), "tie_embeddings": True},
    "qwen3": {"num_kv_heads": 2, "head_dim": 8, "attention": AttentionConfig(qk_norm=True)},
    "gpt2": dict(
        norm=NormConfig(kind="layer"),
        position=PositionConfig(kind="learned"),
        activation="gelu_tanh",
        tie_embeddings=True,
        **BIASES,
    ),
    "gemma": {
        "activation": "geglu_tanh",
        "embedding_multiplier": 24**0.5,
        "logit_softcap": 3.0,
        "attention": AttentionConfig(softcap=1.5, window=3, window_pattern=(True, False), scale=0.3),
    },
    "neox": {
        "position": PositionConfig(fraction=0.5, base=500.0),
        "activation": "gelu",
        "norm": NormConfig(kind="layer"),
    },
    "interleaved": {"position": PositionConfig(interleaved=True), "activation": "squared_relu"},
    "some_rotate": {"position": PositionConfig(base=50.0, pattern=(False, True))},
    "gated": {"num_kv_heads": 2, "attention": AttentionConfig(output_gate=True, qkv_bias=True)},
    "gated_normed": {"attention": AttentionConfig(output_gate=True, qk_norm=True)},
    "tempered": {
        "position": PositionConfig(pattern=(False, True)),
        "attention": AttentionConfig(temperature=TemperatureConfig(length=4, scale=0.5)),
    },
    "nope": {"position": PositionConfig(kind="none"), "activation": "quick_gelu"},
}


def build(style: str, **more) -> GPT:
    model = GPT(GPTConfig(**SIZES, **STYLES[style], init=InitConfig(std=0.3), **more)).double()
    initialize(model, 5)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases start trivial; shake them
            with torch.no_grad():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.2 * noise)
    return model


def batch(rows: int = 3, length: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, SIZES["vocab_size"], (rows, length + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@pytest.mark.parametrize("style", STYLES)
def test_equals_the_reference(style):
    model = build(style)
    params = canonical_params(model)
    tokens, labels = batch()
    sequences = PackedSequences.of_uniform(*tokens.shape)
    weights = torch.linspace(0.5, 1.5, tokens.numel(), dtype=torch.float64)

    losses = model(tokens.flatten(), sequences, labels.flatten()).losses
    (losses * weights).sum().backward()
    expected = reference_losses(params, model.config, tokens, labels)
    (expected.flatten() * weights).sum().backward()
    assert losses.dtype == torch.float64
    assert relative_error(losses, expected.flatten()) < 1e-9

    gradients = canonical_gradients(model)
    assert gradients.keys() == params.keys()
    errors = {name: relative_error(gradients[name], params[name].grad) for name in params}
    # softmax does not feel a bias shared by all keys: that gradient is rounding noise around 0
    errors = {name: e for name, e in errors.items() if params[name].grad.norm() > 1e-12}
    assert max(errors.values()) < 1e-9, errors

    logits = model(tokens.flatten(), sequences).logits
    assert relative_error(logits.view(*tokens.shape, -1), reference_logits(params, model.config, tokens)) < 1e-9


@pytest.mark.parametrize("style", ["llama", "gpt2", "gemma"])
def test_documents_in_a_pack_equal_documents_alone(style):
    model = build(style)
    tokens, labels = (t.flatten() for t in batch())
    lengths = [1, 7, 12, 2, 11]

    alone = torch.cat(
        [
            model(t, PackedSequences.of_lengths([len(t)]), y).losses
            for t, y in zip(tokens.split(lengths), labels.split(lengths), strict=True)
        ]
    )
    alone.sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    packed = model(tokens, PackedSequences.of_lengths(lengths), labels).losses
    packed.sum().backward()
    assert relative_error(packed, alone) < 1e-12
    for name, parameter in model.named_parameters():
        if expected[name].norm() > 1e-12:
            assert relative_error(parameter.grad, expected[name]) < 1e-11, name


def test_padding_changes_no_real_token():
    model = build("llama")
    tokens, labels = (t.flatten() for t in batch())
    sequences = PackedSequences.of_lengths([20, 13])
    padded = sequences.pad_to(8)
    missing = padded.num_padding
    losses = model(torch.cat([tokens, tokens[:missing]]), padded, torch.cat([labels, labels[:missing]])).losses
    assert relative_error(losses[:33], model(tokens, sequences, labels).losses) < 1e-12


def test_cut_in_two_is_the_whole():
    model, first, second = build("llama"), build("llama"), build("llama")
    first.head, second.embed = None, None
    del first.layers["1"], second.layers["0"]
    tokens, labels = (t.flatten() for t in batch())
    sequences = PackedSequences.of_uniform(3, 11)
    hidden = first(tokens, sequences).hidden
    assert torch.equal(second(None, sequences, labels, hidden=hidden).losses, model(tokens, sequences, labels).losses)
    assert set(first.state_dict()) | set(second.state_dict()) == set(model.state_dict())
    with pytest.raises(DataError, match="token ids"):
        first(None, sequences)
    with pytest.raises(DataError, match="hidden states"):
        second(tokens, sequences)


def test_rows_choose_what_the_head_sees():
    model = build("llama")
    tokens, labels = (t.flatten() for t in batch())
    sequences = PackedSequences.of_uniform(3, 11)
    rows = torch.tensor([10, 21, 32])
    some = model(tokens, sequences, rows=rows).logits
    assert relative_error(some, model(tokens, sequences).logits[rows]) < 1e-12
    some = model(tokens, sequences, labels, rows=rows).losses
    assert relative_error(some, model(tokens, sequences, labels).losses[rows]) < 1e-12


@pytest.mark.parametrize("style", ["llama", "gpt2"])
def test_too_long_sequences_are_refused(style):
    model = build(style)
    tokens = torch.zeros(33, dtype=torch.long)
    with pytest.raises(DataError, match=r"33 tokens.*max_sequence_length = 32"):
        model(tokens, PackedSequences.of_lengths([33]))
    model(tokens, PackedSequences.of_lengths([32, 1]))


def test_dropout_acts_in_training_only():
    model = build("llama", dropout=DropoutConfig(hidden=0.2, attention=0.2, embedding=0.2))
    tokens, labels = (t.flatten() for t in batch())
    sequences = PackedSequences.of_uniform(3, 11)
    torch.manual_seed(0)
    trained = model(tokens, sequences, labels).losses
    torch.manual_seed(0)
    assert torch.equal(trained, model(tokens, sequences, labels).losses)
    assert not torch.equal(trained, model(tokens, sequences, labels).losses)
    model.eval()
    assert (
        relative_error(model(tokens, sequences, labels).losses, build("llama")(tokens, sequences, labels).losses)
        < 1e-12
    )


def test_residual_projections_start_smaller():
    config = GPTConfig(num_layers=8, hidden_size=64, num_heads=4, vocab_size=64, max_sequence_length=8)
    model = GPT(config)
    initialize(model, 0)
    layer = model.layers["3"]
    for small in (layer.attention.proj.weight, layer.mlp.down.weight):
        assert small.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert layer.mlp.gate_up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert torch.equal(layer.mlp_norm.weight, torch.ones(64))


def test_tied_weights_are_one_parameter():
    model = build("gpt2")
    assert model.head.output_layer.weight is model.embed.word.weight
    assert "head.output_layer.weight" not in canonical_params(model)


def test_the_lightning_module_comes_on_first_use():
    import megalight.models.gpt as package
    from megalight.models.gpt.module import GPTModule

    assert package.GPTModule is GPTModule
    with pytest.raises(AttributeError, match="has no attribute 'GPTModul'"):
        _ = package.GPTModul
