"""The page in a browser: it looks like something, raises nothing, fits a phone, and its script does what it says."""

import io
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium to look at the page with")

OPTIONS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
]
HEIGHT = 1600
NARROWEST_WINDOW = 500  # a narrower page is looked at in a frame

# Acts as a reader does, and tells what came of it.
READER = """
Element.prototype.setPointerCapture = () => {};  // a made-up pointer cannot be captured
const seen = {};
const panel = document.querySelector(".panel"), curve = panel.querySelector(".curve");
const at = (type, part) => {
  const box = curve.getBoundingClientRect();
  const place = { clientX: box.left + part * box.width, clientY: box.top + box.height / 2 };
  curve.dispatchEvent(new PointerEvent(type, { ...place, bubbles: true, pointerId: 1 }));
};
const steps = () => [...panel.querySelectorAll(".ticks text")].map((text) => text.textContent).join(" ");
const view = () => panel.querySelector(".plot").getAttribute("viewBox");
seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
seen.row = document.querySelector(".runs tbody tr:nth-child(2)").getBoundingClientRect().height;
seen.series = document.querySelectorAll(".panel .series").length;
const before = [steps(), view()];
at("pointermove", 0.5);
seen.readout = panel.querySelector(".readout").textContent;
at("pointerdown", 0.4); at("pointermove", 0.8); at("pointerup", 0.8);
const reset = document.getElementById("reset");
seen.zoomed = steps() !== before[0] && view() !== before[1] && !reset.hidden;
seen.width = Number(view().split(" ")[2]);
reset.click();
const numbers = (text) => text.split(" ").map(Number).map((number) => Math.round(1e6 * number) / 1e6).join(" ");
seen.restored = steps() === before[0] && numbers(view()) === numbers(before[1]) && reset.hidden;
at("pointerleave", 0.5);
seen.closed = panel.querySelector(".readout") === null;
document.querySelector(".runs-legend button").click();
seen.hidden = document.querySelectorAll(".series[hidden]").length;
seen.drawn = getComputedStyle(document.querySelector(".series[hidden]")).display;
document.querySelector(".classes button").click();
const scatter = document.querySelector(".scatter");
seen.faded = scatter.querySelectorAll(".class.faded").length;
document.querySelector(".classes button").click();
seen.faded_after = scatter.querySelectorAll(".class.faded").length;
console.log("SEEN " + JSON.stringify(seen));
"""


@pytest.fixture
def browse(tmp_path):
    """``browse(whole, width, dark)``: the page's picture, and what it wrote to the console."""

    def look(text, width, dark=False):
        page = tmp_path / "page.html"
        page.write_text(text)
        if width < NARROWEST_WINDOW:
            page = tmp_path / "frame.html"
            style = f"width:{width}px;height:{HEIGHT}px;border:0"
            page.write_text(f'<!DOCTYPE html><body style="margin:0"><iframe src="page.html" style="{style}"></iframe>')
        picture = tmp_path / "picture.png"
        window = f"--window-size={max(width, NARROWEST_WINDOW)},{HEIGHT}"
        scheme = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        command = [BROWSER, *OPTIONS, window, *scheme, profile, f"--screenshot={picture}", page.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert picture.exists(), done.stderr[-2000:]
        image = Image.open(io.BytesIO(picture.read_bytes())).convert("RGB").crop((0, 0, width, HEIGHT))
        return np.asarray(image), re.findall(r":CONSOLE:\d+\] (.*)", done.stderr)

    return look


def test_it_looks_like_something_and_raises_nothing(whole, browse):
    for width, dark in ((1200, False), (390, True)):
        picture, console = browse(whole, width, dark)
        assert console == []
        page = picture[:8, :8].mean()
        assert page < 60 if dark else page > 230  # the colour scheme came through
        unlike = (np.abs(picture.astype(int) - picture[0, 0]).max(axis=2) > 40).mean()
        assert unlike > 0.02  # there is writing on it
        bands = picture.reshape(8, HEIGHT // 8, width, 3)
        assert sum(band.std() > 3 for band in bands) >= 6  # and not only at the top
        saturated = np.ptp(picture.astype(int), axis=2) > 60
        assert saturated.mean() > 0.0005  # the runs have their colours


def test_the_policy_lets_no_other_script_run(whole, browse):
    _, console = browse(whole.replace("</body>", "<script>console.log('ran')</script></body>"), 1200)
    assert len(console) == 1 and "Content Security Policy" in console[0]


def test_the_script_does_what_the_page_says_and_nothing_is_wider_than_a_phone(whole, browse):
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", whole)
    _, console = browse(text.replace("</body>", f"<script>{{{READER}}}</script></body>"), 390)
    assert len(console) == 1, console
    seen = json.loads(re.search(r'"SEEN (\{.*\})", source', console[0])[1])
    assert seen["overflow"] <= 0 and seen["row"] < 60  # pixels: a line or two of writing
    assert re.fullmatch(r"step \d+iecl [\d.-]+moco [\d.-]+warm [\d.-]+", seen["readout"])
    assert seen["zoomed"] and 300 < seen["width"] < 600  # two fifths of the drawing, whose plot is not all of it
    assert seen["restored"] and seen["closed"]
    assert 0 < seen["hidden"] < seen["series"] and seen["drawn"] == "none"
    assert (seen["faded"], seen["faded_after"]) == (2, 0)
