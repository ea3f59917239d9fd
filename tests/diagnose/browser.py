"""Pages in a real browser: laid out at a given width, and looked at text by text.

::

    one start of Chromium -> a bare page with one frame per page and width -> a script outside the frames measures
    every text inside them -> findings as JSON in the dumped document

The pages themselves stay as they were written: the script that measures is not in them.
"""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

NAMES = ("chromium", "chromium-browser", "google-chrome")
LIMIT_SECONDS = 60.0

# Each list in what it returns should be empty, but for `texts`, the number of texts that were seen.
PROBE = """
const EDGE = 0.6;  // pixels; less is rounding

function rectangles(doc) {
  const found = [], walker = doc.createTreeWalker(doc.documentElement, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.data.trim() || ['style', 'script', 'title'].includes(parent.localName)) continue;
    if (!parent.checkVisibility({contentVisibilityAuto: true, visibilityProperty: true})) continue;
    const range = doc.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects())
      if (box.width > 0 && box.height > 0) found.push({node, parent, box, text: node.data.trim().slice(0, 60)});
  }
  return found;
}

function overlaps(found) {
  const sorted = [...found].sort((a, b) => a.box.top - b.box.top), bad = [];
  sorted.forEach((one, index) => {
    for (let next = index + 1; next < sorted.length; next++) {
      const other = sorted[next], a = one.box, b = other.box;
      if (b.top >= a.bottom - EDGE) break;
      if (one.node !== other.node && b.left < a.right - EDGE && a.left < b.right - EDGE)
        bad.push([one.text, other.text]);
    }
  });
  return bad;
}

function isInside(inner, outer) {
  return inner.left >= outer.left - EDGE && inner.right <= outer.right + EDGE
    && inner.top >= outer.top - EDGE && inner.bottom <= outer.bottom + EDGE;
}

function cutOff(win, found) {
  return found.filter(({parent, box}) => {
    for (let at = parent; at && at !== win.document.body; at = at.parentElement) {
      const style = win.getComputedStyle(at);
      if (style.overflowX === 'visible' && style.overflowY === 'visible') continue;
      if (at.localName !== 'text' && !isInside(box, at.getBoundingClientRect())) return true;
    }
    return false;
  }).map(one => one.text);
}

function luminance(colour) {
  const [r, g, b] = colour.match(/[0-9.]+/g).map(Number).map(part => part / 255)
    .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

function contrast(win, {parent}) {
  const style = win.getComputedStyle(parent), ink = parent.localName === 'text' ? style.fill : style.color;
  let at = parent, ground = 'rgba(0, 0, 0, 0)';
  for (; at && ground === 'rgba(0, 0, 0, 0)'; at = at.parentElement) ground = win.getComputedStyle(at).backgroundColor;
  const [dark, light] = [luminance(ink), luminance(ground)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
}

function examine(win) {
  const doc = win.document, found = rectangles(doc), wide = win.innerWidth;
  const outside = found.filter(({box}) => box.left < -EDGE || box.right > wide + EDGE).map(one => one.text);
  if (doc.documentElement.scrollWidth > wide) outside.push(`the page is ${doc.documentElement.scrollWidth} wide`);
  const size = one => parseFloat(win.getComputedStyle(one.parent).fontSize);
  return {
    texts: found.length,
    overlaps: overlaps(found),
    outside,
    cut: cutOff(win, found),
    small: found.filter(one => size(one) < 13).map(one => one.text),
    faint: found.filter(one => contrast(win, one) < 4.5).map(one => [one.text, contrast(win, one)]),
    requests: win.performance.getEntriesByType('resource').map(entry => entry.name),
  };
}

const findings = {}, frames = [];
for (const [name, width, text] of JSON.parse(document.getElementById('pages').textContent)) {
  const frame = document.createElement('iframe');
  frame.style.cssText = `width: ${width}px; height: 1000px; border: 0`;
  frame.srcdoc = text;
  document.body.append(frame);
  frames.push([name, width, frame]);
}
addEventListener('load', () => {
  for (const [name, width, frame] of frames) findings[`${name} ${width}`] = examine(frame.contentWindow);
  document.body.innerHTML = '<pre id="findings"></pre>';
  document.getElementById('findings').textContent = JSON.stringify(findings);
});
"""


@dataclass(frozen=True)
class Findings:
    """What is wrong with a page at a width; each is empty on a good page."""

    texts: int
    overlaps: list[list[str]]
    outside: list[str]
    cut: list[str]
    small: list[str]
    faint: list[list[object]]
    requests: list[str]

    @property
    def wrong(self) -> dict[str, object]:
        """All that is wrong, by kind."""
        return {name: value for name, value in vars(self).items() if name != "texts" and value}


def find_browser() -> str | None:
    """Give the path of a Chromium, if there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def look_at(
    pages: dict[str, str], widths: list[int], folder: Path, *, is_dark: bool = False
) -> dict[tuple[str, int], Findings]:
    """Lay pages out in one start of the browser and examine every text.

    Args:
        pages: Name -> HTML.
        widths: Of the window, in pixels.
        folder: Empty; the browser keeps its things there.
        is_dark: Whether the reader prefers dark pages.

    Returns:
        (name, width) -> what is wrong.
    """
    listed = json.dumps([[name, width, text] for name, text in pages.items() for width in widths]).replace(
        "<", "\\u003c"
    )
    host = folder / "host.html"
    host.write_text(
        '<!DOCTYPE html><html><head><meta charset="utf-8"></head><body>'
        f'<script type="application/json" id="pages">{listed}</script><script>{PROBE}</script></body></html>',
        encoding="utf-8",
    )
    dumped = _dump(host, folder / "profile", is_dark=is_dark)
    found = re.search(r'<pre id="findings">(.*?)</pre>', dumped, flags=re.S)
    assert found, f"the script did not come to its end:\n{dumped[-2000:]}"
    results = json.loads(html.unescape(found[1]))
    return {(name, width): Findings(**results[f"{name} {width}"]) for name in pages for width in widths}


def _dump(page: Path, profile: Path, *, is_dark: bool) -> str:
    """Open a page, and give the document as it is after loading; no process is left, whatever happens."""
    browser = find_browser()
    assert browser is not None
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={profile}",
        f"--blink-settings=preferredColorScheme={0 if is_dark else 1}", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    # A group of its own, so that it can be ended with all that it starts.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as process:
        try:
            dumped, _ = process.communicate(timeout=LIMIT_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _end_helpers(profile)
    assert process.returncode == 0, f"{browser} ended with {process.returncode}"
    return dumped


def _end_helpers(profile: Path) -> None:
    """End what the browser started outside its group, known by the profile in its command line."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = [one for one in psutil.process_iter(["cmdline"]) if str(profile) in " ".join(one.info["cmdline"] or [])]
        if not left:
            return
        for one in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(left, timeout=1)
    raise AssertionError(f"the browser has left processes: {left}")
