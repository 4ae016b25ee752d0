"""Context parallelism of models of ``transformers``, whose attention is ours by their attention interface.

A model that is called with ``labels`` runs on this rank's share of the sequences, and returns the loss of all shares:
labels are shifted before the cut, the sum of losses is divided by the tokens of all shares, and the sums are added up.
So a ``training_step`` that only uses ``output.loss`` needs no change. Outputs for single tokens would be those of a
share, so they are left out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.attachments import CORE
from megalight.errors import LayoutError
from megalight.nn import InnerAttention
from megalight.nn.transformers_attention import Call, MaskPattern, calling, plain, why_not_packed
from megalight.parallel.context.attention import ContextAttention, ContextOptions
from megalight.parallel.context.spec import ContextGroups
from megalight.parallel.layers import is_transformers
from megalight.types import PackedSequences

IGNORED = -100
"""Label without a loss, unless ``ignore_index`` names another."""
REFUSED = ("past_key_values", "output_hidden_states", "output_attentions", "output_router_logits", "inputs_embeds")
"""Arguments of a call for which a share is not enough."""


class ContextCore:
    """Attention of this rank's share to the tokens of all shares: a core of :mod:`megalight.nn.transformers_attention`.

    Args:
        name: name of the model, for messages and for patterns of kinds.
        options: the kind of attention.
        groups: the process groups.
    """

    def __init__(self, name: str, options: ContextOptions, groups: ContextGroups) -> None:
        self.name, self.options, self.groups = name, options, groups
        self._kinds: dict[Any, ContextAttention] = {}

    def __call__(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sequences: PackedSequences,
        pattern: MaskPattern,
        *,
        scale: float | None,
        softcap: float | None,
        dropout: float,
        sink: Tensor | None,
    ) -> Tensor:
        """``q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, H, Dv]``. Whole sequences have plain attention.

        Raises:
            LayoutError: no kind can serve the layer.
        """
        if sequences.context is None:
            options = {"scale": scale, "softcap": softcap, "dropout": dropout, "sink": sink}
            return plain(module, q, k, v, sequences, pattern, **options)
        key = pattern, scale, softcap, dropout, sink is None
        if key not in self._kinds:
            inner = InnerAttention(
                causal=pattern.causal,
                scale=scale,
                window=pattern.window,
                chunk=pattern.chunk,
                softcap=softcap,
                dropout=dropout,
                softmax="vanilla" if sink is None else "learnable",
            )
            kind = self.options.kind_of(self.name)
            self._kinds[key] = ContextAttention(inner, self.name or "the model", kind, self.groups)
        found: Tensor = self._kinds[key](q, k, v, sequences, sink=sink)
        return found


class DividedCalls(nn.Module):
    """Goes before a class of ``transformers`` among the bases of a model whose calls are divided."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model on this rank's share: see :mod:`megalight.parallel.context.divided_calls`."""
        return _divided(self, super().forward, args, kwargs)


def divide_calls(name: str, model: nn.Module, options: ContextOptions, groups: ContextGroups, multiple: int) -> None:
    """Divide calls of a model with labels over the ranks along ``cp``.

    Args:
        name: its name, for messages.
        model: a causal language model of ``transformers``.
        options: the kind of attention.
        groups: the process groups.
        multiple: rows of a share have a multiple of so many tokens.

    Raises:
        LayoutError: the model mixes tokens in another way than by attention, or needs all positions at once.
    """
    if reason := why_not(model):
        raise LayoutError(f"{name or 'the model'} ({type(model).__name__}) {reason}. Set context_parallel=1.")
    CORE.set(model, (ContextCore(name, options, groups), multiple))
    if not isinstance(model, DividedCalls):
        model.__class__ = _divided_class(type(model))  # type: ignore[arg-type]


@cache
def _divided_class(kind: Any) -> type[nn.Module]:
    # With its name: folders are written with it.
    return type(kind.__name__, (DividedCalls, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def interfaces_of(root: nn.Module) -> list[str]:
    """Return the names of the models of ``transformers`` in a module, without those inside of others."""
    found: list[str] = []
    for name, module in root.named_modules():
        if is_transformers(module) and not any(name.startswith(f"{outer}." if outer else "") for outer in found):
            found.append(name)
    return found


def why_not(model: nn.Module) -> str | None:
    """Return why a model of ``transformers`` cannot run on shares of sequences; None: it can."""
    if reason := why_not_packed(model):
        return reason
    config = getattr(model, "config").get_text_config()  # noqa: B009
    if getattr(config, "output_router_logits", False):
        return "has a loss of its routers (output_router_logits), which is no sum over tokens"
    if dropout := getattr(config, "attention_dropout", 0.0):
        return f"has attention_dropout={dropout}, which attention to other shares does not have"
    return None


def _divided(model: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    core, multiple = CORE.get(model)
    bound = inspect.signature(forward).bind(*args, **kwargs)
    given = {**bound.arguments, **bound.arguments.get("kwargs", {})}
    given.pop("kwargs", None)
    labels, name = given.pop("labels", None), type(model).__name__
    if labels is None:
        if torch.is_grad_enabled() and model.training:
            raise LayoutError(
                f"{name} is called without labels in training, and context_parallel={core.groups.mesh.cp} gives each "
                "rank a share of the tokens: a loss of your own code would see that alone. Pass labels=... to the "
                "model and use its loss, or set context_parallel=1."
            )
        # Each rank computes all of it, as in generation.
        return forward(*args, **kwargs)
    for each in REFUSED:
        if given.get(each) is not None and given[each] is not False:
            raise LayoutError(
                f"{name} is called with {each}, and context_parallel={core.groups.mesh.cp} gives each rank a share of "
                "the tokens. Leave it out, or set context_parallel=1."
            )
    ids = given.pop("input_ids")
    batch, length = ids.shape
    _check_padding(name, given.pop("attention_mask", None))
    positions = given.pop("position_ids", None)
    places = torch.arange(length, device=ids.device) if positions is None else positions
    places = places.expand(batch, length)
    sequences = _documents(batch, length, ids.device, positions)
    rows = batch if sequences.uniform is not None else 1
    share, index = sequences.zigzag(core.groups.mesh.rank("cp"), core.groups.mesh.cp, multiple * rows)
    shape, padding, index = share.uniform or (1, share.num_tokens), index < 0, index.clamp(min=0)
    ignored = given.pop("ignore_index", IGNORED)
    # Before the cut: the next token may be in another share.
    following = given.pop("shift_labels", None)
    if following is None:
        following = nn.functional.pad(labels, (0, 1), value=ignored)[:, 1:]
    count = given.pop("num_items_in_batch", None)
    count = (following != ignored).sum() if count is None else torch.as_tensor(count, device=ids.device)

    def take(values: Tensor, filler: int) -> Tensor:
        return values.reshape(-1)[index].masked_fill(padding, filler).view(shape)

    following = following.to(ids.device)
    mine = take(following.masked_fill(following == ignored, IGNORED), IGNORED)
    given |= {"input_ids": take(ids, 0), "position_ids": take(places, 0), "use_cache": False, "return_dict": True}
    with calling(share, core) as call, _own_loss(model, mine.numel(), count) as losses:
        output = forward(**given, labels=mine, shift_labels=mine, num_items_in_batch=count)
    _check_call(model, call, losses)
    group = core.groups.all
    assert group is not None
    total: Tensor = _SumOfShares.apply(output.loss, group)  # type: ignore[no-untyped-call]
    return type(output)(loss=total)


def _check_padding(name: str, mask: Tensor | None) -> None:
    """Refuse padding that tokens behind it would see. Behind the last token, nothing real sees it.

    Raises:
        LayoutError: there is padding before a token, or the mask is not of tokens.
    """
    if mask is None:
        return
    if mask.ndim != 2 or bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise LayoutError(
            f"{name} is called with an attention_mask that hides tokens before others, and shares of sequences have no "
            "masks. Pad on the right, or pack documents with position_ids that restart, or set context_parallel=1."
        )


def _documents(batch: int, length: int, device: torch.device, positions: Tensor | None) -> PackedSequences:
    """Return the sequences of rows. Where positions do not go on by one, another document begins.

    Raises:
        LayoutError: tokens have positions on several axes.
    """
    if positions is None:
        return PackedSequences.of_uniform(batch, length, device)
    if positions.ndim != 2:
        raise LayoutError(f"position_ids has shape {list(positions.shape)}; shares of sequences take [B, S].")
    first = torch.ones(batch, length, dtype=torch.bool, device=positions.device)
    first[:, 1:] = positions.expand(batch, length).diff(dim=1) != 1
    starts = first.flatten().nonzero().flatten().tolist()
    return PackedSequences.of_lengths(
        [b - a for a, b in zip(starts, [*starts[1:], batch * length], strict=True)], device
    )


@contextmanager
def _own_loss(model: nn.Module, tokens: int, count: Tensor) -> Iterator[list[str]]:
    """Sum the losses of this share inside, and divide them by the number of all. Yields a list that the loss extends.

    Args:
        model: the model.
        tokens: tokens of the share.
        count: tokens of all shares that have a label.

    Raises:
        LayoutError: the model has a loss of its own, or shifts labels itself.
    """
    found: Any = getattr(model, "loss_function")  # noqa: B009
    called: list[str] = []
    if getattr(found, "__name__", "") != "ForCausalLMLoss":
        raise LayoutError(
            f"{type(model).__name__} has the loss {getattr(found, '__name__', found)!r}, and shares of sequences are "
            "summed for the cross entropy of the next token only. Set context_parallel=1."
        )

    @functools.wraps(found)  # fused heads know the loss by its name
    def loss(logits: Tensor, labels: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        called.append("loss")
        if labels.numel() != tokens:
            raise LayoutError(
                f"{type(model).__name__} shifts labels before its loss, and those of a share are shifted already. "
                "Set context_parallel=1."
            )
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)
        total = nn.functional.cross_entropy(wide, labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / count  # which some models do not hand on

    setattr(model, "loss_function", loss)  # noqa: B010  (of transformers, no module)
    try:
        yield called
    finally:
        setattr(model, "loss_function", found)  # noqa: B010


def _check_call(model: nn.Module, call: Call, losses: list[str]) -> None:
    """Check that the model has asked for our attention in each layer, and for our loss.

    Raises:
        LayoutError: it did not.
    """
    layers = getattr(model, "config").get_text_config().num_hidden_layers  # noqa: B009
    if len(call.layers) < layers:
        raise LayoutError(
            f"{type(model).__name__} has {layers} layers, and {len(call.layers)} of them used the attention interface: "
            "the others saw a share of the tokens alone. Set context_parallel=1."
        )
    if not losses and not getattr(model, "sums_losses", False):
        raise LayoutError(
            f"{type(model).__name__} computes its loss by itself, as a mean over the tokens that it gets, and "
            "context_parallel gives it a share of them. Set context_parallel=1."
        )


class _SumOfShares(torch.autograd.Function):
    """``[] -> []``: the sum over ranks, which all of them use in the same way."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, group: ProcessGroup) -> Tensor:
        ctx.ranks = group.size()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # The sum of equal gradients of all ranks.
        return grads[0] * ctx.ranks, None
