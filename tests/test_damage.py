"""What a conversion changes in the answers of a model: each task class by its own measure, held against plain loops."""

import json

import pytest
import torch
from testing_common import BERT, ELECTRA, TASK_IDS, TASKS, XLNET

from hf_rankattn import convert_rank
from hf_rankattn.convert.damage import Judge, latency, logit_error
from hf_rankattn.convert.labelled import labelled_texts
from hf_rankattn.files.texts import package_text


LIMIT, TEXTS = 32, package_text()[40:52]
LEADING = {
    **{"Model": "nearest_text_agreement", "ForMultipleChoice": "choice_agreement"},
    **dict.fromkeys(("ForPreTraining", "ForMaskedLM"), "masked_token_agreement"),
    **dict.fromkeys(("ForQuestionAnswering", "ForQuestionAnsweringSimple"), "span_agreement"),
}
LABELLED = ("ForNextSentencePrediction", "ForSequenceClassification", "ForTokenClassification")
LEADING |= dict.fromkeys(LABELLED, "label_agreement") | {"DoubleHeadsModel": "nearest_text_agreement"}


def sharp(family, suffix, **fields):
    """A tiny model whose attention matters: large random weights."""
    torch.manual_seed(1)
    model = family.stock(suffix)(family.stock_config(vocab_size=30522, initializer_range=0.3, **fields))
    # two streams of stock XLNet run in float32 only, whatever the default dtype is
    return (model.float() if family is XLNET else model).eval()


def alone(tokenizer, text, *pair):
    """One text, without padding."""
    return tokenizer(text, *pair, truncation=True, max_length=LIMIT, return_tensors="pt")


class TestEveryTask:
    @pytest.mark.parametrize("family, suffix", TASKS, ids=TASK_IDS)
    def test_the_old_rank_loses_nothing_and_a_small_one_does(self, family, suffix, tokenizer):
        model = sharp(family, suffix)
        judge = Judge(model, tokenizer, TEXTS, LIMIT)
        leading = LEADING.get(suffix) or ("masked" if family is XLNET else "next") + "_token_agreement"
        if family is ELECTRA and suffix == "ForPreTraining":
            leading = "label_agreement"
        same, cut = (judge.damage(convert_rank(model, rank)) for rank in (8, 1))
        assert list(same)[0] == leading and same[leading] == 1
        assert same.get("logit_error", 0) < 1e-4 and same.get("embedding_cosine", 1) > 1 - 1e-5
        for name in same:
            if name.endswith("_of_the_original"):
                assert same[name] == same[name.removesuffix("_of_the_original")] == cut[name]
        assert cut[leading] < 1 or cut.get("logit_error", 0) > 1e-3 or cut.get("embedding_cosine", 1) < 0.999

    @pytest.mark.parametrize("suffix", ["ForSequenceClassification", "ForMaskedLM"])
    def test_nan_is_no_answer(self, suffix, tokenizer):
        """The largest of several NaN is the first one in both models: all labels would agree."""
        model = sharp(BERT, suffix)
        with torch.no_grad():
            model.bert.encoder.layer[1].output.dense.bias[0] = torch.nan
        with pytest.raises(ValueError, match=f"the outputs of the Bert{suffix} hold NaN or Inf"):
            Judge(model, tokenizer, TEXTS, LIMIT)


class TestAgainstPlainLoops:
    @torch.no_grad()
    def test_classifier(self, tokenizer):
        model = sharp(BERT, "ForSequenceClassification", num_labels=3)
        cut = convert_rank(model, 2)
        before, after = (torch.cat([m(**alone(tokenizer, text)).logits for text in TEXTS]) for m in (model, cut))
        found = Judge(model, tokenizer, TEXTS, LIMIT).damage(cut)
        assert found["label_agreement"] == pytest.approx((before.argmax(1) == after.argmax(1)).double().mean().item())
        centred = [logits - logits.mean(1, keepdim=True) for logits in (before, after)]
        error = (centred[1] - centred[0]).norm() / centred[0].norm()
        assert found["logit_error"] == pytest.approx(error.item(), rel=1e-3)

    @torch.no_grad()
    def test_scores_of_a_regression(self, tokenizer):
        model = sharp(BERT, "ForSequenceClassification", num_labels=1)
        cut = convert_rank(model, 2)
        labels = [0.5 * place for place in range(len(TEXTS))]
        found = Judge(model, tokenizer, TEXTS, LIMIT, labels).damage(cut)
        before, after = (torch.cat([m(**alone(tokenizer, text)).logits for text in TEXTS])[:, 0] for m in (model, cut))
        agreement = torch.corrcoef(torch.stack([before, after]))[0, 1].item()
        assert found["score_correlation"] == pytest.approx(agreement, abs=1e-4)
        truth = torch.corrcoef(torch.stack([after, torch.tensor(labels)]))[0, 1].item()
        assert found["label_correlation"] == pytest.approx(truth, abs=1e-4)

    @torch.no_grad()
    def test_tokens_that_are_not_special(self, tokenizer):
        model = sharp(BERT, "ForTokenClassification", num_labels=4)
        cut = convert_rank(model, 2)
        pairs = [[m(**alone(tokenizer, text)).logits[0, 1:-1].argmax(-1) for m in (model, cut)] for text in TEXTS]
        expected = torch.cat([before == after for before, after in pairs]).double().mean().item()
        assert Judge(model, tokenizer, TEXTS, LIMIT).damage(cut)["label_agreement"] == pytest.approx(expected)

    @torch.no_grad()
    def test_embeddings(self, tokenizer):
        model = sharp(BERT, "Model")
        cut = convert_rank(model, 2)
        before, after = (
            torch.cat([m(**alone(tokenizer, text)).last_hidden_state.mean(1) for text in TEXTS]) for m in (model, cut)
        )
        found = Judge(model, tokenizer, TEXTS, LIMIT).damage(cut)
        cosine = torch.cosine_similarity(before, after).mean().item()
        assert found["embedding_cosine"] == pytest.approx(cosine, abs=1e-5)
        same = 0
        for place in range(len(TEXTS)):
            others = [other for other in range(len(TEXTS)) if other != place]
            near = [
                max(others, key=lambda other, e=e, own=e[place]: float(torch.cosine_similarity(own, e[other], dim=0)))
                for e in (before, after)
            ]
            same += near[0] == near[1]
        assert found["nearest_text_agreement"] == pytest.approx(same / len(TEXTS))
        first = Judge(model, tokenizer, TEXTS, LIMIT, pooling="cls")
        states = model(**alone(tokenizer, TEXTS[3])).last_hidden_state.float()
        assert torch.allclose(first.original[3], states[0, 0], atol=1e-4)

    @torch.no_grad()
    def test_spans(self, tokenizer):
        model = sharp(BERT, "ForQuestionAnswering")
        asked = [("Who bakes?", text) for text in TEXTS]
        judge = Judge(model, tokenizer, asked, LIMIT)
        for pair, (start, end) in zip(asked, judge.original.tolist(), strict=True):
            batch = tokenizer(*pair, truncation="only_second", max_length=LIMIT, return_tensors="pt")
            output = model(**batch)
            scores = {
                (i, j): float(output.start_logits[0, i] + output.end_logits[0, j])
                for i in range(batch["input_ids"].shape[1])
                for j in range(i, batch["input_ids"].shape[1])
            }
            assert scores[start, end] == pytest.approx(max(scores.values()), abs=1e-4)

    @torch.no_grad()
    def test_next_tokens(self, tokenizer):
        model = sharp(BERT, "LMHeadModel", is_decoder=True)
        cut = convert_rank(model, 2)
        hits, right = [], []
        for text in TEXTS:
            batch = alone(tokenizer, text)
            before, after = (m(**batch).logits[0, :-2].argmax(-1) for m in (model, cut))
            hits.append(before == after)
            right.append(after == batch["input_ids"][0, 1:-1])
        found = Judge(model, tokenizer, TEXTS, LIMIT).damage(cut)
        assert found["next_token_agreement"] == pytest.approx(torch.cat(hits).double().mean().item())
        assert found["next_token_accuracy"] == pytest.approx(torch.cat(right).double().mean().item())

    @torch.no_grad()
    def test_masked_places_are_hidden_from_the_model(self, tokenizer):
        """A model that copies its input would be right everywhere if it saw the token."""
        for family, suffix in ((BERT, "ForMaskedLM"), (XLNET, "LMHeadModel")):
            model = sharp(family, suffix)
            judge = Judge(model, tokenizer, TEXTS, LIMIT)
            for batch in judge.task.batches:
                other = {name: value.clone() for name, value in batch.items()}
                if family is XLNET:  # the tokens stay in the input, and must not be seen
                    other["input_ids"].scatter_(1, other["places"], 5)
                else:
                    assert bool((other["input_ids"].gather(1, other["places"]) == tokenizer.mask_token_id).all())
                accepted = [name for name in other if name not in ("real", "places", "truth")]
                logits, changed = (model(**{name: b[name] for name in accepted}).logits for b in (batch, other))
                torch.testing.assert_close(logits, changed)

    def test_logit_error_ignores_what_softmax_ignores(self):
        logits = torch.randn(5, 3)
        assert logit_error(logits, logits + torch.randn(5, 1)) < 1e-6
        assert logit_error(logits, 2 * logits) == pytest.approx(1)


class TestLabels:
    def folder(self, tmp_path, rows):
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return str(tmp_path / "data")

    @torch.no_grad()
    def test_accuracy_before_and_after(self, tmp_path, tokenizer):
        fields = {"id2label": {0: "no", 1: "yes", 2: "maybe"}, "label2id": {"no": 0, "yes": 1, "maybe": 2}}
        model = sharp(BERT, "ForSequenceClassification", **fields)
        cut = convert_rank(model, 1)
        names = [["no", "YES", "maybe"][place % 3] for place in range(len(TEXTS))]
        rows = [
            {"id": str(place), "text": text, "label": name}
            for place, (text, name) in enumerate(zip(TEXTS, names, strict=True))
        ]
        texts, labels = labelled_texts(model, self.folder(tmp_path, [*rows, {"id": "x", "text": " ", "label": "no"}]))
        assert texts == TEXTS and labels == [place % 3 for place in range(len(TEXTS))]
        found = Judge(model, tokenizer, texts, LIMIT, labels).damage(cut)
        for name, one in (("accuracy_of_the_original", model), ("accuracy", cut)):
            right = [
                one(**alone(tokenizer, text)).logits.argmax().item() == label
                for text, label in zip(texts, labels, strict=True)
            ]
            assert found[name] == pytest.approx(sum(right) / len(right))

    def test_words_with_tags(self, tmp_path, tokenizer):
        """The first token of a word has its label, the others and special tokens have none."""
        model = sharp(BERT, "ForTokenClassification", num_labels=2)
        rows = [
            {"tokens": ["unbelievably", "good", "bread"], "ner_tags": [1, 0, -100]},
            {"tokens": ["rye"], "ner_tags": [1]},
        ]
        texts, labels = labelled_texts(model, self.folder(tmp_path, rows))
        judge = Judge(model, tokenizer, texts, LIMIT, labels)
        assert judge.task.labels == [1, 0, 1]
        assert len(judge.original) == 3 and "accuracy" in judge.damage(model)

    @pytest.mark.parametrize(
        "suffix, row, why",
        [
            ("ForSequenceClassification", {"text": "a", "kind": 1}, "its columns are text, kind"),
            ("ForTokenClassification", {"text": "a", "tags": [1]}, "the texts are not lists of words"),
        ],
    )
    def test_labels_that_are_not_used_are_mentioned(self, suffix, row, why, tmp_path, caplog):
        folder = self.folder(tmp_path, [row])
        assert labelled_texts(sharp(BERT, suffix), folder) == (["a"], None)
        assert f"no labels of {folder} are used: {why}." in caplog.text

    def test_questions_and_pairs(self, tmp_path, tokenizer):
        model = sharp(BERT, "ForQuestionAnswering")
        context = "The baker sells rye bread."
        rows = [{"question": "What?", "context": context, "answers": {"text": ["rye bread"], "answer_start": [16]}}]
        texts, labels = labelled_texts(model, self.folder(tmp_path, rows))
        judge = Judge(model, tokenizer, texts, LIMIT, labels)
        tokens = tokenizer("What?", context)
        start, end = tokens.char_to_token(0, 16, 1), tokens.char_to_token(0, 24, 1)
        assert judge.task.right(torch.tensor([[start, end]])).tolist() == [True]
        assert judge.task.right(torch.tensor([[start, end - 1]])).tolist() == [False]
        pairs, _ = labelled_texts(
            sharp(BERT, "ForSequenceClassification"), str(tmp_path / "data"), column="question,context"
        )
        assert pairs == [("What?", context)]

    @pytest.mark.parametrize(
        "row, options, message",
        [
            ({"one": "a", "two": "b"}, {}, "give `column`"),
            ({"text": "a", "label": 0}, {"column": "body"}, "no column 'body'; there are text, label"),
            ({"text": "a", "label": 7}, {}, "the label 7, and the model has 2 labels"),
            ({"text": "a", "label": -1}, {}, "choose a `split` that has labels"),
            ({"text": "a", "label": "odd"}, {}, "no label 'odd'; it has LABEL_0, LABEL_1"),
            ({"text": 3}, {}, "which is no text"),
            ({"text": "a"}, {"split": "train"}, "cannot be loaded"),
            ({"tokens": ["rye", "bread"], "label": 1}, {}, "holds 1, and a list of 2 labels, one for each word, is"),
            ({"tokens": ["rye", "bread"], "ner_tags": [1]}, {}, "a list of 2 labels"),
            ({"tokens": ["rye", "bread"], "ner_tags": [-100, -100]}, {}, "no word of the dataset has a label"),
            *(
                ({"question": "What?", "context": "The baker sells rye.", "answers": answers}, {}, "as in SQuAD")
                for answers in ("rye", {"text": ["rye"]}, {"text": ["a"], "answer_start": []})
            ),
            *(({"text": "a", "labels": label}, {}, "a list of 3 zeros and ones") for label in (1, [1], [0, 1, 1, 0])),
        ],
    )
    def test_rows_that_do_not_fit_are_named(self, row, options, message, tmp_path, tokenizer):
        suffix = {"tokens": "ForTokenClassification", "question": "ForQuestionAnswering"}
        several = {"num_labels": 3, "problem_type": "multi_label_classification"} if "labels" in row else {}
        model = sharp(BERT, suffix.get(next(iter(row)), "ForSequenceClassification"), **several)
        with pytest.raises(ValueError, match=message):
            texts, labels = labelled_texts(model, self.folder(tmp_path, [row]), **options)
            Judge(model, tokenizer, texts, LIMIT, labels)


def test_latency_compares_two_models_on_one_batch():
    model = sharp(BERT, "Model")
    deep = BERT.stock("Model")(BERT.stock_config(num_hidden_layers=12))
    found = latency(model, deep, {"input_ids": torch.ones(2, 8, dtype=torch.long)})
    assert found["ratio"] > 1.5 and found["after_ms"] > found["before_ms"] > 0 and "2 x 8 tokens" in found["batch"]
    assert found["ratio"] == pytest.approx(found["after_ms"] / found["before_ms"], rel=0.02) and found["passes"] >= 5
