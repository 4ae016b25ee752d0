"""Ask a trained model about pictures that it has not seen, and count its right answers.

    python examples/picture_answers.py runs/vlm/checkpoints runs/vlm/pictures

reads the run's newest checkpoint, and ``held_out.json`` of the folder that ``examples/pictures.py`` wrote. An answer
is right if color and shape are. With ``--at-least 0.95`` a lower share is an error.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
from megalight.data.chat.template import ChatTemplate
from megalight.inference import TextGenerator

BATCH = 50
"""Pictures that are asked about at once."""


def answers(writer: TextGenerator, folder: Path) -> list[tuple[str, str]]:
    """Return the right and the model's answer for each held-out picture."""
    rows = json.loads((folder / "held_out.json").read_text(encoding="utf-8"))
    template, found = ChatTemplate.of(writer.tokenizer), []
    for start in range(0, len(rows), BATCH):
        part = rows[start : start + BATCH]
        talks = [[turn["value"] for turn in row["conversations"]] for row in part]
        said = writer.complete(
            [template.render([{"role": "user", "content": question}], answer=True) for question, _ in talks],
            max_new_tokens=24,
            temperature=0,
            ends=template.ends(writer.tokenizer),
            images=[[folder / row["image"]] for row in part],
        )
        found += [(right, answer.strip()) for (_, right), answer in zip(talks, said, strict=True)]
    return found


def main() -> None:
    """Ask, count and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="a checkpoint, or the folder of a run: its newest one")
    parser.add_argument("pictures", type=Path, help="the folder that examples/pictures.py wrote")
    parser.add_argument("--at-least", type=float, default=0.0, help="fail below this share of right answers")
    arguments = parser.parse_args()
    path = latest_checkpoint(arguments.checkpoint)
    found = answers(TextGenerator.from_checkpoint(path), arguments.pictures)
    wrong = Counter((right, answer) for right, answer in found if right != answer)
    for (right, answer), count in wrong.most_common(10):
        print(f"{count} x {answer!r} instead of {right!r}")
    share = 1 - wrong.total() / len(found)
    print(f"{path}: {len(found) - wrong.total()} of {len(found)} right ({share:.1%})")
    if share < arguments.at_least:
        raise SystemExit(f"fewer than {arguments.at_least:.1%} are right")


if __name__ == "__main__":
    main()
