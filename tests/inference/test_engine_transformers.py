"""Models of ``transformers`` on the engine: completions and their probabilities are those of their own ``generate``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from megalight.errors import ConfigurationError
from megalight.inference import DynamicEngine, SamplingParams, generate
from megalight.inference.batch_dimensions import InferenceBatchDimensions
from megalight.inference.graphs import StepGraphs
from megalight.models.fused import Layer, fuse
from megalight.models.hf_causal_lm import HFModel
from tests.parallel.graphs.tape import Tape
from tests.parallel.tiny_transformers import float64, tiny

pytest.importorskip("transformers")

QUICK = ["llama", "gemma2", "gpt_oss"]
FULL = [
    "qwen2", "qwen3", "gemma3_text", "phi3", "olmo2", "glm4", "granite", "starcoder2", "gpt_neox", "mistral", "mixtral",
    "qwen3_moe", "llama4_text", "deepseek_v3", "gpt2", "smollm3", "cohere2", "arcee", "apertus",
]  # fmt: skip
"""They differ in norms, windows, chunks, soft caps, sinks, scales, partial rotation, latent heads and experts."""
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [4], [20, 21, 22], [5, 6, 7, 8, 9, 10, 11, 12, 40, 41]]
NEW = 6
GREEDY = SamplingParams(temperature=0)


def expected(model: Any, prompt: list[int]) -> tuple[list[int], list[float]]:
    """The completion by ``transformers``, with a cache of its own, and the log-probabilities of its tokens."""
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    options |= {"return_dict_in_generate": True, "output_logits": True, "attention_mask": torch.ones_like(ids)}
    found = model.generate(ids, **options)
    tokens = found.sequences[0, len(prompt) :].tolist()
    each = zip(found.logits, tokens, strict=True)
    return tokens, [float(logits[0].log_softmax(-1)[token]) for logits, token in each]


@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(each, marks=pytest.mark.full) for each in FULL)])
def test_completions_are_those_of_generate(family: str) -> None:
    """Requests come between steps, prompts run in parts, two share their first tokens, and one gives blocks back."""
    theirs: Any = tiny(family).eval()
    ours = copy.deepcopy(theirs)
    if getattr(theirs.config, "attn_logit_softcapping", None):
        theirs.set_attn_implementation("eager")  # the default one ignores soft caps
    with float64():
        engine = DynamicEngine(ours, num_blocks=8, block_size=3, step_tokens=5)
        coming, preempted, shared = PROMPTS[::-1], 0, 0
        found = {}
        while coming or engine.unfinished:
            if coming:
                engine.add(coming.pop(), max_new_tokens=NEW, sampling_params=GREEDY, log_probs=True)
            for _ in range(2):
                if (step := engine.step()) is not None:
                    preempted += len(step.preempted)
                    shared += sum(step.shared.values())
                    found |= step.finished
        for number, prompt in enumerate(PROMPTS):
            tokens, log_probs = expected(theirs, prompt)
            assert found[number].tokens == tokens
            assert found[number].log_probs == pytest.approx(log_probs, abs=1e-9)
    assert len({tuple(each.tokens) for each in found.values()}) > 2
    assert preempted or engine.blocks.spans, "the small pool forces nothing"
    assert shared
    assert family in FULL or bool(engine.blocks.spans) == (family != "llama"), "windows keep all blocks"


@pytest.mark.parametrize(
    "family", ["qwen2", *(pytest.param(each, marks=pytest.mark.full) for each in ("glm4", "arcee"))]
)
def test_fused_ops_on_the_engine(family: str) -> None:
    theirs: Any = tiny(family).eval()
    ours = copy.deepcopy(theirs)
    assert fuse(ours) == 2
    assert any(isinstance(module, Layer) for module in ours.modules())
    with float64():
        found = generate(ours, PROMPTS, max_new_tokens=NEW, temperature=0)
        assert found == [expected(theirs, prompt)[0] for prompt in PROMPTS]


def test_probabilities_of_prompts_graphs_and_batches() -> None:
    model: Any = tiny("mistral").eval()
    with float64():
        tokens, _ = zip(*(expected(model, prompt) for prompt in PROMPTS), strict=True)
        assert generate(model, PROMPTS, max_new_tokens=NEW, temperature=0) == [*tokens]
        engine, tape = DynamicEngine(model, num_blocks=20, block_size=3, max_sequences=5), Tape()
        passes, own = engine._passes, engine.model
        assert isinstance(own, HFModel)
        dimensions = [InferenceBatchDimensions(count, 0, count) for count in (5, 2)]
        passes.graphs = StepGraphs(own, engine._scheduler.cache, passes.newest, dimensions, tape)
        for prompt in PROMPTS:
            engine.add(prompt, max_new_tokens=NEW, sampling_params=GREEDY, prompt_log_probs=True)
        found = engine.run()
        assert [each.tokens for each in found.values()] == [*tokens]
        assert tape.made
        logits = model(torch.tensor([PROMPTS[0]])).logits[0].detach().log_softmax(-1)
    each = [float(logits[place, token]) for place, token in enumerate(PROMPTS[0][1:])]
    assert found[0].prompt_log_probs == pytest.approx(each, abs=1e-9)


@pytest.mark.parametrize(
    ("family", "settings", "why"),
    [
        ("qwen3_next", {}, "has layers of type linear_attention, which mix tokens"),
        ("mamba2", {}, "Mamba2ForCausalLM has layers of type linear_attention"),
        ("bloom", {}, "BloomForCausalLM does not use the attention interface"),
        ("bert", {}, "BertLMHeadModel in bert.encoder.layer.0.attention.self sees later tokens"),
        ("camembert", {}, "counts positions from padding in roberta.embeddings"),
        ("doge", {}, "a layer reads its attention mask"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rotary embedding of type 'dynamic'",
        ),
    ],
)
def test_other_caches_are_refused_by_name(family: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        DynamicEngine(tiny(family, **settings), num_blocks=4)  # type: ignore[arg-type]


def test_attention_that_a_user_chose_is_refused() -> None:
    model: Any = tiny("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(ConfigurationError, match="attn_implementation='eager'"):
        DynamicEngine(model, num_blocks=4)
    with pytest.raises(ConfigurationError, match="LlamaModel is no causal language model"):
        DynamicEngine(model.model, num_blocks=4)
