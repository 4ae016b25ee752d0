"""Import this to have ModelOpt imported, if it is installed; its warnings are no errors."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("modelopt") is not None:
    from megalight.plugins.modelopt.presets import modelopt

    modelopt()
