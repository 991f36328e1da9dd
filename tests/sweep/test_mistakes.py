"""Ordinary mistakes in sweep files: each is refused by `plan` and `run` with its path, and with what to do."""

import pytest
import yaml
from helpers.sweeps import tiny

from latent_sweep.cli.main import main

PLAIN = yaml.safe_dump(tiny(), sort_keys=False)


def _with(text, replacement):
    assert text in PLAIN
    return PLAIN.replace(text, replacement)


MISTAKES = {
    "an empty file": ("", ["latent-sweep init"]),
    "a tab": ("name: a\ntrial:\n\tseed: 1\n", ["line 3, column 1", "tab"]),
    "a colon in a value": ("name: a: b\n", ["line 1, column 8"]),
    "no blank behind a key": ("name:a\ntrial: {}\n", ["line 2, column 6"]),
    "another indentation": ("trial:\n  seed: 1\n   method: {}\n", ["line 3"]),
    "a list among keys": ("search:\n  seed: [1]\n  - a\n", ["line 3, column 3", "'-'"]),
    "an octal number": (PLAIN + "tune: {seed: 010}\n", ["010"]),
    "no trial": ("name: a\n", ["trial.benchmark.name: ", "`builtin`"]),
    "a date for a name": (_with("name: tiny\n", "name: 2024-01-01\n"), ["name: found 2024-01-01"]),
    "a name with blanks": (_with("name: tiny\n", "name: my sweep\n"), ["name: found 'my sweep'", "my_sweep"]),
}
SET = {
    "a setting of the trial": ("trial.rank=4", ["trial.rank: ", "method.rank"]),
    "a setting at the top": ("storage=x", ["storage: ", "run.storage"]),
    "a setting in another group": ("trial.training.rank=4", ["trial.training.rank: ", "trial.method.rank"]),
    "a setting of another method": (
        "trial.method={name: seq_lora, ortho: {reduce: sum}}",
        ["trial.method.ortho: ", "latent_lora"],
    ),
    "an axis of another group": ("search.rank=[2, 4]", ["search.rank: rank: ", "method.rank"]),
    "an axis by its whole path": ("search.trial.seed=[1]", ["search.trial.seed: ", "write seed"]),
    "axes in a group": ("search.training={epochs: [1, 2]}", ["search.training: ", "training.epochs: [1, 2]"]),
    "fractions of a count": (
        "search.method.rank={uniform: [1, 4]}",
        ["search.method.rank.uniform: ", "randint: [1, 5]"],
    ),
    "a list for a value": ("trial.training.epochs=[1, 2]", ["trial.training.epochs: ", "search.training.epochs"]),
    "a list of seeds": ("trial.seed=[0, 1]", ["trial.seed: found [0, 1]; ", "search.seed"]),
    "a seed with a point": ("trial.seed=1.0", ["trial.seed: found 1.0; "]),
    "a name for a method": ("trial.method=seq_lora", ["trial.method: found 'seq_lora'; ", "{name: seq_lora}"]),
    "a name for a backbone": ("trial.backbone=tiny-t5", ["trial.backbone: found 'tiny-t5'; ", "{name: tiny-t5}"]),
    "a name for a scheduler": ("run.scheduler=asha", ["run.scheduler: found 'asha'; ", "{name: asha}"]),
    "an axis to pack": ("run.pack=seed", ["run.pack: found 'seed'; ", "[seed]"]),
    "GPUs of the run": ("run.gpus=1", ["run.gpus: ", "resources.gpus"]),
    "a variable of the shell": ("run.storage=${SCRATCH}/runs", ["run.storage: ", "${SCRATCH}"]),
    "yes": ("trial.training.group_by_length=yes", ["trial.training.group_by_length: found 'yes'; ", "true"]),
    "a number in quotes": ("trial.training.learning_rate='1e-4'", ["found '1e-4'; ", "1e-4, without quotes"]),
    "a decimal comma": ("trial.training={learning_rate: 1,5}", ["trial.training.5: ", "0.5"]),
}


def refused(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert "Traceback" not in printed and "unicode string" not in printed
    return printed


@pytest.mark.parametrize(("text", "parts"), MISTAKES.values(), ids=list(MISTAKES))
def test_a_mistake_in_the_file_is_refused_with_a_remedy(tmp_path, capsys, text, parts):
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    for command in (["plan", path], ["run", path, "--local"]):
        printed = refused(capsys, *command)
        assert printed.startswith(f"error: {path}: ")
        assert not [part for part in parts if part not in printed]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("override", "parts"), SET.values(), ids=list(SET))
def test_a_mistake_in_a_setting_is_refused_with_a_remedy(tmp_path, capsys, override, parts):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(tiny(search={"seed": [0]}), sort_keys=False))
    for command in (["plan", path], ["run", path, "--local"]):
        printed = refused(capsys, *command, "--set", override)
        assert printed.startswith(f"error: {path}: 1 fault")
        assert not [part for part in parts if part not in printed]
    assert list(tmp_path.iterdir()) == [path]


def test_a_time_is_text_and_no_number_of_base_60(tmp_path, capsys):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(tiny(), sort_keys=False))
    assert "trial.seed: found '12:30'; " in refused(capsys, "plan", path, "--set", "trial.seed=12:30")
