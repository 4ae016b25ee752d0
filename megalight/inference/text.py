"""Complete text with the model and tokenizer of one folder: a checkpoint, or a ``transformers`` folder."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from megalight import checkpoint
from megalight.checkpoint.disk.files import PathLike
from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.checkpoint.foreign.pickles import check_is_archive
from megalight.checkpoint.foreign.transformers_folder import is_folder, json_object, read_config
from megalight.data.multimodal.images import Resize
from megalight.data.multimodal.template import ImageText, image_text_of
from megalight.data.tokenizer import Tokenizer
from megalight.errors import CheckpointError, ConfigurationError, DataError, LayoutError, integer
from megalight.inference.blocks import BLOCK_SIZE, blocks_at_once
from megalight.inference.engine import DynamicEngine
from megalight.inference.fp8_weights import check_quantization, quantize_loaded, quantize_weights
from megalight.inference.generate import generate
from megalight.inference.images import ImageFile, prepare_images
from megalight.inference.parallel import GenerativeModel, ParallelGPT
from megalight.inference.scheduler import Completion
from megalight.inference.text_requests import TextCompletion, TextRequest, before, stop_at
from megalight.inference.weights import LoadedWeights
from megalight.models.eagle import DraftModel
from megalight.models.family import Family, family, family_of_transformers
from megalight.models.fused import fuse
from megalight.models.gpt import GPT
from megalight.models.hf_causal_lm import HFModel
from megalight.models.hugging_face.folder import GENERATION
from megalight.models.loading import (
    Keys,
    companions_of,
    description,
    refuse_keys,
    saved_model,
    single_file_model,
    transformers_model,
)
from megalight.models.transforms import activate
from megalight.models.vlm.config import VLMConfig
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.model import ParallelModel

TOKENIZER = "tokenizer.json"
"""Name of the tokenizer's file in a checkpoint."""

NEW_TOKENS = 128
"""Length of a completion for which nobody gave a limit, in tokens."""


def load_model(
    path: str | os.PathLike[str],
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    base: str | os.PathLike[str] | None = None,
    keys: Keys = "strict",
    adapter: str | None = None,
    quantization: str = "none",
) -> GPT | HFModel:
    """Load the whole model of a checkpoint, saved in any layout, in evaluation mode.

    Args:
        path: the checkpoint, a run's folder (its newest checkpoint), a single file that one of Lightning's own
            strategies wrote, or a ``transformers`` folder.
        device: device of the weights.
        dtype: dtype of the weights. None keeps the saved dtype.
        base: the initial weights of the training, for a checkpoint that holds only adapters.
        keys: what tensors mean that only the model or only a ``transformers`` folder has; see
            :func:`megalight.models.loading.whole_source`.
        adapter: name of the adapter that computes; :func:`~megalight.models.transforms.activate` changes it later.
            None: the one that was trained last.
        quantization: which weights are stored in FP8: ``auto``: those that were published so; ``fp8``: all of linear
            layers; ``none``: none.

    Raises:
        CheckpointError: the checkpoint is missing or incomplete, or does not describe its model.
        ConfigurationError: the ``transformers`` model is not supported here, or the model has no such adapter.
    """
    return cast(GPT | HFModel, _loaded(path, device, dtype, base, None, keys, adapter, quantization)[0])


def load_divided(
    path: str | os.PathLike[str],
    mesh: ParallelMesh,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    base: str | os.PathLike[str] | None = None,
    keys: Keys = "strict",
    adapter: str | None = None,
    quantization: str = "none",
) -> ParallelGPT:
    """Load the model of a checkpoint, divided over ranks, in evaluation mode. All of them call this together.

    Args:
        path: the checkpoint, a run's folder (its newest checkpoint), or a ``transformers`` folder.
        mesh: the ranks.
        device, dtype, base, keys, adapter, quantization: see :func:`load_model`.

    Raises:
        LayoutError: the model cannot be divided so, or is in a single file.
        CheckpointError, ConfigurationError: see :func:`load_model`.
    """
    return cast(ParallelGPT, _loaded(path, device, dtype, base, mesh, keys, adapter, quantization)[0])


def _loaded(
    path: str | os.PathLike[str],
    device: torch.device | str,
    dtype: torch.dtype | None,
    base: str | os.PathLike[str] | None,
    mesh: ParallelMesh | None,
    keys: Keys,
    adapter: str | None,
    quantization: str,
) -> tuple[GenerativeModel, LoadedWeights | None]:
    """Return a model with its weights, or without these if it is from a single file."""
    path = latest_checkpoint(path)
    if not path.is_file():
        found = _found(path, device, dtype, base, mesh, keys, adapter, quantization)
        model = ParallelGPT(found.eval()) if mesh is not None else cast(GPT | HFModel, found.root.eval())
        return model, LoadedWeights(found)
    if mesh is not None:
        raise LayoutError(f"{path} is a single file, which one process reads; leave out the layout.")
    refuse_keys(keys, path)
    check_quantization(quantization)
    known, root = single_file_model(path, device, dtype)
    _check_generates(known, path)
    if quantization == "fp8":
        quantize_weights(root)
    if adapter is not None:
        activate(root, adapter)
    return cast(GPT | HFModel, root.eval()), None


def _found(
    path: str | os.PathLike[str],
    device: torch.device | str,
    dtype: torch.dtype | None,
    base: str | os.PathLike[str] | None,
    mesh: ParallelMesh | None,
    keys: Keys,
    adapter: str | None,
    quantization: str,
) -> ParallelModel:
    check_quantization(quantization)
    opened = None if is_folder(path) else checkpoint.open(path)
    known = family_of_transformers(read_config(path)) if opened is None else family(description(opened)["family"])
    _check_generates(known, path)
    if opened is not None:
        refuse_keys(keys, path)
        found = saved_model(opened, device, dtype, None if base is None else latest_checkpoint(base), mesh, adapter)
    elif adapter is not None:
        raise ConfigurationError(f"{path} is a folder of transformers, which has no adapter {adapter!r}; leave it out.")
    else:
        found = transformers_model(path, device, dtype, mesh, keys)
    if quantization != "none":
        quantize_loaded(found, path if opened is None else None, quantization, mesh is not None)
    if isinstance(found.root, HFModel):
        fuse(found.root)
    return found


def _check_generates(known: Family, path: str | os.PathLike[str]) -> None:
    if not known.generates:
        raise CheckpointError(f"{path} holds a {known.name} model, which does not generate text.")


def begun(ids: list[int], start: Sequence[int]) -> list[int]:
    """Return a prompt that begins with ``start``. Chat templates write these tokens themselves."""
    return ids if ids[: len(start)] == [*start] else [*start, *ids]


@dataclass(frozen=True)
class TextGenerator:
    """A model with its tokenizer.

    Attributes:
        model: the model in evaluation mode, whole or divided over ranks, which then make the same calls.
        tokenizer: converts text to token ids and back.
        ends: tokens that end a completion, beside the tokenizer's end of a document.
        start: tokens that are put before prompts that do not begin with them.
        weights: the model's; others may take their place. None: it is not from a folder.
    """

    model: GenerativeModel
    tokenizer: Tokenizer
    ends: frozenset[int] = frozenset()
    start: tuple[int, ...] = ()
    weights: LoadedWeights | None = None

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        base: str | os.PathLike[str] | None = None,
        mesh: ParallelMesh | None = None,
        keys: Keys = "strict",
        adapter: str | None = None,
        quantization: str = "none",
    ) -> TextGenerator:
        """Load model and tokenizer from one folder.

        What its ``generation_config.json`` calls the end of a text (``eos_token_id``) ends completions, unless another
        tokenizer is given. Prompts for a ``transformers`` folder begin as its tokenizer begins texts there; those for a
        checkpoint do not, as the data of its training did not.

        Args:
            path: the checkpoint, a run's folder (its newest checkpoint), or a ``transformers`` folder.
            tokenizer: a ``tokenizer.json`` or its folder, to use instead of the one in ``path``.
            device: device of the weights.
            dtype: dtype of the weights. None keeps the saved dtype.
            base: see :func:`load_model`.
            mesh: the ranks over which the model is divided, which all make the same calls; see :func:`load_divided`.
                None: this process holds it whole.
            keys, adapter, quantization: see :func:`load_model`.

        Raises:
            CheckpointError: the checkpoint is missing or incomplete, or has no model or tokenizer.
            DataError: the tokenizer has more tokens than the model.
        """
        # Before the weights: a missing tokenizer is then found at once.
        path = latest_checkpoint(path)
        found = Tokenizer.load(tokenizer) if tokenizer else tokenizer_of(path)
        model, weights = _loaded(path, device, dtype, base, mesh, keys, adapter, quantization)
        if found.vocab_size > model.config.vocab_size:
            raise DataError(
                f"the tokenizer has {found.vocab_size} tokens and the model {model.config.vocab_size}; "
                "use the tokenizer that the model was trained with."
            )
        # Beyond the vocabulary no token can end a completion.
        named = frozenset[int]() if tokenizer else _ends(path)
        ends = frozenset(token for token in named if 0 <= token < model.config.vocab_size)
        return cls(model, found, ends, tuple(found.start) if is_folder(path) else (), weights)

    @property
    def whole(self) -> GPT:
        """The GPT, which this process holds whole.

        Raises:
            ConfigurationError: it is divided over ranks, or is a model of ``transformers``.
        """
        if isinstance(self.model, ParallelGPT):
            raise ConfigurationError("the model is divided over processes, and this needs it whole; use one process.")
        if isinstance(self.model, HFModel):
            raise ConfigurationError(
                f"{type(self.model.net).__name__} is a model of transformers with its own code, and this needs a GPT."
            )
        return self.model

    @property
    def image_marker(self) -> str:
        """The text of the token that stands for an image in a prompt.

        Raises:
            DataError: the model reads no images, or the tokenizer has no such token.
        """
        token = self._reader().image_token
        found = next((text for text, number in self.tokenizer.vocabulary.items() if number == token), None)
        if found is None:
            raise DataError(
                f"the tokenizer has no token {token}, which stands for an image in this model; use the tokenizer that "
                "the model was trained with."
            )
        return found

    def image_text(self, given: str | None = None) -> ImageText:
        """Return how the place of an image is written; see :func:`~megalight.data.multimodal.template.image_text_of`.

        Raises:
            DataError: see :attr:`image_marker`; or the text that is given does not hold the image token once.
        """
        return image_text_of(self.image_marker, self.tokenizer.vocabulary, given)

    def _reader(self) -> VLMConfig:
        # VLM keeps its own configuration in the place of the language model's.
        config: object = self.model.config
        if not isinstance(config, VLMConfig):
            raise DataError("images are given, but the model reads no images; leave them out, or load another model.")
        return config

    def _check_without_images(self, prompts: Sequence[Sequence[int]]) -> None:
        config: object = self.model.config
        if not isinstance(config, VLMConfig):
            return
        for number, ids in enumerate(prompts):
            if places := ids.count(config.image_token):
                raise DataError(
                    f"prompt {number} has {places} places for images ({self.image_marker!r}), and no images are given; "
                    "give one for each (images=, --image), or leave the places out."
                )

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        ends: Collection[int] = (),
        images: Sequence[Sequence[ImageFile]] | None = None,
        image_text: str | None = None,
        resize: Resize | None = None,
        draft: DraftModel | None = None,
        num_speculative_tokens: int = 4,
    ) -> list[str]:
        """Generate text after each prompt, up to the end of the document. An empty prompt starts a document.

        Args:
            prompts: the texts to continue.
            max_new_tokens: maximum length of a completion, in tokens. None: 128, or fewer where the model's longest
                sequence ends.
            temperature: see :class:`~megalight.inference.sampling.SamplingParams`.
            top_k: see :class:`~megalight.inference.sampling.SamplingParams`.
            top_p: see :class:`~megalight.inference.sampling.SamplingParams`.
            seed: see :func:`~megalight.inference.generate.generate`. None gives other results each time.
            ends: ids of further tokens that end a completion, such as the end of a chat model's answer.
            images: the images of each prompt, as paths or as the bytes of files. Each stands where the prompt has
                ``<image>``, or :attr:`image_marker`.
            image_text: what replaces ``<image>``, as in preparing the data; see
                :func:`~megalight.data.multimodal.template.image_text_of`.
            resize: how an image becomes a square; see :class:`~megalight.data.multimodal.images.ImageForm`. The same
                as in training.
            draft, num_speculative_tokens: see :func:`~megalight.inference.generate.generate`.

        Raises:
            DataError: the model reads no images, an image cannot be read, or a prompt has another number of places for
                images than of images; or see :func:`~megalight.inference.generate.generate`.
            ConfigurationError, MegalightError: see :func:`~megalight.inference.generate.generate`.
        """
        if isinstance(prompts, str):
            raise DataError(f"prompts is the text {prompts[:60]!r}; give a list of texts, such as [text].")
        if images is not None:
            image = self.image_text(image_text)
            prompts = [image.framed(image.marked(text))[0] for text in prompts]
        ids = [self._ids(text) for text in prompts]
        packed_images, axes, device = None, None, next(self.model.parameters()).device
        if images is not None:
            ids, packed_images, axes = prepare_images(self._reader(), ids, images, resize=resize, device=device)
        else:
            self._check_without_images(ids)
        if max_new_tokens is None:
            max_new_tokens = self._room(max(map(len, ids), default=0))
        completions = generate(
            self.model,
            ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            eos_id=self.all_ends(ends),
            seed=seed,
            packed_images=packed_images,
            draft=draft,
            num_speculative_tokens=num_speculative_tokens,
            axis_positions=axes,
        )
        # Without special tokens: the end of the document is no text.
        return [self.tokenizer.decode_after(*pair) for pair in zip(ids, completions, strict=True)]

    def complete_each(
        self,
        requests: Sequence[TextRequest],
        *,
        ends: Collection[int] = (),
        cache_tokens: int | None = None,
        max_sequences: int = 64,
        step_tokens: int = 512,
    ) -> Iterator[TextCompletion]:
        """Complete texts together, each as it says itself; see :class:`~megalight.inference.engine.DynamicEngine`.

        A text that ends makes room for the next one. Completions come in the order of the requests, each as soon as it
        and those before it have ended.

        Args:
            requests: the texts to continue.
            ends: ids of further tokens that end a completion.
            cache_tokens: tokens for which the cache has room. None: as many as these requests can use.
            max_sequences: maximum number of texts in a step.
            step_tokens: maximum number of tokens in a step.

        Raises:
            DataError, ConfigurationError: see :meth:`DynamicEngine.add`. All requests are checked before the first
                runs.

        A request whose logits hold NaN or infinity ends with the reason ``error``, and the others go on.
        """
        ids = [self._ids(request.prompt) for request in requests]
        limits = [
            self._room(len(prompt)) if request.max_new_tokens is None else request.max_new_tokens
            for request, prompt in zip(requests, ids, strict=True)
        ]
        if cache_tokens is None:
            blocks = blocks_at_once((len(p) + n for p, n in zip(ids, limits, strict=True)), max_sequences)
        else:
            blocks = integer("cache_tokens (--cache-tokens)", cache_tokens, BLOCK_SIZE) // BLOCK_SIZE
        engine = DynamicEngine(
            self.model,
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
            max_sequences=max_sequences,
            step_tokens=step_tokens,
        )
        for request, prompt, limit in zip(requests, ids, limits, strict=True):
            try:
                engine.add(
                    prompt,
                    max_new_tokens=limit,
                    sampling_params=request.sampling_params,
                    eos_id=self.all_ends(ends),
                    stop=stop_at(request.stop, self.tokenizer),
                    seed=request.seed,
                    log_probs=request.log_probs,
                )
            except (ConfigurationError, DataError) as error:
                if not request.place:
                    raise
                raise type(error)(f"{request.place}: {error}") from error
        return self._in_order(engine, requests, ids)

    def _in_order(
        self, engine: DynamicEngine, requests: Sequence[TextRequest], ids: Sequence[Sequence[int]]
    ) -> Iterator[TextCompletion]:
        ended: dict[int, Completion] = {}
        coming = 0
        for step in engine:
            ended |= step.finished
            while coming in ended:
                found = ended.pop(coming)
                text = self.tokenizer.decode_after(ids[coming], found.tokens)
                yield TextCompletion(before(requests[coming].stop, text), found.reason, found.tokens, found.log_probs)
                coming += 1

    def _ids(self, text: str) -> list[int]:
        """Return the tokens of a prompt. An empty one still needs a token to continue from."""
        eod = self.tokenizer.eod_id
        return begun(self.tokenizer.encode(text), self.start) or ([] if eod is None else [eod])

    def _room(self, length: int) -> int:
        """Return the limit of a completion for which nobody gave one, after a prompt of ``length`` tokens."""
        return max(1, min(NEW_TOKENS, self.model.config.max_sequence_length - length))

    def all_ends(self, ends: Collection[int] = ()) -> set[int]:
        """Return the tokens that end a completion: ``ends``, and those of model and tokenizer."""
        eod = self.tokenizer.eod_id
        return {*ends, *self.ends, *([] if eod is None else [eod])}


def _ends(path: PathLike) -> frozenset[int]:
    """Return the tokens that end a text by the settings for generation beside a model."""
    settings = json_object(companions_of(path).get(GENERATION, b"{}"), GENERATION)
    ids = settings.get("eos_token_id")
    return frozenset(token for token in (ids if isinstance(ids, list) else [ids]) if type(token) is int)


def tokenizer_of(path: PathLike) -> Tokenizer:
    """Return the tokenizer that was saved with the model."""
    remedy = "Name the one that the model was trained with by tokenizer (--tokenizer), a tokenizer.json or its folder."
    if path.is_file():
        if isinstance(path, Path):
            check_is_archive(path)
        raise CheckpointError(f"{path} is a single file, which holds no tokenizer. {remedy}")
    if is_folder(path):
        return Tokenizer.of_files(companions_of(path)) if not isinstance(path, Path) else Tokenizer.load(path)
    checkpoint.open(path)  # raises if it is no checkpoint
    files = companions_of(path)
    if TOKENIZER not in files:
        raise CheckpointError(f"checkpoint {path} holds no tokenizer. {remedy}")
    return Tokenizer.of_files(files)
