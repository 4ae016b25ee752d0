"""What Lightning's users do with a model and its optimizer works under MegatronStrategy as under Lightning's own."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import BackboneFinetuning, ModelPruning
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from megalight import checkpoint
from megalight.errors import CheckpointError, ConfigurationError
from megalight.strategies import MegatronStrategy
from tests.strategies.regression import Plain, batches, by_hand, dealt, fit, samples, strategy, weights
from tests.strategies.training import ADAM, CONFIGS, WithData
from tests.support.environment import trainer
from tests.support.workers import run


def close(found: list[list[float]], expected: list[list[float]], tolerance: float = 1e-9) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        a, b = torch.tensor(mine, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64)
        assert (a - b).norm() <= tolerance * b.norm()


def lightnings_own(module: pl.LightningModule, loader: Any, **options: Any) -> pl.Trainer:
    """The same fit without MegatronStrategy."""
    defaults = {"max_epochs": 1, "precision": "64-true", "enable_checkpointing": False, "limit_val_batches": 0}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    runner = pl.Trainer(accelerator="cpu", devices=1, **{**defaults, **quiet, **options})  # type: ignore[arg-type]
    runner.fit(module, loader)
    return runner


# ---------------------------------------------------------------------- the optimizer


class Given(Plain):
    """Trains with an optimizer that the user keeps."""

    def __init__(self, name: str = "AdamW") -> None:
        super().__init__(name)
        self.double()
        self.kept = super().configure_optimizers()

    def configure_optimizers(self) -> Any:
        return self.kept


def _served_twice(level: str) -> tuple[list[list[float]], list[list[float]], bool]:
    module = Given()
    for _ in range(2):
        fit(module, batches(16, 4), strategy(level))
    groups = module.kept.param_groups
    return weights(module), weights(Given()), [id(p) for p in groups[0]["params"]] == [*map(id, module.parameters())]


@pytest.mark.parametrize(("level", "ranks"), [("optim", 1), ("optim", 2), ("no_shard", 2)])
def test_an_optimizer_serves_a_second_fit_with_its_state(level: str, ranks: int) -> None:
    for found, _, shows_parameters in run(_served_twice, ranks, level):
        close(found, by_hand(Given(), 2 * dealt(16, 4, ranks)))
        assert shows_parameters


def _by_hand_after_fit() -> list[list[float]]:
    module = Given()
    fit(module, batches(16, 4))
    for step in dealt(16, 4, 1):
        module.kept.zero_grad()
        module.training_step(step[0], 0).backward()
        module.kept.step()
    return weights(module)


def test_a_users_own_loop_goes_on_after_fit() -> None:
    close(run(_by_hand_after_fit, 1)[0], by_hand(Given(), 2 * dealt(16, 4, 1)))


def _saved_after_fit(path: str) -> tuple[list[list[float]], list[list[float]]]:
    whole, first, second = Given(), Given(), Given()
    fit(whole, batches(16, 4), max_epochs=2)
    runner = fit(first, batches(16, 4))
    runner.save_checkpoint(path)
    runner = trainer(strategy(), max_steps=-1, max_epochs=2, limit_val_batches=0)
    runner.fit(second, batches(16, 4), ckpt_path=path)
    return weights(second), weights(whole)


def test_a_checkpoint_after_fit_has_the_optimizers_state(tmp_path: Path) -> None:
    found, expected = run(_saved_after_fit, 1, str(tmp_path / "end.ckpt"))[0]
    close(found, expected, 0)


def _copied() -> list[list[list[float]]]:
    module = Plain("SGD")
    fit(module, batches(8, 4))
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
        module,
    ]
    for each in copies:
        fit(each, batches(8, 4))
    return [weights(each) for each in copies]


def test_a_module_is_copied_and_pickled_after_fit() -> None:
    first, *others = run(_copied, 1)[0]
    assert all(other == first for other in others)
    assert first != weights(Plain("SGD").double())


def _pickled() -> list[list[list[float]]]:
    runner = fit(Plain("SGD"), batches(8, 4))
    return [weights(each.lightning_module) for each in (pickle.loads(pickle.dumps(runner)), runner)]


def test_a_trainer_is_pickled_after_fit() -> None:
    """Callbacks that know their trainer, such as Lightning's bars, are then pickled too."""
    first, other = run(_pickled, 1)[0]
    assert first == other


class Unfrozen(Plain):
    """Its first layer is trained from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.backbone(x))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=0.02)


def _unfrozen(own: bool, level: str) -> list[list[float]]:
    module = Unfrozen()
    options: dict[str, Any] = {"max_epochs": 3, "callbacks": [BackboneFinetuning(1, verbose=False)]}
    if own:
        lightnings_own(module, batches(8, 4), **options)
    else:
        fit(module, batches(8, 4), strategy(level), **options)
    return weights(module)


def test_layers_are_unfrozen_during_training() -> None:
    (expected,) = run(_unfrozen, 1, True, "optim")
    close(run(_unfrozen, 1, False, "optim")[0], expected)


@pytest.mark.parametrize("level", ["optim", "no_shard"])
def test_layers_are_unfrozen_on_all_replicas(level: str) -> None:
    first, second = run(_unfrozen, 2, False, level)
    assert first == second
    backbone = weights(Unfrozen())[-2:]
    assert first[-2:] != backbone


class Head(Plain):
    """Its optimizer holds the last layer only; the first one still requires gradients."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1)


def _head(own: bool) -> tuple[list[list[float]], list[str]]:
    module, told = Head(), Told()
    logging.getLogger("megalight").addHandler(told)
    (lightnings_own if own else fit)(module, batches(8, 4))
    logging.getLogger("megalight").removeHandler(told)
    return weights(module), told.messages


class Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_parameters_outside_the_optimizer_stay_with_a_warning() -> None:
    (expected, _), (found, told) = (run(_head, 1, own)[0] for own in (True, False))
    close(found, expected)
    assert "net.0.weight requires gradients, but the optimizer does not hold it (nor 1 others)" in told[0]


def _pruned(own: bool, path: str) -> tuple[list[list[float]], list[str]]:
    module = Plain("SGD").double()
    pruning = ModelPruning(
        "l1_unstructured", [(module.net[0], "weight")], amount=0.5, use_lottery_ticket_hypothesis=False
    )
    runner = (lightnings_own if own else fit)(module, batches(8, 4), callbacks=[pruning], max_epochs=2)
    if own:
        return weights(module), []
    runner.save_checkpoint(path)
    return weights(module), sorted(name for name in checkpoint.open(path).tensors if "net.0" in name)


def test_pruned_models_are_trained_and_saved(tmp_path: Path) -> None:
    (expected, _), (found, saved) = (run(_pruned, 1, own, str(tmp_path / "thin.ckpt"))[0] for own in (True, False))
    close(found, expected)
    assert "model.net.0.weight" in saved


def _pruned_by_two(sharded: bool) -> list[list[float]]:
    module = Plain("SGD").double()
    pruning = ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)
    how = strategy("optim_grads_params" if sharded else "optim")
    fit(module, batches(8, 4), how, callbacks=[pruning], max_epochs=2)
    return [*weights(module), [float((module.net[0].weight == 0).sum() + (module.net[2].weight == 0).sum())]]


def test_replicas_prune_alike_and_shards_as_replicas() -> None:
    """Half of the 49 weights first, then half of what remains: Lightning prunes anew after each epoch."""
    replicas, sharded = run(_pruned_by_two, 2, False), run(_pruned_by_two, 2, True)
    close(replicas[0], replicas[1])
    close(sharded[0], replicas[0])
    assert replicas[0][-1][0] >= 24


class Replaces(pl.Callback):
    """Gives a parameter other memory."""

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        weight = module.net[0].weight
        weight.data = weight.data * 0.5


def _replaced(own: bool) -> list[list[float]]:
    module = Plain("AdamW").double()
    (lightnings_own if own else fit)(module, batches(8, 4), callbacks=[Replaces()], max_epochs=2)
    return weights(module)


def test_parameters_with_replaced_memory_are_still_trained() -> None:
    close(run(_replaced, 1, False)[0], run(_replaced, 1, True)[0])


# ---------------------------------------------------------------------- steps


class Skips(Plain):
    """Returns None for batches whose number is in ``skipped``."""

    def __init__(self, *skipped: int) -> None:
        super().__init__("AdamW")
        self.skipped = skipped

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx in self.skipped else super().training_step(batch, batch_idx)


def _skipping(own: bool, accumulate: int, *skipped: int) -> list[list[float]]:
    module = Skips(*skipped)
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    (lightnings_own if own else fit)(module, batches(24, 4), **options)
    return weights(module)


@pytest.mark.parametrize(("accumulate", "skipped"), [(1, (0, 3)), (2, (1, 2)), (2, (2, 3)), (3, (0, 5))])
def test_a_step_may_skip_its_batch(accumulate: int, skipped: tuple[int, ...]) -> None:
    (expected,) = run(_skipping, 1, True, accumulate, *skipped)
    close(run(_skipping, 1, False, accumulate, *skipped)[0], expected)


def _skipping_on_one_rank() -> str:
    with pytest.raises(ConfigurationError, match="None, which skips a batch only in a single process"):
        fit(Skips(0), batches(8, 4))
    return "refused"


def test_no_batch_is_skipped_while_other_ranks_wait() -> None:
    assert run(_skipping_on_one_rank, 2) == ["refused"] * 2


class Wrong(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"accuracy": 1.0}


def _wrong() -> str:
    with pytest.raises(MisconfigurationException, match=r"Wrong\.training_step returned a dict without a") as caught:
        fit(Wrong(), batches(8, 4))
    return type(caught.value).__name__


def test_wrong_output_is_the_error_that_lightnings_users_catch() -> None:
    assert run(_wrong, 1) == ["StepError"]


class Extra(Plain):
    """Returns more than the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "inputs": batch[0], "size": len(batch[0]), "mean": batch[0].mean()}


class Outputs(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *args: Any) -> None:
        self.seen.append(outputs)


def _outputs() -> list[Any]:
    seen = Outputs()
    fit(Extra(), batches(6, 6), strategy(micro_batch_size=4), callbacks=[seen])
    return [{name: v.tolist() if isinstance(v, Tensor) else v for name, v in each.items()} for each in seen.seen]


def test_outputs_are_those_of_all_micro_batches() -> None:
    x, _ = samples(6)
    (outputs,) = run(_outputs, 1)[0]
    assert outputs["inputs"] == x.tolist()
    assert outputs["size"] == [4, 2]
    assert outputs["mean"] == pytest.approx(x.mean().item(), rel=1e-12)


class Lists(Plain):
    """Gets lists of samples, or columns beside tensors without samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = map(torch.stack, zip(*batch, strict=True)) if isinstance(batch, list) else (batch["x"], batch["y"])
        assert len(x) <= 4
        if isinstance(batch, dict):
            assert [batch[name].tolist() for name in ("scale", "mask", "weights")] == [2.0, [[1.0, 1.0]], [1.0] * 3]
        return super().training_step((x, y), batch_idx)


def _with_shared(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    x, y = map(torch.stack, zip(*rows, strict=True))
    ones = torch.ones(3, dtype=x.dtype)
    return {"weights": ones, "x": x, "y": y, "mask": ones[None, :2], "scale": ones.sum() - 1}


def _micro_batches_of(collate: Any) -> list[list[float]]:
    module = Lists("SGD")
    loader: DataLoader[Any] = DataLoader(TensorDataset(*samples(14)), batch_size=8, collate_fn=collate)
    fit(module, loader, strategy(micro_batch_size=4))
    return weights(module)


@pytest.mark.parametrize("collate", [list, _with_shared], ids=["list", "shared"])
def test_micro_batches_are_cut_between_samples(collate: Any) -> None:
    x, y = samples(14)
    steps = [[(x[:8], y[:8])], [(x[8:], y[8:])]]
    assert run(_micro_batches_of, 1, collate)[0] == [
        pytest.approx(each, rel=1e-12, abs=1e-14) for each in by_hand(Plain("SGD"), steps)
    ]


class Rows(Plain):
    """Reads rows of an embedding, whose gradients are sparse tensors."""

    def __init__(self, optimizer: str = "AdamW", sparse: bool = True) -> None:
        super().__init__(optimizer)
        self.rows = nn.Embedding(9, 5, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.rows((x > 0).sum(1)))


def _sparse(optimizer: str, level: str, micro_batch_size: int | None) -> list[list[float]]:
    module = Rows(optimizer)
    fit(module, batches(16, 4), strategy(level, micro_batch_size=micro_batch_size))
    return weights(module)


@pytest.mark.parametrize(
    ("optimizer", "level", "ranks", "micro_batch_size"),
    [
        ("SGD", "no_shard", 2, None),
        ("AdamW", "optim", 1, 2),
        ("SGD", "optim_grads", 2, 2),
        ("AdamW", "optim_grads_params", 2, None),
    ],
)
def test_sparse_gradients_are_added_to_dense_ones(
    optimizer: str, level: str, ranks: int, micro_batch_size: int | None
) -> None:
    expected = by_hand(Rows(optimizer, sparse=False), dealt(16, 4, ranks))
    for found in run(_sparse, ranks, optimizer, level, micro_batch_size):
        close(found, expected)


class ByHand(Rows):
    """Steps itself, so that its parameters keep gradients of their own."""

    automatic_optimization = False


def _sparse_replicas() -> None:
    with pytest.raises(
        ConfigurationError, match=r"gradients of rows are sparse \(sparse=True\), which replicas do not"
    ):
        fit(ByHand(), batches(16, 4), strategy("no_shard"))


def test_replicas_refuse_to_average_sparse_gradients() -> None:
    run(_sparse_replicas, 2)


# ---------------------------------------------------------------------- one replica


class Shuffled(Plain):
    """Notes the rows that it gets in an order that the default generator decides."""

    def __init__(self) -> None:
        super().__init__("SGD")
        self.rows: list[float] = []
        self.dropout = nn.Dropout(0.5)

    def setup(self, stage: str) -> None:
        torch.manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.dropout(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.rows += batch[0][:, 0].tolist()
        return super().training_step(batch, batch_idx)


def _shuffled(own: bool, by_batches: bool) -> tuple[list[float], list[list[float]]]:
    data = TensorDataset(*samples(12))
    loader = DataLoader(data, batch_size=4, shuffle=True)
    if by_batches:
        loader = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, drop_last=False))
    module = Shuffled()
    (lightnings_own if own else fit)(module, loader, max_epochs=2)
    return module.rows, weights(module)


@pytest.mark.parametrize("by_batches", [False, True])
def test_one_process_shuffles_and_drops_as_without_the_strategy(by_batches: bool) -> None:
    (rows, expected), (found_rows, found) = (run(_shuffled, 1, own, by_batches)[0] for own in (True, False))
    assert found_rows == rows
    close(found, expected)


class Sampled(pl.Callback):
    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        loader = trainer.train_dataloader
        assert loader is not None
        self.kind = type(loader.sampler).__name__


def _sampler() -> str:
    seen = Sampled()
    fit(Plain("SGD"), batches(8, 2), callbacks=[seen])
    return seen.kind


@pytest.mark.parametrize("ranks", [1, 2])
def test_loaders_are_divided_over_several_replicas_only(ranks: int) -> None:
    kind = SequentialSampler.__name__ if ranks == 1 else "DistributedSampler"
    assert run(_sampler, ranks) == [kind] * ranks


def _order(options: dict[str, Any]) -> str:
    seen = Sampled()
    trainer(MegatronStrategy(**options), callbacks=[seen], max_steps=1).fit(WithData(CONFIGS["gqa"], optimizer=ADAM))
    return seen.kind


@pytest.mark.parametrize(
    "options", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2}], ids=str
)
def test_one_replica_on_several_ranks_keeps_the_order_of_its_data(options: dict[str, Any]) -> None:
    assert run(_order, 2, options) == ["From"] * 2


class Sized(Plain):
    def __init__(self) -> None:
        super().__init__("SGD")
        self.batch_size = 1

    def train_dataloader(self) -> DataLoader[Any]:
        return batches(32, self.batch_size)

    def val_dataloader(self) -> DataLoader[Any]:
        return batches(4, 4)


def _tuned(path: str) -> int | None:
    runner = trainer(strategy(), root=path, max_steps=-1, max_epochs=1, limit_val_batches=0)
    return Tuner(runner).scale_batch_size(Sized(), max_trials=2, steps_per_trial=1)


def test_the_tuner_scales_batch_sizes(tmp_path: Path) -> None:
    assert run(_tuned, 1, str(tmp_path)) == [4]


class Modes(Plain):
    def __init__(self) -> None:
        super().__init__("SGD")
        self.inference: list[bool] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.inference.append(torch.is_inference_mode_enabled())


@pytest.mark.parametrize("wanted", [True, False])
def test_inference_mode_is_the_users_choice(wanted: bool) -> None:
    module = Modes()
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    runner = pl.Trainer(strategy=strategy(), accelerator="cpu", devices=1, inference_mode=wanted, **quiet)
    runner.validate(module, batches(4, 4), verbose=False)
    assert module.inference == [wanted]


def _counted() -> tuple[int, int]:
    runner = fit(Plain("SGD"), batches(16, 4), accumulate_grad_batches=2)
    progress = runner.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer
    return progress.zero_grad.total.completed, progress.step.total.completed


def test_zeroed_gradients_are_counted() -> None:
    assert run(_counted, 1) == [(2, 2)]


def test_loaders_before_setup_stay() -> None:
    loader = batches(4, 4)
    assert strategy().process_dataloader(loader) is loader


# ---------------------------------------------------------------------- files


def test_a_missing_checkpoint_is_a_missing_file(tmp_path: Path) -> None:
    runner = pl.Trainer(strategy=strategy(), accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    with pytest.raises(FileNotFoundError, match=r"nothing\.ckpt") as caught:
        runner.validate(Plain(), batches(4, 4), ckpt_path=str(tmp_path / "nothing.ckpt"))
    assert isinstance(caught.value, CheckpointError)


def test_a_plain_file_is_removed_whole(tmp_path: Path) -> None:
    file = tmp_path / "old.ckpt"
    file.write_text("a checkpoint of another strategy")
    strategy().remove_checkpoint(file)
    assert list(tmp_path.iterdir()) == []


def _read_without_a_trainer(path: str) -> None:
    runner = trainer(strategy(), max_epochs=1, max_steps=-1, accumulate_grad_batches=3, limit_val_batches=0)
    runner.fit(Plain(), batches(8, 2))
    runner.save_checkpoint(path)
    alone, connected = strategy(), strategy()
    connected.connect(Plain())
    saved = checkpoint.open(path).common["loops"]
    for each in (alone, connected):
        entries = each.load_checkpoint(path)
        assert entries["loops"] == saved
        assert sorted(entries["state_dict"]) == sorted(Plain().state_dict())
    shutil.copytree(path, path + "2")  # that one is being read
    connected.remove_checkpoint(path + "2")


def test_a_checkpoint_is_read_and_removed_before_there_is_a_trainer(tmp_path: Path) -> None:
    run(_read_without_a_trainer, 1, str(tmp_path / "a.ckpt"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
