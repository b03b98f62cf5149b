"""Where servers live: loopback ports and directories every user can enter."""

import secrets
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOOPBACK = "127.0.0.1"

# Below the kernel's range for outgoing connections (32768 and up), so that no client takes the port of a
# server that is down for a moment.
_FIRST_PORT, _LAST_PORT = 20_000, 32_000


def free_port() -> int:
    """Return a loopback port nobody listens on; it stays free for a server that is restarted."""
    while True:
        port = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT)
        if is_free(port):
            return port


@contextmanager
def scratch_directory(prefix: str = "outbox-") -> Iterator[Path]:
    """Yield a new directory that any user can enter, and remove it at the end.

    PostgreSQL refuses to run as root, and the user it runs as then could not enter root's own directories.
    """
    directory = Path(tempfile.mkdtemp(prefix=prefix))
    directory.chmod(0o711)
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def is_free(port: int) -> bool:
    """Whether a server could listen on this loopback port."""
    with socket.socket() as listener:
        # As servers do: a port whose last connections are still in TIME_WAIT is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, port))
        except OSError:
            return False
    return True
