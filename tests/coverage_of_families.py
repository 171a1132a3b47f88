"""What can be measured of each model type that AutoModel knows, and whether the numbers are right: the table of docs/families.md.

    python -m tests.coverage_of_families --write
    python -m tests.coverage_of_families llama t5 --details

A small model of each type is built with random weights, and all probes run on all of its lists of layers. Each number is
compared with another source: residuals with states that plain hooks see and with `output_hidden_states`, maps with
`output_attentions`, variants with the outputs of modules in the plain run, weights with the queries and values that they give.
A number that differs counts as refused.
"""

import argparse
import json
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from hf_rankattn import measure_attention, measure_collapse, measure_logits, measure_weights
from hf_rankattn.families.architectures import attending_layers, attention_of, base_of, family_of, layers_of
from hf_rankattn.families.stream import is_norm, states_of, tensors_in
from hf_rankattn.families.structure import choosing_tower, towers_of
from hf_rankattn.measure import spectral_metrics
from hf_rankattn.probe.ablate import ablate, follow
from hf_rankattn.probe.batches import first_example, run
from hf_rankattn.probe.interface import implementation, showing_layers
from hf_rankattn.probe.read_weights import query_key, read_layouts, values
from hf_rankattn.probe.weights import written_factors
from tests.small_families import small_and_running


PAGE = Path(__file__).parents[1] / "docs" / "families.md"
KINDS = ("residuals", "variants", "attention", "logits", "weights")
LIMIT = 20  # seconds of computation for one model type


class Differs(Exception):
    """A number is not that of the other source."""


class TimeIsUp(BaseException):
    """The time of one model type is over."""


def same(found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = 1e-3) -> None:
    found, expected = found.double(), expected.double()
    if found.shape != expected.shape:
        raise Differs(f"WRONG: {what}: {tuple(found.shape)} values and not {tuple(expected.shape)}")
    if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
        raise Differs(f"WRONG: {what}: {found.flatten()[:3].tolist()} and not {expected.flatten()[:3].tolist()}")


def column(table: pd.DataFrame, metric: str, **labels: Any) -> torch.Tensor:
    rows = table[table.metric == metric]
    for name, label in labels.items():
        rows = rows[rows[name] == label]
    order = [name for name in ("example", "head") if name in rows]
    return torch.tensor(rows.sort_values(order).value.to_numpy() if order else rows.value.to_numpy())


def relative(states: torch.Tensor) -> torch.Tensor:
    """The residual of each example, written out: what is left after the mean of the tokens, in the composite norm."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        return (x.abs().sum(-1).amax(-1) * x.abs().sum(-2).amax(-1)).sqrt()

    states = states.double()
    states = states[None] if states.ndim == 2 else states.flatten(1, -2)
    return norm(states - states.mean(-2, keepdim=True)) / norm(states)


def plain_states(model: PreTrainedModel, batch: dict) -> tuple[list[torch.Tensor], list[dict], Any]:
    """The states before the first and after each layer, the outputs of the modules in the first layer with attention, and
    what the model returns."""
    layers, states, modules = layers_of(model), [], {}
    first = layers[next(iter(attending_layers(model)), 0)]
    turned = not family_of(model).batch_first
    flip = (lambda x: x.transpose(0, 1)) if turned else (lambda x: x)

    def enter(module, args, kwargs):
        if not states:
            states.append(flip(states_of(args, kwargs)).clone())

    def leave(module, args, output):
        states.append(flip(next(tensors_in(output))).clone())

    def remember(module, args, output):
        if (tensor := next(tensors_in(output), None)) is not None:
            modules.setdefault(module, tensor.detach().clone())

    with ExitStack() as stack, torch.no_grad():
        for layer in dict.fromkeys(layers):
            stack.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(leave).remove)
        torch.manual_seed(0)
        for module in first.modules():
            if module is not first:
                stack.callback(module.register_forward_hook(remember).remove)
        output = base_of(model)(**batch)
    return states, modules, output


def check_residuals(model: PreTrainedModel, batch: dict, table: pd.DataFrame, name: str | None) -> None:
    states, _, _ = plain_states(model, batch)
    for layer, seen in enumerate(states):
        same(column(table, "relative_residual", layer=layer), relative(seen), f"residual of layer {layer}")
    with torch.no_grad():
        try:
            output = base_of(model)(**batch, output_hidden_states=True)
        except Exception:
            return
    given = [output.get(f"{side}hidden_states") for side in ("", "encoder_", "decoder_") if hasattr(output, "get")]
    given = [entry for entry in given if isinstance(entry, tuple) and len(entry) == len(states)]
    given = [
        entry
        for entry in given
        if all(getattr(x, "shape", None) == y.shape for x, y in zip(entry, states, strict=True))
    ]
    # states of another list of layers do not start with these
    given = [entry for entry in given if torch.equal(entry[0], states[0])]
    if given and len(states) > 2 and not any(torch.equal(entry[1], states[1]) for entry in given):
        raise Differs("WRONG: the states after the first layer are not those of `output_hidden_states`")


def check_unchanged(model: PreTrainedModel, batch: dict) -> None:
    """With nothing removed, and under the hooks of the probes, the model returns the same to the last bit."""

    def result() -> list[torch.Tensor]:
        torch.manual_seed(0)
        with torch.no_grad():
            return list(tensors_in(dict(base_of(model)(**batch))))

    plain = result()
    with ExitStack() as stack:
        for layer in dict.fromkeys(layers_of(model)):
            follow(layer, family_of(model), {}, lambda *_: None, stack)
        followed = result()
    again = result()
    for other, what in ((followed, "followed"), (again, "restored")):
        if any(not torch.equal(a, b) for a, b in zip(plain, other, strict=True) if not a.isnan().any()):
            raise Differs(f"WRONG: the {what} model does not return what the plain model returns")


def check_variants(model: PreTrainedModel, batch: dict, found: dict) -> None:
    """The first layer with attention without skips or MLP, against the outputs of its modules in the plain run."""
    layer = attending_layers(model)[0]
    states, modules, _ = plain_states(model, batch)
    before = states[layer]
    seen = {}
    for name, switches in (("san", {"attention_skip": True, "mlp": True}), ("san+skip", {"mlp": True})):
        with ablate(model, **switches, layers=[layer]):
            seen[name] = plain_states(model, batch)[0][layer + 1]
        if torch.equal(seen[name], states[layer + 1]):
            raise Differs(f"WRONG: {name} is the whole layer")
    norms = [None, *(module for module in modules if is_norm(module))]
    for update in modules.values():
        if update.numel() != before.numel():
            continue
        update = update.reshape(before.shape)
        for norm in norms:
            with torch.no_grad():
                try:
                    alone, both = (x if norm is None else norm(x) for x in (update, before + update))
                except Exception:
                    continue
            if all(
                x.shape == y.shape and torch.allclose(x, y, rtol=1e-4, atol=1e-5)
                for x, y in ((alone, seen["san"]), (both, seen["san+skip"]))
            ):
                found["by hand"] = True
                return


def check_attention(model: PreTrainedModel, batch: dict, table: pd.DataFrame, found: dict) -> None:
    with implementation(model, "eager"), torch.no_grad():
        torch.manual_seed(0)
        try:
            output = base_of(model)(**batch, output_attentions=True)
        except Exception:
            return
    layers = attending_layers(model)
    names = ("attentions", "encoder_attentions", "decoder_attentions")
    given = [output.get(name) for name in names] if hasattr(output, "get") else []
    given = [[x for x in entry if isinstance(x, torch.Tensor)] for entry in given if isinstance(entry, tuple)]
    own = column(table, "stable_rank", layer=layers[0])
    fitting = [
        e for e in given if len(e) == len(layers) and all(x.ndim == 4 and x.shape[:2].numel() == len(own) for x in e)
    ]
    states = plain_states(model, batch)[0][0]
    tokens = states.shape[-2] if states.ndim < 4 else states.shape[1:-1].numel()
    fitting = [e for e in fitting if all(x.shape[-1] == x.shape[-2] == tokens for x in e)]
    errors = []
    for entry in fitting:
        try:
            for layer, maps in zip(layers, entry, strict=True):
                for metric, expected in spectral_metrics(maps).items():
                    if metric in ("stable_rank", "effective_rank", "residual"):
                        same(
                            column(table, metric, layer=layer),
                            expected.flatten(),
                            f"{metric} of the maps of layer {layer}",
                        )
            found["maps compared"] = True
            return
        except Differs as error:
            errors.append(error)
    if errors and (len(towers_of(base_of(model))) < 2 or family_of(model).layers):
        raise errors[0]


def keep(inputs: dict[int, torch.Tensor], number: int) -> Callable[..., None]:
    def enter(module, args, kwargs) -> None:
        inputs.setdefault(number, states_of(args, kwargs).clone())

    return enter


def keep_shown(shown: dict[int, Any], number: int, seen: Any) -> None:
    shown.setdefault(number, seen)


def give_maps(states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, maps: torch.Tensor) -> int:
    """Whether the softmax of states (n, d) by these weights is one of the usual maps: 1 or 0."""
    logits = torch.einsum("nd,hdr,her,me->hnm", states, query.float(), key.float(), states)
    past = torch.ones(logits.shape[-2:]).tril().log()
    choices = [
        (logits * scale + mask).softmax(-1)
        for scale in (1.0, query.shape[-1] ** -0.5)
        for mask in (torch.zeros(()), past)
    ]
    return int(any(x.shape == maps.shape and torch.allclose(x, maps.float(), atol=1e-4) for x in choices))


def check_weights(model: PreTrainedModel, batch: dict, found: dict) -> None:
    """Rows applied to the input of attention at the first token, against the queries and values that attention gets."""
    example = first_example(batch)
    family = family_of(model)
    biases = {name: weight for name, weight in model.named_parameters() if name.endswith("bias") and weight.ndim == 1}
    inputs: dict[int, torch.Tensor] = {}
    shown: dict[int, Any] = {}
    layers = layers_of(model)
    attending = attending_layers(model)
    layouts = {} if family.layers else read_layouts(model, example)
    with ExitStack() as stack, torch.no_grad():
        kept = {name: weight.clone() for name, weight in biases.items()}
        for weight in biases.values():
            weight.zero_()
        try:
            for number in attending:
                attention = attention_of(model, layers[number])
                stack.callback(attention.register_forward_pre_hook(keep(inputs, number), with_kwargs=True).remove)
            stack.enter_context(showing_layers(model, lambda number, seen: keep_shown(shown, number, seen), "eager"))
            run(model, example)
        finally:
            for name, weight in biases.items():
                weight.copy_(kept[name])
    compared = 0
    for number in attending:
        if number not in shown or number not in inputs:
            continue
        if family.layers:
            query, key = family.projections.query_key(layers[number], model.config)
            written = family.projections.values(layers[number])
        else:
            query, key = query_key(number, layouts[number])
            written = values(number, layouts[number])
        seen, given = shown[number], inputs[number]
        token = (given if given.ndim == 2 else given.flatten(1, -2)[0])[0].detach().float()
        if token.shape[-1] != query.shape[1]:
            continue
        if seen.query is None:
            found["weights maps"] = min(
                found.get("weights maps", 9),
                give_maps((given if given.ndim == 2 else given.flatten(1, -2)[0]).float(), query, key, seen.maps[0]),
            )
            continue
        reads, _ = written_factors(written.value, written.output, len(query))
        for what, rows, got in (
            ("queries", query, seen.query[0, :, 0]),
            ("keys", key, seen.factors()[1][0, :, 0]),
            ("values", reads, seen.value[0, :, 0].repeat_interleave(len(reads) // seen.value.shape[1], dim=0)),
        ):
            if len(token) != rows.shape[1]:
                continue
            own = torch.einsum("d,hdr->hr", token, rows.detach().float())
            if own.shape != got.shape:
                raise Differs(f"WRONG: the {what} of layer {number} are {tuple(own.shape)} and not {tuple(got.shape)}")
            # factors on the queries, the latent norms and q-norms change lengths, and norms by head only these
            if not bool(own.any() & got.any()):
                continue
            alike = torch.nn.functional.cosine_similarity(own, got.float(), dim=-1)
            if what == "values" and float(alike.min()) < 0.99:
                raise Differs(f"WRONG: the values of layer {number} are not those of its weights")
            found[f"weights {what}"] = min(found.get(f"weights {what}", 1.0), round(float(alike.min()), 3))
        compared += 1
    found["weights compared"] = compared


def attempt(result: dict, kind: str, measure: Callable[[], Any]) -> Any:
    torch.manual_seed(0)  # some models drop tokens at random
    try:
        table = measure()
        result[kind] = "yes"
        return table
    except (ValueError, Differs) as error:
        result[kind] = f"{error}"
    except Exception as error:
        result[kind] = f"WRONG: {type(error).__name__}: {error}"
    return None


def probe_tower(model: PreTrainedModel, batch: dict, name: str | None) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with choosing_tower(name):

        def residuals():
            table = measure_collapse(model, batch, ["transformer"], tower=name)
            check_residuals(model, batch, table, name)
            check_unchanged(model, batch)

        def variants():
            measure_collapse(model, batch, tower=name)
            check_variants(model, batch, result)

        def attention():
            check_attention(model, batch, measure_attention(model, batch, "full", tower=name), result)

        def weights():
            measure_weights(model, inputs=batch, tower=name)
            check_weights(model, batch, result)

        attempt(result, "residuals", residuals)
        if result["residuals"] == "yes":
            attempt(result, "variants", variants)
            attempt(result, "attention", attention)
            attempt(result, "logits", lambda: measure_logits(model, batch, tower=name))
            attempt(result, "weights", weights)
        else:
            result |= dict.fromkeys(KINDS, result["residuals"])
    return result


def cover(model_type: str) -> dict[str, Any]:
    """What can be measured of a small model of one type."""
    started = time.process_time()
    result: dict[str, Any] = {"type": model_type, "built": False, "runs": False, "towers": {}}
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    try:
        model, batch, reason = small_and_running(model_type)
        result |= {"built": model is not None, "runs": batch is not None, "reason": reason}
        if model is not None and batch is not None:
            base = base_of(model)
            names = [None] if family_of(model).layers else [tower.path for tower in towers_of(base)] or [None]
            for name in names:
                result["towers"][str(name)] = probe_tower(model, batch, name)
    except TimeIsUp:
        result["reason"] = f"more than {LIMIT} seconds"
    except Exception as error:
        result["reason"] = f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return result | {"seconds": round(time.process_time() - started, 1)}


def answer(result: dict, kind: str) -> str:
    """Empty if one of the towers can be measured, else the reason of the first one."""
    found = [tower.get(kind, "") for tower in result["towers"].values()]
    if "yes" in found:
        return ""
    return " ".join((found[0] if found else result.get("reason") or "it does not run").split())


def page(results: list[dict]) -> str:
    built = [result for result in results if result["built"]]
    running = [result for result in results if result["runs"]]
    counts = {kind: sum(not answer(result, kind) for result in running) for kind in KINDS}
    wrong = [r["type"] for r in results if "WRONG" in json.dumps(r)]
    lines = [
        "# What can be measured of which model type",
        "",
        "Each line is a model type of transformers, as a small model with random weights. This table is made by",
        "`python -m tests.coverage_of_families --write`, which also compares the numbers with other sources: residuals with plain",
        "hooks and `output_hidden_states`, maps with `output_attentions`, and weights with queries and values.",
        "A model with several lists of layers counts if one of them can be measured.",
        "",
        f"Of {len(results)} model types {len(built)} can be built here, and {len(running)} run on inputs that this script makes.",
        "Of those, the following can be measured: "
        + ", ".join(f"{kind} {count}" for kind, count in counts.items())
        + f". Wrong numbers: {len(wrong)}.",
        f"The run took {sum(result['seconds'] for result in results) / 60:.0f} minutes of one core.",
        "",
        "| model type | runs | " + " | ".join(KINDS) + " | reason |",
        "|---|---|" + "---|" * len(KINDS) + "---|",
    ]
    for result in results:
        answers = {kind: answer(result, kind) for kind in KINDS}
        marks = ["yes" if result["runs"] else "built" if result["built"] else "no"]
        marks += ["-" if not result["runs"] else "no" if reason else "yes" for reason in answers.values()]
        reasons = dict.fromkeys(reason for reason in answers.values() if reason)
        text = "; ".join(reason[:160] for reason in reasons)
        text = re.sub(r"[\[\]|`<>*$]|/\S*/", " ", text)  # no markup and no paths in reasons
        lines.append(f"| {result['type']} | " + " | ".join(marks) + f" | {text} |")
    lines += ["", "---", "Next: [how to measure](measure.md) · [all pages](README.md)"]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types; all by default")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    parser.add_argument("--details", action="store_true", help="print what was found of each list of layers")
    parser.add_argument("--json", type=Path, help="a file to which one line for each model type is added")
    parser.add_argument("--read", type=Path, nargs="*", help="make the table of these files instead of a run")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)

    def up(*_):
        raise TimeIsUp

    signal.signal(signal.SIGPROF, up)
    lines = [line for path in arguments.read or () for line in path.read_text().splitlines()]
    results = sorted(map(json.loads, lines), key=lambda result: result["type"])
    for name in () if arguments.read else arguments.types or sorted(MODEL_MAPPING_NAMES):
        results.append(cover(name))
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps(results[-1]) + "\n")
        if arguments.details:
            sys.stdout.write(json.dumps(results[-1], indent=1) + "\n")
    if arguments.write:
        PAGE.write_text(page(results))
    elif not arguments.details:
        sys.stdout.write(page(results))


if __name__ == "__main__":
    main()
