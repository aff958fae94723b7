"""The page in a real browser, at the widths of a desk and of a phone. Needs Chromium."""

import json
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from hybrid.doctor import Sizes, replay

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")

PROBE = """<!doctype html><body style="margin:0">
<iframe style="width:1280px;height:900px;border:0"></iframe><iframe style="width:390px;height:900px;border:0"></iframe>
<p></p><script>
const frames = [...document.querySelectorAll('iframe')], found = [];
for (const frame of frames) {
  frame.onload = () => {
    const page = frame.contentDocument, root = page.documentElement;
    const ends = [...page.querySelectorAll('td,pre,p,svg')].map(e => e.getBoundingClientRect().right);
    found.push({
      width: root.clientWidth, needed: Math.max(root.scrollWidth, ...ends), title: page.title,
      bars: page.querySelectorAll('.bar').length,
      font: Math.min(...[...page.querySelectorAll('td,p,small')].map(e => parseFloat(getComputedStyle(e).fontSize))),
      loaded: frame.contentWindow.performance.getEntriesByType('resource').length,
    });
    document.querySelector('p').textContent = JSON.stringify(found);
  };
  frame.srcdoc = %s;
}
</script>"""


def browse(folder: Path, *arguments: str) -> str:
    command = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--virtual-time-budget=4000",
    ]
    command += [f"--user-data-dir={folder / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    lines = [{"prompt": f"It is 2026-11-26 10:{n:02d}:00. " + "a long text of many words " * 600} for n in range(12)]
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = replay(folder / "log.jsonl", Sizes(32768, 51511296), ["vllm", "hybrid", "bound"], ["1GB", "4GB"])
    report.write(folder / "report.html")
    return folder / "report.html"


def test_the_page_fits_a_desk_and_a_phone(page: Path) -> None:
    probe = page.with_name("probe.html")
    probe.write_text(PROBE % json.dumps(page.read_text()).replace("</", "<\\/"))
    shown = browse(page.parent, "--dump-dom", probe.as_uri())
    found = json.loads(shown[shown.index("<p>") + 3 : shown.index("</p>")])
    assert sorted(one["width"] for one in found) == [390, 1280]
    for one in found:
        assert one["title"] == "hybrid doctor" and one["loaded"] == 0
        assert one["needed"] <= one["width"] and one["bars"] > 8 and one["font"] >= 12


def test_a_screenshot_is_no_empty_page(page: Path) -> None:
    shot = page.with_name("shot.png")
    browse(page.parent, "--window-size=1280,1600", f"--screenshot={shot}", page.as_uri())
    data = shot.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (1280, 1600)
    assert len(data) > 30_000  # an empty page of that size has 7 kB
