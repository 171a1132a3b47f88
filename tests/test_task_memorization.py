"""The memorization task: texts of any source, with any tokenizer, in rows with labels."""

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer, BertConfig, GPT2Config, XLNetConfig

from hf_rankattn.files.texts import package_text
from hf_rankattn.tasks import task_builder


class Broken:
    """A tokenizer that fails in use."""

    pad_token_id = 0

    def __len__(self):
        return 2

    def __call__(self, text, **options):
        raise RuntimeError("the vocabulary has no unknown token")


def test_rows_are_the_text_and_labels_stand_where_tokens_do():
    builder = task_builder("memorization", max_length=16)
    rows = builder.sample("train", builder.config.num_examples)
    ids, mask, labels = rows.values()
    assert set(np.unique(mask)) == {0, 1}
    np.testing.assert_array_equal(mask == 0, labels == -100)
    np.testing.assert_array_equal(mask == 0, ids == 0)
    assert labels[mask == 1].mean() == pytest.approx(0.5, abs=0.03)


def test_equal_words_have_equal_ids_and_all_of_the_text_is_there():
    texts = ["Red fish, blue fish.", "One fish!", "blue red one"]
    builder = task_builder("memorization", texts=texts, max_length=4)
    rows = [builder.sample(split, size)["input_ids"] for split, size in builder.split_sizes().items()]
    vocabulary = ["<pad>", "!", ",", ".", "blue", "fish", "one", "red"]
    read = [[vocabulary[i] for i in row if i] for row in np.concatenate(rows)]
    assert read == [["red", "fish", ",", "blue"], ["fish", "."], ["one", "fish", "!"], ["blue", "red", "one"]]
    assert builder.model_arguments() == {"vocab_size": 8, "num_labels": 2, "pad_token_id": 0}


def test_any_source_gives_the_same_rows_and_the_same_cache():
    texts = package_text()[:12]
    ways = ["\n\n".join(texts), texts, Dataset.from_dict({"text": texts}), Dataset.from_dict({"body": texts})]
    columns = ["text", "text", "text", "body"]
    builders = [task_builder("memorization", texts=t, text_column=c) for t, c in zip(ways, columns, strict=True)]
    assert len({builder.config_id for builder in builders}) == 1
    other = task_builder("memorization", texts=texts[:11] + ["Something else."])
    assert other.config_id != builders[0].config_id


def test_any_tokenizer(minilm):
    texts = package_text()[:12]
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    by_name, by_object = (task_builder("memorization", texts=texts, tokenizer=t) for t in (minilm, tokenizer))
    assert by_name.config_id == by_object.config_id
    ids = by_name.sample("train", 1)["input_ids"][0]
    assert texts[0].lower().startswith(tokenizer.decode(ids[:10]).split(" ##")[0][:20])
    assert by_name.model_arguments()["vocab_size"] == len(tokenizer)
    raw = task_builder("memorization", texts=["héllo"] * 3, tokenizer="bytes", max_length=8).sample("test", 1)
    assert raw["input_ids"].tolist() == [[1 + byte for byte in "héllo".encode()] + [0, 0]]


@pytest.mark.parametrize("config", [BertConfig(), XLNetConfig(), GPT2Config()], ids=lambda c: c.model_type)
def test_a_folder_without_tokenizer_files_is_refused(config, tmp_path):
    """transformers invents a tokenizer there that has special tokens and no others."""
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="it has no vocabulary for it. Give a folder that holds the files"):
        task_builder("memorization", tokenizer=str(tmp_path))


@pytest.mark.parametrize(
    "parameters, message",
    [
        ({"texts": "too short"}, "the text gives 1 rows"),
        ({"texts": 5}, "`texts` must be a string, a list of strings or one split of a dataset, got a int"),
        ({"texts": ["a", None, "b"]}, "`texts` must hold strings, got None"),
        ({"texts": Dataset.from_dict({"body": ["a"]})}, "no column 'text'; it has body"),
        ({"num_examples": 10**6}, "rows were asked for .* and the text gives"),
        ({"tokenizer": 3}, "'words', 'bytes', or a tokenizer of transformers, got a int"),
        ({"tokenizer": "no/such-tokenizer"}, "'no/such-tokenizer' could not be loaded"),
        ({"tokenizer": Broken()}, "tokenizer 'Broken' fails on the text: the vocabulary"),
    ],
)
def test_bad_sources(parameters, message):
    with pytest.raises(ValueError, match=message):
        task_builder("memorization", **parameters)
