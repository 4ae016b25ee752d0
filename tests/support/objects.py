"""A server of objects on this machine, which speaks S3."""

from __future__ import annotations

from collections.abc import Iterator

import fsspec
import pytest

BUCKET = "checkpoints"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Start the server, and let this process and those that it starts use it. The value is its address."""
    pytest.importorskip("s3fs", reason="pip install megalight[dev]")
    moto = pytest.importorskip("moto.server", reason="pip install megalight[dev]")
    running = moto.ThreadedMotoServer(port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        use(f"http://{host}:{port}", patch)
        # Servers of one process share their contents: another file's tests may have made it.
        fsspec.filesystem("s3").makedirs(BUCKET, exist_ok=True)
        yield f"http://{host}:{port}"
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    running.stop()


def use(server: str, patch: pytest.MonkeyPatch) -> None:
    """Let ``s3://`` mean the server."""
    keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
    for name, value in {"AWS_ENDPOINT_URL": server, "AWS_DEFAULT_REGION": "us-east-1", **keys}.items():
        patch.setenv(name, value)
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # those from before know another server
