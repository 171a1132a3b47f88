"""What `rankattn convert` calibrates on, what it prints and writes to the card, and which sources it refuses."""

import json
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors import SafetensorError
from testing_command import command, refusal, save_tiny, told
from testing_common import ALBERT, BERT, XLNET
from testing_folders import change_config, checkpoint_folder
from transformers import AutoModel, AutoTokenizer

from hf_rankattn.convert import checkpoint as converting


class TestCalibration:
    def test_texts_by_default_and_weights_alone_when_asked_for(self, tmp_path, minilm):
        source = save_tiny(tmp_path / "tiny", minilm)
        options = {"default": [], "package": ["--calibration", "package"], "none": ["--calibration", "none"]}
        cut = [source, "--qk-rank", 2, "--out"]
        found = {name: command(*cut, tmp_path / name, *more) for name, more in options.items()}
        default, package, none = ((tmp_path / name / "model.safetensors").read_bytes() for name in options)
        assert default == package != none
        assert found["default"]["calibrated_on"].endswith("texts of the package")
        assert found["none"]["calibrated_on"] is None
        assert found["default"]["damage"]["embedding_cosine"] > found["none"]["damage"]["embedding_cosine"]

    def test_the_default_objective_fits_the_heads(self):
        wide = BERT.stock_config(hidden_size=132, num_attention_heads=4)
        configs = {
            "attention": [BERT.stock_config(), ALBERT.stock_config(), BERT.rank_config(qk_rank=32)],
            "logits": [wide, XLNET.stock_config(), BERT.rank_config(qk_rank=33)],
        }
        for objective, each in configs.items():
            assert {converting.default_objective(config) for config in each} == {objective}
        assert converting.default_objective(BERT.stock_config(), calibrated=False) == "logits"

    def test_only_options_that_can_be_used_are_advised(self, tmp_path, minilm):
        bert = save_tiny(tmp_path / "bert", minilm)
        xlnet = str(checkpoint_folder(XLNET, tmp_path / "xlnet", n_layer=1))
        cases = {
            (bert, "--objective", "logits"): ("--objective attention", "--distil-steps"),
            (bert, "--calibration", "none"): (),
            (bert, "--stream"): (),
            (xlnet,): ("--distil-steps",),
        }
        for place, ((source, *more), advised) in enumerate(cases.items()):
            said = told(source, "--qk-rank", 2, "--out", tmp_path / str(place), *more)
            (line,) = (line for line in said.splitlines() if line.startswith("To lose less"))
            options = ("--objective attention", "--distil-steps")
            assert tuple(option for option in options if option in line) == advised
            assert ("The damage and the latency were not measured: a streamed" in said) == ("--stream" in more)

    def test_the_output_says_what_calibrated_and_that_other_text_loses_more(self, tmp_path, minilm):
        source = save_tiny(tmp_path / "tiny", minilm)
        said = told(source, "--qk-rank", 2, "--out", tmp_path / "x")
        assert "texts of the package, objective attention. Text of another kind loses more" in said
        assert "--calibration FILE" in said
        card = (tmp_path / "x" / "README.md").read_text()
        assert "texts of the package" in card and "Text of another kind loses more" in card

    def test_without_a_tokenizer_it_says_what_to_do_and_invents_none(self, tmp_path, minilm, capsys):
        source = save_tiny(tmp_path / "bare", minilm, tokenizer=False)
        line = refusal(capsys, source, "--qk-rank", 2, "--out", tmp_path / "x")
        assert "has no tokenizer" in line and "--calibration none" in line
        found = command(source, "--qk-rank", 2, "--calibration", "none", "--out", tmp_path / "x")
        assert {path.name for path in (tmp_path / "x").iterdir()} == {"README.md", "config.json", "model.safetensors"}
        assert found["damage"] == {} and found["latency"]["ratio"] > 0
        more = ["--calibration", "none", "--dataset", "data", "--out", tmp_path / "y"]
        assert "has no tokenizer" in refusal(capsys, source, "--qk-rank", 2, *more)

    def test_a_tokenizer_that_fails_in_use(self, tmp_path, minilm, capsys):
        source = save_tiny(tmp_path / "tiny", minilm)
        file = Path(source) / "tokenizer.json"
        tokenizer = json.loads(file.read_text())
        tokenizer["model"]["vocab"] = {word: place for word, place in tokenizer["model"]["vocab"].items() if place < 1}
        tokenizer["added_tokens"] = []
        file.write_text(json.dumps(tokenizer))
        line = refusal(capsys, source, "--qk-rank", 2, "--out", tmp_path / "x")
        assert "--calibration none" in line and not (tmp_path / "x").exists()
        found = command(source, "--qk-rank", 2, "--calibration", "none", "--out", tmp_path / "x")
        assert found["damage"] == {} and (tmp_path / "x" / "tokenizer.json").read_bytes() == file.read_bytes()


class TestOutput:
    @pytest.mark.parametrize(
        "suffix, task, measure",
        [
            ("ForSequenceClassification", "text-classification", "label_agreement"),
            ("ForMaskedLM", "fill-mask", "masked_token_agreement"),
            ("ForQuestionAnswering", "question-answering", "span_agreement"),
            ("Model", "feature-extraction", "nearest_text_agreement"),
        ],
    )
    def test_damage_and_model_index_fit_the_task(self, suffix, task, measure, tmp_path, minilm):
        source = save_tiny(tmp_path / "tiny", minilm, suffix=suffix)
        found = command(source, "--qk-rank", 2, "--calibration", "none", "--out", tmp_path / "x")
        assert list(found["damage"])[0] == measure
        data = ModelCard.load(tmp_path / "x" / "README.md").data
        results = data.eval_results
        assert {result.task_type for result in results} == {task} and data.pipeline_tag in (task, None)
        command(source, "--qk-rank", 2, "--stream", "--out", tmp_path / "y")
        streamed = ModelCard.load(tmp_path / "y" / "README.md").data.eval_results
        assert {result.task_type for result in streamed} == {task}
        assert results[0].metric_type == measure and results[0].metric_value == round(found["damage"][measure], 4)

    def test_the_card_of_a_language_model_names_one_task(self, tmp_path, minilm):
        source = save_tiny(tmp_path / "tiny", minilm, XLNET, "LMHeadModel", tokenizer=False)
        command(source, "--qk-rank", 2, "--stream", "--out", tmp_path / "x")
        data = ModelCard.load(tmp_path / "x" / "README.md").data
        assert {result.task_type for result in data.eval_results} == {data.pipeline_tag} == {"text-generation"}

    def test_labels_of_a_dataset(self, tmp_path, minilm):
        source = save_tiny(tmp_path / "tiny", minilm, suffix="ForSequenceClassification", num_labels=3)
        (tmp_path / "data").mkdir()
        lines = [f"bread number {place},{place % 3}" for place in range(9)]
        (tmp_path / "data" / "test.csv").write_text("\n".join(["body,kind", *lines]))
        arguments = ["--dataset", tmp_path / "data", "--column", "body", "--label-column", "kind"]
        arguments += ["--out", tmp_path / "x"]
        found = command(source, "--qk-rank", 8, "--calibration", "none", *arguments)
        assert found["judged_on"] == "9 rows of data, test" and found["damage"]["label_agreement"] == 1
        classifier, tokenizer = converting.load(source), AutoTokenizer.from_pretrained(source)
        with torch.no_grad():
            logits = [classifier(**tokenizer(line.split(",")[0], return_tensors="pt")).logits for line in lines]
        right = sum(place % 3 == int(logit.argmax()) for place, logit in enumerate(logits)) / 9
        assert found["damage"]["accuracy"] == found["damage"]["accuracy_of_the_original"] == pytest.approx(right)

    def test_sizes_and_latency_are_measured(self, tmp_path, minilm):
        source = save_tiny(tmp_path / "tiny", minilm)
        for more in ([], ["--stream"]):
            out = tmp_path / f"x{len(more)}"
            found = command(source, "--qk-rank", 2, "--calibration", "none", "--out", out, *more)
            before, after = (AutoModel.from_pretrained(folder).num_parameters() for folder in (source, out))
            assert (found["parameters_before"], found["parameters_after"]) == (before, after)
            assert found["parameters_saved"] == before - after
            assert found["share_saved"] == pytest.approx(1 - after / before)
            for folder, when in ((source, "before"), (out, "after")):
                size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
                assert found[f"weight_bytes_{when}"] == size
            assert f"{after:,}" in (out / "README.md").read_text()
            if more:
                assert found["latency"] is None, "nothing is run"
            else:
                times = found["latency"]
                assert times["ratio"] > 0 and times["before_ms"] > 0 and "2 x " in times["batch"]
                assert f"ratio {times['ratio']:.2f}" in (out / "README.md").read_text()

    def test_remote_code_and_the_import_that_is_needed(self, tmp_path, minilm):
        source = save_tiny(tmp_path / "tiny", minilm)
        change_config(source, auto_map={"AutoModel": "theirs.Model"})
        for more in ([], ["--remote-code"], ["--stream"]):
            out = tmp_path / f"x{len(''.join(more))}"
            said = told(source, "--qk-rank", 2, "--calibration", "none", "--out", out, *more)
            assert "import hf_rankattn" in said
            written, card = json.loads((out / "config.json").read_text()), (out / "README.md").read_text()
            assert ("from hf_rankattn import RankBertModel" if more == ["--stream"] else "import hf_rankattn ") in card
            if more == ["--remote-code"]:
                assert (out / "modeling_rank_bert.py").is_file() and "trust_remote_code=True" in said
                assert written["auto_map"]["AutoModel"] == "modeling_rank_bert.RankBertModel"
                assert "trust_remote_code=True" in card
            else:
                assert "auto_map" not in written and not list(out.glob("*.py"))

    def test_the_base_model_is_a_repository_or_nothing(self, tmp_path, minilm):
        source = save_tiny(tmp_path / "model", minilm)
        said = told(source, "--qk-rank", 2, "--calibration", "none", "--out", tmp_path / "x")
        assert "--base-model" in said and "base_model" not in (tmp_path / "x" / "README.md").read_text()
        command(source, "--qk-rank", 2, "--stream", "--base-model", "some/bert", "--out", tmp_path / "y")
        assert ModelCard.load(tmp_path / "y" / "README.md").data.base_model == "some/bert"

    def test_a_full_disk_is_one_line_and_leaves_nothing(self, tmp_path, minilm, monkeypatch, capsys):
        source = save_tiny(tmp_path / "tiny", minilm)

        def full(*args, **kwargs):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
        line = refusal(capsys, source, "--qk-rank", 2, "--out", tmp_path / "x")
        assert "No space left on device" in line and {path.name for path in tmp_path.iterdir()} == {"tiny"}

    @pytest.mark.parametrize("name", ["model.safetensors", "sub/w.safetensors"])
    def test_weights_may_be_links_or_have_another_name(self, name, tmp_path, minilm):
        source = Path(save_tiny(tmp_path / "tiny", minilm))
        weights = (source / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
        (source / "sub").mkdir()
        (source / name).symlink_to(weights)
        if name != "model.safetensors":
            change_config(source, transformers_weights=name)
        found = command(source, "--qk-rank", 2, "--calibration", "none", "--out", tmp_path / "x")
        assert found["weight_bytes_before"] == weights.stat().st_size
        assert AutoModel.from_pretrained(tmp_path / "x").config.qk_rank == 2

    def test_a_tokenizer_of_another_language(self, tmp_path, minilm, capsys):
        """It is refused with options of this command."""
        source = save_tiny(tmp_path / "tiny", minilm)
        texts = tmp_path / "texts.txt"
        texts.write_text(" ".join(["\U0001f600"] * 100) + "\n", encoding="utf-8")
        line = refusal(capsys, source, "--qk-rank", 2, "--calibration", texts, "--out", tmp_path / "x")
        assert "unknown to the tokenizer" in line and "--calibration none" in line and "--random-inputs" not in line

    def test_an_adapter_is_refused_in_a_stream_too(self, tmp_path, minilm, capsys):
        source = save_tiny(tmp_path / "tiny", minilm)
        (Path(source) / "adapter_config.json").write_text('{"peft_type": "LORA"}')
        line = refusal(capsys, source, "--qk-rank", 2, "--out", tmp_path / "x", "--stream")
        assert "PEFT adapter" in line and "merge_and_unload" in line
