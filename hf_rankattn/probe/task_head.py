"""The output of a task head on states that its base model did not return."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

import torch
from transformers import PreTrainedModel

from ..families.architectures import base_of, family_of
from ..files.running import evaluating


class TaskHead:
    """The head of a model on other states than those of its base model, which does not run again."""

    def __init__(self, model: PreTrainedModel, result: Any, batch: Mapping[str, torch.Tensor]):
        self.model, self.base, self.result, self.batch = model, base_of(model), result, batch

    @contextmanager
    def returning(self, states: torch.Tensor) -> Iterator[None]:
        """Make the base model return these states (batch, n, d) for any input."""
        result = copy(self.result)
        result.last_hidden_state = states.to(self.model.dtype)
        if getattr(result, "pooler_output", None) is not None:
            result.pooler_output = family_of(self.model).pool(self.base, result.last_hidden_state)
        before = vars(self.base).get("forward")  # offloading sets one, too
        self.base.forward = lambda *args, **kwargs: result  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.base.forward
            if before is not None:
                self.base.forward = before  # type: ignore[method-assign]

    def outputs(self, states: torch.Tensor) -> Iterator[tuple[Any, Mapping[str, torch.Tensor]]]:
        """The output of the model for each example alone, and the example."""
        for example in range(len(states)):
            own = {name: value[example : example + 1] for name, value in self.batch.items()}
            with evaluating(self.model), self.returning(states[example : example + 1]):
                yield self.model(**own), own

    def scores(self, states: torch.Tensor, needed: bool = False) -> dict[str, torch.Tensor]:
        """Loss and accuracy of each example, (batch) each, where labels allow; a missing `needed` loss is an error."""
        found: dict[str, list[torch.Tensor]] = {"loss": [], "accuracy": []}
        for output, example in self.outputs(states):
            labels, logits = example.get("labels"), output.get("logits")
            if output.get("loss") is not None:
                found["loss"].append(output.loss)
            elif needed:
                raise ValueError(
                    f"{type(self.model).__name__} returned no loss: the batch needs its labels, and has "
                    f"{', '.join(self.batch)}."
                )
            if labels is None or labels.is_floating_point() or logits is None:
                continue
            if logits.shape[:-1] == labels.shape:
                causal = family_of(self.model).causal(self.model.config)
                if causal and type(self.model).__name__.endswith(("LMHeadModel", "ForCausalLM")):
                    # the labels are the inputs, and each token predicts the next one
                    logits, labels = logits[:, :-1], labels[:, 1:]
                counted = labels != -100
                found["accuracy"].append((logits.argmax(-1) == labels)[counted].double().mean())
        return {name: torch.stack(values) for name, values in found.items() if values}
