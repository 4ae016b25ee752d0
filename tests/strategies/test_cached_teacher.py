"""A student learns from a teacher's stored tokens, in every layout as on one device."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalight.callbacks.distillation import Distillation
from megalight.data.cached_outputs import CachedLogits
from megalight.data.gpt.module import GPTDataModule
from megalight.data.indexed import IndexedWriter
from megalight.errors import ConfigurationError, DataError
from megalight.inference import cached_outputs, load_model
from megalight.inference.cached_outputs import CachingOptions, cache_logits
from megalight.models.gpt import GPT
from megalight.models.gpt.module import GPTModule
from megalight.models.stored import held_model, save_model
from megalight.nn.init import initialize
from megalight.parallel.layout import Layout
from megalight.strategies import MegatronStrategy
from megalight.types import TokenBatch
from tests.strategies.test_distillation import LR, STUDENT, TEACHERS, Student, teacher_of
from tests.strategies.training import SEED, assert_weights, whole
from tests.support.environment import trainer
from tests.support.workers import run

STEPS, ROWS, LENGTH, K, TEMPERATURE = 2, 4, 12, 7, 1.5
V = STUDENT.vocab_size


class Learner(GPTModule):
    def __init__(self) -> None:
        super().__init__(STUDENT, seed=SEED)

    configure_optimizers = Student.configure_optimizers


def data_of(folder: Path, packed: bool = False, **options: Any) -> GPTDataModule:
    values = {"vocab_size": V, "sequence_length": LENGTH, "global_batch_size": ROWS, "split": "1,0,0"}
    return GPTDataModule(data=str(folder / "c"), document_mask=packed, **{**values, **options})


def store(folder: Path, name: str, packed: bool = False, top_k: int = K, **options: Any) -> Path:
    data = data_of(folder, packed, **({"split": "3,1,0"} if options.get("validation") else {}))
    data.trainer = SimpleNamespace(max_steps=STEPS, accumulate_grad_batches=1)  # type: ignore[assignment]
    model = options.pop("model", None) or load_model(folder / "teacher")
    temperature = options.pop("temperature", 1.0)
    caching = CachingOptions(micro_batch_size=3, **options)
    cache_logits(model, data, folder / name, caching, top_k=top_k, temperature=temperature, dtype="float32")
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("recorded")
    save_model(held_model("gpt", TEACHERS["untied"], teacher_of("untied")), found / "teacher")
    with IndexedWriter(found / "c", "uint16") as writer:
        lengths = [5, 19, 3, 40, 8, 31]
        writer.add_documents(np.random.default_rng(0).integers(0, V, sum(lengths)), lengths)
    store(found, "rows", temperature=TEMPERATURE)
    store(found, "packed", packed=True, temperature=TEMPERATURE)
    store(found, "all", top_k=V)
    return found


def batches_of(data: GPTDataModule) -> list[TokenBatch]:
    samples, _ = data.training_samples()
    return [data.collate([samples[ROWS * step + row] for row in range(ROWS)]) for step in range(STEPS)]


def by_hand(data: GPTDataModule) -> tuple[list[float], Any]:
    """Losses and weights, of whole logits in float64 and torch alone."""
    student, guide = GPT(STUDENT).double(), teacher_of("untied")
    initialize(student, SEED, "model.")
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR)

    def divergence(ours: Tensor, theirs: Tensor) -> Tensor:
        log_p = theirs.div(TEMPERATURE).log_softmax(-1)
        top, ids = log_p.topk(K, -1)
        outside = torch.ones_like(log_p).scatter(-1, ids, 0)
        rest = (log_p.exp() * outside).sum(-1, keepdim=True).log()
        log_p = torch.cat([top, rest], -1).float().double().log_softmax(-1)  # as it is on disk
        q = ours.div(TEMPERATURE).softmax(-1)
        log_q = torch.cat([q.gather(-1, ids), (q * outside).sum(-1, keepdim=True)], -1).log()
        return (log_p.exp() * (log_p - log_q)).sum(-1)

    losses = []
    for batch in batches_of(data):
        mask = batch.loss_mask.flatten()
        ours, theirs = (model(batch.tokens.flatten(), batch.sequences).logits for model in (student, guide))
        own = F.cross_entropy(ours, batch.labels.flatten(), reduction="none")
        loss = ((0.3 * divergence(ours, theirs.detach()) + own) * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, whole(student)


def check(folder: Path, layout: dict[str, Any], packed: bool) -> None:
    data = data_of(folder, packed)
    how, losses = MegatronStrategy(micro_batch_size=1, **layout), []
    module = Learner()
    module.on_train_batch_end = lambda *_: losses.append(float(runner.callback_metrics["train_loss"]))  # type: ignore[method-assign]
    callback = Distillation(
        teacher_logits=folder / ("packed" if packed else "rows"), temperature=TEMPERATURE, own_loss=True, scale=0.3
    )
    runner = trainer(how, max_steps=STEPS, callbacks=[callback])
    runner.fit(module, datamodule=data)
    assert {"train_divergence", "train_own_loss"} <= runner.callback_metrics.keys()
    other = data_of(folder, packed)
    other.trainer = SimpleNamespace(max_steps=STEPS, accumulate_grad_batches=1)  # type: ignore[assignment]
    wanted_losses, wanted = by_hand(other)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-7)
    assert_weights(how, wanted, tolerance=1e-6)


@pytest.mark.parametrize(
    ("ranks", "layout", "packed"),
    [
        pytest.param(1, {}, False, marks=pytest.mark.full),
        pytest.param(2, {}, True, marks=pytest.mark.full),
        (2, {"tensor_parallel": 2, "sequence_parallel": True}, True),
        pytest.param(2, {"context_parallel": 2}, True, marks=pytest.mark.full),
        pytest.param(4, {"pipeline_parallel": 2, "context_parallel": 2}, False, marks=pytest.mark.full),
    ],
)
def test_a_student_learns_as_on_one_device(folder: Path, ranks: int, layout: Any, packed: bool) -> None:
    run(check, ranks, folder, layout, packed)


def loss_of(folder: Path, **options: Any) -> float:
    runner = trainer(MegatronStrategy(micro_batch_size=2), max_steps=STEPS, callbacks=[Distillation(**options)])
    runner.fit(Learner(), datamodule=data_of(folder))
    return float(runner.callback_metrics["train_loss"])


def both(folder: Path) -> None:
    live, stored = loss_of(folder, teacher=folder / "teacher"), loss_of(folder, teacher_logits=folder / "all")
    assert abs(stored - live) <= 1e-6 * live


def test_all_tokens_give_the_loss_of_the_teacher_itself(folder: Path) -> None:
    run(both, 1, folder)


def prepared(folder: Path, name: str = "rows", **options: Any) -> tuple[GPTDataModule, Distillation, Any]:
    data = data_of(folder, **options)
    runner: Any = SimpleNamespace(max_steps=STEPS, accumulate_grad_batches=1, datamodule=data, limit_val_batches=1.0)
    data.trainer = runner
    runner.callbacks = [Distillation(teacher_logits=folder / name, temperature=TEMPERATURE)]
    return data, runner.callbacks[0], runner


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 5}, "another order of samples"),
        ({"global_batch_size": 64}, "another order of samples"),
        ({"packed": True}, r"sample 0 in .* was written for other tokens or documents"),
    ],
)
def test_other_samples_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    _, callback, runner = prepared(folder, **options)
    with pytest.raises(DataError, match=message):
        callback.setup(runner, Learner(), "fit")


def test_validation_samples_are_checked_if_the_run_reads_them(folder: Path) -> None:
    store(folder, "validated", temperature=TEMPERATURE, validation=True)
    data, callback, runner = prepared(folder, "validated", split="6,1,1")
    with pytest.raises(DataError, match="another order of samples"):
        callback.setup(runner, Learner(), "fit")
    runner.limit_val_batches = 0
    callback.setup(runner, Learner(), "fit")
    assert data.cached_outputs is not None


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    recorded = Distillation(teacher_logits=folder / "rows", temperature=TEMPERATURE)
    module = Learner()
    recorded.attach(module)
    with pytest.raises(DataError, match=r"sequence_length=11, but .* written for 12"):
        module.check_data(SimpleNamespace(sequence_length=11))
    with pytest.raises(ConfigurationError, match=r"temperature=1[.]0, but .* written with 1[.]5"):
        Distillation(teacher_logits=folder / "rows").attach(Learner())
    with pytest.raises(ConfigurationError, match="neither was given"):
        Distillation()
    with pytest.raises(ConfigurationError, match="both was given"):
        Distillation(folder / "teacher", teacher_logits=folder / "rows")
    with pytest.raises(ConfigurationError, match="needs all probabilities of the teacher"):
        Distillation(teacher_logits=folder / "rows", divergence="reverse_kl")
    with pytest.raises(ConfigurationError, match="describes a teacher in memory"):
        Distillation(teacher_logits=folder / "rows", teacher_layout=Layout(tensor_parallel=2))
    with pytest.raises(ConfigurationError, match=f"top_k=102 must be from 1 to {V}"):
        store(folder, "none", top_k=V + 1)
    runner: Any = SimpleNamespace(callbacks=[recorded], datamodule=None)
    with pytest.raises(ConfigurationError, match="NoneType does not have"):
        recorded.setup(runner, Learner(), "fit")


def test_a_torn_store_is_refused(folder: Path) -> None:
    store(folder, "torn", temperature=TEMPERATURE)
    records, manifest = folder / "torn" / "samples.bin", folder / "torn" / "manifest.json"
    content, facts = records.read_bytes(), json.loads(manifest.read_text())
    records.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    _, callback, runner = prepared(folder, "torn")
    with pytest.raises(DataError, match=r"sample 7 in .* is damaged"):
        callback.setup(runner, Learner(), "fit")
    records.write_bytes(content[:-1])
    with pytest.raises(DataError, match="the folder is incomplete"):
        Distillation(teacher_logits=folder / "torn", temperature=TEMPERATURE).attach(Learner())
    manifest.write_text(json.dumps({**facts, "samples": 7}))
    records.write_bytes(content[: len(content) * 7 // 8])
    _, callback, runner = prepared(folder, "torn")
    with pytest.raises(DataError, match="holds 7 samples, and the run reads 8"):
        callback.setup(runner, Learner(), "fit")
    manifest.unlink()
    with pytest.raises(DataError, match="no complete folder"):
        Distillation(teacher_logits=folder / "torn", temperature=TEMPERATURE).attach(Learner())


def test_parts_and_a_killed_process_write_the_same_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = store(folder, "whole", validation=True)
    store(folder, "parts", validation=True, part=1, parts=2)
    with pytest.raises(DataError, match=r"no complete folder of megalight cache-logits.*It was begun"):
        CachedLogits(folder / "parts")
    monkeypatch.setattr(cached_outputs, "COMMIT", 1)
    model, calls = load_model(folder / "teacher"), []

    def killed(module: Any, *_: Any) -> None:
        calls.append(module)
        if len(calls) == 2:
            raise KeyboardInterrupt

    hook = model.register_forward_pre_hook(killed)
    with pytest.raises(KeyboardInterrupt):
        store(folder, "parts", validation=True, model=model)
    with pytest.raises(DataError, match="begun with other settings: top_k was 7 and is 5"):
        store(folder, "parts", validation=True, top_k=5)
    hook.remove()
    calls.clear()
    hook = model.register_forward_pre_hook(lambda *_: calls.append(model))
    store(folder, "parts", validation=True, model=model)
    hook.remove()
    # Of 8 training samples, 4 were there from the other part, and 3 from before the end of the process.
    samples = CachedLogits(folder / "parts").meta.validation_samples
    assert len(calls) <= 1 + -(-samples // 3)
    for name in ("samples.bin", "validation.bin", "manifest.json"):
        assert (folder / "parts" / name).read_bytes() == (whole / name).read_bytes()
    assert {path.name for path in (folder / "parts").iterdir()} == {path.name for path in whole.iterdir()}
    with pytest.raises(DataError, match="is complete already"):
        store(folder, "parts", validation=True)


def validated(folder: Path) -> None:
    found = []
    for options in ({"teacher": folder / "teacher"}, {"teacher_logits": folder / "both"}):
        runner = trainer(MegatronStrategy(micro_batch_size=2), max_steps=STEPS, callbacks=[Distillation(**options)])
        runner.fit(Learner(), datamodule=data_of(folder, split="3,1,0"))
        found.append([float(runner.callback_metrics[name]) for name in ("val_loss", "val_divergence")])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-6)


def test_validation_samples_give_the_divergence_of_the_teacher_itself(folder: Path) -> None:
    store(folder, "both", top_k=V, validation=True)
    run(validated, 1, folder)
