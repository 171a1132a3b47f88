"""How much a conversion changes the answers of a model, by a measure that fits its task.

A task defines the batches of texts, the answer of a model to a batch, and how the answers of two models are compared.
`TASKS` has one row for each kind of task class.
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from ..families.architectures import base_of
from ..files.batches import BATCH, Text, UnfitTokenizer, check_tokens, encode
from ..files.running import batches_of, evaluating
from ..measure.threads import one_thread
from .calibration import same_draws, with_decoder_texts


MASKED_SHARE = 0.15
CHOICES = 4
POOLINGS = ("cls", "max", "mean")
ORIGINAL = "_of_the_original"
MEASURES = {
    "nearest_text_agreement": "texts whose nearest other text stays the same, share",
    "embedding_cosine": "cosine of pooled embeddings to the original's, mean",
    "label_agreement": "labels that are those of the original, share",
    "choice_agreement": "choices that are those of the original, share",
    "logit_error": "RMS change of the logits as a share of their RMS size",
    "score_correlation": "correlation of the scores with the original's",
    "masked_token_agreement": "masked tokens predicted as by the original, share",
    "masked_token_accuracy": "masked tokens predicted rightly, share",
    "next_token_agreement": "next tokens predicted as by the original, share",
    "next_token_accuracy": "next tokens predicted rightly, share",
    "span_agreement": "answer spans that are those of the original, share",
    "accuracy": "accuracy on the labels of the dataset",
    "label_correlation": "correlation of the scores with the labels of the dataset",
    "exact_match": "answer spans that are those of the dataset, share",
}
Numbers = dict[str, float]


def describe(measure: str) -> str:
    """A measure in words.

    >>> describe("accuracy_of_the_original")
    'accuracy on the labels of the dataset, original model'
    """
    words = MEASURES[measure.removesuffix(ORIGINAL)]
    return f"{words}, original model" if measure.endswith(ORIGINAL) else words


def share(hits: torch.Tensor) -> float:
    return hits.double().mean().item()


def with_original(name: str, before: torch.Tensor, after: torch.Tensor) -> Numbers:
    """The share of right answers of the converted model and of the original."""
    return {name: share(after), name + ORIGINAL: share(before)}


def logit_error(before: torch.Tensor, after: torch.Tensor) -> float:
    """The RMS change of logits (texts, classes) as a share of their RMS size, both centred over the classes.

    A single logit per text is a score, and is centred over the texts.
    """
    along = -1 if before.shape[-1] > 1 else 0
    before, after = (logits - logits.mean(along, keepdim=True) for logits in (before.double(), after.double()))
    change, size = (after - before).square().mean().sqrt(), before.square().mean().sqrt()
    return float(change / size) if size else float(change)


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    """Pearson's correlation of two columns, 0 if one of them is constant."""
    found = torch.corrcoef(torch.stack([one.double().flatten(), other.double().flatten()]))[0, 1]
    return float(torch.nan_to_num(found))


class Task:
    """The batches of one kind of task, and the answers of a model to them."""

    labels: list[Any] | None

    def __init__(self, model: PreTrainedModel, tokenizer, texts: Sequence[Text], limit, labels=None, pooling="mean"):
        self.config, self.tokenizer, self.limit, self.pooling = model.config, tokenizer, limit, pooling
        self.labels = labels
        self.batches: list[Any] = []
        if tokenizer is None:  # images, in batches
            self.batches = list(texts)
            return
        for start in range(0, len(texts), BATCH):
            rows = range(start, min(start + BATCH, len(texts)))
            self.batches.append(self.batch([texts[row] for row in rows], list(texts), rows))
        check_tokens(tokenizer, self.batches, model.config)
        self.batches = [with_decoder_texts(model, batch) for batch in self.batches]
        self.prepare(model)

    def batch(self, texts: list[Text], every: list[Text], rows: range) -> Any:
        return encode(self.tokenizer, texts, self.limit)

    def prepare(self, model: PreTrainedModel) -> None:
        """Change the batches, after the tokenizer was checked on them."""

    def read(self, output: Any, batch: Any) -> torch.Tensor:
        """The answer to a batch, one row for each text or token."""
        return output.logits.float().cpu()

    def compare(self, before: torch.Tensor, after: torch.Tensor) -> Numbers:
        raise NotImplementedError

    def agreement(self, before: torch.Tensor, after: torch.Tensor, error: Numbers) -> Numbers:
        """The share of equal labels, the error of the logits, and if the texts have labels the accuracy."""
        found = {"label_agreement": share(before == after), **error}
        if self.labels is None:
            return found
        truth = torch.tensor(self.labels)
        return {**found, **with_original("accuracy", before == truth, after == truth)}

    def answers(self, model: PreTrainedModel) -> torch.Tensor:
        found = []
        with evaluating(model), same_draws():
            for inputs, batch in zip(batches_of(model, self.batches), self.batches, strict=True):
                output = model(**inputs)
                if not bool(torch.isfinite(output[0]).all()):
                    raise ValueError(
                        f"the outputs of the {type(model).__name__} hold NaN or Inf, so they cannot be compared. Check "
                        "the weights, or run the model in float32 or bfloat16."
                    )
                found.append(self.read(output, batch))
        return torch.cat(found)


class Embeddings(Task):
    """A bare encoder: pooled states of the last layer. The nearest other text is the strictest measure."""

    def answers(self, model: PreTrainedModel) -> torch.Tensor:
        return super().answers(base_of(model))

    def read(self, output, batch):
        # the head of T5 is in the model with its encoder and decoder, and returns the states of the encoder
        states = output.get("last_hidden_state", output.get("encoder_last_hidden_state")).float().cpu()
        mask = batch.get("attention_mask", torch.ones(states.shape[:2], dtype=torch.long))
        if self.pooling == "cls":  # padding can be on the left
            return states[torch.arange(len(states)), mask.argmax(1)]
        if self.pooling == "max":
            return states.masked_fill(mask[..., None] == 0, -torch.inf).amax(1)
        return (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)

    def compare(self, before, after):
        found = {"embedding_cosine": torch.cosine_similarity(before, after).mean().item()}
        if len(before) < 3:
            return found
        return {"nearest_text_agreement": share(nearest(before) == nearest(after)), **found}


def nearest(embeddings: torch.Tensor) -> torch.Tensor:
    """For each embedding (texts, d) the index of the other one with the largest cosine."""
    unit = torch.nn.functional.normalize(embeddings, dim=-1)
    return (unit @ unit.T).fill_diagonal_(-torch.inf).argmax(1)


class Classification(Task):
    """One vector of logits per text: a label, several labels, or a score."""

    @property
    def kind(self) -> str:
        single = "regression" if self.config.num_labels == 1 else "single_label_classification"
        return self.config.problem_type or single

    def chosen(self, logits: torch.Tensor) -> torch.Tensor:
        return logits > 0 if self.kind == "multi_label_classification" else logits.argmax(-1)

    def compare(self, before, after):
        error = {"logit_error": logit_error(before, after)}
        if self.kind == "regression":
            found = {"score_correlation": correlation(before, after), **error}
            if self.labels is not None:
                found["label_correlation"] = correlation(after, torch.tensor(self.labels))
                found["label_correlation" + ORIGINAL] = correlation(before, torch.tensor(self.labels))
            return found
        return self.agreement(self.chosen(before), self.chosen(after), error)


class NextSentence(Classification):
    """Whether the second half of a text follows its first half."""

    def batch(self, texts, every, rows):
        return encode(self.tokenizer, [halves(text) for text in texts], self.limit)

    @property
    def kind(self) -> str:
        return "single_label_classification"


def halves(text: Any) -> tuple[str, str]:
    words = text.split()
    return " ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])


class MultipleChoice(Task):
    """The first half of a text, with the second halves of this and of other texts as choices."""

    def batch(self, texts, every, rows):
        count = min(CHOICES, len(every))
        pairs = [
            (halves(text)[0], halves(every[(row + (choice - row) % count) % len(every)])[1])
            for row, text in zip(rows, texts, strict=True)
            for choice in range(count)
        ]
        batch = encode(self.tokenizer, pairs, self.limit)
        return {name: value.view(len(texts), count, -1) for name, value in batch.items()}

    def compare(self, before, after):
        agreement = share(before.argmax(-1) == after.argmax(-1))
        return {"choice_agreement": agreement, "logit_error": logit_error(before, after)}


class TokenTask(Task):
    """A task with an answer for each token but the special tokens."""

    def batch(self, texts, every, rows):
        batch = encode(self.tokenizer, texts, self.limit, return_special_tokens_mask=True)
        special = batch.pop("special_tokens_mask")
        batch["real"] = batch["attention_mask"].bool() & ~special.bool()
        return batch


class TokenClassification(TokenTask):
    """One vector of logits per token; with labels, only for the first token of each word."""

    def prepare(self, model):
        if self.labels is None:
            return
        rows, labels = iter(self.labels), []
        for batch in self.batches:
            for row, real in enumerate(batch["real"]):
                words, row_labels = batch.word_ids(row), next(rows)
                for place, word in enumerate(words):
                    first = word is not None and word not in words[:place] and row_labels[word] >= 0
                    real[place] = first
                    if first:
                        labels.append(row_labels[word])
        if not labels:
            raise ValueError("no word of the dataset has a label (-100 means none): choose another `split`.")
        self.labels = labels

    def read(self, output, batch):
        return super().read(output, batch)[batch["real"]]

    def compare(self, before, after):
        return self.agreement(before.argmax(-1), after.argmax(-1), {"logit_error": logit_error(before, after)})


class MaskedTokens(TokenTask):
    """The likeliest token at masked places, the same number in each text of a batch, drawn with a fixed seed.

    XLNet has no mask token: `perm_mask` hides the places, and `target_mapping` selects them.
    """

    def prepare(self, model):
        permuted = model.config.model_type.endswith("xlnet")
        mask_id = self.tokenizer.mask_token_id
        if mask_id is None and not permuted:
            raise UnfitTokenizer("the tokenizer has no mask token, and the model fills masks.")
        generator = torch.Generator().manual_seed(0)
        for batch in self.batches:
            ids, real = batch["input_ids"], batch["real"]
            count = max(1, int(MASKED_SHARE * int(real.sum(1).min())))
            order = torch.rand(ids.shape, generator=generator).masked_fill(~real, 2)
            places = order.argsort(1)[:, :count]
            batch["places"], batch["truth"] = places, ids.gather(1, places)
            if permuted:
                hidden = torch.zeros_like(ids, dtype=torch.float).scatter(1, places, 1)
                batch["perm_mask"] = hidden[:, None, :].expand(-1, ids.shape[1], -1).to(model.dtype)
                batch["target_mapping"] = torch.nn.functional.one_hot(places, ids.shape[1]).to(model.dtype)
            else:
                batch["input_ids"] = ids.scatter(1, places, mask_id)

    def read(self, output, batch):
        logits = output.prediction_logits if "prediction_logits" in output else output.logits
        if "target_mapping" not in batch:
            logits = logits.cpu()[torch.arange(len(logits))[:, None], batch["places"]]
        return logits.argmax(-1).cpu().flatten()

    def compare(self, before, after):
        truth = torch.cat([batch["truth"].flatten() for batch in self.batches])
        found = {"masked_token_agreement": share(before == after)}
        return {**found, **with_original("masked_token_accuracy", before == truth, after == truth)}


class NextToken(TokenTask):
    """The likeliest next token."""

    def read(self, output, batch):
        return output.logits[:, :-1].argmax(-1).cpu()[batch["real"][:, 1:]]

    def compare(self, before, after):
        truth = torch.cat([batch["input_ids"][:, 1:][batch["real"][:, 1:]] for batch in self.batches])
        found = {"next_token_agreement": share(before == after)}
        return {**found, **with_original("next_token_accuracy", before == truth, after == truth)}


class ReplacedTokens(TokenTask):
    """ELECTRA: a score for each token, positive where it is judged to be a replacement."""

    def read(self, output, batch):
        return super().read(output, batch)[batch["real"]]

    def compare(self, before, after):
        error = logit_error(before[:, None], after[:, None])
        return {"label_agreement": share((before > 0) == (after > 0)), "logit_error": error}


class DecodedToken(TokenTask):
    """The likeliest next token of a decoder that reads the text of its encoder."""

    def read(self, output, batch):
        return output.logits.argmax(-1).cpu()[batch["real"]]

    def compare(self, before, after):
        return {"next_token_agreement": share(before == after)}


class Spans(Task):
    """The likeliest answer span. For a text without a question, its first sentence is the question."""

    def batch(self, texts, every, rows):
        asked = [text if isinstance(text, tuple) else (str(text).split(". ")[0], str(text)) for text in texts]
        # offsets find the answers of a dataset; only fast tokenizers have them
        return encode(self.tokenizer, asked, self.limit, return_offsets_mapping=self.labels is not None)

    def read(self, output, batch):
        if "start_top_index" in output:  # XLNet's beam search sorts its spans
            return torch.stack([output.start_top_index[:, 0], output.end_top_index[:, 0]], -1).cpu()
        start, end = output.start_logits.float().cpu(), output.end_logits.float().cpu()
        scores = start[:, :, None] + end[:, None, :]
        real = batch["attention_mask"].bool()
        allowed = (real[:, :, None] & real[:, None, :]).triu()
        best = scores.masked_fill(~allowed, -torch.inf).flatten(1).argmax(1)
        return torch.stack([best // start.shape[1], best % start.shape[1]], -1)

    def compare(self, before, after):
        found = {"span_agreement": share((before == after).all(-1))}
        if self.labels is None:
            return found
        return {**found, **with_original("exact_match", self.right(before), self.right(after))}

    def right(self, spans: torch.Tensor) -> torch.Tensor:
        """Whether each span (texts, 2) of tokens is one of the right answers; a span outside the context is no answer."""
        places = [(batch, row) for batch in self.batches for row in range(len(batch["input_ids"]))]
        hits = []
        for (batch, row), (start, end), truth in zip(places, spans.tolist(), self.labels or [], strict=True):
            offsets = batch["offset_mapping"][row].tolist()
            outside = batch.sequence_ids(row)[start] != 1
            hits.append(not truth if outside else (offsets[start][0], offsets[end][1]) in truth)
        return torch.tensor(hits)


TASKS: dict[str, type[Task]] = {
    "ForSequenceClassification": Classification,
    "ForImageClassification": Classification,
    "ForImageClassificationWithTeacher": Classification,
    "ForAudioClassification": Classification,
    "ForNextSentencePrediction": NextSentence,
    "ForMultipleChoice": MultipleChoice,
    "ForTokenClassification": TokenClassification,
    "ForMaskedLM": MaskedTokens,
    "ElectraForPreTraining": ReplacedTokens,
    "ViTMAEForPreTraining": Embeddings,
    "ForPreTraining": MaskedTokens,
    "XLNetLMHeadModel": MaskedTokens,
    "LMHeadModel": NextToken,
    "ForCausalLM": NextToken,
    "ForConditionalGeneration": DecodedToken,
    "ForQuestionAnsweringSimple": Spans,
    "ForQuestionAnswering": Spans,
}


def task_of(model: PreTrainedModel | str) -> type[Task]:
    """The task of a model, or of a model class by its name."""
    name = model if isinstance(model, str) else type(model).__name__
    return next((task for suffix, task in TASKS.items() if name.endswith(suffix)), Embeddings)


class Judge:
    """Compares a converted model with the original, on texts that were not used in calibration."""

    def __init__(self, model: PreTrainedModel, tokenizer, texts: Sequence[Text], limit, labels=None, pooling="mean"):
        self.model, self.inputs = model, (tokenizer, texts, limit)
        self.task = task_of(model)(model, tokenizer, texts, limit, labels, pooling)
        self.original = self.task.answers(model)
        self.embeddings: tuple[Task, torch.Tensor] | None = None

    def damage(self, model: PreTrainedModel) -> Numbers:
        """The measures of the task, the strictest first."""
        return self.task.compare(self.original, self.task.answers(model))

    def cosine(self, model: PreTrainedModel) -> float:
        """The mean cosine of the embeddings to those of the original, for a model of any task."""
        if self.embeddings is None:
            same = isinstance(self.task, Embeddings)
            embedder = self.task if same else Embeddings(self.model, *self.inputs)
            self.embeddings = embedder, self.original if same else embedder.answers(self.model)
        task, original = self.embeddings
        return torch.cosine_similarity(task.answers(model), original).mean().item()


def latency(before: PreTrainedModel, after: PreTrainedModel, batch: Any, most: int = 100) -> dict[str, Any]:
    """Milliseconds of a forward pass of two models on the first two texts of a batch, alternately, on one thread.

    This is the shortest of at least 5 passes, as other work on the machine only adds time; short passes are repeated for
    half a second, up to `most` times.
    """
    batch = {name: value[:2] for name, value in batch.items()}
    seconds: dict[PreTrainedModel, list[float]] = {before: [], after: []}
    with evaluating(before), evaluating(after), one_thread(next(before.parameters())):
        inputs = {model: next(batches_of(model, [batch])) for model in seconds}
        begun = time.perf_counter()
        for passes in range(most):
            if passes >= 5 and time.perf_counter() - begun > 0.5:
                break
            for model, spent in seconds.items():
                start = time.perf_counter()
                model(**inputs[model])
                spent.append(time.perf_counter() - start)
    old, new = (1000 * min(spent) for spent in seconds.values())
    given = inputs[before]
    what = "input_ids" if "input_ids" in given else next(iter(given))
    return {
        "before_ms": round(old, 2),
        "after_ms": round(new, 2),
        "ratio": round(new / old, 3),
        "batch": f"{' x '.join(map(str, given[what].shape))} {'tokens' if what == 'input_ids' else what}, "
        f"{before.device.type}, one thread",
        "passes": len(seconds[before]),
    }
