"""A plain LightningModule with a model of transformers on the stages of a pipeline: equal to one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader

from megalight.errors import ConfigurationError
from megalight.parallel.data_parallel import DataParallelOptions
from megalight.strategies import MegatronStrategy, PipelineOptions, load_weights
from tests.parallel.gathering import gather_canonical
from tests.parallel.tiny_transformers import tiny
from tests.support.environment import trainer
from tests.support.workers import run


class Plain(pl.LightningModule):
    """What a user writes: nothing in it is about parallelism. Its loss is partly code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = tiny("qwen3", num_hidden_layers=4, tie_word_embeddings=True)

    def training_step(self, batch: Tensor, index: int) -> dict[str, Tensor]:
        self.log("index", float(index))
        output = self.net(batch, labels=batch)
        self.log("largest", output.logits.max())
        return {"loss": output.loss + 0.01 * output.logits.square().mean()}

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val_loss", self.net(batch, labels=batch).loss)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        logits: Tensor = self.net(batch).logits
        return logits.argmax(-1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def trained(options: dict[str, Any], given: dict[str, Any], save: str = "", resume: str | None = None) -> Any:
    # The same batch again and again: the loader of a run that resumes starts from its first one.
    data = torch.randint(3, 96, (8, 8), generator=torch.Generator().manual_seed(0)).repeat(4, 1)
    module, strategy = Plain(), MegatronStrategy(micro_batch_size=1, **options)
    defaults = {"max_steps": 2, "val_check_interval": 2, "use_distributed_sampler": False}
    runner = trainer(strategy, **{**defaults, **given})
    mesh = strategy.grid(runner.world_size, runner.global_rank)
    loader = DataLoader(data[mesh.rank("dp") :: mesh.dp], batch_size=8 // mesh.dp)
    runner.fit(module, loader, DataLoader(data[-2:], batch_size=2), ckpt_path=resume)
    strategy.sync_parameters()
    if save:
        runner.save_checkpoint(save)
    assert strategy.report is not None
    assert strategy.parallel_model is not None
    with strategy.parallel_model.full_parameters():
        named = {name: p.detach().clone() for name, p in module.named_parameters()}
        weights = gather_canonical(named, strategy.parallel_model.specs, strategy.mesh, sum_partial=False)
    logged = {name: float(value) for name, value in runner.callback_metrics.items()}
    tokens = runner.predict(module, DataLoader(data[:2], batch_size=2))
    return float(strategy.report.loss), weights, logged, tokens


def check(ranks: int, options: dict[str, Any], given: dict[str, Any]) -> None:
    loss, weights, logged, tokens = run(trained, 1, {}, given, timeout=300)[0]
    for found, theirs, other_logged, other_tokens in run(trained, ranks, options, given, timeout=300):
        assert found == pytest.approx(loss, rel=1e-9)
        for name, weight in weights.items():
            torch.testing.assert_close(theirs[name], weight, rtol=1e-8, atol=1e-9)
        assert other_logged["val_loss"] == pytest.approx(logged["val_loss"], rel=1e-9)
        assert other_logged["index"] == logged["index"]
        if "data_parallel" not in options:  # the step logs the micro-batches of each replica
            assert other_logged["largest"] == pytest.approx(logged["largest"], rel=1e-9)
        assert torch.equal(other_tokens[0], tokens[0])


def test_two_stages_train_validate_and_predict_as_one_device() -> None:
    check(2, {"pipeline_parallel": 2}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5})


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "interleaved": (2, {"virtual_pipeline": 2}),
    "zero bubble": (2, {"pipeline": PipelineOptions(schedule="zero_bubble")}),
    "uneven": (2, {"pipeline_layout": "Ettt|tL"}),
    "tensor": (4, {"tensor_parallel": 2, "sequence_parallel": True}),
    "replicas": (4, {"data_parallel": DataParallelOptions(level="optim")}),
    "sharded": (4, {"data_parallel": DataParallelOptions(level="optim_grads")}),
    "interleaved replicas": (4, {"virtual_pipeline": 2, "data_parallel": DataParallelOptions(level="optim")}),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_trains_as_one_device(name: str) -> None:
    ranks, options = LAYOUTS[name]
    check(ranks, {"pipeline_parallel": 2, **options}, {})


@pytest.mark.full
def test_checkpoints_resume_in_another_layout_and_become_folders(tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    straight = run(trained, 1, {}, {"max_steps": 3}, timeout=300)[0]
    half = run(trained, 4, {"pipeline_parallel": 2, "tensor_parallel": 2}, {"max_steps": 2}, path, timeout=300)[0]
    resumed = run(trained, 1, {}, {"max_steps": 3}, "", path, timeout=300)[0]
    for name, weight in straight[1].items():
        torch.testing.assert_close(resumed[1][name], weight, rtol=1e-8, atol=1e-9)
    module = Plain()
    load_weights(module, path)
    module.net.save_pretrained(tmp_path / "folder")  # type: ignore[operator]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype=torch.float64)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, half[1][f"model.net.{name}"]), name


class OwnBackward(Plain):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()  # type: ignore[no-untyped-call]


def _refused() -> str:
    with pytest.raises(ConfigurationError) as error:
        trainer(MegatronStrategy(pipeline_parallel=2)).fit(OwnBackward(), DataLoader(torch.ones(4, 8).long()))
    return str(error.value)


def test_a_backward_of_its_own_is_refused() -> None:
    assert "OwnBackward defines backward, and pp=2" in run(_refused, 2)[0]
