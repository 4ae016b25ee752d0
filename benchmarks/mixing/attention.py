"""Attention with windows, sinks, soft caps and ragged documents, beside plain causal attention by cuDNN."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.mixing import Case, Way, backends, packages, random, values
from megalight.nn import Attention, InnerAttention, LayerContext
from megalight.ops.attention import ATTENTION, attention
from megalight.types import PackedSequences


def scaled(lengths: list[int], tokens: int) -> list[int]:
    """Return lengths in about the same proportions that add up to ``tokens`` or a little less."""
    return lengths if sum(lengths) == tokens else [max(1, length * tokens // sum(lengths)) for length in lengths]


def pairs(lengths: list[int], window: int | None) -> float:
    """Return the number of pairs of a query and a key that it sees, causal."""
    found = 0.0
    for n in lengths:
        seen = n if window is None else min(n, window + 1)
        found += seen * (seen + 1) / 2 + (n - seen) * seen
    return found


class Shapes:
    """The heads of an 8-billion-parameter model, or tiny ones."""

    def __init__(self, small: bool, device: str) -> None:
        self.device = device
        self.tokens = 128 if small else 8192
        self.hidden, self.heads, self.kv, self.dim = (64, 4, 2, 16) if small else (4096, 32, 8, 128)
        unit = self.tokens // 128
        self.windows = (8 * unit - 1, 16 * unit - 1, 64 * unit - 1)
        self.packs = {
            "few long": [61 * unit + 3, 40 * unit - 1, 20 * unit, 7 * unit - 2],
            "few long, many short": [50 * unit + 1, 30 * unit - 1, 16 * unit] + [2 * unit] * 16,
            "many short": [2 * unit + (1 if i % 2 else -1) for i in range(64)],
        }
        rows = self.heads + 2 * self.kv
        self.weights = self.hidden * (rows + self.heads) * self.dim

    def inputs(self, lengths: list[int], tokens: int) -> list[Tensor]:
        count = sum(scaled(lengths, tokens))
        return [random(self.device, count, heads, self.dim) for heads in (self.heads, self.kv, self.kv)]

    def operations(self, lengths: list[int], window: int | None) -> tuple[float, float]:
        """Two products forward, five backward."""
        forward = 4.0 * self.heads * self.dim * pairs(lengths, window)
        return forward, 3.5 * forward

    def op(
        self,
        name: str,
        lengths: list[int],
        window: int | None = None,
        aim: float | None = None,
        peers: dict[str, Callable[[int], Way]] | None = None,
        **options: Any,
    ) -> Case:
        """Return the case of the op with some options."""

        def make(tokens: int, backend: str, dtype: torch.dtype = torch.bfloat16) -> Way:
            sequences = PackedSequences.of_lengths(scaled(lengths, tokens), self.device)
            more = {key: value(dtype) if callable(value) else value for key, value in options.items()}
            seen = None if window is None else max(1, window * tokens // self.tokens)
            more["window"] = window if tokens == self.tokens else seen
            return Way(lambda q, k, v: attention(q, k, v, sequences, backend=backend, **more))

        return Case(
            name,
            self.operations(lengths, window),
            self.tokens,
            partial(self.inputs, lengths),
            backends(ATTENTION, make, skip=("reference",)),
            lambda tokens: make(tokens, "reference", torch.float64),
            {**(peers or {}), **packages(ATTENTION, make)},
            aim=aim,
        )

    def dense(self, kernel: SDPBackend) -> Callable[[int], Way]:
        """Return torch's ``scaled_dot_product_attention`` by one kernel, over one sequence."""

        def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            query, key, value = (t.transpose(0, 1)[None] for t in (q, k, v))
            with sdpa_kernel(kernel):
                out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            return out[0].transpose(0, 1)

        return lambda tokens: Way(fn)

    def packed(self, lengths: list[int]) -> Callable[[int], Way]:
        """Return cuDNN over packed sequences, as torch's nested tensors call it."""

        def make(tokens: int) -> Way:
            sequences = PackedSequences.of_lengths(scaled(lengths, tokens), self.device)
            offsets = sequences.cu_seqlens
            # cuDNN compiles a kernel for each number and each longest length of sequences: these are few.
            count, longest = (1 << (n - 1).bit_length() for n in (len(sequences.lengths), sequences.max_length))
            offsets = F.pad(offsets, (0, count + 1 - len(offsets)), value=sequences.num_tokens)

            def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                run = torch.ops.aten._cudnn_attention_forward
                out: Tensor = run(q, k, v, None, offsets, offsets, longest, longest, True, 0.0, True, False)[0]
                return out

            return Way(fn)

        return make

    def sink(self, dtype: torch.dtype) -> Tensor:
        return torch.linspace(-1, 1, self.heads, device=self.device, dtype=dtype)

    def layer(self, window: int | None) -> Case:
        """Return a whole layer: projections and attention, so that a window saves only its part."""
        made: Attention = values(
            Attention(
                self.hidden,
                self.heads,
                self.kv,
                self.dim,
                InnerAttention(window=window),
            ).to("meta"),
            self.device,
        )
        products = 2.0 * self.weights * self.tokens
        forward, both = self.operations([self.tokens], window)

        def make(tokens: int, layer: Attention) -> Way:
            context = LayerContext(PackedSequences.of_lengths([tokens], self.device))
            return Way(lambda hidden: layer(hidden, context), tuple(layer.parameters()))

        return Case(
            "layer" if window is None else f"layer, window {window + 1}",
            (products + forward, 3 * products + both),
            self.tokens,
            lambda tokens: [random(self.device, tokens, self.hidden)],
            {"auto": lambda tokens: make(tokens, made)},
            lambda tokens: make(tokens, copy.deepcopy(made).double()),
            tolerance=4e-2,
        )

    def cases(self) -> Iterator[Case]:
        whole = [self.tokens]
        kernel = SDPBackend.CUDNN_ATTENTION if self.device == "cuda" else SDPBackend.MATH
        yield self.op("plain", whole, peers={"torch": self.dense(kernel)})
        for window in self.windows[1:]:
            yield self.op(f"window {window + 1}", whole, window, 0.85)
        yield self.op("sinks", whole, aim=0.85, sink=self.sink)
        yield self.op(f"sinks, window {self.windows[0] + 1}", whole, self.windows[0], sink=self.sink)
        yield self.op("soft cap", whole, aim=0.85, softcap=50.0)
        for name, lengths in self.packs.items():
            yield self.op(name, lengths, aim=0.9, peers={"torch cudnn, packed": self.packed(lengths)})
        yield self.op("few long, many short, sinks", self.packs["few long, many short"], sink=self.sink)
        yield self.layer(None)
        for window in self.windows[1:]:
            yield self.layer(window)

    def said(self, times: dict[str, float]) -> list[str]:
        """Compare layers with a window to the layer without one, less what the window saves of plain attention.

        Args:
            times: case -> microseconds of forward and backward.
        """
        found = []
        for window in self.windows[1:]:
            name = f"layer, window {window + 1}"
            if not {name, "layer", "plain"} <= times.keys():
                continue
            share = pairs([self.tokens], window) / pairs([self.tokens], None)
            expected = times["layer"] - (1 - share) * times["plain"]
            ratio = times[name] / expected
            found.append(f"{name}: {times[name]:.0f} us; by its window's arithmetic {expected:.0f} us: {ratio:.2f}")
        return found
