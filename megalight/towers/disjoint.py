"""Disjoint placement: the tower's ranks send features of images to the language model, and get gradients back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.errors import DataError
from megalight.models.vlm.config import VLMConfig
from megalight.parallel.bridge import BridgeCommunicator
from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.data_parallel.unit_memory import UnitPass
from megalight.parallel.layout import Layout
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline.schedules import ActionKind, build
from megalight.towers.placement import TowerPlacement, concatenated, consecutive, features, features_of, padded, take
from megalight.types.batch import contents


class FeatureReceiver:
    """Receives the features of each micro-batch, and sends their gradients back.

    Args:
        multiple: features are padded to a multiple of this, for sequence parallelism.
    """

    def __init__(self, bridge: BridgeCommunicator, multiple: int) -> None:
        self.bridge = bridge
        self.multiple = multiple

    def __call__(self, batch: ImageTextBatch) -> Tensor:
        """Return the features ``[P, h]`` of the next micro-batch, with padding.

        Raises:
            DataError: the tower has read other images.
        """
        features, expected = self.bridge.recv_forward()["features"], features_of(batch.parts()[0])
        if len(features) != expected:
            raise DataError(
                f"the tower sent {len(features)} rows of features for a micro-batch whose images have {expected}: its "
                "ranks read other samples. Let the order of samples depend on the step and a seed alone, or on "
                "trainer.strategy.distributed_sampler_kwargs."
            )
        if features.requires_grad:
            # Backward passes of the first stage come in the order of its forward passes, as messages must.
            features.register_hook(self._answer)  # type: ignore[no-untyped-call]
        return padded(features, self.multiple)

    def _answer(self, gradient: Tensor) -> None:
        self.bridge.send_backward({"features": gradient})


Together = Sequence[ImageTextBatch]
"""A micro-batch of each replica of the language model that this rank reads images for."""


class TowerRunner:
    """Runs a tower for the micro-batches of a language model on other ranks.

    Args:
        model: the tower and the projector, split.
        bridge: leads to the language model.
        placement: the ranks of both models.
        language: options of the language model, for its schedule.
        context: entered around the code of the model in each micro-batch.
    """

    def __init__(
        self,
        config: VLMConfig,
        model: ParallelModel,
        bridge: BridgeCommunicator,
        placement: TowerPlacement,
        language: Layout,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.config = config
        self.model = model
        self.bridge = bridge
        self.placement = placement
        self.language = language
        self.context = context
        self.trained = any(parameter.requires_grad for parameter in model.parameters())

    def joined(self, micro_batches: Sequence[Any]) -> list[Any]:
        """Return the micro-batches, with empty ones if another lane has more; all ranks call it together."""
        peers = self.model.coupling
        return list(micro_batches) if peers is None else peers.fill_up(micro_batches)

    def train(self, micro_batches: Sequence[Any], engine: DataParallelEngine, sync: bool = True) -> None:
        """Run forward and backward of all micro-batches.

        Args:
            micro_batches: as many as the language model runs, at least one; from :meth:`joined`.
            sync: reduce them, because no further micro-batches follow before the optimizer's step.
        """
        order, batches = self._order(len(micro_batches)), iter(micro_batches)
        with engine.micro_batches(len(micro_batches), sync):
            for number, step in enumerate(order, 1):
                if engine.units is not None:
                    engine.units.follow(self.model.chunks, order[number:])
                if step.forward:
                    self._send(next(batches))
                else:
                    self.bridge.backward()
        if sync:
            engine.finish_grad_sync()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Any]) -> None:
        """Run forward only."""
        for batches in micro_batches:
            self._send(batches)

    def _order(self, micro_batches: int) -> list[UnitPass]:
        """Return the order of passes through the tower.

        As many forward passes come first as the language model begins before it has ended one, and one more. So the
        features of the next micro-batch are there when the language model has sent a gradient, and neither side waits
        for a whole pass of the other.
        """
        forward, backward = UnitPass(0, True), UnitPass(0, False)
        if not self.trained:  # no gradients come back
            return [forward] * micro_batches
        ahead = min(self._begun(micro_batches) + 1, micro_batches)
        return [forward] * ahead + [backward, forward] * (micro_batches - ahead) + [backward] * ahead

    def _begun(self, micro_batches: int) -> int:
        """Return how many micro-batches the language model begins before it first needs to have ended one."""
        options, pp = self.language, self.placement.language.pp
        schedule = options.pipeline
        name, chunks = schedule.schedule, options.virtual_pipeline
        first = build(name, pp, chunks, micro_batches, schedule.group_size)[0]
        most = begun = 0
        for action in (part for each in first for part in each.parts if part.chunk == 0):
            # Gradients of features come with those of the first chunk's input.
            begun += {ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.INPUT_GRADIENT: -1}.get(action.kind, 0)
            most = max(most, begun)
        return most

    def _send(self, batches: Any) -> None:
        """Send the features of a micro-batch, which may be empty."""
        with self.context():
            found, parts = self._features(contents(batches))
        self.bridge.send_forward({"features": found}, {"features": parts})

    def _features(self, batches: Together) -> tuple[Tensor, list[int]]:
        """Return the features of the images that this replica reads, and the rows of each destination."""
        images = [batch.parts()[0] for batch in batches]
        if self.placement.shares > 1:
            (whole,) = images
            shares = self.placement.shares
            own = consecutive(whole.lengths, shares)[self.model.mesh.rank("dp") % shares]
            images = [take(whole, own)]
        parts = [features_of(each) for each in images]
        return features(self.config, self.model, concatenated(images)), parts
