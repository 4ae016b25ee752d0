"""Embeddings of texts, by encoders: our BERT, encoders of ``transformers``, and folders of ``sentence-transformers``.

An encoder gives each token a hidden state. Pooling makes one row of them: their mean, that of the first token
(``cls``), their maximum, or that of the last token. In a folder of ``sentence-transformers``, ``modules.json`` lists
what follows the encoder, and ``1_Pooling/config.json`` has the kind of pooling. Other folders have the mean, as there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from megalight import checkpoint
from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.checkpoint.foreign.transformers_folder import is_folder, read_config
from megalight.data.bert.dataset import Words
from megalight.data.tokenizer import Tokenizer
from megalight.errors import CheckpointError, DataError
from megalight.imports import require
from megalight.inference.text import tokenizer_of
from megalight.models.bert import Bert
from megalight.models.loading import description, saved_model
from megalight.types import PackedSequences

MODULES = "modules.json"
Pooling = Literal["cls", "mean", "max", "lasttoken"]
GENERATES = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""How names of models of ``transformers`` end that generate text."""
STEP_TOKENS = 8192
"""Tokens of a forward pass, with padding."""


@dataclass(frozen=True, kw_only=True)
class EmbeddingOutput:
    """The embedding of a text.

    Attributes:
        embedding: ``[d]``, float32, on the CPU.
        prompt_tokens: tokens of the text, with those that the tokenizer puts around it.
    """

    embedding: Tensor
    prompt_tokens: int


def has_embeddings(path: str | os.PathLike[str]) -> bool:
    """Return whether a model has embeddings of texts: it is an encoder, or ``modules.json`` says so.

    Args:
        path: see :class:`EmbeddingModel`. What is no model at all has none.
    """
    place = latest_checkpoint(path)
    if not is_folder(place):
        complete = place.is_dir() and checkpoint.is_complete(place)
        return complete and description(checkpoint.open(place))["family"] == "bert"
    if (place / MODULES).is_file():
        return True
    config = read_config(place)
    kind, name = config.get("model_type", ""), (config.get("architectures") or [""])[0]
    if name.endswith(GENERATES) or config.get("is_decoder") or config.get("is_encoder_decoder"):
        return False
    auto: Any = require("transformers.models.auto.modeling_auto", "embeddings of a folder of transformers")
    tables = auto.MODEL_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_PRETRAINING_MAPPING_NAMES
    # Those that fill masks see a text in both directions.
    return kind in tables[1] and name in {table.get(kind) for table in tables}


class EmbeddingModel:
    """An encoder with its tokenizer and its pooling.

    Args:
        path: a checkpoint of a BERT, a run's folder (its newest checkpoint), a folder of ``transformers`` or of
            ``sentence-transformers``, or a name of the Hugging Face Hub.
        tokenizer: the tokenizer, or its name, to use instead of the one in ``path``.
        device: None: a GPU if there is one.
        dtype: dtype of the weights. None keeps the saved dtype.

    Attributes:
        dimensions: length of an embedding.
        max_sequence_length: of a text, in tokens.
        vocab_size: of the encoder.
        words: the tokenizer.

    Raises:
        CheckpointError: tensors are missing, or the folder has a module that is not supported.
        DataError: the tokenizer has more tokens than the encoder.
    """

    max_sequence_length: int
    vocab_size: int

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        place = latest_checkpoint(path)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.words = Tokenizer.load(tokenizer) if tokenizer else tokenizer_of(place)
        self._poolings: list[Pooling] = ["mean"]
        self._normalizes, self._prefix = False, ""
        width = self._open_folder(Path(place), dtype) if is_folder(place) else self._open_checkpoint(place, dtype)
        self.dimensions = width * len(self._poolings)
        if self.words.vocab_size > self.vocab_size:
            raise DataError(
                f"the tokenizer has {self.words.vocab_size} tokens and the model {self.vocab_size}; use the tokenizer "
                "that the model was trained with."
            )

    def _open_checkpoint(self, place: Any, dtype: torch.dtype | None) -> int:
        net = saved_model(checkpoint.open(place), self._device, dtype).root.eval()
        assert isinstance(net, Bert)
        net.head = None
        self.max_sequence_length, self.vocab_size = net.config.max_sequence_length, net.config.vocab_size
        known = Words.of(self.words)
        self._around = [known.classify], [known.separate]

        def hidden(rows: Sequence[Sequence[int]]) -> list[Tensor]:
            lengths = [len(row) for row in rows]
            tokens = torch.tensor([token for row in rows for token in row], device=self._device)
            found = net(tokens, PackedSequences.of_lengths(lengths, self._device)).hidden
            return [*found.split(lengths)]

        self._hidden: Callable[[Sequence[Sequence[int]]], list[Tensor]] = hidden
        return net.config.hidden_size

    def _open_folder(self, folder: Path, dtype: torch.dtype | None) -> int:
        transformers: Any = require("transformers", "embeddings of a folder of transformers")
        encoder = self._read_modules(folder)
        verbosity = transformers.logging.get_verbosity()
        transformers.logging.set_verbosity_error()  # it would tell of heads, which nothing here needs
        try:
            net, report = transformers.AutoModel.from_pretrained(
                encoder, dtype=dtype or "auto", output_loading_info=True, local_files_only=True
            )
        finally:
            transformers.logging.set_verbosity(verbosity)
        # The pooler is for pairs of sentences, and nothing here reads it.
        if missing := sorted(name for name in report["missing_keys"] if not name.startswith("pooler.")):
            raise CheckpointError(f"{folder} lacks {', '.join(missing[:3])}; give the whole folder.")
        net.to(self._device).eval()
        config, table = net.config, getattr(getattr(net, "embeddings", None), "position_embeddings", None)
        longest = [config.max_position_embeddings]
        if table is not None:
            # RoBERTa and those after it count positions from the padding token's id on.
            longest = [table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)]
        for file, key in (
            ("sentence_bert_config.json", "max_seq_length"),
            ("tokenizer_config.json", "model_max_length"),
        ):
            longest += [value for value in [_json(encoder / file).get(key)] if isinstance(value, int)]
        self.max_sequence_length, self.vocab_size = min(longest), config.vocab_size
        self._around = self.words.special_ids
        pad = self.words.safe_pad_id

        def hidden(rows: Sequence[Sequence[int]]) -> list[Tensor]:
            most = max(map(len, rows))
            tokens = torch.tensor([[*row, *[pad] * (most - len(row))] for row in rows], device=self._device)
            mask = torch.tensor([[1] * len(row) + [0] * (most - len(row)) for row in rows], device=self._device)
            found = net(input_ids=tokens, attention_mask=mask).last_hidden_state
            return [each[: len(row)] for each, row in zip(found, rows, strict=True)]

        self._hidden = hidden
        width: int = config.hidden_size
        return width

    def _read_modules(self, folder: Path) -> Path:
        """Read what follows the encoder; return the encoder's folder."""
        if not (folder / MODULES).is_file():
            return folder
        encoder = folder
        for module in sorted(_json(folder / MODULES), key=lambda each: each["idx"]):
            kind, place = module["type"].rpartition(".")[2], folder / module["path"]
            if kind == "Transformer":
                encoder = place
            elif kind == "Pooling":
                self._poolings = _poolings(place)
            elif kind == "Normalize":
                self._normalizes = True
            else:
                raise CheckpointError(f"{folder} has a module {kind} after its encoder, which is not supported.")
        options = _json(folder / "config_sentence_transformers.json")
        self._prefix = (options.get("prompts") or {}).get(options.get("default_prompt_name"), "")
        return encoder

    def ids_of(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a text, with those that stand around each; ids stay as they are.

        Raises:
            DataError: the text holds half of a surrogate pair.
        """
        if not isinstance(prompt, str):
            return [*prompt]
        before, after = self._around
        return [*before, *self.words.encode(self._prefix + prompt), *after]

    @torch.inference_mode()
    def embed(self, prompts: Sequence[Sequence[int]], dimensions: int | None = None) -> list[EmbeddingOutput]:
        """Return the embeddings of token ids, in their order. What is in one pass with a text changes it by rounding.

        Args:
            prompts: each of at least one id.
            dimensions: the first so many numbers, scaled to length 1; None: all.

        Raises:
            DataError: a text has no tokens or too many, or an id is outside of the vocabulary.
        """
        if dimensions is not None and not 1 <= dimensions <= self.dimensions:
            raise DataError(f"dimensions is {dimensions}; embeddings of this model have {self.dimensions} at most.")
        for place, prompt in enumerate(prompts):
            if not 1 <= len(prompt) <= self.max_sequence_length:
                raise DataError(
                    f"input {place} has {len(prompt)} tokens; give at least 1, and at most {self.max_sequence_length}."
                )
            if min(prompt) < 0 or max(prompt) >= self.vocab_size:
                raise DataError(f"input {place} has ids outside of the vocabulary, 0 to {self.vocab_size - 1}.")
        found: dict[int, EmbeddingOutput] = {}
        # Of like lengths, so that there is little padding.
        order = sorted(range(len(prompts)), key=lambda place: -len(prompts[place]))
        while order:
            count = max(1, STEP_TOKENS // len(prompts[order[0]]))
            step, order = order[:count], order[count:]
            for place, hidden in zip(step, self._hidden([prompts[each] for each in step]), strict=True):
                row = torch.cat([POOLED[each](hidden) for each in self._poolings])[:dimensions].float()
                if self._normalizes or dimensions is not None:
                    row = nn.functional.normalize(row, dim=0)
                found[place] = EmbeddingOutput(embedding=row.cpu(), prompt_tokens=len(prompts[place]))
        return [found[place] for place in range(len(prompts))]


POOLED: dict[Pooling, Callable[[Tensor], Tensor]] = {
    "cls": lambda hidden: hidden[0],
    "max": lambda hidden: hidden.amax(0),
    "mean": lambda hidden: hidden.float().mean(0),
    "lasttoken": lambda hidden: hidden[-1],
}
"""Kind -> from hidden states ``[T, h]`` to ``[h]``. Several are joined in this order, as there."""


def _poolings(folder: Path) -> list[Pooling]:
    """Return the kinds of pooling in a folder.

    Raises:
        CheckpointError: one is not supported.
    """
    options = _json(folder / "config.json")
    chosen = {key.removeprefix("pooling_mode_").removesuffix("_token").removesuffix("_tokens"): key for key in options}
    named = options.get("pooling_mode")
    kinds = {kind for kind, key in chosen.items() if key.startswith("pooling_mode_") and options[key]}
    kinds |= {named} if isinstance(named, str) else {*(named or ())}
    if (others := kinds - {*get_args(Pooling)}) or not kinds or options.get("include_prompt") is False:
        what = ", ".join(sorted(others)) or ("include_prompt=false" if kinds else "none")
        raise CheckpointError(f"{folder} has the pooling {what}; supported are {', '.join(get_args(Pooling))}.")
    return [kind for kind in POOLED if kind in kinds]


def _json(file: Path) -> Any:
    """Return what a file holds; an empty object if there is none."""
    try:
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise CheckpointError(f"{file} holds no JSON: {error}.") from error
