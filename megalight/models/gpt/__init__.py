"""GPT: decoder-only language models in the styles of Llama, Qwen and GPT-2."""

from megalight.models.gpt.config import AttentionConfig as AttentionConfig
from megalight.models.gpt.config import BackendConfig as BackendConfig
from megalight.models.gpt.config import DropoutConfig as DropoutConfig
from megalight.models.gpt.config import GPTConfig as GPTConfig
from megalight.models.gpt.config import InitConfig as InitConfig
from megalight.models.gpt.config import NormConfig as NormConfig
from megalight.models.gpt.config import PositionConfig as PositionConfig
from megalight.models.gpt.model import GPT as GPT
from megalight.models.gpt.model import Output as Output
