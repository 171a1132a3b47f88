"""What `rankattn measure` says: through the command itself, for encoders and decoders from folders with tokenizers."""

import json
import re
from functools import partial

import pandas as pd
import pytest
import torch
from testing_probe import run as run_command
from testing_probe import small
from transformers import T5Config, T5Model

from hf_rankattn import package_text
from hf_rankattn.report.results import read_survey, survey_section
from hf_rankattn.report.summary import findings, why_no_cut


QUICK = ("--examples", "3", "--length", "24", "--batch-size", "2")


def make(kind, folder, tokenizer):
    torch.manual_seed(0)
    fields = {"num_key_value_heads": 2, "head_dim": 8} if kind == "qwen3" else {}
    small(kind, hidden=32, layers=2, inner=48, vocabulary=30522, **fields).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def run(capsys):
    return partial(run_command, capsys, "measure")


@pytest.fixture
def no_figures(monkeypatch):
    """Drawing takes most of the time of the command."""
    monkeypatch.setattr("hf_rankattn.report.results.FIGURES", {})


def numbers(value):
    """Every number in nested JSON, as a reader of prose would meet it."""
    if isinstance(value, dict | list):
        return [x for entry in (value.values() if isinstance(value, dict) else value) for x in numbers(entry)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("kind", ["bert", "gpt2", "qwen3"])
def test_every_number_of_the_prose_is_a_field(kind, tmp_path, tokenizer, run):
    code, output, error = run(make(kind, tmp_path / kind, tokenizer), "--out", tmp_path / "out", "--json", *QUICK)
    assert code == 0, error
    report = json.loads(output, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert len({finding["name"] for finding in report["findings"]}) == len(report["findings"]) == 11
    for finding in report["findings"]:
        prose = " ".join(finding[part] for part in ("question", "answer", "compare"))
        fields = numbers(finding["values"])
        for shown in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", prose):
            digits = len(shown.partition(".")[2])
            # 1 and 0 are the ends of a scale; a share is 0.9 in JSON and 90 % in prose; a name may hold a digit
            near = any(round(x, digits) == float(shown) or f"{x:.0e}" == shown for x in [*fields, 0, 1])
            assert near or float(shown) / 100 in fields or shown in kind, (finding, shown)


@pytest.mark.usefixtures("no_figures")
def test_numbers_are_those_of_the_table(tmp_path, tokenizer, run):
    folder = make("bert", tmp_path / "bert", tokenizer)
    _, output, _ = run(folder, "--out", tmp_path / "out", "--json", *QUICK)
    found = {finding["name"]: finding["values"] for finding in json.loads(output)["findings"]}
    table, _ = read_survey(tmp_path / "out")

    def heads(question, metric):
        rows = table[(table.question == question) & (table.metric == metric)]
        return rows.groupby(["layer", "head"]).value.mean()

    residuals = table[(table.variant == "san") & (table.metric == "relative_residual")].groupby("layer").value.mean()
    assert found["collapse/san"]["relative_residual"] == residuals.tolist()
    assert found["collapse/san"]["last"] == residuals.iloc[-1] and found["collapse/san"]["last_layer"] == 2
    assert found["attention/effective_rank"]["max"] == heads("attention", "effective_rank").max()
    assert found["logits/energy_rank"]["median"] == heads("logits", "energy_rank").median()
    assert found["weights/energy_rank"]["rank_limit"] == 8 and found["weights/energy_rank"]["energy"] == 0.9


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_a_decoder_is_measured_in_all_variants_under_its_own_name(kind, tmp_path, tokenizer, run):
    code, output, error = run(make(kind, tmp_path / "model", tokenizer), "--out", tmp_path / "out", *QUICK)
    assert code == 0, error
    words = " ".join(re.sub(r"[│┃]", " ", output).split())
    assert "not measured" not in words and f"{kind}, 2 layers of 4 heads" in words
    assert "Llama" not in words
    assert ("rankattn convert" in words) == (kind == "gpt2")  # convert takes no model with rotary positions
    table, facts = read_survey(tmp_path / "out")
    assert facts["not_measured"] == {} and "Llama" not in json.dumps(facts)
    found = {finding.name: finding for finding in findings(table, facts)}
    # with attention alone the tokens of a causal model can only become equal to the first, and by a constant factor
    alone = found["collapse/san"]
    assert "the first one, which sees only itself" in alone.compare and alone.values["content_free_factor"] == 0.5
    assert alone.values["rate"] != "doubly_exponential" and len(alone.values["relative_residual"]) == 3
    assert "which sees only itself" not in found["collapse/transformer"].compare
    section = survey_section(table, facts, {})
    assert section.paragraphs[0].startswith(f"{kind}, 2 layers")


@pytest.mark.usefixtures("no_figures")
def test_what_a_model_does_not_allow_has_a_reason(tmp_path, run):
    """T5 adds a position bias to its logits, so they are not products of queries and keys."""
    sizes = {"d_model": 16, "d_kv": 4, "num_heads": 4, "num_layers": 2, "d_ff": 24, "vocab_size": 60}
    T5Model(T5Config(**sizes, decoder_start_token_id=0)).save_pretrained(tmp_path / "t5")
    options = ["--random-inputs", "--tower", "encoder", *QUICK]
    code, output, error = run(tmp_path / "t5", "--out", tmp_path / "out", *options)
    assert code == 0, error
    words = " ".join(re.sub(r"[│┃]", " ", output).split())
    assert words.count("not measured:") == 1 and "T5Attention adds a position bias" in words
    table, facts = read_survey(tmp_path / "out")
    assert set(facts["not_measured"]) == {"logits"} and set(table.question) == {
        "inputs",
        "collapse",
        "attention",
        "weights",
    }
    (finding,) = [entry for entry in findings(table, facts) if entry.name == "logits/not_measured"]
    assert finding.answer == f"not measured: {facts['not_measured']['logits']}"
    assert facts["tower"] == "encoder" and facts["title"].endswith("t5, encoder")
    # the error on the command line has no quotes around names of Python
    code, _, error = run(tmp_path / "t5", "--out", tmp_path / "x", "--random-inputs", *QUICK)
    assert code == 2 and "give one as --tower, of 'encoder', 'decoder'" in error and error.count("\n") == 1


@pytest.mark.usefixtures("no_figures")
def test_variants_that_were_not_asked_for_are_not_missed(tmp_path, tokenizer, run):
    folder = make("gpt2", tmp_path / "gpt2", tokenizer)
    code, output, _ = run(folder, "--out", tmp_path / "out", "--variants", "transformer", *QUICK)
    assert code == 0 and "not measured" not in output
    code, _, error = run(folder, "--out", tmp_path / "x", "--variants", "alone", *QUICK)
    assert code == 2 and "there are san, san+mlp, san+skip, transformer" in error and error.count("\n") == 1


@pytest.mark.usefixtures("no_figures")
def test_the_next_step_names_the_command_and_the_rank(tmp_path, tokenizer, run, monkeypatch):
    """It keeps what the head with the most energy-bearing directions needs, and names the folder as the user did."""
    monkeypatch.chdir(tmp_path)
    make("bert", tmp_path / "a model", tokenizer)
    code, output, _ = run("a model", "--out", "out", *QUICK)
    table, facts = read_survey(tmp_path / "out")
    ranks = table[(table.question == "logits") & (table.metric == "energy_rank")].groupby(["layer", "head"])
    keep = findings(table, facts)[-1].values["keep"]
    assert code == 0 and keep - 1 < ranks.value.mean().max() <= keep < 8
    assert f"Keep {keep}: `rankattn convert 'a model' --qk-rank {keep} --out 'a model-rank-{keep}'`" in output


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    "options, told",
    [
        (["--random-init"], "No cut is suggested: the"),
        (["--random-inputs"], "No cut is suggested: the"),
        (["--length", 5], "larger --length"),  # texts shorter than a head is wide
    ],
)
def test_measurements_that_allow_no_advice(options, told, tmp_path, tokenizer, run):
    folder = make("bert", tmp_path / "bert", tokenizer)
    code, output, _ = run(folder, "--out", tmp_path / "out", *QUICK, *options)
    assert code == 0 and "rankattn convert" not in output and told in output


def test_advice_for_a_model_of_one_width_names_both_widths():
    for model_type in ("vit", "t5"):
        why = why_no_cut({"model_type": model_type, "random_init": False}, [])
        assert "one width for queries, keys and values" in why and "--qk-rank N --v-head-dim N" in why
    assert "cannot be cut" in why_no_cut({"model_type": "llama", "random_init": False}, [])


@pytest.mark.usefixtures("no_figures")
def test_csv_files_have_columns(tmp_path, tokenizer, run):
    folder, data = make("bert", tmp_path / "bert", tokenizer), tmp_path / "data"
    data.mkdir()
    rows = pd.DataFrame({"text": package_text()[:4], "number": range(4)})
    rows.to_csv(data / "test.csv", index=False)
    code, output, error = run(folder, "--out", tmp_path / "out", "--dataset", data, "--json", *QUICK)
    assert code == 0, error
    assert json.loads(output)["facts"]["examples"] == 3
    rows.assign(loud=rows.text.str.upper()).to_csv(data / "test.csv", index=False)
    code, _, error = run(folder, "--out", tmp_path / "x", "--dataset", data, *QUICK)
    assert code == 2 and "give --column, the column of" in error and "its text columns are text, loud." in error
    assert run(folder, "--out", tmp_path / "y", "--dataset", data, "--column", "loud", *QUICK)[0] == 0
    code, _, error = run(folder, "--out", tmp_path / "x", "--dataset", data, "--column", "number", *QUICK)
    assert code == 2 and "has no text column 'number': its text columns are text, loud." in error
    rows[["number"]].to_csv(data / "test.csv", index=False)
    code, _, error = run(folder, "--out", tmp_path / "x", "--dataset", data, *QUICK)
    assert code == 2 and "has no text column: choose another dataset." in error and "--column" not in error


def test_a_tokenizer_that_fails_in_use_is_one_line(run, tokenizer, tmp_path):
    folder = make("bert", tmp_path / "model", tokenizer)
    file = folder / "tokenizer.json"
    stored = json.loads(file.read_text())
    stored["model"]["unk_token"] = "[NOT THERE]"
    stored["model"]["vocab"] = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[MASK]": 3, "the": 4}
    file.write_text(json.dumps(stored))
    code, _, said = run(folder, "--out", tmp_path / "measured", *QUICK)
    assert code == 2 and "the tokenizer fails on the texts" in said and not (tmp_path / "measured").exists()


@pytest.mark.usefixtures("no_figures")
def test_a_folder_that_has_the_name_of_a_format_is_still_a_folder(tmp_path, tokenizer, run, monkeypatch):
    folder = make("bert", tmp_path / "bert", tokenizer)
    for name, texts in {"csv": package_text()[:3], "another": ["too short"] * 3}.items():
        (tmp_path / name).mkdir()
        pd.DataFrame({"text": texts}).to_csv(tmp_path / name / "test.csv", index=False)
    monkeypatch.chdir(tmp_path)
    code, _, error = run(folder, "--out", "out", "--dataset", "csv", *QUICK)
    assert code == 0, error
    table = pd.read_parquet("out/table.parquet")
    assert set(table[table.question == "inputs"].value) == {24}  # the tokens of a text, cut to --length
