"""``megalight draft-vocabulary DATA ... --size N --output FILE``: the most frequent ids, for a draft's small head."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

DESCRIPTION = (
    "write the most frequent token ids of data, for a draft model\n\n"
    "EagleModule(draft_vocabulary=FILE) reads the file. Count data like what the model will write: of\n"
    "conversations, the tokens of answers are counted."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("data", nargs="+", help="a data prefix, as of megalight prepare; several are counted together")
    parser.add_argument("-s", "--size", type=int, required=True, help="number of ids; 32000 is usual")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the JSON file to write")


def run(arguments: argparse.Namespace) -> int:
    """Write the file and print how much of the data it covers."""
    from megalight.data.corpus import frequent_ids
    from megalight.errors import ConfigurationError

    if arguments.output.exists():
        raise ConfigurationError(f"{arguments.output} is there already; remove it, or name another file.")
    ids, share = frequent_ids(arguments.data, arguments.size)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(ids) + "\n", encoding="utf-8")
    print(f"{arguments.output}: {len(ids)} ids, {share:.2%} of the tokens")
    return 0
