"""The page of `qualms serve` in a browser: what it shows equals what `qualms predict` writes."""

import json
from importlib.resources import files

import ase.io
import numpy as np
import pytest
from test_browser import BROWSER, DRIVER, By, browser, n_colors, severe, wait_for, webdriver
from test_serve import NAMES, SCRIPT, Served, folder, served

from qualms import AtomisticModel

__all__ = ["browser", "folder", "served"]  # fixtures

pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no browser: needs chromium and chromedriver"
)
Keys = pytest.importorskip("selenium.webdriver.common.keys").Keys

#: Where on the screen an atom of the shown structure is.
PLACE_OF_ATOM = """
const [x, y, z] = selected().positions[arguments[0]];
const at = viewer._viewer.modelToScreen({x, y, z});
return [at.x - scrollX, at.y - scrollY];
"""
DROP = """
const transfer = new DataTransfer();
for (let i = 0; i < arguments.length; i += 2)
  transfer.items.add(new File([arguments[i]], arguments[i + 1]));
document.getElementById("drop").dispatchEvent(
  new DragEvent("drop", {dataTransfer: transfer, bubbles: true, cancelable: true}));
"""
#: Pairs of visible parts of the page that overlap without one being inside of the other.
OVERLAPS = """
const all = [...document.querySelectorAll(
  "h1, h2, h3, p, table, select, button, input, svg, summary, #viewer, #bar, .assessment")]
  .filter(e => e.checkVisibility() && e.getBoundingClientRect().width > 0
    && !e.closest(".scroll"));
const found = [];
for (const a of all) for (const b of all) {
  if (a === b || a.contains(b) || b.contains(a)) continue;
  const [p, q] = [a, b].map(e => e.getBoundingClientRect());
  const w = Math.min(p.right, q.right) - Math.max(p.left, q.left);
  const h = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
  if (w > 1 && h > 1) found.push([a.outerHTML.slice(0, 80), b.outerHTML.slice(0, 80)]);
}
return found;
"""
AXE = "axe.run(document).then(found => arguments[0](found.violations)).catch(arguments[0]);"


def text(browser, element):
    return browser.find_element(By.ID, element).text


def shown(browser, element):
    return browser.find_element(By.ID, element).is_displayed()


def opened(browser, served, fragment=""):
    browser.get("about:blank")
    browser.get(served.url + fragment)
    wait_for(lambda: browser.execute_script("return document.documentElement.dataset.page"))


def chosen(browser, served, path, name=None):
    """Open the page, choose a model and a file, and wait for the prediction."""
    opened(browser, served)
    if name is not None:
        menu = browser.find_element(By.ID, "model")
        menu.find_element(By.CSS_SELECTOR, f"[value='{name}.safetensors']").click()
    browser.find_element(By.ID, "file").send_keys(str(path))
    wait_for(lambda: shown(browser, "results") or text(browser, "error"))
    assert text(browser, "error") == ""


def cells(browser, row):
    return [c.text for c in row.find_elements(By.CSS_SELECTOR, "th, td")]


def click_atom(browser, i):
    """Click an atom in three dimensions, as a mouse does."""
    viewer = browser.find_element(By.ID, "viewer")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", viewer)
    x, y = browser.execute_script(PLACE_OF_ATOM, i)
    chain = webdriver.ActionChains(browser)
    chain.w3c_actions.pointer_action.move_to_location(round(x), round(y))
    chain.w3c_actions.pointer_action.pause(0.3)
    chain.w3c_actions.pointer_action.click()
    chain.perform()


@pytest.mark.parametrize("name", NAMES)
def test_shows_what_is_predicted(browser, served, folder, name):
    """Energies, forces, shieldings and crystals, to the printed digits."""
    model = AtomisticModel.load(folder / f"{name}.safetensors")
    frames = ase.io.read(folder / f"{name}.xyz", ":")
    has_forces, target = model.fitted.settings.has_forces, model.settings.target
    prediction = model.predict(frames, forces=has_forces)
    chosen(browser, served, folder / f"{name}.xyz", name)
    atoms = browser.find_element(By.ID, "atoms-table")
    if not model.fitted.per_atom:
        units = f" {model.settings.units}".rstrip()
        assert text(browser, "value") == f"{target}: {prediction[0].energy}{units}"
        rows = browser.find_elements(By.CSS_SELECTOR, "#list tbody tr")
        assert [cells(browser, r)[3] for r in rows] == [str(p.energy) for p in prediction]
        assert text(browser, "domain").startswith(
            "Out of distribution" if prediction.extrapolates[0] else "In the training domain"
        )
        atoms.find_element(By.TAG_NAME, "summary").click()
    else:
        first = model.target_atoms(frames)[0]
        rows = atoms.find_elements(By.CSS_SELECTOR, "tbody tr")
        expected = [
            [f"{i} {frames[0].symbols[i]}", str(prediction[k])] for k, i in enumerate(first)
        ]
        assert [cells(browser, row)[:2] for row in rows] == expected
        assert shown(browser, "spectra")
    if has_forces:
        rows = atoms.find_elements(By.CSS_SELECTOR, "tbody tr")
        for i, row in enumerate(rows):
            assert cells(browser, row)[1:4] == [str(c) for c in prediction.forces[i]]
        before = n_colors(browser, "viewer")
        browser.find_element(By.ID, "arrows").click()
        wait_for(lambda: n_colors(browser, "viewer") != before)
    # Coloured by σ, with a scale that has units, and each of the other colours.
    wait_for(lambda: n_colors(browser, "viewer") > 50)
    assert "σ" in text(browser, "bar-name") or model.fitted.per_atom
    if model.settings.units or name == "shift":
        assert "/" in text(browser, "bar-name") or not model.settings.units
    for option in browser.find_elements(By.CSS_SELECTOR, "#color option"):
        option.click()
    # A click on an atom.
    i = int(model.target_atoms(frames)[0][0]) if model.fitted.per_atom else 0
    click_atom(browser, i)
    wait_for(lambda: text(browser, "atom").startswith(f"Atom {i} ({frames[0].symbols[i]})"))
    near = "[aria-label='Most similar training environments'] tbody tr"
    wait_for(lambda: len(browser.find_elements(By.CSS_SELECTOR, near)) == 3)
    assert severe(browser) == []


def test_differences_and_rankings(browser, served, folder, energy_model):
    frames = ase.io.read(folder / "energy.xyz", ":")
    prediction = energy_model.predict(frames)
    chosen(browser, served, folder / "energy.xyz")
    for i in (4, 1):
        browser.find_element(By.CSS_SELECTOR, f"[aria-label='Compare structure {i}']").click()
    difference = prediction.energy[4] - prediction.energy[1]
    assert f"Structure 4 minus structure 1: {difference} eV" in text(browser, "difference")
    # With references, the assessment of the report.
    wait_for(lambda: "expected" in text(browser, "assessment"))
    assert severe(browser) == []


def test_a_slider_and_a_plot_select_frames(browser, served, folder):
    chosen(browser, served, folder / "alloys.xyz", "alloys")
    browser.find_element(By.ID, "frame").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    wait_for(lambda: text(browser, "title").startswith("Structure 2:"))
    svg = browser.find_element(By.CSS_SELECTOR, "#series svg")
    box = svg.size
    # The last frame is at 470 of 480.
    webdriver.ActionChains(browser).move_to_element_with_offset(
        svg, int(box["width"] * (470 / 480 - 0.5)), 0
    ).click().perform()
    wait_for(lambda: text(browser, "title").startswith("Structure 9:"))
    assert text(browser, "frame-number") == "9 of 9"
    assert severe(browser) == []


def test_works_by_keyboard_alone(browser, served):
    opened(browser, served)

    def press(*keys):
        webdriver.ActionChains(browser).send_keys(*keys).perform()

    def focused():
        return browser.switch_to.active_element

    seen = []
    while focused().text != "two isomers, C8H10O":
        press(Keys.TAB)
        seen.append(focused().get_attribute("id"))
        assert len(seen) < 20
    assert {"model", "file"} <= {*seen}
    press(Keys.ENTER)
    wait_for(lambda: shown(browser, "results"))
    for wanted in ("color", "frame", "Atoms", "Compare structure 1", "Extended XYZ"):
        for _ in range(60):
            press(Keys.TAB)
            element = focused()
            names = (element.get_attribute("id"), element.text, element.get_attribute("aria-label"))
            if wanted in names:
                break
        else:
            raise AssertionError(wanted)
        if wanted == "Atoms":
            press(Keys.ENTER, Keys.TAB, Keys.TAB, Keys.ENTER)
            wait_for(lambda: text(browser, "atom").startswith("Atom 0"))
    assert severe(browser) == []


@pytest.mark.parametrize("width", [390, 1280])
def test_fits_the_screen(browser, served, folder, width):
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        for name in ("shift", "alloys"):
            chosen(browser, served, folder / f"{name}.xyz", name)
            browser.execute_script("selectAtom(selected().n_atoms - 1)")
            wait_for(lambda: "Numbers in" in text(browser, "atom"))
            wait_for(lambda: "expected" in text(browser, "assessment"))
            wide = "return document.documentElement.scrollWidth - innerWidth"
            assert browser.execute_script(wide) <= 0
            assert browser.execute_script(OVERLAPS) == []
            axe = files("axe_core_python") / "axe.min.js"
            browser.execute_script(axe.read_text(encoding="utf-8"))
            violations = browser.execute_async_script(AXE)
            found = [v["id"] for v in violations if v["impact"] in ("serious", "critical")]
            assert found == []
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_link_repeats_the_view(browser, served, folder):
    chosen(browser, served, folder / "dimers.xyz", "dimers")
    browser.execute_script("select(2, 3)")
    color = browser.find_element(By.ID, "color")
    color.find_element(By.CSS_SELECTOR, "[value=novelty]").click()
    link = browser.find_element(By.ID, "link")
    wait_for(lambda: "novelty" in link.get_attribute("href"))
    browser.find_element(By.CSS_SELECTOR, "[aria-label='Compare structure 3']").click()
    browser.find_element(By.CSS_SELECTOR, "[aria-label='Compare structure 0']").click()
    wait_for(lambda: "compare=3%2C0" in link.get_attribute("href"))
    before = {key: text(browser, key) for key in ("title", "value", "bar-name", "difference")}
    opened(browser, served, "#" + link.get_attribute("href").partition("#")[2])
    wait_for(lambda: shown(browser, "results"))
    assert {key: text(browser, key) for key in before} == before
    boxes = browser.find_elements(By.CSS_SELECTOR, "#list [aria-label^=Compare]")
    assert [box.is_selected() for box in boxes] == [True, False, False, True]
    wait_for(lambda: text(browser, "atom").startswith("Atom 3"))
    assert severe(browser) == []


def test_downloads(browser, served, folder, tmp_path):
    chosen(browser, served, folder / "energy.xyz")
    behaviour = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
    body = (folder / "energy.xyz").read_bytes()
    for suffix, name in (("xyz", "predicted"), ("csv", "predicted"), ("html", "report")):
        browser.find_element(By.CSS_SELECTOR, f"[data-format={suffix}]").click()
        path = tmp_path / f"energy-{name}.{suffix}"
        wait_for(path.exists)
        if suffix == "html":
            continue
        expected = served.ask("/api/predict", body, format=suffix)[1]
        wait_for(lambda path=path, expected=expected: path.read_bytes() == expected)
    wait_for(lambda: b"</html>" in (tmp_path / "energy-report.html").read_bytes())


def test_dropped_files_and_errors(browser, served, folder):
    """Text of files is no markup; an error is a sentence; the next file is fine."""
    opened(browser, served)
    browser.execute_script("window.alert = () => { window.alerted = true }")
    for name in (f"{SCRIPT}.xyz", "a.xyz"):
        browser.execute_script(DROP, f"1\n{SCRIPT}\nQq 0 0 0\n", name)
        wait_for(lambda: text(browser, "error"))
        assert "Traceback" not in text(browser, "error")
    browser.execute_script(DROP, (folder / "energy.xyz").read_text(), f"{SCRIPT}.xyz")
    wait_for(lambda: shown(browser, "results"))
    browser.execute_script(DROP, "2\n\nC 0 0 0\nCu 2 0 0\n", "b.xyz")
    wait_for(lambda: "Cu" in text(browser, "domain"))
    assert text(browser, "value") == "No prediction"
    browser.find_element(By.CSS_SELECTOR, "#input summary").click()
    browser.find_element(By.ID, "paste").send_keys("2\n\nC 0 0 0\nO 1.13 0 0\n")
    browser.find_element(By.ID, "predict").click()
    wait_for(lambda: "CO" in text(browser, "title") and "±" in text(browser, "value"))
    # What is shown remains, with its file, after a file that cannot be read.
    browser.execute_script(DROP, "1\n\nC 0 0 0\n", "a.xyz", "1\n\nH 0 0 0\n", "b.xyz")
    wait_for(lambda: "one file" in text(browser, "error"))
    browser.execute_script(DROP, "1\nnothing\n", "c.xyz")
    wait_for(lambda: "c.xyz" in text(browser, "error"))
    browser.execute_script("selectAtom(1)")
    wait_for(lambda: "Numbers in" in text(browser, "atom"))
    assert "pasted.xyz" in browser.find_element(By.ID, "link").get_attribute("href")
    assert browser.execute_script("return window.alerted") is None
    assert browser.find_elements(By.CSS_SELECTOR, "#results img, main script") == []
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map(e => e.name)"
    )
    origin = served.url.partition("/?")[0]
    assert [name for name in loaded if not name.startswith((origin, "blob:", "data:"))] == []
    assert severe(browser) == []


def test_predicts_without_the_viewer(browser, served, folder):
    """chemiscope is an extra: values, tables and figures do not need it."""
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["*chemiscope.js*"]})
    try:
        chosen(browser, served, folder / "dimers.xyz", "dimers")
        assert "±" in text(browser, "value")
        assert "chemiscope" in text(browser, "viewer-message")
        browser.execute_script("selectAtom(1)")
        wait_for(lambda: "Numbers in" in text(browser, "atom"))
    finally:
        browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": []})
        browser.get_log("browser")


def test_a_file_that_comes_before_the_model_waits_for_it(browser, folder):
    served = Served(folder / "energy.safetensors")
    try:
        browser.get(served.url)
        browser.execute_script(DROP, (folder / "energy.xyz").read_text(), "early.xyz")
        wait_for(lambda: text(browser, "status") == "12 structures of early.xyz.")
    finally:
        served.end()


def test_reports_are_shown_without_access_to_the_rest(browser, folder, tmp_path):
    """The report works, its scripts included; it has an origin of its own."""
    from test_browser import evaluation

    from qualms.report import write_report

    write_report(tmp_path / "report.html", {"energy": evaluation(20)})
    served = Served(tmp_path)
    try:
        browser.get(served.url)
        browser.find_element(By.LINK_TEXT, "report.html").click()
        state = "return document.documentElement.dataset.map"
        wait_for(lambda: browser.execute_script(state) == "ready")
        assert browser.execute_script("return origin") == "null"
        allowed = browser.execute_async_script(
            f"fetch({json.dumps(served.url)}).then(() => arguments[0](true), () => "
            "arguments[0](false))"
        )
        assert allowed is False
    finally:
        served.end()


def test_numbers_are_written_as_in_python(browser, served):
    """Value ± σ with two digits of σ, as a `Prediction` is printed."""
    from qualms import Prediction

    opened(browser, served)
    rng = np.random.default_rng(0)
    means = [0.0, 1.0, -76.5713785, 1e6, *rng.normal(size=300) * 10 ** rng.uniform(-6, 6, 300)]
    stds = [0.1, 0.0, 0.2375823, 3e4, *10 ** rng.uniform(-6, 4, size=300)]
    written = browser.execute_script(
        "return arguments[0].map((m, i) => plusMinus(m, arguments[1][i]))", means, stds
    )
    expected = [str(Prediction(mean=m, std=s)) for m, s in zip(means, stds, strict=True)]
    assert [w for w, s in zip(written, stds, strict=True) if s] == [
        e for e, s in zip(expected, stds, strict=True) if s
    ]
