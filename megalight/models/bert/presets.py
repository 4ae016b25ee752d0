"""Published models, by name and size."""

from __future__ import annotations

from megalight.models.bert.config import BertConfig
from megalight.models.config import DropoutConfig
from megalight.registry import Registry

PRESETS: Registry[BertConfig] = Registry("BERT preset")
"""Name -> configuration. Other packages can add their own."""


def preset(name: str) -> BertConfig:
    """Return the configuration of a published model.

    Raises:
        MegalightError: no such preset. The message lists the known ones.
    """
    return PRESETS[name]


def bert(num_layers: int, hidden_size: int, num_heads: int, vocab_size: int = 30522) -> BertConfig:
    """Configure BERT (https://huggingface.co/google-bert) in one of its sizes, with its dropout."""
    return BertConfig(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        vocab_size=vocab_size,
        dropout=DropoutConfig(hidden=0.1, attention=0.1, embedding=0.1),
    )


for _name, _config in {
    "bert_base": bert(12, 768, 12),
    "bert_large": bert(24, 1024, 16),
    "bert_base_cased": bert(12, 768, 12, 28996),
    "bert_large_cased": bert(24, 1024, 16, 28996),
}.items():
    PRESETS.register(_name)(_config)
