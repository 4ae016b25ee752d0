"""BERT: bidirectional encoders trained on masked tokens and the order of sentences."""

from importlib import import_module
from typing import Any

from megalight.models.bert.config import BackendConfig as BackendConfig
from megalight.models.bert.config import BertConfig as BertConfig
from megalight.models.bert.config import DropoutConfig as DropoutConfig
from megalight.models.bert.config import InitConfig as InitConfig
from megalight.models.bert.model import Bert as Bert
from megalight.models.bert.model import Output as Output


def __getattr__(name: str) -> Any:
    """``BertModule`` on first use: it brings Lightning, which the model itself does without."""
    if name == "BertModule":
        return import_module("megalight.models.bert.module").BertModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
