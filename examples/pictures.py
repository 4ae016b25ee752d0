"""Draw pictures of colored shapes, with questions about them in LLaVA's form, and a tokenizer for these.

    python examples/pictures.py runs/vlm/pictures --count 20000 --held-out 1000

writes ``train.json``, ``held_out.json``, the pictures that they name, and ``tokenizer/``, a folder of a tokenizer with
a chat template and the token ``<image>``.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from PIL import Image, ImageDraw

from megalight.data.tokenizer import Tokenizer

COLORS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 215, 50),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
}
SHAPES = ("circle", "square", "triangle", "cross")
QUESTION = "What is this?"
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}"
    "<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZE = 32
"""Height and width of a picture, in pixels."""


def draw(chance: random.Random, color: str, shape: str) -> Image.Image:
    """Draw a shape of any size at any place, on gray."""
    picture = Image.new("RGB", (SIZE, SIZE), (chance.randint(100, 150),) * 3)
    brush, fill = ImageDraw.Draw(picture), COLORS[color]
    side = chance.randint(22, 26)
    left, top = (chance.randint(1, SIZE - 1 - side) for _ in range(2))
    right, bottom = left + side, top + side
    if shape == "circle":
        brush.ellipse((left, top, right, bottom), fill)
    elif shape == "square":
        brush.rectangle((left, top, right, bottom), fill)
    elif shape == "triangle":
        brush.polygon([((left + right) / 2, top), (left, bottom), (right, bottom)], fill)
    else:
        third = side // 3
        brush.rectangle((left + third, top, right - third, bottom), fill)
        brush.rectangle((left, top + third, right, bottom - third), fill)
    return picture


def write(folder: Path, name: str, count: int, seed: int) -> None:
    """Write pictures and the file that asks about them."""
    chance, rows = random.Random(seed), []
    (folder / name).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        color, shape = chance.choice(list(COLORS)), chance.choice(SHAPES)
        file = f"{name}/{number:05}.png"
        draw(chance, color, shape).save(folder / file)
        talk = [
            {"from": "human", "value": f"<image>{QUESTION}"},
            {"from": "gpt", "value": f"a {color} {shape}"},
        ]
        rows.append({"id": number, "image": file, "conversations": talk})
    (folder / f"{name}.json").write_text(json.dumps(rows), encoding="utf-8")


def main() -> None:
    """Write everything."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=20000, help="pictures to train with (default: 20000)")
    parser.add_argument("--held-out", type=int, default=1000, help="pictures to test with (default: 1000)")
    arguments = parser.parse_args()
    write(arguments.folder, "train", arguments.count, seed=1)
    write(arguments.folder, "held_out", arguments.held_out, seed=2)
    words = [f"{QUESTION} a {color} {shape}" for color in COLORS for shape in SHAPES]
    special = ("<image>", "<|user|>", "<|assistant|>")
    tokenizer = Tokenizer.train(words, 280, special_tokens=special)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save(arguments.folder / "tokenizer")
    print(f"{arguments.folder}: {arguments.count} pictures to train with, {arguments.held_out} held out")


if __name__ == "__main__":
    main()
