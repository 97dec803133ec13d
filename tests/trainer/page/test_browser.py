"""The page in a real browser: values under the pointer, keys, groups, themes, widths, and nothing in the console."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sparkgrpo.trainer.report import write_report

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield launched
        launched.close()


def opened(browser: Any, path: Path, *, width: int, scheme: str = "light") -> tuple[Any, list[str]]:
    page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
    faults: list[str] = []
    page.on("console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith("file:") else faults.append(request.url))
    page.goto(path.as_uri())
    return page, faults


@pytest.mark.parametrize("width", [1280, 360])
@pytest.mark.parametrize("which", ["hostile_run", "long_run"])
def test_report(browser: Any, request: pytest.FixtureRequest, width: int, which: str) -> None:
    folder = request.getfixturevalue(which)
    page, faults = opened(browser, write_report(folder, folder / "report.html"), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    area = page.locator("figure.chart:not(.off) .area").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    assert page.locator("#step").text_content().startswith("step ")
    shown = page.locator("figure.chart:not(.off) output").all_text_contents()
    assert shown[0] not in ("", "-") and all(text != "" for text in shown)
    assert page.locator(".cross:visible").count() == page.locator("figure.chart:not(.off)").count()
    at = page.locator("#step").text_content()
    page.locator("figure.chart:not(.off)").first.focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#step").text_content() != at
    page.locator("details.group summary").first.click()
    assert page.locator("details.group pre").first.is_visible()
    page.locator("details:has(#all-values) summary").click()
    page.locator("#all-values tr").nth(20).wait_for()
    assert page.evaluate("window.hit") is None
    assert faults == []


def test_themes(browser: Any, long_run: Path) -> None:
    path = write_report(long_run, long_run / "report.html")
    colour = "getComputedStyle(document.body).backgroundColor"
    light, _ = opened(browser, path, width=800)
    dark, _ = opened(browser, path, width=800, scheme="dark")
    by_preference = light.evaluate(colour), dark.evaluate(colour)
    assert by_preference[0] != by_preference[1]
    light.locator("#theme").click()
    assert light.evaluate(colour) == by_preference[0]
    light.locator("#theme").click()
    assert light.evaluate(colour) == by_preference[1] and light.locator("#theme").text_content() == "theme: dark"
