"""A TCP proxy on loopback that passes bytes on unchanged, each piece some time after it came, in both directions."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator


class DelayingProxy:
    """Pieces overtake nothing and do not wait for each other: it is distance, not a narrow line."""

    def __init__(self, port: int, delay_s: float) -> None:
        self._upstream, self._delay_s = port, delay_s
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="delaying-proxy")
        self.port = 0

    def start(self) -> None:
        self._thread.start()
        self._ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._done.set)
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._done = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._done.wait()
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        try:
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):  # the test is over, or one side hung up
                await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))
        finally:
            writer.close()
            far_writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self._loop.call_later(self._delay_s, self._write, writer, data)
        self._loop.call_later(self._delay_s, writer.close)

    @staticmethod
    def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
        if not writer.is_closing():
            writer.write(data)


@contextlib.contextmanager
def delaying(port: int, delay_s: float) -> Iterator[str]:
    """The address of a proxy before the server at `port`."""
    proxy = DelayingProxy(port, delay_s)
    proxy.start()
    try:
        yield f"http://127.0.0.1:{proxy.port}"
    finally:
        proxy.stop()
