"""`rankattn measure` from end to end: a folder in, a table, figures and plain answers out, and every way it can fail."""

import json
import pickle

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from testing_common import ALBERT, BERT, FAMILIES, FAMILY_IDS, TORCHRUN, XLNET, run_python, tiny_inputs
from testing_probe import small
from transformers import AutoModel, AutoTokenizer, BertConfig, BertForMaskedLM, BertModel, GPT2LMHeadModel
from typer.testing import CliRunner

from hf_rankattn import RankEncoderConfig, RankEncoderModel, measure_collapse, measure_weights, package_text
from hf_rankattn.probe.survey import (
    VARIANTS,
    load_checkpoint,
    load_tokenizer,
    measure_checkpoint,
    random_batches,
    read_texts,
    survey,
    text_batches,
)
from hf_rankattn.report.plots import FIGURES, content_free_share, published_residuals, published_table
from hf_rankattn.report.summary import findings
from rankattn_cli import main as cli


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, minilm):
    """A tiny BERT with a real tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny-bert"
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    BertForMaskedLM(BertConfig(**sizes)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    return folder


def run(*arguments):
    return CliRunner().invoke(cli.app, ["measure", *map(str, arguments)])


def refused(*arguments):
    result = run(*arguments)
    assert isinstance(result.exception, ValueError), result.output
    return str(result.exception)


QUICK = ("--examples", "3", "--length", "24", "--batch-size", "2")


class TestCommand:
    def test_a_table_figures_and_answers(self, checkpoint, tmp_path):
        result = run(checkpoint, "--out", tmp_path / "out", *QUICK)
        assert result.exit_code == 0, result.output
        assert "attention alone" in " ".join(result.output.split())
        written = {path.name for path in (tmp_path / "out").iterdir()}
        assert written == {"table.parquet", "report.html", *(f"{name}.png" for name in FIGURES)}
        table = pd.read_parquet(tmp_path / "out" / "table.parquet")
        assert " ".join(table.columns) == "model question variant layer head example component metric value"
        assert set(table.question) == {"inputs", "collapse", "attention", "logits", "weights"}
        assert set(table.variant.dropna()) == {"san", "san+mlp", "san+skip", "transformer"}
        facts = json.loads(pq.read_schema(tmp_path / "out" / "table.parquet").metadata[b"hf_rankattn"])
        assert facts["layers"] == 3 and facts["examples"] == 3 and facts["versions"]["torch"]
        assert list(tmp_path.iterdir()) == [tmp_path / "out"]

    def test_json_and_the_numbers_of_the_functions(self, checkpoint, tmp_path):
        text = tmp_path / "text.txt"
        text.write_text("\n\n".join(package_text()[5:8]))
        result = run(checkpoint, "--out", tmp_path / "out", "--text", text, "--json", *QUICK)
        report = json.loads(result.stdout)
        names = {"name", "question", "answer", "compare", "values", "next_step"}
        assert all(set(finding) == names for finding in report["findings"])
        table = pd.read_parquet(tmp_path / "out" / "table.parquet")
        model, tokenizer = AutoModel.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
        batch = tokenizer(package_text()[5:8], truncation=True, max_length=24, return_tensors="pt")
        expected = measure_collapse(model, batch, ["san"])
        chosen = table[(table.question == "collapse") & (table.variant == "san")]
        merged = chosen.merge(expected, on=["layer", "example", "metric"])
        assert len(merged) == len(expected)
        assert (merged.value_x - merged.value_y).abs().max() < 1e-5

    @pytest.mark.parametrize("metrics, named", [("cheap", "participation ratio"), ("full", "effective rank")])
    def test_choices(self, checkpoint, tmp_path, metrics, named):
        options = ["--metrics", metrics, "--variants", "san, transformer", "--dtype", "float64", "--random-init"]
        result = run(checkpoint, "--out", tmp_path / "out", *options, *QUICK, "--json")
        report = json.loads(result.stdout)
        assert report["facts"]["dtype"] == "float64" and report["facts"]["random_init"]
        assert any(named in finding["answer"] for finding in report["findings"])
        table = pd.read_parquet(tmp_path / "out" / "table.parquet")
        assert set(table.variant.dropna()) == {"san", "transformer"}
        assert ("effective_rank" in set(table[table.question == "attention"].metric)) == (metrics == "full")

    def test_a_dataset_folder(self, checkpoint, tmp_path):
        folder = tmp_path / "data"
        folder.mkdir()
        rows = [{"text": paragraph, "label": 0} for paragraph in ["", *package_text()[:4]]]
        (folder / "test.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        result = run(checkpoint, "--out", tmp_path / "out", "--dataset", folder, "--json", *QUICK)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["facts"]["examples"] == 3
        assert "cannot be loaded" in refused(checkpoint, "--out", tmp_path / "x", "--dataset", tmp_path / "nowhere")

    def test_the_same_bytes_for_the_same_seed(self, checkpoint, tmp_path):
        for name in ("a", "b"):
            run(checkpoint, "--out", tmp_path / name, "--random-init", "--random-inputs", "--seed", "3", *QUICK)
        a, b = (pd.read_parquet(tmp_path / name / "table.parquet") for name in ("a", "b"))
        pd.testing.assert_frame_equal(a, b, check_exact=True)

    def test_an_existing_folder(self, checkpoint, tmp_path):
        out = tmp_path / "out"
        out.mkdir()
        (out / "thesis.tex").write_text("years of work")
        assert "exists already" in refused(checkpoint, "--out", out, *QUICK)
        assert "does not hold measurements" in refused(checkpoint, "--out", out, "--overwrite", *QUICK)
        assert (out / "thesis.tex").read_text() == "years of work"
        good = tmp_path / "good"
        assert run(checkpoint, "--out", good, *QUICK).exit_code == 0
        assert "exists already" in refused(checkpoint, "--out", good, *QUICK)
        assert run(checkpoint, "--out", good, "--overwrite", *QUICK).exit_code == 0

    def test_a_failure_leaves_nothing_behind(self, checkpoint, tmp_path, monkeypatch):
        monkeypatch.setitem(FIGURES, "residuals", lambda table, facts: 1 / 0)
        assert isinstance(run(checkpoint, "--out", tmp_path / "out", *QUICK).exception, ZeroDivisionError)
        assert not list(tmp_path.iterdir())

    def test_two_processes_give_the_table_of_one(self, checkpoint, tmp_path):
        command = [*TORCHRUN, "-m", "hf_rankattn", "measure", checkpoint, "--out", tmp_path, "--overwrite"]
        command += ["--examples", "5", "--length", "24", "--batch-size", "2", "--processes", "2"]
        (tmp_path / "table.parquet").write_text("old")
        run_python(*command)
        one, _ = measure_checkpoint(str(checkpoint), examples=5, length=24, batch_size=2)
        pd.testing.assert_frame_equal(one, pd.read_parquet(tmp_path / "table.parquet"), check_exact=True)


@pytest.mark.parametrize("random_init", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_stock_xlnet_runs_in_the_dtype_asked_for(dtype, random_init, tmp_path):
    """transformers loads its attention in float32 whatever the dtype."""
    XLNET.stock("Model")(XLNET.stock_config(n_layer=1)).float().save_pretrained(tmp_path)
    model = load_checkpoint(str(tmp_path), random_init, dtype)
    assert {weight.dtype for weight in model.parameters()} == {getattr(torch, dtype)}
    assert model(**tiny_inputs(XLNET, "Model")).last_hidden_state.dtype == getattr(torch, dtype)


class TestOtherInputs:
    def test_images_points_and_decoders(self, tmp_path, minilm):
        small("vit", layers=2).save_pretrained(tmp_path / "vit")
        RankEncoderModel(RankEncoderConfig(input_dim=8, num_hidden_layers=2)).save_pretrained(tmp_path / "points")
        small("gpt2", layers=2, vocabulary=30522).save_pretrained(tmp_path / "gpt2")
        AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path / "gpt2")
        for name in ("vit", "points"):
            message = refused(tmp_path / name, "--out", tmp_path / "x", *QUICK)
            assert "not text: give random_inputs=True" in message
            assert ("a folder of images" in message) == (name == "vit")
            result = run(tmp_path / name, "--out", tmp_path / f"{name}-out", "--random-inputs", *QUICK)
            assert result.exit_code == 0, result.exception
        table, facts = measure_checkpoint(str(tmp_path / "gpt2"), examples=3, length=24, batch_size=2)
        assert facts["causal"] and set(table.variant.dropna()) == set(VARIANTS) and not facts["not_measured"]
        answers = " ".join(entry.compare for entry in findings(table, facts))
        assert "of their past at random: 12" in answers  # (n + 1) / 2 of 24

    @pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
    def test_rank_models_with_a_task_head(self, family, tmp_path):
        head = "ForMaskedLM" if "ForMaskedLM" in family.suffixes else "LMHeadModel"
        family.rank(head)(family.rank_config(qk_rank=3)).save_pretrained(tmp_path / "rank")
        table, facts = measure_checkpoint(str(tmp_path / "rank"), random_inputs=True, examples=2, length=12)
        limits = table[(table.question == "logits") & (table.metric == "rank_limit")].value
        assert facts["model_type"] == family.rank("Config").model_type and set(limits) == {3.0}

    def test_unequal_texts_are_padded_and_measured_as_if_alone(self, checkpoint):
        model, tokenizer = load_checkpoint(str(checkpoint)), load_tokenizer(str(checkpoint))
        texts = ["two words", package_text()[0]]
        together = survey(model, text_batches(tokenizer, texts, model.config, length=32, batch_size=2))
        alone = survey(model, text_batches(tokenizer, texts[:1], model.config, length=32))
        keys = ["question", "variant", "layer", "head", "example", "component", "metric"]
        both = together[together.example == 0].merge(alone[alone.example.notna()], on=keys)
        assert len(both) > 200
        assert ((both.value_x - both.value_y).abs() / both.value_y.abs().clip(lower=1)).max() < 1e-5


class TestRefusals:
    def test_texts(self, checkpoint, tmp_path):
        empty = tmp_path / "empty.txt"
        empty.write_text(" \n\n \n")
        for options, message in (
            (["--text", empty], "there is no text in empty.txt"),
            (["--text", tmp_path / "no.txt"], "cannot be read as UTF-8"),
            (["--text", empty, "--dataset", "imdb"], "not both"),
            (["--text", empty, "--random-inputs"], "not several"),
            (["--length", 1000], "more than the 512 positions"),
            (["--random-inputs", "--length", 1000], "more than the 512 positions"),
            (["--variants", "sam"], "unknown variants ['sam']"),
            (["--processes", 2], "2 processes are expected and 1 are running"),
            (["--out", empty / "x"], "cannot be made"),
        ):
            assert message in refused(checkpoint, "--out", tmp_path / "x", *options)
        assert run(checkpoint, "--out", tmp_path / "x", "--metrics", "dear").exit_code == 2
        with pytest.raises(ValueError, match="`examples` must be at least 1"):
            read_texts(examples=0)

    def test_single_tokens(self, minilm):
        tokenizer = load_tokenizer(minilm)
        tokenizer.add_special_tokens({"cls_token": "[CLS]"})
        tokenizer._tokenizer.post_processor = None
        with pytest.raises(ValueError, match="no text has two tokens"):
            text_batches(tokenizer, ["word", "bread"], BertConfig())

    def test_a_pickle_is_never_opened(self, checkpoint, tmp_path):
        class Trap:
            def __reduce__(self):
                return open, (str(tmp_path / "sprung"), "w")

        folder = tmp_path / "pickled"
        folder.mkdir()
        (folder / "config.json").write_text((checkpoint / "config.json").read_text())
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
        assert "a pickle, which can run code" in refused(folder, "--out", tmp_path / "x")
        (folder / "model.safetensors").write_bytes(pickle.dumps(Trap()))
        assert "not safetensors, or are cut short" in refused(folder, "--out", tmp_path / "x")
        assert not (tmp_path / "sprung").exists() and not (tmp_path / "x").exists()

    def test_whole_numbers_are_refused_as_weights_and_not_as_masks(self, tmp_path):
        """Old checkpoints of GPT-2 keep their causal mask under the name of a bias."""
        GPT2LMHeadModel(small("gpt2", layers=1, n_positions=16).config).save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 16, 16, dtype=torch.uint8)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        assert type(load_checkpoint(str(tmp_path))).__name__ == "GPT2Model"
        weight = "transformer.h.0.attn.c_attn.weight"
        tensors[weight] = tensors[weight].to(torch.int8)
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=f"holds {weight} as I8"):
            load_checkpoint(str(tmp_path))

    def test_checkpoints_that_are_not_what_they_say(self, checkpoint, tmp_path):
        assert "cannot be read as a checkpoint" in refused(tmp_path / "nothing-here", "--out", tmp_path / "x")
        for name in ("t5", "resnet"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps({"model_type": name}))
        # before weights are looked for, of which there are none
        message = refused(tmp_path / "t5", "--out", tmp_path / "x")
        assert "T5Model has 2 lists of layers: give one as `tower`, of 'encoder', 'decoder'" in message
        assert "ResNetModel has no list of layers" in refused(tmp_path / "resnet", "--out", tmp_path / "x")
        assert "has one tower: leave out --tower" in refused(checkpoint, "--tower", "decoder", "--out", tmp_path / "x")
        half = BertModel.from_pretrained(checkpoint)
        weights = {name: value for name, value in half.state_dict().items() if "layer.1" not in name}
        half.save_pretrained(tmp_path / "half", state_dict=weights)
        assert "are missing" in refused(tmp_path / "half", "--out", tmp_path / "x")
        BertModel.from_pretrained(checkpoint).save_pretrained(tmp_path / "mute")
        assert "has no tokenizer. Add its tokenizer files" in refused(tmp_path / "mute", "--out", tmp_path / "x")
        small("gpt2", layers=1).save_pretrained(tmp_path / "other")
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "other")
        assert "does not belong to the model" in refused(tmp_path / "other", "--out", tmp_path / "x")
        spoilt = BertModel.from_pretrained(checkpoint)
        with torch.no_grad():
            spoilt.encoder.layer[0].output.dense.weight[0] = torch.nan
        spoilt.save_pretrained(tmp_path / "spoilt")
        AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "spoilt")
        assert "NaN or Inf" in refused(tmp_path / "spoilt", "--out", tmp_path / "x", *QUICK)
        assert not (tmp_path / "x").exists()


class TestBigModels:
    def test_offloaded_weights_give_the_numbers_of_present_ones(self, checkpoint, tmp_path):
        """Layers on disk, as `device_map="auto"` leaves those that fit no device."""
        parts = {"embeddings": "cpu", "encoder.layer.0": "cpu", "encoder.layer.1": "disk", "encoder.layer.2": "disk"}
        offloaded = load_checkpoint(str(checkpoint), device_map=parts, offload_folder=str(tmp_path / "offload"))
        assert offloaded.encoder.layer[2].attention.self.query.weight.device.type == "meta"
        batches = random_batches(offloaded.config, 3, 16, 2, seed=0)
        present = survey(load_checkpoint(str(checkpoint)), batches)
        seen = survey(offloaded, batches)
        pd.testing.assert_frame_equal(present, seen, check_exact=False, rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("family", [BERT, ALBERT], ids=["Bert", "Albert"])
    def test_a_whole_model_on_disk_also_with_shared_layers(self, family, tmp_path):
        folder = str(tmp_path / "model")
        family.stock("Model")(family.stock_config()).save_pretrained(folder)
        offloaded = load_checkpoint(folder, device_map={"": "disk"}, offload_folder=str(tmp_path / "offload"))
        batches = random_batches(offloaded.config, 2, 8, 2, seed=0)
        present = survey(load_checkpoint(folder), batches)
        pd.testing.assert_frame_equal(present, survey(offloaded, batches), check_exact=False, rtol=1e-5, atol=1e-6)

    def test_a_quantised_model_keeps_its_residuals_and_has_no_spectra(self):
        model = BERT.stock("Model")(BERT.stock_config()).float().eval()  # torch quantises float32 only
        batch = {"input_ids": torch.randint(5, 40, (2, 12))}
        before = measure_collapse(model, batch, ["transformer"])
        quantised = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
        after = measure_collapse(quantised, batch, ["transformer"])
        assert (before.value - after.value).abs().max() < 0.1
        with pytest.raises(ValueError, match="are quantised, and packed numbers have no spectrum"):
            measure_weights(quantised)
        assert set(survey(quantised, [batch]).question) == {"inputs", "collapse", "attention", "logits"}


class TestReport:
    def test_all_published_curves_are_there(self):
        for family in ("bert", "albert", "xlnet", "rank_bert"):
            for random_init in (False, True):
                assert set(published_residuals(family, random_init).variant) == set(VARIANTS)
        assert published_residuals("gpt2", False).empty
        bert = published_residuals("bert", True).set_index(["variant", "layer"]).value
        assert bert["san", 1] == pytest.approx(0.01758, abs=1e-5) and ("san", 3) not in bert.index

    def test_published_curves_have_every_layer_and_the_precision_of_their_figures(self):
        table = published_table("residuals").set_index(["model", "weights", "variant", "layer"]).value
        assert len(table) == 24 * 13 and table.index.is_unique and (table > 1.5e-7).all() and (table < 1.03).all()
        ends = {
            ("albert", "pretrained", "san+skip", 12): 1.44e-4,
            ("albert", "pretrained", "san+mlp", 12): 3.5e-7,
            ("xlnet", "pretrained", "san+mlp", 12): 1.68e-4,
            ("xlnet", "init", "san", 2): 5.45e-5,
        }
        for place, value in ends.items():
            assert table[place] == pytest.approx(value, rel=0.01)
        # the four variants of a pretrained model are one model, so they have one value at the input
        assert (table.xs("pretrained", level=1).xs(0, level="layer").groupby("model").nunique() == 1).all()

    def test_the_map_that_looks_at_nothing(self):
        assert content_free_share("effective_rank", 128, causal=False) == 1 / 128
        assert content_free_share("effective_rank", 128, causal=True) * 128 == pytest.approx(32.0, abs=0.1)
        assert content_free_share("participation_ratio", 128, causal=True) * 128 == pytest.approx(3.20, abs=0.01)

    def test_the_text_of_the_package(self, minilm):
        paragraphs = package_text()
        tokenizer = AutoTokenizer.from_pretrained(minilm)
        assert len(set(paragraphs)) == len(paragraphs) == 100
        assert min(len(tokenizer(paragraph)["input_ids"]) for paragraph in paragraphs) >= 128
