"""Recorded steps on a GPU: texts with none, some and many graphs, and steady decode that never waits for the device."""

from __future__ import annotations

import gc
from copy import deepcopy
from typing import Any

import pytest
import torch

import megalight
from megalight.errors import MegalightError
from megalight.inference import DynamicEngine, SamplingParams
from megalight.inference.batch_dimensions import InferenceBatchDimensions
from megalight.inference.engine_memory import _weights
from megalight.inference.fp8_weights import quantize_weights
from megalight.inference.parallel import ParallelGPT
from megalight.inference.speculator import DraftSpeculator, EagleSpeculator, NGramSpeculator, Speculator
from megalight.models.eagle import DraftModel, EagleConfig
from megalight.models.gpt import (
    GPT,
    AttentionConfig,
    DeltaNetConfig,
    GPTConfig,
    InitConfig,
    LatentConfig,
    MambaConfig,
)
from megalight.nn.init import initialize
from megalight.nn.linear import Linear
from megalight.nn.moe import MoEConfig
from megalight.ops.philox import exponentials
from megalight.ops.quantized_weight import stored_of
from megalight.parallel.graphs.recorder import CUDARecorder
from megalight.parallel.virtual_memory import why_not
from megalight.types import PackedSequences
from tests.support.nccl import runs_of

pytestmark = pytest.mark.gpu

MODELS: dict[str, Any] = {
    "llama": {},
    "windowed": {"attention": AttentionConfig(softmax="learnable", window=20, window_pattern=2)},
    "latent": {
        "mixer_pattern": ("latent_attention",),
        "latent": LatentConfig(kv_rank=64, q_rank=64, head_dim=32, rotary_dim=16, value_dim=32),
    },
    "experts": {"moe": MoEConfig(num_experts=8, ffn_hidden_size=64)},
    "convolutions": {"mixer_pattern": ("conv", "attention")},
    "mamba": {"mixer_pattern": ("mamba", "attention"), "mamba": MambaConfig(num_heads=4, num_groups=2)},
    "delta": {
        "mixer_pattern": ("gated_delta_net", "attention"),
        "delta": DeltaNetConfig(num_heads=4, num_key_heads=2, head_dim=64, key_dim=64),
    },
}


def build(name: str, **more: Any) -> GPT:
    sizes = {"num_layers": 2, "hidden_size": 128, "num_heads": 4, "vocab_size": 512, "max_sequence_length": 128}
    sizes["num_kv_heads"] = 4 if name == "latent" else 2
    config = GPTConfig(**(sizes | MODELS[name] | more), init=InitConfig(std=0.3))
    with torch.device("cuda"):
        model = GPT(config).bfloat16()
    initialize(model, 1)
    return model.eval()


PROMPTS = [[7 + number, *range(20, 21 + 5 * number)] for number in range(12)]
TEMPERATURE, TOP_K = 0.7, 40


def texts(
    model: GPT | ParallelGPT,
    graphs: int,
    mixed: int,
    create: bool,
    speculator: Speculator | None = None,
    count: int = len(PROMPTS),
    kv_cache_dtype: str = "auto",
) -> tuple[list[list[int]], dict[Any, int]]:
    engine = DynamicEngine(
        model,
        num_blocks=100,
        max_sequences=24,
        step_tokens=64,
        cuda_graphs=graphs,
        cuda_graph_mixed_prefill_count=mixed,
        speculator=speculator,
        kv_cache_dtype=kv_cache_dtype,
    )
    if create:
        engine.create_cuda_graphs()
    for number, prompt in enumerate(PROMPTS[:count]):
        params = SamplingParams(temperature=0 if number % 2 else TEMPERATURE, top_k=TOP_K)
        engine.add(prompt, max_new_tokens=24, sampling_params=params, seed=number)
        engine.step()
    return [each.tokens for each in engine.run().values()], engine.step_log.graph_uses


@torch.no_grad()
def check_up_to_rounding(model: GPT, found: list[list[int]], double: GPT | None = None) -> None:
    """Each token of the texts of :func:`texts` is the one that logits of a float64 model choose, up to rounding.

    Rounding may decide between tokens of almost equal scores, and the text then goes another way. The error of two
    logits is at most twice the largest error of a forward pass of all tokens.
    """
    fed = [[*prompt, *text[:-1]] for prompt, text in zip(PROMPTS, found, strict=True)]
    ids = torch.tensor([token for each in fed for token in each], device=next(model.parameters()).device)
    sequences = PackedSequences.of_lengths([*map(len, fed)], ids.device)
    double = deepcopy(model).double() if double is None else double
    exact, rounded = double(ids, sequences).logits, model(ids, sequences).logits
    slack = 2 * float((exact - rounded.double()).abs().max())
    for number, text in enumerate(found):
        prompt, tokens = len(PROMPTS[number]), torch.tensor(text, device=ids.device)[:, None]
        end = sum(map(len, fed[: number + 1]))
        logits = exact[end - len(text) : end]
        least = logits.topk(1 if number % 2 else TOP_K).values[:, -1:]
        assert (logits.gather(1, tokens) >= least - slack).all(), number
        if number % 2:
            continue
        places = torch.arange(prompt, prompt + len(text), device=ids.device)
        noise = -exponentials(torch.full_like(places, number), places, logits.shape[1], backend="reference").log()
        scores = logits / TEMPERATURE + noise
        # The best of the tokens that are kept for sure.
        best = scores.masked_fill(logits < least + slack, -torch.inf).amax(-1, keepdim=True)
        assert (best - scores.gather(1, tokens)).max() <= slack / TEMPERATURE, number


@pytest.mark.parametrize("name", list(MODELS))
def test_texts_with_any_number_of_graphs_are_those_without(name: str) -> None:
    model = build(name)
    plain, uses = texts(model, 0, 0, create=False)
    assert not uses
    check_up_to_rounding(model, plain)
    for graphs, mixed, create in ((1, 0, False), (1, 4, True), (16, 4, True), (16, 4, False)):
        found, uses = texts(model, graphs, mixed, create)
        assert sum(uses.values()) > 20
        assert any(each.prefill_req_count for each in uses) == create
        check_up_to_rounding(model, found)


def test_texts_of_weights_in_8_bits_with_any_number_of_graphs() -> None:
    model = build("llama")
    double = deepcopy(model).double()
    quantize_weights(model)
    for own, other in zip(model.modules(), double.modules(), strict=True):
        if isinstance(own, Linear) and isinstance(other, Linear) and (codes := stored_of(own.weight)) is not None:
            other.weight.data = codes.values(torch.float64)
    for graphs in (0, 1, 16):
        found, uses = texts(model, graphs, 4, create=graphs > 0)
        assert (sum(uses.values()) > 20) == (graphs > 0)
        check_up_to_rounding(model, found, double)


def speculator_of(kind: str, model: GPT) -> Speculator:
    if kind == "ngrams":
        return NGramSpeculator(3, shortest=1)
    if kind == "small":
        return DraftSpeculator(model, model, 3, max_sequences=24)
    draft = DraftModel(EagleConfig(auxiliary_layers=(1,), std=0.3).for_base(model.config)).cuda().bfloat16()
    initialize(draft, 3)
    return EagleSpeculator(draft, model, 3)


@pytest.mark.parametrize("kind", ["ngrams", "small", "eagle"])
def test_steady_decode_with_draft_tokens_never_waits_for_the_device(kind: str) -> None:
    """A round begins before the host knows what the last one accepted. The loop of a draft is one graph."""
    model = build("llama")
    speculator = speculator_of(kind, model)
    engine = DynamicEngine(model, num_blocks=200, max_sequences=16, speculator=speculator)
    engine.create_cuda_graphs()
    for number in range(8):
        engine.add([5, 6, 7 + number], max_new_tokens=80, sampling_params=SamplingParams(temperature=0))
    guess, ahead = speculator.propose, [0, 0]

    def watched(requests: Any, counts: Any) -> torch.Tensor:
        ahead[any(request.unchecked for request in requests)] += 1
        return guess(requests, counts)

    speculator.propose = watched  # type: ignore[method-assign]
    for _ in range(8):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    if speculator.loop is not None:
        assert {1, 2, 4, 8, 16} <= {*speculator.loop._graphs}
    engine.run()
    assert ahead[True] > 3 * ahead[False]


@pytest.mark.parametrize("kind", ["ngrams", "small", "eagle"])
@pytest.mark.parametrize("name", ["llama", "latent"])
def test_steps_with_draft_tokens_are_replayed(name: str, kind: str) -> None:
    model = build(name)
    for graphs in (0, 16):
        speculator = speculator_of(kind, model)
        found, uses = texts(model, graphs, 0, create=graphs > 0, speculator=speculator)
        check_up_to_rounding(model, found)
        assert (sum(count for used, count in uses.items() if used.prefill_req_count) > 5) == (graphs > 0)


@pytest.mark.parametrize("name", ["llama", "experts", "convolutions", "mamba", "delta"])
def test_steady_decode_with_sampling_is_one_replay(name: str) -> None:
    model = build(name)
    engine = DynamicEngine(model, num_blocks=200, max_sequences=16)
    engine.create_cuda_graphs()
    for number in range(16):
        params = SamplingParams(temperature=0.5 * (number % 3), top_k=50 if number % 2 else None, top_p=0.9)
        engine.add([5, 6, 7 + number], max_new_tokens=80, sampling_params=params, seed=number)
    for _ in range(4):
        engine.step()
    dimensions = InferenceBatchDimensions(16, 0, 16)
    before = engine.step_log.graph_uses[dimensions]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(20):
            engine.step()
    assert engine.step_log.graph_uses[dimensions] == before + 40
    launches = {event.key: event.count for event in profile.key_averages() if event.key.startswith("cuda")}
    assert launches["cudaGraphLaunch"] == 20
    # inputs to the device, and ids to the host
    assert launches.get("cudaLaunchKernel", 0) == 0
    engine.run()


def test_garbage_is_collected_before_captures_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, collections = DynamicEngine(build("llama"), num_blocks=20, max_sequences=4, cuda_graphs=2), [0]

    def count(phase: str, info: dict[str, int]) -> None:
        collections[0] += phase == "start" and info["generation"] == 2

    gc.callbacks.append(count)
    try:
        engine.create_cuda_graphs()
        before, made = collections[0], len(engine._passes.graphs._steps)  # type: ignore[union-attr]
        engine._passes.graphs.drop()  # type: ignore[union-attr]
        monkeypatch.setenv("CUDA_GRAPH_CAPTURE_FREEZE_GC", "0")
        engine.create_cuda_graphs()
    finally:
        gc.callbacks.remove(count)
    assert made >= 3
    assert before < made <= collections[0] - before


def _bytes_free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many graphs were recorded so far."""
    made, record = [0], CUDARecorder.record

    def counted(*given: Any, **options: Any) -> Any:
        made[0] += 1
        return record(*given, **options)

    monkeypatch.setattr(CUDARecorder, "record", counted)
    return made


def _used_by_others(size: int) -> None:
    """Let another tensor have memory, and fill it with NaN, for who reads what it did not write."""
    other = torch.full((size,), 255, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    del other
    torch.cuda.empty_cache()


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "") for name in ("llama", "windowed", "mamba", "delta", "convolutions")),
        *(("llama", kind) for kind in ("small", "eagle")),
    ],
)
def test_graphs_are_recorded_once_while_memory_comes_and_goes(name: str, kind: str, captures: list[int]) -> None:
    if (reason := why_not(torch.device("cuda", 0))) is not None:
        pytest.skip(reason)
    model = build(name)
    speculator = speculator_of(kind, model) if kind else None
    engine = DynamicEngine(model, num_blocks=20_000, max_sequences=8, cuda_graphs=4, speculator=speculator)
    engine.create_cuda_graphs()
    pools, made = engine._scheduler.cache.tensors, captures[0]
    addresses, size = [each.data_ptr() for each in pools], sum(each.nbytes for each in pools)
    params = SamplingParams(temperature=TEMPERATURE, top_k=TOP_K)

    def cycle(keep_cache: bool) -> None:
        torch.cuda.empty_cache()
        before = _bytes_free()
        engine.suspend(keep_cache=keep_cache)
        assert _bytes_free() - before >= 0.95 * size
        _used_by_others(size)
        engine.resume()

    def run(suspend_at: int | None) -> list[list[int]]:
        for number, prompt in enumerate(PROMPTS):
            engine.add(prompt, max_new_tokens=20, sampling_params=params, seed=number)
        found = {}
        for count, step in enumerate(engine):
            found |= step.finished
            if count == suspend_at:
                cycle(True)
        return [each.tokens for _, each in sorted(found.items())]

    cycle(False)
    expected = run(None)
    assert made >= 4
    for turn in range(3):
        cycle(False)
        # A draft begins again after it: passes then have other shapes, which are rounded otherwise.
        assert run(None if kind else 3 + 7 * turn) == expected
    assert engine.step_log.graphed > 20
    assert captures[0] == made
    assert [each.data_ptr() for each in engine._scheduler.cache.tensors] == addresses


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize("kind", ["plain", "tied", "8_bits", "small", "eagle"])
def test_graphs_survive_suspends_with_weights_but_the_first(kind: str, captures: list[int]) -> None:
    if (reason := why_not(torch.device("cuda", 0))) is not None:
        pytest.skip(reason)
    large = {"hidden_size": 1024, "num_heads": 8, "vocab_size": 16384}
    model = build("llama", **large, tie_embeddings=kind == "tied")
    if kind == "8_bits":
        quantize_weights(model)
    speculator: Speculator | None = None
    if kind == "small":
        speculator = DraftSpeculator(build("windowed", **large), model, 3, max_sequences=24)
    elif kind == "eagle":
        speculator = speculator_of(kind, model)
    engine = DynamicEngine(model, num_blocks=2000, max_sequences=8, cuda_graphs=4, speculator=speculator)
    engine.create_cuda_graphs()

    def run(suspend_at: int | None = None) -> list[list[int]]:
        for prompt in PROMPTS:
            engine.add(prompt, max_new_tokens=20, sampling_params=SamplingParams(temperature=0))
        found = {}
        for count, step in enumerate(engine):
            found |= step.finished
            if count == suspend_at:
                cycle(True)
        return [each.tokens for _, each in sorted(found.items())]

    def cycle(keep_cache: bool) -> None:
        torch.cuda.empty_cache()
        before = _bytes_free()
        engine.suspend(keep_cache=keep_cache, weights=True)
        freed.append(_bytes_free() - before)
        _used_by_others(size)
        engine.resume()

    weights, freed = {each.untyped_storage().data_ptr(): each for each in _weights(engine._modules)}.values(), [0]
    size = sum(each.nbytes for each in (*weights, *engine._scheduler.cache.tensors))
    expected = run()
    cycle(False)
    engine.create_cuda_graphs()
    made, graphed = captures[0], engine.step_log.graphed
    assert run() == expected
    addresses = [each.data_ptr() for each in weights]
    for turn in range(3):
        cycle(False)
        # A draft begins again after a suspend: passes then have other shapes, which are rounded otherwise.
        assert run(None if speculator else 3 + 7 * turn) == expected
    assert min(freed[2:]) >= 0.95 * size > 2**26
    assert captures[0] == made
    assert engine.step_log.graphed > graphed + 40
    assert [each.data_ptr() for each in weights] == addresses


@pytest.mark.gpu(alone=True)
@pytest.mark.parametrize("weights", [False, True])
def test_a_resume_without_memory_may_be_tried_again(weights: bool) -> None:
    if (reason := why_not(torch.device("cuda", 0))) is not None:
        pytest.skip(reason)
    model = build("llama", hidden_size=1024, num_heads=8, vocab_size=16384)
    engine = DynamicEngine(model, num_blocks=50 if weights else 20_000, max_sequences=8)
    values = [each.clone() for each in model.parameters()]
    for _ in range(2 if weights else 1):  # weights move, and then stay
        engine.add(PROMPTS[0], max_new_tokens=9, sampling_params=SamplingParams(temperature=0))
        engine.step()
        torch.cuda.empty_cache()
        before = _bytes_free()
        engine.suspend(weights=weights)
        size = _bytes_free() - before
        other = torch.empty(_bytes_free() - size // 2, dtype=torch.uint8, device="cuda")
        for _ in range(2):
            with pytest.raises(
                MegalightError, match="still suspended, as its memory cannot be taken: cuda:0 has less than"
            ):
                engine.resume()
        assert engine.suspended
        del other  # torch keeps it
        engine.resume()
        assert all(len(each.tokens) == 9 for each in engine.run().values())
        assert all(map(torch.equal, values, model.parameters()))


LAYOUTS = {"tensor_parallel": "llama", "expert_parallel": "experts", "pipeline_parallel": "llama"}


def _part(axis: str) -> ParallelGPT:
    root, layout = build(LAYOUTS[axis]).to("meta"), megalight.Layout(**{axis: 2})
    return ParallelGPT(megalight.parallelize(root, layout, seed=3, fill=True, dtype=torch.bfloat16))


def _divided(axis: str, graphs: int) -> Any:
    model = _part(axis)
    # A replica that shares experts has fewer requests, and then takes part in the steps of the other.
    count = 4 if model.mesh.rank("dp") else len(PROMPTS)
    return texts(model, graphs, 4, create=graphs > 0, count=count)


def _steady(axis: str) -> int:
    engine = DynamicEngine(_part(axis), num_blocks=100, max_sequences=8)
    engine.create_cuda_graphs()
    for number in range(8):
        engine.add([5, 6, 7 + number], max_new_tokens=60, sampling_params=SamplingParams(temperature=0.7), seed=number)
    for _ in range(4):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    engine.run()
    return engine.step_log.graphed


def jobs(world: int) -> list[tuple[Any, tuple[Any, ...]]]:
    return [(_divided, (axis, graphs)) for axis in LAYOUTS for graphs in (0, 16)] + [
        (_steady, (axis,)) for axis in LAYOUTS
    ]


@pytest.mark.parametrize("axis", list(LAYOUTS))
def test_ranks_replay_together(axis: str) -> None:
    model = build(LAYOUTS[axis])
    initialize(model, 3, "model.")
    for graphs in (0, 16):
        found, uses = runs_of(jobs, 2).outcome((axis, graphs))
        assert (sum(uses.values()) > 20) == (graphs > 0)
        check_up_to_rounding(model, found)
    assert runs_of(jobs, 2).outcome((axis,)) > 50
