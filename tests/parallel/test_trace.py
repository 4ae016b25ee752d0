import timeit

import pytest
import torch

from megalight.parallel import trace
from megalight.parallel.data_parallel import DataParallelEngine
from megalight.parallel.data_parallel.layout import ParamInfo
from megalight.parallel.mesh import ParallelMesh
from megalight.parallel.shard import ShardSpec
from megalight.parallel.trace import SILENCE, listen, span, spanned


class Recorder:
    def __init__(self, tag=""):
        self.events = []
        self.tag = tag

    def begin(self, name, where):
        self.events.append(f"{self.tag}+{name}" + "".join(f" {k}={v}" for k, v in where.items()))

    def end(self, name):
        self.events.append(f"{self.tag}-{name}")


@pytest.fixture
def recorder():
    recorder = Recorder()
    stop = listen(recorder)
    yield recorder
    stop()


def test_off_a_span_is_one_object_that_does_nothing():
    assert span("forward", chunk=1, micro_batch=2) is SILENCE
    with span("forward"):
        pass
    work = "with span('forward', chunk=0, micro_batch=1): pass"
    best = min(timeit.repeat(work, globals={"span": span}, number=200, repeat=20))
    assert best / 200 < 5e-6  # ten times what it takes


def test_a_listener_hears_begin_and_end_in_order(recorder):
    with span("step"), span("forward", chunk=0, micro_batch=3):
        pass
    assert recorder.events == ["+step", "+forward chunk=0 micro_batch=3", "-forward", "-step"]


def test_an_error_ends_the_spans_it_leaves(recorder):
    with pytest.raises(RuntimeError), span("step"), span("forward"):
        raise RuntimeError
    assert recorder.events == ["+step", "+forward", "-forward", "-step"]
    assert span("next").listeners == (recorder,)


def test_the_decorator_asks_at_the_call():
    @spanned("work")
    def work(x, *, y):
        """What it does."""
        return x + y

    assert work.__doc__ == "What it does."
    recorder = Recorder()
    assert work(1, y=2) == 3
    stop = listen(recorder)
    assert work(1, y=2) == 3
    stop()
    stop()
    assert work(1, y=2) == 3
    assert recorder.events == ["+work", "-work"]


def test_who_begins_listening_inside_a_span_does_not_hear_its_end():
    recorder = Recorder()
    with span("step"):
        stop = listen(recorder)
    assert recorder.events == []
    stop()


def test_listeners_end_in_reverse():
    events = []
    one, two = Recorder("1"), Recorder("2")
    one.events = two.events = events
    stops = [listen(one), listen(two)]
    with span("a"):
        pass
    for stop in stops:
        stop()
    assert events == ["1+a", "2+a", "2-a", "1-a"]
    assert trace.span("a") is SILENCE


def test_the_data_parallel_engine_says_what_it_does(recorder):
    weight = torch.nn.Parameter(torch.ones(3))
    spec = ShardSpec.replicated("w", (3,))
    engine = DataParallelEngine([ParamInfo("w", weight, spec, 0)], ParallelMesh())
    engine.zero_grad()
    with engine.micro_batches(1):
        weight.sum().backward()
    engine.finish_grad_sync()
    engine.publish()
    names = [event.split()[0] for event in recorder.events]
    assert names == ["+finish_gradients", "+reduce_gradients", "-reduce_gradients", "-finish_gradients",
                     "+gather_parameters", "-gather_parameters"]  # fmt: skip
    assert {name[1:] for name in names} <= set(trace.SPANS)
