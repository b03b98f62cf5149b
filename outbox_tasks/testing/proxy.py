"""A loopback TCP proxy whose network can be cut, turned into a black hole, slowed down and healed."""

import asyncio
import ssl
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from threading import Thread
from types import TracebackType
from typing import Any, Self

from outbox_tasks.testing.services.places import LOOPBACK, free_port

_CHUNK_BYTES = 65536
_CALL_SECONDS = 10.0


class _Network(StrEnum):
    PASSING = "passing"
    CUT = "cut"
    BLACK_HOLE = "black hole"


@dataclass(eq=False)
class _Link:
    """One client's connection and, once made, the one to the target."""

    client: asyncio.StreamWriter
    target: asyncio.StreamWriter | None = None
    lossy: bool = False
    """Bytes were dropped, so what would follow is no longer the protocol."""

    def ends(self) -> list[asyncio.StreamWriter]:
        return [end for end in (self.client, self.target) if end is not None]

    def reset(self) -> None:
        for end in self.ends():
            end.transport.abort()

    def close(self) -> None:
        for end in self.ends():
            end.close()


class TcpProxy:
    """Forwards `port` on loopback to a target while its context is open.

    The port is fixed when the object is made, so that a broker can be told to advertise it
    before either runs. All methods return when the change has taken effect; any thread may
    call them. With `tls` clients speak TLS to it, and it speaks plainly to the target.
    """

    def __init__(
        self, target_host: str, target_port: int, *, port: int | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.port = free_port() if port is None else port
        self._tls = tls
        self._target = (target_host, target_port)
        self._network = _Network.PASSING
        self._delay_seconds = 0.0
        self._links: set[_Link] = set()
        self._listener: asyncio.Server | None = None
        self._ready: Future[asyncio.AbstractEventLoop] = Future()
        self._ended = asyncio.Event()
        self._passing = asyncio.Event()
        self._passing.set()
        self._thread = Thread(target=self._run, name=f"tcp-proxy-{self.port}", daemon=True)

    def cut(self) -> None:
        """Reset all connections and refuse new ones."""
        self._call(self._cut())

    def blackhole(self) -> None:
        """Keep connections and accept new ones, but drop everything, their ends included."""
        self._call(self._swallow())

    def delay(self, by: timedelta) -> None:
        """Hold back each chunk (64 KiB or less) sent from now on, in each direction."""
        self._call(self._slow_down(by))

    def heal(self) -> None:
        """Forward at full speed again; connections that lost bytes in a black hole are reset."""
        self._call(self._heal())

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.result(_CALL_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call(self._end())
        self._thread.join(_CALL_SECONDS)

    def _call(self, change: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(change, self._ready.result(0)).result(_CALL_SECONDS)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as error:  # the port was taken: told to the thread that waits in __enter__
            self._ready.set_exception(error)

    async def _serve(self) -> None:
        await self._listen()
        self._ready.set_result(asyncio.get_running_loop())
        await self._ended.wait()

    async def _end(self) -> None:
        await self._cut()
        self._ended.set()

    async def _listen(self) -> None:
        self._listener = await asyncio.start_server(self._accept, LOOPBACK, self.port, ssl=self._tls)

    async def _cut(self) -> None:
        self._network = _Network.CUT
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        for link in self._links:
            link.reset()
        self._passing.set()

    async def _swallow(self) -> None:
        if self._listener is None:
            await self._listen()
        self._network = _Network.BLACK_HOLE
        self._passing.clear()

    async def _slow_down(self, by: timedelta) -> None:
        self._delay_seconds = by.total_seconds()

    async def _heal(self) -> None:
        self._network = _Network.PASSING
        self._delay_seconds = 0.0
        for link in self._links:
            if link.lossy:
                link.reset()
        self._passing.set()
        if self._listener is None:
            await self._listen()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = _Link(client=writer)
        self._links.add(link)
        try:
            # Any end of a connection, by either side or by `cut`, is what a proxy is for: both sides see it.
            with suppress(OSError):
                await self._connect(link, reader)
        finally:
            self._links.discard(link)
            link.close()

    async def _connect(self, link: _Link, client: asyncio.StreamReader) -> None:
        if self._network is _Network.BLACK_HOLE:
            link.lossy = True
            await self._passing.wait()
            return
        target, link.target = await asyncio.open_connection(*self._target)
        if self._network is _Network.CUT:
            return
        await self._pump_both_ways(link, client, target)

    async def _pump_both_ways(self, link: _Link, client: asyncio.StreamReader, target: asyncio.StreamReader) -> None:
        assert link.target is not None
        pumps = {
            asyncio.create_task(self._pump(link, client, link.target)),
            asyncio.create_task(self._pump(link, target, link.client)),
        }
        ended, others = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in others:
            pump.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.gather(*ended)

    async def _pump(self, link: _Link, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while chunk := await source.read(_CHUNK_BYTES):
            if self._delay_seconds:
                await asyncio.sleep(self._delay_seconds)
            if self._network is _Network.BLACK_HOLE:
                link.lossy = True
                continue
            sink.write(chunk)
            await sink.drain()
        # A black hole swallows the end of a connection too.
        await self._passing.wait()
