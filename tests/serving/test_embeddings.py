"""Embeddings: as the encoder's own code gives them for one text, from Python and over HTTP."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalight.cli.main import main
from megalight.errors import CheckpointError, ConfigurationError, DataError
from megalight.models.bert import Bert, BertConfig
from megalight.models.stored import held_model, save_model
from megalight.nn.init import initialize
from megalight.serving import LLM
from megalight.serving.embeddings import EmbeddingModel, has_embeddings
from megalight.serving.encoder_client import AsyncEncoder
from megalight.serving.server import Limits, app_of
from megalight.types import PackedSequences

transformers = pytest.importorskip("transformers")
httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "sees", "a", "dog", "at", "night", "river"]
TEXTS = ["the fox sees a dog", "night", "a river at night", ""]
MODULES = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("encoder") / "bert"
    path.mkdir()
    transformers.BertTokenizerFast(vocab={word: place for place, word in enumerate(WORDS)}).save_pretrained(path)
    config = transformers.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=12, initializer_range=0.5,
    )  # fmt: skip
    torch.manual_seed(1)
    transformers.BertForMaskedLM(config).double().save_pretrained(path)
    return path


def with_modules(bert: Path, path: Path, pooling: dict[str, Any], modules: list[tuple[str, str]] = MODULES) -> Path:
    """A folder of sentence-transformers."""
    for file in bert.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    listed = [
        {"idx": place, "name": str(place), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for place, (kind, folder) in enumerate(modules)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


def hidden_of(folder: Path, text: str) -> Tensor:
    net = transformers.AutoModel.from_pretrained(folder, dtype=torch.float64)
    with torch.no_grad():
        found: Tensor = net(**transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt"))[0][0]
    return found


def stacked(llm: LLM, texts: Any = TEXTS, **options: Any) -> Tensor:
    return torch.stack([each.embedding for each in llm.embed(texts, **options)])


def test_an_encoder_of_transformers_gives_the_mean_of_each_text(bert: Path) -> None:
    llm = LLM(bert, device="cpu")
    expected = torch.stack([hidden_of(bert, text).mean(0) for text in TEXTS]).float()
    torch.testing.assert_close(stacked(llm), expected, atol=1e-6, rtol=1e-6)
    assert [each.prompt_tokens for each in llm.embed(TEXTS)] == [7, 3, 6, 2]
    # Ids stay as they are, and one text is a list of one.
    torch.testing.assert_close(stacked(llm, [[2, 5, 6, 3], [2, 11, 3]])[1], expected[1], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(stacked(llm, "night"), expected[1:2], atol=1e-6, rtol=1e-6)
    cut = stacked(llm, dimensions=5)
    torch.testing.assert_close(cut, torch.nn.functional.normalize(expected[:, :5], dim=1), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("pooling", "reduced"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, lambda hidden: hidden[0]),
        ({"pooling_mode": "lasttoken"}, lambda hidden: hidden[-1]),
        (
            {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True},
            lambda hidden: torch.cat([hidden.amax(0), hidden.mean(0)]),
        ),
    ],
    ids=["cls", "last", "two"],
)
def test_what_follows_the_encoder_is_read(
    bert: Path, tmp_path: Path, pooling: dict[str, Any], reduced: Callable[[Tensor], Tensor]
) -> None:
    folder = with_modules(bert, tmp_path, {"word_embedding_dimension": 16, **pooling})
    (folder / "config_sentence_transformers.json").write_text(
        json.dumps({"prompts": {"query": "the "}, "default_prompt_name": "query"})
    )
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8}))
    llm = LLM(folder, device="cpu")
    expected = torch.stack([reduced(hidden_of(bert, f"the {text}")) for text in TEXTS]).float()
    torch.testing.assert_close(stacked(llm), torch.nn.functional.normalize(expected, dim=1), atol=1e-6, rtol=1e-6)
    with pytest.raises(DataError, match="at most 8"):
        llm.embed([[5] * 9])


def test_a_module_that_is_not_supported_is_named(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(CheckpointError, match="module Dense"):
        EmbeddingModel(with_modules(bert, tmp_path / "a", {"pooling_mode": "cls"}, [*MODULES, ("Dense", "3_Dense")]))
    with pytest.raises(CheckpointError, match="weightedmean"):
        EmbeddingModel(with_modules(bert, tmp_path / "b", {"pooling_mode_weightedmean_tokens": True}))


def test_roberta_counts_positions_from_its_padding(bert: Path, tmp_path: Path) -> None:
    config = transformers.RobertaConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20,
        max_position_embeddings=10, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(2)
    transformers.RobertaModel(config).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((bert / name).read_bytes())
    model = EmbeddingModel(tmp_path, device="cpu")
    assert model.max_sequence_length == 9
    expected = torch.stack([hidden_of(tmp_path, text).mean(0) for text in TEXTS[:2]]).float()
    found = torch.stack([each.embedding for each in model.embed([model.ids_of(text) for text in TEXTS[:2]])])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_bert_of_ours_gives_the_mean(bert: Path, tmp_path: Path) -> None:
    config = BertConfig(
        num_layers=1, hidden_size=16, num_heads=2, ffn_hidden_size=20, vocab_size=len(WORDS), max_sequence_length=12
    )
    model = Bert(config).double()
    initialize(model, 1, "model.")
    files = {"tokenizer.json": (bert / "tokenizer.json").read_bytes()}
    save_model(replace(held_model("bert", config, model), files=files), tmp_path / "ours")
    found = stacked(LLM(tmp_path / "ours", device="cpu"))
    model.head = None
    for text, embedding in zip(TEXTS, found, strict=True):
        ids = torch.tensor([2, *(WORDS.index(word) for word in text.split()), 3])
        hidden = model(ids, PackedSequences.of_lengths([len(ids)])).hidden
        torch.testing.assert_close(embedding, hidden.mean(0).float().detach(), atol=1e-6, rtol=1e-6)


def test_models_without_one_refuse_by_name(bert: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (has_embeddings(bert), has_embeddings(folder)) == (True, False)
    with pytest.raises(ConfigurationError, match="'model' generates text"):
        LLM(folder, device="cpu").embed("a")
    llm = LLM(bert, device="cpu")
    for call in (llm.generate, llm.chat):
        with pytest.raises(ConfigurationError, match="'bert' is an encoder"):
            call("a")  # type: ignore[operator]
    assert main(["serve", str(bert), "--replicas", "2", "--device", "cpu"]) == 2
    assert "is an encoder" in capsys.readouterr().err


def test_the_client_of_openai_gets_what_python_gets(bert: Path) -> None:
    expected = stacked(LLM(bert, device="cpu"), TEXTS[:3])

    async def test(http: Any) -> None:
        client = openai.AsyncOpenAI(api_key="x", base_url="http://server/v1", http_client=http, max_retries=0)
        for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = await client.embeddings.create(model="bert", input=TEXTS[:3], **options)
            found = [each.embedding for each in answer.data]
            if options.get("encoding_format") == "base64":
                found = [
                    torch.frombuffer(bytearray(base64.b64decode(each)), dtype=torch.float32).tolist() for each in found
                ]
            torch.testing.assert_close(torch.tensor(found), expected, atol=1e-6, rtol=1e-6)
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (16, 16, "bert")
            assert [each.index for each in answer.data] == [0, 1, 2]
        ids: list[Any] = [[2, 11, 3], [[2, 11, 3]], "night"]
        for each in ids:
            answer = await client.embeddings.create(model="bert", input=each, dimensions=4)
            row = torch.nn.functional.normalize(expected[1, :4], dim=0)
            torch.testing.assert_close(torch.tensor(answer.data[0].embedding), row, atol=1e-5, rtol=1e-5)
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"input": []}, "input"),
            ({"input": [[]]}, "input"),
            ({"input": [99]}, "input"),
            ({"input": [-1]}, "input"),
            ({"input": "night " * 20}, "input"),
            ({"input": ["a"] * 2049}, "input"),
            ({"input": "a", "dimensions": 17}, "dimensions"),
            ({"input": "a", "dimensions": 0}, "dimensions"),
            ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
            ({"input": "a", "model": "other"}, "model"),
        ]
        for values, field in wrong:
            answer = await http.post("/v1/embeddings", content=json.dumps({"model": "bert", **values}))
            assert (answer.status_code, answer.json()["error"]["param"]) == (404 if field == "model" else 400, field)
        answer = await http.post("/v1/embeddings", content=json.dumps({"model": "bert", "input": "a\ud800"}))
        assert answer.status_code == 400
        for path in ("/v1/completions", "/v1/chat/completions"):
            answer = await http.post(path, content=json.dumps({"model": "bert", "prompt": "a"}))
            assert answer.status_code == 404
            assert "'bert' is an encoder" in answer.json()["error"]["message"]
        assert (await http.post("/tokenize", content=json.dumps({"prompt": "the fox"}))).json()["tokens"]
        assert (await http.get("/ready")).status_code == (await http.get("/metrics")).status_code == 200
        keys = {"Authorization": "Bearer control"}
        assert (await http.post("/pause", headers=keys)).json() == {"state": "paused"}
        waits = asyncio.create_task(client.embeddings.create(model="bert", input="night"))
        await asyncio.sleep(0.1)
        assert not waits.done()
        assert (await http.post("/resume", headers=keys)).json() == {"state": "running"}
        assert (await waits).usage.prompt_tokens == 3
        assert (await http.post("/weights", headers=keys, content=b'{"path": "x"}')).status_code == 400

    serve(bert, test)


def serve(folder: Path, test: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        llm = AsyncEncoder(EmbeddingModel(folder, device="cpu"))
        app = app_of(llm, folder.name, control_keys=["control"], limits=Limits())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
            await asyncio.wait_for(test(http), 60)
        await llm.shutdown()

    asyncio.run(main())
