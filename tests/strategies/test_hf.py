"""``HFCausalLM``: in every layout the losses and weights of one device, and folders that ``from_pretrained`` reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from megalight.callbacks import Adapters, TransformersExport
from megalight.errors import ConfigurationError, LayoutError
from megalight.models.hf_causal_lm import HFCausalLM, HFConfig
from megalight.strategies import MegatronFSDPStrategy, MegatronStrategy
from megalight.types import TokenBatch
from tests.strategies.training import ADAM, Losses
from tests.support.environment import trainer
from tests.support.workers import run

transformers = pytest.importorskip("transformers")

# Its norms compute in float64 too.
SIZES: dict[str, Any] = {
    "model_type": "starcoder2",
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.2,
    "sliding_window": 5,
    "residual_dropout": 0.0,
    "embedding_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel": 2}),
    "cp2": (2, {"context_parallel": 2}),
    "full2": (2, {"full": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "tp2pp2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "tp2cp2": (4, {"tensor_parallel": 2, "context_parallel": 2}),
}


def batch() -> TokenBatch:
    ids = torch.randint(0, 53, (4, 17), generator=torch.Generator().manual_seed(4))
    mask = torch.ones(4, 16)
    mask[1, :5] = 0
    return TokenBatch(ids[:, :-1], ids[:, 1:], mask, document_lengths=((16,), (7, 9), (16,), (4, 12)))


class Fixed(HFCausalLM):
    """Sees one batch."""

    def train_dataloader(self) -> Any:
        return DataLoader([batch()] * 3, batch_size=None)  # type: ignore[arg-type]


def trained(
    layout: str, weights: Path, root: Path, resume: str | None = None, precision: str = "64-true"
) -> tuple[list[float], Tensor]:
    """Train, write a checkpoint and a folder, and return the losses and what the model generates."""
    options = dict(LAYOUTS[layout][1])
    kind = MegatronFSDPStrategy if options.pop("full", False) else MegatronStrategy
    losses, steps = Losses(), 3 if resume else 2
    strategy = kind(micro_batch_size=4 if kind is MegatronFSDPStrategy else 2, **options)
    callbacks = [losses, TransformersExport(folder=str(root / f"{layout}-hf"))]
    runner = trainer(strategy, callbacks=callbacks, precision=precision, max_steps=steps, use_distributed_sampler=False)
    module = Fixed(optimizer=ADAM, weights=weights)
    runner.fit(module, ckpt_path=resume)
    runner.save_checkpoint(root / f"{layout}.ckpt")
    strategy.finish_saves()
    strategy.sync_parameters()
    if "pp" in layout:
        with pytest.raises(ConfigurationError, match="runs the whole model, and this process holds some"):
            module.generate(batch().tokens[:2, :6])
    if layout == "full2" or "pp" in layout:
        return losses.losses, torch.empty(0)
    return losses.losses, module.generate(batch().tokens[:2, :6], max_new_tokens=5, do_sample=False, eos_token_id=None)


def folder(path: Path) -> Path:
    torch.manual_seed(1)
    config = HFConfig(SIZES).read
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def check(layouts: list[str], root: Path) -> None:
    weights = folder(root / "weights")
    (losses, text), *_ = run(trained, 1, "one", weights, root)
    wanted = transformers.AutoModelForCausalLM.from_pretrained(root / "one-hf").state_dict()
    for layout in layouts:
        for found, written in run(trained, LAYOUTS[layout][0], layout, weights, root):
            assert found == pytest.approx(losses, rel=1e-9), layout
            assert not written.numel() or torch.equal(written, text)
        read = transformers.AutoModelForCausalLM.from_pretrained(root / f"{layout}-hf")
        assert type(read).__name__ == "Starcoder2ForCausalLM"
        for name, tensor in read.state_dict().items():
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-7, atol=1e-9, msg=f"{layout}: {name}")
    # The third step of each, in the next layout.
    third = run(trained, 1, "one", weights, root / "again", str(root / f"{layouts[-1]}.ckpt"))[0][0]
    for layout in layouts:
        goes_on = run(trained, LAYOUTS[layout][0], layout, weights, root / "again", str(root / "one.ckpt"))[0][0]
        assert goes_on == pytest.approx(third, rel=1e-9)


def test_layouts(tmp_path: Path) -> None:
    check(["tp2"], tmp_path)


def adapted(options: dict[str, Any], weights: Path) -> list[float]:
    losses = Losses()
    runner = trainer(
        MegatronStrategy(micro_batch_size=2, **options),
        callbacks=[losses, Adapters(rank=2)],
        max_steps=3,
        use_distributed_sampler=False,
    )
    runner.fit(Fixed(optimizer=ADAM, weights=weights))
    return losses.losses


def test_adapters(tmp_path: Path) -> None:
    weights = folder(tmp_path / "weights")
    alone = run(adapted, 1, {}, weights)[0]
    assert alone[2] < alone[0]
    assert run(adapted, 2, {"tensor_parallel": 2}, weights)[0] == pytest.approx(alone, rel=1e-9)


@pytest.mark.full
def test_more_layouts(tmp_path: Path) -> None:
    check(["pp2", "cp2", "full2", "tp2cp2", "tp2pp2"], tmp_path)


def test_the_first_loss_is_that_of_transformers(tmp_path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder(tmp_path / "weights")).double()
    module = HFCausalLM(weights=tmp_path / "weights")
    module.configure_model()
    rows = batch()
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows.document_lengths or ()])
    logits = theirs(rows.tokens, position_ids=positions, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows.labels.flatten(), reduction="none")
    mask = rows.loss_mask.flatten()
    assert module.model is not None
    loss = module.double().training_step(rows, 0)
    torch.testing.assert_close(loss, (losses * mask).sum() / mask.sum(), rtol=1e-9, atol=0)


class Alone(pl.LightningModule):
    """A model of ``transformers`` as its users train it."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, ids: Tensor, index: int) -> Tensor:
        loss: Tensor = self.net(ids, labels=ids).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _in_bfloat16(weights: Path) -> tuple[float, float, set[torch.dtype], set[torch.dtype]]:
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    ids = torch.randint(0, 53, (1, 600), generator=torch.Generator().manual_seed(4))
    theirs = load(weights, dtype=torch.bfloat16, attn_implementation="eager")(ids, labels=ids).loss
    strategy = MegatronStrategy()
    module = Alone(load(weights, dtype=torch.float32, attn_implementation="eager"))
    runner = trainer(strategy, precision="bf16-true", max_steps=1)
    runner.fit(module, DataLoader(ids, batch_size=1))  # type: ignore[arg-type]
    assert strategy.report is not None
    types = {p.dtype for p in module.parameters()}, {b.dtype for b in module.buffers()}
    return float(strategy.report.loss), float(theirs), *types


def test_frequencies_of_angles_stay_in_float32(tmp_path: Path) -> None:
    loss, theirs, parameters, buffers = run(_in_bfloat16, 1, folder(tmp_path))[0]
    assert loss == theirs
    assert (parameters, buffers) == ({torch.bfloat16}, {torch.float32})


def test_what_transformers_has_not() -> None:
    with pytest.raises(ConfigurationError, match="no causal language model of that type"):
        HFConfig({"model_type": "own"})


def test_models_off_the_interface_take_whole_rows() -> None:
    module = HFCausalLM(
        HFConfig({"model_type": "bloom", "vocab_size": 53, "hidden_size": 16, "n_layer": 1, "n_head": 2})
    )
    module.configure_model()
    with pytest.raises(LayoutError, match="takes whole rows only"):
        module.training_step(batch(), 0)
