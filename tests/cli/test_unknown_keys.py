"""Unknown keys are found before torch is imported; other mistakes by the constructors, in one clear message each."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight.cli import unknown_keys
from megalight.cli.lightning import MegalightCLI
from megalight.cli.main import main
from megalight.cli.named_recipes import recipes
from megalight.cli.trainer import MegalightTrainer, check_values
from megalight.data.corpus import CorpusMeta
from megalight.data.indexed import IndexedWriter
from megalight.errors import ConfigurationError, MegalightError
from megalight.parallel import degrees
from megalight.strategies import MegatronStrategy
from tests.cli.samples import PROBE

RECIPES = Path(__file__).parents[2] / "recipes"
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
  init_args: {data: short, global_batch_size: 4, sequence_length: 4}
"""
KEYS = [
    (["--trainer.max_step=3"], ["unknown key 'trainer.max_step' (value '3')", "'trainer' has no", "'max_steps'"]),
    (["--max_steps=3"], ["unknown key 'max_steps'", "Did you mean 'trainer.max_steps'?"]),
    (["--num_layers=3"], ["unknown key 'num_layers'", "Did you mean 'model.config.num_layers'?"]),
    (
        ["--seed=3"],
        ["unknown key 'seed'", "Here it is data.seed (order of data), model.seed (initial weights), seed_everything"],
    ),
    (["--data.micro_batch_size=2"], ["GPTDataModule has no", "Did you mean 'trainer.strategy.micro_batch_size'?"]),
    (
        ["--trainer.strategy.tensor_paralel=2"],
        ["'trainer.strategy.tensor_paralel'", "MegatronStrategy", "'tensor_parallel'"],
    ),
    (["--trainer.strategy=megatron_fsdp", "--trainer.strategy.sharding=x"], ["MegatronFSDPStrategy has no such"]),
    (["--trainer.callbacks+=EMA", "--trainer.callbacks.decai=1"], ["'trainer.callbacks.decai'", "EMA", "'decay'"]),
    (["--model.config.num_layer=3"], ["unknown key 'model.config.num_layer'", "GPTConfig", "'num_layers'"]),
    (["--model.config.attention.windw=3"], ["'model.config.attention.windw'", "AttentionConfig", "'window'"]),
    (["--model.config.moe.top_k=2"], ["MoEConfig", "Did you mean 'model.config.moe.router.top_k'?"]),
    (["--data.seqence_length=1"], ["'data.seqence_length'", "'sequence_length'"]),
    (
        ["--trainer.devices=3", "--trainer.strategy.tensor_parallel=2"],
        ["world size 3 is not a multiple of tp x cp x pp"],
    ),
]
VALUES = [
    (["--micro-batch-size", "3"], ["'micro-batch-size' (value '3')", "'trainer.strategy.micro_batch_size'?"]),
    (["--trainer.max_steps=abc"], ["trainer.max_steps = 'abc' is not valid; expected: int."]),
    (["--trainer.strategy.tensor_parallel=0"], ["tensor_parallel=0; it must be at least 1"]),
    (["--model=megalight.models.gpt.module.GPTModul"], ["has no attribute 'GPTModul'", "module.GPTModule'?"]),
    (
        ["--data.data=null", "--data.train_data=short", "--data.sequence_length=8"],
        ["train split of short", "hold 8 tokens", "length 8 takes 9."],
    ),
    (["--ckpt_path=last"], ["--ckpt_path=last", "no finished checkpoint"]),
    (["--trainer.callbacks+=EarlyStoping"], ["'EarlyStoping' names no known class. Did you mean 'EarlyStopping'?"]),
    (["--trainer.default_root_dir=/proc/1/runs"], ["/proc/1 cannot be written", "another folder"]),
    (
        ["--model=GPTModule", "--model.config=llama3_8"],
        ["unknown GPT preset 'llama3_8'", "Did you mean 'llama3_8b'?"],
    ),
    (
        ["--trainer.strategy=ddp", "--trainer.strategy.tensor_parallel=2"],
        ["trainer.strategy = 'ddp' is a name that takes no arguments"],
    ),
    (["--trainer.callbacks+=EarlyStopping"], ["missing: trainer.callbacks.monitor."]),
    (["--trainer.max_time=noon"], ["trainer.max_time is 'noon'", "DD:HH:MM:SS"]),
    (
        ["--trainer.callbacks+=Distillation", "--trainer.callbacks.teacher_logits=absent"],
        ["absent has no manifest.json", "megalight cache-logits"],
    ),
]
"""Values of each kind that something refuses; tests/strategies/test_bad_input.py has those of a run that works."""
ALIKE = [
    (["--trainer.devices=0"], ["trainer.devices is 0; give a number of at least 1"]),
    (["--data.vocab_size=9"], ["tokenizer has 9 tokens", "vocab_size is 8"]),
    (["--trainer.default_root_dir=r.yaml/x"], ["r.yaml is a file; name a folder"]),
    (["--trainer.accelerator=gpuu"], ["accelerator='gpuu'", "Available names are"]),
    (["--trainer.barebones=true"], ["trainer.barebones is True", "--trainer.logger=false"]),
    (["--data.global_batch_size=0"], ["global_batch_size is 0"]),
    (["--data.tokenizer=absent.json"], ["tokenizer 'absent.json' does not exist"]),
    (["--trainer.strategy.process_group_backend=glo"], ["process_group_backend='glo'", "Did you mean 'gloo'?"]),
    (
        ["--trainer.strategy.micro_batch_size=auto", "--trainer.accelerator=cpu"],
        ["micro_batch_size='auto' measures the memory of a GPU", "Give a number"],
    ),
]
"""What the same constructors or checks refuse as values above."""
MORE = [
    (["--model.optimizer.lr=fast"], ["model.optimizer.lr = 'fast'", "float"]),
    (["--trainer.devices=two"], ["trainer.devices is two"]),
    (["--trainer.strategy=DPStrategy"], ["'DPStrategy' is not a known strategy. Did you mean 'DDPStrategy'?"]),
    (["--trainer.callbacks+=megalight.callbacks.EMAA"], ["has no attribute 'EMAA'", "'megalight.callbacks.ema.EMA'?"]),
    (["--trainer.plugins=SLURMEnvironmen"], ["'SLURMEnvironmen' names no known class", "'SLURMEnvironment'?"]),
    (["--trainer.plugins+=MegatronPrecison"], ["no known class. Did you mean 'MegatronPrecision'?"]),
    (["--trainer.logger=CSVLoger"], ["'CSVLoger' is not a known logger. Did you mean 'CSVLogger'?"]),
    (["--model=GPTModul"], ["model = 'GPTModul' names no known class. Did you mean 'GPTModule'?"]),
    (["--data=BertDatModule"], ["'BertDatModule' names no known class. Did you mean 'BertDataModule'?"]),
    (["--model=BertModule", "--model.config=bert"], ["unknown BERT preset 'bert'", "'bert_"]),
    (["--model.optimizer.schedule=Cosin"], ["schedule = 'Cosin' names no known class. Did you mean 'Cosine'?"]),
    (["--trainer.callbacks+=Timer", "--trainer.callbacks.duration=noon"], ["duration='noon'", "DD:HH:MM"]),
    (["--trainer.min_steps=-3"], ["trainer.min_steps is -3; it must be at least 0"]),
    (
        ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=a", "--trainer.callbacks.mode=maxx"],
        ["`mode` can be min, max but got maxx"],
    ),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a recipe and two corpora."""
    place = tmp_path_factory.mktemp("early")
    (place / "r.yaml").write_text(RECIPE.replace("PLACE", str(place)))
    with IndexedWriter(place / "short", np.uint16) as writer:
        writer.add_documents(np.arange(8), [5, 3])
    with IndexedWriter(place / "facts", np.uint16) as writer:
        writer.add_documents(np.arange(8), [5, 3])
    CorpusMeta(2, 8, "uint16", 300, 7, 2.0, "t", None, -1, True, 9).save(place / "facts")
    return place


@pytest.fixture(scope="module")
def answers(place):
    """All unknown keys, one after another in one process."""
    commands = [["fit", "-c", "r.yaml", *words] for words, _ in KEYS]
    run = subprocess.run(
        [sys.executable, "-c", PROBE], input=json.dumps(commands), cwd=place, capture_output=True, text=True, check=True
    )
    found, heavy = json.loads(run.stdout)
    assert heavy == []
    return found


def _check_answer(code, text, parts):
    assert code == 2
    assert len(text.splitlines()) <= 20
    for part in parts:
        assert part in text.replace("\n  ", " "), text


@pytest.mark.parametrize("number", range(len(KEYS)), ids=lambda number: " ".join(KEYS[number][0]))
def test_unknown_keys_are_found_without_torch(number, answers):
    _check_answer(*answers[number], KEYS[number][1])


@pytest.mark.parametrize(
    ("words", "parts"),
    [*VALUES, *(pytest.param(*each, marks=pytest.mark.full) for each in ALIKE + MORE)],
    ids=lambda each: " ".join(each),
)
def test_a_wrong_value_ends_in_one_message(words, parts, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    code = main(["fit", "-c", "r.yaml", "--trainer.max_steps=1", *words])
    _check_answer(code, capsys.readouterr().err, parts)


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_recipes_have_no_mistake(path):
    unknown_keys.check("fit", ["-c", str(path), "--print_config"])


def test_the_backends_are_those_of_torch():
    assert {*torch.distributed.Backend.backend_list} - {"undefined"} <= {*degrees.BACKENDS}
    with pytest.raises(ConfigurationError, match=r"no backend 'glo'\. Did you mean 'gloo'"):
        MegatronStrategy(process_group_backend="cpu:glo,cuda:nccl")


def test_named_recipes_have_no_mistake(tmp_path):
    path = tmp_path / "named.yaml"
    for recipe in list(recipes().values())[::5]:
        path.write_text(yaml.safe_dump(recipe.configuration))
        unknown_keys.check("fit", ["-c", str(path), "--print_config"])


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
    unknown_keys.check("fit", [*words, "--print_config"])


def test_a_class_of_a_later_file_takes_its_own_arguments(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "trainer: {strategy: {class_path: MegatronStrategy, init_args: {expert_parallel: 1}}}"
    )
    (tmp_path / "b.yaml").write_text("trainer: {strategy: {class_path: DDPStrategy, init_args: {static_graph: true}}}")
    unknown_keys.check("fit", ["-c", str(tmp_path / "a.yaml"), "-c", str(tmp_path / "b.yaml")])
    with pytest.raises(MegalightError, match=r"static_graph.*MegatronStrategy"):
        unknown_keys.check(
            "fit", ["-c", str(tmp_path / "b.yaml"), "--trainer.strategy=megatron", "--trainer.strategy.static_graph=1"]
        )


def test_the_parser_says_the_same(capsys, tmp_path):
    """Both find this mistake; a user cannot tell which of them did."""
    words = ["--model=GPTModule", "--model.config.num_layer=3", f"--trainer.default_root_dir={tmp_path}"]
    assert main(["fit", *words]) == 2
    first = capsys.readouterr().err
    with pytest.raises(SystemExit):
        MegalightCLI(args=["fit", *words])
    assert capsys.readouterr().err == first


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    def train(**options):
        saver = ModelCheckpoint(dirpath=tmp_path / "c")
        return MegalightTrainer(accelerator="cpu", default_root_dir=tmp_path / "a/b", callbacks=[saver], **options)

    train()
    assert list(tmp_path.iterdir()) == []

    def refuses(path, mode=0o777):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuses)
    with pytest.raises(ConfigurationError, match=f"default_root_dir=.*: {tmp_path} cannot be written .Read-only"):
        train()
    with pytest.raises(ConfigurationError, match=f"callbacks.dirpath={tmp_path}/c: {tmp_path} cannot be written"):
        train(logger=False)


@pytest.mark.parametrize("devices", ["2", 2, "auto", -1, "0,", "0,1", "[0, 1]", None])
def test_devices_that_the_trainer_takes(devices):
    check_values({"devices": devices})


@pytest.mark.parametrize("value", ["1:00:00:00", "00:12:00:00", None])
def test_times_that_the_trainer_takes(value):
    check_values({"max_time": value})
    with pytest.raises(ConfigurationError, match="with quotes"):
        check_values({"max_time": 216000})  # YAML reads 1:00:00:00 without quotes as seconds
