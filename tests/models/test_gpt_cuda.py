"""GPT on a GPU: precision against the float64 reference, and a forward and backward that never wait for the device."""

import pytest
import torch

from megalight.models.gpt import GPT, AttentionConfig, GPTConfig, InitConfig, NormConfig, PositionConfig
from megalight.nn.init import initialize
from megalight.types import PackedSequences
from tests.support.reference_gpt import canonical_gradients, canonical_params, reference_losses, relative_error

pytestmark = pytest.mark.gpu

SIZES = {"num_layers": 2, "hidden_size": 256, "num_heads": 4, "vocab_size": 1031, "max_sequence_length": 300}
STYLES = {
    "llama": {"num_kv_heads": 2},
    "qwen3": {"num_kv_heads": 1, "head_dim": 128, "attention": AttentionConfig(qk_norm=True)},
    "gpt2": {
        "norm": NormConfig(kind="layer"),
        "position": PositionConfig(kind="learned"),
        "activation": "gelu_tanh",
        "mlp_bias": True,
        "tie_embeddings": True,
        "attention": AttentionConfig(qkv_bias=True, proj_bias=True),
    },
    "windowed": {"attention": AttentionConfig(window=50, window_pattern=(True, False))},
}


def build(style: str, dtype: torch.dtype) -> GPT:
    with torch.device("cuda"):
        model = GPT(GPTConfig(**SIZES, **STYLES[style], init=InitConfig(std=0.06)))
    initialize(model, 5)
    return model.to(dtype)


def batch(rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 1031, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("style", STYLES)
def test_precision(style, dtype, tolerance):
    model = build(style, dtype)
    tokens, labels = batch(3, 211)
    params = {name: p.cpu().detach().requires_grad_() for name, p in canonical_params(model).items()}
    expected = reference_losses(params, model.config, tokens, labels)
    expected.sum().backward()
    losses = model(tokens.flatten().cuda(), PackedSequences.of_uniform(3, 211, "cuda"), labels.flatten().cuda()).losses
    losses.sum().backward()
    assert losses.dtype == torch.float32
    assert relative_error(losses.cpu(), expected.flatten()) < tolerance
    for name, gradient in canonical_gradients(model).items():
        if not name.endswith("k.bias"):
            assert relative_error(gradient.cpu(), params[name].grad) < 3 * tolerance, name


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("lengths", [[128, 128], [7, 100, 149]])
def test_the_host_never_waits(style, lengths):
    model = build(style, torch.bfloat16)
    tokens, labels = (t.flatten().cuda() for t in batch(1, 256))

    def step() -> None:
        model(tokens, PackedSequences.of_lengths(lengths, "cuda"), labels).losses.sum().backward()

    step()  # kernels are built and backends chosen
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("style", ["llama", "gpt2", "windowed"])
def test_documents_in_a_pack_equal_documents_alone(style):
    model = build(style, torch.float32)
    tokens, labels = (t.flatten().cuda() for t in batch(1, 256))
    lengths = [7, 100, 149]
    packed = model(tokens, PackedSequences.of_lengths(lengths, "cuda"), labels).losses
    alone = [
        model(t, PackedSequences.of_lengths([len(t)], "cuda"), y).losses
        for t, y in zip(tokens.split(lengths), labels.split(lengths), strict=True)
    ]
    assert relative_error(packed, torch.cat(alone)) < 1e-5
