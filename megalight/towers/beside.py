"""A vision tower and a language model on the same ranks, each in a layout of its own, without Lightning.

::

    run = TowersBeside(
        config,
        tower=Side(ranks=4),
        language=Side(ranks=4, tensor_parallel=2, sequence_parallel=True),
        optimizer=make_optimizer,
    )
    for number in range(steps):
        loss = run.forward_backward(micro_batches_of(run.replica, number))
        run.clip_grad_norm(1.0)
        run.step()
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.errors import DataError, LayoutError
from megalight.optim import shard_optimizer
from megalight.parallel.data_parallel import DataParallel
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.run_engine import engine_over
from megalight.parallel.step import Step
from megalight.towers.around import Around
from megalight.towers.language import LanguageTask
from megalight.towers.run import Build, MakeOptimizer, Towers
from megalight.towers.side import Side, check_tower


class TowersBeside(Towers):
    """One training run of a vision-language model whose towers share all ranks, but not a layout.

    In each step the tower runs for all micro-batches, then the language model's schedule, then the tower backward.
    Before each pass of the tower, the images of a micro-batch, of all replicas of the language model, are divided among
    the replicas of the tower, so that each has about as many rows. Features come back in the order of the images. The
    tower keeps the activations of all micro-batches; ``tower.recompute`` makes them small. The other arguments are
    those of :class:`~megalight.towers.run.Towers`; each layout is of all ranks.

    Attributes:
        tower, language: this rank's parts of both models.
        replica: the replica of the language model whose micro-batches this rank reads.
    """

    def _divide(self, tower: Side, language: Side, sharing: DataParallel, world: int, rank: int) -> ParallelMesh:
        for name, side in (("tower", tower), ("language model", language)):
            if side.ranks != world:
                raise LayoutError(
                    f"the {name} has {side.ranks} ranks, and there are {world} processes, which both models share; "
                    f"set ranks={world}, or use TowersApart."
                )
        check_tower(tower)
        self._meshes = tower.mesh(rank, 0), language.mesh(rank, 0)
        return self._meshes[1]

    def _begin(
        self, tower: Side, language: Side, optimizer: MakeOptimizer, sharing: DataParallel, build: Build
    ) -> None:
        self.tower = build(True, self._meshes[0], tower.tower_options())
        self.language = build(False, self._meshes[1], language.options())
        self.replica = self.language.mesh.rank("dp")
        models = [self.tower, self.language]
        self.optimizer = optimizer([p for model in models for p in model.parameters()])
        self.engine = engine_over(models, [group["params"] for group in self.optimizer.param_groups], sharing)
        changed = [model.transform_values() for model in models]
        if any(changed):
            self.engine.refresh_masters()
        for model in models:
            self.engine.attach_gather_hooks(model.root)
        shard_optimizer(self.optimizer, self.engine)
        self.optimizer.register_step_post_hook(lambda *_: self.engine.publish())
        self._step = Step(self.language, LanguageTask(lambda batch: self._around(batch), self.language.token_multiple))
        self._step.engine = self.engine
        self._around = Around(self.config, self.tower, self.language, self._step.executor)
        self._step.executor = self._around  # type: ignore[assignment]  # it has the same methods

    def forward_backward(self, micro_batches: Sequence[ImageTextBatch]) -> Tensor:
        """Run a step forward and backward; gradients are reduced. Return the mean loss, equal on all ranks.

        Args:
            micro_batches: those of :attr:`replica`, on the model's device. All replicas have as many.

        Raises:
            DataError: there are none, or replicas have different numbers.
        """
        if not micro_batches:
            raise DataError("there are no micro-batches; give each replica at least one.")
        self._clear()
        mesh, multiple = self.language.mesh, self.language.token_multiple
        shares = [batch.context_share(mesh.rank("cp"), mesh.cp, multiple) for batch in micro_batches]
        return self._step.train(shares).loss
