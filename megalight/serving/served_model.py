"""A model with its tokenizer and its engine, which servers and :class:`LLM` have in common. It needs no Lightning."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch

from megalight.data.chat.template import ChatTemplate
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, LayoutError, MegalightError, integer
from megalight.inference import TextGenerator
from megalight.inference.blocks import BLOCK_SIZE
from megalight.inference.parallel import GenerativeModel
from megalight.inference.text import begun
from megalight.inference.weights import LoadedWeights
from megalight.parallel.mesh import ParallelMesh, join_ranks
from megalight.serving.engine_loop import EngineLoop, EngineOptions
from megalight.serving.rank_processes import LedWeights, RankProcesses, ReplicaRanks

Prompt: TypeAlias = str | Sequence[int]
"""A text, or token ids."""
Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation: ``[{"role": "user", "content": "Hello"}]``."""
NO_EMBEDDINGS = "generates text, and has no embeddings; ask a model that was trained for them."


@dataclass(kw_only=True)
class ModelText:
    """What requests to a model are made of. The weights may be in other processes.

    Attributes:
        tokenizer: converts text to token ids and back; None: prompts are ids, and completions have no text.
        ends: tokens that end a completion.
        start: tokens that are put before texts that do not begin with them.
        max_sequence_length: of the model, in tokens.
        num_blocks: blocks of an engine's cache.
    """

    tokenizer: Tokenizer | None
    ends: frozenset[int] = frozenset()
    start: tuple[int, ...] = ()
    vocab_size: int
    max_sequence_length: int
    num_blocks: int

    @cached_property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template.

        Raises:
            DataError: there is none.
        """
        return ChatTemplate.of(self.words)

    @cached_property
    def template_ends(self) -> frozenset[int]:
        """Tokens that end an answer."""
        return frozenset(self.template.ends(self.words))

    def prepare_template(self) -> None:
        """Run the template, if there is one, so that no request waits: it imports ``transformers``."""
        if self.tokenizer is not None and self.tokenizer.chat_template is not None:
            with suppress(MegalightError):  # requests get it
                _ = self.template_ends

    def grammar_ends(self) -> frozenset[int]:
        """Return the tokens that end a text of a grammar: those of documents, and of answers if there is a template."""
        return self.ends if self.words.chat_template is None else self.ends | self.template_ends

    @property
    def words(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            ConfigurationError: there is none.
        """
        if self.tokenizer is None:
            raise ConfigurationError("there is no tokenizer, so prompts must be token ids; give tokenizer=, too.")
        return self.tokenizer

    def ids_of(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt. An empty text is the end of a document, as in front of a new one.

        Raises:
            ConfigurationError: it is a text, and there is no tokenizer.
            DataError: the text holds half of a surrogate pair.
        """
        if not isinstance(prompt, str):
            return list(prompt)
        eod = self.words.eod_id
        return begun(self.words.encode(prompt), self.start) or ([] if eod is None else [eod])

    def chat_ids(self, messages: Messages, tools: list[Any] | None = None) -> list[int]:
        """Return the token ids of a conversation, up to where the assistant's answer begins.

        Raises:
            DataError: there is no template, or it refuses the messages.
        """
        return self.ids_of(self.template.render(messages, tools, answer=True))

    def room(self, prompt: Sequence[int]) -> int:
        """Return how many tokens a completion of this prompt can have: the model's, and the cache's; at least 1."""
        return max(1, min(self.max_sequence_length, self.num_blocks * BLOCK_SIZE + 1) - len(prompt))


@dataclass(kw_only=True)
class ServedModel(ModelText):
    """A model with its tokenizer and its engine: what :class:`LLM` and :class:`AsyncLLM` have in common.

    Attributes:
        model: the model, whole or this rank's part.
        ranks: the processes that this one has started for other parts of the model.
        weights: the model's; None: no others may take their place.
    """

    model: GenerativeModel
    options: EngineOptions
    ranks: RankProcesses | None = None
    weights: LoadedWeights | None = None

    @classmethod
    def of(
        cls,
        model: GenerativeModel,
        tokenizer: Tokenizer | None,
        ends: frozenset[int],
        start: tuple[int, ...] = (),
        options: EngineOptions | None = None,
    ) -> ServedModel:
        """Return one for a model."""
        options, longest = options or EngineOptions(), model.config.max_sequence_length
        return cls(
            tokenizer=tokenizer,
            ends=ends,
            start=start,
            vocab_size=model.config.vocab_size,
            max_sequence_length=longest,
            num_blocks=options.num_blocks(longest),
            model=model,
            options=options,
        )

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        tensor_parallel: int = 1,
        replica: ReplicaRanks | None = None,
        device: str | torch.device | None = None,
        options: EngineOptions | None = None,
        **weights: Any,
    ) -> ServedModel:
        """Load a model; see :class:`LLM`. ``replica``: its ranks, if experts are divided."""
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        world, ranks = int(os.environ.get("WORLD_SIZE") or 1), None
        if integer("tensor_parallel", tensor_parallel) != world and world > 1:
            raise LayoutError(
                f"tensor_parallel is {tensor_parallel}, and there are {world} processes; start the program by torchrun "
                f"--nproc-per-node {tensor_parallel}, or by itself."
            )
        mesh: ParallelMesh | None
        if tensor_parallel > world or replica is not None:
            replica = replica or ReplicaRanks(tensor_parallel=tensor_parallel)
            ranks = RankProcesses(path, replica, where, options or EngineOptions(), weights)
            mesh, where = ranks.mesh, ranks.device
        else:
            mesh, where = join_ranks(where, tp=tensor_parallel)
        try:
            found = TextGenerator.from_checkpoint(path, device=where, mesh=mesh, **weights)
            served = cls.of(found.model, found.tokenizer, frozenset(found.all_ends()), found.start, options)
            served.ranks, served.weights = ranks, found.weights
            if ranks is not None:
                _ = served.loop  # the other ranks make theirs now
        except BaseException:
            if ranks is not None:
                ranks.close()
            raise
        return served

    @cached_property
    def loop(self) -> EngineLoop:
        """The engine's loop, which the first caller makes."""
        engine = self.options.engine(self.model, self.tokenizer, first_rank_only=self.ranks is not None)
        engine.create_cuda_graphs()  # no request waits for a recording later
        weights = self.weights
        if self.ranks is not None and weights is not None:
            weights = LedWeights(weights, engine)
        return EngineLoop(engine, self.tokenizer, self.grammar_ends, weights)

    def close(self) -> None:
        """End the processes of the other ranks."""
        if self.ranks is not None:
            self.ranks.close()
