"""GPT: decoder-only language models in the styles of Llama, Qwen and GPT-2."""

from importlib import import_module
from typing import Any

from megalight.models.gpt.config import AttentionConfig as AttentionConfig
from megalight.models.gpt.config import BackendConfig as BackendConfig
from megalight.models.gpt.config import DropoutConfig as DropoutConfig
from megalight.models.gpt.config import GPTConfig as GPTConfig
from megalight.models.gpt.config import InitConfig as InitConfig
from megalight.models.gpt.config import NormConfig as NormConfig
from megalight.models.gpt.config import PositionConfig as PositionConfig
from megalight.models.gpt.model import GPT as GPT
from megalight.models.gpt.model import Output as Output


def __getattr__(name: str) -> Any:
    """``GPTModule`` on first use: it brings Lightning, which the model itself does without."""
    if name == "GPTModule":
        return import_module("megalight.models.gpt.module").GPTModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
