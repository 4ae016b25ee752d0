"""Silences what other packages say on every run and users cannot act on."""

from __future__ import annotations

import logging
import warnings

UNWANTED = ("Tip: For seamless", "Trainer already configured with model summary")
"""What marks Lightning's advertisements, and its notice that a callback of ours stands where one of its own would."""


def silence() -> None:
    """Drop advertisements and notices of Lightning, and warnings about its own code. Doing it twice is harmless."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_wanted)
    # Lightning 2.6 uses a class that torch 2.13 deprecates
    warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
    # every run has its own folder, so a resumed one always has another than the checkpoint names
    warnings.filterwarnings("ignore", r"The dirpath has changed from", UserWarning)


def _wanted(record: logging.LogRecord) -> bool:
    return not any(mark in record.getMessage() for mark in UNWANTED)
