"""Complete text from a folder alone, a checkpoint or one of ``transformers``: its model and its tokenizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from megalight import checkpoint
from megalight.checkpoint import publish
from megalight.data.tokenizer import Tokenizer
from megalight.errors import CheckpointError, DataError
from megalight.inference.generate import generate
from megalight.models.family import family, family_of_transformers
from megalight.models.folder import is_folder, read_config
from megalight.models.gpt import GPT
from megalight.models.saved import description, saved_model, transformers_model

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
        path: the checkpoint, or a folder of ``transformers``.
        device: where the weights go.
        dtype: of the weights; None keeps what was saved.
        base: the weights that training began with, for a checkpoint that holds adapters alone.

    Raises:
        CheckpointError: missing, torn, or it does not say which model it holds.
        ConfigurationError: a model of ``transformers`` that has no counterpart here.
    """
    opened = None if is_folder(path) else checkpoint.open(path)
    known = family_of_transformers(read_config(path)) if opened is None else family(description(opened)["family"])
    if not known.generates:
        raise CheckpointError(f"{path} holds a {known.name} model, which writes no text.")
    model = transformers_model(path, device, dtype) if opened is None else saved_model(opened, device, dtype, base)
    return cast(GPT, model.root.eval())


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
        """Load both from one folder.

        Args:
            path: the checkpoint, or a folder of ``transformers``.
            tokenizer: a ``tokenizer.json`` or its folder, to use instead of the one in ``path``.
            device: where the weights go.
            dtype: of the weights; None keeps what was saved.
            base: see :func:`load_model`.

        Raises:
            CheckpointError: missing, torn, or no model or tokenizer in it.
            DataError: the tokenizer has more tokens than the model.
        """
        found = Tokenizer.load(tokenizer or _tokenizer_folder(path))
        model = load_model(path, device, dtype, base)
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


def _tokenizer_folder(path: str | os.PathLike[str]) -> os.PathLike[str]:
    """Where the tokenizer that was saved along lies."""
    if is_folder(path):
        return Path(path)
    opened = checkpoint.open(path)
    try:
        opened.file(TOKENIZER)
    except CheckpointError as error:
        raise CheckpointError(f"{error} Name the tokenizer that the model was trained with.") from error
    return publish.resolve(opened.path) / "files"
