"""Sharing: exported folders and the Hub, loaded from clean processes, with cards that say only what was measured."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hub_stand_in import HubStandIn
from huggingface_hub import EvalResult, EvalResultEntry, ModelCard, parse_eval_result_entries
from testing_common import BERT, FAMILIES, FAMILY_IDS, XLNET, run_code

from hf_rankattn import RankEncoderConfig, RankEncoderForPointRegression, export_model, model_card
from hf_rankattn.hub.sharing import carried_card
from hf_rankattn.models.registration import auto_classes


SMALL = {"qk_rank": 3, "v_head_dim": 5, "qk_norm": True}
BLOCKER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "hf_rankattn":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


# loads folders, or runs the snippets of cards, and prints {name of the job: [class, sum of the absolute output]} as JSON
LOAD = """
import json, sys, torch, transformers
answers = {}
for name, (folder, loader, options) in json.loads(sys.argv[1]).items():
    try:
        if loader == "snippet":
            exec(folder, scope := {})
            model = scope["model"]
        else:
            source = transformers if loader.startswith("Auto") else sys.modules["hf_rankattn"]
            model = getattr(source, loader).from_pretrained(folder, **options)
        points = {"points": torch.linspace(-1, 1, 40).view(1, 5, 8)}
        inputs = points if hasattr(model.config, "input_dim") else {"input_ids": torch.arange(1, 9)[None]}
        answers[name] = [type(model).__name__, model.eval()(**inputs)[0].detach().double().abs().sum().item()]
    except Exception as error:
        answers[name] = ["error", str(error)]
print("\\n" + json.dumps(answers))  # after a question of transformers
"""
# what transformers offers to share source
REGISTERED = """
import hf_rankattn
for name, fields in (("XLNet", {"vocab_size": 9, "d_model": 8, "n_layer": 1, "n_head": 2, "d_inner": 8}), ("Encoder", {"input_dim": 8})):
    config, model = getattr(hf_rankattn, f"Rank{name}Config"), getattr(hf_rankattn, f"Rank{name}Model")
    config.register_for_auto_class()
    model.register_for_auto_class("AutoModel")
    model(config(**fields, qk_rank=2)).save_pretrained(f"registered-{name}")
"""
TRUST = {"trust_remote_code": True}


def answers_of(code: str, *arguments: str, **options) -> Any:
    """What a clean process prints last, as JSON."""
    return json.loads(run_code(code, *arguments, **options).stdout.strip().splitlines()[-1])


def output_sum(model: torch.nn.Module) -> float:
    points = {"points": torch.linspace(-1, 1, 40).view(1, 5, 8)}
    inputs = points if hasattr(model.config, "input_dim") else {"input_ids": torch.arange(1, 9)[None]}
    with torch.no_grad():
        return model.eval()(**inputs)[0].double().abs().sum().item()


def shared_models():
    """Name of a folder -> a model, and the Auto class that loads it."""
    for family in FAMILIES:
        config = family.rank_config(**SMALL)
        yield f"{family.name}Model", family.rank("Model")(config), "AutoModel"
        classifier = family.rank("ForTokenClassification")(config)
        yield f"{family.name}Tokens", classifier, "AutoModelForTokenClassification"
    # a class without an Auto class of its own is what AutoModel loads from its folder
    config = RankEncoderConfig(input_dim=8, num_attention_heads=3, qk_rank=2, v_head_dim=5)
    yield "Points", RankEncoderForPointRegression(config), "AutoModel"


@pytest.mark.parametrize("installed", [True, False], ids=["with-the-package", "without"])
def test_shared_source_loads_in_a_clean_process(installed, tmp_path):
    """Exports, card snippets and `register_for_auto_class`; foreign code is run only where it is trusted."""
    expected, jobs = {}, {}
    for name, model, loader in shared_models():
        folder = export_model(model, tmp_path / name, remote_code=True)
        expected[name] = [type(model).__name__, pytest.approx(output_sum(model), rel=1e-6)]
        # the package has registered another class of the family, so its AutoModel is not used for this folder
        loader = "RankEncoderForPointRegression" if installed and name == "Points" else loader
        jobs[name] = (name, loader, {} if installed else TRUST)
        snippets = [part.split("```")[0] for part in (folder / "README.md").read_text().split("```python\n")[1:]]
        assert len(snippets) == 2 and ["trust_remote_code" in snippet for snippet in snippets] == [False, True]
        jobs[f"snippet-{name}"] = (snippets[0 if installed else 1], "snippet", {})
        expected[f"snippet-{name}"] = expected[name]
    trap = export_model(BERT.rank("Model")(BERT.rank_config(**SMALL)), tmp_path / "trap", remote_code=True)
    source = trap / "configuration_rank_bert.py"
    source.write_text(source.read_text() + f"\nopen({str(tmp_path / 'ran')!r}, 'w')\n")
    jobs["trap"] = ("trap", "AutoModel", {})
    if not installed:
        run_code(REGISTERED, cwd=tmp_path)
        jobs["XLNet"], jobs["Encoder"] = [(f"registered-{name}", "AutoModel", TRUST) for name in ("XLNet", "Encoder")]
    start = "import hf_rankattn\n" if installed else BLOCKER
    answers = answers_of(start + LOAD, json.dumps(jobs), cwd=tmp_path, HF_HOME=str(tmp_path / "home"))
    assert {name: answers[name] for name in expected} == expected
    assert not (tmp_path / "ran").exists() and answers["trap"][0] == ("RankBertModel" if installed else "error")
    if not installed:
        assert [answers[name][0] for name in ("XLNet", "Encoder")] == ["RankXLNetModel", "RankEncoderModel"]


@pytest.mark.parametrize("family", FAMILIES, ids=FAMILY_IDS)
class TestExport:
    def test_source_is_there_only_with_remote_code(self, family, tmp_path):
        export_model(family.rank("Model")(family.rank_config(**SMALL)), tmp_path / "first", remote_code=True)
        auto_map = json.loads((tmp_path / "first" / "config.json").read_text())["auto_map"]
        assert set(auto_map) == {"AutoConfig", *auto_classes(family.rank("Config"))}
        loaded = family.rank("Model").from_pretrained(tmp_path / "first")
        export_model(loaded, tmp_path / "second")
        loaded.save_pretrained(tmp_path / "third")
        for folder in ("second", "third"):
            assert not list((tmp_path / folder).glob("*.py"))
            assert "auto_map" not in json.loads((tmp_path / folder / "config.json").read_text())


class TestExportedFolder:
    def test_only_a_model_folder_is_ever_replaced(self, tmp_path, monkeypatch):
        model = BERT.rank("Model")(BERT.rank_config())
        (tmp_path / "thesis").mkdir()
        (tmp_path / "thesis" / "chapter.txt").write_text("mine")
        with pytest.raises(ValueError, match="does not hold a model"):
            export_model(model, tmp_path / "thesis", overwrite=True)
        assert (tmp_path / "thesis" / "chapter.txt").read_text() == "mine"
        folder = export_model(model, tmp_path / "model")
        (folder / "note.txt").write_text("mine")
        with pytest.raises(ValueError, match="exists already"):
            export_model(model, folder)
        with monkeypatch.context() as patch, pytest.raises(ValueError, match="is or contains the working directory"):
            patch.chdir(folder)
            export_model(model, ".", overwrite=True)
        assert (folder / "note.txt").read_text() == "mine"
        export_model(model, folder, overwrite=True)
        assert {path.name for path in tmp_path.iterdir()} == {"thesis", "model"}
        assert not (folder / "note.txt").exists()

    def test_models_that_cannot_be_exported_are_refused(self, tmp_path):
        with pytest.raises(ValueError, match="only a rank model can be exported, got a BertModel"):
            export_model(BERT.stock("Model")(BERT.stock_config()), tmp_path / "x")

        class Mine(BERT.rank("Model")):
            pass

        with pytest.raises(ValueError, match="Mine is defined in test_sharing"):
            export_model(Mine(BERT.rank_config()), tmp_path / "x", remote_code=True)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("value", [torch.nan, -torch.inf])
    def test_weights_that_are_not_finite_are_refused(self, value, tmp_path):
        model = BERT.rank("Model")(BERT.rank_config())
        with torch.no_grad():
            model.encoder.layer[1].output.dense.weight[3, 2] = value
        for share in (lambda: export_model(model, tmp_path / "x"), lambda: model.push_to_hub("user/x")):
            with pytest.raises(ValueError, match="encoder.layer.1.output.dense.weight of .* holds NaN or Inf"):
                share()
        assert not list(tmp_path.iterdir())


def measured(metric: str, value, **fields) -> EvalResult:
    fields = {"task_type": "fill-mask", "dataset_type": "x", "dataset_name": "x", **fields}
    return EvalResult(**fields, metric_type=metric, metric_value=value)


class TestCard:
    def test_metadata_and_text(self):
        named = {
            "model_class": "RankBertForMaskedLM",
            "auto_class": "AutoModelForMaskedLM",
            "repo_id": "me/narrow-bert",
        }
        told = {"datasets": ["wikitext"], "how": "Trained for 3 epochs.", "live_parameters": 1234567}
        told["results"] = [measured("perplexity", 12.25, dataset_name="WikiText", dataset_split="test")]
        config = BERT.rank_config(qk_rank=[2, 2, 5])
        card = model_card(config, **named, **told, base_model="google-bert/bert-base-uncased")
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
        results = [measured("m", np.float32(0.5)), measured("m", "high")]
        named = {"model_class": "RankBertModel", "repo_id": "me/x", "datasets": "sst2"}
        card = model_card(BERT.rank_config(), **named, results=results)
        assert card.data.datasets == ["sst2"] and "| 0.5 |" in card.text and "| high |" in card.text

    def test_nonsense_is_refused(self):
        for config, results, message in (
            (BERT.rank_config(), [0.5], "`results` takes huggingface_hub.EvalResult objects, got 0.5"),
            (BERT.rank_config(), [measured("loss", np.float32("nan"))], "the loss is nan: cards hold finite numbers"),
            (BERT.stock_config(), [], "configuration of a rank model, got a BertConfig"),
        ):
            with pytest.raises(ValueError, match=message):
                model_card(config, model_class="RankBertModel", repo_id="me/x", results=results)


class TestEvalResults:
    def test_the_client_of_the_hub_reads_what_is_written(self, tmp_path):
        source = {"source_url": "https://huggingface.co/me/narrow", "source_name": "Model card"}
        entries = [
            EvalResultEntry("TIGER-Lab/MMLU-Pro", "mmlu_pro", 12.5, date="2026-11-18", notes="qk_rank=16", **source),
            EvalResultEntry("cais/hle", "hle", 2.5, dataset_revision="5503434ddd753f426f4b38109466949a1217c2bb"),
            EvalResultEntry("TIGER-Lab/MMLU-Pro", "mmlu_pro", np.float64(25), notes="stock"),
        ]
        model = BERT.rank("ForMaskedLM")(BERT.rank_config(qk_rank=3))
        folder = export_model(model, tmp_path / "shared", eval_results=entries)
        files = sorted((folder / ".eval_results").iterdir())
        assert [file.name for file in files] == ["TIGER-Lab--MMLU-Pro.yaml", "cais--hle.yaml"]
        read = [entry for file in files for entry in parse_eval_result_entries(yaml.safe_load(file.read_text()))]
        assert read == [entries[0], entries[2], entries[1]]
        assert not (export_model(model, tmp_path / "without") / ".eval_results").exists()

    @pytest.mark.parametrize(
        "entry, message",
        [
            (measured("accuracy", 0.5), "`eval_results` takes huggingface_hub.EvalResultEntry objects"),
            (
                EvalResultEntry("held-out texts", "x", 1),
                "a dataset of the Hub, written owner/name, got 'held-out texts'",
            ),
            (EvalResultEntry("sst2", "x", 1), "written owner/name, got 'sst2'"),
            (EvalResultEntry("../up/x", "x", 1), "written owner/name"),
            (EvalResultEntry("cais/hle", "", 1), "`task_id` must be a task in the eval.yaml of cais/hle, got ''"),
            (EvalResultEntry("cais/hle", "hle", float("nan")), "must be a finite number, got nan"),
            (EvalResultEntry("cais/hle", "hle", "12 %"), "must be a finite number, got '12 %'"),
            (EvalResultEntry("cais/hle", "hle", 1, date="18.11.2026"), "ISO 8601 date such as '2026-01-31'"),
        ],
    )
    def test_what_the_hub_could_not_read_is_refused(self, entry, message, tmp_path):
        model = BERT.rank("ForMaskedLM")(BERT.rank_config(qk_rank=3))
        with pytest.raises(ValueError, match=message):
            export_model(model, tmp_path / "shared", eval_results=[entry])
        assert not list(tmp_path.iterdir())


# pushes: new, over a card written by hand, with a card, to a branch, with a wrong token
PUSH = """
import json, torch
from hf_rankattn import RankBertConfig, RankBertForMaskedLM, model_card
from huggingface_hub import EvalResultEntry, HfApi
from transformers import AutoModelForMaskedLM
torch.manual_seed(7)
config = RankBertConfig(vocab_size=47, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, qk_rank=3)
model = RankBertForMaskedLM(config)
model.push_to_hub("user/narrow-bert", remote_code=True)
for again in range(2):
    model.push_to_hub("user/by-hand")
    HfApi().upload_file(path_or_fileobj=b"# By hand", path_in_repo="README.md", repo_id="user/by-hand")
model.push_to_hub("user/with-card")
model.push_to_hub("user/with-card", card=model_card(config, model_class="RankBertForMaskedLM", repo_id="x/y"),
    eval_results=[EvalResultEntry("cais/hle", "hle", 2.5)])
model.push_to_hub("user/narrow-bert", revision="draft", tags=["draft-tag"])
try:
    model.push_to_hub("user/narrow-bert", token="hf_wrong")
    raise SystemExit("a wrong token was accepted")
except Exception as error:
    refused = str(error)
loaded = AutoModelForMaskedLM.from_pretrained("user/narrow-bert")
sums = [m.eval()(input_ids=torch.arange(1, 9)[None])[0].detach().double().abs().sum().item() for m in (model, loaded)]
print(json.dumps([refused, *sums]))
"""

# pushes what is in a folder, then a model that was changed since it was loaded, then what is on the Hub
PUSH_LOADED = """
import sys, torch
from hf_rankattn import RankBertForMaskedLM, convert_rank
folder = sys.argv[1]
RankBertForMaskedLM.from_pretrained(folder).push_to_hub("user/same")
changed = RankBertForMaskedLM.from_pretrained(folder)
changed.cls.predictions.bias.data += 1
changed.push_to_hub("user/changed", remote_code=False)
convert_rank(RankBertForMaskedLM.from_pretrained(folder), 2).push_to_hub("user/narrower")
RankBertForMaskedLM.from_pretrained("user/same").push_to_hub("user/again")
RankBertForMaskedLM.from_pretrained("user/same").push_to_hub("user/no-source", remote_code=False)
"""


class TestHub:
    """Against a stand-in of the Hub's HTTP interface on loopback, through the real client."""

    @pytest.fixture
    def hub(self):
        with HubStandIn() as hub:
            yield hub

    def test_push_and_load_with_and_without_the_package(self, hub):
        refused, pushed, loaded = answers_of(PUSH, **hub.env())
        assert "401" in refused and loaded == pytest.approx(pushed, rel=1e-6)
        files = hub.files("user/narrow-bert")
        assert {"README.md", "config.json", "model.safetensors", "modeling_rank_bert.py"} <= set(files)
        card = ModelCard(files["README.md"].decode())
        assert "qk_rank-3" in card.data.tags and 'from_pretrained("user/narrow-bert"' in card.text
        job = json.dumps({"it": ("user/narrow-bert", "AutoModelForMaskedLM", TRUST)})
        assert answers_of(BLOCKER + LOAD, job, **hub.env())["it"] == [
            "RankBertForMaskedLM",
            pytest.approx(pushed, rel=1e-6),
        ]
        assert hub.files("user/by-hand")["README.md"] == b"# By hand"
        with_card = hub.files("user/with-card")
        assert b"x/y" in with_card["README.md"] and b"id: cais/hle" in with_card[".eval_results/cais--hle.yaml"]
        assert b"draft-tag" in hub.files("user/narrow-bert", revision="draft")["README.md"]
        assert b"draft-tag" not in files["README.md"]

    def test_a_loaded_model_is_pushed_with_the_card_and_tokenizer_of_its_folder(self, hub, tmp_path):
        model = BERT.rank("ForMaskedLM")(BERT.rank_config(qk_rank=3))
        named = {"model_class": "RankBertForMaskedLM", "auto_class": "AutoModelForMaskedLM", "repo_id": "cut"}
        named |= {"base_model": "google-bert/bert-base-uncased", "remote_code": True}
        card = model_card(model.config, **named, results=[measured("loss", 2.75, dataset_name="Held-out")])
        folder = export_model(model, tmp_path / "cut", card=card, remote_code=True)
        beside = {"vocab.txt": "[UNK]\nrank\n", "tokenizer_config.json": "{}", "modules.json": "[]"}
        for name, text in {**beside, "notes.txt": "private"}.items():
            (folder / name).write_text(text)
        for name, text in {"1_Pooling/config.json": "{}", "2_Dense/pytorch_model.bin": "weights of a module"}.items():
            (folder / name).parent.mkdir()
            (folder / name).write_text(text)
        (tmp_path / "secret").write_text("private")
        (folder / "merges.txt").symlink_to(tmp_path / "secret")
        linked = export_model(model, tmp_path / "linked")
        (linked / "README.md").unlink()
        (linked / "README.md").symlink_to(tmp_path / "secret")
        card = carried_card(type(model).from_pretrained(linked), linked, "user/linked", False)
        assert "private" not in card.content
        source = {path.name for path in folder.glob("*.py")}
        result = run_code(PUSH_LOADED, str(folder), **hub.env())
        model_files = {"README.md", "config.json", "model.safetensors", ".gitattributes"}
        carried = {*beside, "1_Pooling/config.json", "2_Dense/pytorch_model.bin", *model_files}
        with_source = {f"user/{name}": carried | source for name in ("same", "narrower", "again")}
        for repo_id, expected in {**with_source, "user/changed": carried, "user/no-source": carried}.items():
            files = hub.files(repo_id)
            assert set(files) == expected, repo_id
            assert ("auto_map" in json.loads(files["config.json"])) == (source < expected)
            text = files["README.md"].decode()
            assert f'("{repo_id}"' in text and '("cut"' not in text
            assert ("trust_remote_code=True" in text) == (source < expected)
            data = ModelCard(text).data.to_dict()
            assert data["library_name"] == ("transformers" if source < expected else "hf_rankattn")
            assert data["base_model"] == "google-bert/bert-base-uncased"
            if repo_id in ("user/changed", "user/narrower"):  # the numbers are not theirs
                assert "model-index" not in data and "No measurements were given" in text
            else:
                assert data["model-index"][0]["results"][0]["metrics"][0]["value"] == 2.75
                assert "| Held-out |  | loss | 2.75 |" in text
        assert result.stderr.count("is not uploaded, since it is not about this model") == 2
