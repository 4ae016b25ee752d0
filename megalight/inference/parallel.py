"""A GPT divided over ranks that is called like a whole GPT, to generate without gathering its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalight.models.gpt import GPTConfig
from megalight.models.gpt.model import Output
from megalight.models.vision import Pictures
from megalight.models.vlm.config import VLMConfig
from megalight.parallel.apply import whole_tokens
from megalight.parallel.layers import layers_of
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline import schedules
from megalight.parallel.pipeline.agenda import agenda_of
from megalight.parallel.pipeline.carry import Carry
from megalight.parallel.pipeline.executor import Executor
from megalight.parallel.transform import APPLIED
from megalight.types import PackedSequences

REPLICA_AXES = ("pp", "cp", "tp")
"""Mesh axes over which one replica of the model is divided."""


class ParallelGPT(nn.Module):
    """This rank's part of a GPT with tensor, pipeline or context parallelism. Every rank gets the logits.

    All ranks of a replica construct and call it together, with equal arguments. Sequences are not divided: with context
    parallelism every rank computes all tokens, and sequence parallelism is off during the call.

    Replicas usually call it independently, with their own prompts. But if experts are on ranks of several replicas,
    these communicate in every forward pass and must call it equally often, as :func:`~megalight.inference.generate`
    does.

    Args:
        model: this rank's part of the model (a strategy's ``parallel_model``).
    """

    def __init__(self, model: ParallelModel) -> None:
        super().__init__()
        # In a list of modules, so that modes and `.to` reach the chunks.
        self.chunks = nn.ModuleList(model.chunks)
        self.mesh = model.mesh
        self.device = model.device
        # Which adapters the whole model has, also where this rank's layers have none.
        self.__dict__[APPLIED] = model.root.__dict__.get(APPLIED, [])
        layout = model.layout
        self._coupling = model.coupling
        self._executor = Executor(model.chunks, layout, model.mesh, model.device)
        # One micro-batch, through all stages.
        self._agenda = agenda_of(model.mesh.rank("pp"), schedules.build("forward_only", layout.pp, layout.vpp))
        self._form: tuple[torch.dtype, int] | None = None

    @property
    def config(self) -> GPTConfig | VLMConfig:
        """Configuration of the whole model."""
        config = self.chunks[0].config
        assert isinstance(config, GPTConfig | VLMConfig)
        return config

    @property
    def layers(self) -> dict[str, nn.Module]:
        """The layers on this rank by global index. These need a state here."""
        return {str(index): layer for chunk in self.chunks for index, layer in layers_of(chunk).items()}

    @torch.no_grad()
    def forward(
        self,
        tokens: Tensor,
        sequences: PackedSequences,
        *,
        states: Mapping[str, Any] | None = None,
        rows: Tensor | None = None,
        pictures: Pictures | None = None,
    ) -> Output:
        """Compute the logits of whole sequences, on every rank.

        Args:
            tokens: ``[T]`` ids.
            sequences: how the tokens divide into sequences.
            states: the states of the layers on this rank.
            rows: ``[N]`` indices of the tokens for which to compute logits. None means all tokens.
            pictures: the images of the sequences, for a model that reads images.
        """

        def step(chunk: nn.Module, tokens: Tensor, carry: Carry | None) -> Carry:
            hidden = None if carry is None else carry["hidden"]
            # Only the stage with the embedding reads images.
            seen: dict[str, Any] = {} if pictures is None or chunk.embed is None else {"pictures": pictures}
            if carry is not None and "memory" in carry:
                seen["memory"] = carry["memory"]
            output = chunk(tokens, sequences, hidden=hidden, states=states, rows=rows, **seen)
            if output.hidden is None:
                return {"logits": output.logits}
            return {"hidden": output.hidden} | ({} if output.memory is None else {"memory": output.memory})

        # New tokens are few, and any number of them: they do not divide by tp.
        with whole_tokens(self):
            last = self._executor.forward(self._agenda, [tokens], step)
        count = tokens.numel() if rows is None else rows.numel()
        return Output(logits=self._from_last_stage([carry["logits"] for carry in last], count))

    def agree(self, number: int) -> int:
        """Return the number of the replica's first rank, on all its ranks."""
        group = self.mesh.group(*REPLICA_AXES)
        if group is None:
            # Over the whole replica, because its ranks sample the same tokens.
            return number
        box = [number]
        dist.broadcast_object_list(box, self.mesh.ranks(*REPLICA_AXES)[0], group, device=self.device)
        return box[0]

    def any_replica(self, wanted: bool) -> bool:
        """Return whether this replica, or one with which it shares experts, needs another forward pass."""
        return wanted if self._coupling is None else self._coupling.most(int(wanted)) > 0

    def accompany(self) -> None:
        """Take part in another replica's forward pass with one dummy token."""
        # The shortest sequence that takes part in every collective of the layers.
        self(torch.zeros(1, dtype=torch.long, device=self.device), PackedSequences.of_lengths([1], self.device))

    def _from_last_stage(self, logits: Sequence[Tensor], count: int) -> Tensor:
        """Broadcast the logits ``[count, V]`` from the last stage, which computed them."""
        group, source = self.mesh.group("pp"), self.mesh.ranks("pp")[-1]
        if group is None:
            return logits[0]
        # dtype and width never change, so the other stages learn them only once
        if self._form is None:
            box = [(logits[0].dtype, logits[0].shape[-1])] if logits else [None]
            dist.broadcast_object_list(box, source, group, device=self.device)
            self._form = box[0]
        assert self._form is not None
        dtype, width = self._form
        found = logits[0].contiguous() if logits else torch.empty(count, width, dtype=dtype, device=self.device)
        # All stages must sample the same token, so they all need the logits.
        dist.broadcast(found, source, group)
        return found
