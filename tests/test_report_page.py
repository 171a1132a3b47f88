"""Pages of results: what is in a folder is on the page as it is written, and nothing else gets in."""

import json
import os
import subprocess
import sys

import pytest
from testing_pages import check_page
from transformers import BertConfig
from typer.testing import CliRunner

from hf_rankattn.papers import reproduce, reproduce_all
from hf_rankattn.probe.survey import measure_checkpoint
from hf_rankattn.report.html import Section, claims_grid, render_page, svg_picture
from hf_rankattn.report.plots import new_figure
from hf_rankattn.report.results import report_page, write_survey
from rankattn_cli import main as cli


HOSTILE = "\"><script>alert(1)</script><img src=x onerror=alert(1)>{{ 7 * 7 }}'&lt;"
CLAIM = dict.fromkeys(("claim", "source", "published", "measured", "why"), HOSTILE) | {"verdict": "no"}


def report(*arguments):
    return CliRunner().invoke(cli.app, ["report", *map(str, arguments)], catch_exceptions=False)


def write_run(folder, claims=(CLAIM,), **manifest):
    folder.mkdir(parents=True)
    (folder / "experiment.json").write_text(json.dumps({"experiment": HOSTILE, "scale": "laptop", **manifest}))
    (folder / "claims.json").write_text(json.dumps(claims))


def test_hostile_texts_stay_texts():
    figure, axes = new_figure(1, 1, 2.0, 2.0)
    axes[0, 0].set_title("a <b> & -->")
    drawing = svg_picture(figure, HOSTILE, "one", HOSTILE)
    section = Section(HOSTILE, [HOSTILE], [claims_grid([CLAIM], HOSTILE)], [drawing], [HOSTILE])
    page = check_page(render_page(HOSTILE, HOSTILE, [section], footer=[HOSTILE]))
    assert page.words.count(HOSTILE) >= 10
    assert page.all("svg")[0]["aria-label"] == HOSTILE and not page.all("img")


def test_commands_in_sentences_are_code():
    page = render_page("t", "l", [Section("s", ["Run `convert <name>` next."])])
    assert "<p>Run <code>convert &lt;name&gt;</code> next.</p>" in page


def test_drawings_take_the_colour_of_the_text_and_share_no_ids():
    figure, axes = new_figure(1, 1, 2.0, 2.0)
    axes[0, 0].plot([0, 1], [0, 1], marker="o", color="#0b0c0d")
    drawings = [svg_picture(figure, "a line", name) for name in ("one", "two")]
    assert "currentColor" in drawings[0].markup and "#0b0c0d" not in drawings[0].markup
    check_page(render_page("t", "l", [Section("s", pictures=drawings)]))


def test_a_folder_of_experiments_becomes_a_page(tmp_path):
    (outcome,) = reproduce_all(["path-counts"], tmp_path / "runs", scale="smoke", workers=0)
    write_run(tmp_path / "runs" / "hostile" / "laptop")
    summary = tmp_path / "runs" / "claims-smoke.json"
    told = json.loads(summary.read_text())
    summary.write_text(json.dumps([*told, {**CLAIM, "experiment": "elsewhere"}]))
    unfinished = tmp_path / "runs" / "depth" / "smoke"
    unfinished.mkdir(parents=True)
    (unfinished / "experiment.json").write_text("{}")
    assert report(tmp_path / "runs", "--out", tmp_path / "page.html").exit_code == 0
    page = check_page((tmp_path / "page.html").read_text())
    words = "\n".join(page.words)
    assert all(words.count(claim.claim) == 1 for claim in outcome.claims)
    assert len(page.all("img")) == len(list((tmp_path / "runs" / "path-counts" / "smoke").glob("*.png"))) > 0
    assert "elsewhere, smoke scale" in words and "depth/smoke" in words


def test_a_measured_checkpoint_becomes_a_page(tmp_path):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    BertConfig(**sizes, vocab_size=50).save_pretrained(tmp_path / "bert")
    options = {"random_init": True, "random_inputs": True, "examples": 2, "length": 8}
    table, facts = measure_checkpoint(str(tmp_path / "bert"), **options)
    (tmp_path / "measured").mkdir()
    write_survey(table, facts, tmp_path / "measured")
    result = report(tmp_path / "measured", "--out", tmp_path / "page.html", "--json")
    assert json.loads(result.stdout)["bytes"] == (tmp_path / "page.html").stat().st_size
    page = check_page((tmp_path / "page.html").read_text())
    assert len(page.all("img")) == 3 and "How much query-key rank do the weights hold?" in page.words


def test_the_page_of_a_measurement_has_two_drawings_with_every_value(tmp_path):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 32}
    folder = tmp_path / HOSTILE.replace("/", "_")
    BertConfig(**sizes, vocab_size=50).save_pretrained(folder)
    table, facts = measure_checkpoint(str(folder), random_init=True, random_inputs=True, examples=2, length=8)
    (tmp_path / "measured").mkdir()
    assert "report.html" in write_survey(table, facts, tmp_path / "measured")
    page = check_page((tmp_path / "measured" / "report.html").read_text())
    assert not page.all("img") and len(page.all("svg")) == 2
    ranks = table[(table.question == "attention") & (table.metric == "effective_rank")].groupby(["layer", "head"])
    for (layer, head), value in ranks.value.mean().items():
        assert page.words.count(f"layer {layer}, head {head}: effective rank {value:.1f}") == 1
    residuals = table[table.metric == "relative_residual"].groupby(["variant", "layer"]).value.mean()
    assert f"attention alone, layer 2: {residuals['san', 2]:.2g}" in page.words
    assert any(HOSTILE.replace("/", "_") in word for word in page.words)
    text = (tmp_path / "measured" / "report.html").read_text()
    assert text.index("In the median head") < text.index("<svg") < text.index("All answers")


# file of a run, its damaged content or None where it is missing, message
DAMAGED = {
    "claims": ("claims.json", b'[{"claim": 1}]', "does not hold claims"),
    "json": ("claims.json", b"\xff{", "cannot be read as JSON"),
    "nested": ("claims.json", b"[" * 200_000, "cannot be read as JSON"),
    "manifest": ("experiment.json", b"[]", "is not the manifest"),
    "figure": ("plot.png", b"<svg onload=alert(1)>", "is not a PNG file"),
    "unfinished": ("claims.json", None, "has not ended"),
    "table": ("table.parquet", b"no table", "cannot be read as a table"),
    "empty": ("experiment.json", None, "holds no results"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_what_cannot_be_read_is_one_line_and_no_page(tmp_path, what):
    folder, (name, content, message) = tmp_path / "runs" / "name" / "laptop", DAMAGED[what]
    write_run(folder)
    if what == "table":
        (folder / "experiment.json").unlink()
    (folder / name).unlink() if content is None else (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        report(tmp_path / "runs", "--out", tmp_path / "out" / "page.html")
    assert len(str(caught.value).splitlines()) == 1 and not (tmp_path / "out").exists()


def test_no_command_is_made_of_a_name_that_somebody_made_up_and_no_pipe_is_read(tmp_path):
    folder = tmp_path / "runs" / "name" / "laptop"
    (tmp_path / "runs").mkdir()
    write_run(folder)
    os.mkfifo(folder / "pipe.png")
    for name, shown in (("depth", True), ("x; touch sprung", False)):
        (folder / "experiment.json").write_text(json.dumps({"experiment": name, "scale": "laptop"}))
        assert report(tmp_path / "runs", "--out", tmp_path / "page.html", "--overwrite").exit_code == 0
        assert ("<span>reproduce</span>" in (tmp_path / "page.html").read_text()) == shown


KILLED = """
import os, sys
from pathlib import Path
from hf_rankattn.papers.sweep.runner import write_reports

class Figure:
    def savefig(self, file, **options):
        Path(file).write_bytes(bytes.fromhex("89504e470d0a1a0a"))
        os.kill(os.getpid(), 9)

write_reports(Path(sys.argv[1]), {"drawn": Figure()}, [])
"""


def test_half_a_figure_is_not_shown_and_is_removed_by_the_next_run(tmp_path):
    outcome = reproduce("path-counts", tmp_path, scale="smoke", workers=0)
    page = report_page(tmp_path)
    ended = subprocess.run([sys.executable, "-c", KILLED, str(outcome.folder)])
    assert ended.returncode == -9
    (half,) = (path for path in outcome.folder.iterdir() if "drawn" in path.name)
    assert report_page(tmp_path) == page
    reproduce("path-counts", tmp_path, scale="smoke", workers=0)
    left = {path.name for path in outcome.folder.iterdir() if path.is_file()} - {".lock", "experiment.json"}
    assert not half.exists() and left == set(outcome.files)


def test_pages_are_replaced_when_asked_and_other_files_never(tmp_path):
    write_run(tmp_path / "run")
    page = tmp_path / "page.html"
    assert report(tmp_path / "run", "--out", page).exit_code == 0
    with pytest.raises(ValueError, match="exists already"):
        report(tmp_path / "run", "--out", page)
    assert report(tmp_path / "run", "--out", page, "--overwrite").exit_code == 0
    page.write_text("<html>mine</html>")
    (tmp_path / "x.html").write_text("")
    for out, message in (
        (page, "not written by rankattn"),
        (tmp_path / "page.txt", "must end in .html"),
        (tmp_path / "x.html" / "p.html", "cannot be written"),
    ):
        with pytest.raises(ValueError, match=message):
            report(tmp_path / "run", "--out", out, "--overwrite")
    with pytest.raises(ValueError, match="is not a folder"):
        report(tmp_path / "nowhere", "--out", tmp_path / "new.html")
    assert page.read_text() == "<html>mine</html>"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run", "x.html"]
