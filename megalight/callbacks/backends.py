"""Backends for ops that a model's configuration has no setting for."""

from __future__ import annotations

from collections.abc import Mapping

import lightning.pytorch as pl

from megalight.ops.choice import use_backends


class UseBackends(pl.Callback):
    """Each op named runs on the backend named, wherever nothing else is asked for; ``auto`` comes back at the end.

    Args:
        names: op -> backend, as ``megalight doctor`` lists them: ``{"weight_gradient": "transformer_engine"}``.

    Raises:
        ConfigurationError: when a run is set up: no such op.
        BackendError: the op has no such backend, then; or, at its first use, that one cannot serve.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self.names = dict(names)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Before the model is built."""
        use_backends(**self.names)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """After the last step."""
        use_backends(**dict.fromkeys(self.names, "auto"))
