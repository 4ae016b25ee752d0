import gc
import weakref

import lightning.pytorch as pl
import pytest

from megalight.callbacks import GarbageCollection
from megalight.errors import ConfigurationError
from tests.callbacks.tiny import Tiny, tiny_trainer


@pytest.fixture(autouse=True)
def _as_it_was():
    gc.unfreeze()
    yield
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.freeze()  # again, for the tests that follow: the fewer objects a collection looks at, the faster they are


class Loop:
    pass


class Litter(pl.Callback):
    """Drops a reference cycle at each step and sees when it goes."""

    def __init__(self):
        self.enabled, self.gone = [], []

    def on_train_batch_start(self, trainer, *args):
        self.enabled.append(gc.isenabled())
        loop = Loop()
        loop.self = loop
        step = trainer.global_step
        weakref.finalize(loop, lambda: self.gone.append((step, trainer.global_step)))


def test_cycles_go_at_agreed_steps_and_at_no_others():
    litter, collection = Litter(), GarbageCollection(every_n_steps=5)
    tiny_trainer(callbacks=[litter, collection]).fit(Tiny())
    assert litter.enabled == [False] * 12
    assert litter.gone[:10] == [(step, 5) for step in range(5)] + [(step, 10) for step in range(5, 10)]
    assert collection.collections == 3
    assert collection.seconds > 0


@pytest.mark.full
def test_accumulated_batches_are_one_step():
    collection = GarbageCollection(every_n_steps=2)
    tiny_trainer(callbacks=[collection], accumulate_grad_batches=3).fit(Tiny())
    assert collection.collections == 1 + 2


def test_validation_ends_with_a_collection():
    collection = GarbageCollection(every_n_steps=1000)
    runner = tiny_trainer(callbacks=[collection], limit_val_batches=1, val_check_interval=4, num_sanity_val_steps=1)
    runner.fit(Tiny())
    assert collection.collections == 1 + 3
    runner.validate(Tiny())
    assert collection.collections == 1 + 3


def test_an_error_gives_it_back():
    class Break(pl.Callback):
        def on_train_batch_start(self, *args):
            assert not gc.isenabled()
            assert gc.get_freeze_count() > 0
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        tiny_trainer(callbacks=[GarbageCollection(), Break()]).fit(Tiny())


def test_who_had_switched_it_off_finds_it_off():
    gc.disable()
    try:
        tiny_trainer(callbacks=[GarbageCollection()], max_steps=1).fit(Tiny())
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_impossible_interval_is_refused():
    with pytest.raises(ConfigurationError, match="at least 1"):
        GarbageCollection(every_n_steps=0)
