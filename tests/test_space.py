"""The app of `examples/space`: what it computes and says, and the page in a browser."""

import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from huggingface_hub import SpaceCard
from transformers import AutoModel, AutoTokenizer

from hf_rankattn import measure_attention, measure_collapse, package_text


FOLDER = Path(__file__).parent.parent / "examples" / "space"
APP = runpy.run_path(str(FOLDER / "app.py"), run_name="space")
SKIPS, MLPS = PARTS = list(APP["PARTS"])


@pytest.mark.parametrize("family", APP["FAMILIES"])
def test_curves_of_every_family(family):
    same, whole = APP["measure"](family, 4, 16, [])
    assert same == whole, "16 is the stock rank"
    assert len(whole.residual) == 5 and len(whole.map_rank) == 4
    narrow, again = APP["measure"](family, 4, 1, PARTS)
    assert again == whole
    assert narrow.map_rank[0] < whole.map_rank[0] and narrow.residual[-1] < 0.5 * whole.residual[-1]
    causal = family in ("GPT-2", "Llama")
    # the singular values of the map whose row i is 1/i on its past
    past = torch.tril(torch.ones(32, 32)) / torch.arange(1, 33)[:, None]
    shares = torch.linalg.svdvals(past) / torch.linalg.svdvals(past).sum()
    assert narrow.content_free == pytest.approx(
        (-(shares * shares.log()).sum()).exp().item() if causal else 1, rel=1e-4
    )
    said = APP["sentence"](family, 1, PARTS, narrow)
    assert f"In {family} without its {SKIPS} and {MLPS}, with heads of rank 1" in said
    assert ("faster with each layer" in said) == (family in ("BERT", "ALBERT"))
    assert "the tokens stay apart" in APP["sentence"](family, None, [], whole)


def test_curves_of_a_checkpoint(minilm, monkeypatch):
    monkeypatch.setenv("RANKATTN_CHECKPOINT", minilm)
    seen, whole = APP["measure"](APP["CHECKPOINT"], 5, 32, [SKIPS])
    model, tokenizer = AutoModel.from_pretrained(minilm).double(), AutoTokenizer.from_pretrained(minilm)
    batch = tokenizer(package_text()[:4], truncation=True, max_length=32, return_tensors="pt")
    states, maps = measure_collapse(model, batch), measure_attention(model, batch, metrics="full")
    for curves, variant in ((seen, "san+mlp"), (whole, "transformer")):
        rows = states[(states.metric == "relative_residual") & (states.variant == variant) & (states.layer <= 5)]
        assert curves.residual == pytest.approx(rows.groupby("layer").value.mean().tolist(), rel=1e-6)
    ranks = maps[(maps.metric == "effective_rank") & (maps.layer < 5)].groupby("layer").value.mean()
    assert whole.map_rank == pytest.approx(ranks.tolist())
    with pytest.raises(ValueError, match="the model has 6 layers, got a depth of 7: choose at most 6."):
        APP["measure"](APP["CHECKPOINT"], 7, None, [])


@pytest.mark.parametrize(
    "family, depth, rank, message",
    [
        ("BERT", 0, 4, "from 1 to 24, got 0"),
        ("Llama", 2.5, 4, "from 1 to 24, got 2.5"),
        ("BERT", 2, 0, "`qk_rank` is a width and must be an integer of at least 1"),
        ("BERT", 2, 10**9, "`qk_rank` must be at most 64, the width of this model, got 1000000000."),
        ("Llama", 2, 0, "`qk_rank` must be an integer of at least 1"),
        ("Llama", 2, 17, "`qk_rank` is 17 in layer 0, whose heads have the width 16"),
    ],
)
def test_bad_choices(family, depth, rank, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        APP["measure"](family, depth, rank, [])


def test_the_folder_is_a_space():
    card = SpaceCard.load(FOLDER / "README.md")
    assert (card.data.sdk, card.data.app_file, card.data.license) == ("gradio", "app.py", "apache-2.0")
    assert len(card.data.short_description) <= 60, "the Hub refuses longer ones"
    packages = re.findall(r"^[\w-]+", (FOLDER / "requirements.txt").read_text(), re.M)
    assert packages == ["gradio", "hf_rankattn"]


@pytest.mark.slow
def test_the_page_in_a_browser(tmp_path):
    pytest.importorskip("gradio", reason="gradio is not installed: pip install 'gradio>=6'")
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and chromedriver are not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}/"
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    quiet = "quiet disable-gpu disable-quic no-first-run disable-background-networking disable-component-update disable-sync"
    for flag in ("headless", "no-sandbox", *quiet.split(), f"user-data-dir={tmp_path / 'profile'}"):
        options.add_argument(f"--{flag}")
    settings = {
        "GRADIO_SERVER_NAME": "127.0.0.1",
        "GRADIO_SERVER_PORT": str(port),
        "GRADIO_ANALYTICS_ENABLED": "False",
    }
    with (tmp_path / "log").open("w") as log:
        app = subprocess.Popen(
            [sys.executable, str(FOLDER / "app.py")],
            env={**os.environ, **settings},
            cwd=tmp_path,
            stdout=log,
            stderr=log,
        )
    browser = None
    try:
        until(lambda: app.poll() is not None or answers(address))
        assert app.poll() is None, (tmp_path / "log").read_text()[-2000:]
        browser = webdriver.Chrome(options, webdriver.ChromeService(driver))
        for width in (1280, 390):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(address)
            use(browser, width)
    finally:
        if browser is not None:
            browser.quit()
        app.terminate()
        app.wait(30)


def answers(address: str) -> bool:
    try:
        return urllib.request.urlopen(address, timeout=5).status == 200
    except OSError:
        return False


def until(true, seconds: float = 90):
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.2)
    return found


def use(browser, width: int) -> None:
    """What a person does with the page: look at it, choose something else, make a mistake."""

    def shows(words: str) -> bool:
        return words in browser.find_element("tag name", "body").text

    def pictures() -> list[str]:
        images = browser.find_elements("css selector", "img[src^='data:image']")
        return [image.get_attribute("src") for image in images if image.size["width"] > 250]

    def click(xpath: str) -> None:
        browser.find_element("xpath", xpath).click()

    until(lambda: shows(f"In BERT without its {SKIPS} and {MLPS}, with heads of rank 16, the tokens become equal"))
    before = until(lambda: len(pictures()) == 2 and pictures())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    click("//label[contains(., 'Llama')]")
    click(f"//label[contains(., '{MLPS}')]//input")
    rank = browser.find_element("xpath", "//label[contains(., 'Query-key rank')]//input")
    for typed, words in (("2", "with heads of rank 2,"), ("", "with heads of the stock rank")):
        rank.send_keys("\ue009a\ue000\ue017" + typed)  # control-a, delete
        click("//button[contains(., 'Measure')]")
        until(lambda words=words: shows(f"In Llama without its {SKIPS}, {words}"))
    assert until(lambda: len(pictures()) == 2 and not set(pictures()) & set(before))
    rank.send_keys("17")
    click("//button[contains(., 'Measure')]")
    until(lambda: shows("`qk_rank` is 17 in layer 0, whose heads have the width 16"))
