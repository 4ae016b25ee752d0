"""Mistakes in keys and values of the configuration end in one clear message each."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from megalight.cli.main import main
from megalight.cli.trainer import MegalightTrainer, check_values
from megalight.data.corpus import CorpusMeta
from megalight.data.indexed import IndexedWriter
from megalight.errors import ConfigurationError
from megalight.parallel import degrees
from megalight.strategies import MegatronStrategy

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
    (["--trainer.max_time=noon"], ["duration='noon'", "DD:HH:MM:SS"]),
    (
        ["--trainer.callbacks+=Distillation", "--trainer.callbacks.teacher_logits=absent"],
        ["absent has no manifest.json", "megalight cache-logits"],
    ),
]
"""Values of each kind that something refuses; tests/strategies/test_bad_input.py has those of a run that works."""
ALIKE = [
    (["--trainer.devices=0"], ["value is not a valid input using cpu"]),
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
    (["--trainer.devices=two"], ["`devices` selected with"]),
    (["--trainer.strategy=DPStrategy"], ["'DPStrategy' is not a known strategy. Did you mean 'DDPStrategy'?"]),
    (["--trainer.callbacks+=megalight.callbacks.EMAA"], ["has no attribute 'EMAA'", "'megalight.callbacks.ema.EMA'?"]),
    (["--trainer.plugins=SLURMEnvironmen"], ["'SLURMEnvironmen' names no known class", "'SLURMEnvironment'?"]),
    (["--trainer.plugins+=MegatronPrecison"], ["no known class. Did you mean 'MegatronPrecision'?"]),
    (["--trainer.logger=CSVLoger"], ["'CSVLoger' is not a known logger. Did you mean 'CSVLogger'?"]),
    (["--model=GPTModul"], ["model = 'GPTModul' names no known class. Did you mean 'GPTModule'?"]),
    (["--data=BertDatModule"], ["'BertDatModule' names no known class. Did you mean 'BertDataModule'?"]),
    (["--model=BertModule", "--model.config=bert"], ["unknown BERT preset 'bert'", "'bert_"]),
    (["--model.optimizer.schedule=Cosin"], ["schedule = 'Cosin' names no known class. Did you mean 'CosineDecay'?"]),
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


def _check_answer(code, text, parts):
    assert code == 2
    assert len(text.splitlines()) <= 20
    for part in parts:
        assert part in text.replace("\n  ", " "), text


@pytest.mark.parametrize(
    ("words", "parts"),
    [*KEYS, *VALUES, *(pytest.param(*each, marks=pytest.mark.full) for each in ALIKE + MORE)],
    ids=lambda each: " ".join(each),
)
def test_a_mistake_ends_in_one_message(words, parts, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    code = main(["fit", "-c", "r.yaml", "--trainer.max_steps=1", *words])
    _check_answer(code, capsys.readouterr().err, parts)


def test_the_backends_are_those_of_torch():
    assert {*torch.distributed.Backend.backend_list} - {"undefined"} <= {*degrees.BACKENDS}
    with pytest.raises(ConfigurationError, match=r"no backend 'glo'\. Did you mean 'gloo'"):
        MegatronStrategy(process_group_backend="cpu:glo,cuda:nccl")


def test_a_class_of_a_later_file_takes_its_own_arguments(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    (place / "b.yaml").write_text("trainer: {strategy: {class_path: DDPStrategy, init_args: {static_graph: true}}}")
    later = ["--trainer.strategy=megatron", "--trainer.strategy.static_graph=1"]
    assert main(["fit", "-c", "r.yaml", "-c", "b.yaml", *later]) == 2
    assert "'trainer.strategy.static_graph' (value '1'): MegatronStrategy has no" in capsys.readouterr().err


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


def test_a_time_that_yaml_reads_as_seconds():
    with pytest.raises(ConfigurationError, match="with quotes"):
        check_values({"max_time": 216000})  # 1:00:00:00 without quotes


@pytest.mark.parametrize("interval", [1, 0.25, None])
def test_intervals_that_the_trainer_takes(interval):
    check_values({"val_check_interval": interval})
