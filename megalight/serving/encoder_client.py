"""An encoder behind a server: it gives embeddings of texts that come at any time, and completes none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence

from megalight.errors import ConfigurationError
from megalight.inference.blocks import BLOCK_SIZE
from megalight.inference.grammar import GrammarSource
from megalight.inference.weights import NewWeights
from megalight.serving.async_llm import AsyncClient, InFlight
from megalight.serving.embeddings import EmbeddingModel, EmbeddingOutput
from megalight.serving.engine_loop import EngineOutput, EngineRequest
from megalight.serving.engine_status import EngineStatus
from megalight.serving.served_model import ModelText, Prompt


class AsyncEncoder(AsyncClient):
    """An encoder that gives embeddings of texts which come at any time. It completes none."""

    def __init__(self, model: EmbeddingModel) -> None:
        longest = model.max_sequence_length
        blocks = -(-longest // BLOCK_SIZE)
        super().__init__(
            ModelText(
                tokenizer=model.words, vocab_size=model.vocab_size, max_sequence_length=longest, num_blocks=blocks
            )
        )
        self.encoder, self._running, self._paused = model, asyncio.Lock(), False
        self._waiting = 0

    async def embed(self, prompts: Sequence[Prompt], dimensions: int | None = None) -> list[EmbeddingOutput]:
        """Return embeddings; see :meth:`LLM.embed`. One request runs at a time, in a thread."""

        def run() -> list[EmbeddingOutput]:
            return self.encoder.embed([self.encoder.ids_of(prompt) for prompt in prompts], dimensions)

        self._waiting += len(prompts)
        try:
            async with self._running:
                return await asyncio.to_thread(run)
        finally:
            self._waiting -= len(prompts)

    def subscribe(self, requests: Sequence[EngineRequest]) -> AsyncIterator[list[EngineOutput]]:
        """Refuse.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("an encoder generates no text; ask for embeddings.")

    async def prepare(self, grammar: GrammarSource) -> None:
        """Do nothing."""

    @property
    def unfinished(self) -> int:
        """Number of texts that run or wait."""
        return self._waiting

    @property
    def engines(self) -> Mapping[str, EngineStatus]:
        """None."""
        return {}

    async def pause(self) -> None:
        """Let requests wait until :meth:`resume`."""
        if not self._paused:
            await self._running.acquire()
            self._paused = True

    async def suspend(self) -> None:
        """Do the same: there is no cache."""
        await self.pause()

    async def resume(self) -> None:
        """Go on."""
        if self._paused:
            self._paused = False
            self._running.release()

    async def update_weights(self, weights: NewWeights, *, in_flight: InFlight = "keep") -> int:
        """Refuse.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("weights of an encoder cannot be replaced; start it again.")

    async def shutdown(self) -> None:
        """Do nothing."""
