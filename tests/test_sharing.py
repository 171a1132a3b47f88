"""Sharing: exported folders and the Hub, loaded from clean processes, with cards that say only what was measured."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hub_stand_in import HubStandIn
from huggingface_hub import EvalResult, ModelCard
from testing_common import ALBERT, BERT, FAMILIES, FAMILY_IDS, XLNET
from transformers import BertConfig, BertModel

import hf_rankattn
from hf_rankattn import RankEncoderConfig, RankEncoderForPointRegression, export_model, model_card
from hf_rankattn.folders import LEFTOVER
from hf_rankattn.sharing import auto_classes


SMALL = {"qk_rank": 3, "v_head_dim": 5, "qk_norm": True}
BLOCKER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_rankattn":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def run(code: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run code in a clean process and return the last line it prints."""
    environment = {**os.environ, **(env or {})}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=cwd)
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip().splitlines()[-1]


def fingerprint(model: torch.nn.Module, **inputs) -> float:
    with torch.no_grad():
        return model.eval()(**inputs)[0].double().abs().sum().item()


IDS = torch.arange(1, 9)[None]
LOAD = "model = {loader}.from_pretrained({where!r}{more}); import torch\n"
FINGERPRINT = "print(model.eval()(input_ids=torch.arange(1, 9)[None])[0].detach().double().abs().sum().item())"


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
class TestExport:
    @pytest.mark.parametrize("suffix", ["Model", "ForTokenClassification"])
    def test_loads_with_the_package_and_without_it(self, family, suffix, tmp_path):
        model = family.rank(suffix)(family.rank_config(**SMALL))
        export_model(model, tmp_path / "model", remote_code=True)
        expected = pytest.approx(fingerprint(model, input_ids=IDS), rel=1e-6)
        loader, where = f"Auto{'Model' if suffix == 'Model' else 'Model' + suffix}", str(tmp_path / "model")
        with_package = f"import hf_rankattn\nfrom transformers import {loader}\n"
        code = with_package + LOAD.format(loader=loader, where=where, more="") + FINGERPRINT
        assert float(run(code)) == expected
        without = BLOCKER + f"from transformers import {loader}\n"
        code = without + LOAD.format(loader=loader, where=where, more=", trust_remote_code=True") + FINGERPRINT
        assert float(run(code, {"HF_HOME": str(tmp_path / "home")})) == expected

    def test_without_trust_foreign_code_is_never_run(self, family, tmp_path):
        export_model(family.rank("Model")(family.rank_config(**SMALL)), tmp_path / "model", remote_code=True)
        source = next((tmp_path / "model").glob("configuration_*.py"))
        source.write_text(source.read_text() + f"\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
        for start in ("import hf_rankattn\n", BLOCKER):
            code = (
                start + f"from transformers import AutoModel\nAutoModel.from_pretrained({str(tmp_path / 'model')!r})"
            )
            subprocess.run([sys.executable, "-c", code], capture_output=True, input=b"", timeout=120)
            assert not (tmp_path / "ran").exists()

    def test_without_remote_code_there_is_no_source(self, family, tmp_path):
        export_model(family.rank("Model")(family.rank_config(**SMALL)), tmp_path / "model")
        assert not list((tmp_path / "model").glob("*.py"))
        assert "auto_map" not in json.loads((tmp_path / "model" / "config.json").read_text())

    def test_a_model_loaded_from_an_export_does_not_name_source_it_has_not(self, family, tmp_path):
        export_model(family.rank("Model")(family.rank_config(**SMALL)), tmp_path / "first", remote_code=True)
        loaded = family.rank("Model").from_pretrained(tmp_path / "first")
        export_model(loaded, tmp_path / "second")
        loaded.save_pretrained(tmp_path / "third")
        for folder in ("second", "third"):
            assert "auto_map" not in json.loads((tmp_path / folder / "config.json").read_text())

    def test_source_names_only_classes_that_exist(self, family, tmp_path):
        export_model(family.rank("Model")(family.rank_config()), tmp_path / "model", remote_code=True)
        auto_map = json.loads((tmp_path / "model" / "config.json").read_text())["auto_map"]
        assert set(auto_map) == {"AutoConfig", *auto_classes(family.rank("Model"))}
        for target in auto_map.values():
            module, name = target.split(".")
            assert (tmp_path / "model" / f"{module}.py").exists() and hasattr(hf_rankattn, name)


@pytest.mark.parametrize(
    "name, config", [("RankXLNetModel", "RankXLNetConfig()"), ("RankEncoderModel", "RankEncoderConfig(input_dim=4)")]
)
def test_the_way_of_transformers_to_share_source_works_too(name, config, tmp_path):
    config = config.replace(
        "XLNetConfig()", "XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=2, d_inner=8, qk_rank=2)"
    )
    code = f"""
from hf_rankattn import {name}, {config.split("(")[0]}
{config.split("(")[0]}.register_for_auto_class()
{name}.register_for_auto_class("AutoModel")
{name}({config}).save_pretrained({str(tmp_path / "model")!r})
print(1)
"""
    run(code)
    load = BLOCKER + "from transformers import AutoModel\n"
    load += f"print(type(AutoModel.from_pretrained({str(tmp_path / 'model')!r}, trust_remote_code=True)).__name__)"
    assert run(load, {"HF_HOME": str(tmp_path / "home")}) == name


def test_a_head_without_an_auto_class_loads_without_the_package(tmp_path):
    model = RankEncoderForPointRegression(
        RankEncoderConfig(input_dim=8, num_attention_heads=3, qk_rank=2, v_head_dim=5)
    )
    export_model(model, tmp_path / "model", remote_code=True)
    points = torch.linspace(-1, 1, 40).view(1, 5, 8)
    code = BLOCKER + "import torch\nfrom transformers import AutoModel\n"
    code += f"model = AutoModel.from_pretrained({str(tmp_path / 'model')!r}, trust_remote_code=True)\n"
    code += (
        "print(model.eval()(points=torch.linspace(-1, 1, 40).view(1, 5, 8))[0].detach().double().abs().sum().item())"
    )
    assert float(run(code, {"HF_HOME": str(tmp_path / "home")})) == pytest.approx(fingerprint(model, points=points))


class TestExportedFolder:
    def test_an_existing_folder_is_left_alone(self, tmp_path):
        model = BERT.rank("Model")(BERT.rank_config())
        folder = export_model(model, tmp_path / "model")
        (folder / "note.txt").write_text("mine")
        with pytest.raises(ValueError, match="exists already"):
            export_model(model, folder)
        assert (folder / "note.txt").read_text() == "mine"
        export_model(model, folder, overwrite=True)
        assert not (folder / "note.txt").exists()

    def test_only_a_model_folder_is_ever_replaced(self, tmp_path, monkeypatch):
        model = BERT.rank("Model")(BERT.rank_config())
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "chapter.txt").write_text("mine")
        with pytest.raises(ValueError, match="does not hold a model"):
            export_model(model, tmp_path / "thesis", overwrite=True)
        assert (tmp_path / "thesis" / "chapter.txt").read_text() == "mine"
        folder = export_model(model, tmp_path / "model")
        monkeypatch.chdir(folder)
        with pytest.raises(ValueError, match="the folder you work in"):
            export_model(model, ".", overwrite=True)
        assert {path.name for path in tmp_path.iterdir()} == {"thesis", "model"}

    @pytest.mark.parametrize("failing", [1, 2, (2, 3)], ids=["first", "second", "second-and-rollback"])
    def test_a_rename_that_fails_loses_nothing(self, failing, tmp_path, monkeypatch):
        model = BERT.rank("Model")(BERT.rank_config())
        before = export_model(model, tmp_path / "model").joinpath("model.safetensors").read_bytes()
        rename, calls = Path.rename, []

        def flaky(self, target):
            if str(target).endswith(LEFTOVER):  # of a temporary folder, which may keep the name it has
                return rename(self, target)
            calls.append(self)
            if len(calls) in (failing if isinstance(failing, tuple) else (failing,)):
                raise OSError("no")
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", flaky)
        with pytest.raises(OSError):
            export_model(model, tmp_path / "model", overwrite=True)
        (survivor,) = tmp_path.rglob("model.safetensors")
        assert survivor.read_bytes() == before

    def test_a_new_folder_has_the_mode_that_the_user_wants(self, tmp_path):
        before = os.umask(0o027)
        try:
            folder = export_model(BERT.rank("Model")(BERT.rank_config()), tmp_path / "model")
        finally:
            os.umask(before)
        assert folder.stat().st_mode & 0o777 == 0o750

    @pytest.mark.parametrize("overwrite", [False, True])
    def test_a_failed_export_leaves_nothing_half_written(self, overwrite, tmp_path, monkeypatch):
        model = BERT.rank("Model")(BERT.rank_config())
        if overwrite:
            before = export_model(model, tmp_path / "model").joinpath("model.safetensors").read_bytes()

        class Broken:
            def save_pretrained(self, folder):
                raise OSError("disk full")

        with pytest.raises(OSError, match="disk full"):
            export_model(model, tmp_path / "model", tokenizer=Broken(), overwrite=overwrite)
        assert [path.name for path in tmp_path.iterdir()] == (["model"] if overwrite else [])
        if overwrite:
            assert (tmp_path / "model" / "model.safetensors").read_bytes() == before

    def test_models_that_cannot_be_exported_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match="only a rank model can be exported, got a BertModel"):
            export_model(
                BertModel(BertConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)), tmp_path / "x"
            )

        class Mine(BERT.rank("Model")):
            pass

        with pytest.raises(ValueError, match="Mine is defined in test_sharing"):
            export_model(Mine(BERT.rank_config()), tmp_path / "x", remote_code=True)
        assert not list(tmp_path.iterdir())

    def test_saving_a_checkpoint_copies_no_source(self, tmp_path):
        export_model(BERT.rank("Model")(BERT.rank_config()), tmp_path / "model", remote_code=True)
        BERT.rank("Model")(BERT.rank_config()).save_pretrained(tmp_path / "checkpoint")
        assert not list((tmp_path / "checkpoint").glob("*.py"))


class TestCard:
    def test_metadata_and_text(self):
        result = EvalResult(
            task_type="fill-mask",
            dataset_type="wikitext",
            dataset_name="WikiText",
            dataset_split="test",
            metric_type="perplexity",
            metric_value=12.25,
        )
        card = model_card(
            BERT.rank_config(qk_rank=[2, 2, 5]),
            model_class="RankBertForMaskedLM",
            auto_class="AutoModelForMaskedLM",
            repo_id="me/narrow-bert",
            base_model="google-bert/bert-base-uncased",
            datasets=["wikitext"],
            results=[result],
            how="Trained for 3 epochs.",
            live_parameters=1234567,
        )
        data = ModelCard(str(card)).data.to_dict()
        assert data["library_name"] == "hf_rankattn" and data["pipeline_tag"] == "fill-mask"
        assert data["base_model"] == "google-bert/bert-base-uncased" and data["datasets"] == ["wikitext"]
        assert {"rank-attention", "rank_bert", "qk_rank-2", "qk_rank-5"} <= set(data["tags"])
        assert data["metrics"] == ["perplexity"]
        (index,) = data["model-index"]
        assert index["results"][0]["metrics"][0]["value"] == 12.25
        text = card.content
        assert "| 0 to 1 | 4 | 2 | 8 | no |" in text and "| 2 | 4 | 5 | 8 | no |" in text
        assert "| WikiText | test | perplexity | 12.25 |" in text
        assert "1,234,567 trainable parameters" in text and "Trained for 3 epochs." in text
        assert "import hf_rankattn" in text and "trust_remote_code" not in text

    def test_a_card_without_numbers_says_so_and_claims_no_licence(self):
        card = model_card(XLNET.rank_config(qk_rank=2), model_class="RankXLNetModel", repo_id="me/x")
        assert "No measurements were given" in card.content and "model-index" not in card.content
        assert "license" not in card.content

    def test_numbers_of_numpy_and_one_dataset(self):
        fields = {"task_type": "other", "dataset_type": "x", "dataset_name": "x", "metric_type": "m"}
        results = [EvalResult(**fields, metric_value=np.float32(0.5)), EvalResult(**fields, metric_value="high")]
        card = model_card(
            BERT.rank_config(), model_class="RankBertModel", repo_id="me/x", datasets="sst2", results=results
        )
        assert card.data.datasets == ["sst2"] and "| 0.5 |" in card.text and "| high |" in card.text

    def test_nonsense_is_refused(self):
        with pytest.raises(ValueError, match="`results` takes huggingface_hub.EvalResult objects, got 0.5"):
            model_card(BERT.rank_config(), model_class="RankBertModel", repo_id="me/x", results=[0.5])
        with pytest.raises(ValueError, match="configuration of a rank model, got a BertConfig"):
            model_card(BERT.stock_config(), model_class="BertModel", repo_id="me/x")

    @pytest.mark.parametrize("remote_code", [False, True])
    @pytest.mark.parametrize("kind", ["albert", "points"])
    def test_every_snippet_on_the_card_runs(self, remote_code, kind, tmp_path):
        if kind == "albert":
            model = ALBERT.rank("ForSequenceClassification")(ALBERT.rank_config(qk_rank=[2, 3]))
        else:
            model = RankEncoderForPointRegression(RankEncoderConfig(input_dim=4))
        export_model(model, tmp_path / "model", remote_code=remote_code)
        text = (tmp_path / "model" / "README.md").read_text()
        snippets = [part.split("```")[0] for part in text.split("```python\n")[1:]]
        assert len(snippets) == 1 + remote_code
        for snippet in snippets:
            start = BLOCKER if "trust_remote_code" in snippet else ""
            code = start + snippet + "\nprint(type(model).__name__)"
            assert run(code, {"HF_HOME": str(tmp_path / "home")}, cwd=tmp_path) == type(model).__name__


PUSH = """
import torch, hf_rankattn
from hf_rankattn import RankBertConfig, RankBertForMaskedLM
torch.manual_seed(7)
config = RankBertConfig(vocab_size=47, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, qk_rank=3)
model = RankBertForMaskedLM(config)
model.push_to_hub("user/narrow-bert"{more})
print(model.eval()(input_ids=torch.arange(1, 9)[None])[0].detach().double().abs().sum().item())
"""


class TestHub:
    """Against a stand-in of the Hub's HTTP interface on loopback, through the real client."""

    @pytest.fixture
    def hub(self):
        with HubStandIn() as hub:
            yield hub

    def test_push_and_load_with_and_without_the_package(self, hub):
        online = {"HF_HUB_OFFLINE": "0"}
        expected = pytest.approx(float(run(PUSH.format(more=", remote_code=True"), {**hub.env(), **online})), rel=1e-6)
        files = hub.files("user/narrow-bert")
        assert {"README.md", "config.json", "model.safetensors", "modeling_rank_bert.py"} <= set(files)
        card = ModelCard(files["README.md"].decode())
        assert "qk_rank-3" in card.data.tags and 'from_pretrained("user/narrow-bert"' in card.text
        for start, more in (("import hf_rankattn\n", ""), (BLOCKER, ", trust_remote_code=True")):
            load = LOAD.format(loader="AutoModelForMaskedLM", where="user/narrow-bert", more=more)
            code = start + "from transformers import AutoModelForMaskedLM\n" + load + FINGERPRINT
            assert float(run(code, {**hub.env(), **online})) == expected

    def test_a_card_written_by_hand_survives_a_second_push(self, hub):
        online = {"HF_HUB_OFFLINE": "0"}
        run(PUSH.format(more=""), {**hub.env(), **online})
        by_hand = (
            "from huggingface_hub import HfApi\n"
            "HfApi().upload_file(path_or_fileobj=b'# By hand', path_in_repo='README.md', repo_id='user/narrow-bert')\n"
            "print(1)"
        )
        run(by_hand, {**hub.env(), **online})
        run(PUSH.format(more=""), {**hub.env(), **online})
        assert hub.files("user/narrow-bert")["README.md"] == b"# By hand"
        card = "from hf_rankattn import model_card\n"
        run(
            card + PUSH.format(more=", card=model_card(config, model_class='RankBertForMaskedLM', repo_id='x/y')"),
            {**hub.env(), **online},
        )
        assert b"rank-attention" in hub.files("user/narrow-bert")["README.md"]

    def test_branches_and_tags(self, hub):
        env = {**hub.env(), "HF_HUB_OFFLINE": "0"}
        run(PUSH.format(more=""), env)
        run(PUSH.format(more=", revision='draft', tags=['draft-tag']"), env)
        assert b"draft-tag" in hub.files("user/narrow-bert", revision="draft")["README.md"]
        assert b"draft-tag" not in hub.files("user/narrow-bert")["README.md"]

    def test_a_wrong_token_is_an_error(self, hub):
        env = {**hub.env(), "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_wrong"}
        result = subprocess.run(
            [sys.executable, "-c", PUSH.format(more="")], capture_output=True, text=True, env={**os.environ, **env}
        )
        assert result.returncode != 0 and "401" in result.stderr
