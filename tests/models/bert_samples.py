"""A small BERT and batches for it."""

from __future__ import annotations

import torch

from megalight.models.bert import Bert, BertConfig, InitConfig
from megalight.nn.init import initialize

SIZES = {
    "num_layers": 2,
    "hidden_size": 24,
    "num_heads": 4,
    "vocab_size": 61,
    "max_sequence_length": 20,
    "ffn_hidden_size": 40,
    "init": InitConfig(std=0.3, scale_residual=False),
}


def build(**more) -> Bert:
    """In float64, with norms and biases that do something."""
    model = Bert(BertConfig(**{**SIZES, **more})).double()
    initialize(model, 5)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            with torch.no_grad():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def packed(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, token types and labels (a third of them count) of sequences end to end."""
    generator = torch.Generator().manual_seed(7)
    count = sum(lengths)
    tokens, types = (torch.randint(0, high, (count,), generator=generator) for high in (61, 2))
    labels = torch.randint(0, 61, (count,), generator=generator)
    return tokens, types, labels.masked_fill(torch.rand(count, generator=generator) > 0.3, -100)
