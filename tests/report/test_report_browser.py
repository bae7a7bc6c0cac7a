"""The pages in a real browser: no request leaves them, axe finds nothing, labels neither overlap nor fall off.

Skipped where no Chromium is installed (Debian: apt-get install chromium); playwright's own browser is taken as well.
"""

import os
import shutil

import pytest
from runs_for_tests import AUDIT, HOSTILE, RECIPE, SAMPLES, leave_run, log_of

from hf_posttrain import report
from hf_posttrain.report import compare

LONG = "a very long word without any space: " + "x" * 400 + "\n" + "many words " * 200
SIZES = {"wide": (1280, "light"), "phone": (400, "dark"), "narrow": (360, "light")}


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        own = started.chromium.executable_path
        names = ("chromium", "chromium-browser", "google-chrome")
        found = next((path for name in names if (path := shutil.which(name))), own if os.path.exists(own) else None)
        if found is None:
            pytest.skip("no Chromium on this machine")
        sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
        chromium = started.chromium.launch(executable_path=found, args=sandbox)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """{"report": file, "compare": file} of runs with everything that a page can show, some of it hostile or long."""
    folder = tmp_path_factory.mktemp("runs")
    metrics = {
        "rewards/chosen": lambda step: 1e-5 * step, "rewards/rejected": lambda step: -step,
        "tokens_per_second": lambda step: 41_000 + step, "peak_memory_gib": lambda step: 31.25,
        "logps/chosen": lambda step: -123456.0 - step, "custom": lambda step: 1 - 1e-4 * step,
    }  # fmt: skip
    log = log_of(120, **metrics)
    samples = [*SAMPLES, {"prompt": HOSTILE, "before": LONG, "after": "", "expected": None}]
    run = {"warnings": [{"step": 3, "message": LONG}], "versions": {"torch": "2.13.0"}, "engine": "single"}
    for name in ("first", "second-run-with-a-long-name"):
        leave_run(folder / name, log, samples=samples, audit=AUDIT, run=run,
                  recipe=RECIPE | {"train": RECIPE["train"] | {"seed": len(name)}})  # fmt: skip
        report.write(folder / name)
    runs = [str(folder / "first"), str(folder / "second-run-with-a-long-name")]
    compare.main([*runs, "--output", str(folder / "compare.html")])
    return {"report": folder / "first" / "report.html", "compare": folder / "compare.html"}


@pytest.fixture
def opened(browser, pages):
    """A function (page, size) -> the opened page, whose requests and complaints are noted."""
    contexts = []

    def open_page(name, size):
        width, scheme = SIZES[size]
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.asked, page.complaints = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        for event in ("console", "pageerror", "dialog"):
            page.on(event, lambda said: page.complaints.append(str(said)))
        page.goto(pages[name].as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("report", "wide"), ("report", "phone"), ("compare", "narrow"),
        *(pytest.param(*pair, marks=pytest.mark.slow)
          for pair in (("report", "narrow"), ("compare", "wide"), ("compare", "phone"))),
    ],
)  # fmt: skip
def test_pages_are_whole_accessible_and_fit(opened, pages, name, size):
    from axe_playwright_python.sync_playwright import Axe

    page = opened(name, size)
    assert page.asked == [pages[name].as_uri()]
    assert page.complaints == []
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size][0]
    found = Axe().run(page).response["violations"]
    assert not found, [(one["id"], one["help"], [node["html"][:200] for node in one["nodes"]]) for one in found]


@pytest.mark.parametrize(("name", "size"), [("report", "wide"), ("report", "narrow"), ("compare", "narrow")])
def test_labels_of_charts_neither_overlap_nor_fall_off(opened, name, size):
    problems = opened(name, size).evaluate("""() => [...document.querySelectorAll('svg.chart')].flatMap(chart => {
        const frame = chart.getBoundingClientRect(), found = [];
        const boxes = [...chart.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
        for (const [text, box] of boxes) {
            if (box.left < frame.left - 1 || box.right > frame.right + 1) found.push(`${text} falls off`);
            if (box.height < 8) found.push(`${text} is ${box.height} pixels high`);
            for (const [other, near] of boxes)
                if (box !== near && box.left < near.right && near.left < box.right
                    && box.top + 3 < near.bottom - 3 && near.top + 3 < box.bottom - 3)
                    found.push(`${text} overlaps ${other}`);
        }
        return found;
    })""")
    assert not problems


def test_hostile_text_is_shown_as_text(opened):
    page = opened("report", "wide")
    assert page.locator("pre.text", has_text="<script>alert").first.inner_text() == HOSTILE
    assert page.evaluate("document.scripts.length") == 0


def test_a_keyboard_reaches_what_scrolls_and_folds(opened):
    page = opened("report", "phone")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    hidden = page.evaluate("""() => [...document.querySelectorAll('main *')].filter(one =>
        ['auto', 'scroll'].includes(getComputedStyle(one).overflowX) && one.tabIndex !== 0).length""")
    assert hidden == 0
    page.locator("summary").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("details").first.get_attribute("open") is not None
    assert page.locator("details table").first.is_visible()


def test_light_and_dark_differ(opened):
    colours = [opened("report", size).evaluate("getComputedStyle(document.body).backgroundColor") for size in SIZES]
    assert colours[0] == colours[2] != colours[1]
