"""What other widths of the heads save: MiniLM at the widths of docs/convert.md, and half widths of BERT-base."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import BertConfig, BertModel, PreTrainedModel
from transformers.utils import logging

from benchmarks.measure_command import minilm
from benchmarks.rank_bert import LAYERS, SHAPES, step
from benchmarks.timing import Row, at_most, median_ratio, timed
from hf_rankattn import RankBertConfig, RankBertModel, convert_rank
from hf_rankattn.convert import checkpoint as converting


WIDTHS = ((24, 24), (16, 32), (32, 16), (16, 16), (8, 16))  # query-key rank and value width; both are 32 in MiniLM
HALF = 0.85


def random_tokens(batch_size: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1000, 30522, (batch_size, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def in_onnxruntime(model: PreTrainedModel, folder: Path) -> Callable[[], object]:
    """The model as a graph of onnxruntime, run on one thread on a batch of 8 x 128."""
    import onnxruntime

    batch = random_tokens(*SHAPES[0])
    torch.onnx.export(model, (), kwargs=batch, dynamo=True, verbose=False).save(folder / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    return partial(session.run, None, {name: tensor.numpy() for name, tensor in batch.items()})


def file_size(model: PreTrainedModel, folder: Path) -> int:
    model.save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def run(repeats: int) -> Iterator[Row]:
    """The time of a cut model depends on its widths and not on its weights, so the weights alone are cut."""
    logging.disable_progress_bar()
    original = converting.load(minilm()).eval()
    with TemporaryDirectory() as folder:
        size, graph = file_size(original, Path(folder)), in_onnxruntime(original, Path(folder))
        for rank, width in WIDTHS:
            cut, what = convert_rank(original, rank, width).eval(), f"MiniLM at ({rank}, {width}) of (32, 32)"
            parameters = cut.num_parameters()
            note = f"{parameters:,}"
            yield at_most(f"{what}: parameters", "original", parameters / original.num_parameters(), 1, note).counted()
            megabytes = file_size(cut, Path(folder)) / 1e6
            note = f"{megabytes:.1f} MB"
            yield at_most(f"{what}: file", "original", megabytes * 1e6 / size, 1, note).counted()
            for batch_size, length in SHAPES:
                batch = random_tokens(batch_size, length)
                runs = {name: step(model, batch, "forward") for name, model in (("cut", cut), ("original", original))}
                yield time_row(f"{what}: forward, {batch_size} x {length}", timed(runs, repeats))
            times = timed({"cut": in_onnxruntime(cut, Path(folder)), "original": graph}, repeats)
            yield time_row(f"{what}: onnxruntime, {SHAPES[0][0]} x {SHAPES[0][1]}", times)
    yield from half_widths(repeats)


def time_row(what: str, times: dict[str, list[float]], limit: float = 1.0) -> Row:
    milliseconds = [1000 * sorted(times[name])[len(times[name]) // 2] for name in ("cut", "original")]
    note = "{:.0f} against {:.0f} ms".format(*milliseconds)
    return at_most(what, "original", median_ratio(times, "cut", "original"), limit, note)


def half_widths(repeats: int) -> Iterator[Row]:
    """Layers of the size of BERT-base with heads of 32 and 32 dimensions in place of 64."""
    torch.manual_seed(0)
    models = {
        "cut": RankBertModel(
            RankBertConfig(num_hidden_layers=LAYERS, qk_rank=32, v_head_dim=32), add_pooling_layer=False
        ),
        "original": BertModel(BertConfig(num_hidden_layers=LAYERS), add_pooling_layer=False),
    }
    for (batch_size, length), limit in zip(SHAPES, (1.0, HALF), strict=True):
        batch = random_tokens(batch_size, length)
        times = timed({name: step(model, batch, "forward") for name, model in models.items()}, 3 * repeats)
        yield time_row(f"BERT-base layers at (32, 32) of (64, 64): forward, {batch_size} x {length}", times, limit)
