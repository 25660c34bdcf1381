"""The status page in a real browser: it shows what is there, and its buttons do what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.server import ServerDouble
from tests.page.chromium import SECONDS, Page, chromium_page, find_chromium
from tests.rigs.proxies import fleet, until

pytestmark = [
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium here"),
    pytest.mark.timeout(240),
]


def button_of(double: ServerDouble) -> str:
    """A script's expression for the button on an instance's card."""
    is_its_card = f"card => card.innerText.includes({double.http_address!r})"
    return f"[...document.querySelectorAll('.card')].find({is_its_card}).querySelector('button')"


async def until_says(page: Page, double: ServerDouble, text: str) -> None:
    """Wait until the button of an instance bears this text."""

    async def says_so() -> bool:
        # The card comes with the first picture.
        script = f"try {{ {button_of(double)}.innerText }} catch {{ '' }}"
        shown = await page.run(script)
        return bool(shown == text)

    await until(says_so, f"the button says {text}", SECONDS)


async def test_the_buttons_drain_and_resume(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("the key")
    key.chmod(0o600)
    settings: dict[str, Any] = {"admin_key_file": str(key)}
    async with (
        fleet(1, 2, **settings) as (proxy, _, [decode, other]),
        chromium_page(tmp_path / "profile") as page,
    ):
        await page.open(f"{proxy.url}/")
        await until_says(page, decode, "Drain")
        page.answer = "another key"
        await page.run(f"{button_of(decode)}.click()")
        await until(lambda: page.num_alerts == 1, "a wrong key is refused")
        assert (await proxy.states())[decode.http_address] == "ready"
        page.answer = "the key"
        await page.run(f"{button_of(decode)}.click()")
        await until_says(page, decode, "Resume")
        assert (await proxy.states())[decode.http_address] == "drained"
        await proxy.ask()
        assert (len(decode.received), len(other.received)) == (0, 1)
        page.answer = "nobody asks again for a key that was right"
        await page.run(f"{button_of(decode)}.click()")
        await until_says(page, decode, "Drain")
        assert (await proxy.states())[decode.http_address] == "ready"
        assert page.errors == []


async def test_the_page_shows_text_and_never_runs_it(tmp_path: Path) -> None:
    """A model may call itself anything."""
    evil = "<img src=x onerror=document.title='run'>"
    async with fleet(1, 1) as (proxy, _, [decode]):
        decode.model = evil
        await decode.beat_once()
        async with chromium_page(tmp_path / "profile") as page:
            await page.open(f"{proxy.url}/")

            async def is_shown() -> bool:
                return evil in json.dumps(await page.run("document.body?.innerText"))

            await until(is_shown, "its name is shown")
            assert await page.run("document.title") == "P2P proxy"
            assert page.errors == []


@pytest.mark.parametrize("width", [360, 1200])
@pytest.mark.parametrize("is_dark", [False, True])
async def test_it_fits_a_phone_and_a_desk_by_day_and_night(
    tmp_path: Path, width: int, is_dark: bool
) -> None:
    async with fleet(2, 2) as (proxy, [prefill, _], _):
        for _ in range(3):
            await proxy.ask()
        async with chromium_page(tmp_path / "profile") as page:
            await page.look(width=width, height=900, is_dark=is_dark)
            await page.open(f"{proxy.url}/")
            await until_says(page, prefill, "Drain")
            assert await page.run("document.documentElement.scrollWidth") <= width
            background = await page.run("getComputedStyle(document.body).backgroundColor")
            brightness = sum(map(int, background.removeprefix("rgb(").rstrip(")").split(", ")))
            assert (brightness < 3 * 128) is is_dark
