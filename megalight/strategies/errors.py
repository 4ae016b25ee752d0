"""Errors that Lightning's users catch under Lightning's own names."""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException

from megalight.errors import ConfigurationError


class StepError(ConfigurationError, MisconfigurationException):
    """A user's step returned something that cannot be trained on."""
