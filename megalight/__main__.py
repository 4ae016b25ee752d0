"""``python -m megalight`` is the command ``megalight``."""

import sys

from megalight.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
