"""``megalight schema``: print the JSON schema of configuration files, for editors."""

from __future__ import annotations

import argparse

from megalight.errors import ConfigurationError

EPILOG = """
In an editor with the YAML language server, write as the first line of a recipe:
  # yaml-language-server: $schema=./megalight.schema.json"""


DESCRIPTION = f"print the JSON schema of configuration files, for YAML editors\n{EPILOG}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write (default: standard output)")


def run(arguments: argparse.Namespace) -> int:
    """Print or write the schema."""
    import json
    from pathlib import Path

    from megalight.cli.all_options import Schema

    text = json.dumps(Schema().build(), indent=1)
    if arguments.output is None:
        print(text)
        return 0
    try:
        Path(arguments.output).write_text(text + "\n", encoding="utf-8")
    # A wrong path is a mistake of the user, and no crash.
    except OSError as error:
        raise ConfigurationError(f"cannot write {arguments.output}: {error.strerror}.") from error
    return 0
