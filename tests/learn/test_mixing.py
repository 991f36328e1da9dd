"""Weights of the snapshots, and what the router pools: by hand on tiny token lists."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.rounding import PRODUCT
from safetensors.numpy import load_file

from latent_sweep.learn.mixing import MODES, Mixer, pool, router_accuracy
from latent_sweep.router import RouterSettings, TaskScatter

TASKS = 3


class Rows(dict):
    """Tokenised rows as the mixer reads them: columns, a length, and the cache that names them."""

    def __init__(self, name, prompts, inputs=None):
        super().__init__(prompt_ids=prompts, input_ids=inputs or prompts)
        self.cache_files = [{"filename": f"tokens/{name}/data.arrow"}]

    def __len__(self):
        return len(self["prompt_ids"])


def rows_of(task, split, count):
    """Rows whose tokens come from a handful of their task's own: easy to route."""
    source = torch.Generator().manual_seed(10 * task + (split == "test"))
    sizes = torch.randint(4, 9, (count,), generator=source).tolist()
    prompts = [(10 + 60 * task + torch.randint(0, 5, (n,), generator=source)).tolist() for n in sizes]
    return Rows(f"{task}-{split}", prompts)


@pytest.fixture
def mixer(llama, tmp_path):
    """`mixer(mode="soft")`, its rows in `mixer.rows`."""
    rows = {(task, split): rows_of(task, split, 24 - task) for task in range(TASKS) for split in ("train", "test")}
    asked = []

    def build(seed=0, folds=None, **settings):
        def tokens(task, split):
            asked.append((task, split))
            return rows[task, split]

        settings = RouterSettings(**{"components": 2, **settings})
        return Mixer(settings, llama, tokens, gates_of, TASKS, seed, tmp_path, folds)

    build.rows, build.asked, build.folder = rows, asked, tmp_path
    return build


def gates_of(tasks_seen, prompts):
    """A gate for every snapshot that depends on the prompt's length."""
    return np.array([[len(prompt) / (10 + task) for task in range(tasks_seen)] for prompt in prompts])


def embedding(backbone, ids):
    return np.mean([backbone.embedding_table[token].double().numpy() for token in ids], axis=0)


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("last", [[0, 0, 1]] * 3), ("sum", [[1, 1, 1]] * 3), ("oracle", [[1, 0, 0], [0, 1, 0], [0, 0, 1]])],
)
def test_weights_without_a_router(mixer, mode, expected):
    weights = mixer(mode=mode).weights(3)
    for task in range(3):
        np.testing.assert_array_equal(weights[task], np.tile(expected[task], (24 - task, 1)))
    assert [w.shape for w in mixer(mode=mode).weights(2)] == [(24, 2), (23, 2)]
    assert not (mixer.folder / "embeddings").exists()
    assert not mixer(mode=mode).routes


def test_gates_read_the_prompts_of_the_test_rows(mixer):
    found = mixer(mode="gates").weights(2)
    for task, weights in enumerate(found):
        lengths = [len(ids) for ids in mixer.rows[task, "test"]["prompt_ids"]]
        np.testing.assert_array_equal(weights, [[length / 10, length / 11] for length in lengths])
    assert not mixer(mode="gates").routes


def test_every_mode_has_weights(mixer):
    for mode in MODES:
        for weights in mixer(mode=mode).weights(2):
            assert np.isfinite(weights).all()


@pytest.mark.parametrize("mode", ["soft", "hard"])
def test_posterior_weights_sum_to_one_and_find_their_task(mixer, mode):
    found = mixer(mode=mode).weights(3)
    for weights in found:
        np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-12)
        assert (weights >= 0).all()
    assert router_accuracy(found) > 0.9
    assert mixer(mode=mode).routes
    if mode == "hard":
        assert {float(w) for weights in found for w in weights.ravel()} == {0.0, 1.0}


def test_the_string_match_takes_the_nearest_definition(mixer, llama):
    """Whatever the inputs are, and with nothing pooled; what a task is known by is stored, and read again."""
    definitions = ["Name the colour of it.", "Count the animals.", "Is the review good?"]
    for (task, split), rows in mixer.rows.items():
        mixer.rows[task, split] = Rows(
            f"{task}-{split}",
            [llama.tokenizer(f"{definitions[task]} {i * i} things")["input_ids"] for i in range(len(rows))],
        )
    found = mixer(mode="lexical").weights(3)
    assert router_accuracy(found) == 1.0
    for task in range(3):
        np.testing.assert_array_equal(found[task], np.tile(np.eye(3)[task], (24 - task, 1)))
    assert mixer(mode="lexical").routes
    assert not (mixer.folder / "embeddings").exists()
    records = sorted((mixer.folder / "router").glob("*.safetensors"))
    assert [path.stem for path in records] == sorted(mixer(mode="lexical").ngrams_name(task) for task in range(3))
    before = [path.read_bytes() for path in records]
    mixer.asked.clear()
    mixer(mode="lexical", seed=1, components=7).weights(3)
    assert before == [path.read_bytes() for path in records]
    records[0].write_bytes(b"damaged")
    for one, other in zip(mixer(mode="lexical").weights(3), found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert before == [path.read_bytes() for path in records], "it is made again"


def test_the_first_stage_knows_one_task(mixer):
    (weights,) = mixer(mode="soft").weights(1)
    np.testing.assert_array_equal(weights, np.ones((24, 1)))
    assert {task for task, _ in mixer.asked} == {0}, "tasks that are still to come are not read"


def test_the_posterior_is_bayes_rule_over_gaussian_densities(mixer, llama):
    """Equations (12) to (14) with scipy's densities; one component, so that K-means has nothing to decide."""
    from scipy.stats import multivariate_normal

    settings = dict(mode="soft", components=1, epsilon=20.0, prune_below=0.0)
    found = mixer(**settings).weights(3)
    train = [np.stack([embedding(llama, ids) for ids in mixer.rows[t, "train"]["prompt_ids"]]) for t in range(3)]
    scatter = sum((X - X.mean(0)).T @ (X - X.mean(0)) for X in train)
    pooled = scatter / sum(map(len, train))
    C = pooled + 20.0 * np.trace(pooled) / len(pooled) * np.eye(len(pooled))
    for task in range(3):
        X = np.stack([embedding(llama, ids) for ids in mixer.rows[task, "test"]["prompt_ids"]])
        logs = np.stack([multivariate_normal(t.mean(0), C).logpdf(X) for t in train], axis=1)
        density = np.exp(logs - logs.max(axis=1, keepdims=True))
        expected = density / density.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(found[task], expected, atol=1e-4)
        assert 0.01 < np.median(1 - expected.max(axis=1)) < 0.5, "a posterior of zeros and ones would show little"


def test_a_covariance_of_all_tasks_reads_those_to_come(mixer):
    per_task = mixer(mode="soft", epsilon=100.0, cov={"refresh": "per_task"}).weights(2)
    assert {task for task, _ in mixer.asked} == {0, 1}
    final = mixer(mode="soft", epsilon=100.0, cov={"refresh": "final"}).weights(2)
    assert {task for task, _ in mixer.asked} == {0, 1, 2}
    assert not np.array_equal(per_task[0], final[0])


def test_router_accuracy_is_a_mean_over_tasks():
    weights = [np.array([[0.9, 0.1]] * 3 + [[0.2, 0.8]]), np.array([[0.6, 0.4], [0.4, 0.6]])]
    assert router_accuracy(weights) == pytest.approx((0.75 + 0.5) / 2)


# --- pooling ---------------------------------------------------------------------------------------------------------

PROMPTS = [[1, 10, 11, 12, 2], [10, 10, 13]]
INPUTS = [[11, 12], [13]]


@pytest.mark.parametrize(
    ("pool_settings", "kept"),
    [
        ({}, PROMPTS),
        ({"scope": "input_only"}, INPUTS),
        ({"special": "drop"}, [[10, 11, 12], [10, 10, 13]]),
        ({"mask_pad": False}, [PROMPTS[0], [10, 10, 13, 0, 0]]),
        ({"mask_pad": False, "special": "drop"}, [[10, 11, 12], [10, 10, 13]]),
        ({"mask_pad": False, "scope": "input_only"}, [[11, 12], [13, 0]]),
    ],
    ids=str,
)
def test_phi_is_the_mean_of_the_embeddings_that_count(backbone, pool_settings, kept):
    found = pool(backbone, Rows("x", PROMPTS, INPUTS), RouterSettings(pool=pool_settings))
    assert found.dtype == np.float32
    expected = np.array([embedding(backbone, ids) for ids in kept])
    np.testing.assert_allclose(found, expected, rtol=0, atol=PRODUCT * np.abs(expected).max())


def test_phi_of_a_row_does_not_depend_on_the_others(backbone):
    prompts = rows_of(0, "train", 12)["prompt_ids"]
    whole = pool(backbone, Rows("x", prompts), RouterSettings())
    order = np.random.default_rng(0).permutation(12)
    np.testing.assert_array_equal(
        pool(backbone, Rows("x", [prompts[i] for i in order]), RouterSettings()), whole[order]
    )
    np.testing.assert_array_equal(pool(backbone, Rows("x", prompts[3:4]), RouterSettings()), whole[3:4])


# --- what is stored --------------------------------------------------------------------------------------------------


def stored(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.safetensors")}


def test_embeddings_and_records_are_computed_once(mixer, monkeypatch):
    first = mixer(mode="soft").weights(3)
    files = stored(mixer.folder)
    assert sorted(path.split("/")[0] for path in files) == ["embeddings"] * 6 + ["router"] * 6, (
        "means and a scatter for each task"
    )

    def refuse(*arguments):
        raise AssertionError("computed again")

    monkeypatch.setattr("latent_sweep.learn.mixing.pool", refuse)
    with monkeypatch.context() as patch:
        patch.setattr("latent_sweep.learn.mixing.fit_mixture", refuse)
        patch.setattr("latent_sweep.learn.mixing.scatter_of", refuse)
        for one, other in zip(mixer(mode="soft").weights(3), first, strict=True):
            np.testing.assert_array_equal(one, other)
        mixer(mode="hard", epsilon=0.5, temperature=2.0).weights(3)
    mixer(mode="soft", components=3).weights(3)
    mixer(mode="soft", seed=1).weights(3)
    assert len(stored(mixer.folder)) == 6 + 3 + 3 * 3, "another K and another seed have means of their own"


def test_other_pooling_has_embeddings_and_records_of_its_own(mixer):
    for rows in mixer.rows.values():
        rows["input_ids"] = [row[1:] for row in rows["prompt_ids"]]
    whole = mixer(mode="soft", epsilon=100.0).weights(3)
    inputs = mixer(mode="soft", epsilon=100.0, pool={"scope": "input_only"}).weights(3)
    assert not np.array_equal(whole[0], inputs[0])
    assert len(stored(mixer.folder)) == 2 * (6 + 6)


def test_another_backbone_has_embeddings_and_records_of_its_own(mixer, llama):
    """Two backbones may read the same tokens, and share a storage: of one tokenizer and other weights."""
    mixer(mode="soft").weights(3)
    other = mixer(mode="soft")
    table = llama.embedding_table.flip(0).contiguous()
    other.backbone = SimpleNamespace(weights_digest="other", embedding_table=table, pad_id=llama.pad_id)
    other.weights(3)
    assert len(stored(mixer.folder)) == 2 * (6 + 6)
    found = {path.stem: load_file(path)["pooled"] for path in (mixer.folder / "embeddings").iterdir()}
    for task in range(3):
        ids = mixer.rows[task, "test"]["prompt_ids"]
        expected = np.stack([table[torch.tensor(row)].mean(0).numpy() for row in ids])
        np.testing.assert_allclose(found[other.pooled_name(task, "test")], expected, atol=1e-6)


def test_no_example_is_kept_in_a_record(mixer):
    mixer(mode="soft").weights(3)
    largest = max(path.stat().st_size for path in (mixer.folder / "router").iterdir())
    d = 32
    assert largest < 8 * d * (d + 1) // 2 + 1000


@pytest.mark.parametrize("refresh", ["per_task", "final", "frozen_first"])
def test_weights_do_not_depend_on_interruptions(mixer, refresh):
    """One worker that keeps its folds, against a new one for every stage: the same bits."""
    settings = dict(mode="soft", epsilon=1.0, cov={"refresh": refresh}, prune_below=0.0)
    folds = {}
    for seen in (1, 2, 3, 2):
        kept = mixer(folds=folds, **settings).weights(seen)
        for one, other in zip(kept, mixer(**settings).weights(seen), strict=True):
            np.testing.assert_array_equal(one, other)
    assert len(folds) == 1


def test_a_new_task_is_one_addition(mixer, monkeypatch):
    read, load = [], TaskScatter.load
    monkeypatch.setattr("latent_sweep.learn.mixing.TaskScatter.load", lambda path: read.append(path) or load(path))
    folds = {}
    for seen in (1, 2, 3):
        mixer(folds=folds, mode="soft").weights(seen)
        mixer(folds=folds, mode="hard", epsilon=0.5, temperature=2.0, components=3, seed=1).weights(seen)
    assert len(read) == len(set(read)) == 3


@pytest.mark.parametrize("kind", ["embeddings", "router"])
@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:40], lambda data: b"", lambda data: data[:-8], lambda data: data[:-1] + bytes([data[-1] ^ 1])],
    ids=["cut short", "empty", "a number missing", "a bit flipped"],
)
@pytest.mark.one_machine
def test_a_damaged_file_is_made_again(mixer, kind, damage, caplog):
    before = mixer(mode="soft").weights(3)
    files = stored(mixer.folder)
    for path in (mixer.folder / kind).iterdir():
        content = path.read_bytes()
        path.unlink()  # what is mapped must not be cut
        path.write_bytes(damage(content))
    if kind == "embeddings":
        for path in (mixer.folder / "router").iterdir():
            path.unlink()
    for one, other in zip(mixer(mode="soft").weights(3), before, strict=True):
        np.testing.assert_array_equal(one, other)
    assert stored(mixer.folder) == files
    assert "again" in caplog.text
    assert list((mixer.folder / kind).glob("*.damaged"))
