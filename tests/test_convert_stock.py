"""Models whose stock config holds one width for queries, keys and values: the result is a stock checkpoint."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from scipy.io import wavfile
from testing_common import run_code
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer
from typer.testing import CliRunner

from hf_rankattn import convert_rank, package_text
from hf_rankattn.convert import checkpoint as converting
from hf_rankattn.convert import curve
from hf_rankattn.convert.damage import Judge
from hf_rankattn.families.slots import CONVERTIBLE
from hf_rankattn.hub.cards import model_card
from hf_rankattn.models.rank_attention import HeadGeometry
from rankattn_cli import main as cli


VIT = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 37}
VIT |= {"image_size": 32, "patch_size": 8}
T5 = {"d_model": 32, "d_kv": 8, "num_heads": 4, "num_layers": 2, "d_ff": 37, "vocab_size": 47}
# Runs several commands in one process, as most of the time of a process is its imports. The vocabulary of the tokenizer makes
# logits large, so few paragraphs are judged.
SEVERAL = """
import contextlib, io, json, sys
from hf_rankattn.convert import checkpoint
from rankattn_cli import main as cli
checkpoint.JUDGED = slice(40, 48)
printed = []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            cli.main(arguments)
        except SystemExit as exit:
            assert not exit.code, (arguments, exit.code)
    printed.append(json.loads(output.getvalue()))
print(json.dumps(printed))
"""


@dataclass(frozen=True)
class Kind:
    """A model type, its sizes, and the processor that its checkpoints have."""

    model_type: str
    processor: str = "ViTImageProcessor"
    fields: dict[str, Any] = field(default_factory=lambda: VIT)
    width: str = "head_dim"

    def config(self, **fields):
        return AutoConfig.for_model(self.model_type, **self.fields, **fields)

    def model(self, **fields):
        torch.manual_seed(0)
        model = AutoModel.from_config(self.config(**fields)).double().eval()
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.2 * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        return model

    def inputs(self):
        random = torch.Generator().manual_seed(3)
        if self.width == "d_kv":
            ids, mask = torch.randint(3, 47, (3, 9), generator=random), torch.ones(3, 9, dtype=torch.long)
            mask[1, 6:] = 0
            return {
                **{"input_ids": ids, "attention_mask": mask},
                **{"decoder_input_ids": ids.flip(1), "decoder_attention_mask": mask},
            }
        if self.model_type.startswith("audio"):
            return {"input_values": torch.randn(3, 32, 16, generator=random, dtype=torch.float64)}
        batch = {"pixel_values": torch.randn(3, 3, 32, 32, generator=random, dtype=torch.float64)}
        if self.model_type == "vit_mae":
            batch["noise"] = torch.rand(3, 16, generator=random)
        return batch


AUDIO = {"num_mel_bins": 16, "max_length": 32, "frequency_stride": 8, "time_stride": 8}
MAE = {f"decoder_{name}": VIT[name] for name in ("num_attention_heads", "num_hidden_layers", "intermediate_size")}
KINDS = (
    Kind("vit"),
    Kind("deit", "DeiTImageProcessor"),
    Kind("dinov2", "BitImageProcessor"),
    Kind("dinov2_with_registers", "BitImageProcessor"),
    Kind("ijepa"),
    Kind("beit", "BeitImageProcessor", {**VIT, "use_relative_position_bias": True}),
    Kind("vit_mae", fields={**VIT, **MAE, "decoder_hidden_size": 16}),
    Kind("audio-spectrogram-transformer", "ASTFeatureExtractor", {**VIT, **AUDIO}),
    Kind("t5", "", T5, "d_kv"),
    Kind("mt5", "", T5, "d_kv"),
    Kind("umt5", "", T5, "d_kv"),
)
IDS = [kind.model_type for kind in KINDS]


def states(model, batch):
    with torch.no_grad():
        output = model(**batch)
    return output.last_hidden_state[batch.get("decoder_attention_mask", torch.ones(output[0].shape[:2])).bool()]


def test_these_are_all_that_the_table_names():
    named = [name for family in CONVERTIBLE if family.stock_width for name in family.model_types]
    assert sorted(named) == sorted(IDS)


@pytest.mark.parametrize("kind", KINDS, ids=IDS)
class TestWidths:
    def test_stock_still_honours_the_field(self, kind):
        """All of conversion to a stock checkpoint rests on this."""
        model = AutoModel.from_config(AutoConfig.for_model(kind.model_type, **{**kind.fields, kind.width: 5}))
        names = ("q_proj.weight", "k_proj.weight", "v_proj.weight", ".q.weight", ".k.weight", ".v.weight")
        found = [weight for name, weight in model.named_parameters() if name.endswith(names)]
        assert found and {tuple(weight.shape) for weight in found} == {(4 * 5, 32)}

    def test_the_old_width_and_a_wider_one_change_nothing(self, kind):
        model, batch = kind.model(), kind.inputs()
        for width in (8, 11):
            converted = convert_rank(model, width, width, calibration=batch)
            assert type(converted) is type(model) and getattr(converted.config, kind.width) == width
            torch.testing.assert_close(states(converted, batch), states(model, batch), rtol=0, atol=1e-9)

    def test_calibration_loses_less_than_the_weights_alone(self, kind):
        model, batch = kind.model(), kind.inputs()
        target = states(model, batch)
        errors = [
            float((states(convert_rank(model, 4, 4, **options), batch) - target).norm())
            for options in ({"calibration": batch}, {})
        ]
        assert 0 < errors[0] < errors[1]

    def test_a_process_that_does_not_know_us_loads_it(self, kind, tmp_path):
        model, batch = kind.model().float(), kind.inputs()
        batch = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
        converted = convert_rank(model, 4, 4, calibration=batch)
        converted.save_pretrained(tmp_path / "narrow")
        torch.save({"batch": batch, "states": states(converted, batch)}, tmp_path / "expected.pt")
        code = (
            "import sys, torch; torch.set_num_threads(1); from transformers import AutoModel;"
            "torch.set_grad_enabled(False);"  # position biases with gradients go to another kernel
            "model = AutoModel.from_pretrained('narrow').eval(); saved = torch.load('expected.pt');"
            "found = model(**saved['batch']).last_hidden_state;"
            "mask = saved['batch'].get('decoder_attention_mask', torch.ones(found.shape[:2])).bool();"
            "assert torch.equal(found[mask], saved['states']);"
            "assert not any(name.startswith('hf_rankattn') for name in sys.modules)"
        )
        run_code(code, cwd=tmp_path)


def test_values_of_vit_reach_the_optimum():
    """Against Eckart and Young on mixed values and outputs that hooks and maps of the stock model give."""
    kind = KINDS[0]
    model, batch = kind.model(), kind.inputs()
    block = model.layers[0].attention
    narrow = convert_rank(model, 8 - 4, 8 - 4, calibration=batch).layers[0].attention
    # with other queries the maps differ: compare the values on the maps of the cut queries
    cut = convert_rank(model, 4, 4, calibration=batch)
    cut.set_attn_implementation("eager")
    inputs = []
    hook = cut.layers[0].attention.q_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        maps = cut(**batch, output_attentions=True).attentions[0]
    hook.remove()
    for head in range(4):
        old, new = slice(8 * head, 8 * head + 8), slice(4 * head, 4 * head + 4)
        mixed = (maps[:, head] @ (inputs[0] @ block.v_proj.weight[old].T + block.v_proj.bias[old])).flatten(0, 1)
        small = (maps[:, head] @ (inputs[0] @ narrow.v_proj.weight[new].T + narrow.v_proj.bias[new])).flatten(0, 1)
        written = mixed @ block.o_proj.weight[:, old].T
        error = (written - small @ narrow.o_proj.weight[:, new].T).square().sum()
        best = torch.linalg.svdvals(written)[4:].square().sum()
        torch.testing.assert_close(error, best, rtol=1e-6, atol=1e-9)


def test_padding_of_either_side_of_t5_enters_nothing():
    kind = next(kind for kind in KINDS if kind.model_type == "t5")
    model, batch = kind.model(), kind.inputs()
    apart = [
        {name: value[text : text + 1, : int(mask.sum())] for name, value in batch.items()}
        for text, mask in enumerate(batch["attention_mask"])
    ]
    padded, unpadded = (convert_rank(model, 4, 4, calibration=texts) for texts in (batch, apart))
    read = [cut.encoder(apart[1]["input_ids"]).last_hidden_state for cut in (padded, unpadded)]
    torch.testing.assert_close(*read, rtol=0, atol=1e-9)
    # the descent on causal rows multiplies rounding errors
    torch.testing.assert_close(states(padded, apart[1]), states(unpadded, apart[1]), rtol=0, atol=1e-3)


def test_the_decoder_of_vit_mae_is_cut_too():
    torch.manual_seed(0)
    kind = next(kind for kind in KINDS if kind.model_type == "vit_mae")
    model = transformers.ViTMAEForPreTraining(kind.config()).double().eval()
    batch = kind.inputs()
    cut = convert_rank(
        model, 6, 6, calibration=batch
    )  # wider than the 4 of the decoder, narrower than the 8 of the encoder
    assert cut.decoder.decoder_layers[0].attention.q_proj.weight.shape == (24, 16)
    with torch.no_grad():
        assert float((cut(**batch).logits - model(**batch).logits).norm() / model(**batch).logits.norm()) < 0.05
        # narrower than both
        calibrated, by_weights = (convert_rank(model, 3, 3, **options) for options in ({"calibration": batch}, {}))
        errors = [(cut(**batch).logits - model(**batch).logits).norm() for cut in (calibrated, by_weights)]
    assert errors[0] < errors[1]


def test_the_card_of_a_stock_sentence_encoder_needs_no_import():
    """Such as Sentence-T5."""
    config = next(kind for kind in KINDS if kind.model_type == "t5").config()
    heads = HeadGeometry(4, 4, 4, False, 1.0)
    names = {"model_class": "T5EncoderModel", "repo_id": "me/narrow", "sentence_transformers": True}
    card = str(model_card(config, **names, stock_heads=heads))
    assert "from sentence_transformers import" in card and "import hf_rankattn" not in card


def test_distillation_brings_the_states_of_encoder_and_decoder_nearer():
    kind = next(kind for kind in KINDS if kind.model_type == "t5")
    config = kind.config(decoder_start_token_id=0)
    torch.manual_seed(0)
    model, batch = transformers.T5ForConditionalGeneration(config).eval(), kind.inputs()

    def error(cut, name):
        with torch.no_grad():
            found = [cut(**batch, output_hidden_states=True)[name][-1] for cut in (cut, model)]
        return float((found[0] - found[1])[batch["attention_mask"].bool()].norm())

    cut, distilled = (convert_rank(model, 3, 3, calibration=batch, distil_steps=steps) for steps in (0, 30))
    for name in ("encoder_hidden_states", "decoder_hidden_states"):
        assert error(distilled, name) < 0.9 * error(cut, name)


def test_vit_mae_is_judged_on_the_same_patches():
    """It hides patches at random: an unchanged model must keep all of its embeddings."""
    kind = next(kind for kind in KINDS if kind.model_type == "vit_mae")
    model = kind.model()
    judge = Judge(model, None, [{"pixel_values": kind.inputs()["pixel_values"]}], 256)
    assert judge.damage(model) == {"nearest_text_agreement": 1.0, "embedding_cosine": pytest.approx(1, abs=1e-6)}


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"qk_rank": 4}, "one width for queries, keys and values of all layers, `head_dim` .here 8.*Give one integer"),
        ({"v_head_dim": 4}, "Give one integer for both: qk_rank=4, v_head_dim=4"),
        ({"qk_rank": 4, "v_head_dim": 5}, "got qk_rank=4, v_head_dim=5"),
        ({"qk_rank": [4, 4], "v_head_dim": [4, 4]}, "Give one integer for both"),
        ({"qk_rank": "auto", "v_head_dim": "auto", "energy": 0.9}, "Give one integer for both"),
    ],
)
def test_widths_that_a_stock_config_cannot_hold(arguments, message):
    with pytest.raises(ValueError, match=message):
        convert_rank(KINDS[0].model(), **arguments)


def test_what_calibration_needs():
    t5, beit = (next(kind for kind in KINDS if kind.model_type == name) for name in ("t5", "beit"))
    with pytest.raises(ValueError, match="no text for it: add `decoder_input_ids`"):
        convert_rank(t5.model(), 4, 4, calibration={"input_ids": torch.arange(3, 12)[None]})
    with pytest.raises(ValueError, match="not for BEiT, which adds relative positions"):
        convert_rank(beit.model(), 4, 4, calibration=beit.inputs(), objective="attention")


class MyViT(transformers.ViTModel):
    pass


def test_a_class_of_the_user_is_refused():
    with pytest.raises(ValueError, match="MyViT is a class of its own.*Convert a stock ViT class."):
        convert_rank(MyViT(KINDS[0].config()), 4, 4)


class TestCommand:
    @pytest.fixture(autouse=True)
    def few_judged(self, monkeypatch):
        """The vocabulary of the tokenizer makes logits large."""
        for module in (converting, curve):
            monkeypatch.setattr(module, "JUDGED", slice(40, 48))

    @pytest.fixture
    def data(self, tmp_path):
        """A folder of images, one of sounds, and a file of texts."""
        random = np.random.default_rng(0)
        for kind in ("images", "sounds"):
            (tmp_path / kind).mkdir()
        for number in range(4):
            pixels = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / f"{number}.png")
            sound = random.normal(size=4000).astype(np.float32)
            wavfile.write(tmp_path / "sounds" / f"{number}.wav", 16000, sound)
        (tmp_path / "texts.txt").write_text("\n\n".join(package_text()[:4]))
        return tmp_path

    def checkpoint(self, kind, folder, minilm):
        if kind.width == "d_kv":
            torch.manual_seed(0)
            config = AutoConfig.for_model(kind.model_type, **{**T5, "vocab_size": 30522, "decoder_start_token_id": 0})
            # as T5 checkpoints are stored: with the head for generation
            AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
            AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
            return "texts.txt"
        kind.model().float().save_pretrained(folder)
        processor = getattr(transformers, kind.processor)
        if kind.processor == "ASTFeatureExtractor":
            processor(num_mel_bins=16, max_length=32).save_pretrained(folder)
            return "sounds"
        size = {"height": 32, "width": 32}
        options = {"size": size, "crop_size": size, "do_center_crop": False, "do_resize": True}
        processor(**options).save_pretrained(folder)
        return "images"

    def test_every_model_type_from_a_folder_in_a_process_of_its_own(self, data, minilm):
        commands = []
        for kind in KINDS:
            inputs = self.checkpoint(kind, data / kind.model_type, minilm)
            judged = [] if inputs == "texts.txt" else ["--dataset", inputs]
            widths = ["--qk-rank", "4", "--v-head-dim", "4", "--calibration", inputs]
            narrow = f"narrow-{kind.model_type}"
            commands.append(["convert", kind.model_type, *widths, *judged, "--out", narrow, "--json"])
        done = run_code(SEVERAL, json.dumps(commands), cwd=data)
        for kind, told in zip(KINDS, json.loads(done.stdout), strict=True):
            name, narrow = kind.model_type, data / f"narrow-{kind.model_type}"
            assert told["damage"] and told["calibrated_on"].startswith("4 "), name
            assert "stock checkpoint" in told["load"], name
            config = AutoConfig.from_pretrained(narrow)
            assert config.model_type == name and getattr(config, kind.width) == 4
            card = (narrow / "README.md").read_text()
            assert "import hf_rankattn" not in card and "library_name: transformers" in card, name
            weights = dict(AutoModel.from_pretrained(narrow).named_parameters())
            queries = {len(weight) for key, weight in weights.items() if key.endswith(("q_proj.weight", ".q.weight"))}
            assert queries == {16}, name

    def test_a_curve_cuts_both_widths(self, data, minilm, monkeypatch):
        self.checkpoint(next(kind for kind in KINDS if kind.model_type == "t5"), data / "model", minilm)
        monkeypatch.chdir(data)
        arguments = ["convert", "model", "--curve", "--calibration", "texts.txt", "--out", "curve.png", "--json"]
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 0, result.output
        rows = json.loads(result.stdout)["rows"]
        assert {row["rank"] for row in rows} == {1, 2, 4, 6, 8} and (data / "curve.png").stat().st_size
        assert all(row["embedding_cosine"] > 1 - 1e-5 for row in rows if row["rank"] == 8)

    @pytest.mark.parametrize("name", ["t5", "vit"])
    def test_distillation(self, name, data, minilm, monkeypatch):
        inputs = self.checkpoint(next(kind for kind in KINDS if kind.model_type == name), data / "model", minilm)
        (data / "many.txt").write_text("\n\n".join(package_text()[4:8]))
        monkeypatch.chdir(data)
        widths = ["--qk-rank", "4", "--v-head-dim", "4"]
        options = ["--calibration", inputs, "--distil-steps", "2", "--out", "narrow", "--json"]
        arguments = ["convert", "model", *widths, *options]
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 0, result.output
        told = json.loads(result.stdout)
        what = "texts" if name == "t5" else "inputs"
        assert told["distilled_on"] == told["calibrated_on"] == f"4 {what} of {inputs}"
        result = CliRunner().invoke(cli.app, [*arguments, "--distil-text", "many.txt", "--overwrite"])
        if name == "vit":
            assert isinstance(result.exception, ValueError) and "reads no texts" in str(result.exception)
        else:
            assert json.loads(result.stdout)["distilled_on"] == "4 texts of many.txt"

    def test_a_curve_of_images_is_refused(self, data, minilm, monkeypatch):
        self.checkpoint(KINDS[0], data / "model", minilm)
        monkeypatch.chdir(data)
        result = CliRunner().invoke(cli.app, ["convert", "model", "--curve", "--calibration", "images"])
        assert isinstance(result.exception, ValueError) and "a curve is judged on the package's text" in str(
            result.exception
        )

    def test_in_a_process_of_its_own_with_the_advice(self, data, minilm):
        self.checkpoint(KINDS[0], data / "model", minilm)

        def told(*arguments):
            code = "from rankattn_cli.main import main; main()"
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            command = [sys.executable, "-c", code, "convert", "model", "--out", "narrow", *arguments]
            done = subprocess.run(command, cwd=data, env=environment, capture_output=True, text=True, timeout=200)
            return done.returncode, done.stdout + done.stderr

        widths = ("--qk-rank", "4", "--v-head-dim", "4")
        code, said = told(*widths)
        assert code == 2 and "the package has texts only: give a folder of images as --calibration" in said
        code, said = told("--qk-rank", "4", "--calibration", "none")
        assert code == 2 and "Give one integer for both" in said and not (data / "narrow").exists()
        code, said = told(*widths, "--calibration", "images")
        assert code == 0 and "Calibrated on 4 inputs of images" in said
        (data / "model" / "preprocessor_config.json").unlink()
        code, said = told(*widths, "--calibration", "images", "--overwrite")
        assert code == 2 and "processor" in said and (data / "narrow" / "config.json").exists()
