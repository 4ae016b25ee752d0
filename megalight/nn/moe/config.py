"""The configuration of mixture-of-experts layers, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalight.errors import ConfigurationError
from megalight.ops.router import SCORES, Rule


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
        num_groups: the experts form as many groups of neighbours. A token first chooses groups, then experts in them.
            The best ``top_k // group_top_k`` scores of each are added up for the first choice. None: no groups.
        group_top_k: number of groups of each token.
        scale: factor of the weights.
    """

    top_k: int = 2
    score: Literal["softmax", "sigmoid"] = "softmax"
    pre_softmax: bool = False
    dtype: Literal["float32", "float64"] | None = "float32"
    num_groups: int | None = None
    group_top_k: int | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        _require(self.top_k >= 1, f"moe.router.top_k is {self.top_k}; it must be at least 1.")
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

    @property
    def rule(self) -> Rule:
        """The rule for :func:`megalight.ops.router.route`."""
        return Rule(self.top_k, self.score, self.pre_softmax, self.num_groups, self.group_top_k, self.scale)


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """Coefficients of the losses of each router. 0: no such loss.

    Attributes:
        aux_loss: balance of the experts over the tokens of a micro-batch (https://arxiv.org/abs/2101.03961).
        z_loss: mean square of the log of the softmax's denominator (https://arxiv.org/abs/2202.08906).
    """

    aux_loss: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("aux_loss", "z_loss"):
            value = getattr(self, name)
            _require(value >= 0, f"moe.balance.{name} is {value}; it must be at least 0.")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Feed-forward layers that are mixtures of experts.

    Attributes:
        num_experts: experts of each layer, ``E``.
        ffn_hidden_size: inner width of each expert. 0: that of the dense layers.
        pattern: which layers have experts, repeated over the depth: ``[false, true]`` means every other layer.
        router: how the router chooses.
        balance: losses that keep the experts equally busy.

    Raises:
        ConfigurationError: a value is out of range.
    """

    num_experts: int
    ffn_hidden_size: int = 0
    pattern: tuple[bool, ...] = (True,)
    router: RouterConfig = field(default_factory=RouterConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", tuple(self.pattern))
        _require(self.num_experts >= 1, f"moe.num_experts is {self.num_experts}; it must be at least 1.")
        _require(self.ffn_hidden_size >= 0, f"moe.ffn_hidden_size is {self.ffn_hidden_size}; it must be at least 0.")
        _require(any(self.pattern), f"moe.pattern is {list(self.pattern)}; at least one entry must be true.")
        _require(
            self.router.top_k <= self.num_experts,
            f"moe.router.top_k={self.router.top_k} is above moe.num_experts={self.num_experts}; lower the one or raise "
            "the other.",
        )
        try:
            self.router.rule.check(self.num_experts)
        except ValueError as error:
            raise ConfigurationError(f"moe.router: {error}") from error
