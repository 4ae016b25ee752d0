"""``megalight completion SHELL``: print a script by which a shell completes commands, options and values."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "tcsh")
PREFIXES = {
    "model": "megalight.models.gpt.GPTModule",
    "data": "megalight.data.gpt.module.GPTDataModule",
}
"""Further keys whose arguments are completed, and the class that gives them."""

HELP = """
For bash:  megalight completion bash > ~/.local/share/bash-completion/completions/megalight
For zsh:   megalight completion zsh > a file _megalight in a folder of $fpath"""


DESCRIPTION = f"print a script by which a shell completes commands and options\n{HELP}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("shell", choices=SHELLS, help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Print the script."""
    from megalight.imports import require

    print(require("shtab", "megalight completion").complete(whole_parser(), arguments.shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """Return a parser that knows every command with its options, for completion only."""
    from megalight.cli.verbs import TRAINER_VERBS, VERBS, load

    parser = argparse.ArgumentParser(prog="megalight")
    commands = parser.add_subparsers(dest="command")
    for name in VERBS:
        verb = load(name)
        verb.add_arguments(commands.add_parser(name, help=verb.DESCRIPTION.splitlines()[0]))
    for name, line in TRAINER_VERBS.items():
        _add_keys(commands.add_parser(name, help=line))
    return parser


def _add_keys(parser: argparse.ArgumentParser) -> None:
    """Add the keys of a configuration: those of the classes, and those of the dataclasses in them, at any depth."""
    from megalight.cli.all_options import ROOT, options
    from megalight.cli.config_args import DEFAULTS, find_class

    parser.add_argument("-c", "--config", help="a recipe in YAML")
    for key in (*ROOT, "print_config", "help-all"):
        parser.add_argument(f"--{key}", help=ROOT.get(key, {}).get("description", ""))
    for prefix in ("model", "data"):
        parser.add_argument(f"--{prefix}", help="a class: its name or import path")
    for prefix, path in {**DEFAULTS, **PREFIXES}.items():
        cls = find_class(path)
        assert cls is not None
        for option in options(prefix, cls):
            accepted = option.accepted
            values = [str(choice) for choice in accepted.choices] or ["true", "false"] * (bool in accepted.scalars)
            # Only where nothing else is accepted: a shell offers these values alone.
            choices = values if values and accepted.complete and {*accepted.scalars} <= {bool} else None
            parser.add_argument(f"--{option.key}", choices=choices, help=option.description.replace("%", "%%"))
