"""Odd commands that the parser takes."""

import contextlib
import io

import pytest

from megalight.cli.config_args import ConfigArgs
from megalight.cli.lightning import MegalightCLI

OWN = """
from __future__ import annotations
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import List, Literal, Optional, TypedDict, Union
from typing_extensions import Unpack
import lightning.pytorch as pl
from jsonargparse.typing import PositiveInt

class Options(TypedDict, total=False):
    under: int

class Color(Enum):
    red = 1
    blue = 2

@dataclass
class Inner:
    x: int = 1

class Model(pl.LightningModule):
    def __init__(
        self, size: int = 1, ratio: float = 0.1, flag: bool = False, name: str = "a", init_args_x: int = 1,
        choice: Literal["auto", True, 3] = "auto", maybe: Optional[Literal["a", "b"]] = None,
        many: Inner | list[Inner] | None = None, sizes: Optional[List[int]] = None, strange: "int or so" = 1,
        color: Color = Color.red, path: Optional[Path] = None, positive: PositiveInt = 1, inner: Inner = Inner(),
        d: Optional[dict] = None, t: tuple[int, float] = (1, 2.0), number: Union[int, bool] = 0, untyped=None,
    ):
        super().__init__()

class Base(pl.Callback):
    def __init__(self, decay: float = 0.1): ...

class Popping(Base):
    def __init__(self, **kwargs):
        self.extra = kwargs.pop("extra", 3)
        super().__init__(**kwargs)

class Unpacking(Base):
    def __init__(self, **kwargs: Unpack[Options]):
        super().__init__()

def other(kind):
    class Other(kind):
        def __init__(self, decorated: int = 1):
            super().__init__()
    return Other

@other
class Decorated(Model):
    def __init__(self): ...

if True:
    class Either(Model):
        def __init__(self, here: int = 1):
            super().__init__()
else:
    class Either(Model):
        def __init__(self, there: int = 1): ...

built: type = type("built", (Model,), {})
first, second = (type(name, (Model,), {}) for name in ("first", "second"))
globals()["Late"] = type("Late", (Model,), {})
with open(__file__):
    class Within(Model): ...
"""
LATIN = """# -*- coding: latin-1 -*-
from odd_of_user import Model
class Latin(Model):
    name = "caf\xe9"
"""
DDP = "lightning.pytorch.strategies.DDPStrategy"
CALLBACKS = (
    "{trainer: {callbacks%s: [{class_path: megalight.callbacks.EMA},"
    " {class_path: lightning.pytorch.callbacks.EarlyStopping, init_args: {monitor: loss}}]}}"
)
FILES = {
    "odd_of_user.py": OWN,
    "latin_of_user.py": LATIN,
    "callbacks.yaml": CALLBACKS % "",
    "more.yaml": CALLBACKS % "+",
    "section.py": "",
    "section.yaml": "{class_path: odd_of_user.Model, init_args: {size: 2}}",
    "trainer.yaml": f"{{strategy: {{class_path: {DDP}}}}}",
    "a.yaml": "{data: {class_path: GPTDataModule, init_args: {global_batch_size: 4, data: absent}}}",
    "b.yaml": "{data: {class_path: elsewhere.Data}}",
}
STATIC = "--trainer.strategy.static_graph=true"
PATIENCE = "--trainer.callbacks.patience=3"
OWN_MODEL = "--model=odd_of_user.Model"
ODD = [
    # words
    ["--trainer.max_steps", "-1"],
    ["--trainer.max_epochs", "-1", "--trainer.max_steps", "3"],
    [OWN_MODEL, "--model.ratio", "-2.5"],
    [OWN_MODEL, "--model.ratio=-1e-3"],
    [OWN_MODEL, "--model.name", "-a b"],
    [OWN_MODEL, "--model.name="],
    [OWN_MODEL, "--model.init_args_x=1"],
    [OWN_MODEL, "--model.init_args.size=3"],
    ["--model.class_path=odd_of_user.Model", "--model.init_args.size=3"],
    ["-ccallbacks.yaml"],
    ["-c=callbacks.yaml", "--config", "more.yaml"],
    # numbers and words for bool and null
    ["--trainer.max_steps=0x10"],
    ["--trainer.max_steps=1_000"],
    ["--trainer.log_every_n_steps=0x10", "--trainer.accumulate_grad_batches=0b10"],
    ["--trainer.gradient_clip_val=3e-3"],
    ["--trainer.gradient_clip_val=.inf"],
    ["--trainer.gradient_clip_val=1:30"],
    ["--trainer.enable_progress_bar=Off"],
    ["--trainer.precision=null", "--trainer.callbacks=null"],
    ["--trainer.max_time=00:00:01:00", "--trainer.limit_val_batches=0.5"],
    [OWN_MODEL, "--model.ratio=.nan"],
    [OWN_MODEL, "--model.number=0x1F", "--model.flag=yes"],
    [OWN_MODEL, "--model.choice=true", "--model.maybe=b"],
    [OWN_MODEL, "--model.choice=3", "--model.strange=3", "--model.untyped=[1, a]"],
    [OWN_MODEL, "--model.color=blue", "--model.path=/tmp", "--model.positive=3"],
    ["--trainer.strategy.sequence_parallel=on", "--trainer.strategy.tensor_parallel=2"],
    ["--trainer.strategy.micro_batch_size=auto", "--trainer.strategy.recompute=null"],
    # whole sections, dicts and lists in one word
    ["-c", f"{{trainer: {{strategy: {{class_path: {DDP}}}}}}}", STATIC],
    ["--config", f"trainer:\n  strategy:\n    class_path: {DDP}\n", STATIC],
    [f'--trainer={{"strategy": {{"class_path": "{DDP}"}}}}', STATIC],
    [f"--trainer.strategy={{class_path: {DDP}}}", STATIC],
    ["--trainer=trainer.yaml", STATIC],
    ["--trainer", "max_steps: 3"],
    ["--model=section.yaml", "--model.size=3"],
    ['--trainer.logger=[{"class_path": "CSVLogger", "init_args": {"save_dir": "x"}}]'],
    [OWN_MODEL, "--model.many=[{x: 1}]", "--model.d={a: 1}", "--model.t=[1, 2]"],
    [OWN_MODEL, "--model.sizes=[1]", "--model.sizes+=2", "--model.inner={x: 3}", "--model.inner.x=4"],
    [
        "--model=megalight.models.gpt.module.GPTModule",
        "--model.optimizer={lr: 1e-3}",
        "--model.optimizer.betas=[0.9, .95]",
    ],
    # lists of classes
    ["-c", "callbacks.yaml", PATIENCE],
    ["--trainer.callbacks+=EMA", "-c", "callbacks.yaml", PATIENCE],
    ["--trainer.callbacks+=EMA", "-c", "more.yaml", PATIENCE],
    ["--trainer.callbacks+=EMA", "--trainer.callbacks+={class_path: EarlyStopping, init_args: {monitor: a}}", PATIENCE],
    ["--trainer.callbacks+=EMA", "--trainer.callbacks.decay=.5", "--trainer.callbacks=[]"],
    # classes that the source does not tell plainly
    ["--trainer.callbacks+=odd_of_user.Popping", "--trainer.callbacks.extra=2", "--trainer.callbacks.decay=0.2"],
    ["--trainer.callbacks+=odd_of_user.Unpacking", "--trainer.callbacks.under=2"],
    ["--model=odd_of_user.Either", "--model.here=2"],
    ["--model=odd_of_user.Decorated", "--model.decorated=2"],
    *([f"--model=odd_of_user.{name}"] for name in ("built", "first", "Late", "Within")),
    ["--model=latin_of_user.Latin", "--model.size=2"],
]


@pytest.fixture(autouse=True, scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("odd")
    for name, text in FILES.items():
        (place / name).write_bytes(text.encode("latin-1"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.syspath_prepend(place)
        yield place


class Reading(MegalightCLI):
    def before_instantiate_classes(self):
        raise KeyboardInterrupt


@pytest.mark.full
@pytest.mark.parametrize("words", ODD, ids=" ".join)
def test_the_parser_takes_them(words):
    model = [] if any(word.startswith("--model") for word in words) else [OWN_MODEL]
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        try:
            Reading(args=["fit", *words, *model])
        except KeyboardInterrupt:
            return
        except SystemExit:
            pass
    if "missing: " not in error.getvalue():  # GPTModule has arguments without a default
        pytest.fail(error.getvalue())


def test_given_reads_whole_sections():
    words = ["-c", "{trainer: {max_steps: 3}}", "--model=section.yaml", "--trainer={devices: 2}", "--x=[a, {b: 1}]"]
    assert ConfigArgs.read(words).values == {
        "trainer.max_steps": 3,
        "model": "odd_of_user.Model",
        "model.size": 2,
        "trainer.devices": 2,
        "x.0": "a",
        "x.1.b": 1,
    }
