"""Keys of sockets that other machines reach: CURVE, ZeroMQ's encryption and authentication.

A coordinator, its engines and its clients share one pair of keys, in a file. Whoever has it may connect; nobody else
can, or reads what is sent.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from megalight.errors import ConfigurationError

LENGTH = 40
"""Characters of a key, in Z85."""


class CurveKeys(NamedTuple):
    """A pair of keys, in Z85."""

    public: bytes
    secret: bytes

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> CurveKeys:
        """Write a new pair to a file that this user alone can read; return it.

        Raises:
            ConfigurationError: the file is there already, or cannot be written.
        """
        keys = cls(*zmq.curve_keypair())
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(b"%b\n%b\n" % keys)
        except OSError as error:
            raise ConfigurationError(f"keys cannot be written to {os.fspath(path)} ({error.strerror}).") from error
        return keys

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CurveKeys:
        """Read a pair.

        Raises:
            ConfigurationError: there is none.
        """
        try:
            lines = Path(path).read_bytes().split()
        except OSError as error:
            raise ConfigurationError(f"keys cannot be read from {os.fspath(path)} ({error.strerror}).") from error
        if len(lines) != 2 or any(len(line) != LENGTH for line in lines) or zmq.curve_public(lines[1]) != lines[0]:
            raise ConfigurationError(f"{os.fspath(path)} holds no keys; CurveKeys.create writes them.")
        return cls(*lines)

    def credentials(self, socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> None:
        """Let a socket that connects use them."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether a peer with this public key, which has shown its secret one, may connect."""
        return key == self.public

    def guard(self, socket: zmq.Socket[bytes]) -> ThreadAuthenticator:
        """Let a socket that binds ask for them, and start what answers for its context, which is to be stopped."""
        authenticator = ThreadAuthenticator(socket.context)
        authenticator.start()
        authenticator.configure_curve_callback("*", self)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        return authenticator


def check_endpoint(endpoint: str, keys: CurveKeys | None) -> None:
    """Refuse an endpoint that other machines reach without keys.

    Raises:
        ConfigurationError: it is one, or is of another kind.
    """
    if not endpoint.startswith(("ipc://", "inproc://", "tcp://")):
        raise ConfigurationError(f"endpoint is {endpoint!r}; it must be ipc:// and the path of a socket, or tcp://.")
    if endpoint.startswith("tcp://") != (keys is not None):
        raise ConfigurationError(
            f"endpoint is {endpoint!r}; tcp:// needs keys (CurveKeys.create), and ipc:// has none: the rights of its "
            "folder protect it."
        )
