"""Pipeline schedules: 1F1B, interleaved 1F1B, combined 1F1B, ZB-H1 and forward-only.

A schedule is the list of actions of each pipeline rank in one step. It has a function that makes the actions of one
rank, a function that says what it cannot serve, and a line in ``SCHEDULES``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import Literal, NamedTuple, TypeAlias

from megalight.errors import ConfigurationError, LayoutError, nearest
from megalight.parallel.pipeline.layout import PipelineLayout, parse


class ActionKind(Enum):
    """Kinds of work. ``BACKWARD`` is ``INPUT_GRADIENT`` and ``WEIGHT_GRADIENT`` together."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"


class Action(NamedTuple):
    """One piece of work of one pipeline rank.

    Attributes:
        kind: the kind of work.
        chunk: the chunk of the rank, counted in model order.
        micro_batch: the micro-batch of the step.
        overlapped: for ``BACKWARD``: the forward of another micro-batch that runs together with it.
    """

    kind: ActionKind
    chunk: int
    micro_batch: int
    overlapped: Action | None = None

    @property
    def parts(self) -> tuple[Action, ...]:
        """The pieces of work that begin and end together."""
        # A combined backward counts as both: bubbles, memory and messages are reckoned piece by piece.
        return (self,) if self.overlapped is None else (self.overlapped, self._replace(overlapped=None))

    def __str__(self) -> str:
        return "+".join(f"{part.kind.value}{part.micro_batch}.{part.chunk}" for part in self.parts)


Actions: TypeAlias = list[Action]
"""The work of one pipeline rank in one step, in order."""


def rounds(pp: int, vpp: int, micro_batches: int, group_size: int) -> list[tuple[int, int]]:
    """Return ``(chunk, micro_batch)`` of all forwards: each group of micro-batches through chunk 0, chunk 1, and so on.

    A last group of less than ``pp`` is filled up with numbers from ``micro_batches`` on, which the caller removes at
    the end. So the rest keeps the order of a full group, which cannot deadlock.
    """
    found = []
    start = 0
    for size in group_sizes(pp, micro_batches, group_size):
        group = range(start, start + max(size, pp))
        # A whole group goes through one chunk before the next chunk begins: by then the first micro-batch of the group
        # has come around all ranks, if the group has at least pp.
        found += [(chunk, i) for chunk in range(vpp) for i in group]
        start += size
    return found


def group_sizes(pp: int, micro_batches: int, group_size: int) -> list[int]:
    """Divide micro-batches into groups of at most ``group_size``: equal groups if each has ``pp``, else with a rest."""
    count = -(-micro_batches // group_size)
    share, more = divmod(micro_batches, count)
    # Groups of nearly equal size waste less than full groups and a short rest.
    if share >= pp:
        return [share + 1] * more + [share] * (count - more)
    return [min(group_size, micro_batches - start) for start in range(0, micro_batches, group_size)]


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Actions:
    """Return ``warm_up`` forwards, then a forward and a backward in turn, then the remaining backwards."""
    actions = list(forwards[:warm_up])
    for place, backward in enumerate(backwards):
        # An empty slice once the forwards are used up.
        actions += [*forwards[warm_up + place : warm_up + place + 1], backward]
    return actions


def pair(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int, micro_batches: int) -> Actions:
    """Return ``warm_up`` forwards, then each backward together with the next forward, then the remaining backwards.

    Micro-batches with numbers from ``micro_batches`` on (:func:`rounds`) are left out of their pairs.
    """
    actions = [action for action in forwards[:warm_up] if action.micro_batch < micro_batches]
    for backward, forward in zip_longest(backwards, forwards[warm_up:]):
        overlapped = forward if forward is not None and forward.micro_batch < micro_batches else None
        if backward.micro_batch < micro_batches:
            actions.append(backward._replace(overlapped=overlapped))
        elif overlapped is not None:
            actions.append(overlapped)
    return actions


def split(actions: Actions, delay: int) -> Actions:
    """Split each backward: the input gradient keeps its place, the weight gradient comes ``delay`` backwards later."""
    found: Actions = []
    waiting: deque[Action] = deque()
    for action in actions:
        if action.kind is not ActionKind.BACKWARD:
            found.append(action)
            continue
        found.append(action._replace(kind=ActionKind.INPUT_GRADIENT))
        waiting.append(action._replace(kind=ActionKind.WEIGHT_GRADIENT))
        # First in, first out: the oldest weight gradient holds activations longest.
        if len(waiting) > delay:
            found.append(waiting.popleft())
    return [*found, *waiting]


def _why_not_1f1b(pp: int, vpp: int, group_size: int | None) -> str | None:
    """Return why it cannot serve these numbers, or None: it has one chunk per rank, and so no groups."""
    if vpp > 1:
        return f"it runs one chunk per rank, not vpp={vpp}; use 'interleaved'"
    if group_size is not None:
        return f"it has no groups of micro-batches; remove group_size={group_size}"
    return None


def _warm_up_1f1b(pp_rank: int, pp: int) -> int:
    """Return the number of forwards before the first pair of forward and backward."""
    return pp - pp_rank - 1


def one_f_one_b(pp_rank: int, pp: int, vpp: int, micro_batches: int, group_size: int | None = None) -> Actions:
    """Return the actions of 1F1B (Narayanan et al., https://arxiv.org/abs/2104.04473, section 2.2.1).

    A rank starts with as many forwards as there are ranks after it, so that the last rank never waits. Then forwards
    and backwards alternate, and each backward frees the memory that the next forward needs. Rank ``p`` holds
    activations of at most ``min(m, pp - p)`` micro-batches. The bubble is ``(pp - 1) / m`` of the work. With one rank,
    this is plain gradient accumulation.
    """
    forwards = [Action(ActionKind.FORWARD, 0, i) for i in range(micro_batches)]
    backwards = [Action(ActionKind.BACKWARD, 0, i) for i in range(micro_batches)]
    return alternate(forwards, backwards, _warm_up_1f1b(pp_rank, pp))


def _why_not_interleaved(pp: int, vpp: int, group_size: int | None) -> str | None:
    """Return why it cannot serve these numbers, or None: it needs several chunks, and groups of at least ``pp``."""
    if vpp == 1:
        return "it interleaves the chunks of a rank, but vpp=1; use '1f1b', or more chunks"
    if group_size is not None and group_size < pp:
        return f"group_size={group_size} is below pp={pp}, so some ranks would be idle; use group_size={pp} or more"
    return None


def _warm_up_interleaved(pp_rank: int, pp: int, vpp: int, group_size: int | None = None) -> int:
    """Return the number of forwards before the first pair of forward and backward."""
    return 2 * (pp - pp_rank - 1) + (vpp - 1) * (group_size or pp)


def interleaved(pp_rank: int, pp: int, vpp: int, micro_batches: int, group_size: int | None = None) -> Actions:
    """Return the actions of interleaved 1F1B (Narayanan et al., https://arxiv.org/abs/2104.04473, section 2.2.2).

    Micro-batches go in groups (by default of at most ``pp``) through chunk 0 of every rank, then through chunk 1, and
    so on, and back in the opposite order. To fill the pipeline takes the time of one chunk per rank instead of a whole
    rank. So the bubble is ``(pp - 1) / (m * vpp)`` of the work. The costs are ``vpp`` times the transfers, and
    activations of up to ``2 (pp - p - 1) + (vpp - 1) * group + 1`` chunks on rank ``p``.

    Any number of micro-batches works. A last group of less than ``pp`` cannot keep all ranks busy and takes up to as
    long as a group of ``pp``. Groups of up to ``ceil(m / (m // pp))`` micro-batches avoid such a group for any ``m >=
    pp``.
    """
    order = rounds(pp, vpp, micro_batches, group_size or pp)
    forwards = [Action(ActionKind.FORWARD, chunk, i) for chunk, i in order]
    # A micro-batch comes back through the chunks in the opposite order.
    backwards = [Action(ActionKind.BACKWARD, vpp - 1 - chunk, i) for chunk, i in order]
    actions = alternate(forwards, backwards, _warm_up_interleaved(pp_rank, pp, vpp, group_size))
    # The numbers that only filled up the last group go out here, after they have kept the order.
    return [action for action in actions if action.micro_batch < micro_batches]


def _why_not_base(pp: int, vpp: int, group_size: int | None) -> str | None:
    """Return why the base schedule cannot serve these numbers, or None."""
    return _why_not_1f1b(pp, vpp, group_size) if vpp == 1 else _why_not_interleaved(pp, vpp, group_size)


def combined(pp_rank: int, pp: int, vpp: int, micro_batches: int, group_size: int | None = None) -> Actions:
    """Return the actions of combined 1F1B, in which the backward of one micro-batch overlaps the forward of another.

    Expert parallelism sends tokens twice in each layer, forward and backward. Alone, a pass waits for them. So each
    backward is paired with the forward of a later micro-batch, and they take turns
    (:mod:`megalight.parallel.interleaved_passes`). Weight gradients wait for such pauses too. DeepSeek-V3 does this in
    both directions of the pipeline at once (https://arxiv.org/abs/2412.19437, section 3.2.1); here the order is that of
    1F1B, or of interleaved 1F1B with several chunks per rank.

    A pair begins when both of its inputs are there, and sends both results at its end. So rank ``p`` starts with ``2
    (pp - p - 1) + (vpp - 1) * group + 1`` forwards, and holds activations of as many chunks. With one chunk per rank
    that is up to twice as much as 1F1B. The bubble is that of the base schedule.
    """
    order = [(0, i) for i in range(micro_batches)] if vpp == 1 else rounds(pp, vpp, micro_batches, group_size or pp)
    forwards = [Action(ActionKind.FORWARD, chunk, i) for chunk, i in order]
    backwards = [Action(ActionKind.BACKWARD, vpp - 1 - chunk, i) for chunk, i in order]
    # one more than the base schedule: a forward cannot run together with its own backward
    return pair(forwards, backwards, _warm_up_interleaved(pp_rank, pp, vpp, group_size) + 1, micro_batches)


def zero_bubble(pp_rank: int, pp: int, vpp: int, micro_batches: int, group_size: int | None = None) -> Actions:
    """Return the actions of ZB-H1 (Qi et al., https://arxiv.org/abs/2401.10241, section 2.2).

    It is built on 1F1B or interleaved 1F1B. Other ranks wait only for the gradient of a chunk's *input*. So each
    backward is split: the input gradient keeps its place, and the weight gradient comes later, when the rank would
    wait. Rank ``p`` delays its weight gradients by ``p`` micro-batches. So it sends its first input gradients ``p``
    weight gradients earlier, and the delayed weight gradients fill the end of the step. Let a chunk take ``F`` forward,
    ``I`` for the input gradient and ``W`` for the weight gradient. If ``W`` is no longer than ``F`` or ``I``, the
    bubble falls from ``(pp - 1) (F + I + W)`` to ``(pp - 1) (F + I - W)``.

    Activations stay in memory until their weight gradient is done. No rank holds more of them than the first rank does
    in the base schedule.
    """
    base = one_f_one_b if vpp == 1 else interleaved
    return split(base(pp_rank, pp, vpp, micro_batches, group_size), delay=pp_rank)


def _why_not_forward_only(pp: int, vpp: int, group_size: int | None) -> str | None:
    """Return why it cannot serve these numbers, or None. Any number of chunks works."""
    return _why_not_interleaved(pp, vpp, group_size) if vpp > 1 else None


def forward_only(pp_rank: int, pp: int, vpp: int, micro_batches: int, group_size: int | None = None) -> Actions:
    """Return the forwards of interleaved 1F1B; they are the same for all ranks."""
    order = rounds(pp, vpp, micro_batches, group_size or pp)
    return [Action(ActionKind.FORWARD, chunk, i) for chunk, i in order if i < micro_batches]


@dataclass(frozen=True)
class PipelineSchedule:
    """A schedule.

    Attributes:
        of_rank: ``(pp_rank, pp, vpp, micro_batches, group_size) -> Actions``.
        why_not: ``(pp, vpp, group_size)`` -> the reason why it cannot serve them, or None.
    """

    of_rank: Callable[[int, int, int, int, int | None], Actions]
    why_not: Callable[[int, int, int | None], str | None]


SCHEDULES = {
    "1f1b": PipelineSchedule(one_f_one_b, _why_not_1f1b),
    "interleaved": PipelineSchedule(interleaved, _why_not_interleaved),
    "zero_bubble": PipelineSchedule(zero_bubble, _why_not_base),
    "combined": PipelineSchedule(combined, _why_not_base),
    "forward_only": PipelineSchedule(forward_only, _why_not_forward_only),
}
"""Name -> schedule. ``"auto"`` means ``1f1b``, or ``interleaved`` if a rank has several chunks."""


def chosen(name: str, vpp: int) -> str:
    """Return the name of the schedule that ``name`` means: it resolves ``auto``."""
    return name if name != "auto" else "interleaved" if vpp > 1 else "1f1b"


def check(name: str, pp: int, vpp: int = 1, micro_batches: int = 1, group_size: int | None = None) -> PipelineSchedule:
    """Return a schedule after checking that it can serve these numbers.

    Any number of micro-batches can run. :func:`bubble_warning` warns if there are too few for good speed.

    Args:
        name: one of ``SCHEDULES``, or ``"auto"``.
        pp: pipeline ranks.
        vpp: chunks on each rank.
        micro_batches: micro-batches of the step.
        group_size: micro-batches in a row through one chunk, if ``vpp > 1``. None: ``pp``.

    Raises:
        LayoutError: the name is unknown, a number is below 1, or the schedule cannot serve them.
    """
    # Resolved first, so that messages tell the schedule that will run.
    name = chosen(name, vpp)
    if name not in SCHEDULES:
        known = ("auto", *SCHEDULES)
        raise LayoutError(f"unknown pipeline schedule {name!r}; known: {', '.join(known)}.{nearest(name, known)}")
    for what, value in (("pp", pp), ("vpp", vpp), ("micro_batches", micro_batches)):
        if value < 1:
            raise LayoutError(f"{what}={value} for the pipeline schedule {name!r}; it must be at least 1.")
    # One rank holds all layers anyway: chunks would only cut them.
    if vpp > 1 and pp == 1:
        raise LayoutError(f"vpp={vpp} chunks per rank with pp=1; there is no pipeline to interleave. Set vpp to 1.")
    if reason := SCHEDULES[name].why_not(pp, vpp, group_size):
        raise LayoutError(f"pipeline schedule {name!r} cannot run this: {reason}.")
    return SCHEDULES[name]


def build(name: str, pp: int, vpp: int = 1, micro_batches: int = 1, group_size: int | None = None) -> list[Actions]:
    """Return the actions of every pipeline rank. Arguments and errors are those of :func:`check`."""
    found = check(name, pp, vpp, micro_batches, group_size)
    return [found.of_rank(rank, pp, vpp, micro_batches, group_size) for rank in range(pp)]


def bubble_warning(pp: int, vpp: int, micro_batches: int, group_size: int | None = None) -> str | None:
    """Return a warning if ranks wait longer than necessary, else None.

    With fewer micro-batches than ranks, ``pp - m`` ranks are idle at any time, and chunks do not change that. The
    bubble is ``(pp - m) / m + (m - 1) / (m * vpp)`` of the work. With chunks, a last group of less than ``pp``
    micro-batches takes up to as long as one of ``pp``.
    """
    m = micro_batches
    # Fewer micro-batches than ranks: more chunks cannot fill the pipeline.
    if m < pp:
        bubble = (pp - m + (m - 1) / vpp) / m
        return (
            f"{m} micro-batch{'es' * (m > 1)} in a pipeline of {pp} ranks: the bubble is {bubble:.0%} of the work. Use "
            f"at least {pp} smaller micro-batches (4 x {pp} for less than 25%), or lower pp."
        )
    last = group_sizes(pp, m, group_size or pp)[-1]
    if vpp == 1 or last >= pp:
        return None
    size = -(-m // (m // pp))
    return (
        f"{m} micro-batches in groups of {group_size or pp}: the last group has {last}, less than pp={pp}, so ranks "
        f"wait. Use a multiple of {pp}, or group_size={size}, which keeps activations of {(vpp - 1) * (size - pp)} "
        "more chunks in memory than groups of pp."
    )


Messages: TypeAlias = Literal["auto", "plain", "symmetric"]


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How the layers are divided over the pipeline, and in which order micro-batches go through it.

    Attributes:
        schedule: ``1f1b``; ``interleaved``: several chunks per rank; ``zero_bubble``: weight gradients are computed
            later, while a rank would wait; ``combined``: messages of experts travel while another micro-batch computes,
            with one chunk per rank or several, also without a pipeline. ``auto``: interleaved where a rank has several
            chunks, else 1F1B.
        messages: how activations and gradients travel between stages: ``plain`` (NCCL or gloo), or ``symmetric`` (GPUs
            of one host copy into each other's memory with their copy engines, which use no SM). ``auto``:
            ``symmetric`` between the neighbors that it can serve.
        group_size: micro-batches that go through one chunk before the next chunk's turn; None: the pipeline's ranks.
        first_layers, last_layers: layers on the first and the last rank, where they differ from the others.
        count_embedding, count_loss: the embedding, or the head with the loss, counts as a layer in an even division.
            These four, and ``messages``, are refused without a pipeline.
    """

    schedule: Literal["auto", "1f1b", "interleaved", "zero_bubble", "combined"] = "auto"
    messages: Messages = "auto"
    group_size: int | None = None
    first_layers: int | None = None
    last_layers: int | None = None
    count_embedding: bool = False
    count_loss: bool = False

    def check(self, pp: int, vpp: int, text: str | None) -> int:
        """Refuse what cannot work for any model; returns the chunks per rank.

        Raises:
            LayoutError: a schedule that cannot run on so many ranks and chunks, a layout that cannot be read, or a
                division among one rank.
            ConfigurationError: a schedule without a backward; two ways of dividing the layers at once.
        """
        if str(self.schedule) == "forward_only":  # str: the type excludes it, but only mypy reads that
            raise ConfigurationError(
                "pipeline schedule 'forward_only' has no backward, so nothing would be trained; evaluation uses it by "
                "itself. Choose a schedule of training, or leave it at 'auto'."
            )
        uneven = self.first_layers is not None or self.last_layers is not None
        counted = self.count_embedding or self.count_loss
        if text is not None and (uneven or counted):
            raise ConfigurationError(
                "pipeline_layout says where every layer goes; leave first_layers, last_layers, count_embedding and "
                "count_loss out."
            )
        if pp == 1 and (uneven or counted):
            names = ("first_layers", "last_layers", "count_embedding", "count_loss")
            given = {name: value for name in names if (value := getattr(self, name)) is not None and value is not False}
            raise LayoutError(
                f"{', '.join(f'{name}={value}' for name, value in given.items())} with pp=1; there is no pipeline to "
                "divide. Raise pipeline_parallel, or leave them out."
            )
        if pp == 1 and self.messages != "auto":
            raise LayoutError(
                f"messages={self.messages!r} with pp=1; there are no stages between which messages travel. Raise "
                "pipeline_parallel, or leave it out."
            )
        # Two rules for the same stages: neither could tell what the other has taken.
        if uneven and counted:
            raise ConfigurationError(
                "first_layers and last_layers are numbers of layers alone; leave count_embedding and count_loss out."
            )
        if text is not None:
            stages = len(parse(text))
            # of the model nothing is known yet; its numbers of layers are checked where it is
            symbols = "".join(parse(text))
            PipelineLayout.of_string(text, symbols.count("t"), pp, vpp, num_mtp=symbols.count("m"))
            # The string alone decides the number of chunks, if it is given.
            vpp = stages // pp
        check(self.schedule, pp, vpp, 1, self.group_size)
        return vpp

    def layout(self, num_layers: int, pp: int, vpp: int, text: str | None, num_mtp: int = 0) -> PipelineLayout:
        """Where the layers of a model go, ``num_mtp`` of multi-token prediction among them.

        Raises:
            LayoutError: they cannot be divided so.
        """
        if text is not None:
            return PipelineLayout.of_string(text, num_layers, pp, vpp, num_mtp=num_mtp)
        if self.first_layers is not None or self.last_layers is not None:
            first, last = self.first_layers, self.last_layers
            return PipelineLayout.uneven(num_layers, pp, vpp, first=first, last=last, num_mtp=num_mtp)
        return PipelineLayout.even(
            num_layers, pp, vpp, count_embedding=self.count_embedding, count_loss=self.count_loss, num_mtp=num_mtp
        )
