"""Flags of ``megalight fit`` that stand for longer words, and are written out as these. No torch in here."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megalight.errors import ConfigurationError

EXPORT = "--export_hf"
CALLBACK = "megalight.callbacks.TransformersExport"
RESUME = "--resume.optimizer"

NEEDS = {EXPORT: "a folder to write: --export_hf=FOLDER", RESUME: "a word: --resume.optimizer=saved or configured"}
"""Flag -> what must follow it."""
MEANS = {
    EXPORT: "writes the model that fit has trained; {verb} trains none. Leave it out, or convert a checkpoint "
    "(megalight convert).",
    RESUME: "is about the optimizer of fit; {verb} has none. Leave it out.",
}
"""Flag -> why no other verb has it."""


def written_out(verb: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command without the flags, and with what they stand for at the end.

    ``--export_hf=FOLDER`` is one more callback, ``--resume.optimizer=WORD`` an option of the strategy. The
    configuration that a run saves has them, so that it does the same when it is used again.

    Raises:
        ConfigurationError: a flag has no value, is there twice, or the verb trains nothing.
    """
    rest = list[str]()
    found: dict[str, list[str]] = {flag: [] for flag in NEEDS}
    left = iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        if flag not in found:
            rest.append(word)
            continue
        value = value if equals else next(left, "")
        if not value or value.startswith("--"):
            raise ConfigurationError(f"{flag} needs {NEEDS[flag]}")
        found[flag].append(value)
    for flag, values in found.items():
        if values and verb != "fit":
            raise ConfigurationError(f"{flag} {MEANS[flag].format(verb=verb)}")
        if len(values) > 1:
            raise ConfigurationError(f"{flag} is there {len(values)} times ({', '.join(values)}); give it once.")
    # Last, so that no other word replaces the list of callbacks, or the strategy, after them.
    rest += [f"--trainer.strategy.checkpoints.resume_optimizer={word}" for word in found[RESUME]]
    for folder in found[EXPORT]:
        rest.append("--trainer.callbacks+=" + json.dumps({"class_path": CALLBACK, "init_args": {"folder": folder}}))
    return rest
