"""``megalight recipes [NAME]``: list the named recipes, or print one."""

from __future__ import annotations

import argparse


def describe() -> str:
    """Return the line for the overview."""
    return "list named recipes (every preset on 1, 4 and 8 GPUs), or print one as YAML"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "name", nargs="?", help="recipe to print (default: list all); megalight recipes NAME > mine.yaml"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the recipe, or the list."""
    import yaml

    from megalight.cli.recipe_names import check_name

    if arguments.name is not None:
        check_name(arguments.name)  # before torch is imported, which the recipes need
    from megalight.cli.named_recipes import named, recipes

    if arguments.name is None:
        known = recipes()
        width = max(map(len, known))
        print("\n".join(f"{name:<{width}}  {recipe.describe()}" for name, recipe in known.items()))
        return 0
    recipe = named(arguments.name)
    lora = "weights" in recipe.configuration["model"]["init_args"]
    # As comments, so that the output is a recipe that can be saved as it is.
    print(f"# {recipe.name}: {recipe.describe().strip()}, for GPUs of 80 GB.")
    print("#   megalight fit -c THIS_FILE --data.data=PREFIX" + (" --model.weights=FOLDER" if lora else ""))
    if lora:
        print("# FOLDER is a checkpoint, or a folder of transformers with the published weights.")
    print("# PREFIX is what `megalight prepare` wrote, with the tokenizer of the model.")
    print(yaml.safe_dump(recipe.configuration, sort_keys=False), end="")
    return 0
