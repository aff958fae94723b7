"""The page in a real browser: at the widths of a desk and of a phone, light and dark. Needs Chromium."""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from support.served import Poster

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")


def browse(folder: Path, *arguments: str) -> str:
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=4000", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module")
def used(post: Poster) -> Poster:
    """A server with requests that hit and that failed to."""
    for _ in range(2):
        for name in ("ann", "bob"):
            assert post("/v1/completions", prompt=f"Dear {name}, " + "the same words. " * 20, max_tokens=4).is_success
    return post


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)], ids=["desk", "phone"])
def test_the_page_shows_what_the_server_did(used: Poster, tmp_path: Path, width: int, dark: bool) -> None:
    theme = ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"] if dark else []
    shown = browse(tmp_path, f"--window-size={width},1800", *theme, "--dump-dom", used.address + "/")
    last = used.get("/live").json()["ended"][0]
    assert last["explain"] in shown and f"{last['cached_tokens']} tokens cached" in shown
    assert "pages cached" in shown and "hit rate" in shown and "srcdoc" in shown
    shot = tmp_path / "shot.png"
    browse(tmp_path, f"--window-size={width},1800", *theme, f"--screenshot={shot}", used.address + "/")
    data = shot.read_bytes()
    assert struct.unpack(">II", data[16:24]) == (width, 1800) and len(data) > 30_000
