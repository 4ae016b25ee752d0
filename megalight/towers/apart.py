"""A vision tower and a language model on disjoint ranks, trained together, without Lightning.

::

    run = TowersApart(config, tower=Side(ranks=2, tensor_parallel=2), language=Side(ranks=2), optimizer=make_optimizer)
    for number in range(steps):
        outcome = run.forward_backward(lambda replica: micro_batches_of(replica, number))
        run.clip_grad_norm(1.0)
        run.step()

The tower's ranks come first. They read the images of micro-batches, and send what the projector makes of them over a
:class:`~megalight.parallel.bridge.BridgeCommunicator`; gradients come back. The result is that of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.errors import DataError
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.frozen import freeze as freeze_parameters
from megalight.models.vlm.model import VLM
from megalight.parallel.bridge import BridgeCommunicator
from megalight.parallel.data_parallel import DataParallel
from megalight.parallel.model import ParallelModel
from megalight.parallel.random import RandomStreams
from megalight.parallel.source import Source
from megalight.parallel.step import Outcome
from megalight.towers.arriving import Arrivals
from megalight.towers.division import Division
from megalight.towers.encoder import Encoder
from megalight.towers.language import LanguageTask
from megalight.towers.part import part_of
from megalight.towers.side import Side
from megalight.training import Training

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Read = Callable[[int], Sequence[ImageTextBatch]]
"""Index of a data-parallel replica of the language model -> its micro-batches of this step, on the model's device."""


class TowersApart:
    """One training run of a vision-language model whose towers have ranks of their own.

    All processes make it together, after ``torch.distributed.init_process_group``. The first ``tower.ranks`` ranks have
    the vision tower and the projector, the next ``language.ranks`` everything else. Each has its own data-parallel
    engine and optimizer; the norm of gradients is that of both.

    If the tower has fewer replicas, each reads the images of several replicas of the language model. If it has more,
    they divide the images of each micro-batch among them, in order, by rows.

    Args:
        config: the model.
        tower, language: the layouts. One of their data-parallel degrees must divide the other.
        optimizer: makes the optimizer of this rank's parameters; it updates each element by itself (Adam, SGD).
        seed: of the initial values, which are those of one device.
        source: values to begin from.
        freeze: globs over names of parameters that are not trained; of the tower's ranks, some must be.
        data_parallel: how replicas share gradients and optimizer state, on either side.
        device: of the parameters.
        dtype: of the floating-point parameters; None: as they are.

    Attributes:
        is_tower: whether this rank has the tower.
        model: this rank's part of its side's model.
        replicas: indices of the replicas of the language model whose micro-batches this rank reads.

    Raises:
        LayoutError: the ranks do not add up, or a side cannot have its layout; the message names it.
        ConfigurationError: a pattern of ``freeze`` matches nothing, or nothing is left to train on the tower's ranks.
    """

    def __init__(
        self,
        config: VLMConfig,
        *,
        tower: Side,
        language: Side,
        optimizer: MakeOptimizer,
        seed: int = 1234,
        source: Source | None = None,
        freeze: Sequence[str] = (),
        data_parallel: DataParallel | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        division = Division.of(tower, language, world, rank)
        options = tower.tower_options() if division.is_tower else language.options()
        self.config = config
        self.is_tower, self.mesh, self.replicas = division.is_tower, division.mesh, division.replicas
        with torch.device("meta"):
            whole = VLM(config)
        freeze_parameters(whole, freeze)
        self.model = ParallelModel.build(
            part_of(whole, division.is_tower),
            self.mesh,
            options,
            device=device,
            dtype=dtype,
            seed=seed,
            source=source,
            fill=False,
        )
        RandomStreams(self.mesh).seed(seed)
        self.bridge = BridgeCommunicator(division.tower, division.language, device=device)
        self._first = division.language.members.start
        reader = LanguageTask(Arrivals(self.bridge, self.model.token_multiple), self.model.token_multiple)
        self.training = Training(self.model, optimizer(self.model.parameters()), reader, data_parallel=data_parallel)
        # Gradients are those of both models.
        self.training.engine.main_gradients.everyone = dist.group.WORLD
        self._encoder = Encoder(config, self.model, self.bridge, division, language.options())
        self._fresh = True

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of this rank's shard."""
        return self.training.optimizer

    def forward_backward(self, read: Read) -> Tensor:
        """Run a step forward and backward; gradients are reduced. Return the mean loss, equal on all ranks.

        Args:
            read: called for each of :attr:`replicas`. The replicas of the language model have as many micro-batches.

        Raises:
            DataError: they have not.
        """
        batches = [read(replica) for replica in self.replicas]
        if len({len(each) for each in batches}) > 1 or not batches[0]:
            raise DataError(
                f"replicas {list(self.replicas)} have {[len(each) for each in batches]} micro-batches; give each as "
                "many, at least one."
            )
        loss = torch.zeros((), dtype=torch.float64, device=self.model.device)
        if self.is_tower:
            self._encode(list(zip(*batches, strict=True)))
        else:
            outcome: Outcome = self.training.forward_backward(batches[0])
            loss.copy_(outcome.loss)
        self.bridge.finish()
        # From the first rank of the language model; all of them have it.
        dist.broadcast(loss, self._first)
        return loss

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale the gradients of both models down to a norm of ``max_norm`` at most; return the norm before."""
        return self.training.clip_grad_norm(max_norm)

    def step(self) -> None:
        """Update the parameters of this rank's side."""
        self.training.optimizer.step()
        self._fresh = True

    def _encode(self, micro_batches: Sequence[Sequence[ImageTextBatch]]) -> None:
        engine = self.training.engine
        if self._fresh:
            self._fresh = False
            engine.zero_grad()
        self._encoder.train(micro_batches, engine)
