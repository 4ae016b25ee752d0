"""The configuration of mixture-of-experts layers, checked when it is made."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import ceil, isfinite
from typing import Literal

from megalight.errors import ConfigurationError
from megalight.ops.router import SCORES, Rule

EXPERT_BIAS_RATE = 1e-3
"""The default step of an expert's bias (https://arxiv.org/abs/2408.15664)."""

MAX_EXPERTS = 10_000
"""Most experts of a layer. A file may claim any number, and all are built before shapes are compared."""


def _require(good: bool, message: str) -> None:
    if not good:
        raise ConfigurationError(message)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How a router chooses the experts of a token.

    Attributes:
        top_k: number of experts of each token.
        score: ``softmax`` or ``sigmoid``. Sigmoid scores of the chosen experts are divided by their sum if there are
            several (https://arxiv.org/abs/2412.19437).
        pre_softmax: take the softmax over all experts, and use its largest values as they are. False: take it over
            the chosen experts alone, so that the weights of a token add up to 1.
        dtype: dtype of logits and probabilities. A wider dtype of the hidden states wins. None: that of the hidden
            states.
        num_groups: the experts form as many groups of neighbors. A token first chooses groups, then experts in them.
            The best ``group_experts`` scores of each are added up for the first choice. None: no groups.
        group_top_k: number of groups of each token.
        group_experts: see ``num_groups``; 1 for DeepSeek-V2. None: ``top_k // group_top_k``.
        scale: factor of the weights.
        bias: whether logits have a bias.
        jitter: in training, the router's input is multiplied by random numbers from ``1 - jitter`` to ``1 + jitter``
            (https://arxiv.org/abs/2101.03961).
        expert_bias: a bias per expert, added to its score for the choice alone. After each step it moves up for experts
            with fewer tokens than the mean, and down for others (https://arxiv.org/abs/2408.15664).
        expert_bias_rate: how far it moves.
        sinkhorn: in training, choose by logits that are normalized over tokens and experts in turn, so that experts are
            equally busy in each micro-batch on each device (https://arxiv.org/abs/2103.16716). The host waits for the
            device.
        force_balance: replace logits by random numbers, for benchmarks: experts are then equally busy. Logits get
            gradients as before.
    """

    top_k: int = 2
    score: Literal["softmax", "sigmoid"] = "softmax"
    pre_softmax: bool = False
    dtype: Literal["float32", "float64"] | None = "float32"
    num_groups: int | None = None
    group_top_k: int | None = None
    group_experts: int | None = None
    scale: float = 1.0
    bias: bool = False
    jitter: float = 0.0
    expert_bias: bool = False
    expert_bias_rate: float = EXPERT_BIAS_RATE
    sinkhorn: bool = False
    force_balance: bool = False

    def __post_init__(self) -> None:
        _require(
            isinstance(self.top_k, int) and self.top_k >= 1,
            f"moe.router.top_k is {self.top_k}; it must be a whole number, at least 1.",
        )
        _require(
            isfinite(self.scale) and self.scale > 0,
            f"moe.router.scale is {self.scale}; it must be finite and above 0. 1 leaves weights as they are.",
        )
        _require(self.score in SCORES, f"moe.router.score is {self.score!r}; it must be one of {', '.join(SCORES)}.")
        _require(
            self.dtype in ("float32", "float64", None),
            f"moe.router.dtype is {self.dtype!r}; it must be float32, float64 or null.",
        )
        _require(
            self.score == "softmax" or not self.pre_softmax,
            "moe.router.pre_softmax=true belongs to moe.router.score=softmax; sigmoid scores have no softmax.",
        )
        _require(
            self.top_k > 1 or self.pre_softmax or self.score != "softmax",
            "moe.router.top_k=1 with a softmax over the chosen expert: its weight would always be 1, so the router "
            "would learn nothing. Set moe.router.pre_softmax=true.",
        )
        _require(
            0 <= self.jitter < 1,
            f"moe.router.jitter is {self.jitter}; it must be at least 0 and below 1. 0 leaves the input as it is.",
        )
        _require(
            self.score == "sigmoid" or not self.expert_bias,
            f"moe.router.expert_bias=true with moe.router.score={self.score}; the bias is made for sigmoid scores. Set "
            "moe.router.score=sigmoid.",
        )
        rate = self.expert_bias_rate
        _require(
            isfinite(rate) and rate >= 0,
            f"moe.router.expert_bias_rate is {rate}; it must be finite and at least 0. 0 keeps the bias as it is, and "
            f"{EXPERT_BIAS_RATE} is usual.",
        )
        _require(
            self.expert_bias or rate == EXPERT_BIAS_RATE,
            f"moe.router.expert_bias_rate={rate} without a bias does nothing. Set moe.router.expert_bias=true, or "
            "leave the rate out.",
        )
        _require(
            not self.sinkhorn or (self.score == "softmax" and self.pre_softmax and self.num_groups is None),
            "moe.router.sinkhorn=true weighs by a softmax over all experts. Set moe.router.score=softmax and "
            "moe.router.pre_softmax=true, and leave num_groups out.",
        )

    @cached_property
    def rule(self) -> Rule:
        """The rule for :func:`megalight.ops.router.route`."""
        groups = self.num_groups, self.group_top_k
        return Rule(self.top_k, self.score, self.pre_softmax, *groups, self.scale, self.group_experts)


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """Coefficients of the losses of each router. 0: no such loss.

    Attributes:
        aux_loss: balance of the experts over the tokens of a micro-batch (https://arxiv.org/abs/2101.03961).
        seq_aux_loss: balance over each sequence, averaged over the sequences (https://arxiv.org/abs/2405.04434).
        global_aux_loss: balance over all micro-batches of the step so far, of all replicas
            (https://arxiv.org/abs/2501.11873).
        z_loss: mean square of the log of the softmax's denominator (https://arxiv.org/abs/2202.08906).
    """

    aux_loss: float = 0.0
    seq_aux_loss: float = 0.0
    global_aux_loss: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            _require(
                isfinite(value) and value >= 0,
                f"moe.balance.{name} is {value}; it must be finite and at least 0. 0 means no such loss.",
            )

    @cached_property
    def names(self) -> list[str]:
        """Names of the losses with a coefficient, in order."""
        return [name for name, value in asdict(self).items() if value]


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """A limit of the number of tokens of each expert. Others are dropped: the expert does not see them.

    Attributes:
        factor: a device with ``T`` tokens sends at most ``ceil(T * top_k / num_experts * factor)`` to each expert.
        keep: which tokens an expert keeps: those with the highest weights (``probs``), or the first (``position``).
        pad: fill up every expert with rows of zeros, so that shapes do not depend on the routes.
    """

    factor: float
    keep: Literal["probs", "position"] = "probs"
    pad: bool = False

    def __post_init__(self) -> None:
        _require(
            isfinite(self.factor) and self.factor > 0,
            f"moe.capacity.factor is {self.factor}; it must be finite and above 0. Leave capacity out to drop none.",
        )
        _require(
            self.keep in ("probs", "position"), f"moe.capacity.keep is {self.keep!r}; it must be probs or position."
        )

    def of(self, num_tokens: int, top_k: int, num_experts: int) -> int:
        """Return the number of tokens that each expert gets at most from a device with ``num_tokens``."""
        # At least one row, and no more than there are tokens: an expert sees a token once.
        return max(1, min(ceil(num_tokens * top_k / num_experts * self.factor), num_tokens))


@dataclass(frozen=True, kw_only=True)
class SharedConfig:
    """A feed-forward network that all tokens pass through, beside the experts (https://arxiv.org/abs/2401.06066).

    Attributes:
        ffn_hidden_size: its inner width. That of several shared experts is the sum of theirs.
        gate: multiply its output by a sigmoid of one learned projection of the input.
    """

    ffn_hidden_size: int
    gate: bool = False

    def __post_init__(self) -> None:
        size = self.ffn_hidden_size
        _require(size >= 1, f"moe.shared.ffn_hidden_size is {size}; it must be at least 1.")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Feed-forward layers that are mixtures of experts.

    Attributes:
        num_experts: experts of each layer, ``E``.
        ffn_hidden_size: inner width of each expert. 0: that of the dense layers.
        pattern: which layers have experts, repeated over the depth: ``[false, true]`` means every other layer.
        router: how the router chooses.
        balance: losses that keep the experts equally busy.
        capacity: limits the number of tokens of each expert. None: no token is dropped.
        shared: the shared expert, a network for all tokens, whose output is added. None: there is none.
        bias: whether the projections of the experts have biases.
        glu_offset: added to the second factor of a gated activation (1 in GPT-OSS).
        clamp: limits the first factor's argument from above, and the second factor from both sides, before that. None:
            no limit.
        weigh_input: multiply the input of an expert by the router's weight, instead of its activation (Llama 4). Only
            for ``top_k=1``.
        fp8_input_store: keep the input of the activation in 8 bits (e4m3) for the backward pass, instead of 16: a
            quarter of the memory of an expert's activations less. For ``swiglu`` and ``quick_geglu``.

    Raises:
        ConfigurationError: a value is out of range.
    """

    num_experts: int
    ffn_hidden_size: int = 0
    pattern: tuple[bool, ...] = (True,)
    router: RouterConfig = field(default_factory=RouterConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    capacity: CapacityConfig | None = None
    shared: SharedConfig | None = None
    bias: bool = False
    glu_offset: float = 0.0
    clamp: float | None = None
    weigh_input: bool = False
    fp8_input_store: bool = False

    def __post_init__(self) -> None:
        # From a recipe it comes as a list, and a configuration must be hashable.
        object.__setattr__(self, "pattern", tuple(self.pattern))
        _require(
            1 <= self.num_experts <= MAX_EXPERTS,
            f"moe.num_experts is {self.num_experts}; it must be at least 1, and at most {MAX_EXPERTS}.",
        )
        _require(self.ffn_hidden_size >= 0, f"moe.ffn_hidden_size is {self.ffn_hidden_size}; it must be at least 0.")
        _require(any(self.pattern), f"moe.pattern is {list(self.pattern)}; at least one entry must be true.")
        _require(
            self.router.top_k <= self.num_experts,
            f"moe.router.top_k={self.router.top_k} is above moe.num_experts={self.num_experts}; lower the one or raise "
            "the other.",
        )
        _require(
            self.clamp is None or (isfinite(self.clamp) and self.clamp > 0),
            f"moe.clamp is {self.clamp}; it must be finite and above 0. null means no limit.",
        )
        _require(
            isfinite(self.glu_offset),
            f"moe.glu_offset is {self.glu_offset}; it must be finite. 0 leaves the second factor as it is.",
        )
        _require(
            not self.weigh_input or self.router.top_k == 1,
            f"moe.weigh_input=true with moe.router.top_k={self.router.top_k}: the weights must multiply "
            "activations. Set top_k=1, or leave weigh_input out.",
        )
        balance = self.balance
        _require(
            not self.router.sinkhorn or not (balance.aux_loss or balance.seq_aux_loss or balance.global_aux_loss),
            "moe.router.sinkhorn=true balances the experts itself. Leave the balance losses at 0, or sinkhorn out.",
        )
        _require(
            not self.router.sinkhorn or self.capacity is None,
            "moe.router.sinkhorn=true with moe.capacity: the experts are balanced already. Leave out one of the two.",
        )
        try:
            self.router.rule.check(self.num_experts)
        except ValueError as error:
            raise ConfigurationError(f"moe.router: {error}") from error
