"""Answer scores against examples worked by hand; matrix measures against a matrix worked by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from latent_sweep.metrics import Metric, ScoreMatrix, exact_match, normalise_answer, rouge_1, rouge_l, score_rows

MATRIX = ScoreMatrix(tasks=("a", "b", "c"), rows=((0.9,), (0.5, 0.8), (0.7, 0.9, 0.6)))


def random_matrix(rng: np.random.Generator, n_tasks: int) -> ScoreMatrix:
    names = tuple(f"task{j}" for j in range(n_tasks))
    return ScoreMatrix(names, tuple(tuple(rng.random(i + 1).tolist()) for i in range(n_tasks)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("  The  Answer. ", "the answer"),
        ("Sci/Tech", "scitech"),
        ("a\tb\nc", "a b c"),
        ("-", ""),
        ("«Été»", "«été»"),  # only ASCII punctuation goes
    ],
)
def test_normalise_answer(text: str, expected: str) -> None:
    assert normalise_answer(text) == expected


@pytest.mark.parametrize(
    ("prediction", "references", "expected"),
    [
        ("Positive.", ["positive"], 1.0),
        ("very  Negative", ["very negative"], 1.0),
        ("the cat", ["cat"], 0.0),  # articles count
        ("yes", ["no", "Yes!"], 1.0),
        ("", ["-"], 1.0),  # a bare hyphen is an empty answer
        ("no", ["not"], 0.0),
    ],
)
def test_exact_match(prediction: str, references: list[str], expected: float) -> None:
    assert exact_match(prediction, references) == expected


def test_rouge_by_hand() -> None:
    # Stems: [the cat sat on the mat] and [the cat are sit on a mat]. In common: the, cat, on, mat, in the same order.
    prediction, reference = "the cat sat on the mat", "The cats are sitting on a mat."
    expected = 2 * (4 / 6) * (4 / 7) / (4 / 6 + 4 / 7)
    assert rouge_l(prediction, [reference]) == pytest.approx(expected)
    assert rouge_1(prediction, [reference]) == pytest.approx(expected)


def test_rouge_l_needs_the_order_and_rouge_1_does_not() -> None:
    assert rouge_1("alpha beta gamma", ["gamma beta alpha"]) == 1.0
    assert rouge_l("alpha beta gamma", ["gamma beta alpha"]) == pytest.approx(1 / 3)


def test_rouge_edges() -> None:
    assert rouge_l("", ["something"]) == 0.0
    assert rouge_l("running", ["runs"]) == 1.0  # stemming
    assert rouge_l("Red!", ["blue", "red"]) == 1.0  # the best reference counts


def test_score_rows_reference_policies() -> None:
    predictions = ["b", "c", "d"]
    references = [["a", "b"], ["c"], ["a", "b"]]
    assert score_rows("accuracy", predictions, references, "single_first").tolist() == [0.0, 1.0, 0.0]
    assert score_rows("accuracy", predictions, references, "max_over_refs").tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("metric", "expected"), [("accuracy", 0.0), ("rouge_l", 1 / 2), ("rouge_1", 1.0)], ids=lambda value: str(value)
)
def test_score_rows_metric_names(metric: Metric, expected: float) -> None:
    scores = score_rows(metric, ["north south"], [["south north"]], "single_first")
    assert scores.dtype == np.float64
    assert scores.tolist() == [expected]


def test_score_rows_of_nothing_is_empty() -> None:
    assert score_rows("rouge_l", [], [], "single_first").shape == (0,)


def test_score_rows_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="2 predictions but 1 lists of references"):
        score_rows("accuracy", ["a", "b"], [["a"]], "single_first")
    with pytest.raises(ValueError, match="expected a list of one or more"):
        score_rows("accuracy", ["a"], [[]], "max_over_refs")
    with pytest.raises(ValueError, match="expected a list of one or more"):
        score_rows("rouge_l", ["a"], ["abc"], "max_over_refs")


def test_measures_by_hand() -> None:
    assert MATRIX.average_performance() == pytest.approx((0.7 + 0.9 + 0.6) / 3)
    # a: best 0.9, ends 0.7. b: best 0.9 is the final row, ends 0.9.
    assert MATRIX.forgetting() == pytest.approx((0.2 + 0.0) / 2)
    # b: best before the final row 0.8, ends 0.9.
    assert MATRIX.forgetting_scorer() == pytest.approx((0.2 - 0.1) / 2)
    assert MATRIX.backward_transfer() == pytest.approx((-0.2 + 0.1) / 2)
    assert MATRIX.mean_diagonal() == pytest.approx((0.9 + 0.8 + 0.6) / 3)


def test_forgetting_looks_at_every_row_not_only_the_diagonal() -> None:
    peak_later = ScoreMatrix(("a", "b", "c"), ((0.2,), (0.8, 0.5), (0.3, 0.5, 0.5)))
    assert peak_later.forgetting() == pytest.approx((0.8 - 0.3) / 2)
    assert peak_later.backward_transfer() == pytest.approx((0.3 - 0.2) / 2)


def test_measures_speak_of_the_rows_so_far() -> None:
    so_far = ScoreMatrix(MATRIX.tasks, MATRIX.rows[:2])
    assert so_far.average_performance() == pytest.approx((0.5 + 0.8) / 2)
    assert so_far.forgetting() == pytest.approx(0.4)


def test_one_task_forgets_nothing() -> None:
    one = ScoreMatrix(("a",), ((0.4,),))
    assert one.average_performance() == one.mean_diagonal() == 0.4
    assert one.forgetting() == one.forgetting_scorer() == one.backward_transfer() == 0.0


@pytest.mark.parametrize("n_tasks", [2, 3, 8, 15])
def test_orders_between_the_conventions(n_tasks: int) -> None:
    rng = np.random.default_rng(n_tasks)
    for _ in range(50):
        matrix = random_matrix(rng, n_tasks)
        assert matrix.forgetting() >= 0
        assert matrix.forgetting() >= matrix.forgetting_scorer()
        assert matrix.forgetting_scorer() >= -matrix.backward_transfer()


def test_scorer_counts_unseen_entries_as_zero() -> None:
    """The public scorer fills the upper triangle with zeros; the same sum in plain loops."""
    rng = np.random.default_rng(3)
    matrix = random_matrix(rng, 6)
    padded = [[*row, *[0.0] * (6 - len(row))] for row in matrix.rows]
    drops = [max(line[j] for line in padded[:-1]) - padded[-1][j] for j in range(5)]
    assert matrix.forgetting_scorer() == pytest.approx(sum(drops) / 5)


def test_csv() -> None:
    assert MATRIX.to_csv() == "after,a,b,c\na,0.9,,\nb,0.5,0.8,\nc,0.7,0.9,0.6\n"
    assert ScoreMatrix(("x,y", "z"), ((1.0,),)).to_csv() == 'after,"x,y",z\n"x,y",1.0,\n'


def test_json_reads_back_equal() -> None:
    for rows in (0, 1, 3):
        matrix = ScoreMatrix(MATRIX.tasks, MATRIX.rows[:rows])
        assert ScoreMatrix.from_json(matrix.to_json()) == matrix
    matrix = random_matrix(np.random.default_rng(0), 5)
    assert ScoreMatrix.from_json(matrix.to_json()) == matrix


@pytest.mark.parametrize(
    ("tasks", "rows", "message"),
    [
        (("a", "b"), ((0.1,), (0.1,)), "row 1 has 1 scores, expected 2"),
        (("a", "b"), ((0.1, 0.2), (0.1, 0.2)), "row 0 has 2 scores, expected 1"),
        (("a",), ((0.1,), (0.1, 0.2)), "2 rows for 1 tasks"),
        (("a", "a"), (), "named twice"),
        (("a", "b"), ((0.1,), (0.1, 48.6)), "row 1, task b: 48.6 is not a fraction"),
        (("a",), ((-0.1,),), "not a fraction"),
        (("a",), ((float("nan"),),), "not a fraction"),
        (("a",), ((None,),), "not a fraction"),
    ],
)
def test_malformed_matrices_are_refused(tasks: tuple[str, ...], rows: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScoreMatrix(tasks, rows)


@pytest.mark.parametrize(
    "text", ["[]", '{"tasks": ["a"]}', '{"tasks": "a", "scores": []}', '{"tasks": ["a"], "scores": [1]}', "nonsense"]
)
def test_malformed_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"score matrix|Expecting value"):
        ScoreMatrix.from_json(text)


def test_empty_matrix_has_no_performance() -> None:
    with pytest.raises(ValueError, match="no rows yet"):
        ScoreMatrix(("a",), ()).average_performance()
