"""Left at its defaults, a rank model is the stock model to the last bit."""

import pytest
import torch
import transformers.models.auto.modeling_auto as modeling_auto
from testing_common import BERT, EVERY_FAMILY, TASK_IDS, TASKS, XLNET, float_tensors, tiny_inputs
from transformers import AutoTokenizer, BertTokenizer

from hf_rankattn.families.architectures import family_of
from hf_rankattn.models.registration import rank_twin


@pytest.mark.parametrize("family, suffix", TASKS, ids=TASK_IDS)
class TestEveryTaskClass:
    def test_same_seed_same_weights_under_the_same_names(self, family, suffix):
        if family is XLNET and torch.get_default_dtype() != torch.float32:
            pytest.skip("stock XLNet draws weights in float32 whatever the default dtype is")
        torch.manual_seed(3)
        stock = family.stock(suffix)(family.stock_config()).state_dict()
        torch.manual_seed(3)
        rank = family.rank(suffix)(family.rank_config()).state_dict()
        assert list(rank) == list(stock)
        assert all(torch.equal(rank[name], stock[name]) for name in stock)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
    @pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
    def test_outputs_are_equal_bit_for_bit(self, family, suffix, training, dtype):
        stock = family.stock(suffix)(family.stock_config()).to(dtype).train(training)
        rank = family.rank(suffix)(family.rank_config()).to(dtype).train(training)
        rank.load_state_dict(stock.state_dict())
        batch = tiny_inputs(family, suffix, labels=True)
        for implementation in family.implementations:
            outputs = []
            for model in (stock, rank):
                model.set_attn_implementation(implementation)
                model.zero_grad()
                torch.manual_seed(5)
                output = model(**batch, output_hidden_states=True)
                loss = output.loss if "loss" in output else output.last_hidden_state.float().square().mean()
                loss.backward()
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                outputs.append(float_tensors(output) + grads)
            assert len(outputs[0]) == len(outputs[1]) > 4
            for ours, theirs in zip(*outputs, strict=True):
                assert torch.equal(ours, theirs), implementation

    def test_a_stock_checkpoint_folder_loads_without_a_remark(self, family, suffix, tmp_path, caplog):
        family.stock(suffix)(family.stock_config()).save_pretrained(tmp_path)
        caplog.clear()
        # Both are loaded: weights mapped from a file are aligned otherwise than fresh ones, which shifts a last bit.
        stock = family.stock(suffix).from_pretrained(tmp_path)
        stock_remarks = [record.message for record in caplog.records]
        caplog.clear()
        rank, info = family.rank(suffix).from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values()), info
        assert [record.message for record in caplog.records] == stock_remarks
        batch = tiny_inputs(family, suffix)
        for ours, theirs in zip(float_tensors(rank(**batch)), float_tensors(stock(**batch)), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("family", EVERY_FAMILY, ids=lambda family: family.name)
def test_every_auto_class_that_knows_the_stock_family_knows_ours(family):
    autos = [auto for name, auto in vars(modeling_auto).items() if name.startswith("AutoModel")]
    autos = [auto for auto in autos if getattr(auto, "_model_mapping", None) is not None]
    known = 0
    for auto in autos:
        if family.stock("Config") not in auto._model_mapping.keys():
            continue
        known += 1
        stock = auto._model_mapping[family.stock("Config")]
        assert auto._model_mapping[family.rank("Config")].__name__ == f"Rank{stock.__name__}", auto.__name__
        assert type(auto.from_config(family.rank_config())).__name__ == f"Rank{stock.__name__}"
    assert known >= 6


@pytest.mark.parametrize("family", EVERY_FAMILY, ids=lambda family: family.name)
def test_every_public_model_class_of_the_stock_family_has_a_twin(family):
    module = __import__(family.stock("Model").__module__, fromlist=["__all__"])
    public = {name for name in module.__all__ if not name.endswith(("PreTrainedModel", "Layer"))}
    assert public == {f"{family.name}{suffix}" for suffix in family.suffixes}
    assert all(rank_twin(family.stock(suffix)) is family.rank(suffix) for suffix in (*family.suffixes, "Config"))
    assert family_of(family.rank_config()).rank_types[family.model_type] == family.rank("Config").model_type


def test_nothing_stock_is_changed_by_importing_us():
    from transformers.models.bert import modeling_bert

    model = modeling_bert.BertForMaskedLM(BERT.stock_config())
    assert type(model.bert) is modeling_bert.BertModel
    assert type(model.bert.encoder.layer[0].attention.self) is modeling_bert.BertSelfAttention


def test_the_real_checkpoint_loads_and_agrees(minilm):
    from transformers import BertModel

    from hf_rankattn import RankBertModel

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    texts = ["Rank is a resource.", "Depth loses it, unless there are skips."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    for implementation in ("eager", "sdpa"):
        stock = BertModel.from_pretrained(minilm, attn_implementation=implementation)
        rank, info = RankBertModel.from_pretrained(
            minilm, attn_implementation=implementation, output_loading_info=True
        )
        assert not any(info.values())
        assert isinstance(tokenizer, BertTokenizer)
        assert torch.equal(rank(**batch).last_hidden_state, stock(**batch).last_hidden_state)
