from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
import yaml
from lightning.pytorch.strategies import DDPStrategy

from megalight.cli.all_options import Schema
from megalight.cli.lightning import parsed
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError, LayoutError
from megalight.models.gpt.config import GPTConfig
from megalight.optim import AdamConfig
from megalight.rl.countdown import Countdown, CountdownPuzzles
from megalight.rl.data import PromptDataModule
from megalight.rl.environment import Answer, PromptBatch
from megalight.rl.module import GRPOModule
from megalight.rl.rewards import FinalAnswer, RowFilter
from megalight.rl.rollouts import Rollouts
from megalight.strategies import MegatronStrategy
from tests.data.chat.conftest import chat_tokenizer as chat_tokenizer
from tests.data.gpt.test_module import Reader, every_step, trainer
from tests.support.environment import PoolEnvironment
from tests.support.workers import run

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*LeafSpec:FutureWarning", "ignore:.*when using `ckpt_path`, callbacks used:UserWarning"
)


def judge(answer: Answer, row: Mapping[str, Any]) -> float:
    """A reward of one's own, which a configuration names by its path."""
    return float(answer.text == row["answer"])


class Asked(Reader):
    """Writes down the answers of the rows that it is asked."""

    def note(self, stage: str, batch: Any) -> torch.Tensor:
        assert isinstance(batch, PromptBatch)
        self.rows[stage].append([task.row["answer"] for task in batch.tasks])
        return self.layer(torch.ones(1, 1)).sum()


def write(path: Path, count: int = 11, lengths: int = 1) -> str:
    rows = [{"prompt": f"what {'is ' * (k % lengths)}{k}", "answer": k} for k in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def module(tokenizer: Path, data: Any, **options: Any) -> PromptDataModule:
    given = {"tokenizer": str(tokenizer), "rewards": {"answer": FinalAnswer()}, "global_batch_size": 2, "split": "1"}
    return PromptDataModule(**{**given, "data": data, **options})


def flat(rows: list[list[int]]) -> list[int]:
    return [each for row in rows for each in row]


@pytest.mark.parametrize("megatron", [False, True])
@pytest.mark.parametrize(
    ("options", "steps"),
    [({"max_steps": 7}, 7), ({"max_steps": 3, "accumulate_grad_batches": 2}, 6), ({"max_epochs": 2}, 10)],
)
def test_resume_after_any_step(
    chat_tokenizer: Path, tmp_path: Path, options: dict[str, Any], steps: int, megatron: bool
) -> None:
    path = write(tmp_path / "rows.jsonl")

    def read(checkpoint: Path | None = None, **more: Any) -> list[list[int]]:
        reader = Asked()
        strategy = {"strategy": MegatronStrategy()} if megatron else {}
        trainer(**options, **more, **strategy).fit(reader, module(chat_tokenizer, path), ckpt_path=checkpoint)
        return reader.rows["train"]

    full = read(callbacks=[every_step(tmp_path / "saved")])
    assert len(full) == steps
    assert all(len(batch) == 2 for batch in full)
    assert len(set(flat(full[:5]))) == 10  # one pass has each prompt once at most
    per_step = options.get("accumulate_grad_batches", 1)
    saved = sorted((tmp_path / "saved").iterdir())
    assert len(saved) == steps // per_step
    for path_of_step in saved[:-1]:
        done = int(path_of_step.stem.rpartition("=")[2]) * per_step
        assert read(path_of_step) == full[done:]


def rank_reads(folder: str, tokenizer: str) -> tuple[list[list[int]], list[list[int]]]:
    reader = Asked()
    strategy = DDPStrategy(process_group_backend="gloo", cluster_environment=PoolEnvironment())
    data = module(Path(tokenizer), None, train_data=f"{folder}/rows.jsonl", val_data=f"{folder}/val.jsonl")
    trainer(strategy=strategy, devices=2, max_steps=7, limit_val_batches=1.0).fit(reader, data)
    return reader.rows["train"], reader.rows["val"]


def test_ranks_share_each_batch(chat_tokenizer: Path, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl")
    write(tmp_path / "val.jsonl", 3)
    reader = Asked()
    one = module(chat_tokenizer, None, train_data=str(tmp_path / "rows.jsonl"), val_data=str(tmp_path / "val.jsonl"))
    trainer(max_steps=7, limit_val_batches=1.0).fit(reader, one)
    ranks = run(rank_reads, 2, str(tmp_path), str(chat_tokenizer), timeout=240)
    for stage, alone in enumerate((reader.rows["train"], reader.rows["val"])):
        assert [a + b for a, b in zip(ranks[0][stage], ranks[1][stage], strict=True)] == alone
    assert reader.rows["val"] == [[0, 1], [2]]
    assert ranks[1][1] == [[1], []]  # nothing is left for it


def test_splits_are_ranges_of_the_rows(chat_tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", 10)
    reader = Asked()
    data = module(chat_tokenizer, path, split="6,2,2")
    trainer(max_epochs=1, limit_val_batches=1.0).fit(reader, data)
    assert sorted(flat(reader.rows["train"])) == [0, 1, 2, 3, 4, 5]
    assert reader.rows["val"] == [[6, 7]]
    trainer().test(reader, module(chat_tokenizer, path, split="6,2,2", test_samples=1))
    assert reader.rows["test"] == [[8]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.jsonl.gz"])
def test_formats_of_files(chat_tokenizer: Path, tmp_path: Path, name: str) -> None:
    rows = [{"question": f"what {k}", "answer": str(k)} for k in range(4)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    path = tmp_path / name
    if name.endswith(".json"):
        path.write_text(json.dumps(rows))
    elif name.endswith(".csv"):
        path.write_text("question,answer\n" + "".join(f"{row['question']},{row['answer']}\n" for row in rows))
    elif name.endswith(".parquet"):
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(gzip.compress(lines.encode()) if name.endswith(".gz") else lines.encode())
    data = module(chat_tokenizer, str(tmp_path), column="question")
    data.setup("fit")
    (batch, _) = data.train_dataloader()
    assert {task.row["answer"] for task in batch.tasks} < {"0", "1", "2", "3"}
    task = batch.tasks[0]
    assert Tokenizer.load(chat_tokenizer).decode(task.prompt) == task.row["question"]
    score = batch.score(0, data.tokenizer.encode(f"it is {task.row['answer']}"), "end")
    assert score == (1.0, {"answer": 1.0})


def limited(data: PromptDataModule, longest: int) -> PromptDataModule:
    data.trainer = trainer(max_steps=4)
    data.trainer.strategy._lightning_module = Reader()
    data.trainer.strategy._lightning_module.config = SimpleNamespace(max_sequence_length=longest)
    return data


def test_prompts_that_are_too_long_are_left_out_with_one_message(
    chat_tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "rows.jsonl", 9, lengths=3)
    lengths = [len(Tokenizer.load(chat_tokenizer).encode(f"what {'is ' * k}0")) for k in range(3)]
    caplog.set_level(logging.WARNING)
    for data in (
        module(chat_tokenizer, path, max_prompt_tokens=lengths[1]),
        limited(module(chat_tokenizer, path), lengths[2]),
        limited(module(chat_tokenizer, path, max_prompt_tokens=999), lengths[2]),
    ):
        caplog.clear()
        data.setup("fit")
        tasks = [task for batch in data.train_dataloader() for task in batch.tasks]
        assert {task.row["answer"] % 3 for task in tasks} == {0, 1}
        (message,) = [record.message for record in caplog.records if "tokens" in record.message]
        assert f"3 of 9 prompts have more than {lengths[2] - 1 if data.trainer else lengths[1]} tokens" in message


def test_prompts_of_which_none_fits_are_an_error(chat_tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"11 of 11 prompts have more than 1 tokens \(max_prompt_tokens\)"):
        module(chat_tokenizer, path, max_prompt_tokens=1).setup("fit")
    with pytest.raises(DataError, match="an answer needs room in the model's max_sequence_length=2"):
        limited(module(chat_tokenizer, path), 2).setup("fit")


def test_a_checkpoint_gets_the_tokenizer_with_the_template_in_use(chat_tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl")
    (tmp_path / "t.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    data = module(chat_tokenizer, path, chat=True, chat_template=str(tmp_path / "t.jinja"))
    saved = Tokenizer.of_files(data.checkpoint_files())
    assert saved.identity == Tokenizer.load(chat_tokenizer).identity
    assert saved.chat_template == (tmp_path / "t.jinja").read_text()
    data.setup("fit")
    batch = next(iter(data.train_dataloader()))
    assert data.tokenizer.decode(batch.tasks[0].prompt) == f"[what {batch.tasks[0].row['answer']}]"


def test_a_row_that_a_reward_cannot_use_is_refused_before_work(chat_tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "what", "answer": 1}\n{"prompt": "what"}\n')
    data = module(chat_tokenizer, str(tmp_path / "rows.jsonl"))
    with pytest.raises(DataError, match=r"rows.jsonl line 2, for the reward 'answer': the row has no 'answer'"):
        data.setup("fit")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "what", "target": 1, "nums": "1"}\n')
    data = module(chat_tokenizer, str(tmp_path / "rows.jsonl"), rewards={"puzzle": Countdown()})
    with pytest.raises(DataError, match="for the reward 'puzzle'"):
        data.setup("fit")


@pytest.mark.parametrize("text", ["[1]\n", "{\n", '"what"\n'])
def test_a_line_that_is_no_row_is_refused(chat_tokenizer: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"rows\.jsonl line 1 is"):
        module(chat_tokenizer, str(tmp_path / "rows.jsonl")).setup("fit")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"data": None}, ConfigurationError, "neither was given"),
        ({"val_data": "x"}, ConfigurationError, "both were given"),
        ({"data": "missing.jsonl"}, DataError, "names no file"),
        ({"split": "a"}, DataError, "split is 'a'"),
        ({"global_batch_size": 0}, DataError, "global_batch_size is 0"),
        ({"max_prompt_tokens": 0}, ConfigurationError, "max_prompt_tokens is 0"),
        ({"train_samples": 0}, DataError, "train_samples is 0"),
        ({"rewards": {}}, ConfigurationError, "rewards is empty"),
        ({"reward_weights": {"x": 1.0}}, ConfigurationError, "reward_weights has 'x'"),
        ({"tokenizer": "missing"}, DataError, "tokenizer 'missing' does not exist"),
        ({"chat_template": "missing"}, DataError, "cannot be read"),
    ],
)
def test_wrong_options_are_refused_at_once(
    chat_tokenizer: Path, tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = write(tmp_path / "rows.jsonl")
    with pytest.raises(error, match=message):
        module(options.pop("tokenizer", chat_tokenizer), **{"data": path, **options})


def test_splits_without_prompts_are_told(
    chat_tokenizer: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="there are no prompts to train on"):
        module(chat_tokenizer, None, val_data=path).setup("fit")
    with pytest.raises(DataError, match="the training split holds no prompts"):
        module(chat_tokenizer, path, split="0,1,0").setup("fit")
    with pytest.raises(DataError, match="the test split holds no prompts"):
        module(chat_tokenizer, path).setup("test")
    module(chat_tokenizer, path).setup("fit")
    assert "the validation split holds no prompts" in caplog.text


def test_replicas_must_divide_the_batch(chat_tokenizer: Path, tmp_path: Path) -> None:
    data = module(chat_tokenizer, write(tmp_path / "rows.jsonl"), global_batch_size=3)
    data.trainer = SimpleNamespace(  # type: ignore[assignment]
        strategy=SimpleNamespace(distributed_sampler_kwargs={"num_replicas": 2, "rank": 0}),
        max_steps=4,
        accumulate_grad_batches=1,
        limit_train_batches=1.0,
    )
    with pytest.raises(LayoutError, match="must be a multiple of their number"):
        data.setup("fit")


def test_puzzles_need_no_files(chat_tokenizer: Path) -> None:
    source = CountdownPuzzles(count=8, text="{numbers} {target}")
    data = module(chat_tokenizer, source, rewards={"countdown": Countdown()})
    data.setup("fit")
    batches = list(data.train_dataloader())
    assert sorted(task.row["target"] for batch in batches for task in batch.tasks) == sorted(
        row["target"] for row in source.rows()
    )
    assert batches[0].score(0, data.tokenizer.encode("<answer>1</answer>"), "end").total == 0.1
    assert batches[0].ends == (data.tokenizer.eod_id,)


RUN = """
model:
  class_path: GRPOModule
  init_args:
    config: {num_layers: 1, hidden_size: 16, num_heads: 2, vocab_size: 280, max_sequence_length: 48}
    optimizer: {lr: 1.0e-2}
    rollouts: {max_new_tokens: 4, group_size: 3}
trainer: {accelerator: cpu, devices: 1, max_steps: 2, logger: false, enable_checkpointing: false}
data:
  class_path: PromptDataModule
  init_args:
    tokenizer: TOKENIZER
    global_batch_size: 2
    rewards:
      answer: {class_path: megalight.rl.rewards.FinalAnswer, init_args: {column: target, extractors: [tags]}}
      mine: tests.rl.test_data.judge
      some:
        class_path: megalight.rl.rewards.RowFilter
        init_args: {column: target, equals: 7, reward: {class_path: megalight.rl.countdown.Countdown}}
    reward_weights: {mine: 0.5}
    split: "8,1,0"
    data:
      class_path: megalight.rl.countdown.CountdownPuzzles
      init_args: {count: 9, text: "{numbers} {target}"}
"""


def test_a_configuration_names_rewards_and_sources(chat_tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace("TOKENIZER", str(chat_tokenizer)))
    validator = jsonschema.Draft202012Validator(Schema().build())
    assert not list(validator.iter_errors(yaml.safe_load(path.read_text())))
    cli = parsed(["fit", "-c", str(path)])
    data = cli.datamodule
    assert isinstance(data, PromptDataModule)
    assert isinstance(cli.model, GRPOModule)
    assert data.environment.weights == {"answer": 1.0, "mine": 0.5, "some": 1.0}
    some = data.environment.rewards["some"]
    assert isinstance(some, RowFilter)
    assert isinstance(some.reward, Countdown)
    assert data.environment.rewards["mine"] is judge
    assert isinstance(data.data, CountdownPuzzles)


def test_misspelled_arguments_of_rewards_are_told(
    chat_tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.yaml"
    for right, wrong in (("column:", "colum:"), ("rewards.FinalAnswer", "rewards.FinalAnswers"), (".judge", ".judg")):
        path.write_text(RUN.replace("TOKENIZER", str(chat_tokenizer)).replace(right, wrong))
        with pytest.raises(SystemExit):
            parsed(["fit", "-c", str(path)])
        assert wrong.strip(":") in capsys.readouterr().err


class Policy(GRPOModule):
    """Writes down the answers it drew."""

    drawn: list[list[list[int]]]

    def on_answers(self, prompts: PromptBatch, groups: Any) -> None:
        self.drawn.append([answer.completion.tokens for group in groups for answer in group])


def test_a_policy_draws_after_a_resume_what_it_would_have_drawn(chat_tokenizer: Path, tmp_path: Path) -> None:
    config = GPTConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=280, max_sequence_length=48)

    def fit(checkpoint: Path | None = None, **options: Any) -> Policy:
        policy = Policy(config, AdamConfig(lr=1e-2), rollouts=Rollouts(max_new_tokens=4, group_size=3))
        policy.drawn = []
        data = module(chat_tokenizer, write(tmp_path / "rows.jsonl"), rewards={"digits": digits})
        trainer(max_steps=4, strategy=MegatronStrategy(), **options).fit(policy, data, ckpt_path=checkpoint)
        return policy

    whole = fit(callbacks=[every_step(tmp_path / "saved")])
    second = sorted((tmp_path / "saved").iterdir())[1]
    rest = fit(second)
    assert len(whole.drawn) == 4
    assert rest.drawn == whole.drawn[2:]
    assert Tokenizer.load(second / "files").identity == Tokenizer.load(chat_tokenizer).identity


def digits(answer: Answer, row: Mapping[str, Any]) -> float:
    return float(sum(letter.isdigit() for letter in answer.text))
