"""Arguments from a command line, from YAML and from both; the optimizer of the point tasks."""

import os
from dataclasses import dataclass, field

import pytest
import torch

from hf_rankattn import RankEncoderConfig, RankEncoderForPointRegression
from hf_rankattn.training.arguments import RunArguments, parse_arguments
from hf_rankattn.training.optimizers import point_optimizer, warmup_cosine


@dataclass(kw_only=True)
class Arguments(RunArguments):
    model: str = field(metadata={"help": "required"})
    qk_norm: bool = False
    ranks: list[int] = field(default_factory=lambda: [1])
    note: str | None = None


def parse(tmp_path, text: str, *argv: str) -> Arguments:
    (tmp_path / "config.yaml").write_text(text)
    return parse_arguments(Arguments, argv=[str(tmp_path / "config.yaml"), *argv])


def test_a_file_and_the_command_line_over_it(tmp_path):
    text = "model: bert\nlearning_rate: 1e-3\nqk_norm: true\nranks: [2, 4]\nnote: null\nsteps: 20\nsave_every: 10\n"
    found = parse(tmp_path, text, "--steps", "40", "--seed=3")
    assert (found.model, found.learning_rate, found.qk_norm, found.ranks) == ("bert", 1e-3, True, [2, 4])
    assert (found.steps, found.save_every, found.seed, found.data_seed, found.note) == (40, 10, 3, 3, None)
    assert parse(tmp_path, text, "--qk_norm", "false", "--ranks", "8").ranks == [8]
    written = "--model bert --learning_rate 1e-3 --qk_norm --ranks 2 4 --steps 40 --save_every 10 --seed 3"
    assert parse_arguments(Arguments, argv=written.split()) == found


# nine levels of nine references each: 3.9e8 values, if they were expanded
LEVELS = [", ".join(["x"] * 9), *(", ".join([f"*a{level}"] * 9) for level in range(8))]
ALIASES = "model: a\nnote: [" + ", ".join(f"&a{level} [{values}]" for level, values in enumerate(LEVELS)) + "]"


@pytest.mark.parametrize(
    "text, argv, line",
    [
        ("model: a\nqk_rnak: 3", [], "unknown key 'qk_rnak'"),
        ("model: a\nleraning_rate: 3", [], "did you mean learning_rate?"),
        ("model: a\nsteps: many", [], "argument --steps: invalid int value: 'many'"),
        ("model: a\nsteps: null", [], "steps must have a value"),
        ("model: a\nsteps: {a: 1}", [], "steps takes one value or a list of values, got a mapping"),
        ("model: a\nsteps: 10\nsteps: 20", [], "steps is given twice"),
        ("- model", [], "must hold lines `name: value`, got a sequence"),
        ("model: " + "[" * 100_000, [], "cannot be read: it is nested too deeply"),
        ("model: a\nsteps: " + "9" * 5000, [], "argument --steps: invalid int value: '99999"),
        (ALIASES, [], "note takes one value or a list of values, got a list of lists"),
        ("model: a\nsteps: 0x10", [], "argument --steps: invalid int value: '0x10'"),
        ("model: [", [], "cannot be read"),
        ("steps: 10", [], "--model"),
        ("model: a", ["--step", "3"], "unknown argument --step: did you mean steps?"),
        ("model: a", ["--batch_size", "0"], "--batch_size must be at least 1, got 0"),
        ("model: a", ["--save_every", "15"], "make it a multiple of 10"),
        ("model: a", ["--warmup", "1"], "--warmup is a share of the steps"),
        ("model: a", ["--learning_rate", "nan"], "--learning_rate must be a positive finite number"),
    ],
)
def test_bad_input_is_one_line_and_code_2(text, argv, line, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(tmp_path, text, *argv)
    (said,) = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and line in said and len(said) < 1100


def test_values_are_read_as_on_a_command_line(tmp_path):
    """YAML 1.1 would take 010 for 8, 1_0:30 for 630 and `no` for False."""
    found = parse(tmp_path, "model: 010\nsteps: 010\nnote: no\nranks: [010, 2]\nqk_norm: yes\nseed: 0\n")
    assert (found.model, found.steps, found.note, found.ranks, found.qk_norm) == ("010", 10, "no", [10, 2], True)
    assert parse(tmp_path, "model: 'null'\nnote:").model == "null"
    assert parse(tmp_path, "model: a\nranks: &some [1, 2]\nnote: &text b\noutput_dir: *text").output_dir == "b"


def test_a_missing_file_is_named_and_a_named_pipe_is_not_opened(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, line in (("pipe.yaml", "it is not a regular file"), ("nowhere.yaml", "nowhere.yaml cannot be read")):
        with pytest.raises(SystemExit) as stop:
            parse_arguments(Arguments, argv=[str(tmp_path / name)])
        assert stop.value.code == 2 and line in capsys.readouterr().err


def test_temperatures_learn_at_their_own_rate():
    config = RankEncoderConfig(input_dim=4, num_hidden_layers=2, intermediate_size=8, qk_norm=True)
    model = RankEncoderForPointRegression(config)
    optimizer = point_optimizer(model, 0.01, temperature_lr_factor=5.0)
    slow, fast = optimizer.param_groups
    temperatures = [layer.attention.log_temperature for layer in model.encoder.layers]
    assert {id(p) for p in fast["params"]} == {id(p) for p in temperatures}
    assert len(slow["params"]) + 2 == len(list(model.parameters()))
    assert (slow["lr"], fast["lr"]) == (0.01, 0.05)
    assert all(group["betas"] == (0.9, 0.95) and group["weight_decay"] == 0 for group in optimizer.param_groups)
    schedule = warmup_cosine(optimizer, steps=100)
    for _ in range(30):
        optimizer.step()
        schedule.step()
    assert fast["lr"] == pytest.approx(5 * slow["lr"]) and 0 < slow["lr"] < 0.01
    plain = RankEncoderForPointRegression(RankEncoderConfig(input_dim=4, intermediate_size=8))
    assert len(point_optimizer(plain, 0.01).param_groups) == 1


@pytest.mark.parametrize("steps, warmup, whole", [(100, 0.29, 29), (19, 0.05, 0), (2000, 0.05, 100)])
def test_the_warm_up_is_whole_steps(steps, warmup, whole):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = warmup_cosine(optimizer, steps, warmup)
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates.index(max(rates)) == whole and max(rates) == 1.0


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda model: point_optimizer(model, 0.0), "`learning_rate` must be a positive finite number, got 0.0"),
        (lambda model: point_optimizer(model, 0.1, -1.0), "`temperature_lr_factor` must be a positive finite number"),
        (lambda model: warmup_cosine(point_optimizer(model, 0.1), 0), "`steps` must be at least 1, got 0"),
        (lambda model: warmup_cosine(point_optimizer(model, 0.1), 5, 1.0), "`warmup` is a share of the steps"),
    ],
)
def test_impossible_rates_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.nn.Linear(2, 2))
