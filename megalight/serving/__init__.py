"""Serving: generation from Python, and over HTTP."""

from typing import TYPE_CHECKING

from megalight.imports import lazy_members

if TYPE_CHECKING:
    from megalight.serving.async_llm import AsyncLLM as AsyncLLM
    from megalight.serving.embeddings import EmbeddingOutput as EmbeddingOutput
    from megalight.serving.engine_loop import EngineLoop as EngineLoop
    from megalight.serving.engine_loop import EngineOutput as EngineOutput
    from megalight.serving.engine_loop import EngineRequest as EngineRequest
    from megalight.serving.llm import LLM as LLM
    from megalight.serving.llm import GenerationOutput as GenerationOutput
    from megalight.serving.served_model import ServedModel as ServedModel

_MEMBERS = {
    "EmbeddingOutput": "megalight.serving.embeddings",
    **dict.fromkeys(("EngineLoop", "EngineOutput", "EngineRequest"), "megalight.serving.engine_loop"),
    **dict.fromkeys(("LLM", "GenerationOutput"), "megalight.serving.llm"),
    "AsyncLLM": "megalight.serving.async_llm",
    "ServedModel": "megalight.serving.served_model",
}

# Late: a coordinator needs neither torch nor models, and a server no Lightning.
__getattr__ = lazy_members(__name__, _MEMBERS)
