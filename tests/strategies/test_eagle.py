"""A draft model learns beside its frozen base in any layout as in plain torch, step by step."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader

from megalight import checkpoint
from megalight.data.tokenizer import FILE, Tokenizer
from megalight.errors import CheckpointError, ConfigurationError, DataError, LayoutError
from megalight.models.eagle import DraftModel, EagleConfig, EagleModule, eagle_plan, export_draft
from megalight.models.eagle.serving_format import in_order
from megalight.models.gpt import GPT, LatentConfig
from megalight.models.stored import held_model, save_model
from megalight.nn.canonical import canonical_tensors
from megalight.nn.init import initialize
from megalight.nn.moe import MoEConfig, RouterConfig
from megalight.parallel.apply import check_split
from megalight.parallel.context.attention import ContextOptions
from megalight.parallel.layout import Layout
from megalight.parallel.mesh import ParallelMesh
from megalight.strategies import DataParallelOptions, MegatronStrategy
from tests.strategies.training import BASE, SEED, assert_weights, global_batch
from tests.support.environment import trainer
from tests.support.workers import run

STEPS, LR, DECAY, AHEAD = 2, 1e-2, 0.7, 3
SERVED = {"dense": replace(BASE, num_layers=4, logit_softcap=9.0)}
SERVED["experts"] = replace(SERVED["dense"], moe=MoEConfig(num_experts=4, router=RouterConfig(top_k=2)))
LAYERS = (3, 1, 2)
"""Not in ascending order: the draft reads them in the order that it was trained for."""
IDS = tuple(range(2, 99, 8))
"""13, so that two ranks have padding; few, so that some guesses are right by chance."""


def served(kind: str = "dense") -> GPT:
    model = GPT(SERVED[kind]).double()
    initialize(model, 11, "model.")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    for kind, config in SERVED.items():
        save_model(held_model("gpt", config, served(kind)), folder / kind)
    return folder


@pytest.fixture(scope="module")
def base(bases: Path) -> Path:
    return bases / "dense"


def config(ids: tuple[int, ...] = IDS) -> EagleConfig:
    return EagleConfig(num_heads=4, num_kv_heads=2, ffn_hidden_size=24, auxiliary_layers=LAYERS, draft_ids=ids, std=0.2)


LATENT = LatentConfig(kv_rank=12, q_rank=10, head_dim=6, rotary_dim=4, value_dim=5)
KIMI = EagleConfig(num_heads=4, ffn_hidden_size=24, auxiliary_layers=LAYERS, latent=LATENT, head="base", std=0.2)


class Drafter(EagleModule):
    def __init__(self, base: Path, packed: bool, rows: int, draft: EagleConfig, **options: Any) -> None:
        super().__init__(base, draft, seed=SEED, steps=AHEAD, decay=DECAY, **options)
        self.packed, self.rows = packed, rows

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=LR)

    def train_dataloader(self) -> DataLoader[Any]:
        share = self.trainer.strategy.distributed_sampler_kwargs
        batches = [global_batch(step, self.rows, packed=self.packed) for step in range(STEPS)]
        rows = [batch.split(self.rows // share["num_replicas"])[share["rank"]] for batch in batches]
        return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def rms(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Of ``x [S, H, D]``, pairs half a head apart."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.double) / half)
    cos, sin = (f(angles)[:, None] for f in (torch.cos, torch.sin))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def turned(x: Tensor, positions: Tensor) -> Tensor:
    """Of ``x [S, H, D]``, pairs of neighbors."""
    pairs = rotated(torch.cat([x[..., 0::2], x[..., 1::2]], -1), positions)
    return torch.stack(pairs.chunk(2, -1), -1).flatten(-2)


def heads(w: Mapping[str, Tensor], x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values ``[S, 4, D]`` of ``x [S, 2 h]``."""
    named = {name.removeprefix("layer.attention.").removesuffix(".weight"): each for name, each in w.items()}
    if "kv_up" not in named:
        q, k, v = ((x @ named[n].T).view(len(x), -1, 8) for n in "qkv")
        return rotated(q, positions), rotated(k, positions).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    q = (rms(x @ named["q_down"].T, named["q_latent_norm"], 1e-6) @ named["q_up"].T).view(len(x), 4, 10)
    latent, key = (x @ named["kv_down"].T).split([12, 4], -1)
    k, v = (rms(latent, named["kv_latent_norm"], 1e-6) @ named["kv_up"].T).view(len(x), 4, 11).split([6, 5], -1)
    q = torch.cat([q[..., :6], turned(q[..., 6:], positions)], -1)
    return q, torch.cat([k, turned(key[:, None], positions).expand(-1, 4, -1)], -1), v


def guesses(w: Mapping[str, Tensor], fused: Tensor, embedded: list[Tensor]) -> list[Tensor]:
    """Normed hidden states of each step for one sequence of ``S`` tokens, with whole masks ``[S, (n + 1) S]``."""
    size, hidden, keys, values, found = len(fused), fused, [], [], []
    past = torch.ones(size, size).tril().bool()
    for step, each in enumerate(embedded):
        joined = torch.cat([rms(each, w["layer.embed_norm.weight"]), rms(hidden, w["layer.hidden_norm.weight"])], -1)
        q, k, v = heads(w, joined, torch.arange(size, dtype=torch.double) + step)
        keys.append(k)
        values.append(v)
        # Real tokens up to the place; of the guesses, those of the own place.
        mask = torch.cat([past, *[torch.eye(size).bool()] * step], -1)
        scores = torch.einsum("qhd,khd->hqk", q, torch.cat(keys)) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, torch.cat(values)).flatten(1)
        hidden = hidden + mixed @ w["layer.attention.proj.weight"].T
        normed = rms(hidden, w["layer.mlp_norm.weight"])
        gate, up = (normed @ w[f"layer.mlp.{n}.weight"].T for n in ("gate", "up"))
        hidden = hidden + (F.silu(gate) * up) @ w["layer.mlp.down.weight"].T
        found.append(rms(hidden, w["head.norm.weight"]))
    return found


@functools.cache
def by_hand(
    packed: bool, count: int, config: EagleConfig, kind: str
) -> tuple[list[tuple[float, ...]], Mapping[str, Any]]:
    """Objective, and loss and accuracy of each step, of each batch; and the weights at the end."""
    draft, guide, ids = DraftModel(config.for_base(SERVED[kind])).double(), served(kind), config.draft_ids
    initialize(draft, SEED, "model.")
    weights, rows = canonical_tensors(draft), []
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    if config.head == "base":
        leaves["head.output_layer.weight"] = guide.head.output_layer.weight.detach()  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW([leaf for leaf in leaves.values() if leaf.requires_grad], lr=LR)
    kept: dict[int, Tensor] = {}
    for name, layer in guide.layers.items():
        layer.register_forward_hook(lambda *call, name=name: kept.__setitem__(int(name) + 1, call[2]))
    for number in range(STEPS):
        batch = global_batch(number, count, packed=packed)
        with torch.no_grad():
            logits = guide(batch.tokens.flatten(), batch.sequences).logits[:, list(ids) or slice(None)]
        table = guide.embed.word.weight.detach()
        sums, hits, counts = torch.zeros(3, AHEAD, dtype=torch.double)
        start = 0
        for size in batch.sequences.lengths:
            place = slice(start, start + size)
            start += size
            tokens, mask, theirs = batch.tokens.flatten()[place], batch.loss_mask.flatten()[place], logits[place]
            fused = torch.cat([kept[after][place] for after in LAYERS], -1) @ leaves["fuse.weight"].T
            embedded = [table[tokens.roll(-step - 1)] for step in range(AHEAD)]
            for step, normed in enumerate(guesses(leaves, fused, embedded)):
                left = max(0, size - step - 1)  # places whose guess has a label
                ours, target = (normed @ leaves["head.output_layer.weight"].T)[:left], theirs[step + 1 :]
                counted = mask[step + 1 :]
                losses = -(target.softmax(-1) * ours.log_softmax(-1)).sum(-1) * counted
                agreed = (ours.argmax(-1) == target.argmax(-1)) * counted
                one = F.one_hot(torch.tensor(step), AHEAD)
                sums = sums + losses.sum() * one
                hits, counts = hits + agreed.sum() * one, counts + counted.sum() * one
        objective = (sums / counts * DECAY ** torch.arange(AHEAD, dtype=torch.double)).sum()
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
        rows.append((float(objective.detach()), *(sums / counts).tolist(), *(hits / counts).tolist()))
    return rows, {name: leaf.detach().numpy() for name, leaf in leaves.items()}


def check(
    base: Path, layout: dict[str, Any], packed: bool, count: int, draft: EagleConfig, options: Any, by_torch: Any
) -> None:
    """Train a draft beside its base, and compare everything with torch alone."""
    module, rows = Drafter(base, packed, count, draft, base_layout=Layout(**options)), []
    how = MegatronStrategy(micro_batch_size=1, **layout)

    def keep(*_: Any) -> None:
        found = runner.callback_metrics
        steps = [f"train_step_{step}_{what}" for what in ("loss", "accuracy") for step in range(AHEAD)]
        total = found["train_loss"] + sum(found[f"train_step_{step}"] for step in range(1, AHEAD))
        rows.append((float(total), *(float(found[name]) for name in steps)))

    module.on_train_batch_end = keep  # type: ignore[method-assign]
    runner = trainer(how, max_steps=STEPS, use_distributed_sampler=False, num_sanity_val_steps=0)
    runner.fit(module)
    wanted_rows, wanted = by_torch
    np.testing.assert_allclose(rows, wanted_rows, rtol=1e-9)
    assert_weights(how, {f"model.{name}": value for name, value in wanted.items()})
    assert 0 <= float(runner.callback_metrics["val_step_0_accuracy"]) <= 1
    folder = base.parent / f"draft-{base.name}-{how.mesh.describe()}-{packed}-{draft.head}"
    runner.save_checkpoint(folder)
    assert not any("base" in name for name in checkpoint.open(folder).tensors)


TP, SP, CP = {"tensor_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}, {"context_parallel": 2}
FSDP = DataParallelOptions(level="optim_grads_params")
CHUNKS = {"pipeline_parallel": 2, "pipeline_layout": "Et|t|t|tL"}


@pytest.mark.parametrize(
    ("ranks", "layout", "packed", "draft", "options"),
    [
        (1, {}, True, config(), {}),
        pytest.param(2, TP, False, config(), {}, marks=pytest.mark.full),
        pytest.param(2, SP, True, config(()), TP, marks=pytest.mark.full),
        pytest.param(2, {}, True, config(), {"pipeline_parallel": 2}, marks=pytest.mark.full),
        (2, CP, True, config(), CHUNKS),
        pytest.param(2, CP, False, config(), SP, marks=pytest.mark.full),
        pytest.param(2, SP, True, KIMI, {}, marks=pytest.mark.full),
        pytest.param(4, SP, False, config(), TP | CHUNKS, marks=pytest.mark.full),
        pytest.param(4, SP | CP, True, KIMI, CHUNKS, marks=pytest.mark.full),
        pytest.param(2, {"data_parallel": FSDP}, True, KIMI, {}, marks=pytest.mark.full),
    ],
)
def test_a_draft_learns_as_by_hand(
    base: Path, ranks: int, layout: Any, packed: bool, draft: EagleConfig, options: Any
) -> None:
    run(check, ranks, base, layout, packed, 4, draft, options, by_hand(packed, 4, draft, base.name))


@pytest.mark.full
def test_a_draft_learns_beside_experts_on_several_ranks(bases: Path) -> None:
    # Three micro-batches for two replicas of the base, which run two each.
    by_torch = by_hand(True, 3, config(), "experts")
    run(check, 2, bases / "experts", TP, True, 3, config(), {"expert_parallel": 2}, by_torch)


def test_the_export_has_the_tensors_that_engines_read(base: Path, tmp_path: Path) -> None:
    with torch.device("meta"):
        draft = DraftModel(config().for_base(SERVED["dense"]))
    draft = draft.to_empty(device="cpu")
    initialize(draft, SEED, "model.")
    save_model(held_model("eagle", draft.config, draft), tmp_path / "draft")
    export_draft(tmp_path / "draft", tmp_path / "out", torch.float32)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    layer = {"input_layernorm", "hidden_norm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj"}
    layer |= {"mlp.down_proj", *(f"self_attn.{name}_proj" for name in "qkvo")}
    names = {f"midlayer.{name}.weight" for name in layer} | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert tensors.keys() == names | {"d2t", "t2d"}
    # Engines hand over the hidden states in the order of the layers, not in that of the training.
    states = torch.randn(5, 4, 32)
    fused = draft.fuse(torch.cat([states[:, after] for after in LAYERS], -1))
    torch.testing.assert_close(states[:, 1:].flatten(1) @ tensors["fc.weight"].T, fused)
    both = in_order(torch.tensor([[1.0, 2.0, 4.0]]), (2, 1, 2))
    assert both.tolist() == [[2.0, 5.0]]
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert torch.equal(tensors["lm_head.weight"], draft.head.output_layer.weight)
    assert (torch.arange(len(IDS)) + tensors["d2t"]).tolist() == list(IDS)
    assert tensors["t2d"].nonzero().flatten().tolist() == list(IDS)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (values["vocab_size"], values["draft_vocab_size"]) == (101, 13)
    assert values["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    with pytest.raises(CheckpointError, match="is there already"):
        export_draft(tmp_path / "draft", tmp_path / "out")
    with pytest.raises(ConfigurationError, match="holds no draft model"):
        export_draft(base, tmp_path / "other")


def test_sizes_that_are_left_out_are_those_of_the_base() -> None:
    wide = replace(BASE, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=24)
    found = EagleConfig().for_base(wide)
    assert (found.num_heads, found.num_kv_heads, found.head_dim) == (4, 2, 24)
    assert EagleConfig(num_heads=2).for_base(wide).head_dim == 16
    assert EagleConfig(head_dim=12).for_base(wide).head_dim == 12


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hidden_size": 16}, "hidden_size of the draft is 16 and that of the base 32"),
        ({"max_sequence_length": 25}, "max_sequence_length of the draft is 25 and that of the base 24"),
        ({"auxiliary_layers": [1, 4]}, "auxiliary_layers has 4, and the base has 4 layers"),
        ({"draft_ids": [3, 101]}, "the base has ids from 0 to 100"),
        ({"draft_ids": [3, 3]}, "not in ascending order"),
    ],
)
def test_a_draft_that_does_not_fit_its_base_is_refused(base: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EagleModule(base, EagleConfig(**given))


def test_the_vocabulary_of_a_draft_comes_from_a_file_or_its_configuration(base: Path, tmp_path: Path) -> None:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(IDS))
    given = EagleConfig(auxiliary_layers=LAYERS)
    assert EagleModule(base, given, draft_vocabulary=file).config.draft_ids == IDS
    assert EagleModule(base, replace(given, draft_ids=IDS)).config.draft_ids == IDS
    with pytest.raises(ConfigurationError, match="draft_vocabulary and config both say which ids the draft predicts"):
        EagleModule(base, config(), draft_vocabulary=file)


def test_weights_of_a_draft_for_another_base_are_refused(base: Path, tmp_path: Path) -> None:
    large = replace(SERVED["dense"], num_layers=6)
    with torch.device("meta"):
        draft = DraftModel(EagleConfig(auxiliary_layers=(1, 3, 5)).for_base(large))
    save_model(held_model("eagle", draft.config, draft.to_empty(device="cpu")), tmp_path / "draft")
    with pytest.raises(ConfigurationError, match="auxiliary_layers has 5, and the base has 4 layers"):
        EagleModule(base, weights=tmp_path / "draft")


def test_data_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    ours, other = (Tokenizer.train([text * 9], 262).to_json().encode() for text in ("some words ", "other letters "))
    save_model(replace(held_model("gpt", SERVED["dense"], served()), files={FILE: ours}), tmp_path / "base")
    module = EagleModule(tmp_path / "base", config())
    module.check_data(SimpleNamespace(checkpoint_files=lambda: {FILE: ours}))
    with pytest.raises(DataError, match=r"the base in .* was trained with another tokenizer than that of the data"):
        module.check_data(SimpleNamespace(checkpoint_files=lambda: {FILE: other}))


@pytest.mark.parametrize(("options", "message"), [({"steps": 0}, "steps is 0"), ({"decay": 0.0}, "decay=0.0")])
def test_bad_options_are_refused(base: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        EagleModule(base, **options)


def test_the_draft_has_no_stages() -> None:
    with torch.device("meta"):
        draft = DraftModel(config().for_base(SERVED["dense"]))
    options = Layout(plan=eagle_plan(draft))
    message = r"DraftModel has no pipeline stages: it has one layer\. .*model\.pipeline_parallel"
    with pytest.raises(LayoutError, match=message):
        check_split(draft, ParallelMesh(2, 0, pp=2), options, torch.float64, torch.device("cpu"))
    options = replace(options, context=ContextOptions(kind="ring"))
    with pytest.raises(LayoutError, match="kind='ring' cannot serve the attention of a draft model"):
        check_split(draft, ParallelMesh(2, 0, cp=2), options, torch.float64, torch.device("cpu"))
