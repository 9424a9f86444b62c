"""The report in a browser: it opens from a file, and its map works."""

import io
import shutil
import time

import numpy as np
import pytest
from PIL import Image
from test_report import evaluation, evaluation_of_atoms

from qualms import Prediction, score
from qualms.calibration.methods import METHODS
from qualms.report import write_report
from qualms.report.structure_map import NOVELTY

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
By = pytest.importorskip("selenium.webdriver.common.by").By
pytest.importorskip("chemiscope", reason="chemiscope is not installed")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="no browser: needs chromium and chromedriver"
)
#: Without a graphics card the structure is drawn in software.
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run "
    "--disable-background-networking --disable-component-update --disable-sync --use-gl=angle "
    "--use-angle=swiftshader --enable-unsafe-swiftshader --window-size=1280,1000"
)
PATIENCE = 120

#: The number of the structure of each point.
NUMBERS = """
const data = JSON.parse(document.getElementById("map-data").textContent);
return data.properties["number of the structure"].values;
"""

#: The number of tables that are wider than their place.
CLIPPED = """
const places = [...document.querySelectorAll(".scroll")];
return places.filter(e => e.scrollWidth > e.clientWidth).length;
"""

#: Height of the map, and how far the structure is below it.
PLACES = """
const [plane, structure] = ["map-plane", "map-structure"]
  .map(id => document.getElementById(id).getBoundingClientRect());
return [plane.height, structure.top - plane.bottom];
"""

#: Finds plotly's element, which is in a shadow tree, and where on the screen a point of it is.
PLOT = """
const find = (root) => {
  for (const e of root.querySelectorAll("*")) {
    if (e._fullLayout && e._fullLayout.xaxis) return e;
    const inside = e.shadowRoot && find(e.shadowRoot);
    if (inside) return inside;
  }
  return null;
};
const plot = find(document.getElementById("map-plane")) || find(document);
const { xaxis, yaxis } = plot._fullLayout;
const box = plot.getBoundingClientRect();
return [box.left + xaxis._offset + xaxis.l2p(arguments[0]),
        box.top + yaxis._offset + yaxis.l2p(arguments[1])];
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    profile = tmp_path_factory.mktemp("profile")
    for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    driver.set_page_load_timeout(PATIENCE)
    driver.set_script_timeout(PATIENCE)
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def structures(tmp_path_factory):
    """A report on structures, with long numbers and units, and its evaluation."""
    points = evaluation(40)
    shifted = Prediction(mean=points.prediction.mean, std=points.prediction.std) - 123456.0
    scores = {f"{name} (out-of-bag)": score(points.y, points.prediction) for name in METHODS}
    others = {"y": points.y - 123456.0, "prediction": shifted, "units": "kcal/mol/atom"}
    points = evaluation(40, **others, scores=scores)
    path = tmp_path_factory.mktemp("structures") / "report.html"
    return write_report(path, {"energy": points}, max_structures=39).paths[0], points


def opened(browser, path):
    """Open a report from its file, if it is not open, and wait until the map is ready."""
    if browser.current_url == path.as_uri():
        return
    browser.get(path.as_uri())
    state = "return document.documentElement.dataset.map"
    wait_for(lambda: browser.execute_script(state) is not None)
    message = browser.find_element(By.ID, "map-message").text
    assert (browser.execute_script(state), message) == ("ready", "")


def wait_for(condition):
    until = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < until, "the browser takes too long"
        time.sleep(0.1)


def n_colors(browser, element):
    """How many colours are seen in an element."""
    place = browser.find_element(By.ID, element)
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", place)
    picture = Image.open(io.BytesIO(place.screenshot_as_png)).convert("RGB")
    return len(np.unique(np.asarray(picture).reshape(-1, 3), axis=0))


def selected(browser):
    """The point that the map has selected: its index in the data of the map."""
    return browser.execute_script("return window.qualmsMap.saveSettings().pinned[0]")


def shown_number(browser):
    """The number, in the file of structures, of the structure that the viewer shows."""
    return browser.execute_script(NUMBERS)[selected(browser)]


def click_point(browser, x, y):
    """Click where the map has a point, as a mouse does."""
    plane = browser.find_element(By.ID, "map-plane")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", plane)
    left, top = browser.execute_script(PLOT, x, y)
    chain = webdriver.ActionChains(browser)
    chain.w3c_actions.pointer_action.move_to_location(round(left), round(top))
    chain.w3c_actions.pointer_action.pause(0.5)
    chain.w3c_actions.pointer_action.click()
    chain.perform()


def severe(browser):
    return [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def test_opens_without_errors_and_draws_everything(browser, structures):
    path, points = structures
    opened(browser, path)
    assert browser.title == "energy"
    ratio = np.abs(points.residuals) / points.prediction.std
    assert shown_number(browser) == np.argmax(ratio)
    broken = "return [...document.images].filter(i => !i.complete || !i.naturalWidth).length"
    assert browser.execute_script(broken) == 0
    # Frame and white would be a few; points with a scale of colours, and shaded atoms, are many.
    wait_for(lambda: n_colors(browser, "map-plane") > 100)
    wait_for(lambda: n_colors(browser, "map-structure") > 100)
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map(e=>e.name)"
    )
    assert [name for name in loaded if not name.startswith(("data:", "blob:"))] == []
    assert severe(browser) == []


def test_a_click_on_a_point_selects_its_structure(browser, structures):
    path, points = structures
    opened(browser, path)
    mean, z = points.prediction.mean, points.residuals
    # The point that is furthest from all others cannot be mistaken.
    x, y = mean / np.ptp(mean), z / np.ptp(z)
    alone = np.min(np.hypot(x[:, None] - x, y[:, None] - y) + 9 * np.eye(40), axis=1)
    on_map = browser.execute_script(NUMBERS)
    before = shown_number(browser)
    chosen = max((i for i in on_map if i != before), key=lambda i: alone[int(i)])
    click_point(browser, float(mean[chosen]), float(z[chosen]))
    wait_for(lambda: shown_number(browser) == chosen)
    wait_for(lambda: n_colors(browser, "map-structure") > 100)
    assert severe(browser) == []


@pytest.mark.parametrize("width", [390, 1200, 1800])
def test_fits_the_screen(browser, structures, width):
    opened(browser, structures[0])
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        wait_for(lambda: browser.execute_script("return innerWidth") == width)
        wait_for(lambda: browser.execute_script(wide) <= 0)
        if width > 600:  # on a telephone, tables scroll
            assert browser.execute_script(CLIPPED) == 0
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_atoms_of_a_structure_are_coloured(browser, tmp_path):
    rng = np.random.default_rng(0)
    points = evaluation(12)
    values = [rng.uniform(0.1, 5, size=len(atoms)) for atoms in points.frames]
    path = write_report(
        tmp_path / "coloured.html",
        {"energy": points},
        atom_values=lambda some: {NOVELTY: (np.concatenate([values[i] for i in some]), "")},
    ).paths[0]
    opened(browser, path)
    browser.find_elements(By.CSS_SELECTOR, "button[data-structure]")[2].click()
    color = browser.execute_script("return window.qualmsMap.saveSettings()")["structure"][0][
        "color"
    ]
    # The same range for all structures, not that of the one that is shown.
    largest = np.quantile(np.concatenate(values), 0.99)
    assert color["property"] == NOVELTY
    assert (color["min"], color["max"]) == (0, pytest.approx(largest, rel=0.05))
    assert n_colors(browser, "map-structure") > 50
    # On a telephone, the structure is below the map.
    size = {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        wait_for(lambda: browser.execute_script("return innerWidth") == 390)
        height, below = browser.execute_script(PLACES)
        assert height > 250
        assert below >= 0
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert severe(browser) == []


def test_elements_have_their_usual_colours(browser, tmp_path):
    path = write_report(tmp_path / "elements.html", {"energy": evaluation_of_atoms()}).paths[0]
    opened(browser, path)
    browser.execute_script("qualmsMap.map._options.color.property.value = 'element'")
    scale = browser.execute_script("return qualmsMap.map._options.colorScale()")
    assert [color for _, color in scale if color == "rgb(144,144,144)"]  # carbon
    assert browser.execute_script("return qualmsMap.map._options.color.mode.value") == "linear"
    assert severe(browser) == []


def test_a_row_of_the_worst_selects_its_atom(browser, tmp_path):
    points = evaluation_of_atoms()
    opened(browser, write_report(tmp_path / "report.html", {"energy": points}).paths[0])
    row = browser.find_elements(By.CSS_SELECTOR, "button[data-atom]")[2]
    structure, atom = (int(row.get_attribute(f"data-{name}")) for name in ("structure", "atom"))
    row.click()
    wait_for(lambda: points.structure[selected(browser)] == structure)
    assert points.atom[selected(browser)] == atom
    assert severe(browser) == []
