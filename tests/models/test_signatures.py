"""Methods that a user's module overrides take what they are called with."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest

from megalight.errors import ConfigurationError
from megalight.models.bert.module import BertModule
from megalight.models.eagle.module import EagleModule
from megalight.models.gpt import GPTConfig
from megalight.models.gpt.module import GPTModule
from megalight.models.module import check_signatures
from megalight.models.vlm.module import VLMModule

CONFIG = GPTConfig(num_layers=1, hidden_size=8, num_heads=2, vocab_size=11, max_sequence_length=8)
WRITE = "write def forward_step(self, model, batch, carry=None)."


def gpt(**methods: Any) -> GPTModule:
    """Return a module of a subclass with these methods."""
    module: GPTModule = type("Mine", (GPTModule,), methods)(CONFIG)
    return module


@pytest.mark.parametrize(
    ("name", "method", "message"),
    [
        (
            "forward_step",
            lambda self, batch, carry=None: carry,
            "Mine.forward_step(batch, carry=None) is called as forward_step(model, batch, carry), which it does not "
            f"take (too many positional arguments); {WRITE}",
        ),
        (
            "forward_step",
            lambda self, model, batch, carry: carry,
            "Mine.forward_step(model, batch, carry) is called as forward_step(model, batch), which it does not take "
            f"(missing a required argument: 'carry'); {WRITE}",
        ),
        (
            "loss_step",
            lambda self, carry: carry,
            "Mine.loss_step(carry) is called as loss_step(carry, batch), which it does not take (too many positional "
            "arguments); write def loss_step(self, carry, batch).",
        ),
        ("frozen_models", {}, "Mine.frozen_models is a dict, and it is called as a method; write def"),
        ("check_data", lambda self: None, "write def check_data(self, datamodule)."),
        ("describe_model", lambda self, more: {}, "write def describe_model(self)."),
    ],
)
def test_a_method_that_cannot_be_called_is_refused(name: str, method: Any, message: str) -> None:
    module = gpt(**{name: method})
    with pytest.raises(ConfigurationError) as caught:
        module.configure_model()
    assert message in str(caught.value)


def test_any_way_to_take_the_arguments_is_accepted() -> None:
    def named(one: Any, two: Any = 0, *, further: bool = False) -> None:
        return None

    module = gpt(
        forward_step=lambda self, model, batch, carry=None, mine=0: carry,
        loss_step=lambda self, *given, **named: None,
        loss_tokens=staticmethod(len),
        training_step=lambda self, batch: None,
    )
    module.output_step = named  # type: ignore[method-assign, assignment]
    check_signatures(module, pl.LightningModule)


@pytest.mark.parametrize("kind", [GPTModule, VLMModule, BertModule, EagleModule])
def test_our_own_modules_can_be_called(kind: type[pl.LightningModule]) -> None:
    check_signatures(kind.__new__(kind), pl.LightningModule)
