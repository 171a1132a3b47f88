"""Run RankCallback on a model whose layers two processes share, and print what each process saw. Run by test_callback.py."""

import json
import os
import tempfile

import torch
import torch.distributed as distributed
from torch.distributed.fsdp import fully_shard
from transformers import BertConfig, BertForSequenceClassification, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

from hf_rankattn import RankCallback


METRICS = ["relative_residual", "participation_ratio", "logits/energy_rank", "weights/effective_rank"]
IDS = torch.arange(24).view(2, 12)
SHORT = torch.zeros_like(IDS)
SHORT[:, 0] = 1


def follow(model, inputs=None, trained_on=None) -> str | list[list[float]]:
    """What one step of training logs, or the error that ends it."""
    callback = RankCallback(every=1, inputs=inputs, metrics=METRICS)
    handler = CallbackHandler([callback, DefaultFlowCallback()], model, None, None, None)
    state, control = TrainerState(), TrainerControl()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(output_dir=folder, use_cpu=True, report_to="none")
        try:
            handler.on_train_begin(arguments, state, control)
            handler.on_step_begin(arguments, state, control)
            model(**(trained_on or {"input_ids": IDS}))
            state.global_step = 1
            handler.on_step_end(arguments, state, control)
            handler.on_train_end(arguments, state, control)
        except ValueError as error:
            return str(error)
    return [[entry[f"rank/{name}"] for name in METRICS] for entry in state.log_history]


def main():
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    model = BertForSequenceClassification(BertConfig(vocab_size=50, **sizes)).eval()
    good = {"input_ids": IDS}
    single = {"input_ids": IDS, "attention_mask": SHORT}
    seen = {"whole": follow(model, good)}
    for layer in model.bert.encoder.layer:
        fully_shard(layer, mesh=distributed.init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=distributed.init_device_mesh("cpu", (2,)))
    seen["sharded"] = follow(model, good)
    seen["one cannot use its batch"] = follow(model, single if rank else good)
    seen["one has more batches"] = follow(model, [good] * (1 + rank))
    seen["one has kept no batch"] = follow(model, trained_on=single if rank else good)
    print(json.dumps(seen) + "\n", end="", flush=True)  # one write: two processes share stdout
    distributed.barrier()
    os._exit(0)  # not through the teardown of the process group, which has been seen to hang


if __name__ == "__main__":
    main()
