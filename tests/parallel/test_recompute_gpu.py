"""Recompute and deferred weight gradients with the kernels and threads that CUDA brings."""

from __future__ import annotations

import gc

import pytest
import torch

from megalight.models.config import DropoutConfig
from megalight.models.gpt import GPT, GPTConfig
from megalight.nn.init import initialize
from megalight.ops.linear import WeightGradients, deferring
from megalight.parallel.data_parallel import DataParallelEngine, ParamInfo
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.recompute import RecomputeOptions, apply_recompute
from megalight.parallel.shard import ShardSpec
from megalight.types import PackedSequences
from tests.parallel.gathering import relative_error

pytestmark = pytest.mark.gpu

LAYERS, H, F, T = 4, 256, 512, 1024
CHEAP = RecomputeOptions(granularity="selective", modules=("attention_norm", "mlp_norm", "mlp.act"))
KINDS = {
    "uniform": RecomputeOptions(granularity="full", num_layers=2),
    "cheap": CHEAP,
    "regions": RecomputeOptions(granularity="selective", modules=("attention.inner", "mlp_norm", "mlp")),
}


def build(dropout: DropoutConfig | None = None) -> tuple[GPT, DataParallelEngine]:
    """A bfloat16 model whose gradients are float32, with values."""
    config = GPTConfig(
        num_layers=LAYERS,
        hidden_size=H,
        num_heads=4,
        num_kv_heads=2,
        ffn_hidden_size=F,
        vocab_size=512,
        max_sequence_length=T,
        dropout=dropout or DropoutConfig(),
    )
    model = GPT(config).cuda()
    initialize(model, 3)
    model.bfloat16()
    infos = [ParamInfo(n, p, ShardSpec.replicated(n, tuple(p.shape)), 0) for n, p in model.named_parameters()]
    return model, DataParallelEngine(infos, ParallelMesh())


def batch(lengths: list[int]) -> tuple[torch.Tensor, PackedSequences, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(512, (2, sum(lengths)), generator=generator).cuda()
    return tokens[0], PackedSequences.of_lengths(lengths, "cuda"), tokens[1]


def gradients(recompute: RecomputeOptions, lengths: list[int], deferred: bool = False) -> dict[str, torch.Tensor]:
    model, engine = build(DropoutConfig(hidden=0.2))
    apply_recompute(model, recompute)
    torch.manual_seed(5)
    engine.zero_grad()
    queue = WeightGradients()
    loss = model(*batch(lengths)).losses.mean()
    if deferred:
        with deferring(queue):
            loss.backward()
        assert len(queue) == 4 * LAYERS  # autograd's own thread saw the queue
        queue.run()
    else:
        loss.backward()
    return {name: p.main_grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("lengths", [[512, 512], [700, 1, 323]], ids=["uniform", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_same(kind: str, lengths: list[int]) -> None:
    expected = gradients(RecomputeOptions(), lengths)
    for deferred in (False, True):
        found = gradients(KINDS[kind], lengths, deferred)
        wrong = {name: e for name in expected if not (e := relative_error(found[name], expected[name])) <= 1e-2}
        assert not wrong, wrong


def requested() -> int:
    """Bytes asked for: the blocks that serve them may be larger, by how the cache was cut before."""
    gc.collect()  # models of earlier tests hold tensors in reference cycles
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


def allocated(recompute: RecomputeOptions) -> int:
    """Bytes that a forward pass through the layers leaves on the device, the result excepted."""
    model, _ = build()
    apply_recompute(model, recompute)
    sequences = PackedSequences.of_uniform(2, T // 2, "cuda")
    hidden = torch.randn(T, H, device="cuda").bfloat16().requires_grad_()
    context = model.context(sequences, hidden.dtype)
    first = next(iter(model.layers.values()))
    first(hidden, context).sum().backward()  # kernels are compiled, caches filled
    del first
    before = requested()
    out = hidden
    for layer in model.layers.values():
        out = layer(out, context)
    return requested() - before - out.nbytes


def test_memory() -> None:
    none = allocated(RecomputeOptions())
    assert none - allocated(CHEAP) == pytest.approx(LAYERS * T * (2 * H + F) * 2, rel=0.05)
    uniform = allocated(RecomputeOptions(granularity="full"))
    assert uniform == pytest.approx((LAYERS - 1) * T * H * 2, rel=0.05)  # the first input was there before
