"""A causal language model of ``transformers`` on packed tokens. Its code stays as it is.

Its layers get a KV cache through the attention interface: what they hand to attention is stored, and attention reads
what is stored. So a model needs no code for caches, and ``past_key_values`` stay empty.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from megalight.errors import ConfigurationError, LayoutError
from megalight.models.fused import CausalLM
from megalight.models.hf_causal_lm.config import HFConfig
from megalight.nn.state import KeysAndValues, Slots
from megalight.nn.transformers_attention import Core, MaskPattern, calling, plain, use_attention, why_not_packed
from megalight.ops.batch_invariant import refuse
from megalight.ops.paged_attention import paged_attention
from megalight.parallel.apply import whole_tokens
from megalight.types import AttentionSpan, PackedSequences


@dataclass(frozen=True, eq=False)
class HFOutput:
    """The output of an :class:`HFModel`: one of them, or both if rows are scored beside the logits.

    Attributes:
        losses: ``[T]``, if labels are given; ``[M]`` of scored rows.
        logits: ``[T, V]``, if no labels are given.
    """

    losses: Tensor | None = None
    logits: Tensor | None = None


class AttentionCache(NamedTuple):
    """Makes the state of an attention module.

    Attributes:
        name: its name.
        span: what a token sees, if that is limited; None: all earlier tokens.
    """

    name: str
    span: AttentionSpan | None

    def make_state(self, slots: Slots) -> KeysAndValues:
        """Make the state: keys and values of every token."""
        return KeysAndValues.of(slots, self.span)


@dataclass(frozen=True, eq=False)
class PagedCore:
    """Attention to stored tokens: a core of :mod:`megalight.nn.transformers_attention`.

    Attributes:
        states: the state of each attention module, by name.
        caches: those of the attention modules.
    """

    states: Mapping[str, KeysAndValues]
    caches: Mapping[nn.Module, AttentionCache]

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
        """``q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, H, Dv]``. Keys are rotated already."""
        state, pages = self.states[self.caches[module].name], sequences.pages
        assert pages is not None
        if not state.read_after(pages):
            state.store(k, v, pages)
            return plain(module, q, k, v, sequences, pattern, scale=scale, softcap=softcap, dropout=0.0, sink=sink)
        q, stored = state.append(q, k, v, pages, None)
        return paged_attention(
            q,
            *stored[:3],
            scales=stored.scales,
            causal=pattern.causal,
            scale=scale,
            window=pattern.window,
            chunk=pattern.chunk,
            softcap=softcap,
            sink=sink,
        )


class HFModel(nn.Module):
    """Packs rows into what a model of ``transformers`` takes, and its logits or losses into rows again.

    Args:
        config: its configuration.
        net: the model; None: a new one.

    Attributes:
        net: the model of ``transformers``.
        core: what computes attention.
    """

    def __init__(self, config: HFConfig, net: nn.Module | None = None) -> None:
        super().__init__()
        if net is None:
            from transformers import AutoModelForCausalLM

            made: Any = AutoModelForCausalLM
            net = made.from_config(config.read, dtype=torch.get_default_dtype())
        self.config = config
        self.net: Any = net
        self.core: Core = plain
        # Models off the interface attend to all earlier tokens of a row, and know no documents.
        self.packs = use_attention(self.net) > 0
        taken = inspect.signature(self.net.forward).parameters
        self.positions, self.narrows = "position_ids" in taken, "logits_to_keep" in taken
        self._caches: dict[nn.Module, AttentionCache] = {}

    @classmethod
    def of(cls, net: Any) -> Self:
        """Return a model of ``transformers`` as one on packed tokens, which shares its weights.

        Raises:
            ConfigurationError: it is no causal language model that this release of ``transformers`` has.
        """
        config = HFConfig(net.config.to_dict())
        # Its own class may be that of our ops.
        if all(kind.__name__ != config.architecture for kind in type(net).__mro__):
            raise ConfigurationError(
                f"{type(net).__name__} is no causal language model: of {config.values['model_type']}, "
                f"{config.architecture} is."
            )
        return cls(config, net)

    def caches(self) -> Mapping[str, AttentionCache]:
        """Return what makes the state of each attention module, by name. The first call runs two tokens.

        Processes that hold the model together call this together.

        Raises:
            ConfigurationError: layers keep more of earlier tokens than keys and values of attention.
        """
        if not self._caches:
            self._caches = self._find_caches()
        return {cache.name: cache for cache in self._caches.values()}

    def _find_caches(self) -> dict[nn.Module, AttentionCache]:
        kind, text = type(self.net).__name__, self.config.read.get_text_config()
        reason = why_not_packed(self.net)
        if reason is None and not self.packs:
            chosen = self.net.config._attn_implementation
            reason = f"uses attn_implementation={chosen!r}, and keys and values are stored where it is the default"
        if reason is not None:
            raise ConfigurationError(f"{kind} {reason}, so the cache cannot keep what it needs of earlier tokens.")
        names = {module: name for name, module in self.net.named_modules()}
        found: dict[nn.Module, AttentionCache] = {}

        def record(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> Tensor:
            sequences, pattern = rest
            why = "runs twice" if module in found else None if pattern.causal else "sees later tokens"
            if why is not None or len(k) != len(q):
                raise ConfigurationError(
                    f"attention of {kind} in {names[module]} {why or 'has keys of other tokens'}, and the cache keeps "
                    "keys and values of causal attention, once for each module."
                )
            limited = pattern.window is not None or pattern.chunk is not None
            span = AttentionSpan(pattern.window, pattern.chunk) if limited else None
            found[module] = AttentionCache(names[module], span)
            return plain(module, q, k, v, sequences, pattern, **options)

        device = next(self.net.parameters()).device
        tokens, core = torch.zeros(2, dtype=torch.long, device=device), self.core
        self.core = record
        try:
            # As a module, so that its weights are there, also where hooks of it gather them.
            with torch.no_grad(), whole_tokens(self):
                self(tokens, PackedSequences.of_lengths([1, 1], device), rows=tokens[:1])
        except LayoutError as error:
            raise ConfigurationError(f"{kind} gets no cache: {error}") from error
        finally:
            self.core = core
        if len(found) < (layers := text.num_hidden_layers):
            raise ConfigurationError(
                f"{kind} has {layers} layers, and {len(found)} of them use the attention interface: the cache cannot "
                "keep what the others need of earlier tokens."
            )
        return found

    def forward(
        self,
        tokens: Tensor,
        sequences: PackedSequences,
        labels: Tensor | None = None,
        *,
        states: Mapping[str, Any] | None = None,
        rows: Tensor | None = None,
        scored: tuple[Tensor, Tensor] | None = None,
    ) -> HFOutput:
        """``tokens [T] -> losses [T]`` of ``labels [T]``, or ``logits [T, V]``. Negative labels have no loss.

        Args:
            tokens: ``[T]`` ids.
            sequences: how the tokens divide into sequences.
            labels: ``[T]``, the id that follows each token.
            states: the states of :meth:`caches`; None: there are no earlier tokens.
            rows: ``[N]`` indices of the tokens for which to compute logits; None: all.
            scored: rows and labels ``[M]`` whose losses to return beside the logits.

        Raises:
            LayoutError: the tokens are packed, and the model takes whole rows only.
        """
        refuse("models of transformers, whose code computes in its own ways")
        core = self.core if states is None else PagedCore(states, self._caches)
        if labels is None:
            return self._scored(tokens, sequences, core, rows, scored)
        # Fused models have a head that never makes all logits.
        losses = self.net.losses_of() if isinstance(self.net, CausalLM) else None
        if losses is not None:
            with calling(sequences, core):
                hidden = self.net.get_submodule(self.net.fused_form.decoder)(
                    **self._inputs(tokens, sequences), use_cache=False
                ).last_hidden_state
                return HFOutput(losses=losses(hidden.flatten(0, 1), labels))
        return HFOutput(losses=_losses(self._run(tokens, sequences, core, None), labels))

    def _scored(
        self,
        tokens: Tensor,
        sequences: PackedSequences,
        core: Core,
        rows: Tensor | None,
        scored: tuple[Tensor, Tensor] | None,
    ) -> HFOutput:
        if scored is None:
            return HFOutput(logits=self._run(tokens, sequences, core, rows))
        if rows is None:
            rows = torch.arange(len(tokens), device=tokens.device)
        logits = self._run(tokens, sequences, core, torch.cat([rows, scored[0]]))
        return HFOutput(losses=_losses(logits[len(rows) :], scored[1]), logits=logits[: len(rows)])

    def _inputs(self, tokens: Tensor, sequences: PackedSequences, one_row: bool = False) -> dict[str, Any]:
        rows = (1, len(tokens)) if one_row or sequences.uniform is None else sequences.uniform
        inputs: dict[str, Any] = {"input_ids": tokens.view(rows)}
        if self.positions:
            inputs["position_ids"] = sequences.positions.view(rows)
        whole = sequences.uniform == rows and sequences.context is None and sequences.pages is None
        if not whole and not (self.packs and self.positions):
            raise LayoutError(
                f"{type(self.net).__name__} does not use the attention interface of transformers with positions, so it "
                "takes whole rows only. Give rows of one document each, and do not divide them."
            )
        return inputs

    def _run(self, tokens: Tensor, sequences: PackedSequences, core: Core, rows: Tensor | None) -> Tensor:
        """Return the logits of rows: the head computes these alone."""
        inputs = self._inputs(tokens, sequences, one_row=rows is not None or sequences.pages is not None)
        keep = {} if rows is None or not self.narrows else {"logits_to_keep": rows}
        with calling(sequences, core):
            logits: Tensor = self.net(**inputs, use_cache=False, **keep).logits.flatten(0, 1)
        return logits if rows is None or self.narrows else logits.index_select(0, rows)


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    return nn.functional.cross_entropy(logits.to(wide), labels, reduction="none")
