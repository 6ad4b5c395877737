"""The diagrams, as a browser draws them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium.webdriver import Chrome

from tests.conftest import missing
from tests.support.docs.pages import ROOT
from tests.support.flower.browser import chromium
from tests.support.servers import ServerMissing

IMAGES = sorted((ROOT / "docs" / "images").glob("*.svg"))

#: Words nearer than 10 pixels to the edge of the drawing, or outside of the box that they belong to.
OUTSIDE = """
const drawing = document.documentElement.viewBox.baseVal;
const boxes = [...document.querySelectorAll('rect[stroke]')].map(box => box.getBBox());
const within = (words, box, margin) =>
  words.x >= box.x + margin && words.x + words.width <= box.x + box.width - margin
  && words.y >= box.y && words.y + words.height <= box.y + box.height;
const inBox = text => text.getAttribute('font-weight') && text.getAttribute('text-anchor') === 'middle';
return [...document.querySelectorAll('text')].filter(text => {
  const words = text.getBBox();
  return !within(words, drawing, 10) || (inBox(text) && !boxes.some(box => within(words, box, 4)));
}).map(text => text.textContent);
"""
INK = "return getComputedStyle(document.querySelector('text')).fill"


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    try:
        with chromium() as opened:
            yield opened
    except ServerMissing as error:
        raise missing(error, optional="chromium") from None


@pytest.mark.nightly
def test_words_stay_inside_their_frames(browser: Chrome) -> None:
    outside = {}
    for image in IMAGES:
        browser.get(image.as_uri())
        outside[image.name] = browser.execute_script(OUTSIDE)
    assert IMAGES
    assert outside == {image.name: [] for image in IMAGES}


def test_a_diagram_is_dark_on_a_dark_screen(browser: Chrome) -> None:
    browser.get(IMAGES[0].as_uri())
    light = browser.execute_script(INK)
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    assert light == "rgb(31, 41, 55)"
    assert browser.execute_script(INK) == "rgb(229, 231, 235)"
