"""Models of ``transformers`` split by what they declare, or by their form: loss and gradients are the plain model's."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megalight.errors import ConfigurationError, LayoutError
from megalight.parallel.apply import find_plan, parallelize
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model_plans import plan_for
from megalight.parallel.plan import ParallelizePlan
from megalight.parallel.styles import Boundary, Column, Replicated, Row
from megalight.strategies import MegatronStrategy
from tests.parallel.gathering import gather_canonical, relative_error
from tests.parallel.tiny_transformers import Plain, errors_of, float64, tiny, trained
from tests.support.environment import trainer
from tests.support.workers import run
from tools.transformers_table import RESULTS, attempt

TABLE: dict[str, dict[str, list[str]]] = json.loads(RESULTS.read_text())
EQUAL = {
    family: layouts
    for family, found in TABLE.items()
    if (layouts := [name for name, (word, _) in found.items() if word == "ok" and name != "built"])
}
"""Family -> layouts in which it equals the plain model."""

FAMILIES = {
    "qwen3": "norms of heads",
    "gemma2": "norms after layers, embedding that scales",
    "phi3": "halves in one layer, attention that cannot be divided",
    "gpt_neox": "queries, keys and values of each head in one layer",
    "deepseek_v3": "latent attention, shared experts",
    "gpt_oss": "sinks, experts with biases",
    "jamba": "mixers that are no attention",
    "olmo2": "norms over all heads",
    "gpt2": "no declaration: transposed weights in three sections",
    "bloom": "no declaration: ALiBi",
    "bert": "no declaration: projection outside of the attention, bias tied to one of the head",
    "bart": "no declaration: dropout, cross attention, feed-forward layers without a module",
}
"""What differs in each from those before."""


def _errors(families: list[str], sequence_parallel: bool) -> dict[str, dict[str, float]]:
    return {family: errors_of(family, sequence_parallel) for family in families}


def check(families: list[str], ranks: int, sequence_parallel: bool = False) -> None:
    for found in run(_errors, ranks, families, sequence_parallel, timeout=240):
        for family, errors in found.items():
            assert errors.pop("share of parameters") < 0.99, f"{family}: nothing is split"
            wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
            assert not wrong, f"{family}: {wrong}"


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.full), True])
def test_models_compute_what_they_do_on_one_rank(sequence_parallel: bool) -> None:
    check([*FAMILIES], 2, sequence_parallel)


def test_shares_of_what_layers_get_besides_hidden_states() -> None:
    # An input for each token; the same states as queries, keys and values; norms in a list.
    check(["gemma4_text", "ctrl", "longcat_flash"], 2, sequence_parallel=True)


def test_code_that_reads_widths_in_functions_and_the_weight_of_its_head() -> None:
    check(["longt5", "mobilebert"], 2)


FALCONS: list[dict[str, Any]] = [
    {"multi_query": True},
    {"multi_query": False, "num_kv_heads": 4},
    {"new_decoder_architecture": True, "num_kv_heads": 2},
]


def _falcons() -> list[dict[str, float]]:
    return [errors_of("falcon", **order) for order in FALCONS]


def test_falcon_has_three_orders_of_fused_heads() -> None:
    for found in run(_falcons, 2):
        for errors in found:
            assert errors.pop("share of parameters") < 0.99
            wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
            assert not wrong, wrong


def test_more_ranks_than_key_heads() -> None:
    check(["qwen3", "gemma2"], 4)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {"tensor_parallel": 2}),
        ("qwen3_moe", {"expert_parallel": 2}),
        ("gpt_oss", {"expert_parallel": 2}),  # transposed, with biases
    ],
)
def test_a_plain_module_needs_one_argument(family: str, options: dict[str, Any]) -> None:
    for errors in run(trained, 2, family, options):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(EQUAL))
def test_the_table_holds(family: str) -> None:
    layouts = EQUAL[family]
    assert attempt(family, layouts) == {layout: ["ok", ""] for layout in layouts}


STACKED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "halves": ("qwen3_moe", 2, {"tensor_parallel": 2}),
    "alternating, with biases": ("gpt_oss", 2, {"tensor_parallel": 2}),
    "without gate": ("nemotron_h", 2, {"tensor_parallel": 2}),
    "whole experts too": ("qwen3_moe", 2, {"tensor_parallel": 2, "expert_parallel": 2}),
    "shares of tokens": ("gpt_oss", 2, {"tensor_parallel": 2, "expert_parallel": 2, "sequence_parallel": True}),
    "replicas": ("qwen3_moe", 4, {"tensor_parallel": 2, "expert_parallel": 4}),
    "both": ("gpt_oss", 4, {"tensor_parallel": 2, "expert_parallel": 2, "expert_tensor_parallel": 2}),
}
"""Family, ranks, and layout of experts under tensor parallelism."""


@pytest.mark.parametrize("name", STACKED)
def test_stacked_experts_split_under_tensor_parallelism(name: str) -> None:
    family, ranks, options = STACKED[name]
    for errors in run(trained, ranks, family, options):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong


def test_a_rank_holds_its_part_of_each_expert() -> None:
    model = tiny("gpt_oss")
    parallelize(model, plan_for(model) or ParallelizePlan(), ParallelMesh(2, 1, tp=2))
    experts = model.get_submodule("model.layers.0.mlp.experts")
    shapes = {name: list(parameter.shape) for name, parameter in experts.named_parameters()}
    assert shapes == {
        "gate_up_proj": [4, 32, 48],
        "gate_up_proj_bias": [4, 48],
        "down_proj": [4, 24, 32],
        "down_proj_bias": [4, 32],
    }


def llava() -> nn.Module:
    """A tiny model of images and text: the tower declares no plan, the language model does."""
    vision = {"image_size": 16, "patch_size": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, num_attention_heads=4),
        text_config=tiny("llama").config,
        image_token_id=95,
    )
    torch.manual_seed(0)
    found: nn.Module = transformers.LlavaForConditionalGeneration(config).double()
    return found


def _with_images(sequence_parallel: bool) -> dict[str, float]:
    mesh, whole = ParallelMesh(2, dist.get_rank(), tp=2), llava()
    model = copy.deepcopy(whole)
    specs = parallelize(model, plan_for(model) or ParallelizePlan(), mesh, sequence_parallel=sequence_parallel)
    ids = torch.randint(3, 95, (2, 8), generator=torch.Generator().manual_seed(1))
    ids[:, 1:5] = 95
    pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses = []
    with float64():
        for one in (model, whole):
            losses.append(one(input_ids=ids, pixel_values=pixels, labels=ids).loss)
            losses[-1].backward()
    grads = gather_canonical({n: p.grad for n, p in model.named_parameters() if p.grad is not None}, specs, mesh)
    wanted = {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
    part = model.get_submodule("model.vision_tower").get_parameter("encoder.layers.0.mlp.fc1.weight")
    assert list(part.shape) == [24, 32]
    return {**{name: relative_error(grads[name], wanted[name]) for name in wanted}, "loss": relative_error(*losses)}


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_towers_of_images_split_too(sequence_parallel: bool) -> None:
    for errors in run(_with_images, 2, sequence_parallel):
        wrong = {name: error for name, error in errors.items() if not error <= 1e-9}
        assert not wrong, wrong


def test_fused_halves_are_split_one_by_one() -> None:
    plan = plan_for(tiny("phi3"))
    assert plan is not None
    assert plan.rules["model.layers.0.mlp.gate_up_proj"] == Column(sizes=(48, 48), tokens="gathered")
    assert plan.rules["model.layers.0.mlp.down_proj"] == Row()
    # Its features have an order that no shape tells, and every rank computes it with all tokens.
    assert plan.rules["model.layers.0.self_attn"] == Boundary(enter="join", leave="split")


def test_what_is_not_known_stays_whole(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("opt")
    model.model.decoder.layers[1].self_attn.out_proj = nn.Bilinear(32, 32, 32)  # type: ignore[union-attr, index]
    with caplog.at_level("INFO", "megalight.parallel.structural_plan"):
        plan = plan_for(model)
    assert plan is not None
    assert plan.rules["model.decoder.layers.0.self_attn.q_proj"] == Column(units=4, tokens="gathered")
    assert plan.rules["model.decoder.layers.1.self_attn.q_proj"] == Replicated()
    assert (
        "OPTForCausalLM declares no plan: 3 attention and feed-forward layers split by their structure" in caplog.text
    )
    assert "whole on each rank: model.decoder.layers.1.self_attn (OPTAttention: its projections are of" in caplog.text


def test_two_models_in_a_module_are_both_found() -> None:
    both = torch.nn.ModuleDict({"one": tiny("qwen2"), "inner": torch.nn.ModuleDict({"two": tiny("llama")})})
    plan = plan_for(both)
    assert plan is not None
    assert "one.model.layers.0.mlp.up_proj" in plan.rules
    assert "inner.two.model.layers.0.mlp.up_proj" in plan.rules


class Dropped(Plain):
    """Keeps what a dropout of the first layer drops."""

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        layer: Any = self.net.get_submodule("transformer.h.0.mlp.dropout")
        handle = layer.register_forward_hook(lambda module, args, out: setattr(self, "mask", out == 0))
        loss = super().training_step(ids, index)
        handle.remove()
        return loss


def _dropped(sequence_parallel: bool) -> tuple[Tensor, Tensor, Tensor]:
    module = Dropped(tiny("gpt2", resid_pdrop=0.5, embd_pdrop=0.25))
    strategy = MegatronStrategy(tensor_parallel=2, sequence_parallel=sequence_parallel)
    data = torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(1))
    trainer(strategy, max_steps=1).fit(module, DataLoader(data, batch_size=2))  # type: ignore[arg-type]
    strategy.sync_parameters()
    mask: Any = module.mask
    return mask, module.losses[0], module.net.get_parameter("transformer.wpe.weight").detach().clone()


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_ranks_draw_one_mask_for_the_same_tokens_and_others_for_others(sequence_parallel: bool) -> None:
    (one, *first), (two, *second) = run(_dropped, 2, sequence_parallel)
    assert one.shape[1] == (4 if sequence_parallel else 8)
    assert torch.equal(one, two) is not sequence_parallel
    assert 0.3 < one.double().mean() < 0.7
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)


def _refused(family: str, sequence_parallel: bool, dropout: str = "") -> str:
    with pytest.raises(LayoutError) as error:
        errors_of(family, sequence_parallel, **({dropout: 0.1} if dropout else {}))
    return str(error.value)


def test_layouts_are_refused_by_name() -> None:
    assert "self_attn has 4 heads, and tp=3 does not divide them" in run(_refused, 3, "qwen3", False)[0]
    assert "model.decoder.layers.0 (OPTDecoderLayer) calls reshape" in run(_refused, 2, "opt", True)[0]
    assert "layers.0 (BartDecoderLayer) draws dropout=0.1 itself" in run(_refused, 2, "bart", True, "dropout")[0]
    assert "transformer.ffns.0 (TransformerFFN) is no layer of a list" in run(_refused, 2, "xlm", True)[0]
    assert "layers get hidden states (4, 2, 8, 32)" in run(_refused, 2, "gemma3n_text", True)[0]
    assert "a Bottleneck returns 4 hidden states (2, 8, 32)" in run(_refused, 2, "mobilebert", True)[0]
    for family, message in {
        "higgs_audio_v2": r"\(HiggsAudioV2DecoderLayer\) calls masked_scatter",
        "reformer": r"\(ReformerLayer\) gets hidden states as prev_attn_output and as hidden_states",
        "xmod": r"\(XmodOutput\) sums the features of all ranks \(roberta.encoder.layer.0.output.dense\) beside",
    }.items():
        model = tiny(family)
        plan = plan_for(model) or ParallelizePlan()
        with pytest.raises(LayoutError, match=message):
            parallelize(model, plan, ParallelMesh(2, 0, tp=2), sequence_parallel=True)
    model = tiny("qwen3_moe", moe_intermediate_size=15)
    plan = plan_for(model) or ParallelizePlan()
    with pytest.raises(LayoutError, match="experts have an inner width of 15, and tp=2 does not divide it"):
        parallelize(model, plan, ParallelMesh(2, 0, tp=2))
    found = run(_refused, 2, "qwen2", False, "attention_dropout")[0]
    assert "self_attn (Qwen2Attention) draws attention_dropout=0.1" in found


def test_models_of_no_known_form_are_named() -> None:
    for family, reason in {
        "albert": r"net \(AlbertForMaskedLM\), which declares none, and .*AlbertAttention\) does not split: LayerNorm",
        "mamba": r"net \(MambaForCausalLM\), which declares none, and has no attention and no feed-forward layer",
    }.items():
        with pytest.raises(ConfigurationError, match=reason):
            find_plan(nn.ModuleDict({"net": tiny(family)}), ParallelMesh(2, 0, tp=2), Layout(tensor_parallel=2))


def test_a_wrong_declaration_is_in_the_way_of_tensor_parallelism_alone() -> None:
    model = tiny("doge")
    assert not find_plan(model, ParallelMesh(2, 0, pp=2), Layout(pipeline_parallel=2)).rules
    with pytest.raises(LayoutError, match="the declaration of DogeAttention is wrong"):
        find_plan(model, ParallelMesh(2, 0, tp=2), Layout(tensor_parallel=2))


def test_an_unknown_declaration_is_refused() -> None:
    model = tiny("qwen2")
    model._tp_plan = {"model.layers.*.mlp.up_proj": "diagonal"}  # type: ignore[assignment]
    with pytest.raises(LayoutError, match="declares 'diagonal'"):
        plan_for(model)
