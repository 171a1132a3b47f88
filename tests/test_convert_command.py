"""`rankattn convert`: folders, figures and errors of one line."""

import logging
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from testing_command import command, few_texts, refusal, save_tiny, told
from testing_common import ALBERT, BERT, XLNET, tiny_inputs
from testing_folders import change_config
from testing_probe import small
from transformers import AutoConfig, AutoModel, AutoTokenizer
from typer.testing import CliRunner

from hf_rankattn import RankBertModel, convert_rank
from hf_rankattn.convert import checkpoint as converting
from hf_rankattn.convert import curve
from hf_rankattn.files.texts import package_text
from hf_rankattn.papers.rank_barrier.convert import head_width
from rankattn_cli import main as cli


class TestCommand:
    @pytest.fixture
    def checkpoint(self, tmp_path, minilm):
        return save_tiny(tmp_path / "tiny", minilm, max_position_embeddings=256)

    def test_writes_a_model_with_its_tokenizer_and_an_honest_card(self, checkpoint, tmp_path):
        out = tmp_path / "narrow"
        said = told(checkpoint, "--qk-rank", 4, "--calibration", few_texts(tmp_path), "--out", out)
        assert "logit energy kept" in said and "parameters saved" in said
        card = (out / "README.md").read_text()
        assert "local folder named `tiny`" in card and "3 texts of texts.txt" in card and "embedding_cosine" in card
        model = AutoModel.from_pretrained(out)
        assert isinstance(model, RankBertModel) and model.config.qk_rank == 4
        assert len(AutoTokenizer.from_pretrained(out)("a text").input_ids) == 4

    def test_json_auto_and_stream(self, checkpoint, tmp_path):
        out = tmp_path / "narrow"
        options = ["--energy", "0.8", "--stream", "--base-model", "some/bert"]
        report = command(checkpoint, "--auto", *options, "--out", out)
        assert report["folder"] == str(out) and all(layer["energy_kept"] >= 0.8 for layer in report["layers"])
        assert report["parameters_saved"] == sum(layer["parameters_saved"] for layer in report["layers"])
        assert "base_model: some/bert" in (out / "README.md").read_text()
        assert len(AutoTokenizer.from_pretrained(out)("a text").input_ids) == 4
        assert AutoModel.from_pretrained(out).config.model_type == "rank_bert"

    def test_ranks_by_damage_and_distillation_on_a_file(self, checkpoint, tmp_path, monkeypatch, capsys):
        """Judging texts in the file are not trained on: a file of these alone is refused."""
        few, out = few_texts(tmp_path), tmp_path / "narrow"
        read = []
        stream = converting.EndlessBatches
        monkeypatch.setattr(converting, "EndlessBatches", lambda *args: read.append(args[1]) or stream(*args))
        judged, other = package_text()[41], package_text()[5]
        (tmp_path / "many.txt").write_text("\n\n".join([judged, other, f"So it began: {judged}"]))
        options = ["--calibration", few, "--auto", "--mean-rank", 4, "--ranks", "damage", "--distil-steps", 2]
        said = told(checkpoint, *options, "--distil-text", tmp_path / "many.txt", "--out", out)
        assert read == [[other[:2048]]] and "Distilled on 1 texts of many.txt." in said
        assert sum(converting.own_ranks(AutoConfig.from_pretrained(out))) == 8
        assert (
            "2 steps of distillation towards the hidden states of the original, on 1 texts"
            in (out / "README.md").read_text()
        )
        (tmp_path / "judged.txt").write_text(judged)
        line = refusal(capsys, checkpoint, *options, "--distil-text", tmp_path / "judged.txt", "--out", tmp_path / "x")
        assert "overlap with the texts that judge" in line

    def test_an_existing_folder_is_refused_and_survives_a_crash(self, checkpoint, tmp_path, monkeypatch):
        out = tmp_path / "narrow"
        converting.convert_checkpoint(checkpoint, out, qk_rank=4, calibration="none")
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        convert = partial(converting.convert_checkpoint, checkpoint, out, qk_rank=2, calibration="none")
        with pytest.raises(ValueError, match="exists already"):
            convert()

        def crash(*args, **kwargs):
            raise OSError("disk full")

        for stream, target in ((False, "files.atomic.replace_folder"), (True, "convert.shards.save_file")):
            with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
                patch.setattr(f"hf_rankattn.{target}", crash)
                convert(overwrite=True, stream=stream)
            assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        assert {path.name for path in tmp_path.iterdir()} == {"tiny", "narrow"}, "nothing half-written is left"
        convert(overwrite=True)
        assert AutoModel.from_pretrained(out).config.qk_rank == 2

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["--qk-rank", "4"], "give --out, the folder to write to"),
            (["--energy", "0.9", "--out", "x"], "--v-head-dim or both; --auto and --auto-values choose"),
            (["--qk-rank", "0", "--out", "x"], "equal to 1"),
            (["--qk-rank", "4", "--auto", "--out", "x"], "cannot be combined"),
            (["--qk-rank", "9" * 30, "--out", "x"], "at most 1048576"),
            (["--curve", "--out", "absent/x.png"], "there is no folder absent"),
            (["--qk-rank", "4", "--calibration", "absent.txt", "--out", "x"], "cannot be read"),
            (["--qk-rank", "4", "--calibration", "package", "--stream", "--out", "x"], "weights alone"),
            (["--qk-rank", "4", "--calibration", "none", "--distil-steps", "2", "--out", "x"], "need texts"),
            (["--qk-rank", "4", "--distil-text", "texts.txt", "--out", "x"], "give --distil-steps as well"),
            (["--qk-rank", "4", "--distil-text", "absent", "--distil-steps", "2", "--out", "x"], "cannot be read"),
            (["--qk-rank", "4", "--distil-text", "absent", "--stream", "--out", "x"], "weights alone"),
            (["--qk-rank", "4", "--ranks", "damage", "--out", "x"], "give --auto or --auto-values, and --mean-rank"),
            (["--auto", "--mean-rank", "4", "--ranks", "damage", "--stream", "--out", "x"], "weights alone"),
            (["--curve", "--ranks", "damage", "--out", "x.png"], "leave --qk-rank"),
            (["--qk-rank", "4", "--column", "text", "--out", "x"], "give --dataset as well"),
            (["--curve", "--out", "x"], "must end in .png"),
            (["--curve", "--qk-rank", "4", "--out", "x.png"], "leave --qk-rank"),
        ],
    )
    def test_bad_input_is_refused(self, arguments, message, checkpoint, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        assert message in refusal(capsys, checkpoint, *arguments)
        assert not (tmp_path / "x").exists()

    def test_nothing_is_distilled_where_nothing_was_cut(self, checkpoint, tmp_path):
        options = ["--qk-rank", 8, "--calibration", few_texts(tmp_path), "--distil-steps", 2, "--out", tmp_path / "x"]
        assert "Distilled" not in told(checkpoint, *options)
        assert "distillation" not in (tmp_path / "x" / "README.md").read_text()

    def test_an_unknown_family_names_the_known_ones(self, tmp_path, capsys):
        small("llama").save_pretrained(tmp_path / "d")
        for name, message in (("d", "rank_albert, xlnet, rank_xlnet"), ("absent", "cannot be read as a checkpoint")):
            line = refusal(capsys, tmp_path / name, "--qk-rank", 4, "--out", tmp_path / "x")
            assert message in line

    @pytest.mark.parametrize("stream", [[], ["--stream"]], ids=["whole", "streamed"])
    def test_code_of_the_checkpoint_is_never_run(self, stream, checkpoint, tmp_path, monkeypatch):
        """Neither by its `auto_map`, whoever is asked, nor by the name of a class that is no model of its family."""
        monkeypatch.setattr("builtins.input", lambda *prompt: "y")
        folder = tmp_path / "tiny"
        (folder / "evil.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
        auto_map = {"AutoConfig": "evil.A", "AutoModel": "evil.B"}
        change_config(folder, auto_map=auto_map, architectures=["Trainer"])
        arguments = ["convert", checkpoint, "--qk-rank", "4", "--out", str(tmp_path / "out"), *stream]
        assert CliRunner().invoke(cli.app, arguments).exit_code == 0
        change_config(folder, model_type="evil")
        arguments[-1 - len(stream)] = str(tmp_path / "other")
        assert CliRunner().invoke(cli.app, arguments).exit_code != 0
        assert not (tmp_path / "sprung").exists()

    def test_the_curve_is_drawn_and_no_model_written(self, checkpoint, tmp_path, monkeypatch):
        """It distils only on request, and reports its progress."""
        monkeypatch.chdir(tmp_path)
        arguments = ["convert", checkpoint, "--curve", "--calibration", few_texts(tmp_path)]
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 0 and "distilled" not in result.stdout
        lines = [line.split(",")[0] for line in result.stderr.splitlines() if line.startswith("converting")]
        assert lines == [f"converting: {done}/10" for done in range(1, 11)]
        assert (tmp_path / "rank-curve.png").read_bytes().startswith(b"\x89PNG")
        assert {path.name for path in tmp_path.iterdir()} == {"tiny", "rank-curve.png", "texts.txt"}
        assert CliRunner().invoke(cli.app, arguments).exit_code != 0, "the figure exists"
        rows = command(*arguments[1:], "--distil-steps", "2", "--overwrite")["rows"]
        assert {row["way"] for row in rows} == {"weights only", "calibrated", "calibrated and distilled"}

    def test_the_curve_of_a_cut_model_ends_at_the_rank_it_has(self, checkpoint, tmp_path, minilm):
        """Not at hidden / heads, which is 8 here; layers of a smaller rank are not widened."""
        convert_rank(BERT.stock("Model").from_pretrained(checkpoint), [3, 6]).save_pretrained(tmp_path / "cut")
        AutoTokenizer.from_pretrained(minilm).save_pretrained(tmp_path / "cut")
        options = ["--calibration", few_texts(tmp_path), "--out", tmp_path / "curve.png"]
        rows = command(tmp_path / "cut", "--curve", *options)["rows"]
        assert max(row["rank"] for row in rows) == 6 == head_width(str(tmp_path / "cut"))
        assert all(row["embedding_cosine"] > 1 - 1e-5 for row in rows if row["rank"] == 6)
        assert converting.own_ranks(AutoConfig.from_pretrained(tmp_path / "cut")) == [3, 6]

    @pytest.mark.parametrize("more", [["--qk-rank", "4"], ["--qk-rank", "4", "--stream"], ["--curve"]])
    def test_what_cannot_be_written_is_refused_before_the_work(self, more, checkpoint, tmp_path, monkeypatch, capsys):
        for module, name in ((converting, "load"), (converting, "convert_shards"), (curve, "rank_curve")):
            monkeypatch.setattr(module, name, lambda *args, **kwargs: pytest.fail("the work has begun"))
        out = tmp_path / ("x" * 250 + ".png" * (more == ["--curve"]))
        assert "File name too long" in refusal(capsys, checkpoint, *more, "--out", out)


class TestFamilies:
    @pytest.mark.parametrize("limit, tokens", [(-1, 256), (None, 256), (64, 64), (10**9, 256), (2**70, 256)], ids=str)
    def test_how_many_tokens_are_read(self, limit, tokens):
        model = SimpleNamespace(config=SimpleNamespace(model_type="bert", max_position_embeddings=limit))
        assert converting.token_limit(model) == tokens and converting.token_limit(model, 16) == 16
        assert converting.token_limit(XLNET.stock("Model")(XLNET.stock_config())) == 256, "it has no last position"

    def test_xlnet_in_half_precision(self, tmp_path):
        """transformers loads its attention in float32, beside the rest in bfloat16."""
        XLNET.stock("Model")(XLNET.stock_config(n_layer=1)).bfloat16().save_pretrained(tmp_path)
        model = converting.load(str(tmp_path))
        converted = convert_rank(model, 3, calibration=tiny_inputs(XLNET, "Model"))
        assert {weight.dtype for weight in converted.parameters()} == {torch.bfloat16}

    def test_ranks_by_group(self):
        config = ALBERT.rank_config(per_layer_config={layer: {"qk_rank": 3 + layer // 2} for layer in range(4)})
        assert converting.own_ranks(config) == [3, 4]
        assert converting.own_ranks(XLNET.stock_config()) == [8, 8, 8]


class TestMissingWeights:
    def source(self, tmp_path, minilm, change, family=BERT) -> Path:
        folder = Path(save_tiny(tmp_path / "tiny", minilm, family))
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    @pytest.mark.parametrize(
        "family, name",
        [
            (BERT, "embeddings.word_embeddings.weight"),
            (BERT, "encoder.layer.0.attention.self.query.bias"),
            (XLNET, "layer.0.rel_attn.q"),
        ],
    )
    def test_no_random_weights_are_published(self, family, name, tmp_path, minilm, capsys):
        folder = self.source(tmp_path, minilm, lambda weights: weights.pop(name), family)
        line = refusal(capsys, folder, "--qk-rank", 2, "--out", tmp_path / "x")
        assert name in line and "would be random" in line and not (tmp_path / "x").exists()

    def test_weights_that_are_left_out_are_named(self, tmp_path, minilm, caplog):
        folder = self.source(tmp_path, minilm, lambda weights: weights.update({"linear.weight": torch.zeros(2, 2)}))
        logger = logging.getLogger("hf_rankattn.files.checkpoints")
        logger.addHandler(caplog.handler)
        command(folder, "--qk-rank", 2, "--out", tmp_path / "x")
        logger.removeHandler(caplog.handler)
        assert "linear.weight of" in caplog.text and "are left out" in caplog.text


class TestReplacing:
    def test_a_folder_of_another_kind_and_the_source_itself_are_kept(self, tmp_path, minilm, capsys):
        checkpoint = save_tiny(tmp_path / "models" / "tiny", minilm)
        (tmp_path / "project").mkdir()
        (tmp_path / "project" / "config.json").write_text("{}")
        for out in (tmp_path / "project", checkpoint, Path(checkpoint).parent):
            refusal(capsys, checkpoint, "--qk-rank", 2, "--overwrite", "--out", out)
        assert (tmp_path / "project" / "config.json").is_file() and (Path(checkpoint) / "config.json").is_file()
