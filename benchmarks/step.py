"""A training step to time: the model's shape, the parallel layout, the precision. This file has only cheap imports."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

PRECISIONS = ("bf16", "fp32", "fp8")
RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Step:
    """Settings with the names of the command line. The defaults are the width of an 8B model, 16 layers, one GPU.

    A micro-batch has ``mbs`` sequences, and a step of one replica has ``micro`` micro-batches. ``layout``, ``schedule``
    and ``messages`` belong to the pipeline; with ``halves``, its layout counts attention and MLP as layers of their
    own. ``kind`` is the kind of context parallelism. ``overlap`` belongs to tensor parallelism; ``keep`` then stores
    gathered inputs. ``recompute`` names modules inside every layer, and ``offload`` those whose activations wait in
    host memory. ``recipe`` is for FP8: ``+primary`` after it stores quantized weights, ``+wide`` never does, and
    ``+transformer_engine`` uses that package. ``backends`` are named by op (``attention:cudnn``). ``graph`` runs steps
    as CUDA graphs. With ``experts``, every layer has as many of width ``ffn``, divided over ``ep`` ranks; a token
    passes through ``topk`` of them. Random numbers choose them, so that all are equally busy, unless ``natural``.
    ``dim`` is the size of a head (0: ``hidden / heads``). ``level`` says what data-parallel replicas shard, and
    ``sharding`` gives further ``DataParallelOptions``, as ``prefetch:2``. With ``rank``, only low-rank adapters of
    that rank are trained, one for each linear layer of the layers, and all else is frozen; ``base`` then stores the
    frozen weights of the layers quantized (``int8``, ``nf4``).
    """

    layers: int = 16
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv: int = 8
    vocab: int = 32000
    seq: int = 4096
    mbs: int = 2
    micro: int = 4
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    steps: int = 8
    warmup: int = 4
    layout: str | None = None
    halves: bool = False
    schedule: str = "auto"
    messages: str = "auto"
    kind: str = "auto"
    overlap: str = "auto"
    keep: bool = False
    recompute: tuple[str, ...] = ()
    offload: tuple[str, ...] = ()
    precision: str = "bf16"
    recipe: str = "tensorwise"
    backends: tuple[str, ...] = ()
    graph: bool = False
    experts: int = 0
    topk: int = 2
    ep: int = 1
    natural: bool = False
    dim: int = 0
    level: str = "optim"
    sharding: tuple[str, ...] = ()
    rank: int = 0
    base: str = ""
    moments: str = "float32"
    device: str = "cuda"

    @property
    def head_dim(self) -> int:
        return self.dim or self.hidden // self.heads

    @property
    def model_ranks(self) -> int:
        """Number of GPUs of one replica of the model."""
        return self.tp * self.pp * self.cp

    @property
    def tokens(self) -> int:
        """Tokens in a step of one replica."""
        return self.mbs * self.micro * self.seq

    @property
    def tokens_per_gpu(self) -> float:
        return self.tokens / self.model_ranks

    @property
    def dense_weights(self) -> int:
        """Number of elements in the matrices of one layer that every token passes: attention, and MLP or router."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv)
        return attention + (self.hidden * self.experts if self.experts else 3 * self.hidden * self.ffn)

    @property
    def expert_weights(self) -> int:
        """Number of elements in the matrices of all experts of one layer."""
        return 3 * self.hidden * self.ffn * self.experts

    @property
    def layer_weights(self) -> int:
        """Number of elements in the matrices of one layer."""
        return self.dense_weights + self.expert_weights

    @property
    def active_weights(self) -> int:
        """Number of elements in the matrices of one layer that one token passes."""
        return self.dense_weights + (3 * self.hidden * self.ffn * self.topk if self.experts else 0)

    @property
    def matmul_weights(self) -> int:
        """Number of elements in matrix products: layers and head."""
        return self.layers * self.layer_weights + self.hidden * self.vocab

    @property
    def weights(self) -> int:
        """Number of all elements, with the input embedding but without norms."""
        return self.matmul_weights + self.hidden * self.vocab

    @property
    def adapter_weights(self) -> int:
        """Number of elements in all adapters: ``rank (in + out)`` for q, k, v, the projection, gate, up and down."""
        attended, keys = self.heads * self.head_dim, self.kv * self.head_dim
        attention = 4 * self.hidden + 2 * attended + 2 * keys
        return self.layers * self.rank * (attention + 3 * (self.hidden + self.ffn))

    @property
    def trained_weights(self) -> int:
        """Number of elements that the optimizer updates."""
        return self.adapter_weights or self.weights

    @property
    def attention_flops_per_token(self) -> float:
        """FLOPs of forward and backward of causal attention, which has half of all pairs."""
        return 6.0 * self.layers * self.heads * self.head_dim * self.seq

    @property
    def flops_per_token(self) -> float:
        """Model FLOPs: 6 x the matmul weights that a token passes (with the head, without the input embedding) + causal
        attention. Frozen weights have no gradient, so they count 4 x, and their adapters 6 x."""
        passed = self.layers * self.active_weights + self.hidden * self.vocab
        products = 4.0 * passed + 6.0 * self.adapter_weights if self.rank else 6.0 * passed
        return products + self.attention_flops_per_token

    def but(self, text: str) -> Step:
        """Return this step with other values, such as ``"pp=4 vpp=2 recompute=mlp.act,mlp_norm"``."""
        words = dict(word.split("=", 1) for word in text.split())
        unknown = set(words) - {field.name for field in fields(self)}
        if unknown:
            raise SystemExit(f"unknown {', '.join(sorted(unknown))} in {text!r}")
        return replace(self, **{name: _value(getattr(self, name), word) for name, word in words.items()})

    def words(self) -> list[str]:
        """Return the values that differ from the defaults, as words of a command line."""
        found: list[str] = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            found.append(f"--{field.name}")
            if value is not True:
                found += list(value) if isinstance(value, tuple) else [str(value)]
        return found

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        choices = {"precision": PRECISIONS, "device": ("cuda", "cpu")}
        for field in fields(cls):
            default, flag = field.default, f"--{field.name}"
            if isinstance(default, bool):
                parser.add_argument(flag, action="store_true")
            elif isinstance(default, tuple):
                parser.add_argument(flag, nargs="+", default=[])
            else:
                kind = int if isinstance(default, int) else str
                parser.add_argument(flag, type=kind, default=default, choices=choices.get(field.name))

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Step:
        return cls.of_record({field.name: getattr(arguments, field.name) for field in fields(cls)})

    @classmethod
    def of_record(cls, shape: dict[str, Any]) -> Step:
        """Make a step from the shape in a result. Missing values get defaults, and unknown values are ignored."""
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in shape.items() if name in known
        }
        return cls(**values)


def _value(old: Any, word: str) -> Any:
    if isinstance(old, bool):
        return word.lower() in ("1", "true", "yes")
    if isinstance(old, int):
        return int(word)
    return tuple(filter(None, word.split(","))) if isinstance(old, tuple) else word


SPLITS = ("tp", "pp", "vpp", "cp", "layout", "halves", "schedule", "messages", "kind", "ep")


def only_of(step: Step, allowed: Iterable[str]) -> str | None:
    """Return why a peer that supports only the ``allowed`` choices cannot run the step, or None."""
    plain = Step()
    asked = [
        name
        for name in (*SPLITS, "recompute", "offload", "graph", "experts", "sharding", "rank", "base", "moments")
        if name not in allowed and getattr(step, name) != getattr(plain, name)
    ]
    return f"this runner has no {', '.join(asked)}" if asked else None
