"""A draft learns from hidden states on disk as it does beside its base."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megalight.data.cached_outputs import CachedHiddenStates
from megalight.data.gpt.module import GPTDataModule
from megalight.data.indexed import IndexedWriter
from megalight.errors import ConfigurationError, DataError
from megalight.inference.cached_outputs import CachingOptions, cache_hidden_states
from megalight.models.eagle import EagleConfig, EagleModule
from megalight.models.eagle.base import BaseModel
from megalight.models.stored import held_model, save_model
from megalight.parallel.layout import Layout
from megalight.strategies import MegatronStrategy
from tests.strategies.test_eagle import CP, KIMI, LR, SERVED, SP, config, served
from tests.strategies.training import SEED, gathered
from tests.support.environment import trainer
from tests.support.workers import run

STEPS, ROWS, LENGTH = 2, 4, 12
V = SERVED["dense"].vocab_size


class Drafter(EagleModule):
    def __init__(self, base: Path, draft: EagleConfig) -> None:
        super().__init__(base, draft, seed=SEED, steps=3)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=LR)


def data_of(folder: Path, packed: bool = False, **options: Any) -> GPTDataModule:
    values = {"vocab_size": V, "sequence_length": LENGTH, "global_batch_size": ROWS, "split": "3,1,0"}
    return GPTDataModule(data=str(folder / "c"), document_mask=packed, **{**values, **options})


def record(
    folder: Path,
    name: str,
    draft: EagleConfig,
    packed: bool = False,
    val_samples: int | None = None,
    layout: Layout | None = None,
    **options: Any,
) -> Path:
    data, base = data_of(folder, packed, val_samples=val_samples), BaseModel(folder / "base", layout or Layout())
    data.trainer = SimpleNamespace(max_steps=STEPS, accumulate_grad_batches=1)  # type: ignore[assignment]
    caching = CachingOptions(micro_batch_size=3, **{"validation": True, **options})
    cache_hidden_states(base, draft.for_base(base.config), data, folder / name, caching)
    return folder / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("offline")
    save_model(held_model("gpt", SERVED["dense"], served()), found / "base")
    with IndexedWriter(found / "c", "uint16") as writer:
        lengths = [5, 19, 3, 40, 8, 31, 29]
        writer.add_documents(np.random.default_rng(0).integers(0, V, sum(lengths)), lengths)
    for part in (1, 0):
        record(found, "rows", config(), part=part, parts=2)
    record(found, "packed", KIMI, packed=True)
    return found


def learned(base: Path, folder: Path, layout: Any, draft: EagleConfig, packed: bool) -> tuple[Any, Any, Any]:
    module, how, losses = Drafter(base, draft), MegatronStrategy(micro_batch_size=1, **layout), []
    data = data_of(folder, packed)
    module.on_train_batch_end = lambda *_: losses.append(float(runner.callback_metrics["train_loss"]))  # type: ignore[method-assign]
    runner = trainer(how, max_steps=STEPS, num_sanity_val_steps=0)
    runner.fit(module, datamodule=data)
    told = {name: float(value) for name, value in runner.callback_metrics.items() if "step_" in name or "val" in name}
    assert data.cached_outputs is None
    return losses, told, gathered(how, module)


def both(folder: Path, layout: Any, kimi: bool, packed: bool) -> None:
    draft = KIMI if kimi else config()
    online = learned(folder / "base", folder, layout, draft, packed)
    offline = learned(folder / ("packed" if packed else "rows"), folder, layout, draft, packed)
    np.testing.assert_allclose(offline[0], online[0], rtol=1e-10)
    assert offline[1].keys() == online[1].keys()
    assert "val_step_2_accuracy" in online[1]
    for name, value in online[1].items():
        np.testing.assert_allclose(offline[1][name], value, rtol=1e-10, err_msg=name)
    for name, value in online[2].items():
        np.testing.assert_allclose(offline[2][name], value, rtol=1e-8, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(
    ("ranks", "layout", "kimi", "packed"),
    [
        (1, {}, True, True),
        (2, SP, False, False),
        *(pytest.param(2, *each, marks=pytest.mark.full) for each in ((SP, True, True), (CP, False, False))),
    ],
)
def test_losses_are_those_beside_the_base(folder: Path, ranks: int, layout: Any, kimi: bool, packed: bool) -> None:
    run(both, ranks, folder, layout, kimi, packed)


def test_the_folder_has_no_layers_of_the_base(folder: Path) -> None:
    states = CachedHiddenStates(folder / "rows")
    assert states.meta.layers == config().auxiliary_layers
    assert set(BaseModel(folder / "rows").head_source().tensors) == {"model.head.output_layer.weight"}
    sample = data_of(folder).validation_samples()[0][0]  # type: ignore[index]
    assert states.read(0, sample, "validation").hidden.shape == (LENGTH, 32)
    assert not states.empty().auxiliary.any()


def test_a_run_without_validation_samples_is_recorded(folder: Path) -> None:
    states = CachedHiddenStates(record(folder, "none", config(), val_samples=0))
    assert states.meta.validation_order is None
    assert not states.has("validation")


def test_a_base_that_the_run_divides_is_recorded_whole(folder: Path) -> None:
    divided = record(folder, "divided", config(), layout=Layout(tensor_parallel=2, sequence_parallel=True))
    sample = data_of(folder).validation_samples()[0][0]  # type: ignore[index]
    found, wanted = (CachedHiddenStates(each).read(0, sample, "validation") for each in (divided, folder / "rows"))
    torch.testing.assert_close(found.hidden, wanted.hidden)
    torch.testing.assert_close(found.auxiliary, wanted.auxiliary)


def validated(folder: Path) -> list[dict[str, float]]:
    found = []
    for base in ("base", "rows"):
        runner = trainer(MegatronStrategy(micro_batch_size=1))
        found += runner.validate(Drafter(folder / base, config()), datamodule=data_of(folder), verbose=False)
    return found  # type: ignore[return-value]


def test_validation_alone_reads_the_folder(folder: Path) -> None:
    ((online, offline),) = run(validated, 1, folder)
    assert "val_step_2_accuracy" in online
    assert offline == pytest.approx(online, rel=1e-10)


def set_up(base: Path, draft: EagleConfig, data: Any, stage: str = "fit", validation: float = 1.0) -> None:
    module = Drafter(base, draft)
    values = {"max_steps": STEPS, "accumulate_grad_batches": 1, "limit_val_batches": validation}
    runner: Any = SimpleNamespace(datamodule=data, **values)
    module._trainer = runner
    if data is not None:
        data.trainer = runner
    module.setup(stage)


def test_what_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds hidden states, so no base runs"):
        EagleModule(folder / "rows", base_layout=Layout(tensor_parallel=2))
    message = r"reads hidden states after layers \[1, 3\], and .* holds those after \[3, 1, 2\]"
    with pytest.raises(ConfigurationError, match=message):
        set_up(folder / "rows", EagleConfig(auxiliary_layers=(1, 3)), data_of(folder))
    with pytest.raises(DataError, match="another order of samples"):
        set_up(folder / "rows", config(), data_of(folder, seed=5))
    with pytest.raises(ConfigurationError, match=r"training and validation samples, and trainer\.test reads others"):
        set_up(folder / "rows", config(), data_of(folder), "test")
    with pytest.raises(ConfigurationError, match="NoneType does not have"):
        set_up(folder / "rows", config(), None)
    record(folder, "alone", config(), validation=False)
    with pytest.raises(DataError, match="has no validation samples, and the run validates"):
        set_up(folder / "alone", config(), data_of(folder))
    set_up(folder / "alone", config(), data_of(folder), validation=0)
    with pytest.raises(ConfigurationError, match="8 samples for 9 parts; divide them into fewer"):
        record(folder, "many", config(), part=8, parts=9)
    record(folder, "begun", config(), part=0, parts=2)
    with pytest.raises(DataError, match=r"no complete folder of megalight hidden-states.*It was begun"):
        Drafter(folder / "begun", config())
