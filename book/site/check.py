"""Try the built site in headless Chromium, opened as file://: python book/site/check.py out/site [screenshot folder]

Exit code 1 with a list if a page logs a warning or an error, asks another host for anything, has a formula that is not
typeset, an image without text or without content, or a link to a page or a place that does not exist; if it is wider
than a screen of 390 pixels or not dark in dark mode; or if the search does not find what it must find.
Needs chromium and its driver, and the package selenium.
"""

import json
import re
import shutil
import sys
import urllib.parse
from pathlib import Path

from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.support.ui import WebDriverWait

SEARCHES = {"O_DIRECT": "Past the page cache", "delta rule": "Kimi Delta Attention"}  # words: a title they must find
LOOK = """
const ready = window.MathJax && MathJax.startup ? MathJax.startup.promise : Promise.resolve();
const done = arguments[0];
ready.then(() => done({
  ids: [...document.querySelectorAll("[id]")].map(e => e.id),
  links: [...document.links].map(a => a.href),
  formulas: document.querySelectorAll(".math").length,
  typeset: document.querySelectorAll(".math mjx-container").length,
  refused: document.querySelectorAll("mjx-merror, [data-mjx-error]").length,
  silent: [...document.images].filter(i => !i.alt || !i.naturalWidth).map(i => i.src.slice(0, 80)),
}));
"""


def browser():
    "Headless Chromium that records its console and its requests."
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def screen(driver, width, height):
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def complaints(driver):
    "What the console and the network say since the last call."
    for entry in driver.get_log("browser"):
        if entry["level"] in ("WARNING", "SEVERE"):
            yield f"console: {entry['message'][:200]}"
    for entry in driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            url = message["params"]["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:", "chrome")):
                yield f"asks for {url}"


def look(driver, page, places, links):
    "Open a page at the width of a desk and of a phone; record its places and links; yield what is wrong with it."
    screen(driver, 1280, 900)
    driver.get(page.as_uri())
    found = driver.execute_async_script(LOOK)
    places[page], links[page] = set(found["ids"]), found["links"]
    if found["formulas"] != found["typeset"] or found["refused"]:
        yield f"{found['typeset']} of {found['formulas']} formulas are typeset, {found['refused']} with an error"
    yield from (f"image without text or content: {source}" for source in found["silent"])
    screen(driver, 390, 844)
    wide = driver.execute_script("return document.documentElement.scrollWidth")
    if wide > 390:
        yield f"is {wide} pixels wide on a screen of 390"
    yield from complaints(driver)


def brightness(driver, property):
    "Of a colour of the page's body, 0..255."
    color = driver.execute_script(f"return getComputedStyle(document.body).{property}")
    return sum(map(float, re.findall(r"[\d.]+", color)[:3])) / 3


def holds(driver, condition):
    "Does the condition become true? The page's scripts have 20 seconds."
    try:
        return WebDriverWait(driver, 20).until(lambda _: condition())
    except TimeoutException:
        return False


def dark(driver, page):
    "Yield what is wrong with a page in dark mode."
    driver.get(page.as_uri())
    driver.execute_script("localStorage.setItem('theme', 'dark')")
    driver.refresh()
    if not holds(driver, lambda: brightness(driver, "backgroundColor") < 64 < 160 < brightness(driver, "color")):
        yield "is not dark in dark mode"


def wrong_links(root, places, links):
    "Pairs (page, sentence): links into the site whose page or place does not exist."
    for page, urls in links.items():
        for url in urls:
            parts = urllib.parse.urlsplit(url)
            if parts.scheme != "file":
                continue
            target, place = (urllib.parse.unquote(part) for part in (parts.path, parts.fragment))
            if not Path(target).exists() or not Path(target).is_relative_to(root):
                yield page, f"links to {target}, which is not in the site"
            elif place and place not in places.get(Path(target), {place}):
                yield page, f"links to {target}#{place}, a place that does not exist"


def search(driver, root):
    "Yield which searches do not find their chapter."
    for words, title in SEARCHES.items():
        driver.get(f"{(root / 'search.html').as_uri()}?q={urllib.parse.quote(words)}")
        found = "return [...document.querySelectorAll('#search-results li a')].map(a => a.textContent)"
        if not holds(driver, lambda: any(title in text for text in driver.execute_script(found))):
            yield f"search for {words!r} finds {driver.execute_script(found)}, not {title!r}"


def main(site, shots=None):
    root, places, links, wrong = Path(site).resolve(), {}, {}, []
    pages = sorted(page for page in root.rglob("*.html") if "_static" not in page.parts)
    driver = browser()
    try:
        for page in pages:
            wrong += [(page, sentence) for sentence in look(driver, page, places, links)]
            if shots:
                Path(shots).mkdir(parents=True, exist_ok=True)
                for name, width in (("phone", 390), ("desk", 1280)):
                    screen(driver, width, 1200)
                    driver.save_screenshot(str(Path(shots) / f"{page.parent.name}_{page.stem}_{name}.png"))
        wrong += wrong_links(root, places, links)
        wrong += [(root, sentence) for sentence in search(driver, root)]
        wrong += [(page, sentence) for page in pages for sentence in dark(driver, page)]
    finally:
        driver.quit()
    for page, sentence in wrong:
        print(f"{page.relative_to(root)}: {sentence}")
    print(f"{len(pages)} pages, {sum(map(len, links.values()))} links, {len(wrong)} faults")
    return 1 if wrong or not pages else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
