"""Flat buckets of Megatron-core's distributed optimizer: what is imported is what was put into them, bit by bit."""

from __future__ import annotations

import argparse
import itertools
import shutil
from dataclasses import dataclass, replace
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight import checkpoint
from megalight.checkpoint import Box, View
from megalight.checkpoint.foreign.torch_dcp import Archive, Shard, TorchTensor
from megalight.cli.main import main
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.megatron.buckets import HeldParameter, ParamBox, _Bucket, _ranges, _rounds
from tests.models.test_gpt_megatron import EXPERTS, GPT2, LLAMA, arguments, assert_held, save, stacked, theirs, weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATES = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
FOUR = replace(LLAMA, num_layers=4)
TIED = replace(GPT2, num_layers=4)
SPARSE = replace(EXPERTS, num_layers=4)


@dataclass(frozen=True)
class Run:
    """How a run was laid out. ``bucket`` is the least number of elements that closes a bucket; 0: all in one."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    dp: int = 1
    bucket: int = 0
    grouped: bool = False
    padded: bool = False
    float_norms: bool = False
    local: bool = False

    def arguments(self, config: GPTConfig, **changes: Any) -> argparse.Namespace:
        named = {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.tp,
            "data_parallel_size": self.dp,
            "moe_grouped_gemm": self.grouped,
            "transformer_impl": "local" if self.local else "transformer_engine",
        }
        return arguments(config, **named | changes)


def rows(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    return tensor.chunk(ranks)[rank]


def gated(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    gate, up = tensor.chunk(2)
    return torch.cat([rows(gate, rank, ranks), rows(up, rank, ranks)])


def columns(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    return tensor.chunk(ranks, 1)[rank]


def modules(
    config: GPTConfig, run: Run, theirs: dict[str, Tensor], stage: int, chunk: int, tp: int, ep: int
) -> list[tuple[str, Tensor]]:
    """A rank's parameters as its modules register them."""
    found: list[tuple[str, Tensor]] = []
    fc1 = gated if config.activation == "swiglu" else rows

    def take(key: str, how: Any = None) -> None:
        if key in theirs:
            found.append((key, theirs[key] if how is None else how(theirs[key], tp, run.tp)))

    def both(key: str, how: Any = None, bias: Any = None) -> None:
        take(f"{key}.weight", how)
        take(f"{key}.bias", bias)

    last = (run.pp - 1, run.vpp - 1)
    if (stage, chunk) == (0, 0):
        take("embedding.word_embeddings.weight", rows)
        take("embedding.position_embeddings.weight")
    each = config.num_layers // run.pp // run.vpp
    first = (chunk * run.pp + stage) * each
    for layer in range(first, first + each):
        name = f"decoder.layers.{layer}"
        if run.local:
            take(f"{name}.self_attention.linear_qkv.layer_norm_weight")
            take(f"{name}.self_attention.linear_qkv.layer_norm_bias")
        both(f"{name}.self_attention.linear_proj", columns)
        if not run.local:
            take(f"{name}.self_attention.linear_qkv.layer_norm_weight")
            take(f"{name}.self_attention.linear_qkv.layer_norm_bias")
        both(f"{name}.self_attention.linear_qkv", rows, rows)
        both(f"{name}.self_attention.q_layernorm")
        both(f"{name}.self_attention.k_layernorm")
        take(f"{name}.pre_mlp_layernorm.weight")
        take(f"{name}.mlp.linear_fc1.layer_norm_weight")
        take(f"{name}.mlp.linear_fc1.layer_norm_bias")
        both(f"{name}.mlp.linear_fc1", fc1, fc1)
        both(f"{name}.mlp.linear_fc2", columns)
        take(f"{name}.mlp.router.weight")
        if f"{name}.mlp.experts.experts.linear_fc1.weight" in theirs:
            ups, downs = (theirs[f"{name}.mlp.experts.experts.{part}.weight"] for part in ("linear_fc1", "linear_fc2"))
            mine = range(ep * len(ups) // run.ep, (ep + 1) * len(ups) // run.ep)
            one = [(f"{name}.experts.fc1", fc1(ups[e], tp, run.tp)) for e in mine]
            two = [(f"{name}.experts.fc2", columns(downs[e], tp, run.tp)) for e in mine]
            found += one + two if run.grouped else [pair for pairs in zip(one, two, strict=True) for pair in pairs]
        take(f"{name}.mlp.shared_experts.gate_weight")
        both(f"{name}.mlp.shared_experts.linear_fc1", fc1)
        both(f"{name}.mlp.shared_experts.linear_fc2", columns)
    if (stage, chunk) == last:
        take("decoder.final_layernorm.weight")
        take("decoder.final_layernorm.bias")
        take("output_layer.weight", rows)
        if config.tie_embeddings and (stage, chunk) != (0, 0):
            found.append(
                (
                    "copy of embedding.word_embeddings.weight",
                    rows(theirs["embedding.word_embeddings.weight"], tp, run.tp),
                )
            )
    return found


def put(parameters: list[tuple[str, dict[str, Tensor]]], run: Run, first: bool, tied: bool) -> list[dict[str, View]]:
    """One buffer: its buckets, and of each the states with the shards that data-parallel ranks write."""
    end_at = lcm(run.dp, 128)
    buckets: list[list[tuple[int, dict[str, Tensor]]]] = [[]]
    lengths: list[int] = []
    position = 0

    def close(length: int) -> None:
        lengths.append(length)
        buckets.append([])

    for name, states in reversed(parameters):
        position = -(-position // 64) * 64
        alone = "word_embeddings" in name and tied and run.pp > 1
        if alone and buckets[-1]:
            close(position)
            position = 0
        buckets[-1].append((position, states))
        position += states["param"].numel()
        if alone or (run.bucket and first and position >= run.bucket):
            close(position)
            position = 0
    if buckets[-1]:
        close(position)
    made = []
    for bucket, length in zip(buckets, lengths, strict=False):
        padded = -(-length // end_at) * end_at
        views = {}
        for state in STATES:
            flat = torch.full((padded if run.padded else length,), torch.nan)
            cuts = {padded // run.dp * rank for rank in range(run.dp)} | {0, len(flat)}
            for begin, states in bucket:
                flat[begin : begin + states[state].numel()] = states[state].flatten()
                cuts |= {begin, begin + states[state].numel()}
            ends = sorted(cut for cut in cuts if cut <= len(flat))
            boxes = [Box((a,), flat[a:b].clone()) for a, b in itertools.pairwise(ends)]
            views[state] = View("", flat.shape, boxes)
        made.append(views)
    return made


def buckets(
    config: GPTConfig, run: Run, states: dict[str, dict[str, Tensor]], dtypes: dict[str, Any]
) -> dict[str, View]:
    """All buckets of a run by their keys."""
    made: dict[str, View] = {}
    divided = run.ep > 1
    ranks = [(stage, tp, ep) for stage in range(run.pp) for ep in range(run.ep) for tp in range(run.tp)]
    for stage, tp, ep in ranks:
        for expert in (False, True) if divided else (False,):
            if not expert and ep:
                continue
            number = 0
            for chunk in range(run.vpp):
                held = {state: modules(config, run, values, stage, chunk, tp, ep) for state, values in states.items()}
                names = [name for name, _ in held["param"]]
                whole = [(name, {s: held[s][i][1] for s in states}) for i, name in enumerate(names)]
                whole = [(n, t) for n, t in whole if not divided or (".experts." in n) == expert]
                kinds = [dtypes.get(name, "bfloat16") for name, _ in whole]
                for kind in dict.fromkeys(kinds):
                    chosen = [each for each, other in zip(whole, kinds, strict=True) if other == kind]
                    group = tp + run.tp * (ep + run.ep * stage) if expert else tp + run.tp * stage
                    chained = f"chained_{int(expert)}." if divided else ""
                    views = put(chosen, run, stage == 0, config.tie_embeddings)
                    for index, bucket in enumerate(views):
                        key = (
                            f"{chained}optimizer.distributed.dp_group_idx_{group}.gbuf_idx_{number}"
                            f".dtype_(torch.{kind}, torch.float32).bucket_idx_{index}"
                        )
                        made |= {f"{key}.{s}": View(f"{key}.{s}", v.shape, v.boxes) for s, v in bucket.items()}
                    number += 1
    return made


def written(path: Path, config: GPTConfig, run: Run, *, layers: bool = False, **changes: Any) -> dict[str, Any]:
    """Write a run's folder, and return all states by canonical name."""
    ours = weights(config)
    held = {name: tensor for name, tensor in ours.items() if "expert_bias" not in name}
    values: dict[str, dict[str, Tensor]] = {"param": held}
    values |= {state: {name: torch.randn_like(t) for name, t in held.items()} for state in ("exp_avg", "exp_avg_sq")}
    states = {state: theirs(config, {**ours, **tensors}) for state, tensors in values.items()}
    for tensors in states.values():
        for key in [key for key in tensors if key.endswith("expert_bias")]:
            del tensors[key]
    floats = {key: "float32" for key in states["param"] if run.float_norms and "norm" in key}
    saved = theirs(config, ours)
    saved = {k: t if k in floats or "expert_bias" in k else t.bfloat16() for k, t in saved.items()}
    flat = buckets(config, run, states, floats)
    kind = "fully_sharded_bucket_space" if run.padded else "dp_reshardable"
    optimizer = {"param_state_sharding_type": kind}
    chained: Any = {0: optimizer, 1: optimizer} if run.ep > 1 else optimizer
    tensors = stacked(saved, config.num_layers) if layers else saved
    save(path, tensors, run.arguments(config, **changes), chained, flat=flat)
    return values


CASES: dict[str, tuple[GPTConfig, Run]] = {
    "one rank": (LLAMA, Run()),
    "dp3": (LLAMA, Run(dp=3)),
    "several buckets": (FOUR, Run(dp=2, bucket=700)),
    "biases, tied": (TIED, Run(dp=2, bucket=3000)),
    "tp2": (FOUR, Run(tp=2, dp=2, bucket=500)),
    "pp2": (FOUR, Run(pp=2, dp=2, bucket=900)),
    "pp2, tied": (TIED, Run(pp=2, dp=2)),
    "tp2, pp2, vpp2": (FOUR, Run(tp=2, pp=2, vpp=2, dp=3)),
    "norms in float32": (FOUR, Run(tp=2, dp=2, float_norms=True, bucket=800)),
    "experts": (SPARSE, Run(dp=2)),
    "without Transformer Engine": (TIED, Run(tp=2, dp=2, bucket=3000, local=True)),
    "grouped experts": (SPARSE, Run(dp=2, grouped=True, bucket=2000)),
    "divided experts": (SPARSE, Run(tp=2, pp=2, ep=2, dp=2, grouped=True)),
    "padded": (FOUR, Run(tp=2, dp=3, padded=True, bucket=1100)),
}


WHOLE = (
    "one rank",
    "dp3",
    "several buckets",
    "biases, tied",
    "pp2",
    "experts",
    "grouped experts",
    "padded",
    "pp2, tied",
)
"""Only whole runs have these: other cases have each of their features, beside others."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.full] * (case in WHOLE)) for case in CASES])
def test_buckets_are_imported(case: str, tmp_path: Path) -> None:
    config, run = CASES[case]
    values = written(tmp_path / "run", config, run, layers=case in ("several buckets", "tp2"))
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "a.ckpt"), "--quiet"]) == 0
    opened = checkpoint.open(tmp_path / "a.ckpt")
    assert_held(opened, {STATES[key]: tensors for key, tensors in values.items()})


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said where a folder is refused. Its weights alone can be taken."""
    words = ["convert", str(tmp_path / "run"), str(tmp_path / "a.ckpt"), "--quiet"]
    assert main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "a.ckpt").exists()
    assert main([*words, "--weights-only"]) == 0
    assert "--dist-ckpt-optim-fully-reshardable" in said
    shutil.rmtree(tmp_path / "a.ckpt")
    return said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_model_parallel_size": 2}, "the buffer dp_group_idx_1.gbuf_idx_0 is missing"),
        ({"decoder_first_pipeline_num_layers": 1}, "decoder_first_pipeline_num_layers is 1 (stages with other"),
        ({"virtual_pipeline_model_parallel_size": 2}, "the buffer dp_group_idx_0.gbuf_idx_1 is missing"),
        ({"pipeline_model_parallel_size": 3}, "4 layers cannot be divided over 3 stages"),
    ],
)
def test_other_layouts_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path / "run", FOUR, Run(dp=2), **changes)
    assert message in refused(tmp_path, capsys)


def test_shards_that_lie_otherwise_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts one by one, which the arguments say are grouped."""
    written(tmp_path / "run", SPARSE, Run(dp=2), moe_grouped_gemm=True)
    said = refused(tmp_path, capsys)
    assert "bucket_idx_0 has" in said
    assert "of decoder.layers.3.mlp.experts.experts.linear_fc2.weight; its shards lie otherwise" in said


def test_masters_of_other_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The norms of queries and keys have one shape, so that values alone tell that they were exchanged."""
    ours = weights(LLAMA)
    real = theirs(LLAMA, ours)
    states = {state: dict(real) for state in STATES}
    for tensors in states.values():
        q, k = (f"decoder.layers.1.self_attention.{part}_layernorm.weight" for part in "qk")
        tensors[q], tensors[k] = tensors[k], tensors[q]
    flat = buckets(LLAMA, Run(dp=2), states, {})
    optimizer = {"param_state_sharding_type": "dp_reshardable"}
    saved = {key: tensor.bfloat16() for key, tensor in theirs(LLAMA, ours).items()}
    save(tmp_path / "run", saved, Run(dp=2).arguments(LLAMA), optimizer, flat=flat)
    said = refused(tmp_path, capsys)
    assert "bucket_idx_0, the elements [" in said
    assert "are of decoder.layers.1.self_attention.k_layernorm.weight by Megatron-core's order" in said
    assert "4 of these masters are not the weights" in said


def test_padding_that_could_be_a_parameter_is_refused() -> None:
    """Three norms of 64 elements in two buckets whose lengths count padding: the second one may be in either."""
    archive = Archive("x", 0, 0, (0,), (128,))
    shards = (Shard((0,), (64,), archive), Shard((64,), (64,), archive, 64))
    states = {state: TorchTensor((128,), "float32", shards) for state in STATES}
    found = [_Bucket(f"bucket_idx_{number}", "bfloat16", states) for number in range(2)]
    held = [HeldParameter((ParamBox(f"norm {number}", (0,), (64,)),), "bfloat16", True) for number in range(3)]
    with pytest.raises(ValueError, match="the buckets of gbuf can be cut into parameters in several ways"):
        _ranges("gbuf", found, held, 128)
    one = _ranges("gbuf", found, [*held, *held[:1]], None)
    assert [(each.bucket[-1], each.begin) for each in one] == [("0", 0), ("0", 64), ("1", 0), ("1", 64)]


def test_masters_in_the_middle_may_be_rounded_to_both_sides(tmp_path: Path) -> None:
    """Optimizers that keep the lower bits of masters apart do not round halves to even."""
    middle = torch.tensor([1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8, -1.0 - 2.0**-8])
    lower = torch.tensor([1.0, 1.0 + 2.0**-7, -1.0]).bfloat16()
    upper = torch.tensor([1.0 + 2.0**-7, 1.0 + 2.0**-6, -1.0 - 2.0**-7]).bfloat16()
    assert _rounds(middle, lower).all()
    assert _rounds(middle, upper).all()
    assert not _rounds(middle + 1e-6, torch.where(middle > 0, lower, upper)).any()
