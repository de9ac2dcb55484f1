"""The page in a real browser opens from the disk, sorts tables, shows values, and makes no request."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="configs are YAML files; of the extra 'benchmarks'")
pytest.importorskip("matplotlib", reason="of the extra 'report'")
pytest.importorskip("jinja2", reason="of the extra 'report'")
pytest.importorskip("selenium", reason="drives the browser")

from report.run_folders import make_rows, write_run
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait
from waiting import CEILING

from sgp.experiments.config import configure
from sgp.report.write import write_report

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="there is no chromium with its chromedriver here"),
]
BAD = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a report of runs, one of which has a hostile name."""
    place = tmp_path_factory.mktemp("report")
    for method, start in (("finetune", 60.0), ("gpm", 70.0), ("sgp", 75.0)):
        for seed in range(2):
            config = configure("digits", method, tasks=3, seed=seed, threads=1)
            path = place / "runs" / BAD / f"{method}{seed}"
            write_run(path, config, make_rows(3, start + seed), names=[BAD, "b", "c"], is_current=False)
    config = configure("split-cifar100", "sgp", threads=1)
    write_run(place / "runs" / "cifar", config, make_rows(10, 80.0), is_current=False)
    return write_report([place / "runs"], place / "out").page


@pytest.fixture(scope="module")
def browser(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    profile = tmp_path_factory.mktemp("profile")
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    # The driver does not wait for a page that scrolls smoothly.
    options.add_argument("--force-prefers-reduced-motion")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
    driver.set_page_load_timeout(CEILING)
    driver.get(page.as_uri())
    yield driver
    driver.quit()


def column(browser: webdriver.Chrome, number: int) -> list[str]:
    rows = browser.find_elements(By.CSS_SELECTOR, "#table-results-digits tbody tr")
    cells = [row.find_elements(By.CSS_SELECTOR, "th, td")[number].text for row in rows]
    return [text.partition("\n")[0] for text in cells]  # without the note under it


def heading(browser: webdriver.Chrome, number: int) -> Any:
    return browser.find_elements(By.CSS_SELECTOR, "#table-results-digits thead th")[number]


def test_it_opens_without_console_messages_or_requests(browser: webdriver.Chrome, page: Path) -> None:
    assert browser.title == "Continual learning results"
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
    # The browser shows pages of its own before ours, from chrome:// addresses.
    own = [each["request"]["url"] for each in asked if each["documentURL"] == page.as_uri()]
    assert [url for url in own if not url.startswith("data:")] == [page.as_uri()]
    assert not [each for each in asked if each["request"]["url"].startswith("http")]


def test_a_run_named_script_is_shown_as_text(browser: webdriver.Chrome) -> None:
    assert len(browser.find_elements(By.TAG_NAME, "script")) == 1
    assert BAD in browser.find_element(By.ID, "runs").text
    tips = browser.execute_script("return [...document.querySelectorAll('.mark')].map((mark) => mark.dataset.tip)")
    assert any(BAD in tip for tip in tips)


def test_a_click_sorts_a_table_in_both_directions(browser: webdriver.Chrome) -> None:
    button = heading(browser, 1).find_element(By.TAG_NAME, "button")
    button.click()
    assert heading(browser, 1).get_attribute("aria-sort") == "descending"
    assert column(browser, 0) == ["SGP", "GPM", "Finetuning"]
    button.click()
    assert heading(browser, 1).get_attribute("aria-sort") == "ascending"
    assert column(browser, 0) == ["Finetuning", "GPM", "SGP"]


def test_the_keyboard_sorts_a_table_and_blank_cells_stay_last(browser: webdriver.Chrome) -> None:
    titles = [each.text for each in browser.find_elements(By.CSS_SELECTOR, "#table-results-digits thead th")]
    number = titles.index("FWT against GPM")
    for direction in ("descending", "ascending"):
        heading(browser, number).find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
        assert heading(browser, number).get_attribute("aria-sort") == direction
        assert column(browser, number)[-1] == ""
    assert len(browser.find_elements(By.CSS_SELECTOR, "#table-results-digits th[aria-sort]")) == 1


def test_a_number_links_to_its_runs(browser: webdriver.Chrome) -> None:
    link = browser.find_element(By.CSS_SELECTOR, "#table-results-digits tbody td a")
    target = str(link.get_attribute("href")).partition("#")[2]
    browser.execute_script("arguments[0].click()", link)
    assert browser.current_url.endswith(f"#{target}")
    assert "sgp run digits --method" in browser.find_element(By.ID, target).text


def test_arrow_keys_step_through_the_values_of_a_plot(browser: webdriver.Chrome) -> None:
    plot = browser.find_element(By.CSS_SELECTOR, "#figure-digits-learned .plot")
    tip = browser.find_element(By.ID, "tip")
    plot.send_keys(Keys.ARROW_RIGHT)
    first = tip.text
    assert first.startswith("Finetuning; task 1: 60.5 ± 0.7")
    plot.send_keys(Keys.ARROW_RIGHT)
    assert tip.text.startswith("Finetuning; task 2")
    plot.send_keys(Keys.ARROW_LEFT)
    assert tip.text == first
    plot.send_keys(Keys.ESCAPE)
    assert not tip.is_displayed()


def test_the_pointer_shows_the_value_at_its_position(browser: webdriver.Chrome) -> None:
    mark = browser.find_element(By.CSS_SELECTOR, "#figure-digits-learned .mark")
    # The page hears of a scroll with its next frame, and hides then what the pointer was at before.
    browser.execute_async_script(
        """
        arguments[0].scrollIntoView({block: "center", behavior: "instant"});
        requestAnimationFrame(() => requestAnimationFrame(() => arguments[1]()));
        """,
        mark,
    )
    webdriver.ActionChains(browser).move_to_element(mark).perform()
    tip = browser.find_element(By.ID, "tip")
    wait = WebDriverWait(browser, CEILING)
    wait.until(lambda _: tip.is_displayed(), "the pointer is at a mark, and no value is shown")
    assert tip.text.startswith("Finetuning; task 1")


def background(browser: webdriver.Chrome) -> str:
    return str(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))


def test_the_page_follows_the_preferred_colour_scheme(browser: webdriver.Chrome) -> None:
    shades = {}
    for wish in ("light", "dark"):
        feature = {"name": "prefers-color-scheme", "value": wish}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
        shades[wish] = background(browser)
    assert shades == {"light": "rgb(254, 254, 254)", "dark": "rgb(21, 24, 28)"}
    browser.find_element(By.ID, "theme").click()
    assert background(browser) == shades["light"]
    browser.find_element(By.ID, "theme").click()
    assert background(browser) == shades["dark"]


@pytest.mark.parametrize("width", [320, 375, 768, 1280])
def test_the_page_fits_the_width_of_the_screen(browser: webdriver.Chrome, width: int) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 700}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")
    assert browser.execute_script("return innerWidth") == width
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_console_has_no_errors(browser: webdriver.Chrome) -> None:
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []
