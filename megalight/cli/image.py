"""Write a figure of matplotlib to the file that a user named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalight.errors import ConfigurationError, nearest


def write(figure: Any, output: Path, **options: Any) -> None:
    """Write ``figure``, and make the folder of the file. The suffix of ``output`` sets the format.

    Args:
        options: arguments of matplotlib's ``savefig``.

    Raises:
        ConfigurationError: the suffix names no format, or the file cannot be written.
    """
    kind, known = output.suffix[1:].lower(), sorted(figure.canvas.get_supported_filetypes())
    if kind not in known:
        raise ConfigurationError(
            f"{output} ends with {output.suffix!r}, which names no format of images.{nearest(kind, known)} Choose "
            f"{', '.join(known)}."
        )
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output, dpi=130, **options)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        raise ConfigurationError(
            f"{output} cannot be written ({error.strerror}{where}); choose another --output."
        ) from error
