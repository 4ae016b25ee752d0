"""Runs in 8 bits on one GPU: no step makes the host wait, and losses stay near those of torch alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megalight.models.gpt.model import GPT
from megalight.models.gpt.module import GPTModule
from megalight.nn.init import initialize
from megalight.ops.common import measuring
from megalight.ops.quantize import amax_history, amax_of
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.precision import LowPrecisionOptions, apply_low_precision
from megalight.plugins.precision import MegatronLowPrecision
from megalight.plugins.transformer_engine.low_precision import why_not
from megalight.strategies import MegatronStrategy
from megalight.types import TokenBatch
from tests.ops.checks import error
from tests.strategies.test_gpu import batches, watched
from tests.strategies.training import ADAM, CLIP, CONFIGS, SEED, by_hand

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:You defined a `validation_step`")]
STEPS = 10


def fit(plugin: MegatronLowPrecision) -> tuple[list[float], GPTModule]:
    module = GPTModule(CONFIGS["gqa"], optimizer=ADAM, seed=SEED)
    strategy = MegatronStrategy(micro_batch_size=1, precision_plugin=plugin)
    options = {"strategy": strategy, "max_steps": STEPS, "gradient_clip_val": CLIP}
    return watched(module, batches(STEPS), True, **options), module


@pytest.mark.parametrize(
    "options",
    [{"recipe": "tensorwise"}, {"recipe": "delayed"}, {"recipe": "rowwise"}, {"primary_weights": True}],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("implementation", ["own", "transformer_engine"])
def test_steps_do_not_wait_for_the_device(options: dict[str, Any], implementation: Any) -> None:
    chosen = LowPrecisionOptions(**options)
    if implementation == "transformer_engine":
        reason = why_not("cuda", chosen.schemes()) or ("no primary weights" if chosen.primary_weights else None)
        if reason is not None:
            pytest.skip(reason)
    losses, module = fit(MegatronLowPrecision(chosen, implementation=implementation))
    expected = by_hand(CONFIGS["gqa"], STEPS, torch.float32, "cuda")["losses"]
    np.testing.assert_allclose(losses, expected, rtol=5e-2)
    assert {parameter.dtype for parameter in module.model.parameters()} == {torch.bfloat16}


def test_passes_for_magnitudes_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, attention's outputs and the last layer's gradient are looked through; who wrote the rest has told."""
    passes: list[torch.Size] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        passes.append(x.shape)
        return amax_of(x)

    monkeypatch.setattr(amax_history, "amax_of", counted)
    ids = torch.randint(0, 101, (2, 25), device="cuda")
    batch = TokenBatch(ids[:, :-1], ids[:, 1:], torch.ones(2, 24, device="cuda"))
    found = []
    for measure in (True, False):
        passes.clear()
        network = GPT(CONFIGS["gqa"])
        initialize(network, 1, "model.")
        network.to("cuda", torch.bfloat16)
        session = apply_low_precision(network, LowPrecisionOptions(), ParallelMesh())
        layers = len(network.layers)
        if not measure:
            for module in network.modules():
                if isinstance(getattr(module, "backend", None), str):
                    module.backend = measuring(module.backend, wanted=False)
        with session.step(0):
            output = network(batch.tokens.reshape(-1), batch.sequences, labels=batch.labels.reshape(-1))
            output.losses.float().mean().backward()
        assert len(passes) == (5 * layers + 1 if measure else 12 * layers)
        found.append([output.losses, *(p.grad for p in network.layers.parameters())])
    assert torch.equal(found[0][0], found[1][0])
    for measured, plain in zip(*found, strict=True):
        assert error(measured, plain) < 2e-2  # attention adds gradients up in any order
