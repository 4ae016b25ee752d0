"""Streamed data sets: the order does not depend on ranks and workers, and every position resumes exactly."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import lightning.pytorch as pl
import numpy as np
import pytest
import torch

from megalight.data.chat.dataset import PackOptions
from megalight.data.gpt.dataset import GPTSample, SampleOptions
from megalight.data.streaming.module import StreamingDataModule, StreamingSFTDataModule, StreamLoader
from megalight.data.streaming.streams import (
    ChatStream,
    StreamOrder,
    StreamReader,
    StreamStates,
    TextStream,
)
from megalight.data.tokenizer import Tokenizer
from megalight.errors import ConfigurationError, DataError
from megalight.strategies import MegatronStrategy
from tests.support.environment import trainer
from tests.support.hub import Hub, read_from, serving
from tests.support.workers import run

SHARDS = [[{"n": 100 * shard + row} for row in range(9 + shard)] for shard in range(4)]
S = 6


class Memory:
    """Rows in memory, as ``datasets.IterableDataset`` gives them."""

    def __init__(self, shards: Sequence[Sequence[Any]]) -> None:
        self.shards, self.at = shards, (0, 0)

    @property
    def num_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> Self:
        size = len(self.shards) // num_shards
        return type(self)(self.shards[index * size : (index + 1) * size])

    def __iter__(self) -> Iterator[Any]:
        first, begin = self.at
        for shard in range(first, len(self.shards)):
            for row in range(begin if shard == first else 0, len(self.shards[shard])):
                self.at = shard, row + 1
                yield self.shards[shard][row]

    def state_dict(self) -> dict[str, Any]:
        return {"at": list(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = tuple(state["at"])


def encode(row: Any) -> tuple[np.ndarray, np.ndarray]:
    """A document of 1 to 11 tokens, all of them the number of the row."""
    ids = np.full(1 + row["n"] * 7 % 11, row["n"] + 1)
    return ids, np.ones(len(ids), np.uint8)


def text(cursor: Any, start: int) -> TextStream:
    return TextStream(cursor, encode, "memory", "raise", start, options=SampleOptions(sequence_length=S))


def chat(cursor: Any, start: int) -> ChatStream:
    return ChatStream(cursor, encode, "memory", "raise", start, options=PackOptions(sequence_length=S))


def order(streams: int = 8, window: int = 4, shards: Sequence[Any] = SHARDS) -> StreamOrder:
    return StreamOrder(Memory(shards), "memory", streams, window, 7)


def rows(samples: Sequence[GPTSample]) -> list[Any]:
    return [(each.tokens.tolist(), each.labels.tolist(), each.loss_mask.tolist()) for each in samples]


def batches(
    make: Any, count: int, replicas: int, parts: int, states: StreamStates | None = None, **more: Any
) -> tuple[list[Any], list[StreamStates]]:
    """Read global batches by readers of ``streams / replicas / parts`` streams each, as ranks and workers do."""
    plan = order(**more)
    readers = []
    for share in np.array_split(np.arange(plan.streams), replicas):
        for streams in np.array_split(share, parts):
            own = range(int(streams[0]), int(streams[-1]) + 1)
            readers.append(iter(StreamReader(plan, make, own, count, states)))
    found, held = [], []
    for _ in range(count):
        given = [next(reader) for reader in readers]
        found.append([row for samples, _ in given for row in rows(samples)])
        whole = StreamStates.merged(states for _, states in given)
        # As a checkpoint holds them.
        held.append(StreamStates.from_dict(json.loads(json.dumps(whole.to_dict()))))
    return found, held


@pytest.mark.parametrize("make", [text, chat])
@pytest.mark.parametrize("window", [1, 4, 1000])
def test_batches_do_not_depend_on_ranks_and_workers_and_resume_everywhere(make: Any, window: int) -> None:
    expected, states = batches(make, 24, 1, 1, window=window)
    # Past the end of the data, which has 42 rows, and in another order.
    assert len({str(batch) for batch in expected}) == 24
    for replicas, parts in ((2, 1), (4, 2), (1, 3)):
        found, _ = batches(make, 24, replicas, parts, window=window)
        assert found == expected
    for done in range(1, 24):
        replicas, parts = ((1, 1), (2, 2), (8, 1))[done % 3]
        resumed, later = batches(make, 24 - done, replicas, parts, states[done - 1], window=window)
        assert resumed == expected[done:]
        assert later[-1] == states[-1]


def test_a_stream_reads_each_of_its_rows_once_in_a_pass() -> None:
    plan = order(streams=4, window=4)
    for stream in range(4):
        group, _ = plan.group_of(stream)
        reader = StreamReader(plan, text, range(stream, stream + 1), 60, passes=1)
        seen = [int(token) - 1 for samples, _ in reader for token in samples[0].tokens if token]
        wanted = {row["n"] for shard in Memory(SHARDS).shard(plan.groups, group).shards for row in shard}
        # One stream for each group, so that it reads the whole group.
        assert {*seen} == wanted


def test_samples_are_the_documents_end_to_end() -> None:
    plan = order(streams=1, window=1)
    documents = np.concatenate([encode(row)[0] for shard in SHARDS for row in shard])
    reader = StreamReader(plan, text, range(1), len(documents) // S, passes=1)
    for number, (samples, _) in enumerate(reader):
        part = documents[number * S : number * S + S + 1]
        assert samples[0].tokens.tolist()[: len(part) - 1] == part[:-1].tolist()
        assert samples[0].labels.tolist()[: len(part) - 1] == part[1:].tolist()


def test_behind_the_last_pass_samples_have_no_loss() -> None:
    reader = StreamReader(order(streams=1, window=1, shards=[[{"n": 3}]]), text, range(1), 4, passes=1)
    losses = [samples[0].loss_mask.sum() for samples, _ in reader]
    assert losses[0] > 0
    assert losses[-1] == 0


def test_too_few_rows_are_refused() -> None:
    for shards in ([[{"n": 1}]], [[]]):
        with pytest.raises(DataError, match=r"too few rows|has no rows"):
            list(StreamReader(order(streams=2, window=4, shards=shards), text, range(2), 30))


def test_workers_give_what_one_process_gives() -> None:
    def read(workers: int) -> list[Any]:
        def reader(count: int, states: StreamStates | None) -> StreamReader:
            return StreamReader(order(), text, range(8), count, states)

        loader = StreamLoader(reader, 5, lambda: (0, None), lambda samples: rows(samples), workers, 3)  # type: ignore[arg-type]
        found = list(loader)
        assert [*loader.states] == [3, 4, 5]
        return found

    assert read(2) == read(0)


# The data modules, from a server


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    datasets = pytest.importorskip("datasets")
    with serving() as server:
        monkeypatch.chdir(tmp_path)
        read_from(server, tmp_path, monkeypatch)
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        Tokenizer.train(["document 0123456789 user assistant said hello"], 262).save("tokenizer")
        yield server


def lines(values: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def publish(hub: Hub) -> str:
    """Publish a data set of two shards, and return its commit."""
    shards = [[{"text": f"document {number} " * (number % 3 + 1)} for number in range(a, a + 20)] for a in (0, 20)]
    files = {f"data/train-{number}.jsonl": lines(shard) for number, shard in enumerate(shards)}
    repository = hub.add("tiny/text", files | {"data/validation-0.jsonl": lines(shards[0][:3])}, kind="datasets")
    return repository.revisions["main"]


def module(**more: Any) -> StreamingDataModule:
    options = {"dataset": "tiny/text", "tokenizer": "tokenizer", "global_batch_size": 4, "sequence_length": 8}
    return StreamingDataModule(**options | {"shuffle_window": 8} | more)


def attach(data: Any, step: int = 0, rank: int = 0, replicas: int = 1, max_steps: int = 12) -> Any:
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": replicas, "rank": rank})
    data.trainer = SimpleNamespace(
        global_step=step, accumulate_grad_batches=1, max_steps=max_steps, strategy=strategy, callbacks=[]
    )
    data.setup("fit")
    return data


def test_a_data_set_of_the_hub_resumes_with_its_commit_on_other_ranks(hub: Hub) -> None:
    commit = publish(hub)
    data = attach(module(val_split="validation", val_samples=4))
    expected, saved = [], {}
    for number, batch in enumerate(data.train_dataloader(), 1):
        expected.append(batch.tokens)
        data.trainer.global_step = number
        if number == 5:
            saved = json.loads(json.dumps(data.state_dict()))
    assert saved["batches"] == 5
    assert saved["commit"] == commit
    (validation,) = data.val_dataloader()
    assert validation.loss_mask.sum() > 0
    hub.add("tiny/text", {"data/train-0.jsonl": lines([{"text": "other"}])}, kind="datasets")
    ranks = []
    for rank in range(2):
        resumed = module()
        resumed.trainer = None
        attach(resumed, 5, rank, 2).load_state_dict(saved)
        ranks.append([batch.tokens for batch in resumed.train_dataloader()])
    assert torch.equal(torch.stack([torch.cat(pair) for pair in zip(*ranks, strict=True)]), torch.stack(expected[5:]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch_size": 8}, r"global_batch_size is 8; the checkpoint was written with 4"),
        ({"seed": 1}, r"seed is 1; the checkpoint was written with 1234"),
        ({"shuffle_window": 9}, r"shuffle_window is 9; the checkpoint was written with 8"),
        ({"dataset": "tiny/text@old"}, r"dataset is 'tiny/text@old'; the checkpoint has read the commit"),
    ],
)
def test_what_would_change_the_samples_is_refused(hub: Hub, change: dict[str, Any], message: str) -> None:
    hub.add("tiny/text", {"data/train-0.jsonl": lines([{"text": "old"}] * 40)}, "old", kind="datasets")
    publish(hub)
    data = attach(module())
    next(iter(data.train_dataloader()))
    data.trainer.global_step = 1
    with pytest.raises(ConfigurationError, match=message):
        attach(module(**change)).load_state_dict(data.state_dict())


def test_conversations_are_streamed(hub: Hub) -> None:
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "said"}]
    bad = [{"messages": said[:1]}]
    rows = [{"messages": said}] * 6
    hub.add("tiny/chat", {"data/train-0.jsonl": lines(rows + bad + rows)}, kind="datasets")
    tokenizer = Tokenizer.load("tokenizer")
    answer = "{% if add_generation_prompt %}assistant {% endif %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content }}<|endoftext|>{% endfor %}" + answer
    tokenizer.save("chat")
    options = {"dataset": "tiny/chat", "tokenizer": "chat", "global_batch_size": 2, "sequence_length": 64}
    data = attach(StreamingSFTDataModule(**options, on_bad="skip"), max_steps=3)
    for batch in data.train_dataloader():
        learned = [
            tokenizer.decode(row[mask.bool()].tolist()) for row, mask in zip(batch.labels, batch.loss_mask, strict=True)
        ]
        words = [each.replace("<|endoftext|>", "").replace(" ", "") for each in learned]
        assert all(each and each == "said" * (len(each) // 4) for each in words), words
    data = attach(StreamingSFTDataModule(**options), max_steps=20)
    with pytest.raises(DataError, match=r"tiny/chat, row \d+: the conversation has no token of the assistant"):
        list(data.train_dataloader())


def test_bad_names_and_columns_are_told(hub: Hub) -> None:
    publish(hub)
    with pytest.raises(DataError, match=r"data set 'tiny/text' .*split 'nope'\) cannot be read"):
        module(train_split="nope")
    with pytest.raises(DataError, match=r"data set 'nowhere' .*cannot be read"):
        module(dataset="nowhere")
    with pytest.raises(DataError, match=r"there is no column 'txt', only 'text'.*Did you mean 'text'"):
        next(iter(attach(module(text_key="txt")).train_dataloader()))
    with pytest.raises(ConfigurationError, match=r"give both"):
        module(val_split="validation")
    with pytest.raises(ConfigurationError, match=r"max_steps is -1"):
        attach(module(), max_steps=-1)


class Recorder(pl.LightningModule):
    """Records the batches that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.seen.append(getattr(batch, "tokens", batch))
        return self.weight * 0

    def validation_step(self, batch: Any, index: int) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_a_run_of_lightning_resumes_exactly(hub: Hub, tmp_path: Path) -> None:
    publish(hub)

    def fit(steps: int, resume: str | None = None, **more: Any) -> list[torch.Tensor]:
        model = Recorder()
        trainer = pl.Trainer(
            max_steps=steps,
            accumulate_grad_batches=2,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
        )
        trainer.fit(model, module(**more), ckpt_path=resume)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return model.seen

    whole = fit(6)
    begun = fit(3)
    rest = fit(6, str(tmp_path / "3.ckpt"), num_workers=2)
    assert len(whole) == 12
    assert torch.equal(torch.stack(whole), torch.stack(begun + rest))


class Held(StreamingDataModule):
    """Streams documents that are in memory. Batches are their tokens, which any module takes."""

    collate = staticmethod(lambda samples: torch.from_numpy(np.stack([sample.tokens for sample in samples])))

    def _open(self, split: str) -> Any:
        texts = [f"document {number} " * (number % 3 + 1) for number in range(80)]
        return Memory([[{"text": text} for text in part] for part in (texts[:40], texts[40:])])


def _fit(folder: str, steps: int, resume: str | None) -> list[list[list[int]]]:
    """Fit on as many data-parallel ranks as there are processes; return the tokens of this rank's batches."""
    sizes = {"global_batch_size": 4, "sequence_length": 8, "shuffle_window": 8}
    data = Held(dataset=folder, tokenizer=f"{folder}/tokenizer", **sizes)
    runner, model = trainer(MegatronStrategy(), max_steps=steps, limit_val_batches=0), Recorder()
    runner.fit(model, data, ckpt_path=resume)
    runner.save_checkpoint(f"{folder}/{steps}.ckpt")
    return [batch.tolist() for batch in model.seen]


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_a_run_on_two_ranks_goes_on_on_one(tmp_path: Path) -> None:
    Tokenizer.train(["document 0123456789"], 262).save(tmp_path / "tokenizer")
    begun = run(_fit, 2, str(tmp_path), 3, None)
    (rest,) = run(_fit, 1, str(tmp_path), 6, str(tmp_path / "3.ckpt"))
    (whole,) = run(_fit, 1, str(tmp_path), 6, None)
    assert [one + other for one, other in zip(*begun, strict=True)] + rest == whole
