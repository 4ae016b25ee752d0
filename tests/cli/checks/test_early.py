"""Mistakes in a command are found before torch is imported, with the parser's own words."""

import errno
import json
import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment, Precision
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry

from megalight.cli.checks import early, lightning_rules, rules
from megalight.cli.classes import subclasses
from megalight.cli.lightning import MegalightCLI
from megalight.cli.main import main
from megalight.cli.named_recipes import recipes
from megalight.cli.sources import find_class
from megalight.data.corpus import CorpusMeta
from megalight.data.indexed import IndexedWriter
from megalight.errors import ConfigurationError, MegalightError
from megalight.parallel import degrees
from megalight.registry import PLUGIN_GROUP
from megalight.strategies import MegatronStrategy

RECIPES = Path(__file__).parents[3] / "recipes"
RECIPE = """
trainer:
  default_root_dir: PLACE
  callbacks:
    - class_path: megalight.callbacks.EMA
      init_args: {decay: 0.9}
model:
  class_path: megalight.models.gpt.GPTModule
  init_args:
    config: {num_layers: 1, hidden_size: 8, num_heads: 2, ffn_hidden_size: 8, vocab_size: 8, max_sequence_length: 8}
data:
  class_path: megalight.data.gpt.module.GPTDataModule
  init_args: {data: absent/text, global_batch_size: 4, sequence_length: 8}
"""
SHORT = ["--data.data=short", "--data.sequence_length=4"]
MISTAKES = [
    (["--trainer.max_step=3"], ["unknown key 'trainer.max_step' (value '3')", "'trainer' has no", "'max_steps'"]),
    (["--max_steps=3"], ["unknown key 'max_steps'", "Did you mean 'trainer.max_steps'?"]),
    (["--num_layers=3"], ["unknown key 'num_layers'", "Did you mean 'model.config.num_layers'?"]),
    (["--micro-batch-size", "3"], ["'micro-batch-size' (value '3')", "'trainer.strategy.micro_batch_size'?"]),
    (
        ["--seed=3"],
        ["unknown key 'seed'", "Here it is data.seed (order of data), model.seed (initial weights), seed_everything"],
    ),
    (["--data.micro_batch_size=2"], ["GPTDataModule has no", "Did you mean 'trainer.strategy.micro_batch_size'?"]),
    (["--trainer.max_steps=abc"], ["trainer.max_steps = 'abc' is not valid; expected: int."]),
    (["--trainer.max_steps=1.5"], ["trainer.max_steps = '1.5'"]),
    (["--trainer.precision=bf16mixed"], ["trainer.precision = 'bf16mixed'", "Did you mean 'bf16-mixed'?"]),
    (["--trainer.precision=16-mixed", "--trainer.accelerator=cpu"], ["precision is 16-mixed", "bf16-mixed"]),
    (["--trainer.gradient_clip_val=-1"], ["gradient_clip_val is -1", "at least 0"]),
    (["--trainer.accumulate_grad_batches=0"], ["accumulate_grad_batches is 0"]),
    (
        ["--trainer.strategy.tensor_paralel=2"],
        ["'trainer.strategy.tensor_paralel'", "MegatronStrategy", "'tensor_parallel'"],
    ),
    (["--trainer.strategy=megatron_fsdp", "--trainer.strategy.sharding=x"], ["MegatronFSDPStrategy has no such"]),
    (["--trainer.strategy.tensor_parallel=0"], ["tensor_parallel=0; it must be at least 1"]),
    (["--trainer.strategy.sequence_parallel=true"], ["sequence_parallel=True needs tensor_parallel > 1"]),
    (["--trainer.strategy.timeout_seconds=-5"], ["timeout_seconds=-5"]),
    (["--trainer.strategy.micro_batch_size=0"], ["micro_batch_size=0"]),
    (
        ["--trainer.strategy.micro_batch_size=auto", "--trainer.accelerator=cpu"],
        ["micro_batch_size='auto' measures the memory of a GPU", "Give a number"],
    ),
    (["--trainer.callbacks+=EMA", "--trainer.callbacks.decai=1"], ["'trainer.callbacks.decai'", "EMA", "'decay'"]),
    (["--model=megalight.models.gpt.module.GPTModul"], ["has no attribute 'GPTModul'", "module.GPTModule'?"]),
    (["--model.config.num_layer=3"], ["unknown key 'model.config.num_layer'", "GPTConfig", "'num_layers'"]),
    (["--model.config.attention.windw=3"], ["'model.config.attention.windw'", "AttentionConfig", "'window'"]),
    (["--model.config.moe.top_k=2"], ["MoEConfig", "Did you mean 'model.config.moe.router.top_k'?"]),
    (["--model.config.hidden_size=x"], ["model.config.hidden_size = 'x' is not valid; expected: int."]),
    (["--model.optimizer.lr=fast"], ["model.optimizer.lr = 'fast'", "float"]),
    (["--data.num_workers=-1"], ["num_workers is -1"]),
    (["--data.global_batch_size=0"], ["global_batch_size is 0"]),
    (["--data.seqence_length=1"], ["'data.seqence_length'", "'sequence_length'"]),
    ([], ["absent/text.bin does not exist", "megalight prepare"]),
    (
        ["--data.data=short", "--data.split=1,1,0", "--data.sequence_length=9"],
        ["train split of short: the documents hold 5 tokens", "sequence_length 9 takes 10. Lower"],
    ),
    (["--data.data=null", "--data.train_data=short"], ["train split of short", "hold 8 tokens", "length 8 takes 9."]),
    (["--trainer.devices=0"], ["trainer.devices is 0; give a number of at least 1"]),
    (["--trainer.devices=two"], ["trainer.devices is two"]),
    (
        ["--data.data=null", "--data.train_data=short", "--data.sequence_length=4", "--trainer.devices=3"],
        ["global_batch_size is 4 and there are 3 data-parallel ranks"],
    ),
    ([*SHORT, "--data.tokenizer=absent.json"], ["tokenizer 'absent.json' does not exist"]),
    ([*SHORT, "--data.vocab_size=9"], ["tokenizer has 9 tokens", "vocab_size is 8"]),
    (["--data.data=facts", "--data.sequence_length=4"], ["tokenizer has 300 tokens", "vocab_size is 8"]),
    ([*SHORT, "--trainer.default_root_dir=r.yaml/x"], ["r.yaml is a file; name a folder"]),
    (["--ckpt_path=absent.ckpt", *SHORT], ["absent.ckpt", "nothing is there"]),
    (["--ckpt_path=last", *SHORT], ["--ckpt_path=last", "no finished checkpoint"]),
    (["--trainer.accelerator=gpuu"], ["trainer.accelerator = 'gpuu'", "Did you mean 'gpu'?"]),
    (["--trainer.strategy=megatro"], ["'megatro' is not a known strategy. Did you mean 'megatron'?"]),
    (["--trainer.strategy=DPStrategy"], ["'DPStrategy' is not a known strategy. Did you mean 'DDPStrategy'?"]),
    (["--trainer.callbacks+=EarlyStoping"], ["'EarlyStoping' names no known class. Did you mean 'EarlyStopping'?"]),
    (["--trainer.callbacks+=megalight.callbacks.EMAA"], ["has no attribute 'EMAA'", "'megalight.callbacks.EMA'?"]),
    (["--trainer.plugins=SLURMEnvironmen"], ["'SLURMEnvironmen' names no known class", "'SLURMEnvironment'?"]),
    (["--trainer.plugins+=MegatronPrecison"], ["no known class. Did you mean 'MegatronPrecision'?"]),
    (["--trainer.strategy.process_group_backend=glo"], ["process_group_backend='glo'", "Did you mean 'gloo'?"]),
    (
        ["--trainer.strategy=DDPStrategy", "--trainer.strategy.process_group_backend=nccll"],
        ["process_group_backend='nccll': there is no backend", "Did you mean 'nccl'?"],
    ),
    ([*SHORT, "--trainer.default_root_dir=/proc/1/runs"], ["/proc/1 cannot be written", "another folder"]),
    (["--trainer.logger=CSVLoger"], ["'CSVLoger' names no known class. Did you mean 'CSVLogger'?"]),
    (["--model=GPTModul"], ["model = 'GPTModul' names no known class. Did you mean 'GPTModule'?"]),
    (["--data=BertDatModule"], ["'BertDatModule' names no known class. Did you mean 'BertDataModule'?"]),
    (
        [*SHORT, "--model=GPTModule", "--model.config=llama3_8"],
        ["config = 'llama3_8'", "Did you mean 'llama3_8b'?"],
    ),
    ([*SHORT, "--model=BertModule", "--model.config=bert"], ["model.config = 'bert' is not valid", "'bert_"]),
    (
        ["--trainer.strategy=ddp", "--trainer.strategy.tensor_parallel=2"],
        ["trainer.strategy.tensor_parallel = '2': the strategy 'ddp' is a name that takes no arguments"],
    ),
    (["--model.optimizer.schedule=Cosin"], ["schedule = 'Cosin' names no known class. Did you mean 'Cosine'?"]),
    ([*SHORT, "--trainer.callbacks+=Timer", "--trainer.callbacks.duration=noon"], ["duration is 'noon'", "DD:HH:MM"]),
    (["--trainer.min_steps=-3"], ["trainer.min_steps is -3; it must be at least 0"]),
    (["--trainer.callbacks+=EarlyStopping"], ["missing: trainer.callbacks.monitor."]),
    (
        ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=a", "--trainer.callbacks.mode=maxx"],
        ["trainer.callbacks.mode = 'maxx'", "one of min, max. Did you mean 'max'?"],
    ),
    (["--trainer.barebones=true"], ["trainer.barebones is True", "--trainer.logger=false"]),
    (["--trainer.max_time=noon"], ["trainer.max_time is 'noon'", "DD:HH:MM:SS"]),
    (
        [*SHORT, "--trainer.callbacks+=Distillation", "--trainer.callbacks.teacher_logits=absent"],
        ["absent has no manifest.json", "megalight teach"],
    ),
]
PROBE = """
import contextlib, io, json, sys
from megalight.cli.main import main
answers = []
for words in json.loads(sys.stdin.read()):
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        answers.append([main(words), text.getvalue()])
print(json.dumps([answers, sorted({"torch", "torch._dynamo", "lightning"} & set(sys.modules))]))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """All mistakes, one after another in one process."""
    place = tmp_path_factory.mktemp("early")
    (place / "r.yaml").write_text(RECIPE.replace("PLACE", str(place)))
    with IndexedWriter(place / "short", np.uint16) as writer:
        writer.add_documents(np.arange(8), [5, 3])
    with IndexedWriter(place / "facts", np.uint16) as writer:
        writer.add_documents(np.arange(8), [5, 3])
    CorpusMeta(2, 8, "uint16", 300, 7, 2.0, "t", None, -1, True, 9).save(place / "facts")
    commands = [["fit", "-c", "r.yaml", *words] for words, _ in MISTAKES]
    run = subprocess.run(
        [sys.executable, "-c", PROBE], input=json.dumps(commands), cwd=place, capture_output=True, text=True, check=True
    )
    found, heavy = json.loads(run.stdout)
    assert heavy == []
    return found


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=lambda number: " ".join(MISTAKES[number][0]) or "no data")
def test_mistakes_are_found_without_torch(number, answers):
    code, text = answers[number]
    assert code == 2
    assert len(text.splitlines()) <= 8
    for part in MISTAKES[number][1]:
        assert part in text.replace("\n  ", " "), text


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_have_no_mistake(path):
    early.check("fit", ["-c", str(path), "--print_config"])


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    words = ["--model=GPTModule", f"--trainer.default_root_dir={tmp_path}/a/b"]
    early.check("fit", words)
    assert list(tmp_path.iterdir()) == []
    elsewhere = ["--trainer.callbacks+=ModelCheckpoint", f"--trainer.callbacks.dirpath={tmp_path}/c"]
    early.check("fit", [*words, *elsewhere])

    def refuses(path, mode=0o777):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuses)
    early.check("fit", [*words, "--trainer.logger=false"])
    with pytest.raises(MegalightError, match=f"default_root_dir=.*: {tmp_path} cannot be written .Read-only"):
        early.check("fit", words)
    with pytest.raises(MegalightError, match=f"callbacks.dirpath={tmp_path}/c: {tmp_path} cannot be written"):
        early.check("fit", [*words, *elsewhere, "--trainer.logger=false"])


@pytest.mark.parametrize("name", ["gloo", "NCCL", "cpu:gloo,cuda:nccl", "mine"])
def test_backends_that_torch_has(name, monkeypatch):
    """Others may be registered by a module of the user's, which is imported later."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    model = "samples.SampleModule" if name == "mine" else "GPTModule"
    early.check("fit", [f"--model={model}", f"--trainer.strategy.process_group_backend={name}"])
    if name != "mine":
        MegatronStrategy(process_group_backend=name)


def test_the_backends_are_those_of_torch():
    assert {*torch.distributed.Backend.backend_list} - {"undefined"} <= {*degrees.BACKENDS}
    with pytest.raises(ConfigurationError, match=r"no backend 'glo'\. Did you mean 'gloo'"):
        MegatronStrategy(process_group_backend="cpu:glo,cuda:nccl")


def test_all_plugins_are_known_by_name():
    kinds = subclasses(Precision), subclasses(ClusterEnvironment), subclasses(CheckpointIO)
    found = [each for kind in kinds for each in kind if each.__module__.startswith(("megalight.", "lightning."))]
    names = {each.__name__ for each in found if "_graveyard" not in each.__module__ and each.__name__[0] != "_"}
    assert {name for name in names if find_class(name, early.MODULES) is None} == set()


@pytest.mark.parametrize("devices", ["2", "auto", "-1", "0,", "0,1", "[0, 1]", "null"])
def test_devices_that_the_trainer_takes(devices):
    early.check("fit", ["--model=GPTModule", f"--trainer.devices={devices}"])


def test_named_recipes_have_no_mistake(tmp_path):
    path = tmp_path / "named.yaml"
    for recipe in list(recipes().values())[::5]:
        path.write_text(yaml.safe_dump(recipe.configuration))
        early.check("fit", ["-c", str(path), "--print_config"])


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--model=GPTModule", "--data.data=x"], "data.data is given, but data names no class. Give --data=CLASS"),
        (["--model.config=llama3_8b", "--data=GPTDataModule"], "one of BertModule, EagleModule, GPTModule, VLMModule."),
    ],
)
def test_a_section_without_a_class(words, answer):
    with pytest.raises(ConfigurationError, match=re.escape(answer)):
        early.check("fit", words)


def test_presets_of_plugins_are_left_to_the_parser(monkeypatch):
    monkeypatch.setattr(rules, "only_known", lambda values, classes: True)
    words = ["--model=GPTModule", "--model.config=theirs", "--trainer.default_root_dir=."]
    with pytest.raises(ConfigurationError, match="theirs"):
        early.check("fit", words)
    theirs = EntryPoint("theirs", "users.presets", PLUGIN_GROUP)
    monkeypatch.setattr(rules, "entry_points", lambda group: [theirs])
    early.check("fit", words)


@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.strategy=SomeOther", "--trainer.strategy.own=1"],
        ["--trainer.logger=TensorBoardLogger", "--trainer.logger.purge_step=1"],
        ["--model=users.module.Model", "--model.anything=1"],
        ["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=val_loss"],
        ["--model.config=llama3_8b", "--trainer.devices=auto", "--trainer.max_time", "00:01:00:00"],
        ["--trainer.strategy.init_args.tensor_parallel=2", "--trainer.limit_val_batches=0.5"],
        ["--model.help=GPTModule", "--trainer.deterministic=warn", "--trainer.profiler=simple"],
        ["--model=GPTModule", "--model.optimizer.schedule=Cosine", "--model.optimizer.schedule.warmup=3"],
    ],
)
def test_what_cannot_be_known_is_left_to_the_parser(words):
    early.check("fit", [*words, "--print_config"])


def test_a_class_of_a_later_file_takes_its_own_arguments(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "trainer: {strategy: {class_path: MegatronStrategy, init_args: {expert_parallel: 1}}}"
    )
    (tmp_path / "b.yaml").write_text("trainer: {strategy: {class_path: DDPStrategy, init_args: {static_graph: true}}}")
    early.check("fit", ["-c", str(tmp_path / "a.yaml"), "-c", str(tmp_path / "b.yaml")])
    with pytest.raises(MegalightError, match=r"static_graph.*MegatronStrategy"):
        early.check(
            "fit", ["-c", str(tmp_path / "b.yaml"), "--trainer.strategy=megatron", "--trainer.strategy.static_graph=1"]
        )


def test_tables_are_those_of_lightning():
    registered = {*StrategyRegistry.available_strategies(), "auto"}
    assert {name for name in registered if "fork" not in name} <= {*lightning_rules.STRATEGIES}
    # Without ``os.fork``, Lightning has no strategies that fork.
    assert {*lightning_rules.STRATEGIES} <= registered | {n for n in lightning_rules.STRATEGIES if "fork" in n}
    assert {*AcceleratorRegistry.available_accelerators(), "auto", "gpu"} == {*lightning_rules.ACCELERATORS}
    for name, words in lightning_rules.CHOICES.items():
        needed = {"EarlyStopping": {"monitor": "a"}}.get(name, {})
        for argument, choices in words.items():
            for choice in choices:
                getattr(callbacks, name)(**needed, **{argument: choice})
            with pytest.raises(MisconfigurationException):
                getattr(callbacks, name)(**needed, **{argument: f"{choices[0]}x"})


@pytest.mark.parametrize("words", [["--trainer.accelerator=own"], ["--trainer.strategy=own"]])
def test_a_module_of_the_user_may_register_names(words, tmp_path, monkeypatch):
    """Only the import of the module tells."""
    (tmp_path / "own_names.py").write_text("class Model: pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lightning.pytorch")
    with pytest.raises(MegalightError, match="'own' is not a known"):
        early.check("fit", ["--model=GPTModule", *words])
    early.check("fit", ["--model=own_names.Model", *words])


def test_a_preset_of_modelopt(tmp_path, monkeypatch):
    (tmp_path / "modelopt" / "torch" / "quantization").mkdir(parents=True)
    for folder in ("modelopt", "modelopt/torch", "modelopt/torch/quantization"):
        (tmp_path / folder / "__init__.py").touch()
    (tmp_path / "modelopt/torch/quantization/config.py").write_text('choices: set[str] = {"A_CFG", "FP8_CFG"}')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "modelopt", raising=False)
    words = ["--model=GPTModule", "--trainer.callbacks+=ModelOptQuantization", "--trainer.callbacks.preset"]
    early.check("fit", [*words, "A_CFG"])
    early.check("fit", [*words, "general/ptq/some"])
    with pytest.raises(MegalightError, match=r"no preset 'FP4_CFG'. Did you mean 'FP8_CFG'\? It has A_CFG, FP8_CFG"):
        early.check("fit", [*words, "FP4_CFG"])


@pytest.mark.parametrize("time", ["1:00:00:00", "00:12:00:00"])
def test_a_time_of_the_command_line_is_a_text(time, tmp_path):
    early.check("fit", ["--model=GPTModule", f"--trainer.max_time={time}"])
    path = tmp_path / "time.yaml"
    path.write_text(f"trainer: {{max_time: '{time}'}}")
    early.check("fit", ["-c", str(path)])
    path.write_text("trainer: {max_time: 1:00:00:00}")
    with pytest.raises(MegalightError, match="with quotes"):
        early.check("fit", ["-c", str(path)])


def test_the_parser_says_the_same(capsys, tmp_path):
    """Both find this mistake; a user cannot tell which of them did."""
    words = ["--model=GPTModule", "--model.config.num_layer=3", f"--trainer.default_root_dir={tmp_path}"]
    assert main(["fit", *words]) == 2
    first = capsys.readouterr().err
    with pytest.raises(SystemExit):
        MegalightCLI(args=["fit", *words])
    assert capsys.readouterr().err == first
