"""Small pictures, questions about them, and a tokenizer."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megalight.data.multimodal.prepare import prepare_multimodal
from megalight.data.prepare import PrepareReport
from megalight.data.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def image_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "tokenizer"
    special = ("<image>", "<|user|>", "<|assistant|>")
    tokenizer = Tokenizer.train(["what is this in the picture a red thing " * 9], 275, special_tokens=special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save(folder)
    return folder


def png(width: int = 8, height: int = 8, color: tuple[int, int, int] = (200, 30, 30)) -> bytes:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new("RGB", (width, height), color).save(out, "PNG")
    return out.getvalue()


def row(images: Any, question: str, answer: str = "a red thing") -> dict[str, Any]:
    """A row in LLaVA's form."""
    talk = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    return {"conversations": talk} | ({} if images is None else {"image": images})


@pytest.fixture
def prepared(tmp_path: Path, image_tokenizer: Path) -> Callable[..., PrepareReport]:
    """Prepare rows of a JSON array; each call makes a data set of its own."""

    def make(rows: Sequence[Any], name: str = "talk", **options: Any) -> PrepareReport:
        (tmp_path / f"{name}.json").write_text(json.dumps(list(rows)))
        options = {"workers": 1, "progress": False, **options}
        return prepare_multimodal(
            [str(tmp_path / f"{name}.json")], tmp_path / "out" / name, tokenizer=image_tokenizer, **options
        )

    return make
