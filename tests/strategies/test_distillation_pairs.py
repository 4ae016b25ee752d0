"""Losses on hidden states and the balance of losses, in every layout as on one device."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from megalight import checkpoint
from megalight.callbacks import Adapters, CUDAGraph, Distillation
from megalight.errors import CheckpointError, ConfigurationError
from megalight.inference import load_model
from megalight.models.distillation import LayerPair
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.models.stored import held_model, open_model, save_model
from megalight.models.transforms import HiddenStateComparison
from megalight.nn import StateComparison
from megalight.nn.init import initialize
from megalight.nn.moe.config import MoEConfig
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.parallel.layout import Layout
from megalight.parallel.pipeline.schedules import PipelineOptions
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.transform import apply_transforms
from megalight.strategies import MegatronStrategy
from tests.strategies.test_distillation import (
    CONTEXT,
    HYBRIDS,
    INTERLEAVED,
    LENGTH,
    LR,
    PIPELINE,
    SHARES,
    STEPS,
    STUDENT,
    TEACHERS,
    Student,
    batches_of,
    teacher_of,
)
from tests.strategies.training import BASE, SEED, assert_weights, whole
from tests.support.environment import trainer
from tests.support.workers import run

WIDE = replace(BASE, num_layers=3)
"""A teacher of the student's width."""
PAIRS = (
    LayerPair(student="layers.0", teacher="layers.1", weight=0.7),
    LayerPair(student="layers.1.attention", teacher="layers.0.attention", loss="mse", weight=3.0),
    LayerPair(student="layers.3.mlp_norm", teacher="layers.2.mlp", loss="mse"),
    LayerPair(student="head.norm", teacher="head.norm"),
)
ATTENTION = (LayerPair(student="layers.2.attention", teacher="layers.1.attention"),)
FULL = {"recompute": RecomputeOptions(granularity="full")}


def guide_of(kind: str) -> GPT:
    if kind in TEACHERS or kind in HYBRIDS:
        return teacher_of(kind)
    model = GPT(WIDE).double()
    initialize(model, 11, "model.")
    return model


@pytest.fixture(scope="module", params=["untied", "wide", *HYBRIDS])
def teacher(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / str(request.param)
    model = guide_of(request.param)
    save_model(held_model("gpt", model.config, model), folder)
    return folder


def outputs(model: GPT, names: list[str], batch: Any) -> tuple[Tensor, list[Tensor]]:
    """Logits and outputs of modules."""
    found: dict[str, Tensor] = {}
    with ExitStack() as hooks:
        for name in names:

            def keep(module: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
                found[name] = output[0] if isinstance(output, tuple) else output

            hooks.callback(model.get_submodule(name).register_forward_hook(keep).remove)
        logits = model(batch.tokens.flatten(), batch.sequences).logits
    assert logits is not None
    return logits, [found[name] for name in names]


@functools.cache
def by_hand(
    teacher: str, packed: bool, pairs: tuple[LayerPair, ...], own_loss: bool = False, scale: float = 1.0,
    balance: bool = False, micro_batch: int = 1, config: GPTConfig = STUDENT, device: str = "cpu",
) -> tuple[list[list[float]], Mapping[str, Any]]:  # fmt: skip
    """Objectives, divergences, losses of pairs and own losses of each step; and weights, of torch alone."""
    student, guide = GPT(config).double(), guide_of(teacher)
    # For the initial value of the projection, which is drawn by its name.
    student.distillation = projection = StateComparison(config.hidden_size, guide.config.hidden_size).double()
    # Devices draw different numbers.
    initialize(student.to(device), SEED, "model.")
    optimizer = torch.optim.AdamW(student.cpu().parameters(), lr=LR)
    rows = []
    for batch in batches_of(packed):
        count = batch.loss_mask.sum()
        objective, parts = torch.zeros(()).double(), torch.zeros(2 + len(pairs)).double()
        for part in batch.split(micro_batch):
            mask = part.loss_mask.flatten()
            logits, ours = outputs(student, [pair.student for pair in pairs], part)
            with torch.no_grad():
                target, theirs = outputs(guide, [pair.teacher for pair in pairs], part)
            log_p = target.log_softmax(-1)
            kl = ((log_p.exp() * (log_p - logits.log_softmax(-1))).sum(-1) * mask).sum()
            own = (F.cross_entropy(logits, part.labels.flatten(), reduction="none") * mask).sum()
            lost = []
            for pair, mine, other in zip(pairs, ours, theirs, strict=True):
                if projection.projection is not None:
                    mine = mine @ projection.projection.T + projection.bias
                lengths = [state.square().sum(-1) + 1e-12 for state in (mine, other)]
                cosine = (mine * other).sum(-1) / (lengths[0] * lengths[1]).sqrt()
                each = 1 - cosine if pair.loss == "cosine" else ((mine - other) ** 2).mean(-1)
                lost.append((each * mask).sum())
            hidden = sum(pair.weight * value for pair, value in zip(pairs, lost, strict=True))
            # A sample without loss tokens has no ratio.
            if balance and mask.any():
                distillation = kl + (hidden * (kl / hidden).detach() if pairs else 0)
                objective = objective + (
                    own + scale * (own / distillation).detach() * distillation if own_loss else distillation
                )
            else:
                objective = objective + scale * kl + hidden + (own if own_loss else 0)
            parts += torch.stack([kl, *lost, own]).detach()
        optimizer.zero_grad()
        (objective / count).backward()
        optimizer.step()
        rows.append([float(objective.detach() / count), *(parts / count).tolist()])
    return rows, whole(student)


def check(
    ranks: int,
    folder: Path,
    layout: dict[str, Any],
    packed: bool,
    options: dict[str, Any],
    loss: dict[str, Any],
    config: GPTConfig = STUDENT,
) -> None:
    """Train a student beside its teacher, and compare everything with torch alone."""
    # Here, once for all ranks and layouts.
    by_torch = by_hand(folder.name, packed, config=config, **loss)
    run(_check, ranks, folder, layout, packed, options, loss, config, by_torch)


def _check(
    folder: Path,
    layout: dict[str, Any],
    packed: bool,
    options: dict[str, Any],
    loss: dict[str, Any],
    config: GPTConfig,
    by_torch: tuple[list[list[float]], Mapping[str, Any]],
) -> None:
    module, micro_batch = Student(packed, config), loss.pop("micro_batch", 1)
    how = MegatronStrategy(micro_batch_size=micro_batch, **layout)
    names = [f"train_{name}" for name in ("loss", "divergence", *(f"pair_{n}" for n in range(len(loss["pairs"]))))]
    names += ["train_own_loss"] * bool(loss.get("own_loss"))
    rows: list[list[float]] = []
    module.on_train_batch_end = lambda *_: rows.append(  # type: ignore[method-assign]
        [float(runner.callback_metrics[name]) for name in names]
    )
    runner = trainer(
        how,
        max_steps=STEPS,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[Distillation(folder, teacher_layout=Layout(**options), **loss)],
    )
    runner.fit(module)
    wanted_rows, wanted = by_torch
    np.testing.assert_allclose(rows, [row[: len(rows[0])] for row in wanted_rows], rtol=1e-9)
    assert {f"val_pair_{n}" for n in range(len(loss["pairs"]))} <= runner.callback_metrics.keys()
    compared = assert_weights(how, wanted)
    last = how.mesh.rank("pp") == how.mesh.pp - 1
    projected = bool(loss["pairs"]) and folder.name != "wide"
    assert ("model.distillation.projection" in compared) == (last and projected)
    predicted = runner.predict(module)
    assert predicted is not None
    assert predicted[0].shape == (4 // how.mesh.dp, 12 if packed else LENGTH)


ALL = {"pairs": PAIRS}
BALANCED = {"pairs": PAIRS, "own_loss": True, "scale": 0.3, "balance": True}


@pytest.mark.parametrize("teacher", ["untied"], indirect=True)
@pytest.mark.parametrize(
    ("ranks", "layout", "packed", "options", "loss"),
    [
        pytest.param(1, {}, False, {}, ALL, marks=pytest.mark.full),
        pytest.param(
            2, {"tensor_parallel": 2}, True, {}, {"pairs": ATTENTION, "own_loss": True}, marks=pytest.mark.full
        ),
        (2, {**SHARES, **FULL}, False, {**PIPELINE, "pipeline_layout": "Et|ttL"}, BALANCED),
        pytest.param(2, {**PIPELINE, **FULL}, True, {**SHARES}, {**ALL, "balance": True}, marks=pytest.mark.full),
        pytest.param(2, CONTEXT, True, {"tensor_parallel": 2}, BALANCED, marks=pytest.mark.full),
        pytest.param(
            2,
            {"data_parallel": DataParallelOptions(level="optim_grads_params")},
            False,
            {},
            ALL,
            marks=pytest.mark.full,
        ),
        pytest.param(
            *(4, {**SHARES, **PIPELINE}, True, {"tensor_parallel": 4, "sequence_parallel": True}, BALANCED),
            marks=pytest.mark.full,
        ),
        pytest.param(*(4, {**CONTEXT, **SHARES}, False, {}, {**BALANCED, "micro_batch": 2}), marks=pytest.mark.full),
        (
            2,
            {**PIPELINE, "virtual_pipeline": 2, "pipeline": PipelineOptions(schedule="zero_bubble")},
            False,
            {},
            BALANCED,
        ),
        pytest.param(
            *(4, INTERLEAVED, False, {**SHARES, **PIPELINE, "pipeline_layout": "Ett|tL"}, ALL), marks=pytest.mark.full
        ),
    ],
)
def test_a_student_learns_hidden_states_as_on_one_device(
    teacher: Path, ranks: int, layout: Any, packed: bool, options: Any, loss: Any
) -> None:
    check(ranks, teacher, layout, packed, options, loss)


@pytest.mark.full
@pytest.mark.parametrize("teacher", ["untied"], indirect=True)
def test_a_student_with_experts_learns_hidden_states_under_expert_parallelism(teacher: Path) -> None:
    config = replace(STUDENT, moe=MoEConfig(num_experts=4))
    check(2, teacher, {"expert_parallel": 2}, False, {}, BALANCED, config)


INSIDE = {
    "hybrid": ("layers.0.mamba", "layers.4", "layers.2.mlp"),
    "mixed": ("layers.2.conv", "layers.3", "layers.1.mlp"),
}


def pairs_of(student: str, teacher: str) -> tuple[LayerPair, ...]:
    """Pairs of mixers, layers, MLPs and final norms, where those of a transformer have other numbers."""
    usual = ("layers.1.attention", "layers.2", "layers.0.mlp")
    places = zip(INSIDE.get(student, usual), INSIDE.get(teacher, usual), ("mse", "cosine", "mse"), strict=True)
    inside = [LayerPair(student=ours, teacher=theirs, loss=loss, weight=0.7) for ours, theirs, loss in places]
    return (*inside, LayerPair(student="head.norm", teacher="head.norm"))


BOTH = {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2}


FULLY = {"marks": pytest.mark.full}
HYBRID_LESSONS = [
    # a hybrid teaches a transformer
    pytest.param("hybrid", "gpt", 2, SHARES, False, {**PIPELINE, "pipeline_layout": "Ett|tttL"}, True, **FULLY),
    pytest.param("hybrid", "gpt", 2, PIPELINE, True, SHARES, True, **FULLY),
    pytest.param("mixed", "gpt", 2, PIPELINE, True, {**PIPELINE, "virtual_pipeline": 2}, True, marks=pytest.mark.full),
    pytest.param("hybrid", "gpt", 1, {}, True, {}, True, **FULLY),
    pytest.param("hybrid", "gpt", 2, {}, False, {"expert_parallel": 2}, False, **FULLY),
    pytest.param("hybrid", "gpt", 4, BOTH, True, {**BOTH, "pipeline_layout": "Ett|tttL"}, True, **FULLY),
    # and the other way round
    pytest.param(
        "untied", "hybrid", 2, SHARES, True, {**PIPELINE, "pipeline_layout": "Et|ttL"}, True, marks=pytest.mark.full
    ),
    pytest.param("untied", "hybrid", 2, {**PIPELINE, "pipeline_layout": "Ettt|ttL"}, False, SHARES, True, **FULLY),
    pytest.param("untied", "hybrid", 2, CONTEXT, True, {}, False, **FULLY),
    pytest.param("untied", "mixed", 4, BOTH, True, {"tensor_parallel": 4, "sequence_parallel": True}, True, **FULLY),
    # two hybrids
    pytest.param("mixed", "hybrid", 2, SHARES, False, SHARES, True, **FULLY),
]


@pytest.mark.parametrize("hidden", [True, pytest.param(False, **FULLY)], ids=["pairs", "logits"])
@pytest.mark.parametrize(
    ("teacher", "student", "ranks", "layout", "packed", "options", "balance"), HYBRID_LESSONS, indirect=["teacher"]
)
def test_hybrids_and_transformers_teach_each_other(
    teacher: Path, student: str, ranks: int, layout: Any, packed: bool, options: Any, balance: bool, hidden: bool
) -> None:
    pairs = pairs_of(student, teacher.name) if hidden else ()
    loss = {"pairs": pairs, "own_loss": True, "scale": 0.3, "balance": balance}
    check(ranks, teacher, layout, packed, options, loss, HYBRIDS.get(student, STUDENT))


def _saved(folder: Path, saved: Path, layout: dict[str, Any], from_here: bool) -> dict[str, float]:
    """Train and save, or load and only validate; return what validation reports."""
    runner = trainer(
        MegatronStrategy(micro_batch_size=1, **layout),
        max_steps=STEPS,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[Distillation(folder, pairs=PAIRS)],
    )
    if from_here:
        runner.fit(Student())
        runner.save_checkpoint(saved)
    else:
        runner.validate(Student(), ckpt_path=str(saved), verbose=False)
    return {name: float(value) for name, value in runner.callback_metrics.items() if name.startswith("val_")}


@pytest.mark.parametrize("teacher", ["untied"], indirect=True)
def test_the_projection_is_saved_and_left_out_of_the_model(teacher: Path, tmp_path: Path) -> None:
    saved, tensor = tmp_path / "saved", "model.distillation.projection"
    wanted = run(_saved, 2, teacher, saved, SHARES, True)[0]
    assert len(wanted) == 2 + len(PAIRS)
    assert run(_saved, 2, teacher, saved, PIPELINE, False)[0] == pytest.approx(wanted, rel=1e-9)
    assert checkpoint.open(saved).tensors[tensor].shape == (16, STUDENT.hidden_size)
    assert tensor not in open_model(saved).weights.tensors
    assert not any("distillation" in name for name, _ in load_model(saved).named_parameters())
    module = GPTModule(STUDENT, weights=saved)
    module.configure_model()
    assert module.model is not None
    found, (_, by_torch) = whole(module.model), by_hand(teacher.name, False, PAIRS)
    np.testing.assert_allclose(found["model.head.norm.weight"], by_torch["model.head.norm.weight"], rtol=1e-6)
    save_model(open_model(saved), tmp_path / "plain")
    assert checkpoint.open(tmp_path / "plain").common["model"]["transforms"] == []


@pytest.mark.parametrize("teacher", ["untied"], indirect=True)
@pytest.mark.parametrize("loss", [{"pairs": ATTENTION}, {"own_loss": True, "balance": True}], ids=["pairs", "balance"])
def test_a_run_without_pairs_does_not_resume_with_them(teacher: Path, loss: dict[str, Any]) -> None:
    before: dict[str, Any] = {}
    Student().on_save_checkpoint(before)
    module = Student()
    Distillation(teacher, **loss).attach(module)
    told = r"none; this module's has: HiddenStateComparison.*\. Leave out pairs and balance of Distillation"
    with pytest.raises(CheckpointError, match=told):
        module.check_checkpoint(before)
    during: dict[str, Any] = {}
    module.on_save_checkpoint(during)
    Student().check_checkpoint(during)  # the other way round, the checkpoint's serve
    other = Student()
    other.transforms = [HiddenStateComparison(STUDENT.hidden_size, 99)]
    with pytest.raises(
        CheckpointError, match="Use those that it was trained with, or begin a new run from its weights"
    ):
        other.check_checkpoint(during)


@pytest.mark.parametrize("teacher", ["wide"], indirect=True)
def test_balance_depends_on_the_size_of_micro_batches(teacher: Path) -> None:
    """As in ModelOpt: each micro-batch has ratios of its own."""
    losses = [by_hand("wide", False, ATTENTION, True, 0.3, True, size)[0] for size in (1, 2)]
    assert losses[0][0][1:] == pytest.approx(losses[1][0][1:], rel=1e-12)
    assert abs(losses[0][1][0] / losses[1][1][0] - 1) > 1e-9
    loss = {"pairs": ATTENTION, "own_loss": True, "scale": 0.3, "balance": True, "micro_batch": 2}
    check(2, teacher, SHARES, False, {}, loss)  # the tests above have micro-batches of one


@pytest.mark.parametrize("teacher", ["untied"], indirect=True)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pairs": [LayerPair(student="layers.4", teacher="layers.0")]},
            r"the student has no place 'layers.4'.* 4 ",
        ),
        ({"pairs": [LayerPair(student="layers.0", teacher="layer.0")]}, r"the teacher in .*no place.*mean 'layers.0'"),
        ({"pairs": [LayerPair(student="embed", teacher="embed")]}, r"places of the first are layers.0, .*attention, "),
        ({"balance": True}, "has one part, the divergence"),
        ({"balance": True, "scale": 2.0, "pairs": ATTENTION}, "scale=2.0 has no effect with balance=True"),
        ({"modelopt_config": "kd.yaml", "own_loss": True}, "modelopt_config describes the whole loss"),
    ],
)
def test_pairs_that_cannot_work_are_refused(teacher: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"(?s){message}"):
        Distillation(teacher, **options).attach(Student())


@pytest.mark.parametrize("teacher", ["untied"], indirect=True)
def test_names_of_megatron_are_understood(teacher: Path, tmp_path: Path) -> None:
    pairs = [["decoder.layers.1.self_attention", "decoder.layers.0"], ["decoder.final_layernorm", "head.norm", "mse"]]
    (tmp_path / "kd.yaml").write_text(yaml.safe_dump({"intermediate_layer_pairs": pairs}))
    module, callback = Student(), Distillation(teacher, modelopt_config=tmp_path / "kd.yaml")
    callback.attach(module)
    callback.attach(module)
    assert module.distiller is not None
    assert module.distiller.places == ("layers.1.attention", "head.norm")
    assert module.distiller.teacher.places == ("layers.0",)
    assert module.transforms == [HiddenStateComparison(STUDENT.hidden_size, 16)]


@pytest.mark.parametrize("teacher", ["untied"], indirect=True)
def test_balance_without_pairs_makes_no_projection(teacher: Path) -> None:
    module = Student()
    Distillation(teacher, own_loss=True, balance=True).attach(module)
    with torch.device("meta"):
        model = module.build_model()
        names = {name for name, _ in model.named_parameters()}
        apply_transforms(model, module.transforms)
    assert isinstance(model.distillation, StateComparison)
    assert {name for name, _ in model.named_parameters()} == names, "nothing would train it"


def test_bad_pairs_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="loss='l1' is not one of cosine, mse"):
        LayerPair(student="layers.0", teacher="layers.0", loss="l1")
    with pytest.raises(ConfigurationError, match=r"weight=-1.0 must be positive"):
        LayerPair(student="layers.0", teacher="layers.0", weight=-1.0)


@pytest.mark.parametrize("teacher", ["untied"], indirect=True)
def test_what_hides_hidden_states_is_refused(teacher: Path) -> None:
    callback = Distillation(teacher, pairs=ATTENTION)
    grouped = SimpleNamespace(recompute=RecomputeOptions(granularity="full", num_layers=2))
    with pytest.raises(ConfigurationError, match=r"num_layers=2 runs layers as groups"):
        callback.setup(SimpleNamespace(callbacks=[callback], strategy=grouped), Student(), "fit")  # type: ignore[arg-type]
    plain = SimpleNamespace(recompute=RecomputeOptions())
    graphs: Any = SimpleNamespace(callbacks=[callback, CUDAGraph(scope="layer")], strategy=plain)
    with pytest.raises(ConfigurationError, match=r"CUDAGraph.scope='layer'. replays layers"):
        callback.setup(graphs, Student(), "fit")


@pytest.mark.parametrize("teacher", ["untied"], indirect=True)
def test_adapters_must_not_freeze_the_projection(teacher: Path) -> None:
    module = Student()
    callbacks = [Distillation(teacher, pairs=ATTENTION), Adapters(rank=2)]
    for callback in callbacks:
        callback.attach(module)
    with torch.device("meta"):
        model = module.build_model()
        apply_transforms(model, module.transforms)
    with pytest.raises(ConfigurationError, match="Distillation after Adapters"):
        module.check_model(model)
