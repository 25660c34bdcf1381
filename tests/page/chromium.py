"""A page in headless Chromium, driven by its own debugging protocol; skips where there is none."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.rigs.proxies import until

SECONDS = 60.0
PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """Return the program, if this machine has it."""
    return next(filter(None, map(shutil.which, PROGRAMS)), None)


class Page:
    """One page. What it asks (`prompt`) is answered by `answer`; errors of its script are kept."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse[Any]) -> None:
        self.answer = ""
        self.errors: list[str] = []
        self.num_alerts = 0
        self._socket = socket
        self._loaded = asyncio.Event()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}

    async def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        return await asyncio.wait_for(self._waiting[number], SECONDS)

    async def open(self, url: str) -> None:
        """Go to a page."""
        for domain in ("Page", "Runtime"):
            await self.call(f"{domain}.enable")
        self._loaded.clear()
        await self.call("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), SECONDS)  # a script has a page to run in

    async def run(self, script: str) -> Any:
        """Run a script in the page and return its value."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def look(self, *, width: int, height: int, is_dark: bool) -> None:
        """Take a size in CSS pixels, and a scheme of colours."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self) -> bytes:
        """Return what is to be seen, as PNG."""
        result = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(result["data"])

    async def read(self) -> None:
        """Take in what the browser says, until it is gone."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._waiting.pop(said["id"]).set_result(said.get("result", said))
            elif said["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif said["method"] == "Runtime.exceptionThrown":
                self.errors.append(str(said["params"]["exceptionDetails"]))
            elif said["method"] == "Page.javascriptDialogOpening":
                self.num_alerts += said["params"]["type"] == "alert"
                reply = {"accept": True, "promptText": self.answer}
                message_of = {"id": 0, "method": "Page.handleJavaScriptDialog", "params": reply}
                self._waiting[0] = asyncio.get_running_loop().create_future()
                await self._socket.send_json(message_of)


@asynccontextmanager
async def chromium_page(profile: Path) -> AsyncIterator[Page]:
    """Start a browser with an empty profile and yield its page; end it afterwards."""
    program = find_chromium()
    assert program is not None
    process = await asyncio.create_subprocess_exec(
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-port=0",
        "--no-proxy-server", f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port = await _debugging_port(profile)
        async with aiohttp.ClientSession() as client:
            url = await _until_shown(client, f"http://127.0.0.1:{port}/json")
            async with client.ws_connect(url, max_msg_size=0) as socket:
                page = Page(socket)
                reading = asyncio.ensure_future(page.read())
                yield page
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
    finally:
        process.kill()
        await process.wait()


async def _debugging_port(profile: Path) -> int:
    path = profile / "DevToolsActivePort"

    def port() -> int:
        with suppress(FileNotFoundError, IndexError, ValueError):
            return int(path.read_text().splitlines()[0])
        return 0

    found: int = await until(port, "the browser has started", SECONDS)
    return found


async def _until_shown(client: aiohttp.ClientSession, url: str) -> str:
    """Wait until the browser has its first page, and return where that is driven."""

    async def page() -> str:
        async with client.get(url) as response:
            pages = [target for target in await response.json() if target["type"] == "page"]
        return str(pages[0]["webSocketDebuggerUrl"]) if pages else ""

    found: str = await until(page, "the browser shows a page", SECONDS)
    return found
