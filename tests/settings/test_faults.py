"""Invalid settings are reported in the package's words, not pydantic's."""

import itertools
import math
import re

import pytest
from pydantic import ValidationError

from latent_sweep.data.schema import BenchmarkSpec
from latent_sweep.methods import METHODS, method_class
from latent_sweep.settings import as_written
from latent_sweep.settings.faults import group_advice, unknown_name, validation_faults
from latent_sweep.sweep.schema import (
    GROUPS,
    RunSettings,
    SchedulerSettings,
    TrackingSettings,
    TrainingSettings,
    TuneSettings,
)

KINDS = [*GROUPS.values(), RunSettings, TuneSettings, BenchmarkSpec, *(method_class(m).settings_class for m in METHODS)]
WRONG = ["x y", -1.5, 3, [], {}, [[1]], True, None, math.nan, 10**30, {"a": {"b": [1]}}, ["a", None], {1: 2}, "yes"]


def faults_of(kind, group="", **content):
    with pytest.raises(ValidationError) as caught:
        as_written(kind).model_validate(content)
    return validation_faults(caught.value, kind, group)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_setting_answers_in_the_words_of_pydantic(kind):
    written, lines = as_written(kind), set()
    for field, value in itertools.product(written.model_fields, WRONG):
        for content in ({field: value}, {field: {"name": value}}):
            try:
                written.model_validate({"name": "a"} | content if "name" in written.model_fields else content)
            except ValidationError as error:
                lines |= set(validation_faults(error, kind))
    assert len(lines) > 20
    assert not [line for line in lines if re.search(r"Input|hould|\bvalid\b|tuple|regex|pattern", line)]
    fields = [line.partition(":")[0].partition(".")[0].partition("[")[0] for line in lines]
    assert set(fields) - {"the file"} <= set(written.model_fields)


@pytest.mark.parametrize(
    ("kind", "content", "path", "written"),
    [
        (RunSettings, {"pack": "seed"}, "pack", "[seed]"),
        (RunSettings, {"page": "yes"}, "page", "true"),
        (RunSettings, {"page": "off"}, "page", "false"),
        (RunSettings, {"resources": {"accelerator": 100}}, "resources.accelerator", '"100"'),
        (RunSettings, {"scheduler": "asha"}, "scheduler", "{name: asha}"),
        (RunSettings, {"tracking": "none"}, "tracking", "{uri: none}"),
        (TrainingSettings, {"epochs": "3"}, "epochs", "3, without quotes"),
        (TrainingSettings, {"epochs": 2.0}, "epochs", "2"),
        (TrainingSettings, {"learning_rate": "1e-4"}, "learning_rate", "1e-4, without quotes"),
        (TrainingSettings, {"learning_rate": [0.1]}, "learning_rate", "0.1"),
        (TrainingSettings, {"gradient_clip": "none"}, "gradient_clip", "null"),
        (GROUPS["benchmark"], {"name": "builtin", "tasks": "mood"}, "tasks", "[mood]"),
    ],
)
def test_common_mistakes_get_a_correction(kind, content, path, written):
    (line,) = faults_of(kind, **content)
    assert line.startswith(f"{path}: found ")
    assert line.endswith(f"Write {written}") or f"Write {written}, in quotes" in line


def test_a_setting_with_alternatives_has_one_line_and_its_whole_value():
    (line,) = faults_of(RunSettings, pack=["seed", 1])
    assert line.startswith("pack: found ['seed', 1]; ")


def test_several_values_for_a_setting_of_a_trial_are_an_axis():
    (line,) = faults_of(TrainingSettings, "training", learning_rate=[0.1, 0.2])
    assert "search.training.learning_rate" in line
    (line,) = faults_of(RunSettings, page=[True, False])
    assert "search." not in line


def test_an_unknown_key_is_looked_for_inside_and_elsewhere():
    (line,) = faults_of(RunSettings, gpus=1)
    assert "resources.gpus" in line
    (line,) = faults_of(TrainingSettings, lr=1)
    assert "'learning_rate'" in line
    with pytest.raises(ValidationError) as caught:
        TrackingSettings.model_validate({"rank": 3})
    (line,) = validation_faults(caught.value, TrackingSettings, elsewhere=lambda name: f"{name} is there")
    assert "rank is there" in line


def test_a_decimal_comma_is_recognized():
    (line,) = faults_of(TrainingSettings, **{"5": None})
    assert "0.5" in line


def test_messages_hide_secrets():
    (line,) = faults_of(RunSettings, pack="https://me:hunter22@host/x")
    assert "hunter22" not in line
    assert "hunter22" not in group_advice("https://me:hunter22@host/x", SchedulerSettings)


def test_a_name_is_matched_by_spelling_or_initials():
    assert "'mood'" in unknown_name("moods", ["mood", "date"], "task")
    assert "'batch_size'" in unknown_name("bs", ["batch_size", "epochs"], "key")
    assert "mean" not in unknown_name("zzz", ["batch_size", "epochs"], "key")
