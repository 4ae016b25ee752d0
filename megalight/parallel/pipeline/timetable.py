"""Which rank does what when, for any number of micro-batches."""

from __future__ import annotations

import logging

from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.pipeline import schedules
from megalight.parallel.pipeline.agenda import Agenda, agenda_of
from megalight.parallel.pipeline.layout import PipelineLayout
from megalight.parallel.pipeline.options import Pipeline

log = logging.getLogger(__name__)


class Timetable:
    """This rank's work in steps of every kind, worked out once each.

    Args:
        pipeline: the schedule of training steps.
        layout: which stage holds what.
    """

    def __init__(self, pipeline: Pipeline, layout: PipelineLayout, mesh: ParallelMesh) -> None:
        self.pipeline = pipeline
        self.layout = layout
        self.mesh = mesh
        self._known: dict[tuple[str, int], Agenda] = {}

    def __call__(self, name: str, micro_batches: int) -> Agenda:
        """The work in a step of so many micro-batches; says where ranks would wait longer than they must.

        Args:
            name: ``train``, or a schedule's.
        """
        # The same few numbers of micro-batches come again and again, and a simulation of many ranks takes time.
        if (name, micro_batches) not in self._known:
            pp, vpp, group_size = self.layout.pp, self.layout.vpp, self.pipeline.group_size
            warning = schedules.waste(pp, vpp, micro_batches, group_size) if name == "train" and pp > 1 else None
            # All ranks work out the same timetable.
            if warning is not None and self.mesh.global_rank == 0:
                log.warning(warning)
            wanted = self.pipeline.schedule if name == "train" else name
            lists = schedules.build(wanted, pp, vpp, micro_batches, group_size)
            self._known[name, micro_batches] = agenda_of(self.mesh.rank("pp"), lists)
        return self._known[name, micro_batches]
