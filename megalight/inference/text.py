"""Complete text from a checkpoint: the model from its configuration, the tokenizer from the file saved along."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from megalight import checkpoint
from megalight.checkpoint import Checkpoint, publish
from megalight.data.tokenizer import Tokenizer
from megalight.errors import CheckpointError, DataError
from megalight.inference.generate import generate
from megalight.models.family import family
from megalight.models.gpt import GPT
from megalight.models.saved import description, saved_model

TOKENIZER = "tokenizer.json"
"""The file in a checkpoint that holds the tokenizer."""


def load_model(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    base: str | os.PathLike[str] | None = None,
) -> GPT:
    """The model of a checkpoint, whole, in evaluation mode, whatever layout saved it.

    Args:
        path: the checkpoint's folder.
        device: where the weights go.
        dtype: of the weights; None keeps what was saved.
        base: the weights that training began with, for a checkpoint that holds adapters alone.

    Raises:
        CheckpointError: missing, torn, or it does not say which model it holds.
    """
    return _load(checkpoint.open(path), torch.device(device), dtype, base)


def _load(
    opened: Checkpoint, device: torch.device, dtype: torch.dtype | None, base: str | os.PathLike[str] | None
) -> GPT:
    known = family(description(opened)["family"])
    if not known.generates:
        raise CheckpointError(f"checkpoint {opened.path} holds a {known.name} model, which writes no text.")
    return cast(GPT, saved_model(opened, device, dtype, base).root.eval())


@dataclass(frozen=True)
class TextGenerator:
    """A model with its tokenizer.

    Attributes:
        model: whole, in evaluation mode.
        tokenizer: text to token ids and back.
    """

    model: GPT
    tokenizer: Tokenizer

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        base: str | os.PathLike[str] | None = None,
    ) -> TextGenerator:
        """Load both from a checkpoint's folder.

        Args:
            path: the folder.
            tokenizer: a ``tokenizer.json`` or its folder, to use instead of the checkpoint's own.
            device: where the weights go.
            dtype: of the weights; None keeps what was saved.
            base: see :func:`load_model`.

        Raises:
            CheckpointError: missing, torn, or no model or tokenizer in it.
            DataError: the tokenizer has more tokens than the model.
        """
        opened = checkpoint.open(path)
        found = Tokenizer.load(tokenizer or _tokenizer_folder(opened))
        model = _load(opened, torch.device(device), dtype, base)
        if found.vocab_size > model.config.vocab_size:
            raise DataError(
                f"the tokenizer has {found.vocab_size} tokens and the model {model.config.vocab_size}; "
                "use the tokenizer that the model was trained with."
            )
        return cls(model, found)

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> list[str]:
        """What the model writes after each prompt, up to the end of the document. An empty prompt starts a document.

        Args:
            prompts: texts.
            max_new_tokens: where a completion ends at the latest.
            temperature: see :class:`~megalight.inference.sampling.Sampling`, as for ``top_k`` and ``top_p``.
            top_k: see there.
            top_p: see there.
            seed: of the draws; None draws anew each time.
        """
        eod = self.tokenizer.eod_id
        ids = [self.tokenizer.encode(text) or ([] if eod is None else [eod]) for text in prompts]
        generator = None
        if seed is not None:
            generator = torch.Generator(next(self.model.parameters()).device).manual_seed(seed)
        completions = generate(
            self.model,
            ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos_id=eod,
            generator=generator,
        )
        return [self.tokenizer.decode(completion, skip_special=True) for completion in completions]


def _tokenizer_folder(opened: Checkpoint) -> os.PathLike[str]:
    """Where the tokenizer that was saved along lies."""
    try:
        opened.file(TOKENIZER)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Name the tokenizer that the model was trained with.") from error
    return publish.resolve(opened.path) / "files"
