"""``megalight recipes [NAME]``: list the named recipes, or print one."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterable, Iterator

from megalight.errors import ConfigurationError, nearest


def describe() -> str:
    """Return the line for the overview."""
    return "list named recipes (jobs with every preset on 1, 4 and 8 GPUs), or print one as YAML"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "name", nargs="?", help="recipe to print (default: list all); megalight recipes NAME > mine.yaml"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the recipe, or the list."""
    import yaml

    if arguments.name is not None:
        check_name(arguments.name)  # before torch is imported, which the recipes need
    from megalight.cli.named_recipes import named, recipes

    if arguments.name is None:
        known = recipes()
        width = max(map(len, known))
        print("\n".join(f"{name:<{width}}  {recipe.describe()}" for name, recipe in known.items()))
        return 0
    recipe = named(arguments.name)
    chat = "weights" in recipe.configuration["model"]["init_args"]
    # As comments, so that the output is a recipe that can be saved as it is.
    print(f"# {recipe.name}: {recipe.describe().strip()}, for GPUs of 80 GB.")
    print(f"#   megalight fit -c {recipe.name} --data.data=PREFIX" + (" --model.weights=MODEL" if chat else ""))
    if chat:
        print("# MODEL has the published weights: a name of the Hugging Face Hub, a folder, or a checkpoint.")
    wrote = "megalight prepare --chat" if chat else "megalight prepare"
    print(f"# PREFIX is what `{wrote}` wrote, with the tokenizer of the model.")
    print(yaml.safe_dump(recipe.configuration, sort_keys=False), end="")
    return 0


GPUS = (1, 4, 8)
JOBS = ("pretrain", "pretrain-fsdp", "pretrain-pp", "sft", "lora", "qlora")
PRESETS = {"megalight.models.gpt.presets": JOBS, "megalight.models.bert.presets": JOBS[:3]}
"""Module of a family's presets -> the jobs of its recipes. Conversations and adapters are for models of text."""

NAME = re.compile(r"[\w.]+-[a-z-]+-\d+xGPU")
"""The form of the names."""


def check_name(name: str) -> None:
    """Refuse a name that no recipe can have. One with a known preset may still have none, if it does not fit.

    Raises:
        ConfigurationError: see :func:`no_recipe`.
    """
    possible = [
        f"{preset}-{job}-{gpus}xGPU"
        for module, jobs in PRESETS.items()
        for preset in preset_names(module)
        for job in jobs
        for gpus in GPUS
    ]
    if name not in possible:
        raise no_recipe(name, possible)


def no_recipe(name: str, known: Iterable[str]) -> ConfigurationError:
    """Return the error for a name that is none of ``known``."""
    return ConfigurationError(
        f"{name!r} names no recipe.{nearest(name, known)} `megalight recipes` lists them; a preset that does not "
        "fit on a number of GPUs has none, nor has one that reads images."
    )


def preset_names(module: str) -> Iterator[str]:
    """Yield the names of presets in the source of a module: the keys of the dict that it registers in a loop."""
    from megalight.cli.signatures import find_module

    found = find_module(module)
    assert found is not None
    for node in ast.parse(found.path.read_bytes()).body:
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Call) and isinstance(node.iter.func, ast.Attribute):
            table = node.iter.func.value
            keys = table.keys if isinstance(table, ast.Dict) else []
            yield from (key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str))
