"""What a kind cannot do, and what is misspelled, is said when the model is made parallel."""

from __future__ import annotations

import copy

import pytest
import torch

from megalight.errors import LayoutError
from megalight.models.config import DropoutConfig
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.config import GPTBackendConfig
from megalight.models.gpt.mixer_config import AttentionConfig
from megalight.models.gpt.plan import gpt_plan
from megalight.nn import InnerAttention
from megalight.ops.attention import attention
from megalight.parallel.apply import parallelize
from megalight.parallel.context.attention import KINDS, ContextAttention, ContextOptions
from megalight.parallel.context.spec import ContextGroups
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.shared_state import OwnStream
from megalight.parallel.styles import ContextRegion
from megalight.registry import Backend
from megalight.types import PackedSequences
from tests.parallel.test_apply import BASE

CHUNK = {"attention": AttentionConfig(chunk=3, window_pattern=(False, True))}
WINDOW = {"attention": AttentionConfig(window=3, window_pattern=(False, True))}
SOFTCAP = {"attention": AttentionConfig(softcap=3.0)}
DROPOUT = {"dropout": DropoutConfig(attention=0.1)}
CUDNN = {"backends": GPTBackendConfig(attention="cudnn")}
SDPA = {"backends": GPTBackendConfig(attention="sdpa")}


def meta(**options) -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(**{**BASE, **options}))


def made(model: GPT, tp: int = 1, cp: int = 4, **context) -> GPT:
    options = ContextOptions(**context)
    parallelize(model, gpt_plan(model), ParallelMesh(tp * cp, 0, tp=tp, cp=cp), context=options)
    return model


@pytest.mark.parametrize(
    ("options", "tp", "context", "message"),
    [
        ({}, 2, {"kind": "all_to_all"}, r"layers\.0\.attention\.inner: .*has 2 query heads for 4 ranks"),
        ({"num_heads": 6, "head_dim": 4}, 1, {"kind": "all_to_all", "cp": 3}, None),
        ({"num_heads": 12, "num_kv_heads": 6}, 1, {"kind": "all_to_all"}, None),
        ({"num_heads": 4, "num_kv_heads": 4}, 1, {"kind": "all_to_all", "cp": 3}, r"4 query heads for 3 ranks"),
        ({"num_heads": 10, "num_kv_heads": 2}, 1, {"kind": "all_to_all", "cp": 5}, None),
        (WINDOW, 1, {"kind": "ring"}, None),
        (CHUNK, 1, {"kind": "ring"}, None),
        (WINDOW, 1, {"kind": "all_to_all_ring", "inner": 2}, None),
        (SOFTCAP, 1, {"kind": "ring"}, r"layers\.0\.attention\.inner: .*ring: has no soft cap"),
        (DROPOUT, 1, {"kind": "ring"}, r"ring: has no dropout"),
        (
            SDPA,
            1,
            {"kind": "ring"},
            r"ring: has no attention backend 'sdpa': attention_block has cudnn, triton, varlen, ref",
        ),
        (SOFTCAP, 1, {"kind": "all_to_all_ring", "inner": 2}, r"all_to_all_ring: has no soft cap"),
        (
            {**WINDOW, **CUDNN},
            1,
            {"kind": "ring"},
            r"layers\.1\..* ring: has no attention backend 'cudnn' for window, .* equally long sequences; triton, "
            "varlen, reference, flash_attn_4 can serve them",
        ),
        ({**CHUNK, **CUDNN}, 1, {"kind": "ring"}, "ring: has no attention backend 'cudnn' for chunks"),
        ({**CHUNK, **CUDNN}, 1, {"kind": "all_to_all_ring", "inner": 2}, "no attention backend 'cudnn' for chunks"),
        (CUDNN, 1, {"kind": "ring"}, None),
        ({**WINDOW, "backends": GPTBackendConfig(attention="varlen")}, 1, {"kind": "ring"}, None),
        ({**WINDOW, "backends": GPTBackendConfig(attention="reference")}, 1, {"kind": "ring"}, None),
        (SDPA, 1, {"kind": "all_to_all_ring", "inner": 2}, r"all_to_all_ring: has no attention backend 'sdpa'"),
        ({"backends": GPTBackendConfig(attention="reference")}, 1, {"kind": "all_to_all_ring", "inner": 2}, None),
        ({}, 1, {"kind": "all_to_all_ring"}, r"set ContextOptions\.inner"),
        ({}, 1, {"kind": "all_to_all_ring", "inner": 4}, r"inner must divide cp and be smaller"),
        ({}, 1, {"kind": "all_to_all_ring", "inner": 3}, r"inner must divide cp and be smaller"),
        ({"num_heads": 3}, 1, {"kind": "all_to_all_ring", "inner": 2}, r"3 query heads for 2 ranks"),
        (
            {},
            1,
            {"kind": {"*layers.1.*": "all_together"}},
            r"layers\.1\..*no backend 'all_together'.*Did you mean 'all_",
        ),
        (
            {},
            1,
            {"kind": {"*layer.1.*": "ring"}},
            r"'\*layer\.1\.\*' matches no attention .* layers\.0\.attention\.inner",
        ),
    ],
)
def test_kinds_that_cannot_serve_a_layer(options: dict, tp: int, context: dict, message: str | None) -> None:
    context = {"cp": 4, **context}
    if message is None:
        made(meta(**options), tp, **context)
        return
    with pytest.raises(LayoutError, match=message):
        made(meta(**options), tp, **context)


def test_layers_have_their_own_kinds() -> None:
    model = made(meta(**WINDOW), kind={"*.1.*": "all_gather", "*": "ring"})
    assert [layer.attention.inner.kind for layer in model.layers.values()] == ["ring", "all_gather"]
    assert repr(model.layers["1"].attention.inner).startswith("ContextAttention(\n  kind=all_gather, cp=4")


@pytest.mark.parametrize(
    ("options", "tp", "chosen"),
    [
        ({}, 1, "all_to_all"),
        ({}, 2, "ring"),
        ({**SOFTCAP, "num_kv_heads": 2}, 2, "all_gather"),
        (SDPA, 2, "all_gather"),
        (WINDOW, 2, "all_gather"),
    ],
)
def test_auto_takes_the_first_that_can(options: dict, tp: int, chosen: str) -> None:
    inner = made(meta(**options), tp).layers["1"].attention.inner
    assert inner._choose((4 // tp, 4 // tp)).__module__ == f"megalight.parallel.context.{chosen}"


@pytest.mark.parametrize("kind", ["all_gather", "ring"])
def test_a_window_to_one_side_only_is_refused(kind: str) -> None:
    groups = ContextGroups(ParallelMesh(2, 0, cp=2))
    with pytest.raises(LayoutError, match=f"{kind}: has no window without a causal mask"):
        ContextAttention(InnerAttention(causal=False, window=3), "it", kind, groups)


def test_dropout_keeps_its_own_stream_around_it() -> None:
    inner = made(meta(**DROPOUT), 2).layers["0"].attention.inner
    assert isinstance(inner, OwnStream)
    assert isinstance(inner.module, ContextAttention)


def test_one_rank_changes_nothing() -> None:
    assert isinstance(made(meta(), cp=1, kind="ring").layers["0"].attention.inner, InnerAttention)


def test_a_model_without_attention_that_looks_further() -> None:
    with pytest.raises(LayoutError, match=r"cp=4 .* ContextRegion\(\) for no attention"):
        parallelize(torch.nn.Sequential(torch.nn.Linear(2, 2)), ParallelizePlan(), ParallelMesh(4, 0, cp=4))


def test_foreign_attention() -> None:
    model = torch.nn.ModuleDict({"it": torch.nn.Linear(2, 2)})
    with pytest.raises(LayoutError, match="ContextRegion meets it, a Linear"):
        parallelize(model, ParallelizePlan({"it": ContextRegion()}), ParallelMesh(4, 0, cp=4))


def test_made_parallel_once() -> None:
    model = made(meta())
    with pytest.raises(LayoutError, match="is parallel already"):
        made(model)


def test_inner_size() -> None:
    with pytest.raises(LayoutError, match=r"inner=1; it must be at least 2"):
        ContextOptions(inner=1)
    for kind, said in (("auto", "'auto'"), ("ring", "'ring'"), ({"*.1.*": "ring", "*": "all_gather"}, "'all_gather'")):
        with pytest.raises(LayoutError, match=rf"inner=3 is used only by .*.*{said}\. Use that"):
            ContextOptions(kind, inner=3)
    assert ContextOptions({"*.1.*": "all_to_all_ring"}, inner=3).kind_of("layers.0.attention.inner") == "auto"


def test_names_of_kinds_are_known_without_a_model() -> None:
    with pytest.raises(LayoutError, match=r"ContextOptions\('kind'\): .*'rinng'; it has .*Did you mean 'ring'"):
        ContextOptions("rinng")


def test_a_kind_of_a_plugin_may_have_use_for_an_inner_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS._backends, "theirs", Backend("theirs", KINDS._backends["ring"].fn, 0, lambda spec: None))
    assert ContextOptions("theirs", inner=3).inner == 3


def test_shares_for_other_ranks_and_for_plain_attention() -> None:
    share, _ = PackedSequences.of_lengths([8, 5]).zigzag(0, 2)
    q = torch.zeros(share.num_tokens, 4, 6)
    inner = made(meta()).layers["0"].attention.inner
    with pytest.raises(LayoutError, match="cut into 2 shares, but cp=4"):
        inner(q, q, q, share)
    with pytest.raises(LayoutError, match="plain attention does not see the other shares"):
        attention(q, q, q, share)


def test_whole_sequences_need_no_other_rank() -> None:
    """Generation: there is no process group here."""
    sequences = PackedSequences.of_lengths([8, 5])
    q, k, v = torch.randn(3, 13, 4, 6)
    inner = copy.deepcopy(made(meta()).layers["0"].attention.inner)
    assert torch.equal(inner(q, k, v, sequences), attention(q, k, v, sequences))
