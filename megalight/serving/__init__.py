"""Serving: generation from Python, and over HTTP."""

from megalight.serving.engine_loop import EngineLoop as EngineLoop
from megalight.serving.engine_loop import EngineOutput as EngineOutput
from megalight.serving.engine_loop import EngineRequest as EngineRequest
from megalight.serving.llm import LLM as LLM
from megalight.serving.llm import AsyncLLM as AsyncLLM
from megalight.serving.llm import GenerationOutput as GenerationOutput
from megalight.serving.llm import ServedModel as ServedModel
