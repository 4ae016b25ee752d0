"""Complete text from a checkpoint: the model from its configuration, the tokenizer from the file saved along."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from megalight import checkpoint
from megalight.checkpoint import Checkpoint, publish
from megalight.checkpoint.ranks import alone
from megalight.data.tokenizer import Tokenizer
from megalight.errors import CheckpointError, DataError
from megalight.inference.generate import generate
from megalight.models.family import family
from megalight.models.gpt import GPT
from megalight.parallel.apply import parallelize
from megalight.parallel.initialise import materialise
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.plan import Plan
from megalight.parallel.source import parameter_targets

PREFIX = "model."
"""Canonical names of a model's weights in a checkpoint start with this."""

TOKENIZER = "tokenizer.json"
"""The file in a checkpoint that holds the tokenizer."""


def load_model(
    path: str | os.PathLike[str], device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> GPT:
    """The model of a checkpoint, whole, in evaluation mode, whatever layout saved it.

    Args:
        path: the checkpoint's folder.
        device: where the weights go.
        dtype: of the weights; None keeps what was saved.

    Raises:
        CheckpointError: missing, torn, or it does not say which model it holds.
    """
    return _load(checkpoint.open(path), torch.device(device), dtype)


def _load(opened: Checkpoint, device: torch.device, dtype: torch.dtype | None) -> GPT:
    described = opened.common.get("model")
    if not isinstance(described, Mapping) or not {"family", "config"} <= described.keys():
        raise CheckpointError(
            f"checkpoint {opened.path} does not say which model it holds (no 'model' with 'family' and 'config' in its "
            "common part); use one that a GPTModule saved."
        )
    known = family(described["family"])
    if not known.generates:
        raise CheckpointError(f"checkpoint {opened.path} holds a {known.name} model, which writes no text.")
    with torch.device("meta"):
        model = cast(GPT, known.build(described["config"]))
    specs = parallelize(model, Plan(), ParallelMesh(), prefix=PREFIX)
    materialise(model.to(dtype or _saved_dtype(opened)), device)
    with alone() as group:
        opened.fill(parameter_targets(model.named_parameters(), specs), prefix=PREFIX, process_group=group)
    return model.eval()


def _saved_dtype(opened: Checkpoint) -> torch.dtype:
    """The type of the widest weight."""
    names = {info.dtype for name, info in opened.tensors.items() if name.startswith(PREFIX)}
    found: torch.dtype = max((getattr(torch, name) for name in names), key=lambda dtype: dtype.itemsize)
    return found


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
    ) -> TextGenerator:
        """Load both from a checkpoint's folder.

        Args:
            path: the folder.
            tokenizer: a ``tokenizer.json`` or its folder, to use instead of the checkpoint's own.
            device: where the weights go.
            dtype: of the weights; None keeps what was saved.

        Raises:
            CheckpointError: missing, torn, or no model or tokenizer in it.
            DataError: the tokenizer has more tokens than the model.
        """
        opened = checkpoint.open(path)
        found = Tokenizer.load(tokenizer or _tokenizer_folder(opened))
        model = _load(opened, torch.device(device), dtype)
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
