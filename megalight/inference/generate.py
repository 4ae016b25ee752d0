"""Complete several prompts at once: run all prompts first (prefill), then one token of each per step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from megalight.errors import ConfigurationError, DataError
from megalight.inference.blocks import BLOCK_SIZE, blocks_at_once
from megalight.inference.cache import Cache, NewestTokens
from megalight.inference.engine import DynamicEngine
from megalight.inference.graphs import StepGraphs
from megalight.inference.parallel import (
    GenerativeModel,
    ParallelGPT,
    device_of,
    evaluating,
    generative,
    layers_with_state,
)
from megalight.inference.passes import run_pass
from megalight.inference.prompts import check_prompts, end_ids, new_seed
from megalight.inference.sampler import PassSampling, TokenCounts
from megalight.inference.sampling import FAILED, LARGEST_SEED, SamplingParams, check_sampled, check_seed
from megalight.inference.scheduler import Request
from megalight.inference.speculator import EagleSpeculator
from megalight.models.eagle import DraftModel
from megalight.models.vision import PackedImages
from megalight.models.vlm.config import VLMConfig

RECORDED = 16
"""New tokens from which on :func:`generate` records decode steps."""


def generate(
    model: GenerativeModel | nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_id: int | Collection[int] | None = None,
    seed: int | None = None,
    axis_positions: Sequence[Tensor] | None = None,
    packed_images: PackedImages | None = None,
    draft: DraftModel | None = None,
    num_speculative_tokens: int = 4,
    **sampling: Any,
) -> list[list[int]]:
    """Generate the tokens that follow each prompt.

    Args:
        model: a whole model on any device, or this rank's part of a model; or a causal language model of
            ``transformers``. All ranks of a replica generate together. If experts are on ranks of several replicas, all
            these replicas generate at the same time.
        prompts: token ids, at least one for each prompt. Lengths may differ.
        max_new_tokens: maximum length of a completion.
        eos_id: a completion ends with this token, or with one of these.
        seed: seed of the first prompt's samples, from 0 to ``2**63 - 1``; each further prompt has the next one, and 0
            follows the largest. None: a new one.
        axis_positions: for each prompt ``[A, n]``, on the host: positions of its tokens on several axes. The completion
            follows the largest of them. None: tokens have one position.
        packed_images: the images of a model that reads images. Their ``source`` counts the tokens of all prompts end to
            end;
            :func:`~megalight.inference.images.prepare_images` makes them.
        draft: a draft model that guesses tokens, which makes generation faster and changes nothing else; see
            :mod:`megalight.inference.speculator`. Each rank has a whole draft.
        num_speculative_tokens: how many tokens the draft guesses at a time.
        **sampling: how tokens are chosen, such as ``temperature``: the fields of
            :class:`~megalight.inference.sampling.SamplingParams`.

    Returns:
        one completion per prompt, without the prompt, and with the token that ended it.

    Raises:
        DataError: there is no prompt, a prompt is empty or holds no token ids, an id is outside the vocabulary, prompt
            and completion are too long together, or image tokens do not match the images.
        ConfigurationError: another value is of the wrong kind or out of range, or the draft does not fit the model.
        MegalightError: logits hold NaN or infinity.
    """
    completions: list[list[int]] = [[] for _ in prompts]
    for step in stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling_params=SamplingParams(**sampling),
        eos_id=eos_id,
        seed=seed,
        axis_positions=axis_positions,
        packed_images=packed_images,
        draft=draft,
        num_speculative_tokens=num_speculative_tokens,
    ):
        for prompt, token in step.items():
            completions[prompt].append(token)
    return completions


def stream(
    model: GenerativeModel | nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling_params: SamplingParams | None = None,
    eos_id: int | Collection[int] | None = None,
    seed: int | None = None,
    axis_positions: Sequence[Tensor] | None = None,
    packed_images: PackedImages | None = None,
    draft: DraftModel | None = None,
    num_speculative_tokens: int = 4,
) -> Iterator[dict[int, int]]:
    """Generate as :func:`generate` does, but yield the tokens of every step: prompt index -> token.

    Replicas that share experts must iterate to the end, because they take part in the steps of the other replicas.
    """
    model = generative(model)
    # Here, not in `_steps`: a generator function runs nothing before its first item is asked for.
    prompts, max_new_tokens = check_prompts(model, prompts, max_new_tokens, axis_positions)
    _check_images(model, prompts, packed_images)
    ends, sampling_params = end_ids(model, eos_id), SamplingParams.of(sampling_params)
    sampling_params.check(model.config.vocab_size, max_new_tokens)
    first = new_seed(model) if seed is None else check_seed(seed)
    seeds = [(first + number) % (LARGEST_SEED + 1) for number in range(len(prompts))]
    if draft is None:
        return _steps(model, prompts, max_new_tokens, sampling_params, ends, seeds, axis_positions, packed_images)
    if axis_positions is not None:
        raise ConfigurationError("a draft's guesses have no axis_positions; leave the draft out.")
    engine = drafted_engine(model, draft, prompts, max_new_tokens, num_speculative_tokens)
    for prompt, own in zip(prompts, seeds, strict=True):
        engine.add(prompt, max_new_tokens=max_new_tokens, sampling_params=sampling_params, eos_id=ends, seed=own)
    return _drafted(engine)


def drafted_engine(
    model: GenerativeModel,
    draft: DraftModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    num_speculative_tokens: int,
) -> DynamicEngine:
    """Return an engine with a draft that completes all of these prompts at once."""
    speculator = EagleSpeculator(draft, model, num_speculative_tokens)
    lengths = [len(prompt) + max_new_tokens for prompt in prompts]
    return DynamicEngine(
        model,
        num_blocks=blocks_at_once(lengths, len(prompts)),
        block_size=BLOCK_SIZE,
        max_sequences=len(prompts),
        step_tokens=max(sum(map(len, prompts)), len(prompts) * (num_speculative_tokens + 1)),
        speculator=speculator,
    )


def _steps(
    model: GenerativeModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling_params: SamplingParams,
    ends: Collection[int],
    seeds: Sequence[int],
    axis_positions: Sequence[Tensor] | None,
    packed_images: PackedImages | None,
) -> Iterator[dict[int, int]]:
    # Room for the longest prompt and its completion, in every slot.
    # Slots belong to prompts, not to places in the batch: a prompt that ends leaves the others where they are.
    cache = Cache(layers_with_state(model), len(prompts), max(map(len, prompts)) + max_new_tokens)
    requests = [
        Request(slot, list(prompt), len(prompt), max_new_tokens, sampling_params, ends, None, seed, slot=slot)
        for slot, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
    ]
    counts = TokenCounts(len(prompts))
    active, fresh = list(range(len(prompts))), [list(prompt) for prompt in prompts]
    left = max_new_tokens
    newest = NewestTokens(cache.dummy_slot + 1, device_of(model))
    # To record a step takes as long as a few of them.
    # Replicas that share experts may have prompts of other numbers and lengths, and so other graphs. All stages of a
    # pipeline need the results, which graphs give to the last.
    parted = isinstance(model, ParallelGPT) and (model.shares_experts or model.stages > 1)
    recorded = max_new_tokens >= RECORDED and axis_positions is None and not parted
    graphs = StepGraphs.of(model, cache, newest, 1) if recorded else None
    prefilled = False
    while another(model, bool(active)):
        # This replica has finished, but holds experts that others still need: their forward passes need its
        # collectives.
        if not active:
            assert isinstance(model, ParallelGPT)
            with evaluating(model):
                model.accompany()
            continue
        sampling = PassSampling(counts, [requests[prompt] for prompt in active])
        results = graphs.run(active, fresh, sampling) if graphs is not None and prefilled else None
        if results is None:
            results = run_pass(model, cache, active, fresh, sampling, axis_positions, packed_images)
        prefilled = True
        # Those of prompts; the cache knows what follows them.
        axis_positions = packed_images = None
        # The one wait for the device in a step: the host must know which prompts have ended.
        chosen = results[:, 0].long().tolist()
        step = dict(zip(active, chosen, strict=True))
        check_sampled({prompt: [token] for prompt, token in step.items()})
        yield step
        left -= 1
        for prompt, token in step.items():
            requests[prompt].take(token)
        # completed prompts leave the batch; the others continue with their newest token
        # `left` is 0 in the last step, and ends all of them.
        active = [prompt for prompt, token in step.items() if token not in ends and left]
        fresh = [[step[prompt]] for prompt in active]


def _drafted(engine: DynamicEngine) -> Iterator[dict[int, int]]:
    for step in engine:
        check_sampled({prompt: [FAILED] for prompt, each in step.finished.items() if each.reason == "error"})
        if step.tokens:
            yield step.tokens


def another(model: GenerativeModel, wanted: bool) -> bool:
    """Return whether another forward pass follows, here or in a replica that shares experts."""
    return bool(model.most_of_replicas([int(wanted)])[0]) if isinstance(model, ParallelGPT) else wanted


def _check_images(model: GenerativeModel, prompts: Sequence[Sequence[int]], packed_images: PackedImages | None) -> None:
    # VLM keeps its own configuration in the place of the language model's.
    config: object = model.config
    if not isinstance(config, VLMConfig):
        if packed_images is not None:
            raise DataError("packed_images are given, but the model reads no images; leave them out.")
        return
    if config.video_token is not None and any(config.video_token in ids for ids in prompts):
        raise DataError(
            f"a prompt has the token {config.video_token}, which stands for a video in this model, and videos are not "
            "read; show images of it."
        )
    expected = [token == config.image_token for ids in prompts for token in ids]
    found = [False] * len(expected) if packed_images is None else (packed_images.source != -1).tolist()
    if expected != found:
        raise DataError(
            f"the prompts have {sum(expected)} image tokens (id {config.image_token}) among {len(expected)} tokens, "
            f"and packed_images stand for {sum(found)} of {len(found)}; make both with prepare_images of "
            "megalight.inference.images."
        )
