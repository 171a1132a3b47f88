"""What a limited model is still worth: the perplexity, the embeddings or the right labels of the whole model that it keeps."""

from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import cosine_similarity, cross_entropy, kl_div
from transformers import PreTrainedModel

from ..convert.damage import Classification, Embeddings, MaskedTokens, NextToken, Task, task_of
from ..families.architectures import base_of
from ..files.batches import Batch


NO_LABEL = -100


class Quality(Task):
    """A measure on batches that are prepared: the answers of a model, and what they are worth beside those of the whole model.

    `name` is the measure in tables.
    """

    name: str

    def __init__(self, model: PreTrainedModel, batches: Sequence[Mapping[str, torch.Tensor]], pooling: str = "mean"):
        # under `labels` a model would compute its own loss, and a second time
        renamed = [{"truth" if key == "labels" else key: value for key, value in batch.items()} for batch in batches]
        super().__init__(model, None, renamed, None, pooling=pooling)  # type: ignore[arg-type]

    def of(self, whole: torch.Tensor, limited: torch.Tensor) -> dict[str, float]:
        """The quality of limited answers, 1 if they equal the `whole` ones, and the measure itself."""
        raise NotImplementedError


class NextTokenPerplexity(Quality, NextToken):
    name = "perplexity"

    def scored(self, output, batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The logits (tokens, vocabulary) of the tokens that have a label, and these labels."""
        ids = batch.get("truth", batch["input_ids"])[:, 1:]
        if "attention_mask" in batch:
            real = batch["attention_mask"].bool()
            # with padding on the left, the row of a padding token does not judge the first token of the text
            ids = ids.masked_fill(~(real[:, 1:] & real[:, :-1]), NO_LABEL)
        return labelled(output.logits[:, :-1], ids)

    def read(self, output, batch):
        logits, labels = self.scored(output, batch)
        return cross_entropy(logits, labels, reduction="none").cpu()

    def of(self, whole, limited):
        found = limited.double().mean().exp()
        return {"quality": float(whole.double().mean().exp() / found), self.name: float(found)}


class MaskedPerplexity(NextTokenPerplexity):
    """The batches have the hidden tokens as `labels`, -100 elsewhere."""

    def scored(self, output, batch):
        logits = output.prediction_logits if "prediction_logits" in output else output.logits
        return labelled(logits, batch["truth"])


def labelled(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    real = labels != NO_LABEL
    return logits[real.to(logits.device)].float(), labels[real].to(logits.device)


class Divergence(NextTokenPerplexity):
    """The perplexity of the whole model divided by that of the limited one, expected on texts that the whole model would write.

    It is `exp(-divergence)`, with the mean divergence of the distributions of tokens. Perplexity on a few hundred tokens of a given text
    changes by a per cent by chance, which hides what one layer costs; the divergence does not depend on which token came next.
    """

    name = "divergence"

    def read(self, output, batch):
        logits, _ = self.scored(output, batch)
        return logits.log_softmax(-1).cpu()

    def of(self, whole, limited):
        rows = [
            kl_div(ours, theirs, log_target=True, reduction="sum") for theirs, ours in zip(whole, limited, strict=True)
        ]
        found = torch.stack(rows).double().mean().clamp(min=0)
        return {"quality": float((-found).exp()), self.name: float(found)}


class MaskedDivergence(Divergence, MaskedPerplexity):
    scored = MaskedPerplexity.scored


class EmbeddingCosine(Quality, Embeddings):
    name = "embedding_cosine"

    def read(self, output, batch):
        if output.get("last_hidden_state", output.get("encoder_last_hidden_state")) is None:
            raise ValueError(
                "the model returns no last hidden states, whose change would be measured: give one of its towers, or the model with a "
                "language-model head."
            )
        return super().read(output, batch)

    def of(self, whole, limited):
        found = cosine_similarity(whole.double(), limited.double(), dim=-1).mean().item()
        return {"quality": found, self.name: found}


class Accuracy(Quality, Classification):
    name = "accuracy"

    def of(self, whole, limited):
        truth = torch.cat([batch["truth"] for batch in self.batches])
        before, after = ((logits.argmax(-1) == truth).double().mean().item() for logits in (whole, limited))
        if before == 0:
            raise ValueError(
                f"the whole model gives none of the {len(truth)} labels: check the labels, or leave them out."
            )
        return {"quality": after / before, self.name: after}


def quality_of(model: PreTrainedModel, batches: Sequence[Batch], pooling: str = "mean") -> Quality:
    """The measure that fits a model: perplexity for a language model, accuracy for a classifier whose batches have `labels`,
    otherwise the cosine of embeddings."""
    task, labelled = task_of(model), all("labels" in batch for batch in batches)
    if issubclass(task, NextToken):
        return NextTokenPerplexity(model, batches)
    if labelled and issubclass(task, MaskedTokens):
        return MaskedPerplexity(model, batches)
    if labelled:
        if not issubclass(task, Classification) or any(
            batch["labels"].ndim != 1 or batch["labels"].is_floating_point() for batch in batches
        ):
            raise ValueError(
                f"{type(model).__name__} does not give one label to each example, which accuracy needs: leave `labels` out of the "
                "batches, to measure embeddings."
            )
        return Accuracy(model, batches)
    return EmbeddingCosine(base_of(model), batches, pooling)


def quality_of_layer(quality: Quality, model: PreTrainedModel, batches: Sequence[Batch], pooling: str) -> Quality:
    """The measure for one layer of a model that has this measure for all layers."""
    if isinstance(quality, NextTokenPerplexity):
        return (MaskedDivergence if isinstance(quality, MaskedPerplexity) else Divergence)(model, batches)
    return quality_of(model, batches, pooling)
