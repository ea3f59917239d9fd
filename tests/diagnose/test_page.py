"""The page: well formed, safe, complete, written as a whole; and in a real browser nothing overlaps or is cut off."""

from __future__ import annotations

import itertools
import os
import re
import stat
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_gpufeed.diagnose.counters import EpochCounters, Span
from lightning_gpufeed.diagnose.judgement import Cause, Cure, Verdict
from lightning_gpufeed.diagnose.page import MAX_EPOCHS, page_text, write_page
from lightning_gpufeed.diagnose.page_style import DARK, LIGHT
from lightning_gpufeed.diagnose.page_svg import draw_timeline, prose, shown_steps
from lightning_gpufeed.diagnose.records import PARTS, EpochRecord, printable
from tests.diagnose import browser
from tests.diagnose.browser import find_browser, look_at
from tests.diagnose.samples import (
    AMPLIFIED,
    COMMAND,
    COMPUTE,
    LONG,
    ON_DEVICE,
    TINY_SHARES,
    UNKNOWN_ALL,
    epochs,
    timeline,
)
from tests.doubles import run_forked

EMPTY = EpochRecord(EpochCounters(), Verdict(Cause.COMPUTE, 0.0, notes=("no step was measured",)), "nothing")

PAGES = {
    "one epoch": page_text([AMPLIFIED]),
    "sixty epochs": page_text(epochs(60)),
    "sixty epochs on a device": page_text(epochs(60, ON_DEVICE)),
    "compute": page_text([COMPUTE]),
    "unknown": page_text([UNKNOWN_ALL]),
    "long": page_text([LONG]),
    "long, opened": page_text([LONG, *epochs(3, LONG)], title="A long title of a page " * 9).replace(
        "<details>", "<details open>"
    ),
    "tiny": page_text([TINY_SHARES]),
    "empty": page_text([EMPTY]),
}
VOID = {"meta", "br"}
WIDTHS = [1280, 800]


class Reading(HTMLParser):
    """A page as a parser sees it: its tags, attributes and texts, and that every tag is closed in its order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        assert len({name for name, _ in attrs}) == len(attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def rows(page: str, heading: str) -> list[list[str]]:
    """Give the cells of the table below a heading."""
    section = page.split(f"<h2>{heading}</h2>")[1].split("</section>")[0]
    body = section.split("<tbody>")[1]
    return [
        [Reading(cell).text for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]
        for row in re.findall(r"<tr[^>]*>(.*?)</tr>", body)
    ]


# In a browser ----------------------------------------------------------------------------------------------

# Each breaks the page in one way; the browser is to see it.
BREAKS = {
    "overlaps": ".verdict { margin-bottom: -30px; }",
    "outside": "code { white-space: nowrap; }",
    "cut": "li { overflow: hidden; height: 9px; }",
    "small": "td { font-size: 12px; }",
    "faint": ":root { --muted: #a0a0a0; }",
    "requests": "body { background: url(http://localhost/x.png); }",
}
BROKEN = {name: PAGES["long"].replace("</style>", f"{rule}</style>") for name, rule in BREAKS.items()}
CROWDED = re.sub(r'x="[^"]*"([^>]*>99999993<)', r'x="9%"\1', PAGES["long"])


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Every page at every width, and in the dark, by two starts of the browser."""
    if find_browser() is None:
        pytest.skip("needs Chromium (Debian: apt-get install chromium)")
    light = look_at(PAGES | BROKEN | {"crowded": CROWDED}, WIDTHS, tmp_path_factory.mktemp("light"))
    dark = look_at(PAGES | {"faint": BROKEN["faint"]}, WIDTHS[1:], tmp_path_factory.mktemp("dark"), is_dark=True)
    return {"light": light, "dark": dark}


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (800, "light"), (800, "dark")])
@pytest.mark.parametrize("name", PAGES)
def test_in_a_browser_nothing_overlaps_is_cut_off_faint_small_or_asked_for_elsewhere(seen, name, width, scheme):
    findings = seen[scheme][name, width]
    assert findings.texts > 20
    assert findings.wrong == {}


@pytest.mark.parametrize("kind", BREAKS)
def test_the_browser_sees_a_page_that_is_broken(seen, kind):
    for width in WIDTHS:
        assert getattr(seen["light"][kind, width], kind)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_browser_sees_numbers_that_run_into_each_other_in_the_drawing(seen, width):
    assert ["99999990", "99999993"] in [sorted(pair) for pair in seen["light"]["crowded", width].overlaps]


def test_the_browser_sees_the_page_of_a_reader_who_prefers_the_dark(seen):
    # On the dark ground that grey is well read, on the light one it is not.
    assert not seen["dark"]["faint", 800].faint


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_browser_that_hangs_is_ended_with_all_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(browser, "LIMIT_SECONDS", 1.0)
    monkeypatch.setattr(browser, "PROBE", "for (;;);")
    with pytest.raises(subprocess.TimeoutExpired):  # that no process is left is seen by the check around every test
        look_at({"empty": PAGES["empty"]}, [800], tmp_path)


# Well formed and safe --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PAGES)
def test_every_tag_is_closed(name):
    assert "main" in Reading(PAGES[name]).tags


@pytest.mark.parametrize("name", PAGES)
def test_nothing_in_a_page_points_outside_or_runs(name):
    page, reading = PAGES[name], Reading(PAGES[name])
    assert not {"script", "link", "img", "image", "iframe", "object", "embed", "use", "base", "form"} & {*reading.tags}
    assert not [attribute for attribute, _ in reading.attributes if attribute.startswith("on") or "href" in attribute]
    assert not {"src", "srcset", "data", "action"} & {attribute for attribute, _ in reading.attributes}
    assert set(re.findall(r"url\((.)", page)) == {"#"}  # patterns of the page itself
    assert "@import" not in page
    assert "http" not in page


def test_a_page_says_its_language_its_characters_and_its_title():
    page = page_text([AMPLIFIED], title="Run <7>")
    assert page.startswith('<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">')
    assert "<title>Run &lt;7&gt;</title>" in page
    assert "<h1>Run &lt;7&gt;</h1>" in page


def with_texts(text: str) -> EpochRecord:
    """Put a text wherever one may come from outside."""
    counters = ON_DEVICE.counters
    file = replace(
        counters.loader.files[0], path=text, key=text, dtype=text, filters=(text,), order=text, command=text or None
    )
    loader = replace(counters.loader, name=text, start_method=text, files=(file,))
    spans = tuple(replace(span, phase=text) for span in counters.timeline)
    cure = Cure(text, text, 2.0, 1.5, 2.5)
    return EpochRecord(
        replace(counters, loader=loader, timeline=spans),
        Verdict(Cause.DISK, 0.5, figures=(text,), cures=(cure,), notes=(text,)),
        line=text,
    )


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>",
        "\"'><img src=x onerror=alert(1)>",
        "</style></title></main><b>",
        "&lt;b&gt; &amp;amp;",
        "<!-- -->",
        "data/\udcff\x00\x1b[2J\u202e.h5",
        "`</code><i>`",
    ],
)
def test_a_text_from_outside_stays_a_text(text):
    reading = Reading(page_text([with_texts(text)], title=text))
    assert not {"script", "img", "b", "i"} & {*reading.tags}
    shown = printable(text).strip("`")
    # Title twice, line, figure, cure's name and action, note, and seven facts of the loader and its file.
    assert reading.text.count(shown) >= 14
    page_text([with_texts(text)], title=text).encode("utf-8")


# Without backticks, which set code; and not a number before a unit, which are held together.
@settings(max_examples=30)
@given(st.text(st.characters(exclude_characters="`% "), min_size=1))
def test_whatever_a_text_holds_the_page_is_well_formed_and_shows_it(text):
    reading = Reading(page_text([with_texts(text)], title=text))
    assert reading.text.count(printable(text)) >= 14


def test_commands_and_calls_are_set_as_code():
    assert prose(f"{COMMAND} once, and use it", [COMMAND]) == f"<code>{COMMAND}</code> once, and use it"
    assert prose(f"{COMMAND} --chunk-bytes 12 once", [COMMAND]) == f"<code>{COMMAND} --chunk-bytes 12</code> once"
    assert prose("run `gpufeed inspect a<b.h5`") == "run <code>gpufeed inspect a&lt;b.h5</code>"
    assert prose("DataLoader(num_workers=4, x='y') or OOMRecovery(), on 2 core(s)") == (
        "<code>DataLoader(num_workers=4, x=&#x27;y&#x27;)</code> or <code>OOMRecovery()</code>, on 2 core(s)"
    )
    assert prose("no `end") == "no `end"


def test_a_number_stays_on_the_line_of_its_unit():
    assert prose("63 % of 12 ms, 9.6 MB, 3 samples") == "63&nbsp;% of 12&nbsp;ms, 9.6&nbsp;MB, 3 samples"


# What it says ----------------------------------------------------------------------------------------------


def test_from_top_to_bottom_it_goes_from_the_verdict_to_the_files():
    page = page_text([*epochs(2, ON_DEVICE), ON_DEVICE])
    assert re.findall(r"<h2>(.*?)</h2>", page) == [
        "The figures that say so",
        "What would help, in the order to try",
        "Also noticed",
        "A few steps",
        "Where the time of a step goes",
        "What the readers did",
        "Machine",
        "Loader",
        "File",
    ]
    head = Reading(re.search(r"<header.*</header>", page, flags=re.S)[0]).text
    assert "conversion on the host: the step waits 38\xa0% of the time for data" in head
    assert "epoch 12 · rank 3 of 4 (counted from 0) · 5,004 steps of 78.1 ms" in head
    assert ON_DEVICE.line in head


def test_cures_come_in_order_with_what_to_do_and_their_gain():
    cures = rows(page_text([AMPLIFIED]), "What would help, in the order to try")
    assert cures == [
        ["1", f"chunk order{COMMAND} once, and train on it with H5DataModule", "2.1×", "1.8 to 2.4×", ""],
        ["2", "4 workersDataLoader(num_workers=4, persistent_workers=True)", "1.2×", "0.9 to 1.4×", ""],
    ]
    assert "up to 2.7 is free" in page_text([AMPLIFIED])


def test_without_a_cure_it_says_that_there_is_none():
    assert "Nothing to change" in page_text([COMPUTE])
    assert "No cure follows from this." in page_text([UNKNOWN_ALL])


@pytest.mark.parametrize(
    "record", [AMPLIFIED, ON_DEVICE, TINY_SHARES, COMPUTE], ids=["amplified", "on_device", "tiny", "compute"]
)
def test_the_shares_in_figures_add_up_in_every_row(record):
    page = page_text(epochs(4, record))
    found = [row for row in rows(page, "Where the time of a step goes") if len(row) > 1]
    assert len(found) == 4
    for row in found:
        assert sum(round(10 * float(cell.removesuffix(" %"))) for cell in row[3:] if cell.endswith("%")) == 1000


def test_the_bars_are_as_long_as_the_figures_say():
    page = page_text(epochs(3, ON_DEVICE))
    bars = re.findall(r'<svg class="shares".*?</svg>', page)
    for bar, row in zip(
        bars, [row for row in rows(page, "Where the time of a step goes") if len(row) > 1], strict=True
    ):
        blocks = re.findall(r'<rect class="(\w+)" x="([\d.]+)%" y="0" width="([\d.]+)%"', bar)
        assert [name for name, _, _ in blocks] == list(PARTS)
        edges = np.cumsum([float(width) for _, _, width in blocks])
        # Written with three digits.
        np.testing.assert_allclose([float(x) for _, x, _ in blocks], [0, *edges[:-1]], atol=0.01)
        assert edges[-1] == pytest.approx(100, abs=0.01)
        shown = [float(cell.removesuffix(" %")) for cell in row[3:]]
        np.testing.assert_allclose([float(width) for _, _, width in blocks], shown, atol=0.1)


def test_a_part_that_no_epoch_has_takes_no_column_and_what_is_unknown_says_so():
    page = page_text([AMPLIFIED])
    head = page.split("share of its time")[1].split("</thead>")[0]
    assert [name for name in PARTS if f">{name}</th>" in head.replace("</svg>", ">")] == [
        "wait", "copy", "compute", "hooks", "other",
    ]  # fmt: skip
    host_after_device = [replace(ON_DEVICE, counters=replace(ON_DEVICE.counters, epoch=0)), AMPLIFIED]
    assert rows(page_text(host_after_device), "Where the time of a step goes")[1][6:8] == ["unknown", "unknown"]


def test_the_figures_of_the_readers_are_shares_of_the_time_they_were_watched():
    [row] = rows(page_text([AMPLIFIED]), "What the readers did")
    assert row == [
        "epoch 3", "read amplification", "2 workers", "4.0 %", "49.0 %", "45.0 %", "2.0 %", "31.90", "12",
    ]  # fmt: skip


def test_counters_that_could_not_be_had_are_unknown():
    [row] = rows(page_text([UNKNOWN_ALL]), "What the readers did")
    assert row == ["epoch 1so far", "loader-bound", "3 workers (3 not watched)", *["unknown"] * 6]
    assert "<dt>device in use</dt><dd>unknown</dd>" in page_text([UNKNOWN_ALL])


def test_machine_loader_and_files_are_listed():
    text = Reading(page_text([ON_DEVICE])).text
    for fact in (
        "cores to use16", "waiting for a core41.2 %", "device in use52.4 %", "of it free12 GiB", "device memory80 GiB",
        "torch.utils.data.DataLoader", "8 worker processes", "started byfork", "page-lockedyes", "36.8 MiB",
        "data/train.h5", "images, uint8", "32 × 224 × 224 × 3: 32 samples share a chunk", "blosc-zstd", "100.0 %",
    ):  # fmt: skip
        assert fact in text
    assert f"<dd><code>{COMMAND}</code></dd>" in page_text([AMPLIFIED])


# Many epochs -----------------------------------------------------------------------------------------------


def test_the_first_epoch_is_marked_and_kept_apart():
    found = rows(page_text(epochs(3)), "Where the time of a step goes")
    assert [row[0] for row in found] == ["epoch 0first, cold", "", "epoch 1", "epoch 2"]


def test_of_a_thousand_epochs_the_first_and_the_last_are_shown_and_the_rest_counted():
    page = page_text(epochs(1000))
    for heading in ("Where the time of a step goes", "What the readers did"):
        names = [row[0] for row in rows(page, heading)]
        last = [f"epoch {number}" for number in range(1000 - MAX_EPOCHS, 1000)]
        assert names == ["epoch 0first, cold", "959 epochs left out", *last]
    assert len(page) < 150_000


@pytest.mark.parametrize(("number", "left_out"), [(MAX_EPOCHS + 1, None), (MAX_EPOCHS + 2, "1 epoch left out")])
def test_no_epoch_is_left_out_while_there_is_room(number, left_out):
    names = [row[0] for row in rows(page_text(epochs(number)), "What the readers did")]
    assert [name for name in names if "left out" in name] == ([left_out] if left_out else [])
    assert len([name for name in names if name.startswith("epoch")]) == min(number, MAX_EPOCHS + 1)


def test_an_epoch_that_is_over_replaces_what_was_said_on_the_way():
    first, second = epochs(2)
    on_the_way = [first, replace(second, is_interim=True)]
    assert [row[0] for row in rows(page_text(on_the_way), "What the readers did")][-1] == "epoch 1so far"
    assert [row[0] for row in rows(page_text([*on_the_way, second]), "What the readers did")][-1] == "epoch 1"


# Timeline --------------------------------------------------------------------------------------------------


def test_host_and_device_have_a_lane_each():
    page = page_text([ON_DEVICE])
    assert re.findall(r'<text x="0" y="\d+">(\w+)</text>', page) == ["step", "time", "host", "device"]
    assert page_text([AMPLIFIED]).count('<rect class="lane"') == 1
    assert "A few steps" not in page_text([COMPUTE])


def test_the_timeline_is_of_the_latest_epoch_that_has_one():
    later = replace(AMPLIFIED, counters=replace(AMPLIFIED.counters, epoch=4, timeline=()))
    assert "Epoch 3, steps 0 to 3" in page_text([AMPLIFIED, later])


def test_every_stretch_lies_where_its_times_say():
    spans = shown_steps(timeline(has_device=True, num_steps=3))
    whole = max(span.end for span in spans)
    drawn = re.findall(
        r'<rect class="(\w+)" x="([\d.]+)%" y="(\d+)" width="([\d.]+)%" height="34"><title>', draw_timeline(spans)
    )
    tops = {"host": 26, "device": 70}
    expected = [
        (one.phase, 100 * one.begin / whole, tops[one.lane], 100 * (one.end - one.begin) / whole) for one in spans
    ]
    assert sorted((name, int(top)) for name, _, top, _ in drawn) == sorted((name, top) for name, _, top, _ in expected)
    places = sorted((float(x), float(width)) for _, x, _, width in drawn)
    # Written with three digits.
    np.testing.assert_allclose(places, sorted((x, width) for _, x, _, width in expected), atol=0.001)


@given(
    st.lists(
        st.builds(
            Span,
            lane=st.sampled_from(["host", "device", "other"]),
            phase=st.sampled_from(["sync", "wait", "copy", "compute", "hooks"]),
            begin=st.floats(-1e3, 1e6),
            end=st.floats(-1e3, 1e6),
            step=st.integers(0, 10**9),
        ),
        max_size=60,
    )
)
def test_any_timeline_can_be_drawn_within_its_width(spans):
    shown = shown_steps(spans)
    assert len({span.step for span in shown}) <= 16
    if not shown:
        return
    drawn = draw_timeline(shown)
    assert Reading(drawn).tags
    for x, width in re.findall(r'x="([\d.]+)%" y="\d+" width="([\d.]+)%"', drawn):
        assert 0 <= float(x) <= 100
        assert float(x) + float(width) <= 100.01
    assert 1 <= len(re.findall(r'text-anchor="\w+">[\d.,]+ (?:s|ms|us)<', drawn)) <= 7


# Colours ---------------------------------------------------------------------------------------------------

# What is left of a colour (linear RGB) for those who lack one kind of cone: Machado, Oliveira, Fernandes, "A
# physiologically-based model for simulation of color vision deficiency", 2009, table 1, full severity.
EYES = {
    "usual": np.eye(3),
    "protanope": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranope": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanope": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# Linear RGB to Oklab, in which equal distances look about equally different (Ottosson, 2020).
TO_CONES = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
            [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
TO_LAB = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
          [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    dark, light = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (light + 0.05) / (dark + 0.05)


def seen_by(eye: str, colour: str) -> np.ndarray:
    left = np.clip(np.array(EYES[eye]) @ linear(colour), 0, 1)
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_CONES) @ left)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("eye", EYES)
def test_any_two_parts_can_be_told_apart_by_any_eye(palette, eye):
    solid = [name for name in PARTS if name not in ("idle", "other")]  # those two are patterns
    for one, other in itertools.combinations(solid, 2):
        # A difference of 0.02 is just seen side by side; six times that also across a page.
        assert np.linalg.norm(seen_by(eye, palette[one]) - seen_by(eye, palette[other])) > 0.12, (one, other)


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_every_part_stands_out_from_the_ground(palette):
    assert {name for name in PARTS if contrast(palette[name], palette["ground"]) < 3} == set()  # WCAG 2.1, 1.4.11


# Writing ---------------------------------------------------------------------------------------------------


def test_the_page_is_written_with_folders_on_the_way_and_the_rights_of_any_file(tmp_path):
    path = tmp_path / "reports" / "run 7" / "feed.html"
    write_page(path, [AMPLIFIED], title="Run 7")
    assert path.read_text(encoding="utf-8") == page_text([AMPLIFIED], title="Run 7")
    assert list(path.parent.iterdir()) == [path]
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_whoever_reads_the_page_while_it_is_replaced_reads_the_whole_old_one(tmp_path):
    path = tmp_path / "feed.html"
    write_page(path, epochs(1))
    with path.open(encoding="utf-8") as old:
        beginning = old.read(100)
        write_page(path, epochs(50))
        assert beginning + old.read() == page_text(epochs(1))
    assert path.read_text(encoding="utf-8") == page_text(epochs(50))


def test_behind_a_link_the_file_is_replaced_and_not_the_link(tmp_path):
    (tmp_path / "there").mkdir()
    link = tmp_path / "latest.html"
    link.symlink_to(tmp_path / "there" / "feed.html")
    write_page(link, [AMPLIFIED])
    assert link.is_symlink()
    assert (tmp_path / "there" / "feed.html").read_text(encoding="utf-8") == page_text([AMPLIFIED])


@pytest.fixture(scope="module")
def failed(tmp_path_factory) -> dict[str, tuple[Path, str]]:
    """Folders in which a page was to be replaced by one for which there was no room, and how that ended."""
    setup = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from lightning_gpufeed.diagnose.page import write_page
from tests.diagnose.samples import epochs
"""
    case = "write_page({path!r}, epochs(1)); resource.setrlimit(resource.RLIMIT_FSIZE, (9000, 9000)); {more}"
    endings = {
        "error": "write_page({path!r}, epochs(50))",
        "kill": "signal.signal(signal.SIGXFSZ, signal.SIG_DFL); write_page({path!r}, epochs(50))",
    }
    folders = {name: tmp_path_factory.mktemp(name) for name in endings}
    cases = {
        name: case.replace("{more}", more).replace("{path!r}", repr(str(folders[name] / "feed.html")))
        for name, more in endings.items()
    }
    ended = run_forked(setup, cases)
    return {name: (folders[name], f"{ended[name].code} {ended[name].last_line}") for name in endings}


def test_a_page_that_cannot_be_written_leaves_the_old_one_and_nothing_else(failed):
    folder, ending = failed["error"]
    assert ending.startswith("1 OSError: ")
    assert "File too large" in ending
    assert os.listdir(folder) == ["feed.html"]
    assert (folder / "feed.html").read_text(encoding="utf-8") == page_text(epochs(1))


def test_a_kill_in_the_middle_of_writing_leaves_the_old_page(failed):
    folder, ending = failed["kill"]
    assert ending.startswith("-25 ")  # SIGXFSZ, at byte 9000
    assert (folder / "feed.html").read_text(encoding="utf-8") == page_text(epochs(1))
    [part] = [name for name in os.listdir(folder) if name != "feed.html"]
    assert (folder / part).stat().st_size == 9000


def test_without_a_record_it_says_when_to_write(tmp_path):
    with pytest.raises(ValueError, match="at least one EpochRecord, got none: write it after the first epoch"):
        write_page(tmp_path / "feed.html", [])
    assert not list(tmp_path.iterdir())
