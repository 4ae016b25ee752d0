"""Programs of users that mypy and pyright check (``make checks``); nothing in here is run."""
