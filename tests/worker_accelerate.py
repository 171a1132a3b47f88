"""Train a tiny rank BERT with Accelerate and print its losses. Run by test_training.py, alone and under torchrun."""

import json
import os
import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from hf_rankattn import RankBertConfig, RankBertForSequenceClassification


GLOBAL_BATCH = 8


def main():
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == int(sys.argv[1]), accelerator.num_processes
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}
    geometry = {"num_attention_heads": 5, "qk_rank": 3, "v_head_dim": 7, "qk_norm": True}
    config = RankBertConfig(**sizes, **geometry, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = RankBertForSequenceClassification(config)
    ids = torch.randint(40, (64, 12))
    data = TensorDataset(ids, (ids[:, 0] > ids[:, 1]).long())
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // accelerator.num_processes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for input_ids, labels in loader:
            loss = model(input_ids=input_ids, labels=labels).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    if accelerator.is_main_process:
        print(json.dumps(losses), flush=True)
    accelerator.wait_for_everyone()
    os._exit(0)  # past the teardown of the group: one of two processes was once seen to hang after its work was done


if __name__ == "__main__":
    main()
