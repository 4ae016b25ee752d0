"""Fused ops of models of ``transformers`` under Lightning's strategies and ours."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from llama_pipeline import LlamaPipelineModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from megalight.callbacks import CUDAGraph, FusedOps
from megalight.errors import ConfigurationError
from megalight.models.module import Carry, MegalightModule
from megalight.strategies import MegatronFSDPStrategy, MegatronStrategy
from megalight.types import Loss
from tests.callbacks.test_automatic_graph import FAST, SLOW, StandIn
from tests.examples.test_llama_pipeline import batches, config
from tests.models.test_fused import SIZES
from tests.parallel.graphs.tape import Tape
from tests.strategies.regression import Plain
from tests.strategies.training import Losses
from tests.support.environment import trainer
from tests.support.workers import run

transformers = pytest.importorskip("transformers")

STEPS = 3


def llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


class Chat(pl.LightningModule):
    """What any user of ``transformers`` writes."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.fused: list[Any] = []
        if not self.late:
            self.model = llama()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch).loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))
        self.fused.append(self.optimizers().param_groups[0].get("fused"))  # type: ignore[union-attr]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Late(Chat):
    late = True

    def configure_model(self) -> None:
        if self.late:
            self.model, self.late = llama(), False


class Split(MegalightModule):
    """The same as a module whose model is split."""

    def build_model(self) -> nn.Module:
        return llama()

    def forward_step(self, model: nn.Module, batch: Any, carry: Carry | None = None) -> Carry:
        return {"mean": model(input_ids=batch, labels=batch).loss}

    def loss_step(self, carry: Carry, batch: Any) -> Loss:
        return Loss(sum=carry["mean"] * self.loss_tokens(batch))

    def loss_tokens(self, batch: Any) -> Tensor:
        return torch.tensor(float(batch[:, 1:].numel()))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(steps: int = STEPS) -> DataLoader[Any]:
    ids = torch.randint(53, (4 * steps, 12), generator=torch.Generator().manual_seed(1))
    return DataLoader(ids, batch_size=4)  # type: ignore[arg-type]


QUIET: dict[str, Any] = {"precision": "32-true", "use_distributed_sampler": False, "limit_val_batches": 0}


def losses(kind: type[Chat], fused: bool, strategy: Any) -> tuple[list[float], Chat]:
    module = kind()
    callbacks = [FusedOps()] if fused else []
    runner = trainer(strategy(), callbacks=callbacks, max_steps=STEPS, **QUIET)
    runner.fit(module, data())
    assert module.fused == [fused or None] * STEPS
    if not isinstance(strategy, str):
        assert runner.optimizers[0].param_groups[0]["fused"] is None
    return module.seen, module


def _compare(strategy: Any) -> float:
    plain, before = losses(Chat, False, strategy)
    worst = 0.0
    for kind in (Chat, Late):
        seen, module = losses(kind, True, strategy)
        assert [type(one) for one in module.modules()][1:] == [type(one) for one in before.modules()][1:]
        worst = max(worst, *(abs(a - b) for a, b in zip(seen, plain, strict=True)))
    assert plain[-1] < plain[0]
    return worst


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [(MegatronStrategy, 1), (MegatronStrategy, 2), pytest.param(MegatronFSDPStrategy, 2, marks=pytest.mark.full)],
)
def test_plain_modules_train_as_without_it(strategy: Any, ranks: int) -> None:
    assert max(run(_compare, ranks, strategy)) < 1e-4


def test_lightnings_own_strategies() -> None:
    seen = []
    for callbacks in ([], [FusedOps()]):
        module = Chat()
        runner = pl.Trainer(
            accelerator="cpu", devices=1, callbacks=callbacks, max_steps=STEPS, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        runner.fit(module, data())
        seen.append(module.seen)
    assert torch.allclose(*map(torch.tensor, seen), atol=1e-4)


def _split(fused: bool, options: dict[str, Any]) -> list[float]:
    module, seen = Split(), []
    callback = pl.callbacks.LambdaCallback(on_train_batch_end=lambda t, m, o, *_: seen.append(float(o["loss"])))
    strategy = MegatronStrategy(micro_batch_size=2, **options)
    runner = trainer(strategy, callbacks=[callback, *([FusedOps()] if fused else [])], max_steps=STEPS, **QUIET)
    runner.fit(module, data())
    return seen


def test_split_models() -> None:
    options = {"tensor_parallel": 2, "sequence_parallel": True}
    (plain,) = run(_split, 1, False, {})
    for seen in run(_split, 2, True, options):
        assert torch.allclose(torch.tensor(seen), torch.tensor(plain), atol=1e-4)


def _tensor_parallel(fused: bool) -> tuple[list[float], set[str]]:
    module, kinds = Chat(), set[str]()
    seen = pl.callbacks.LambdaCallback(on_train_start=lambda t, m: kinds.update(type(e).__name__ for e in m.modules()))
    strategy, callbacks = MegatronStrategy(tensor_parallel=2), [seen, *([FusedOps()] if fused else [])]
    trainer(strategy, callbacks=callbacks, max_steps=STEPS, **QUIET).fit(module, data())  # type: ignore[arg-type]
    return module.seen, kinds


def test_plain_modules_under_tensor_parallelism_split_their_vocabulary() -> None:
    for (seen, kinds), (plain, _) in zip(run(_tensor_parallel, 2, True), run(_tensor_parallel, 2, False), strict=True):
        assert torch.allclose(torch.tensor(seen), torch.tensor(plain), atol=1e-4)
        assert {"VocabEmbedding", "VocabLinear"} <= kinds


def _staged(fused: bool, options: dict[str, Any]) -> list[float]:
    module, losses = LlamaPipelineModule(config(False)), Losses()
    strategy = MegatronStrategy(micro_batch_size=1, **options)
    callbacks: list[Any] = [losses, *([FusedOps()] if fused else [])]
    runner = trainer(strategy, callbacks=callbacks, max_steps=3, use_distributed_sampler=False)
    runner.fit(module, DataLoader(batches(), batch_size=None))  # type: ignore[arg-type]
    return losses.losses


def test_a_stage_without_layers() -> None:
    (plain,) = run(_staged, 1, False, {})
    for seen in run(_staged, 2, True, {"pipeline_parallel": 2, "pipeline_layout": "Etttt|L"}):
        assert torch.allclose(torch.tensor(seen), torch.tensor(plain), atol=1e-4)


def _recorded(fused: bool) -> tuple[int, str, list[float]]:
    module, graphs = Chat(), CUDAGraph("auto")
    graphs.recorder, graphs.probe = Tape(), StandIn(graphs, SLOW, FAST)
    callbacks: list[Any] = [graphs, *([FusedOps()] if fused else [])]
    runner = trainer(MegatronStrategy(), callbacks=callbacks, max_steps=24, max_epochs=9, **QUIET)
    runner.fit(module, data(24))
    return graphs.replays, "; ".join(graphs.reasons), module.seen


def test_steps_are_recorded_as_cuda_graphs() -> None:
    ((replays, reasons, seen),) = run(_recorded, 1, True)
    assert (reasons, replays > 5) == ("", True)
    ((_, _, plain),) = run(_recorded, 1, False)
    assert torch.allclose(torch.tensor(seen), torch.tensor(plain), atol=1e-3)


def test_an_optimizer_whose_user_chose_a_way_keeps_it() -> None:
    class Foreach(Chat):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=False)

    module = Foreach()
    pl.Trainer(
        accelerator="cpu", devices=1, callbacks=[FusedOps()], max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, data(1))  # fmt: skip
    assert module.fused == [None]


def _refused(kind: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        trainer(MegatronStrategy(), callbacks=[FusedOps()], max_steps=1).fit(kind(), data(1))
    return str(caught.value)


def test_modules_without_a_known_model_are_refused() -> None:
    (message,) = run(_refused, 1, Plain)
    assert message.startswith("FusedOps finds no module in Plain that it knows: it serves models of transformers")
    assert "with an RMS norm or layer norm, a gated activation, experts" in message
