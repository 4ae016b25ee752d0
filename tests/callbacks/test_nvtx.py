import threading

import pytest
import torch
from torch import nn

from megalight.callbacks import NVTX
from megalight.callbacks.profiling import Ranges, layers_of, watch
from megalight.callbacks.step_timing import label
from megalight.errors import ConfigurationError, MegalightError
from megalight.models.gpt.model import GPT
from megalight.parallel.recompute import RecomputeOptions
from megalight.parallel.trace import SILENCE, SPANS, span
from megalight.strategies import MegatronStrategy
from tests.callbacks.tiny import BATCHES, Tiny, tiny_trainer
from tests.strategies.training import ADAM, BASE, SEED, STEPS, WithData, assert_same_run, by_hand, fit
from tests.support.environment import trainer
from tests.support.workers import run


class Recording:
    """Keeps what NVTX would be told; refuses what it could not make sense of."""

    def __init__(self):
        self.events, self.open, self.ended = [], {}, set()
        self.handles = 0

    def range_push(self, label):
        self.events.append(f"+{label}")
        self.open.setdefault(threading.get_ident(), []).append(label)

    def range_pop(self):
        self.events.append(f"-{self.open[threading.get_ident()].pop()}")

    def range_start(self, label):
        self.events.append(f"<{label}")
        self.handles += 1
        return self.handles

    def range_end(self, handle):
        assert handle not in self.ended
        self.ended.add(handle)
        self.events.append(">")

    def balanced(self):
        return not any(self.open.values()) and len(self.ended) == self.handles


def recorded(**options):
    nvtx = NVTX(**options)
    nvtx.backend = Recording()
    return nvtx


def test_a_label_says_where():
    assert label("forward", {"chunk": 0, "micro_batch": 3}) == "forward chunk=0 micro_batch=3"
    assert label("step", {}) == "step"


def test_without_cuda_it_names_what_works_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="ProfilerWindow"):
        tiny_trainer(callbacks=[NVTX()]).fit(Tiny())
    assert span("step") is SILENCE


def test_with_cuda_ranges_are_nvtxs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert NVTX().listener(tiny_trainer(), Tiny()).backend is torch.cuda.nvtx
    for name in ("range_push", "range_pop", "range_start", "range_end"):
        assert callable(getattr(torch.cuda.nvtx, name))


def test_a_plain_strategys_step():
    nvtx = recorded(layers=False)
    tiny_trainer(callbacks=[nvtx], max_steps=2).fit(Tiny())
    step = ["+step", "+forward", "-forward", "+backward", "-backward", "+optimizer", "-optimizer", "-step",
            "+data", "-data"]  # fmt: skip
    assert nvtx.backend.events == step * 2
    assert nvtx.backend.balanced()
    assert span("step") is SILENCE


def test_accumulated_steps_have_one_update():
    nvtx = recorded(layers=False)
    tiny_trainer(callbacks=[nvtx], accumulate_grad_batches=3).fit(Tiny())
    assert nvtx.backend.events.count("+step") == BATCHES
    assert nvtx.backend.events.count("+backward") == BATCHES
    assert nvtx.backend.events.count("-optimizer") == BATCHES // 3


def test_ranks_that_were_not_asked_stay_silent():
    nvtx = recorded(ranks=(1, 2))
    tiny_trainer(callbacks=[nvtx], max_steps=2).fit(Tiny())
    assert nvtx.backend.events == []
    with pytest.raises(ConfigurationError, match="at least one rank"):
        NVTX(ranks=())


@pytest.mark.parametrize("place", ["forward", "update", "hook"])
def test_an_error_leaves_no_range_open(place):
    class Broken(Tiny):
        def training_step(self, batch, batch_idx):
            if place == "forward" and batch_idx == 1:
                raise RuntimeError("broken")
            return super().training_step(batch, batch_idx)

        def on_before_zero_grad(self, optimizer):
            if place == "hook" and self.trainer.global_step == 1:
                raise RuntimeError("broken")

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            if place == "update":
                optimizer.register_step_pre_hook(self._break)
            return optimizer

        def _break(self, *given):
            if self.trainer.global_step == 1:
                raise RuntimeError("broken")

    nvtx = recorded()
    with pytest.raises(RuntimeError, match="broken"):
        tiny_trainer(callbacks=[nvtx]).fit(Broken())
    assert nvtx.backend.events.count("+step") == 2
    assert nvtx.backend.balanced()
    assert span("step") is SILENCE


def test_a_mismatched_end_is_an_error():
    ranges = Ranges(Recording())
    with pytest.raises(MegalightError, match="'step' ends, but 'none'"):
        ranges.end("step")
    ranges.begin("step", {})
    ranges.begin("forward", {"chunk": 0})
    with pytest.raises(MegalightError, match="'step' ends, but 'forward'"):
        ranges.end("step")
    ranges.end("forward")
    ranges.end("step")
    assert ranges.backend.balanced()


def test_threads_have_ranges_of_their_own():
    ranges = Ranges(Recording())
    ranges.begin("backward", {})

    def work():
        ranges.begin("reduce_gradients", {"elements": 3})
        ranges.backward("layers.1")
        ranges.end("reduce_gradients")
        ranges.backward("layers.0")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    ranges.end("backward")
    assert ranges.backend.balanced()
    assert ranges.backend.events == [
        "+backward", "+reduce_gradients elements=3", "<backward of layers.1", "-reduce_gradients elements=3", ">",
        "<backward of layers.0", ">", "-backward",
    ]  # fmt: skip


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(3, 3)])

    def forward(self, x, broken=False):
        if broken:
            raise RuntimeError("broken")
        return {"hidden": self.parts[0](x).relu()}


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Module()
        self.body.embed = nn.Linear(3, 3)
        self.body.layers = nn.ModuleDict({"4": Block(), "5": Block()})
        self.head = nn.Linear(3, 1)

    def forward(self, x, broken=False):
        x = self.body.embed(x)
        for layer in self.body.layers.values():
            x = layer(x, broken)["hidden"]
        return self.head(x)


def test_layers_are_members_of_the_outermost_lists_and_what_stands_beside_them():
    assert list(layers_of(Stack())) == ["body.embed", "body.layers.4", "body.layers.5"]
    with torch.device("meta"):
        assert list(layers_of(GPT(BASE))) == ["embed", "rotary", "layers.0", "layers.1", "head"]


def test_layers_forward_and_backward():
    ranges, model = Ranges(Recording()), Stack()
    removals = watch([model], ranges)
    loss = model(torch.ones(2, 3)).sum()
    ranges.begin("backward", {})
    loss.backward()
    ranges.end("backward")
    names = ["body.embed", "body.layers.4", "body.layers.5"]
    forward = [event for name in names for event in (f"+{name}", f"-{name}")]
    backward = [event for name in reversed(names) for event in (f"<backward of {name}", ">")]
    assert ranges.backend.events == [*forward, "+backward", *backward, "-backward"]
    with pytest.raises(RuntimeError, match="broken"):
        model(torch.ones(2, 3), broken=True)
    assert ranges.backend.balanced()
    count = len(ranges.backend.events)
    with torch.no_grad():
        for remove in removals:
            remove()
        model(torch.ones(2, 3))
    assert len(ranges.backend.events) == count


def test_compiled_layers_work_without_ranges():
    ranges, model = Ranges(Recording()), Stack()
    watch([model], ranges)
    x = torch.ones(2, 3)
    expected = model(x)
    count = len(ranges.backend.events)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), expected)
    assert len(ranges.backend.events) == count


def _fit(**options):
    nvtx = recorded()
    found = fit(BASE, extra_callbacks=[nvtx], **options)
    assert nvtx.backend.balanced()
    assert span("step") is SILENCE
    return found, nvtx.backend.events


def _steps(events):
    """The events of each step."""
    starts = [index for index, event in enumerate(events) if event == "+step"]
    return [events[start : events.index("-step", start) + 1] for start in starts]


@pytest.mark.parametrize("recompute", [False, True])
def test_megatrons_steps_and_their_results_are_as_without(recompute):
    options = {"recompute": RecomputeOptions(granularity="full")} if recompute else {}
    ((found, events),) = run(_run_one, 1, options)
    assert_same_run(found, by_hand(BASE))
    steps = _steps(events)
    assert len(steps) == STEPS
    for step in steps:
        for index in (0, 1):
            assert step.count(f"+forward chunk=0 micro_batch={index}") == 1
            assert step.count(f"+backward chunk=0 micro_batch={index}") == 1
        assert step.count("+layers.0") == 2  # what is computed again belongs to the backward
        assert step.count("<backward of layers.0") == 2
        assert step.index("<backward of layers.1") < step.index("<backward of layers.0")
        names = [event[1:].split()[0] for event in step if event[0] == "+"]
        order = ["step", "forward", "backward", "finish_gradients", "optimizer", "clip", "gather_parameters"]
        assert sorted(order, key=names.index) == order
        assert set(names) <= {*SPANS, "step", "embed", "rotary", "layers.0", "layers.1", "head"}


def _run_one(options):
    return _fit(micro_batch_size=2, **options)


def test_pipelines_name_chunks_and_waits():
    found = run(_run_pipeline, 2)
    for (result, _), (expected, _) in zip(found, found[:1] * 2, strict=True):
        assert result["losses"] == pytest.approx(expected["losses"])
    for rank, (_, events) in enumerate(found):
        step = _steps(events)[1]
        assert [event for event in step if event.startswith("+forward")] == [
            f"+forward chunk=0 micro_batch={index}" for index in range(4)
        ]
        assert step.count("+receive") == 4  # activations on the last stage, gradients on the first
        assert f"+layers.{rank}" in step
        assert f"+layers.{1 - rank}" not in step


def _run_pipeline():
    return _fit(micro_batch_size=1, pipeline_parallel=2)


def test_a_broken_micro_batch_leaves_no_range_open():
    assert run(_broken, 1) == [(True, True)]


def _broken():
    class Broken(WithData):
        def loss_step(self, carry, batch):
            if self.trainer.global_step == 1:
                raise RuntimeError("broken")
            return super().loss_step(carry, batch)

    nvtx = recorded()
    module = Broken(BASE, optimizer=ADAM, seed=SEED)
    runner = trainer(MegatronStrategy(), callbacks=[nvtx], limit_val_batches=0, use_distributed_sampler=False)
    with pytest.raises(RuntimeError, match="broken"):
        runner.fit(module)
    return nvtx.backend.balanced(), span("step") is SILENCE
