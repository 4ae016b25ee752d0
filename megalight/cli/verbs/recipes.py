"""``megalight recipes [NAME]``: list the named recipes, or print one."""

from __future__ import annotations

import argparse
import re

DESCRIPTION = "list named recipes (jobs with every preset on 1, 4 and 8 GPUs), or print one as YAML"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "name", nargs="?", help="recipe to print (default: list all); megalight recipes NAME > mine.yaml"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the recipe, or the list."""
    import yaml

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


NAME = re.compile(r"[\w.]+-[a-z-]+-\d+xGPU")
"""The form of the names."""
