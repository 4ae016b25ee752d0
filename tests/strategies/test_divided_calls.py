"""Context parallelism of plain modules around models of ``transformers``: loss and weights are those of one device."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megalight.errors import LayoutError
from megalight.parallel.context.divided_calls import why_not
from megalight.strategies import MegatronStrategy
from tests.parallel.gathering import gather_canonical
from tests.parallel.tiny_transformers import tiny
from tests.support.environment import trainer
from tests.support.workers import run

# Windows, sinks, soft caps and latent heads. Norms compute in float32 in all but the first.
FAMILIES = {"starcoder2": 1e-9, "gpt_oss": 1e-6, "gemma2": 1e-6, "deepseek_v3": 1e-6}
KINDS = ["whole", "packed", "padded"]


def double_loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    """The loss of ``transformers``, which would compute in float32."""
    following = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


double_loss.__name__ = "ForCausalLMLoss"


class Plain(pl.LightningModule):
    """What a user writes: nothing in it is about parallelism."""

    def __init__(self, family: str, kind: str) -> None:
        super().__init__()
        self.net: Any = tiny(family)
        self.net.loss_function = double_loss
        self.kind = kind

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        labels, more = batch.clone(), dict[str, Tensor]()
        if self.kind == "packed":
            rows = torch.arange(11)
            more["position_ids"] = torch.stack([torch.where(rows < n, rows, rows - n) for n in (5, 7)])
        if self.kind == "padded":
            more["attention_mask"] = torch.ones_like(batch)
            more["attention_mask"][0, 8:], labels[0, 8:] = 0, -100
        loss: Tensor = self.net(input_ids=batch, labels=labels, use_cache=False, **more).loss
        self.log("loss", loss)
        # A term of the user's own, which every rank has.
        return 2 * loss + 1e-3 * self.net.get_input_embeddings().weight.square().sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def trained(family: str, kind: str, options: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    data = torch.randint(3, 96, (4, 11), generator=torch.Generator().manual_seed(0))
    module, strategy = Plain(family, kind), MegatronStrategy(**options)
    runner = trainer(strategy, max_steps=2)
    runner.fit(module, DataLoader(data, batch_size=2))
    strategy.sync_parameters()
    assert strategy.parallel_model is not None
    named = {name: p.detach().clone() for name, p in module.named_parameters()}
    return float(runner.callback_metrics["loss"]), gather_canonical(named, strategy.parallel_model.specs, strategy.mesh)


def check(family: str, kinds: list[str], options: dict[str, Any], ranks: int) -> None:
    tolerance = FAMILIES[family]
    for kind in kinds:
        loss, weights = run(trained, 1, family, kind, {})[0]
        for found, theirs in run(trained, ranks, family, kind, options):
            assert found == pytest.approx(loss, rel=tolerance), kind
            for name, weight in weights.items():
                torch.testing.assert_close(theirs[name], weight, rtol=tolerance, atol=tolerance, msg=f"{kind}: {name}")


def test_windows_packed_and_padded() -> None:
    check("starcoder2", KINDS, {"context_parallel": 2}, 2)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "starcoder2"])
def test_families(family: str) -> None:
    check(family, ["whole"], {"context_parallel": 2}, 2)


@pytest.mark.full
def test_with_tensor_parallelism() -> None:
    check("starcoder2", KINDS, {"context_parallel": 2, "tensor_parallel": 2}, 4)


class Own(Plain):
    """Computes the loss itself."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        logits: Tensor = self.net(input_ids=batch).logits
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def _refused() -> str:
    data = torch.randint(3, 96, (2, 11))
    with pytest.raises(LayoutError) as error:
        trainer(MegatronStrategy(context_parallel=2)).fit(Own("llama", "whole"), DataLoader(data, batch_size=2))
    return str(error.value)


def test_a_loss_of_the_users_own_is_refused() -> None:
    assert "called without labels in training, and context_parallel=2" in run(_refused, 2)[0]


def test_what_shares_cannot_do() -> None:
    assert "does not use the attention interface" in str(why_not(tiny("bloom")))
    assert "counts positions from padding in roberta.embeddings" in str(why_not(tiny("camembert")))
    model: Any = tiny("llama")
    assert why_not(model) is None
    for name, value, reason in (
        ("layer_types", ["full_attention", "conv"], "has layers of type conv"),
        ("rope_parameters", {"rope_type": "dynamic"}, "rotary embedding of type 'dynamic'"),
        ("attention_dropout", 0.1, "has attention_dropout=0.1"),
    ):
        before = getattr(model.config, name, None)
        setattr(model.config, name, value)
        assert reason in str(why_not(model))
        setattr(model.config, name, before)
