"""A decoder in plain torch whose decode step is compiled into one CUDA graph, as gpt-fast has it, beside the engine.

    python benchmarks/compiled_decoding.py RESULT.json           # the Llama-3-8B shape in bf16, on a GPU
    python benchmarks/compiled_decoding.py RESULT.json --tiny    # on the CPU, without a compiler

Both have random weights, read a prompt of 128 tokens and choose 128 more, greedily. The plain decoder has a cache of
2,048 tokens and ``scaled_dot_product_attention`` over the whole cache under a mask; nothing is paged, and there is one
sequence. First its decode steps are compared with a forward pass of all tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PROMPT, NEW = 128, 128


class Shape(NamedTuple):
    """Sizes of a decoder like Llama."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    key_heads: int
    vocabulary: int
    cache: int


LLAMA3_8B, TINY = Shape(32, 4096, 14336, 32, 8, 128256, 2048), Shape(2, 32, 48, 4, 2, 96, 512)


class Layer(nn.Module):
    """Attention over a cache of fixed length, and a gated MLP."""

    keys: Tensor
    values: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, self.dim = shape, shape.hidden // shape.heads
        rows = (shape.heads + 2 * shape.key_heads) * self.dim
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(shape.hidden, rows, False), nn.Linear(shape.hidden, shape.hidden, False)
        self.up, self.down = nn.Linear(shape.hidden, 2 * shape.ffn, False), nn.Linear(shape.ffn, shape.hidden, False)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(1, shape.key_heads, shape.cache, self.dim))

    def forward(self, x: Tensor, places: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        heads, few = self.shape.heads, self.shape.key_heads
        rows = self.qkv(self.norms[0](x)).view(1, x.shape[1], heads + 2 * few, self.dim).transpose(1, 2)
        q, k, v = rows.split([heads, few, few], 1)
        self.keys.index_copy_(2, places, _rotated(k, angles))
        self.values.index_copy_(2, places, v)
        q = _rotated(q, angles)
        found = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    low, high = x.float().chunk(2, -1)
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1).to(x)


class Decoder(nn.Module):
    """Embedding, layers and head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm, self.head = nn.RMSNorm(shape.hidden), nn.Linear(shape.hidden, shape.vocabulary, False)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """Logits ``[1, T, V]`` of tokens ``[1, T]`` at ``places [T]``."""
        half = self.shape.hidden // self.shape.heads // 2
        powers = torch.arange(half, device=ids.device, dtype=torch.float32) / half
        angles = places[:, None] * (500000.0**-powers)
        mask = torch.arange(self.shape.cache, device=ids.device) <= places[:, None]
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, places, angles, mask)
        found: Tensor = self.head(self.norm(x))
        return found


def decoded(model: Decoder, step: nn.Module, prompt: Tensor, new: int) -> Tensor:
    """Return ``new`` tokens after a prompt ``[1, T]``."""
    places = torch.arange(prompt.shape[1], device=prompt.device)
    token, place = model(prompt, places)[:, -1:].argmax(-1), places[-1:] + 1
    found = [token]
    for _ in range(new - 1):
        token = step(token, place)[:, -1:].argmax(-1).clone()
        place = place + 1
        found.append(token)
    return torch.cat(found, 1)


def check(model: Decoder, prompt: Tensor) -> float:
    """Compare logits of cached steps with those of one pass; return the largest difference over the largest value."""
    tokens = torch.cat([prompt, decoded(model, model, prompt, 8)], 1)
    steps = model(tokens[:, -1:], torch.tensor([tokens.shape[1] - 1], device=prompt.device))[0, -1].float()
    whole = model(tokens, torch.arange(tokens.shape[1], device=prompt.device))[0, -1].float()
    return float((steps - whole).abs().max() / whole.abs().max())


def rate(run: Callable[[], object]) -> float:
    """Return tokens per second, the prompt included."""
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return NEW / statistics.median(seconds)


def plain(tiny: bool, prompt: Tensor) -> dict[str, float]:
    """Time the plain decoder; also return seconds of the first call, in which the compiler runs."""
    torch.set_default_dtype(torch.float32 if tiny else torch.bfloat16)
    with prompt.device:
        model = Decoder(TINY if tiny else LLAMA3_8B).eval()
    torch.set_default_dtype(torch.float32)
    difference = check(model, prompt)
    assert difference < 0.05, difference
    how: dict[str, Any] = {"backend": "eager"} if tiny else {"mode": "reduce-overhead", "fullgraph": True}
    step = torch.compile(model, **how)
    start = time.perf_counter()
    decoded(model, step, prompt, 4)
    return {
        "difference": difference,
        "compile_s": time.perf_counter() - start,
        "plain_compiled_tokens_per_s": rate(lambda: decoded(model, step, prompt, NEW)),
    }


def engine(tiny: bool, prompt: Tensor) -> dict[str, float]:
    """Time the engine."""
    from benchmarks.decoding import llama
    from megalight.inference import DynamicEngine, SamplingParams
    from megalight.models.gpt import GPT, GPTConfig
    from megalight.nn.init import initialize

    if tiny:
        model = GPT(
            GPTConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=512, max_sequence_length=512)
        ).eval()
        initialize(model, 1)
    else:
        model = llama()
    engine = DynamicEngine(model, num_blocks=64, block_size=16, max_sequences=1)
    engine.create_cuda_graphs()

    def generate() -> None:
        engine.add(prompt[0].tolist(), max_new_tokens=NEW, sampling_params=SamplingParams(temperature=0))
        (completion,) = engine.run().values()
        assert len(completion.tokens) == NEW

    generate()
    return {"engine_tokens_per_s": rate(generate)}


def main() -> None:
    """Write the figures to the file that is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = "cpu" if arguments.tiny else torch.cuda.get_device_name()
    prompt = torch.randint(10, 96, (1, PROMPT), device="cpu" if arguments.tiny else "cuda")
    with torch.no_grad():
        found = plain(arguments.tiny, prompt)
        print(found, flush=True)
        found |= engine(arguments.tiny, prompt)
    arguments.result.write_text(json.dumps(found | {"device": device, "torch": torch.__version__}, indent=1) + "\n")
    print("RESULT", found, flush=True)


if __name__ == "__main__":
    main()
