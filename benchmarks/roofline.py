"""Lower bound of the time of a training step on each GPU, from measured rates of products, attention and memory.

    seconds = products / GEMM rate + attention / attention rate + bytes / memory rate

per GPU and optimizer step, for a replica with ``t = mbs micro seq`` tokens on ``tp pp cp`` GPUs with equal work:

- products: ``6 W t`` operations for the ``W`` matmul weights that a token passes (with the head, without the embedding;
  of experts, ``k``). Frozen weights have no gradient: ``4 W t``, and ``6 t`` for each weight of their adapters. In FP8,
  products of layers run at the FP8 rate, and those of the head and of adapters at the bf16 rate.
- attention: ``6 L H d s t``, causal, at the rate measured for forward and backward with 128 features per head.
- activations: the bytes that ops other than products move. Elements per token and layer, of 2 bytes in bf16:

  | | elements | |
  |---|---|---|
  | norm with residual, two of them | 8 h each | forward reads 2, writes 2; backward reads 3, writes 1 |
  | rotary on packed q, k, v | 4 (H + 2 Hkv) d | forward and backward each read and write once |
  | SwiGLU | 8 f | forward reads 2, writes 1; backward reads 3, writes 2 |
  | with experts: SwiGLU | 8 k f | as above, for each of ``k`` experts |
  | with experts: permute and unpermute | 4 (1 + k) h | forward and backward read a token and write ``k``, and back |
  | casts, in FP8 only | 2 (4 h + H d + (H + 2 Hkv) d + 3 f) | inputs and gradients of products are read, and written |
  | | | straight and transposed in 1 byte each |

  and once, after the layers, a norm (8 h) and cross entropy (3 V: statistics read, the gradient reads and writes).
- accumulation: each product that adds to a float32 gradient reads and writes it, 8 bytes per weight and micro-batch.
  Frozen weights have none. Experts' weights are divided over ``ep`` GPUs.
- optimizer: per weight, the norm of gradients reads 4 bytes, and zeroing them writes 4. On the shard, Adam reads
  gradient, moments and master, and writes moments, master and the bf16 weight: 30 bytes.

Not counted: messages (all of them could overlap), the bubble of a pipeline, weights of norms, rows of the input
embedding, launches. Recomputation is not counted, neither here nor in the model's FLOPs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from benchmarks.step import Step

TERMS = ("products", "attention", "activations", "accumulation", "optimizer")


@dataclass(frozen=True)
class Rates:
    """Measured ceilings of one device: operations per second of products and attention, bytes per second of copies."""

    gemm: float
    gemm_fp8: float
    attention: float
    memory: float


RATES = {"NVIDIA H200": Rates(gemm=667e12, gemm_fp8=1264e12, attention=514e12, memory=4.3e12)}
"""Device name -> sustained rates, measured at the power limit. The attention rate is that of cuDNN."""


@dataclass(frozen=True)
class Roofline:
    """Minimum seconds of a step by kind of work, and the resulting model FLOP/s per GPU."""

    products: float
    attention: float
    activations: float
    accumulation: float
    optimizer: float
    flops: float

    @property
    def seconds(self) -> float:
        return float(sum(getattr(self, term) for term in TERMS))

    @property
    def tflops(self) -> float:
        return self.flops / self.seconds / 1e12

    def record(self) -> dict[str, float]:
        """Return the values for a result file."""
        return {**{term: asdict(self)[term] for term in TERMS}, "seconds": self.seconds, "tflops": self.tflops}


def activation_bytes_per_token(step: Step) -> float:
    """Return the bytes that element-wise ops move for one token in the whole model, forward and backward."""
    qkv, attended = (step.heads + 2 * step.kv) * step.head_dim, step.heads * step.head_dim
    layer = 2 * 8 * step.hidden + 4 * qkv
    layer += 8 * step.topk * step.ffn + 4 * (1 + step.topk) * step.hidden if step.experts else 8 * step.ffn
    size = 4 if step.precision == "fp32" else 2
    moved = size * (step.layers * layer + 8 * step.hidden + 3 * step.vocab)
    if step.precision == "fp8":
        inputs = step.hidden + attended + step.hidden + step.ffn
        gradients = qkv + step.hidden + 2 * step.ffn + step.hidden
        cast = inputs + gradients
        moved += step.layers * 4 * cast
    return float(moved)


def roofline(step: Step, rates: Rates, replicas: int = 1) -> Roofline:
    """Return the minimum time of a step on each GPU. The optimizer state is sharded over ``replicas``."""
    share = step.tokens_per_gpu
    layers, head = step.layers * step.active_weights, step.hidden * step.vocab
    fast = rates.gemm_fp8 if step.precision == "fp8" else rates.gemm
    # Experts have ep times fewer replicas, so their optimizer state takes as much of each GPU as without ep.
    split = step.tp * step.pp
    saved = step.layers * step.expert_weights * (1 - 1 / step.ep)
    state = 30 * step.trained_weights / (split * step.cp * replicas) + 8 * (step.trained_weights - saved) / split
    times, adapters = (4, 6 * step.adapter_weights) if step.rank else (6, 0)
    accumulated = step.adapter_weights or step.matmul_weights - saved
    return Roofline(
        products=share * (times * (layers / fast + head / rates.gemm) + adapters / rates.gemm),
        attention=share * step.attention_flops_per_token / rates.attention,
        activations=share * activation_bytes_per_token(step) / rates.memory,
        accumulation=8 * step.micro * accumulated / split / rates.memory,
        optimizer=state / rates.memory,
        flops=share * step.flops_per_token,
    )
