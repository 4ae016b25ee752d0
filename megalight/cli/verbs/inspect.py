"""``megalight inspect CKPT``: show the contents of a checkpoint."""

from __future__ import annotations

import argparse

from megalight.errors import CheckpointError, printable

DESCRIPTION = "show what a checkpoint holds, verify it, or compare it with another"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "checkpoint", help="a checkpoint, a run's folder (its newest one), or a folder of transformers; also s3://..."
    )
    parser.add_argument("--norms", action="store_true", help="also read and verify all data, and show the norms")
    parser.add_argument("--depth", type=int, help="show only this many parts of the names, with sums of the rest")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--diff", metavar="OTHER", help="show how the tensors of another checkpoint differ")
    what.add_argument("--verify", action="store_true", help="read every byte, and name each damaged file and tensor")
    parser.add_argument("--json", action="store_true", help="write JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the report. Only ``--norms``, ``--diff`` and ``--verify`` read more than metadata.

    Torch is needed for single files, and to compare folders of ``transformers``.

    Returns:
        1 if ``--verify`` found damage, or ``--diff`` a difference.
    """
    # Imports inside of verbs: the overview and `--help` must not wait for torch.
    import json
    from dataclasses import asdict

    from megalight.checkpoint.disk.latest_checkpoint import latest_checkpoint
    from megalight.checkpoint.foreign.pickles import check_is_archive
    from megalight.checkpoint.foreign.transformers_folder import describe as read_folder
    from megalight.checkpoint.foreign.transformers_folder import is_folder
    from megalight.checkpoint.inspection import describe as read
    from megalight.checkpoint.inspection import render, to_json

    path = latest_checkpoint(arguments.checkpoint)
    if arguments.verify and is_folder(path):
        raise CheckpointError(
            f"{path} is a folder of transformers, whose files have no checksums: there is nothing to verify it by. "
            "--norms reads every byte; --diff compares it with another folder or a checkpoint."
        )
    if arguments.verify or arguments.diff:
        from megalight.checkpoint.inspection import diff, verify

        other = None if arguments.verify else latest_checkpoint(arguments.diff)
        # Names of transformers become canonical ones by the family's table, which takes torch.
        if other is not None and (is_folder(path) or is_folder(other)):
            from megalight.models.stored import diff
        found = verify(path) if other is None else diff(path, other)
        nothing = "every byte is as it was saved" if arguments.verify else "the tensors are equal"
        plain = [json.dumps([asdict(each) for each in found], indent=2)] if arguments.json else list(map(str, found))
        print(printable("\n".join(plain)) or nothing)
        return int(bool(found))
    # A single file has another reader with the same report.
    if path.is_file():
        check_is_archive(path)  # before torch is imported to read it
        from megalight.checkpoint.foreign.single_file import describe as read
    elif is_folder(path):
        read = read_folder
    report = read(path, norms=arguments.norms)
    print(json.dumps(to_json(report), indent=2) if arguments.json else printable(render(report, arguments.depth)))
    return 0
