"""What the documents say must be what the code says: settings, sweep files, paths, commands, names of modules."""

import importlib.util
import os
import re
from functools import cache
from pathlib import Path

import pytest
from tools import reference

from latent_sweep.cli.main import main, make_parser
from latent_sweep.methods import METHODS, method_class
from latent_sweep.settings import parse_yaml
from latent_sweep.sweep.config import load_sweep, parse_sweep
from latent_sweep.sweep.plan import expand

ROOT = Path(__file__).parents[1]
FOLDERS = ("cluster", "latent_sweep", "sweeps", "tests")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


@cache
def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def without_code_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def code(text):
    """Inline code and the blocks of commands."""
    inline = re.findall(r"`([^`\n]+)`", without_code_blocks(text))
    return inline + re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


# --- the README and the reference ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", reference.PARTS)
def test_settings_reference_is_current(part):
    document, _ = reference.PARTS[part]
    assert reference.written_into(text_of(document), part) == text_of(document), "run `make reference`"


def test_a_part_without_its_marks_is_refused():
    with pytest.raises(ValueError, match="found 0 times"):
        reference.written_into("# Nothing\n", "settings")


def test_every_setting_stands_in_the_reference():
    assert "`trial.router.components`" in text_of("sweeps/README.md")
    assert "`trial.router.components`" not in text_of("README.md"), "the reference has one place"


def yaml_blocks(name):
    return re.findall(r"```yaml\n(.*?)```", text_of(name), re.DOTALL)


def test_sweep_file_in_readme_is_the_one_that_is_there():
    (block,) = (b for b in yaml_blocks("README.md") if "\nname: lambda\n" in b)
    assert block == text_of("sweeps/lambda.yaml")


def test_sweep_file_in_the_reference_is_valid():
    (block,) = (b for b in yaml_blocks("sweeps/README.md") if b.startswith("name: lambda"))
    assert len(expand(parse_sweep(parse_yaml(block, "README"), "README"))) == 3 * 6 * 4


RELEASED = {
    re.search(r"^name: (\w+)$", block, re.M)[1]: block
    for block in yaml_blocks("latent_sweep/methods/README.md")
    if block.startswith("name: released_")
}


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_protocol_is_a_sweep_file_under_a_preset_of_its_method(name, tmp_path):
    trials = expand(parse_sweep(parse_yaml(RELEASED[name], name), name))
    assert trials and all(trial.settings.method.preset.startswith("official") for trial in trials)
    assert all(trial.settings.benchmark.truncation == "official" for trial in trials)
    if "LATENT_SWEEP_DATA" in os.environ:
        (tmp_path / "sweep.yaml").write_text(RELEASED[name])
        assert main(["plan", str(tmp_path / "sweep.yaml"), "--set", f"run.storage={tmp_path}"]) == 0


def test_every_released_method_has_a_protocol():
    """Three methods have no released code for language models."""
    trials = [trial for name in RELEASED for trial in expand(parse_sweep(parse_yaml(RELEASED[name], name), name))]
    found = {trial.settings.method.name for trial in trials}
    with_presets = {name for name in METHODS if "preset" in method_class(name).settings_class.model_fields}
    assert with_presets - found == {"ewc", "lwf", "joint_lora"}


def test_every_sweep_file_has_its_row_and_every_named_one_can_be_read():
    named = {name for document in NAMES for name in re.findall(r"sweeps/(\w+)\.yaml", text_of(document))}
    assert {path.stem for path in (ROOT / "sweeps").glob("*.yaml")} <= named | {"table2_t5_xl", "table3_llama"}
    for name in named:
        load_sweep(ROOT / "sweeps" / f"{name}.yaml")


# --- every document --------------------------------------------------------------------------------------------------


def slug(heading):
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(path):
    return {slug(h) for h in re.findall(r"^#+ (.+)$", without_code_blocks(path.read_text(encoding="utf-8")), re.M)}


@pytest.mark.parametrize("name", NAMES)
def test_every_link_leads_somewhere(name):
    prose = without_code_blocks(text_of(name))
    targets = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'<img src="([^"]+)"', prose)
    here, broken = ROOT / name, []
    for target in targets:
        file, _, anchor = target.partition("#")
        if target.startswith(("https://", "http://")):
            continue
        path = (here.parent / file) if file else here
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


ELSEWHERE = {
    *("benchmark.yaml", "config.json", "dev.json", "eval.json", "test.json"),  # of one's own
    *("result.json", "scores.json", "sweep.json", "sweep.yaml", "trial.yaml", "tuning.json"),
    *("model.json", "adapter_config.json", "config.json"),  # of a model, of adapters, of a checkpoint
    *("latent_sweep/data/x.yaml", "latent_sweep/methods/x.py", "tests/methods/test_x.py"),  # by a recipe
}
"""Files that documents name and that are somebody's own, or a run's."""
PATH = re.compile(r"(?:\.\.?/)*[\w.-]+(?:/[\w.-]+)*\.(?:py|yaml|yml|md|toml|sh|in|txt|json|svg|png)|Makefile")
BELOW_A_FOLDER = re.compile(rf"(?<![\w./~$}}:<-])(?:{'|'.join((*FOLDERS, r'[.]ci'))})/[\w./-]*\w")


def is_there(path, here):
    return any((folder / path).exists() for folder in (here.parent, ROOT))


@pytest.mark.parametrize("name", NAMES)
def test_every_path_that_is_mentioned_exists(name):
    inline = re.findall(r"`([^`\n]+)`", without_code_blocks(text_of(name)))
    mentioned = {text for text in inline if PATH.fullmatch(text)} | set(BELOW_A_FOLDER.findall(text_of(name)))
    assert {m for m in mentioned if not is_there(m, ROOT / name)} <= ELSEWHERE


@pytest.mark.parametrize("name", [name for name in NAMES if name != "CHANGELOG.md"])  # which names what is gone
def test_every_module_that_is_mentioned_exists(name):
    mentioned = set(re.findall(r"\blatent_sweep(?:\.[a-z_0-9]+)+\b", " ".join(code(text_of(name)))))
    assert {m for m in mentioned if importlib.util.find_spec(m) is None} == set()


@pytest.mark.parametrize("name", NAMES)
def test_every_command_that_is_mentioned_exists(name):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.search(r"^\.PHONY: (.+)$", makefile, re.M)[1].split())
    (commands,) = (action.choices for action in make_parser()._actions if action.choices)
    found = code(text_of(name))
    assert {t for text in found for t in re.findall(r"^make ([a-z-]+)", text, re.M)} <= targets
    assert {c for text in found for c in re.findall(r"^latent-sweep ([a-z]+)", text, re.M)} <= set(commands)


def test_these_tests_can_fail():
    assert (
        slug("What each costs: `latent-sweep bench --only methods`")
        == "what-each-costs-latent-sweep-bench---only-methods"
    )
    assert PATH.fullmatch("../router.py") and not is_there("../no_such.py", ROOT / "cluster" / "README.md")
    assert not PATH.fullmatch("runs/lambda")
    assert BELOW_A_FOLDER.findall("see tests/no_such.py, or s3://bucket/sweeps/x") == ["tests/no_such.py"]
