"""The page in a browser: Chromium of the system, driven by ``playwright``. Skipped without them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.serving.listening import listening
from tests.support import interpreters
from tests.support.source import ROOT

pytest.importorskip("uvicorn")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HOSTILE = (
    "<script>window.bad = 1</script> <img src=x onerror='window.bad = 1'> [a](javascript:window.bad=1) "
    "![b](http://192.0.2.1/x.png)\n\n```html\n<script>window.bad = 1</script>\n```\n\n"
    "| a | b |\n|---|---|\n| **c** | `d` |\n"
)


class Process:
    """A server in a process of its own, which can end and come again on its port."""

    def __init__(self, folder: Path, port: int) -> None:
        self._words = [sys.executable, "-m", "megalight", "serve", str(folder), "--port", str(port)]
        self.url = f"http://127.0.0.1:{port}/"
        self.start()

    def start(self) -> None:
        environment = {**interpreters.environment(), "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [*self._words, "--device", "cpu"], env=environment, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        while "megalight serve:" not in (line := self.process.stderr.readline()):
            assert line, "the server has not started"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with listening(folder) as url:
        yield url


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no chromium; apt install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, url: str) -> Iterator[Any]:
    """The page of a server, which must have no error."""
    context = browser.new_context()
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda line: wrong.append(line.text) if "Content Security" in line.text else None)
    page.goto(url)
    page.wait_for_selector("#model:text-is('model')")
    yield page
    context.close()
    assert not wrong


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    with opened(browser, url) as page:
        yield page


def say(page: Any, text: str) -> None:
    page.keyboard.type(text)
    page.keyboard.press("Enter")


def ended(page: Any) -> str:
    page.wait_for_selector("article.assistant:last-child:not([aria-busy])")
    return str(page.locator("article.assistant").last.inner_text())


def test_type_stream_edit_try_again_and_reload_by_keyboard_alone(page: Any) -> None:
    settings = {"max_tokens": "24", "temperature": "0", "probabilities": True}
    page.evaluate("value => localStorage.setItem('megalight.settings', value)", json.dumps(settings))
    page.reload()
    page.wait_for_selector("#model:text-is('model')")
    say(page, "hello")
    first = ended(page)
    assert page.locator("article.user").inner_text().startswith("You\nhello")
    say(page, "more")
    ended(page)
    assert page.locator("article").count() == 4
    # Edit the first message: what follows it goes.
    page.locator("article.user button").first.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("ControlOrMeta+A")
    say(page, "naïve")
    assert ended(page) != first
    assert page.locator("article").count() == 2
    again = page.get_by_role("button", name="Try again")
    before = page.locator("article.assistant").inner_text()
    again.focus()
    page.keyboard.press("Enter")
    assert ended(page) == before, "greedy"
    # Probabilities of tokens, by keyboard and pointer.
    page.get_by_role("button", name="Tokens").press("Enter")
    page.locator(".token").first.focus()
    assert "%" in page.locator("#alternatives").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator("#alternatives").inner_text().count("\n") >= 4
    page.locator(".token").nth(3).hover()
    assert page.locator("#alternatives").is_visible()
    page.reload()
    assert page.locator("article").count() == 2
    assert page.locator("article.user").inner_text().startswith("You\nnaïve")
    page.keyboard.press("Alt+n")
    assert page.locator("article").count() == 0
    page.keyboard.press("Alt+s")
    assert page.locator("#settings").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#settings").is_visible()


def test_an_answer_can_be_stopped(page: Any) -> None:
    # A stream without an end, as the small model ends soon.
    page.route("**/v1/chat/completions", lambda route: None)
    say(page, "hello")
    page.wait_for_selector("#stop:visible")
    page.keyboard.press("Escape")
    assert "stopped" in ended(page)


@pytest.mark.full
def test_a_server_that_is_gone_is_told(browser: Any, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = Process(folder, port)
    try:
        with opened(browser, server.url) as page:
            server.kill()
            say(page, "are you there?")
            assert "not whole" in ended(page)
            assert "The server is gone" in page.locator("#status").inner_text()
            server.start()
            page.wait_for_selector("#status", state="hidden")
            page.get_by_role("button", name="Try again").last.press("Enter")
            assert "not whole" not in ended(page)
    finally:
        server.kill()


def test_what_a_model_writes_stays_text(page: Any) -> None:
    def event(**delta: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": None if delta else "stop", "logprobs": None}
        return f"data: {json.dumps({'choices': [choice]})}\n\n"

    answers: list[str] = []

    def answer(route: Any) -> None:
        route.fulfill(body=answers[-1], content_type="text/event-stream")

    long = "word < *b* `c` \n" * 65_536
    for content in (HOSTILE, long):
        events = event(content=content, reasoning_content=HOSTILE) + event() + "data: [DONE]\n\n"
        answers.append(events)
        page.route("**/v1/chat/completions", answer)
        page.keyboard.type("go")
        page.keyboard.press("Enter")
        ended(page)
        page.unroute("**/v1/chat/completions")
    assert page.evaluate("window.bad") is None
    assert page.locator("main script, main img, main [onerror], main iframe").count() == 0
    assert page.locator("main a:not([href^=http])").count() == 0
    shown = page.locator("article.assistant").first
    assert "<script>window.bad = 1</script>" in shown.locator("pre code").inner_text()
    assert shown.locator("table strong").inner_text() == "c"
    assert len(page.locator("article.assistant").last.text_content()) > 900_000


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_wider_than_the_window(page: Any, theme: str, width: int, tmp_path: Path) -> None:
    page.set_viewport_size({"width": width, "height": 720})
    page.emulate_media(color_scheme=theme)
    messages = [{"role": "user", "content": "x" * 300}, {"role": "assistant", "content": HOSTILE + "y" * 300}]
    kept = json.dumps([{"id": "1", "messages": messages}])
    page.evaluate("value => localStorage.setItem('megalight.conversations', value)", kept)
    page.goto(page.url)
    page.wait_for_selector("#model:text-is('model')")
    assert page.locator("article").count() == 2
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelector('main').scrollWidth") <= width
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
    assert dark == (theme == "dark")
    folder = Path(os.environ.get("MEGALIGHT_SCREENSHOTS", tmp_path))
    page.screenshot(path=str(folder / f"{theme}-{width}.png"))
    page.keyboard.press("Alt+s")
    heights = page.evaluate("[...document.querySelectorAll('.grid input')].map(each => each.offsetHeight)")
    assert len({*heights}) == 1
    page.screenshot(path=str(folder / f"{theme}-{width}-settings.png"))
