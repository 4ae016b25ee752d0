"""How the layers are divided over a pipeline, as an option."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from megalight.errors import ConfigurationError, LayoutError
from megalight.parallel.pipeline.layout import PipelineLayout
from megalight.parallel.pipeline.layout_string import parse
from megalight.parallel.pipeline.schedules import check

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
