from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from megalight.errors import LayoutError
from megalight.parallel.apply import parallelize
from megalight.parallel.initial_values import initialize, materialize
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model_plans import plan_for
from tests.parallel.gathering import gather_canonical, relative_error
from tests.support.workers import run


def llama(layers: int, kv_heads: int, tied: bool, **options):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=51,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
        **options,
    )
    return LlamaForCausalLM(config)


def parity(layers: int, kv_heads: int, tied: bool, sequence_parallel: bool, checkpointing: bool) -> dict[str, float]:
    tp = dist.get_world_size()
    mesh = ParallelMesh(tp, dist.get_rank(), tp=tp)
    torch.manual_seed(0)
    whole = llama(layers, kv_heads, tied).double().train()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model = copy.deepcopy(whole)
    specs = parallelize(model, plan_for(model), mesh, sequence_parallel=sequence_parallel)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(51, (2, 8))
    losses = []
    for one in (model, whole):
        out = one(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        losses.append(out.loss)
    grads = gather_canonical({n: p.grad for n, p in model.named_parameters()}, specs, mesh)
    wanted = {n: p.grad for n, p in whole.named_parameters()}
    assert grads.keys() == wanted.keys()
    errors = {name: relative_error(grads[name], wanted[name]) for name in wanted}
    return {**errors, "loss": relative_error(*losses)}


@pytest.mark.parametrize(
    ("tp", "layers", "kv_heads", "tied", "sequence_parallel", "checkpointing"),
    [
        (2, 2, 4, False, False, False),
        (2, 3, 2, True, True, False),
        (2, 1, 2, False, True, True),
        (4, 2, 2, True, False, False),
        (4, 2, 2, False, True, False),
    ],
)
def test_llama_equals_one_device(
    tp: int, layers: int, kv_heads: int, tied: bool, sequence_parallel: bool, checkpointing: bool
) -> None:
    pytest.importorskip("transformers")
    for errors in run(parity, tp, layers, kv_heads, tied, sequence_parallel, checkpointing):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong


def values() -> bool:
    """Drawn by transformers itself, on meta first; the rotary frequencies, which no checkpoint holds, are made anew."""
    gathered = []
    for mesh in (ParallelMesh(2, dist.get_rank(), tp=2), ParallelMesh()):
        with torch.device("meta"):
            model = llama(2, 2, True)
        specs = parallelize(model, plan_for(model), mesh)
        materialize(model, "cpu")
        initialize(model, specs, 9)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        expected = 1 / 10000.0 ** (torch.arange(0, 4, 2) / 4)
        torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected)
        gathered.append(gather_canonical(dict(model.named_parameters()), specs, mesh, sum_partial=False))
    assert abs(float(gathered[0]["model.embed_tokens.weight"].std()) - 0.02) < 0.002
    assert bool((gathered[0]["model.norm.weight"] == 1).all())
    return all(torch.equal(gathered[0][name], gathered[1][name]) for name in gathered[1])


def test_initial_values_do_not_depend_on_the_layout() -> None:
    pytest.importorskip("transformers")
    assert all(run(values, 2))


def _dropout() -> str:
    model = llama(1, 4, False, attention_dropout=0.1)
    parallelize(model, plan_for(model), ParallelMesh())  # a single rank draws as the model does
    with pytest.raises(LayoutError) as error:
        parallelize(llama(1, 4, False, attention_dropout=0.1), plan_for(model), ParallelMesh(2, dist.get_rank(), tp=2))
    return str(error.value)


def test_attention_dropout_is_refused() -> None:
    pytest.importorskip("transformers")
    assert "self_attn (LlamaAttention) draws attention_dropout=0.1" in run(_dropout, 2)[0]
