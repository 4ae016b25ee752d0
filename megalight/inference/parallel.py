"""Generation with a parallel model: a GPT split over ranks that is called like a whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property, partial
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megalight.attachments import APPLIED
from megalight.errors import ConfigurationError, MegalightError
from megalight.models.gpt import GPT, GPTConfig
from megalight.models.gpt.model import GPTOutput
from megalight.models.hf_causal_lm import HFConfig, HFModel, HFOutput
from megalight.models.hidden import KEPT, keeping
from megalight.models.vision import PackedImages
from megalight.models.vlm.config import VLMConfig
from megalight.models.vlm.model import VLM, TowerPart
from megalight.ops.sample_tokens import VocabularyRanks
from megalight.parallel.apply import whole_tokens
from megalight.parallel.context.divided_calls import interfaces_of
from megalight.parallel.layers import layers_of
from megalight.parallel.mesh import new_group, shared_group, uses_backend
from megalight.parallel.model import ParallelModel
from megalight.parallel.pipeline import schedules
from megalight.parallel.pipeline.executor import Executor
from megalight.parallel.pipeline.p2p_communication import Carry
from megalight.parallel.pipeline.timeline import rank_schedule_of
from megalight.parallel.tensor.embedding_and_head import VocabLinear, choose, combine
from megalight.types import PackedSequences

T = TypeVar("T")

FROM_CHECKPOINT = (
    "save a checkpoint and generate from it in one layout, with `megalight generate` or TextGenerator.from_checkpoint."
)
REPLICA_AXES = ("pp", "cp", "tp")
"""Mesh axes over which one replica of the model is divided."""
FOREVER = timedelta(days=365)


class Choice(Protocol):
    """What is computed of logits."""

    @property
    def whole(self) -> bool:
        """Whether it needs the logits of the whole vocabulary."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of its results, the same on all ranks."""
        ...

    @property
    def scored(self) -> tuple[Tensor, Tensor] | None:
        """Rows and labels ``[M]`` whose losses it needs, too."""
        ...

    def __call__(self, logits: Tensor, ranks: VocabularyRanks | None = None, losses: Tensor | None = None) -> Tensor:
        """Return results ``[n, r]`` of logits ``[N, V]``, or of those of this rank's columns; ``losses [M]``."""
        ...


class ParallelGPT(nn.Module):
    """This rank's part of a language model with tensor, pipeline or context parallelism. Every rank gets the logits.

    All ranks of a replica construct and call it together, with equal arguments. Sequences are not divided: with context
    parallelism every rank computes all tokens, and sequence parallelism is off during the call.

    Replicas usually call it independently, with their own prompts. But if experts are on ranks of several replicas,
    these communicate in every forward pass and must call it equally often, as :func:`~megalight.inference.generate`
    does.

    Args:
        model: this rank's part of the model (a strategy's ``parallel_model``).

    Raises:
        ConfigurationError: this rank has a vision tower alone, or stages of a model of ``transformers``.
    """

    def __init__(self, model: ParallelModel) -> None:
        super().__init__()
        # A model of transformers is the root's, or inside of a plain module.
        root = model.root if isinstance(model.root, GPT | TowerPart) else generative(model.root)
        if isinstance(root, HFModel) and model.mesh.pp > 1:
            raise ConfigurationError(
                f"{type(root.net).__name__} is cut into {model.mesh.pp} stages, and its own code generates with all "
                f"layers; {FROM_CHECKPOINT}"
            )
        chunks: list[nn.Module] = [root] if isinstance(root, HFModel) else model.chunks
        if isinstance(model.root, TowerPart):
            raise ConfigurationError(f"this rank has the vision tower alone, and no language model; {FROM_CHECKPOINT}")
        self._blind = _why_blind(model)
        # In a list of modules, so that modes and `.to` reach the chunks.
        self.chunks = nn.ModuleList(chunks)
        self.mesh = model.mesh
        self.device = model.device
        # Which adapters the whole model has, also where this rank's layers have none.
        APPLIED.set(self, APPLIED.get(model.root, []))
        layout = model.pipeline_layout
        self._coupling = model.coupling
        messages = model.layout.pipeline.messages
        self._executor = Executor(chunks, layout, model.mesh, model.device, messages=messages)
        # One micro-batch, through all stages.
        self._rank_schedule = rank_schedule_of(
            model.mesh.rank("pp"), schedules.build("forward_only", layout.pp, layout.vpp)
        )
        self._forms: dict[str, tuple[torch.dtype, int]] = {}
        self._calls: ProcessGroup | None = None

    @property
    def config(self) -> GPTConfig | VLMConfig | HFConfig:
        """Configuration of the whole model."""
        config = self.chunks[0].config
        assert isinstance(config, GPTConfig | VLMConfig | HFConfig)
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
        packed_images: PackedImages | None = None,
    ) -> GPTOutput:
        """Compute the logits of whole sequences, on every rank.

        Args:
            tokens: ``[T]`` ids.
            sequences: how the tokens divide into sequences.
            states: the states of the layers on this rank.
            rows: ``[N]`` indices of the tokens for which to compute logits. None means all tokens.
            packed_images: the images of the sequences, for a model that reads images.

        Raises:
            ConfigurationError: there are images, and the ranks of this replica cannot run the tower by themselves.
        """
        self._check_images(packed_images)
        carry = self._run(tokens, sequences, (), states, rows, packed_images)
        count = tokens.numel() if rows is None else rows.numel()
        return GPTOutput(logits=self._from_stage(-1, "logits", None if carry is None else carry["logits"], count))

    def _check_images(self, packed_images: PackedImages | None) -> None:
        if packed_images is not None and self._blind is not None:
            raise ConfigurationError(f"images cannot be read in this layout: {self._blind}; {FROM_CHECKPOINT}")

    @torch.no_grad()
    def on_last_stage(
        self,
        tokens: Tensor,
        sequences: PackedSequences,
        choice: Choice,
        *,
        states: Mapping[str, Any] | None,
        rows: Tensor,
        packed_images: PackedImages | None = None,
    ) -> Tensor | None:
        """Return what ``choice`` computes of the logits of :meth:`forward`, on the last stage alone; None on others.

        Tensor-parallel ranks gather logits only if ``choice`` needs them whole. A stage waits for no later one, so
        several passes may be on their way through the stages.
        """
        self._check_images(packed_images)
        return self._choose(tokens, sequences, choice, (), states, rows, packed_images)[0]

    def _choose(
        self,
        tokens: Tensor,
        sequences: PackedSequences,
        choice: Choice,
        places: Sequence[str],
        states: Mapping[str, Any] | None,
        rows: Tensor,
        packed_images: PackedImages | None,
    ) -> tuple[Tensor | None, Carry | None]:
        with self._columns(choice.whole) as head:
            carry = self._run(tokens, sequences, places, states, rows, packed_images, choice.scored)
        if carry is None:
            return None, None
        logits: Tensor = carry["logits"]
        if head is None:
            return choice(logits, losses=carry.get("losses")), carry
        ranks = _ranks(head)
        # The last rank has padding.
        outside = torch.arange(logits.shape[1], device=logits.device) + ranks.first >= ranks.columns
        return choice(logits.masked_fill(outside, -torch.inf), ranks, carry.get("losses")), carry

    def chosen(
        self,
        tokens: Tensor,
        sequences: PackedSequences,
        choice: Choice,
        *,
        states: Mapping[str, Any] | None,
        rows: Tensor,
        packed_images: PackedImages | None = None,
    ) -> Tensor:
        """Return on every rank what :meth:`on_last_stage` does on those of the last stage."""
        found = self.on_last_stage(tokens, sequences, choice, states=states, rows=rows, packed_images=packed_images)
        return self._from_last(choice, found)

    def _from_last(self, choice: Choice, found: Tensor | None) -> Tensor:
        count, width = choice.shape
        return self._from_stage(-1, f"chosen {width}", found, count)

    @contextmanager
    def _columns(self, whole: bool) -> Iterator[VocabLinear | None]:
        """Let the head return this rank's columns of the logits if that is enough; yield it then."""
        last = getattr(self.chunks[-1], "head", None) if self.mesh.tp > 1 and not whole else None
        head = getattr(last, "output_layer", None)
        # An adapter adds to the logits of the whole vocabulary.
        if not isinstance(head, VocabLinear) or getattr(head, "adapter", None) is not None:
            yield None
            return
        head.gather_output = False
        try:
            yield head
        finally:
            head.gather_output = True

    @torch.no_grad()
    def with_states(
        self,
        tokens: Tensor,
        sequences: PackedSequences,
        choice: Choice,
        places: Sequence[str],
        *,
        states: Mapping[str, Any] | None,
        rows: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return what :meth:`chosen` does, and hidden states inside the model, on every rank.

        Args:
            places: names of modules; see :mod:`megalight.models.hidden`.

        Returns:
            ``[n, r]``, and ``[T, m h]``: the outputs of the ``m`` modules side by side.
        """
        found, carry = self._choose(tokens, sequences, choice, places, states, rows, None)
        kept = None if carry is None else torch.cat([carry[KEPT + name] for name in places], -1)
        return self._from_last(choice, found), self._from_stage(-1, "states", kept, tokens.numel())

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Return the word embedding of tokens ``[T] -> [T, h]``, on every rank."""
        found = None
        if self.mesh.rank("pp") == 0:
            with whole_tokens(self):
                found = self.chunks[0].embed.word(tokens)  # type: ignore[union-attr, operator]
        return self._from_stage(0, "embedded", found, tokens.numel())

    def _run(
        self,
        tokens: Tensor,
        sequences: PackedSequences,
        places: Sequence[str],
        states: Mapping[str, Any] | None,
        rows: Tensor | None,
        packed_images: PackedImages | None,
        scored: tuple[Tensor, Tensor] | None = None,
    ) -> Carry | None:
        """Return the last chunk's carry on the last stage."""

        def step(chunk: nn.Module, batch: Mapping[str, Any], carry: Carry | None) -> Carry:
            # Only the stage with the embedding reads images.
            seen: dict[str, Any] = (
                {} if packed_images is None or chunk.embed is None else {"packed_images": packed_images}
            )
            if carry is not None:
                seen |= {name: carry[name] for name in ("hidden", "memory") if name in carry}
            if scored is not None:
                seen["scored"] = scored
            with keeping(chunk, places, carry) as kept:
                output = chunk(batch["tokens"], sequences, states=states, rows=rows, **seen)
            if isinstance(output, HFOutput) or output.hidden is None:
                losses = {} if output.losses is None else {"losses": output.losses}
                return {**kept, "logits": output.logits, **losses}
            memory = {} if output.memory is None else {"memory": output.memory}
            return {**kept, "hidden": output.hidden, **memory}

        # New tokens are few, and any number of them: they do not divide by tp. The places are part of the batch, as the
        # form of carries follows from it.
        with whole_tokens(self):
            last = self._executor.forward(self._rank_schedule, [{"tokens": tokens, "places": tuple(places)}], step)
        return last[0] if last else None

    def own_stage(
        self,
        tokens: Tensor,
        sequences: PackedSequences,
        hidden: Tensor | None,
        *,
        states: Mapping[str, Any],
        rows: Tensor | None,
    ) -> Tensor:
        """Run the stage of this rank alone, the only one that it has.

        Args:
            tokens: ``[T]`` ids.
            sequences: how the tokens divide into sequences.
            hidden: ``[T, h]``, the output of the stage before; None: this is the first.
            states: the states of the layers on this rank.
            rows: see :meth:`forward`.

        Returns:
            hidden states ``[T, h]``, or logits ``[N, V]`` on the last stage.

        Raises:
            MegalightError: the next stage reads more than hidden states.
        """
        given = {} if hidden is None else {"hidden": hidden}
        with whole_tokens(self):
            output = self.chunks[0](tokens, sequences, states=states, rows=rows, **given)
        if output.memory is not None:
            raise MegalightError("the next stage reads memory beside hidden states.")
        found: Tensor = output.logits if output.hidden is None else output.hidden
        return found

    @torch.no_grad()
    def through_stages(self, tokens: Tensor, play: Callable[[Tensor | None], Tensor]) -> None:
        """Send tokens ``[T]`` through the stages, each of which does something else than its layers.

        Args:
            tokens: ``[T]``.
            play: given the hidden states ``[T, h]`` of the stage before (None on the first), those of this one.
        """

        def step(chunk: nn.Module, batch: Mapping[str, Any], carry: Carry | None) -> Carry:
            return {"hidden": play(None if carry is None else carry["hidden"])}

        self._executor.forward(self._rank_schedule, [{"tokens": tokens, "places": ()}], step)

    @property
    def shares_experts(self) -> bool:
        """Whether several replicas share experts, so that these must run equally often."""
        return self._coupling is not None

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.mesh.pp

    @property
    def first(self) -> bool:
        """Whether this is the first rank of its replica."""
        return self.mesh.global_rank == self.mesh.ranks(*REPLICA_AXES)[0]

    def least(self, number: int) -> int:
        """Return the smallest of the numbers of the replica's ranks."""
        group = self._hosts
        if group is None:
            return number
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MIN, group)
        return int(found)

    def union(self, values: AbstractSet[T]) -> set[T]:
        """Return the values of all ranks of the replica."""
        group = self._hosts
        if group is None:
            return {*values}
        found: list[AbstractSet[T]] = [values] * group.size()
        dist.all_gather_object(found, values, group)
        return {value for each in found for value in each}

    def agree(self, value: T, stage: int = 0) -> T:
        """Return the value of the first rank of a stage, on all ranks of the replica; the device is not waited for."""
        return self._broadcast(value, self._hosts, stage)

    def call(self, value: T) -> T:
        """Return the value of the first rank, as :meth:`agree` does; others wait for it for as long as it takes."""
        if self._hosts is not None and self._calls is None:
            self._calls = new_group(self.mesh.ranks(*REPLICA_AXES), "calls", "gloo", timeout=FOREVER)
        return self._broadcast(value, self._calls, 0)

    @cached_property
    def _hosts(self) -> ProcessGroup | None:
        """The ranks of the replica, over gloo."""
        group = self.mesh.group(*REPLICA_AXES)
        if group is None or uses_backend("gloo", group=group):
            return group
        return shared_group(self.mesh.ranks(*REPLICA_AXES), "decisions on the host", backend="gloo")

    def _broadcast(self, value: T, group: ProcessGroup | None, stage: int) -> T:
        if group is None:
            return value
        place = stage % self.stages
        source = next(rank for rank in self.mesh.ranks(*REPLICA_AXES) if self.mesh.rank("pp", of=rank) == place)
        box = [value]
        dist.broadcast_object_list(box, source, group, device=torch.device("cpu"))
        return box[0]

    def asking_replicas(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """Ask replicas with which this one shares experts for the largest of each number; return what waits for the
        answer.
        """
        return (lambda: [*numbers]) if self._coupling is None else self._coupling.asking(numbers)

    def most_of_replicas(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each of some numbers of the replicas with which this one shares experts."""
        return self.asking_replicas(numbers)()

    def every(self, flag: bool) -> bool:
        """Return whether a flag is set on all ranks of this replica, and of those with which it shares experts."""
        return not self.most_of_replicas([1 - self.least(int(flag))])[0]

    def accompany(self) -> None:
        """Take part in another replica's forward pass with one dummy token."""
        # The shortest sequence that takes part in every collective of the layers.
        self(torch.zeros(1, dtype=torch.long, device=self.device), PackedSequences.of_lengths([1], self.device))

    def _from_stage(self, stage: int, name: str, found: Tensor | None, count: int) -> Tensor:
        """Broadcast the rows ``[count, .]`` from the stage that computed them."""
        group, source = self.mesh.group("pp"), self.mesh.ranks("pp")[stage]
        if group is None:
            assert found is not None
            return found
        # Dtype and width never change, so the other stages learn them only once.
        if name not in self._forms:
            box = [None if found is None else (found.dtype, found.shape[-1])]
            dist.broadcast_object_list(box, source, group, device=self.device)
            assert box[0] is not None
            self._forms[name] = box[0]
        dtype, width = self._forms[name]
        rows = torch.empty(count, width, dtype=dtype, device=self.device) if found is None else found.contiguous()
        # All stages must choose the same tokens, so they all need what these follow from.
        dist.broadcast(rows, source, group)
        return rows


def _ranks(head: VocabLinear) -> VocabularyRanks:
    """Return how the ranks of a head agree."""
    group = head.shared.group

    def largest(own: Tensor) -> Tensor:
        found = own.clone()
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
        return found

    return VocabularyRanks(
        head.first_row, head.vocab_size, largest, partial(choose, group=group), partial(combine, group=group)
    )


def _why_blind(model: ParallelModel) -> str | None:
    """Return why the ranks of a replica cannot run the vision tower for their own prompts; None: they can.

    All ranks of a replica find the same, since it is arithmetic.
    """
    if not isinstance(model.root, VLM) or not model.root.divided:
        return None
    if model.grafted is None:
        return "the vision tower is on other ranks"
    tower, language = model.grafted.mesh, model.mesh
    if tower.cp > 1:
        return f"ranks of the vision tower share the rows of images (context_parallel={tower.cp})"
    # The first stage runs the tower with its embedding, for its own replica.
    own = language.rank("dp")
    readers = {r for r in language.members if (language.rank("dp", of=r), language.rank("pp", of=r)) == (own, 0)}
    running = {tower.rank("dp", of=rank) for rank in readers}
    if {rank for rank in tower.members if tower.rank("dp", of=rank) in running} != readers:
        return "a replica of the vision tower has ranks outside of the first stage of one replica of the language model"
    return None


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model, or of this rank's part of it."""
    return model.device if isinstance(model, ParallelGPT) else next(model.parameters()).device


# Models that generate


GenerativeModel: TypeAlias = GPT | HFModel | ParallelGPT
"""A whole model, or this rank's part of one."""


def generative(model: nn.Module) -> GenerativeModel:
    """Return a model as one that generates. One of ``transformers``, or inside of a module, shares its weights with it.

    Raises:
        ConfigurationError: it does not generate text.
    """
    if isinstance(model, GPT | HFModel | ParallelGPT):
        return model
    if len(found := interfaces_of(model)) == 1:
        return HFModel.of(model.get_submodule(found[0]))
    raise ConfigurationError(
        f"{type(model).__name__} does not generate text; use GPTModule, or a causal language model of transformers."
    )


def layers_with_state(model: GenerativeModel) -> Mapping[str, Any]:
    """Return what makes the states for a cache, by name.

    Raises:
        ConfigurationError: see :meth:`HFModel.caches`.
    """
    if isinstance(model, ParallelGPT) and isinstance(model.chunks[0], HFModel):
        return model.chunks[0].caches()
    return model.caches() if isinstance(model, HFModel) else model.layers  # type: ignore[return-value]


# Evaluation mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set all modules to evaluation mode (no dropout), and restore the mode of each module afterwards."""
    # Module by module, as some may be in evaluation mode while others train.
    # Past `Module.__setattr__`, which looks for parameters: a large model has hundreds of modules, in every step.
    training = [vars(module) for module in model.modules() if module.training]
    for attributes in training:
        attributes["training"] = False
    try:
        yield
    finally:
        for attributes in training:
            attributes["training"] = True
