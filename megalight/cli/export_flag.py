"""``megalight fit --export_hf=FOLDER``: the flag, written out as the callback that does it. No torch in here."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megalight.errors import ConfigurationError

FLAG = "--export_hf"
CALLBACK = "megalight.callbacks.TransformersExport"


def written_out(verb: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command with ``--export_hf`` as one more callback, at the end.

    The configuration that a run saves has the callback, so that it does the same when it is used again.

    Raises:
        ConfigurationError: the flag has no folder, is there twice, or the verb trains nothing.
    """
    rest, folders = list[str](), list[str]()
    left = iter(words)
    for word in left:
        flag, equals, folder = word.partition("=")
        if flag != FLAG:
            rest.append(word)
            continue
        folder = folder if equals else next(left, "")
        if not folder or folder.startswith("--"):
            raise ConfigurationError(f"{FLAG} needs a folder to write: {FLAG}=FOLDER")
        folders.append(folder)
    if not folders:
        return rest
    if verb != "fit":
        raise ConfigurationError(
            f"{FLAG} writes the model that fit has trained; {verb} trains none. Leave it out, or convert a checkpoint "
            "(megalight convert)."
        )
    if len(folders) > 1:
        raise ConfigurationError(f"{FLAG} is there {len(folders)} times ({', '.join(folders)}); give it once.")
    # Last, so that no other word replaces the list of callbacks after it.
    return [*rest, "--trainer.callbacks+=" + json.dumps({"class_path": CALLBACK, "init_args": {"folder": folders[0]}})]
