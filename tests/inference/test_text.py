"""Text from a checkpoint's folder alone."""

import pytest
import tokenizers
import torch

from megalight import checkpoint
from megalight.data.tokenizer import Tokenizer
from megalight.errors import CheckpointError, DataError, MegalightError
from megalight.inference import TextGenerator, generate, load_model
from megalight.models.gpt import GPT, GPTConfig, InitConfig
from megalight.models.stored import open_model, save_model
from megalight.nn.canonical import canonical_tensors
from megalight.nn.init import initialize

TEXT = "the quick brown fox jumps over the lazy dog. " * 3


def build(**more) -> GPT:
    config = GPTConfig(
        **{"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 264, "max_sequence_length": 64} | more,
        num_kv_heads=1,
        init=InitConfig(std=0.3),
    )
    model = GPT(config).to(torch.bfloat16)
    initialize(model, 5)
    return model


def save(folder, model: GPT, **more) -> None:
    views = {
        f"model.{name}": checkpoint.View(f"model.{name}", t.shape, [checkpoint.Box((0,) * t.ndim, t)])
        for name, t in canonical_tensors(model).items()
    }
    other = torch.zeros(3)
    views["optimizer.step"] = checkpoint.View("optimizer.step", (3,), [checkpoint.Box((0,), other)])
    common = {"model": {"family": "gpt", "config": model.config.to_dict()}}
    checkpoint.save(folder, views, **{"common": common, **more})


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory):
    folder = Tokenizer.train([TEXT], 264).save(tmp_path_factory.mktemp("tokenizer"))
    return {file.name: file for file in folder.iterdir()}


@pytest.mark.parametrize("tied", [False, True])
def test_the_model_comes_back(tmp_path, tied):
    model = build(tie_embeddings=tied)
    save(tmp_path / "c", model)
    found = load_model(tmp_path / "c")
    assert not found.training
    assert found.config == model.config
    assert (found.head.output_layer.weight is found.embed.word.weight) == tied
    expected = dict(model.named_parameters())
    for name, parameter in found.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, expected[name]), name
    assert load_model(tmp_path / "c", dtype=torch.float64).embed.word.weight.dtype == torch.float64


def test_prompts_are_completed(tmp_path, tokenizer_files):
    model = build()
    save(tmp_path / "c", model, files=tokenizer_files)
    writer = TextGenerator.from_checkpoint(tmp_path / "c", dtype=torch.float64)
    prompts = ["the quick", "a", ""]
    texts = writer.complete(prompts, max_new_tokens=5, temperature=0)
    tokenizer = writer.tokenizer
    ids = [tokenizer.encode("the quick"), tokenizer.encode("a"), [tokenizer.eod_id]]
    expected = generate(model.double().eval(), ids, max_new_tokens=5, temperature=0, eos_id=tokenizer.eod_id)
    assert texts == [tokenizer.decode(row, skip_special=True) for row in expected]
    assert writer.complete(prompts, max_new_tokens=9, seed=1) == writer.complete(prompts, max_new_tokens=9, seed=1)
    assert writer.complete(prompts, max_new_tokens=9, seed=1) != writer.complete(prompts, max_new_tokens=9, seed=2)


def test_without_a_limit_a_completion_ends_with_the_models_longest_sequence(tmp_path, tokenizer_files):
    model = build()
    save(tmp_path / "c", model, files=tokenizer_files)
    writer = TextGenerator.from_checkpoint(tmp_path / "c")
    longest = model.config.max_sequence_length
    assert longest < 128
    prompt = "o" * (longest - 3)
    room = longest - len(writer.tokenizer.encode(prompt))
    assert 0 < room < longest
    found = writer.complete([prompt], temperature=0)
    assert found == writer.complete([prompt], temperature=0, max_new_tokens=room)
    with pytest.raises(DataError, match="exceed max_sequence_length"):
        writer.complete([prompt], max_new_tokens=room + 1)
    with pytest.raises(DataError, match=f"prompt of {4 * longest} tokens and 1 new ones exceed"):
        writer.complete(["\x01\x02" * 2 * longest])


def test_further_tokens_end_a_completion(tmp_path, tokenizer_files):
    save(tmp_path / "c", build(), files=tokenizer_files)
    writer = TextGenerator.from_checkpoint(tmp_path / "c", dtype=torch.float64)
    ids = [writer.tokenizer.encode("the quick")]
    (whole,) = generate(writer.model, ids, max_new_tokens=5, temperature=0)
    (short,) = generate(writer.model, ids, max_new_tokens=5, temperature=0, eos_id=(whole[2], 263))
    assert short == whole[: whole.index(whole[2]) + 1]
    text = writer.complete(["the quick"], max_new_tokens=5, temperature=0, ends=[whole[2]])
    assert text == [writer.tokenizer.decode(short, skip_special=True)]


@pytest.mark.parametrize("folder", [False, True])
def test_settings_for_generation_say_what_ends_a_text(tmp_path, tokenizer_files, folder):
    """As transformers reads them: an instruction-tuned Llama 3 has three ends, and its tokenizer names one."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=264, initializer_range=0.3, **sizes))
    model.generation_config.eos_token_id = None
    ids = torch.tensor([Tokenizer.load(tokenizer_files["tokenizer.json"]).encode("the quick")])
    free = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    model.generation_config.eos_token_id = [0, free[2]]
    model.save_pretrained(tmp_path / "llama")
    for name, file in tokenizer_files.items():
        (tmp_path / "llama" / name).write_bytes(file.read_bytes())
    path = tmp_path / "llama"
    if not folder:
        save_model(open_model(path), path := tmp_path / "c")
    writer = TextGenerator.from_checkpoint(path)
    ended = free[: free.index(free[2]) + 1]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :].tolist()
    assert ended == expected != free
    text = writer.tokenizer.decode(ended, skip_special=True)
    assert writer.complete(["the quick"], max_new_tokens=6, temperature=0) == [text]
    # Ids of another tokenizer mean something else.
    other = TextGenerator.from_checkpoint(path, tokenizer=tokenizer_files["tokenizer.json"])
    text = writer.tokenizer.decode(free, skip_special=True)
    assert other.complete(["the quick"], max_new_tokens=6, temperature=0) == [text]


def test_prompts_begin_as_in_transformers(tmp_path, tokenizer_files):
    """A folder's tokenizer may put a token before each text. Data of ours have none, so checkpoints do without."""
    transformers = pytest.importorskip("transformers")
    inner = tokenizers.Tokenizer.from_file(str(tokenizer_files["tokenizer.json"]))
    inner.post_processor = tokenizers.processors.TemplateProcessing("<|pad|> $A", None, [("<|pad|>", 1)])
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(1)
    config = transformers.LlamaConfig(vocab_size=264, initializer_range=0.3, eos_token_id=None, **sizes)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "llama")
    inner.save(str(tmp_path / "llama" / "tokenizer.json"))
    writer = TextGenerator.from_checkpoint(tmp_path / "llama")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "llama"))
    rows = [theirs(text, return_tensors="pt").input_ids for text in ("the quick", "")]
    expected = [model.generate(row, max_new_tokens=6, do_sample=False)[0, row.shape[1] :].tolist() for row in rows]
    texts = [writer.tokenizer.decode(row, skip_special=True) for row in expected]
    assert writer.complete(["the quick", ""], max_new_tokens=6, temperature=0) == texts
    # As a chat template writes it.
    assert writer.complete(["<|pad|>the quick"], max_new_tokens=6, temperature=0) == texts[:1]
    save_model(open_model(tmp_path / "llama"), tmp_path / "c")
    (plain,) = generate(writer.model, [writer.tokenizer.encode("the quick")], max_new_tokens=6, temperature=0)
    text = writer.tokenizer.decode(plain, skip_special=True)
    assert text != texts[0]
    ours = TextGenerator.from_checkpoint(tmp_path / "c")
    assert ours.complete(["the quick"], max_new_tokens=6, temperature=0) == [text]


def test_a_completion_goes_on_where_the_prompt_ends(tmp_path):
    """A tokenizer like that of Llama 2 drops the space before the first word of what it decodes."""
    words = ["<unk>", "\u2581the", "\u2581dog", *(f"\u2581word{index}" for index in range(261))]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>"))
    inner.normalizer = tokenizers.normalizers.Prepend(" ")
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="never")
    inner.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    writer = TextGenerator(build().double().eval(), Tokenizer(inner))
    (row,) = generate(writer.model, [writer.tokenizer.encode("the dog")], max_new_tokens=3, temperature=0)
    (text,) = writer.complete(["the dog"], max_new_tokens=3, temperature=0)
    assert text == "".join(words[token].replace("\u2581", " ") for token in row)


def test_what_cannot_be_completed_is_said(tmp_path, tokenizer_files):
    save(tmp_path / "bare", build())
    with pytest.raises(CheckpointError, match=r"bare holds no tokenizer. Name the one .*--tokenizer"):
        TextGenerator.from_checkpoint(tmp_path / "bare")
    TextGenerator.from_checkpoint(tmp_path / "bare", tokenizer=tokenizer_files["tokenizer.json"])
    save(tmp_path / "small", build(vocab_size=263), files=tokenizer_files)
    with pytest.raises(DataError, match="264 tokens and the model 263"):
        TextGenerator.from_checkpoint(tmp_path / "small")
    save(tmp_path / "other", build(), common={})
    with pytest.raises(CheckpointError, match="does not say which model"):
        load_model(tmp_path / "other")
    save(tmp_path / "strange", build(), common={"model": {"family": "rnn", "config": {}}})
    with pytest.raises(MegalightError, match="unknown model family 'rnn'; known: bert, eagle, gpt"):
        load_model(tmp_path / "strange")
    save(tmp_path / "silent", build(), common={"model": {"family": "bert", "config": {}}})
    with pytest.raises(CheckpointError, match="holds a bert model, which does not generate text"):
        load_model(tmp_path / "silent")


def test_a_folder_of_transformers_is_enough(tmp_path, tokenizer_files):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=264, initializer_range=0.3, **sizes))
    model.save_pretrained(tmp_path / "llama")
    with pytest.raises(DataError, match=r"llama holds no tokenizer. Copy .* name a tokenizer"):
        TextGenerator.from_checkpoint(tmp_path / "llama")
    for name, file in tokenizer_files.items():
        (tmp_path / "llama" / name).write_bytes(file.read_bytes())
    writer = TextGenerator.from_checkpoint(tmp_path / "llama")
    ids = torch.tensor([writer.tokenizer.encode("the quick")])
    expected = model.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=writer.tokenizer.eod_id)
    text = writer.tokenizer.decode(expected[0, ids.shape[1] :].tolist(), skip_special=True)
    assert writer.complete(["the quick"], max_new_tokens=6, temperature=0) == [text]
    bert = transformers.BertConfig(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=8)
    transformers.BertForMaskedLM(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(CheckpointError, match="holds a bert model, which does not generate text"):
        load_model(tmp_path / "bert")
