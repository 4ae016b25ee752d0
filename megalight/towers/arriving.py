"""The language model's side of a step: features that come from the ranks of the tower."""

from __future__ import annotations

from torch import Tensor

from megalight.data.multimodal.batch import ImageTextBatch
from megalight.errors import DataError
from megalight.parallel.bridge import BridgeCommunicator
from megalight.towers.language import padded
from megalight.towers.shares import features_of


class Arrivals:
    """Receives the features of each micro-batch, and sends their gradients back.

    Args:
        bridge: comes from the tower.
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
