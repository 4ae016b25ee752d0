"""Lightning searches all installed packages for callbacks whenever a Trainer is made; in tests, once per process."""

from __future__ import annotations

import functools

from lightning.fabric.utilities import registry

# The search takes longer than training of the models that most tests train.
registry.entry_points = functools.cache(registry.entry_points)  # type: ignore[assignment]
