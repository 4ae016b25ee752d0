"""A GPT that is divided over ranks, called as a whole one is: generation without gathering its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.models.gpt import GPTConfig
from megalight.models.gpt.model import Output
from megalight.parallel.apply import whole_tokens
from megalight.parallel.layers import layers_of
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline import schedules
from megalight.parallel.pipeline.agenda import agenda_of
from megalight.parallel.pipeline.carry import Carry
from megalight.parallel.pipeline.executor import Executor
from megalight.types import PackedSequences

REPLICA_AXES = ("pp", "cp", "tp")
"""Mesh axes whose ranks hold one model together."""


class ParallelGPT(nn.Module):
    """This rank's part of a GPT under tensor, pipeline or context parallelism; every rank gets the logits.

    All ranks of a replica make and call it together, with equal arguments. Sequences are never divided here: under
    context parallelism every rank computes all tokens, and sequence parallelism is off meanwhile.

    Replicas call it as often as they like, with prompts of their own. Where experts lie on ranks of several replicas,
    these meet in every forward pass: all must call it equally often, as :func:`~megalight.inference.generate` does.

    Args:
        model: what this rank holds (a strategy's ``parallel_model``).
    """

    def __init__(self, model: ParallelModel) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(model.chunks)
        self.mesh = model.mesh
        self.device = model.device
        layout = model.layout
        self._coupling = model.coupling
        self._executor = Executor(model.chunks, layout, model.mesh, model.device)
        self._agenda = agenda_of(model.mesh.rank("pp"), schedules.build("forward_only", layout.pp, layout.vpp))
        self._form: tuple[torch.dtype, int] | None = None

    @property
    def config(self) -> GPTConfig:
        """Of the whole model."""
        config = self.chunks[0].config
        assert isinstance(config, GPTConfig)
        return config

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers on this rank, by global index: those that need a state here."""
        return {str(index): layer for chunk in self.chunks for index, layer in layers_of(chunk).items()}

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        sequences: PackedSequences,
        *,
        states: Mapping[str, Any] | None = None,
        rows: Tensor | None = None,
    ) -> Output:
        """Logits of whole sequences, on every rank.

        Args:
            tokens: ``[T]`` ids.
            sequences: how the tokens divide into sequences.
            states: what the layers on this rank keep of earlier tokens.
            rows: ``[N]`` indices of the tokens whose logits are wanted; None: of all.
        """

        def step(chunk: nn.Module, tokens: Tensor, carry: Carry | None) -> Carry:
            hidden = None if carry is None else carry["hidden"]
            output = chunk(tokens, sequences, hidden=hidden, states=states, rows=rows)
            return {"logits": output.logits} if output.hidden is None else {"hidden": output.hidden}

        with whole_tokens(self):
            last = self._executor.forward(self._agenda, [tokens], step)
        count = tokens.numel() if rows is None else rows.numel()
        return Output(logits=self._from_last_stage([carry["logits"] for carry in last], count))

    def agree(self, number: int) -> int:
        """The same number on all ranks of a replica: its first rank's."""
        group = self.mesh.group(*REPLICA_AXES)
        if group is None:
            return number
        box = [number]
        dist.broadcast_object_list(box, self.mesh.ranks(*REPLICA_AXES)[0], group, device=self.device)
        return box[0]

    def any_replica(self, wanted: bool) -> bool:
        """Whether this replica, or one that it meets in forward passes, wants another forward pass."""
        return wanted if self._coupling is None else self._coupling.most(int(wanted)) > 0

    def accompany(self) -> None:
        """Take part in another replica's forward pass, with one token that nobody reads."""
        self(torch.zeros(1, dtype=torch.long, device=self.device), PackedSequences.of_lengths([1], self.device))

    def _from_last_stage(self, logits: Sequence[Tensor], count: int) -> Tensor:
        """``[count, V]``, of which only the last stage has any."""
        group, source = self.mesh.group("pp"), self.mesh.ranks("pp")[-1]
        if group is None:
            return logits[0]
        if self._form is None:
            box = [(logits[0].dtype, logits[0].shape[-1])] if logits else [None]
            dist.broadcast_object_list(box, source, group, device=self.device)
            self._form = box[0]
        assert self._form is not None
        dtype, width = self._form
        found = logits[0].contiguous() if logits else torch.empty(count, width, dtype=dtype, device=self.device)
        dist.broadcast(found, source, group)
        return found
