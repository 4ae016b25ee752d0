"""Steps of a vision-language model with a disjoint tower: a stepper for the ranks of either model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from megalight.errors import ConfigurationError, DataError
from megalight.models.batches import count_samples, skips
from megalight.models.vlm.module import VLMModule
from megalight.models.vlm.task import check_images
from megalight.parallel.bridge import BridgeCommunicator
from megalight.parallel.coupling import contents, emptied, is_empty
from megalight.strategies.stage_logs import StageLogs
from megalight.strategies.step import Stepper, StepReport
from megalight.towers.disjoint import TowerRunner
from megalight.towers.placement import TowerPlacement


class Relay:
    """Tells the tower's ranks what the language model's know: losses and other totals, and outputs.

    Args:
        broadcast: sends an object of a rank to all ranks.
        source: a rank of the language model. All of them have the totals.
        host: all ranks, on the host.
    """

    def __init__(
        self,
        broadcast: Callable[[Any, int], Any],
        source: int,
        device: torch.device,
        host: dist.ProcessGroup | None,
    ) -> None:
        self.broadcast = broadcast
        self.source = source
        self.device = device
        self.host = host
        self._names: dict[str, list[str]] = {}

    def __call__(self, stage: str, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the values, 0-dim float64, on all ranks.

        Args:
            stage: the names are the same in all calls for a stage.
            values: None on ranks of the tower.

        Raises:
            ConfigurationError: the names are not the same.
        """
        if stage not in self._names:  # once: it makes the host wait
            self._names[stage] = self.broadcast(None if values is None else list(values), self.source)
        names = self._names[stage]
        row = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        if values is not None:
            if set(values) != set(names):
                raise ConfigurationError(
                    f"loss_step returned {sorted(values)} and earlier {sorted(names)}: every micro-batch must have the "
                    "same metrics, since the tower's ranks wait for them. Return a count of 0 instead."
                )
            for place, name in enumerate(names):
                row[place].copy_(values[name])
        dist.broadcast(row, self.source)
        return dict(zip(names, row, strict=True))

    def totals(
        self, stage: str, totals: Mapping[str, tuple[Tensor, Tensor]] | None = None
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Do the same for sums and counts."""
        flat = None
        if totals is not None:
            flat = {f"{name} {part}": pair[part] for name, pair in totals.items() for part in (0, 1)}
        found = self(stage, flat)
        names = [key.removesuffix(" 0") for key in found if key.endswith(" 0")]
        return {name: (found[f"{name} 0"], found[f"{name} 1"]) for name in names}

    def outputs(self, own: Any = None) -> list[Any]:
        """Return what each rank gives, by rank, with tensors on the host; ranks of the tower give nothing."""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, apply_to_collection(own, Tensor, Tensor.cpu), group=self.host)
        return every


class LanguageStepper(Stepper):
    """Runs the steps of the language model, whose first stage waits for features.

    Args:
        bridge: comes from the tower.
        placement: which share of a lane's batch this replica takes.
        relay: to the tower's ranks.
    """

    def __init__(self, *args: Any, bridge: BridgeCommunicator, placement: TowerPlacement, relay: Relay) -> None:
        super().__init__(*args)
        self.bridge = bridge
        self.placement = placement
        self.relay = relay
        self.logs = _logs(self, placement, relay.host)

    def train(self, args: tuple[Any, ...], number: int, scale: float, sync: bool) -> tuple[Any, StepReport | None]:
        """Run forward and backward of this replica's share, and tell the tower's ranks the result."""
        output, report = super().train(args, number, scale, sync)
        self.bridge.finish()
        assert report is not None  # only steps of one's own leave batches out
        # All ranks of the language model do this, which keeps their collectives in order.
        self.relay("train", {"loss": report.loss, "num_tokens": report.num_tokens, **report.metrics})
        return output, report

    def totals(self, stage: str, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the totals of an evaluation batch, and tell the tower's ranks."""
        found = super().totals(stage, batch)
        self.bridge.finish()
        self.relay.totals(stage, found)
        return found

    def predict(self, batch: Any) -> Any:
        """Return the module's ``output_step`` for this replica's share of a batch, and tell the tower's ranks."""
        output = super().predict(self._own(batch))
        self.bridge.finish()
        self.relay.outputs(output)
        return output

    def _split(self, batch: Any) -> tuple[list[int], Sequence[Any]]:
        # That of an empty batch asks for its contents.
        return super()._split(batch if is_empty(batch) else self._own(batch))

    def _own(self, batch: Any) -> Any:
        if is_empty(batch):
            return emptied(self._own(contents(batch)))
        return _shares(self._module, batch, self.placement.readers)[self.model.mesh.rank("dp") % self.placement.readers]


class TowerStepper(Stepper):
    """Runs the steps of the tower.

    Args:
        runner: its passes.
        relay: from the language model's ranks.
    """

    def __init__(self, *args: Any, runner: TowerRunner, relay: Relay) -> None:
        super().__init__(*args)
        self.runner = runner
        self.relay = relay
        self.logs = _logs(self, runner.placement, relay.host)

    def train(self, args: tuple[Any, ...], number: int, scale: float, sync: bool) -> tuple[Any, StepReport | None]:
        """Run forward and backward of the images; the gradients that come back have the scale."""
        assert self.engine is not None
        self.precision.begin(number)
        sizes, micro_batches = self._split(args[0])
        samples = sum(sizes)
        self.has_gradients = True
        passes = partial(self.runner.train, engine=self.engine, sync=sync)
        shared = self.logs.shared(self.module, "train")
        with self.micro_batches.step(samples), shared, self.precision.step(sync):
            self.step.runner((scale, sync), self.runner.joined(micro_batches), passes)
        self.runner.bridge.finish()
        values = self.relay("train")
        loss, tokens = values.pop("loss"), values.pop("num_tokens")
        return loss, StepReport(loss, tokens, values, samples * self.runner.placement.lanes)

    def totals(self, stage: str, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
        """Send the features of an evaluation batch, and return the totals of the language model."""
        _, micro_batches = self._split(batch)
        self.runner.evaluate(self.runner.joined(micro_batches))
        self.runner.bridge.finish()
        return self.relay.totals(stage)

    def predict(self, batch: Any) -> Any:
        """Send the features of a batch, and return the outputs of the lane's replicas of the language model."""
        placement = self.runner.placement
        rows = _shares(self._module, contents(batch), placement.readers)
        self.runner.evaluate(self.runner.joined([emptied(rows) if is_empty(batch) else rows]))
        self.runner.bridge.finish()
        every = self.relay.outputs()
        mesh = placement.language
        # The first rank of each replica tells; all of its ranks have the output.
        first = {mesh.rank("dp", of=rank): rank for rank in reversed(mesh.members)}
        found = [every[first[replica]] for replica in placement.replicas]
        if is_empty(batch):
            return None
        return torch.cat([each.to(self.model.device) for each in found]) if _are_tensors(found) else found

    def _split(self, batch: Any) -> tuple[list[int], Sequence[Any]]:
        """Return the sizes of the lane's micro-batches in samples, and for each those of its replicas side by side."""
        assert isinstance(self.module, VLMModule)
        if is_empty(batch):
            return [], [emptied(self._split(contents(batch))[1][0])]
        shares = _shares(self._module, batch, self.runner.placement.readers)
        divided = [Stepper._split(self, share) for share in shares]
        rows = list(zip(*(parts for _, parts in divided), strict=True))
        language = self.runner.placement.language
        multiple = self.runner.language.token_multiple(language)
        for each in (each for row in rows for each in row):
            check_images(self.module.config, each.parts()[0])  # while images are those of the batch
            self.module.count_work(each, language.cp == 1 and skips(each, multiple))
        return [sum(row) for row in zip(*(sizes for sizes, _ in divided), strict=True)], rows


def _logs(stepper: Stepper, placement: TowerPlacement, host: dist.ProcessGroup | None) -> StageLogs:
    """Share what steps log with all ranks. Those of the tower log what the first replica of their lane does."""
    language, axes = placement.language, ("dp", "cp", "tp")
    pipelines: dict[tuple[int, ...], list[int]] = {}
    for rank in sorted(language.members, key=lambda rank: language.rank("pp", of=rank)):
        pipelines.setdefault(tuple(language.rank(axis, of=rank) for axis in axes), []).append(rank)
    own = (placement.replicas[0], 0, 0) if placement.is_tower else tuple(language.rank(axis) for axis in axes)
    return StageLogs(
        list(pipelines.values()),
        list(pipelines).index(own),
        lambda: dist.group.WORLD,
        lambda: host,
        stepper.model.device,
        stepper.step,
    )


def _are_tensors(found: Sequence[Any]) -> bool:
    return all(isinstance(each, Tensor) for each in found)


def _shares(module: Any, batch: Any, readers: int) -> Sequence[Any]:
    """Divide the batch of a lane among the replicas of the language model, in order.

    Raises:
        DataError: it does not divide.
    """
    if readers == 1:
        return [batch]
    samples = count_samples(batch)
    if samples % readers:
        raise DataError(
            f"a batch has {samples} samples, and {readers} replicas of the language model share the images of one "
            f"replica of the tower; give each batch a multiple of {readers} samples."
        )
    shares: Sequence[Any] = module.split_batch(batch, samples // readers)
    return shares
