"""A tokenizer with special tokens, and templates, that tests of this folder share."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megalight.data.chat.prepare import prepare_chat
from megalight.data.prepare import PrepareReport
from megalight.data.tokenizer import Tokenizer

PLAIN = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>")


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer, as ``transformers`` writes it."""
    folder = tmp_path_factory.mktemp("chat") / "tokenizer"
    Tokenizer.train(["user assistant the answer is what question " * 9], 280, special_tokens=SPECIAL).save(folder)
    config = {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>", "chat_template": PLAIN}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **config}))
    return folder


def chat(*texts: str) -> dict[str, Any]:
    """User and assistant take turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[k % 2], "content": text} for k, text in enumerate(texts)]}


@pytest.fixture
def prepared(tmp_path: Path, chat_tokenizer: Path) -> Callable[..., PrepareReport]:
    """Prepare rows; each call makes a data set of its own."""

    def make(rows: Sequence[dict[str, Any]], name: str = "c", template: str | None = None, **options: Any):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if template is not None:
            (tmp_path / f"{name}.jinja").write_text(template)
            options["chat_template"] = tmp_path / f"{name}.jinja"
        return prepare_chat(
            [str(tmp_path / f"{name}.jsonl")],
            tmp_path / name,
            tokenizer=chat_tokenizer,
            progress=False,
            **{"workers": 1, **options},
        )

    return make
