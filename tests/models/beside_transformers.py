"""Models of ``transformers`` beside ours with the same weights."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.hugging_face import (
    config_from_transformers,
    config_to_transformers,
    from_transformers,
    to_transformers,
)
from megalight.nn.canonical import canonical_tensors
from megalight.types import PackedSequences
from tests.support.canonical import load_canonical
from tests.support.reference_gpt import relative_error


def files_of(model: Any, folder: Path) -> dict[str, Tensor]:
    """The tensors as files hold them."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def ours_of(model: Any, folder: Path) -> tuple[GPT, dict[str, Tensor]]:
    """Our model in float64, and the tensors that it was read from."""
    config, files = config_from_transformers(model.config.to_dict()), files_of(model, folder)
    ours = GPT(config).double()
    load_canonical(ours, from_transformers(files, config))
    return ours, files


def assert_round_trip(model: Any, ours: GPT, files: Mapping[str, Tensor], kind: str | None = None) -> None:
    """Compare tensors and configuration that are written with those that were read.

    Args:
        model: theirs.
        ours: the same with our modules.
        files: tensors by their names in published files.
        kind: the ``model_type`` to write, if several can say the same. None: the one that is found.
    """
    back = to_transformers(canonical_tensors(ours), ours.config)
    assert back.keys() == files.keys()
    assert all(torch.equal(back[key].double(), files[key].double()) for key in back)
    values = config_to_transformers(ours.config, kind)
    assert values["model_type"] == model.config.model_type
    again = type(model.config)(**copy.deepcopy(values))  # some change what they are given
    assert config_to_transformers(config_from_transformers(again.to_dict()), kind) == values


def assert_equal(model: Any, ours: GPT, folder: Path) -> None:
    """Compare logits, losses and gradients. Both models hold gradients in place of weights afterwards."""
    assert ours.config == GPTConfig.from_dict(ours.config.to_dict())
    tokens = torch.randint(0, 53, (3, 17))
    answer = model(tokens, labels=tokens)
    answer.loss.backward()
    sequences = PackedSequences.of_uniform(3, 17)
    logits = ours(tokens.flatten(), sequences).logits
    assert relative_error(logits.view_as(answer.logits), answer.logits) < 2e-6
    labels = torch.roll(tokens, -1, 1)
    losses = ours(tokens.flatten(), sequences, labels=labels.flatten()).losses.view(3, 17)[:, :-1]
    assert relative_error(losses.mean(), answer.loss) < 2e-6
    losses.mean().backward()
    # gradients travel as weights do, through their own writer
    with torch.no_grad():
        for parameter in [*model.parameters(), *ours.parameters()]:
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    expected, found = from_transformers(files_of(model, folder / "gradients"), ours.config), canonical_tensors(ours)
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        assert relative_error(gradient, expected[key]) < 2e-5, key
