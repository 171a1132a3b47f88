"""A limit in the weights of a model, from Python and from the command line."""

import json

import pytest
import torch
from testing_common import ALBERT, BERT, FAMILIES, XLNET, run_python, small_bert, tiny_inputs
from testing_folders import checkpoint_folder
from transformers import AutoModel, LlamaConfig, LlamaModel, ViTConfig, ViTModel
from typer.testing import CliRunner

from hf_rankattn import limit_rank
from rankattn_cli import main as cli


# families whose layers have weights of their own and transformers' attention interface
LIMITED = [family for family in FAMILIES if family not in (ALBERT, XLNET)]


def states(model, batch):
    with torch.no_grad():
        return model(**batch)[0]


@pytest.mark.parametrize("family", LIMITED, ids=lambda family: family.name)
@pytest.mark.parametrize("request_", [{"qk_rank": 2, "v_head_dim": 3}, {"qk_rank": "auto", "mean_rank": 2}], ids=str)
def test_the_weights_give_what_the_limited_model_gives(family, request_):
    torch.manual_seed(0)
    model = family.stock("Model")(family.stock_config()).eval()
    batch = {name: value for name, value in tiny_inputs(family, "Model").items() if name != "token_type_ids"}
    with limit_rank(model, calibration=batch, **request_) as limit:
        limited, new = states(model, batch), limit.permanent().eval()
    assert type(new).__name__.startswith("Rank") and new.num_parameters() < model.num_parameters()
    assert torch.allclose(states(new, batch), limited, atol=1e-5)
    assert not torch.allclose(states(model, batch), limited, atol=1e-5)


def test_a_model_of_one_width_stays_a_stock_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 32, "num_hidden_layers": 2}
    model = ViTModel(ViTConfig(**sizes, image_size=32, patch_size=8)).eval()
    batch = {"pixel_values": torch.randn(6, 3, 32, 32)}
    with limit_rank(model, 5, 5, calibration=batch) as limit:
        limited, new = states(model, batch), limit.permanent().eval()
    assert type(new) is ViTModel and new.config.head_dim == 5
    assert torch.allclose(states(new, batch), limited, atol=1e-5)
    with limit_rank(model, 5, calibration=batch) as limit, pytest.raises(ValueError, match="one integer for both"):
        limit.permanent()


def test_families_without_narrower_weights_are_refused():
    model = LlamaModel(
        LlamaConfig(hidden_size=16, num_attention_heads=2, intermediate_size=16, num_hidden_layers=1, vocab_size=9)
    )
    batch = {"input_ids": torch.arange(8)[None]}
    with (
        limit_rank(model.eval(), 2, calibration=batch) as limit,
        pytest.raises(ValueError, match="cannot be converted"),
    ):
        limit.permanent()


def test_the_command_writes_a_checkpoint(tmp_path):
    checkpoint_folder(BERT, tmp_path / "model")
    model = AutoModel.from_pretrained(tmp_path / "model").eval()
    batch = {"input_ids": torch.arange(1, 13).view(2, 6)}
    with limit_rank(model, 2, 3, calibration=batch) as limit:
        limited = states(model, batch)
        limit.save_pretrained(tmp_path / "limit")
    command = "-m hf_rankattn convert model --limit limit --out narrow --json".split()
    done = run_python(*command, cwd=tmp_path)
    assert json.loads(done.stdout)["model_class"].startswith("RankBert")
    assert torch.allclose(states(AutoModel.from_pretrained(tmp_path / "narrow").eval(), batch), limited, atol=1e-5)

    for option in (("--qk-rank", "2"), ("--distil-steps", "5"), ("--ranks", "damage"), ("--objective", "logits")):
        result = CliRunner().invoke(cli.app, ["convert", "model", "--limit", "limit", "--out", "new", *option])
        assert isinstance(result.exception, ValueError) and "--limit" in str(result.exception)


def test_a_limit_of_shared_layers_is_refused():
    model = small_bert(2, 2).eval()
    model.encoder.layer[1] = model.encoder.layer[0]
    batch = {"input_ids": torch.arange(1, 9)[None]}
    with limit_rank(model, 2, calibration=batch) as limit, pytest.raises(ValueError, match="same module|share"):
        limit.permanent()
