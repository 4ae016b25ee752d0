"""The MoE router: it chooses the experts of each token and balances their loads.

Loads are balanced by jitter, Sinkhorn, expert bias, and auxiliary losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalight.nn.aux_losses import Counting, Pool
from megalight.nn.init import ConstantInit, Initializer, Normal
from megalight.nn.moe.config import BalanceConfig, CapacityConfig, RouterConfig
from megalight.nn.state import LayerContext
from megalight.ops.autograd import apply, once_differentiable, save_input, saved_input
from megalight.ops.batch_invariant import MODE, refuse, rowwise
from megalight.ops.batch_invariant.matmul import product as invariant_product
from megalight.ops.common import HALF, wide
from megalight.ops.linear import linear
from megalight.ops.permute import drop
from megalight.ops.router import Routes, Statistics, route, statistics


class Jitter(nn.Module):
    """In training, multiplies its input by random numbers from ``1 - p`` to ``1 + p``."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with noise, in its own dtype."""
        if not self.training or not self.p:
            return x
        return x * torch.empty_like(x).uniform_(1 - self.p, 1 + self.p)

    def extra_repr(self) -> str:
        """Return the range, for printing."""
        return f"p={self.p}"


class RunningLoads:
    """Sums of the counts of all micro-batches since the step began.

    Recompute asks for the sums again, in a later pass, and gets those of the first one.

    Attributes:
        sums: ``[S, E + 1]`` float64: choices of each expert, and tokens. None before the first micro-batch.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self._seen: WeakKeyDictionary[LayerContext, Tensor] = WeakKeyDictionary()

    def add(self, counts: Tensor, context: LayerContext) -> Tensor:
        """Add the counts of one micro-batch, unless it does not count, and return the sums."""
        if context not in self._seen:
            if self.sums is None or self.sums.device != counts.device:
                self.sums = torch.zeros_like(counts, dtype=torch.float64)
            # Times zero, and not left out: a recorded pass always runs the same ops.
            self.sums.add_(counts, alpha=1 if context.aux_losses.counts else 0)
            # A copy of the sums as they are now. Later micro-batches go on adding to them.
            self._seen[context] = self.sums.to(counts.dtype, copy=True)
        return self._seen[context]

    def reset(self) -> None:
        """Begin a step."""
        if self.sums is not None:
            # In place, because a recorded pass adds to this address.
            self.sums.zero_()


# Choice of experts by Sinkhorn's iteration (https://arxiv.org/abs/2103.16716).


TOLERANCE, LIMIT = 1e-4, 100
"""The iteration ends when the factors of the experts change less on average, or after so many rounds."""


def sinkhorn_routes(logits: Tensor, top_k: int, *, balanced: bool) -> Routes:
    """Weigh by scores over all experts, a softmax or, for a single expert, sigmoids; choose by balanced logits.

    Args:
        logits: ``[T, E]``.
        top_k: number of experts of each token.
        balanced: False: choose by the scores.
    """
    # At least float32: the iteration multiplies many small numbers.
    logits = logits.to(wide(logits.dtype))
    scores = logits.sigmoid() if top_k == 1 else logits.softmax(-1)
    # Detached: gradients flow through the scores only, not through the choice.
    experts = (sinkhorn(logits.detach()) if balanced else scores.detach()).topk(top_k, dim=-1).indices
    return Routes(scores.gather(-1, experts), experts)


def sinkhorn(logits: Tensor) -> Tensor:
    """Scale rows and columns of ``exp(logits) [T, E]``: each row sums to ``1 / T``, and each column to ``1 / E``."""
    if not len(logits):
        return logits
    # a common factor does not change the result, and avoids overflow
    matrix = (logits - logits.max()).exp()
    tiny = torch.finfo(matrix.dtype).tiny
    rows, columns = matrix.new_ones(matrix.shape[0]), matrix.new_ones(matrix.shape[1])
    for _ in range(LIMIT):
        # Clamped: a row or column of zeros would give infinity, and then NaN.
        rows = 1 / (len(rows) * (matrix @ columns).clamp(min=tiny))
        before, columns = columns, 1 / (len(columns) * (rows @ matrix).clamp(min=tiny))
        # The host reads this number, so it waits for the device in each round.
        if float((columns - before).abs().mean() / columns.abs().mean()) < TOLERANCE:
            break
    return rows[:, None] * matrix * columns


class Router(Counting):
    """Scores all experts for each token, and chooses ``top_k`` of them.

    Its losses are auxiliary losses (:mod:`megalight.nn.aux_losses`), summed over layers: ``router_aux_loss`` and so on.

    Args:
        hidden_size: ``h``.
        num_experts: ``E``.
        config: how it chooses.
        balance: coefficients of its losses.
        capacity: limits the number of tokens of each expert.
        std: standard deviation of the initial weight.

    Attributes:
        weight: ``[E, h]``.
        bias: ``[E]``, or None.
        expert_bias: ``[E]`` float32 buffer, added to the scores for the choice alone; or None. The counts of each step
            update it.
        pool: where the tokens of a micro-batch are.
        observed: count the loads of the experts also if nothing here needs them.
        loads: ``[E]``, the number of choices of each expert in the last training step, from all devices; and
        dropped: how many of them exceeded the capacity. None before the first step, or if nothing was counted.
        losses: the mean of each loss over the micro-batches of that step, without its coefficient.
    """

    bias: nn.Parameter | None
    expert_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        config: RouterConfig | None = None,
        balance: BalanceConfig | None = None,
        capacity: CapacityConfig | None = None,
        *,
        std: float = 0.02,
    ) -> None:
        super().__init__()
        self.config = config or RouterConfig()
        self.balance = balance or BalanceConfig()
        self.capacity = capacity
        self.pool = Pool()
        self.jitter = Jitter(self.config.jitter)
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.register_parameter("bias", nn.Parameter(torch.empty(num_experts)) if self.config.bias else None)
        self.initializers: dict[str, Initializer] = {"weight": Normal(std), "bias": ConstantInit(0.0)}
        self.register_buffer("expert_bias", torch.zeros(num_experts) if self.config.expert_bias else None)
        self.running = RunningLoads()
        self.observed = False
        self.loads: Tensor | None = None
        self.dropped: Tensor | None = None
        self.losses: dict[str, Tensor] = {}
        self._forced: dict[int, Tensor] = {}

    def reset_parameters(self) -> None:
        """Set the buffer to zero; ``initializers`` describe the parameters."""
        if self.expert_bias is not None:
            self.expert_bias.zero_()

    @property
    def reads_replicas(self) -> bool:
        """Whether a loss reads counts of all replicas in the forward pass."""
        return bool(self.balance.global_aux_loss)

    def forward(self, hidden: Tensor, context: LayerContext) -> Routes:
        """``[T, h]`` -> the experts of each token, and their weights. Expert -1: the token was dropped."""
        # Jitter changes what the router reads, and not what experts get.
        logits = self.logits(self.jitter(hidden))
        if self.config.force_balance or self.config.sinkhorn or self.capacity is not None:
            refuse("routers that balance the tokens of a batch (force_balance, sinkhorn, capacity)")
        if self.config.force_balance:
            logits = self._force(logits)
        if self.config.sinkhorn:
            probs, chosen = sinkhorn_routes(logits, self.config.top_k, balanced=self.training)
        else:
            # The bias enters the choice alone. Weights come from the scores, so its steps do
            # not disturb gradients.
            probs, chosen = self._route(logits)
        experts = chosen
        if self.capacity is not None:
            priority = probs if self.capacity.keep == "probs" else None
            most = self.capacity.of(len(hidden), self.config.top_k, len(self.weight))
            # Dropped after the choice. Weights of other experts of the token do not grow.
            experts = drop(chosen, len(self.weight), most, priority)
        if self.training and torch.is_grad_enabled():
            # Losses see all choices, also dropped ones: they are to balance what the router wants.
            found = losses(self, logits, context)
            for name, value in found.items():
                coefficient = getattr(self.balance, name)
                # Sequences and tokens may be unequally divided over micro-batches.
                count = count_of(name, context.sequences)
                # the gradient of the probabilities always arrives
                probs = context.aux_losses.attach(f"router_{name}", coefficient * value, probs, count)
            # Recompute would count a second time.
            if context.aux_losses.counts and (self.observed or self.expert_bias is not None):
                self.count(self._counts(chosen, experts, found, context))
        return Routes(probs, experts)

    def _route(self, logits: Tensor) -> Routes:
        if MODE.on:
            return Routes(*rowwise(lambda row: route(row, self.config.rule, self.expert_bias), logits))
        return route(logits, self.config.rule, self.expert_bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """``[T, h] -> [T, E]``, in the router's dtype."""
        dtype = hidden.dtype
        if self.config.dtype is not None:
            dtype = torch.promote_types(dtype, getattr(torch, self.config.dtype))
        # With equal dtypes, the usual product serves: its weight gradient can be deferred, or added in place.
        if hidden.dtype == self.weight.dtype == dtype:
            return linear(hidden, self.weight, self.bias)
        half = hidden.is_cuda and hidden.dtype == self.weight.dtype and hidden.dtype in HALF and dtype == torch.float32
        out: Tensor
        if half and not (torch.is_grad_enabled() or MODE.on):
            # Products of half precision are exact in float32, in which tensor cores add them: nothing need be copied.
            out = torch.mm(hidden, self.weight.t(), out_dtype=dtype)
        else:
            out = apply(_WideProduct, hidden, self.weight, dtype)
        return out if self.bias is None else out + self.bias.to(dtype)

    def rows(self, num_tokens: int) -> int | None:
        """Return how many rows each expert gets for ``num_tokens`` tokens. None: as many as it is chosen by."""
        if self.capacity is None or not self.capacity.pad:
            return None
        return self.capacity.of(num_tokens, self.config.top_k, len(self.weight))

    def end_step(self, totals: Tensor | None) -> None:
        """Keep the loads and losses of the step, and move the expert bias against the loads."""
        # The next step begins, also if this one counted nothing.
        self.running.reset()
        if totals is None:
            return
        size = len(self.weight)
        self.loads, self.dropped, values = totals[:size], totals[size : 2 * size], totals[2 * size :]
        # The last entry counts the micro-batches of all devices.
        self.losses = dict(zip(self.balance.names, values[:-1] / values[-1], strict=True))
        # A frozen router keeps its choices: checkpoints of adapters hold no weights of the model.
        if self.expert_bias is not None and self.weight.requires_grad:
            # By the sign alone: steps of equal size, whatever the loads are (https://arxiv.org/abs/2408.15664).
            self.expert_bias.add_((self.loads.mean() - self.loads).sign(), alpha=self.config.expert_bias_rate)

    def _counts(self, chosen: Tensor, experts: Tensor, found: dict[str, Tensor], context: LayerContext) -> Tensor:
        """Return choices and drops of each expert, the terms of the losses, and 1; padding does not count."""
        mask = self.pool.mask(context.sequences)
        # float64: float32 counts no further than 16.8 million choices.
        weight = torch.ones(chosen.shape, dtype=torch.float64, device=chosen.device)
        if mask is not None:
            weight.masked_fill_(~mask[:, None], 0)
        size = len(self.weight)
        counts = weight.new_zeros(2 * size).index_add_(0, chosen.flatten(), weight.flatten())
        # Dropped copies are marked by -1 in `experts`, and their expert is in `chosen`.
        counts[size:].index_add_(0, chosen.flatten(), (weight * (experts < 0)).flatten())
        terms = [value.detach().to(counts.dtype) for value in found.values()]
        return torch.cat([counts, torch.stack([*terms, counts.new_ones(())])])

    def _force(self, logits: Tensor) -> Tensor:
        """Return random numbers, which are the same in every pass, with the gradient of the logits."""
        if len(logits) not in self._forced:
            # Devices draw different numbers, so that equal tokens on them do not all go to the same experts.
            generator = torch.Generator(logits.device).manual_seed(self.pool.place)
            self._forced[len(logits)] = torch.empty_like(logits).normal_(generator=generator)
        # The value is random. The gradient is that of the logits, so the backward costs
        # what it does in training.
        return self._forced[len(logits)] + logits - logits.detach()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Keep the expert bias in float32 when the module's dtype changes: its steps are too small for others."""
        before = self.expert_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if before is not None and self.expert_bias is not None and self.expert_bias.dtype != before.dtype:
            self.expert_bias = before.to(self.expert_bias.device)
        return self

    def extra_repr(self) -> str:
        """Return the sizes, for printing."""
        return f"{self.weight.shape[1]} -> {self.config.top_k} of {self.weight.shape[0]}"


class _WideProduct(torch.autograd.Function):
    """``x W^T`` in a wider dtype. It keeps ``x`` as it is, or its recipe. Gradients have their dtypes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        # The weight is read from the parameter in the backward: it has not changed, and no copy
        # in a wider dtype is kept.
        ctx.weight = weight
        save_input(ctx, x, needed=True)
        wide = x.to(dtype), weight.to(dtype)
        return invariant_product(*wide) if MODE.on else F.linear(*wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = saved_input(ctx), ctx.weight
        assert isinstance(x, Tensor)
        # Each gradient is computed in the wide dtype and rounded once, at the end.
        return (grad @ weight.to(grad.dtype)).to(x.dtype), (grad.T @ x.to(grad.dtype)).to(weight.dtype), None


if TYPE_CHECKING:
    from megalight.nn.moe.config import BalanceConfig
    from megalight.nn.moe.router import Router
    from megalight.types import PackedSequences


def losses(router: Router, logits: Tensor, context: LayerContext) -> dict[str, Tensor]:
    """Return this device's terms of a router's losses by name, without their coefficients; ``logits [T, E]``."""
    found = {}
    config, pool, top_k, score = router.balance, router.pool, router.config.top_k, router.config.score
    mask = pool.mask(context.sequences)
    if config.aux_loss or config.global_aux_loss or config.z_loss:
        # One pass over the logits gives the sums of all three losses.
        sums = statistics(logits, top_k, score, mask=mask)
    if mask is None and pool.whole and not config.global_aux_loss and logits.shape[0]:
        # The usual case, with few kernels: the host knows all numbers of tokens.
        if config.aux_loss:
            found["aux_loss"] = whole_balance_loss(sums, logits.shape[0], top_k)
        if config.z_loss:
            found["z_loss"] = sums.squares.sum() / logits.shape[0]
    elif config.aux_loss or config.global_aux_loss or config.z_loss:
        counts = torch.cat([sums.counts, _numbers(logits, None, mask)[:, None]], 1)
        # Over the devices that share the micro-batch. Counts have no gradient, so this needs no backward.
        means = pool.mean(counts)
        if config.aux_loss:
            found["aux_loss"] = balance_loss(sums, means, means, top_k)
        if config.global_aux_loss:
            loads = router.running.add(pool.mean_of_replicas(counts), context)
            found["global_aux_loss"] = balance_loss(sums, means, loads, top_k)
        if config.z_loss:
            found["z_loss"] = (sums.squares * _inverse(means[:, -1])).sum()
    if config.seq_aux_loss:
        bounds = pool.bounds(context.sequences)
        sums = statistics(logits, top_k, score, bounds, mask)
        means = pool.mean(torch.cat([sums.counts, _numbers(logits, bounds, mask)[:, None]], 1))
        found["seq_aux_loss"] = balance_loss(sums, means, means, top_k)
    # In the order of the configuration: the counts of a step are added place by place.
    return {name: found[name] for name in config.names}


_COUNTED: dict[str, Callable[[PackedSequences], int]] = {
    "seq_aux_loss": lambda sequences: sequences.num_sequences,
    "z_loss": lambda sequences: sequences.num_real_tokens,
}
"""What these losses of a micro-batch are means over; the others are those of a whole micro-batch."""


def count_of(name: str, sequences: PackedSequences) -> int:
    """Return the number of sequences or tokens that a loss of a micro-batch is the mean over, or 1."""
    return _COUNTED[name](sequences) if name in _COUNTED else 1


def counts_of(config: BalanceConfig, sequences: PackedSequences) -> dict[str, Tensor]:
    """Return the counts of losses over sequences or tokens, by their names in logs.

    A task returns them in ``aux_loss_counts``. Then each is the mean over all sequences, or tokens, of a step, however
    these divide into micro-batches.
    """
    names = [name for name in config.names if name in _COUNTED]
    # Made on the device, so that a CUDA graph can record it; batches of other sequences have a graph of their own.
    return {f"router_{name}": torch.full((), count_of(name, sequences), device=sequences.device) for name in names}


def balance_loss(sums: Statistics, means: Tensor, loads: Tensor, top_k: int) -> Tensor:
    """``E * sum_e f_e P_e``, 1 for balanced experts; the mean over pools (https://arxiv.org/abs/2101.03961).

    ``f_e`` is the share of expert ``e`` in all choices, and ``P_e`` the mean of its scores over the tokens of a pool.

    Args:
        sums: this device's sums for each of ``S`` pools.
        means: ``[S, E + 1]``, over the devices of the pool: the counts of choices, and the number of tokens.
        loads: ``[S, E + 1]``, the same for ``f_e``, up to a factor.
        top_k: number of experts of each token.
    """
    tokens = means[:, -1:]
    # a mean over the devices: the mean of this device's quotient with it, over the devices, is that of the sums
    shares, scores = loads[:, :-1] * _inverse(top_k * loads[:, -1:]), sums.scores * _inverse(tokens)
    return scores.shape[1] * (scores * shares).sum() / (tokens > 0).sum().clamp(min=1)


def whole_balance_loss(sums: Statistics, tokens: int, top_k: int) -> Tensor:
    """Return :func:`balance_loss` of one pool whose ``tokens`` are all on this device."""
    return (sums.scores * sums.counts).sum() * (sums.scores.shape[1] / (top_k * tokens**2))


def _numbers(logits: Tensor, bounds: Tensor | None, mask: Tensor | None) -> Tensor:
    """``[S]``: the number of tokens of each pool that count."""
    if mask is None:
        return logits.new_full((1,), len(logits)) if bounds is None else bounds.diff().to(logits.dtype)
    if bounds is None:
        return mask.sum(0, keepdim=True).to(logits.dtype)
    # The number of tokens that count before each place, so that two bounds give that of a sequence.
    before = torch.nn.functional.pad(mask.cumsum(0), (1, 0))
    return before[bounds.long()].diff().to(logits.dtype)


def _inverse(count: Tensor) -> Tensor:
    """``1 / count``; 0 for a pool without tokens."""
    # By infinity, not by a mask afterwards: the gradient of 1 / 0 would be NaN even where it is masked.
    return torch.where(count > 0, count, torch.inf).reciprocal()
