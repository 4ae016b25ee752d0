"""Silences what other packages say on every run and users cannot act on."""

from __future__ import annotations

import logging
import warnings

ADVERTISEMENT = "Tip: For seamless"
"""Begins Lightning's advertisements of its services."""


def silence() -> None:
    """Drop advertisements from Lightning's log, and warnings about Lightning's own code. Doing it twice is harmless."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_wanted)
    # Lightning 2.6 uses a class that torch 2.13 deprecates
    warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
    # every run has its own folder, so a resumed one always has another than the checkpoint names
    warnings.filterwarnings("ignore", r"The dirpath has changed from", UserWarning)


def _wanted(record: logging.LogRecord) -> bool:
    return ADVERTISEMENT not in record.getMessage()
