"""`rankattn convert`: folders, cards, figures and errors of one line."""

import json
import sys

import pytest
from testing_common import BERT
from transformers import AutoModel, AutoTokenizer, DistilBertConfig, DistilBertModel
from typer.testing import CliRunner

from hf_rankattn import RankBertModel, cli, converting
from hf_rankattn.texts import package_text


class TestCommand:
    @pytest.fixture
    def checkpoint(self, tmp_path, minilm):
        """Real tokens on a tiny model: two narrow layers and MiniLM's tokenizer."""
        folder = tmp_path / "tiny"
        fields = {
            "vocab_size": 30522,
            "hidden_size": 16,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "max_position_embeddings": 256,
        }
        BERT.stock("Model")(BERT.stock_config(**fields)).save_pretrained(folder)
        AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
        return str(folder)

    def test_writes_a_model_with_its_tokenizer_and_an_honest_card(self, checkpoint, tmp_path):
        texts = tmp_path / "texts.txt"
        texts.write_text("\n\n".join(package_text()[:3]))
        out = tmp_path / "narrow"
        arguments = ["convert", checkpoint, "--qk-rank", "4", "--calibration", str(texts), "--out", str(out)]
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 0, result.output
        assert "logit energy kept" in result.stdout and "parameters saved" in result.stdout
        card = (out / "README.md").read_text()
        assert "Made from `tiny`" in card and "3 texts of texts.txt" in card and "embedding_cosine" in card
        model = AutoModel.from_pretrained(out)
        assert isinstance(model, RankBertModel) and model.config.qk_rank == 4
        assert len(AutoTokenizer.from_pretrained(out)("a text").input_ids) == 4

    def test_json_auto_and_stream(self, checkpoint, tmp_path):
        out = tmp_path / "narrow"
        arguments = [
            "convert",
            checkpoint,
            "--auto",
            "--energy",
            "0.8",
            "--stream",
            "--base-model",
            "some/bert",
            "--out",
        ]
        result = CliRunner().invoke(cli.app, [*arguments, str(out), "--json"])
        assert result.exit_code == 0, result.output
        report = json.loads(result.stdout)
        assert report["folder"] == str(out) and all(layer["energy_kept"] >= 0.8 for layer in report["layers"])
        assert report["parameters_saved"] == sum(layer["parameters_saved"] for layer in report["layers"])
        assert "base_model: some/bert" in (out / "README.md").read_text()
        assert (
            AutoTokenizer.from_pretrained(out) is not None
            and AutoModel.from_pretrained(out).config.model_type == "rank_bert"
        )

    def test_an_existing_folder_is_refused_and_survives_a_crash(self, checkpoint, tmp_path, monkeypatch):
        out = tmp_path / "narrow"
        converting.convert_checkpoint(checkpoint, out, qk_rank=4)
        before = {path.name: path.read_bytes() for path in out.iterdir()}
        with pytest.raises(ValueError, match="exists already"):
            converting.convert_checkpoint(checkpoint, out, qk_rank=2)

        def crash(*args, **kwargs):
            raise OSError("disk full")

        for stream, target in (
            (False, "hf_rankattn.folders.replace_folder"),
            (True, "hf_rankattn.models.convert.shards.copy_bytes"),
        ):
            with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
                patch.setattr(target, crash)
                converting.convert_checkpoint(checkpoint, out, qk_rank=2, overwrite=True, stream=stream)
            assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        assert {path.name for path in tmp_path.iterdir()} == {"tiny", "narrow"}, "nothing half-written is left"
        converting.convert_checkpoint(checkpoint, out, qk_rank=2, overwrite=True)
        assert AutoModel.from_pretrained(out).config.qk_rank == 2

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (["--qk-rank", "4"], "nowhere to write"),
            (["--out", "x"], "no rank is given"),
            (["--qk-rank", "0", "--out", "x"], "at least 1"),
            (["--qk-rank", "4", "--auto", "--out", "x"], "two answers"),
            (["--qk-rank", "9" * 30, "--out", "x"], "at most 1048576"),
            (["--curve", "--out", "absent/x.png"], "there is no folder absent"),
            (["--qk-rank", "4", "--calibration", "absent.txt", "--out", "x"], "cannot be read"),
            (["--qk-rank", "4", "--calibration", "package", "--stream", "--out", "x"], "weights alone"),
            (["--curve", "--out", "x"], "must end in .png"),
        ],
    )
    def test_bad_input_is_one_line_and_exit_code_2(
        self, arguments, message, checkpoint, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["rankattn", "convert", checkpoint, *arguments])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        assert caught.value.code == 2
        line = capsys.readouterr().err.splitlines()[-1]
        assert line.startswith("rankattn: ") and message in line
        assert not (tmp_path / "x").exists()

    def test_an_unknown_family_names_the_known_ones(self, tmp_path, monkeypatch, capsys):
        DistilBertModel(DistilBertConfig(vocab_size=10, dim=8, n_heads=2, n_layers=1, hidden_dim=8)).save_pretrained(
            tmp_path / "d"
        )
        for name, message in (("d", "rank_albert, xlnet, rank_xlnet"), ("absent", "cannot be read as a checkpoint")):
            monkeypatch.setattr(
                sys,
                "argv",
                ["rankattn", "convert", str(tmp_path / name), "--qk-rank", "4", "--out", str(tmp_path / "x")],
            )
            with pytest.raises(SystemExit) as caught:
                cli.main()
            assert caught.value.code == 2 and message in capsys.readouterr().err

    @pytest.mark.parametrize("stream", [[], ["--stream"]], ids=["whole", "streamed"])
    def test_code_of_the_checkpoint_is_never_run(self, stream, checkpoint, tmp_path, monkeypatch):
        """Neither by its `auto_map`, whoever is asked, nor by the name of a class that is no model of its family."""
        monkeypatch.setattr("builtins.input", lambda *prompt: "y")
        folder = tmp_path / "tiny"
        (folder / "evil.py").write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')")
        config = json.loads((folder / "config.json").read_text())
        config |= {"auto_map": {"AutoConfig": "evil.A", "AutoModel": "evil.B"}, "architectures": ["Trainer"]}
        (folder / "config.json").write_text(json.dumps(config))
        arguments = ["convert", checkpoint, "--qk-rank", "4", "--out", str(tmp_path / "out"), *stream]
        assert CliRunner().invoke(cli.app, arguments).exit_code == 0
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil"}))
        arguments[-1 - len(stream)] = str(tmp_path / "other")
        assert CliRunner().invoke(cli.app, arguments).exit_code != 0
        assert not (tmp_path / "sprung").exists()

    def test_the_curve_is_drawn_and_no_model_written(self, checkpoint, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        result = CliRunner().invoke(cli.app, ["convert", checkpoint, "--curve", "--distil-steps", "2", "--json"])
        assert result.exit_code == 0, result.output
        rows = json.loads(result.stdout)["rows"]
        assert {row["way"] for row in rows} == {"weights only", "calibrated", "calibrated and distilled"}
        assert (tmp_path / "rank-curve.png").read_bytes().startswith(b"\x89PNG")
        assert {path.name for path in tmp_path.iterdir()} == {"tiny", "rank-curve.png"}
        assert CliRunner().invoke(cli.app, ["convert", checkpoint, "--curve"]).exit_code != 0, "the figure exists"
