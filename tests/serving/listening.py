"""A server that listens, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalight.serving import AsyncLLM
from megalight.serving.server import app_of


@contextmanager
def listening(folder: Path) -> Iterator[str]:
    """Its address, while it serves ``folder`` as ``model``. The key of controls is ``control``."""
    import uvicorn

    llm = AsyncLLM(folder, device="cpu")
    app = app_of(llm, "model", control_keys=["control"])
    server = uvicorn.Server(uvicorn.Config(app, lifespan="on", log_level="error"))

    async def serve(listener: socket.socket) -> None:
        await server.serve([listener])
        await llm.shutdown()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(serve(listener)))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
