"""Scores of single answers, and what the matrix of scores says about learning and forgetting.

Scores are fractions in [0, 1]; tables multiply by 100. Everything here is pure. A task's score is the mean over its
rows, also of BLEU, chrF and SARI: it is not the score of a corpus, whose counts are summed before they are divided.
"""

from __future__ import annotations

import difflib
import inspect
import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from latent_sweep.errors import ConfigError
from latent_sweep.outside import code_digest, imported

Metric = str
"""A name in `METRICS`, or `package.module:function` from outside."""
RefsPolicy = Literal["single_first", "max_over_refs"]

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise_answer(text: str) -> str:
    """`text` in lower case, without ASCII punctuation, with single spaces; articles are kept."""
    return " ".join(text.lower().translate(_NO_PUNCTUATION).split())


def counted_alike(answers: Iterable[str], metric: Metric = "accuracy") -> list[str]:
    """Return the first answers that differ in more than case and that a metric takes for equal.

    Empty where it tells all apart; also for a metric other than accuracy and Rouge, which is not asked. Of words with
    one stem, which Rouge takes for equal, nothing is said.
    """
    if metric not in _COUNTED:
        return []
    groups: dict[Any, dict[str, str]] = {}
    for answer in answers:
        groups.setdefault(_COUNTED[metric](answer), {}).setdefault(" ".join(answer.lower().split()), answer)
    return next((list(group.values()) for group in groups.values() if len(group) > 1), [])


def _rouge_words(text: str) -> list[str]:
    """The words that Rouge counts, not stemmed: that takes seconds to import."""
    return re.findall("[a-z0-9]+", text.lower())


_COUNTED: Mapping[Metric, Callable[[str], Any]] = {
    "accuracy": normalise_answer,
    "rouge_l": lambda text: tuple(_rouge_words(text)),
    "rouge_1": lambda text: tuple(sorted(_rouge_words(text))),
}
"""What of an answer these metrics compare."""


def exact_match(prediction: str, references: Sequence[str]) -> float:
    """1.0 where the normalised prediction equals a normalised reference, else 0.0."""
    _check_references(references)
    answer = normalise_answer(prediction)
    return float(any(answer == normalise_answer(reference) for reference in references))


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """Largest Rouge-L F-measure over the references, with stemming.

    With LCS the longest common subsequence of the stemmed words: P = LCS / words of the prediction, R = LCS / words of
    the reference, F = 2PR / (P + R).
    """
    return _rouge("rougeL", prediction, references)


def rouge_1(prediction: str, references: Sequence[str]) -> float:
    """Largest Rouge-1 F-measure over the references, with stemming.

    With C the words in common, counted with repetition: P = C / words of the prediction, R = C / words of the
    reference, F = 2PR / (P + R).
    """
    return _rouge("rouge1", prediction, references)


def token_f1(prediction: str, references: Sequence[str]) -> float:
    """Largest F-measure of words over the references, as SQuAD has it: without case, punctuation and articles.

    With C the words in common, counted with repetition: P = C / words of the prediction, R = C / words of the
    reference, F = 2PR / (P + R). Where either has no word, 1 if both have none, else 0.
    """
    _check_references(references)
    answer = _squad_words(prediction)
    return max(_token_f1(answer, _squad_words(reference)) for reference in references)


def edit_similarity(prediction: str, references: Sequence[str]) -> float:
    """Largest normalised edit similarity over the references: `fuzz.ratio` / 100, as TRACE scores code.

    1 - D / (characters of both), with D the fewest insertions and deletions that make the one of the other.
    """
    from rapidfuzz import fuzz

    _check_references(references)
    return max(fuzz.ratio(prediction, reference) for reference in references) / 100


def bleu(prediction: str, references: Sequence[str]) -> float:
    """BLEU of one answer against all its references, with sacreBLEU's `13a` tokens and effective order.

    The effective order leaves n-grams out that a short answer cannot have.
    """
    _check_references(references)
    return min(1.0, _sentence_scorer("bleu").sentence_score(prediction, list(references)).score / 100)


def chrf(prediction: str, references: Sequence[str]) -> float:
    """ChrF of one answer, of characters up to six and beta 2, as sacreBLEU has it; the best over the references."""
    _check_references(references)
    return min(1.0, _sentence_scorer("chrf").sentence_score(prediction, list(references)).score / 100)


def sari(prediction: str, references: Sequence[str], text: str) -> float:
    """SARI of one simplification against all its references (Xu et al. 2016), of words in lower case.

    The mean over n-grams of one to four words of (F of what is kept + P of what is deleted + F of what is added) / 3,
    as in the authors' SARI.py; also as there, a part of which there is nothing counts 0. Words end at blanks, so
    punctuation counts apart only where it stands apart.

    Args:
        text: what was to be simplified, the row's input.
    """
    _check_references(references)
    words = [sentence.lower().split() for sentence in (text, prediction, *references)]
    return float(np.mean([_sari_of(n, words[0], words[1], words[2:]) for n in range(1, 5)]))


def number_match(prediction: str, references: Sequence[str]) -> float:
    """1.0 where the last number of the answer is the last one of a reference, else 0.0.

    `1,234.50` is 1234.5; a comma stands before three digits, a point before decimals, unless a word or another point
    stands before it (`is...42`). Without a number in both: 0.0.
    """
    _check_references(references)
    found = _last_number(prediction)
    return float(found is not None and any(found == _last_number(reference) for reference in references))


METRICS: Mapping[str, Callable[..., float]] = {
    "accuracy": exact_match,
    "rouge_l": rouge_l,
    "rouge_1": rouge_1,
    "token_f1": token_f1,
    "edit_similarity": edit_similarity,
    "bleu": bleu,
    "chrf": chrf,
    "sari": sari,
    "number_match": number_match,
}
"""Name in a benchmark file -> function of a prediction, its references and, as a third argument, its row's input."""

KINDS = f"{', '.join(METRICS)}, or package.module:function"


def check_metric(name: str) -> str:
    """Return the name of a metric; whether one from outside can be imported is found out by `metric_function`.

    Raises:
        ValueError: there is no metric of this name.
    """
    if name in METRICS or (":" in name and all(part.isidentifier() for part in re.split("[.:]", name))):
        return name
    near = difflib.get_close_matches(name, METRICS, n=1)
    raise ValueError(f"found {name!r}{f' (did you mean {near[0]!r}?)' if near else ''}; expected {KINDS}")


def metric_function(name: Metric) -> Callable[..., float]:
    """The function of a metric, in `METRICS` or imported from outside.

    Raises:
        ConfigError: there is none of this name, or it cannot be imported.
    """
    if ":" not in name:
        try:
            return METRICS[check_metric(name)]
        except ValueError as error:
            raise ConfigError(f"metric: {error}") from None
    found = imported(name, KINDS)
    module, _, attribute = name.partition(":")
    if not callable(found) or isinstance(found, type):
        raise ConfigError(f"found {name!r}; {module} has no function {attribute}")
    if not 2 <= _arguments(found) <= 3:
        raise ConfigError(
            f"found {name!r}; expected a function of the prediction, its references and, where it asks for it, the "
            "row's input"
        )
    if _optional_third(found):
        raise ConfigError(
            f"found {name!r}; its third parameter has the default None, so that it would never be given the row's "
            "input. Take the default away, or put a * before what is no input"
        )
    return found


REVISED: Mapping[str, str] = {"number_match": "2"}
"""Metrics in `METRICS` that once gave other scores, and how they are told from what they were."""


def metric_source(name: Metric) -> str | None:
    """Content hash of the code of a metric from outside, as that of a method from there; of ours what `REVISED` says.

    Raises:
        ConfigError: as `metric_function`.
    """
    if ":" not in name:
        return REVISED.get(name)
    metric_function(name)
    return code_digest(name)


def reads_input(name: Metric) -> bool:
    """Whether a metric scores an answer by the row's input too.

    Raises:
        ConfigError: as `metric_function`.
    """
    return _arguments(metric_function(name)) == 3


def _arguments(function: Callable[..., float]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:  # of some that are written in C nothing tells
        return 0
    return sum(parameter.kind in kinds and parameter.default is parameter.empty for parameter in found)


def _optional_third(function: Callable[..., float]) -> bool:
    """Whether a function may wait for the row's input, and would get none."""
    try:
        found = list(inspect.signature(function).parameters.values())[2:3]
    except ValueError:
        return False
    return any(one.kind is one.POSITIONAL_OR_KEYWORD and one.default is None for one in found)


def score_rows(
    metric: Metric,
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    refs_policy: RefsPolicy,
    inputs: Sequence[str] | None = None,
) -> npt.NDArray[np.float64]:
    """Score of each row as (n,) float64.

    Args:
        metric: a name in `METRICS`, or of a function from outside.
        predictions: n answers.
        references: n lists of one or more accepted answers.
        refs_policy: "single_first": against the first reference only, as the public scorer does; "max_over_refs":
            the score over all of them: the best one, and for BLEU and SARI what they make of several.
        inputs: n inputs, for a metric that reads them.

    Raises:
        ValueError: the lengths differ, a row has no reference, or the inputs are missing that the metric reads.
        ConfigError: there is no such metric, or one from outside fails or gives something else than a fraction.
    """
    if len(predictions) != len(references):
        raise ValueError(f"{len(predictions)} predictions but {len(references)} lists of references, expected as many")
    score = metric_function(metric)
    last = 1 if refs_policy == "single_first" else None
    asked: list[tuple[Any, ...]] = [
        (answer, accepted[:last]) for answer, accepted in zip(predictions, references, strict=True)
    ]
    if reads_input(metric):
        if inputs is None:
            raise ValueError(f"metric {metric} reads inputs; expected those of {len(predictions)} rows")
        asked = [(*row, text) for row, text in zip(asked, inputs, strict=True)]
    scores = [_checked(metric, score, row) if ":" in metric else score(*row) for row in asked]
    return np.array(scores, dtype=np.float64)


def _checked(metric: Metric, score: Callable[..., float], row: tuple[Any, ...]) -> float:
    """Score a row by a function from outside, and hold what it gives against what a score is."""
    try:
        found = float(score(*row))
    except Exception as error:  # whatever it does
        raise ConfigError(
            f"metric {metric} failed on the answer {row[0]!r:.60}: {type(error).__name__}: {error}. Correct it there"
        ) from error
    if not 0 <= found <= 1:  # true for NaN too
        raise ConfigError(
            f"metric {metric} gave {found} for the answer {row[0]!r:.60}; expected a fraction from 0 to 1"
        )
    return found


@dataclass(frozen=True)
class ScoreMatrix:
    """a[i, j], the score on task j after learning task i, for the rows known so far.

    T below is the number of rows, a[T, .] the last row: before the last task is learned, every measure speaks of the
    tasks learned so far.

    Raises:
        ValueError: more rows than tasks, a task named twice, row i without exactly i + 1 scores, or a score that is
            not a number in [0, 1].
    """

    tasks: tuple[str, ...]
    """Names of the tasks in the order of learning, those not yet learned included."""
    rows: tuple[tuple[float, ...], ...]
    """Row i holds the i + 1 scores of tasks 0..i after learning task i."""

    def __post_init__(self) -> None:
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"score matrix: a task is named twice in {self.tasks}")
        if len(self.rows) > len(self.tasks):
            raise ValueError(f"score matrix: {len(self.rows)} rows for {len(self.tasks)} tasks")
        for i, row in enumerate(self.rows):
            if len(row) != i + 1:
                raise ValueError(f"score matrix: row {i} has {len(row)} scores, expected {i + 1}")
            for task, score in zip(self.tasks, row, strict=False):
                if not (isinstance(score, float | int) and 0 <= score <= 1):  # false for NaN too
                    raise ValueError(f"score matrix: row {i}, task {task}: {score!r} is not a fraction in [0, 1]")

    def average_performance(self) -> float:
        """AP = mean over j of a[T, j] (Eq. 16)."""
        return float(self._lower()[-1].mean())

    def forgetting(self) -> float:
        """FM = mean over j < T of (max over i >= j of a[i, j]) - a[T, j] (Eq. 17).

        The maximum includes the final row, so FM is never negative. One task forgets nothing: 0.
        """
        lower = self._lower()
        return _mean_of_earlier(lower.max(axis=0) - lower[-1])

    def forgetting_scorer(self) -> float:
        """Forgetting as the public scorer has it: mean over j < T of (max over i < T of a[i, j]) - a[T, j].

        The maximum leaves the final row out and counts unseen entries as 0, so it is negative where a task ends better
        than ever before; it is never above `forgetting`. One task: 0.
        """
        lower = self._lower()
        return _mean_of_earlier(lower[:-1].max(axis=0, initial=0.0) - lower[-1])

    def backward_transfer(self) -> float:
        """BWT = mean over j < T of a[T, j] - a[j, j]; one task: 0. (The public scorer divides the same sum by T.)"""
        lower = self._lower()
        return _mean_of_earlier(lower[-1] - lower.diagonal())

    def mean_diagonal(self) -> float:
        """Mean over j of a[j, j], the score of each task just after it was learned."""
        return float(self._lower().diagonal().mean())

    def measures(self) -> dict[str, float]:
        """The measures of the rows so far, by the names they have everywhere."""
        return {
            "AP": self.average_performance(),
            "FM": self.forgetting(),
            "FM_scorer": self.forgetting_scorer(),
            "BWT": self.backward_transfer(),
        }

    def _lower(self) -> npt.NDArray[np.float64]:
        """(T, T) scores with zeros above the diagonal."""
        if not self.rows:
            raise ValueError("score matrix: it has no rows yet; learn and score a task first")
        lower = np.zeros((len(self.rows), len(self.rows)))
        for i, row in enumerate(self.rows):
            lower[i, : i + 1] = row
        return lower


def _mean_of_earlier(values: npt.NDArray[np.float64]) -> float:
    """Mean over all tasks but the last one; 0 where there is no other."""
    return float(values[:-1].mean()) if len(values) > 1 else 0.0


def _check_references(references: Sequence[str]) -> None:
    if isinstance(references, str) or not references:
        raise ValueError(f"references are {references!r}, expected a list of one or more accepted answers")


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NUMBER = re.compile(r"(?:(?<!\w)[-\u2212])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)")


def _squad_words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", normalise_answer(text)).split()


def _token_f1(answer: list[str], reference: list[str]) -> float:
    if not answer or not reference:
        return float(answer == reference)
    common = (Counter(answer) & Counter(reference)).total()
    return _f_measure(common / len(answer), common / len(reference))


def _f_measure(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _sari_of(n: int, source: list[str], answer: list[str], references: Sequence[list[str]]) -> float:
    """SARI of n-grams of one length; those of source and answer count once for every reference."""
    s, c = (_ngrams(words, n, len(references)) for words in (source, answer))
    r = sum((_ngrams(words, n) for words in references), Counter[tuple[str, ...]]())
    kept, keepable, deleted = s & c, s & r, s - c
    right = kept & r
    keep = _f_measure(_mean_share(right, kept), _mean_share(right, keepable))
    delete = _mean_share(deleted - r, deleted)
    added, addable = c.keys() - s.keys(), r.keys() - s.keys()
    hits = len(added & r.keys())
    add = _f_measure(hits / len(added) if added else 0.0, hits / len(addable) if addable else 0.0)
    return (keep + delete + add) / 3


def _ngrams(words: list[str], n: int, times: int = 1) -> Counter[tuple[str, ...]]:
    found = Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
    return Counter({ngram: count * times for ngram, count in found.items()})


def _mean_share(part: Counter[Any], whole: Counter[Any]) -> float:
    """Mean over the n-grams of `whole` of their share that is in `part`."""
    return sum(part[ngram] / count for ngram, count in whole.items()) / len(whole) if whole else 0.0


def _last_number(text: str) -> Decimal | None:
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "").replace("\u2212", "-")) if found else None


@lru_cache
def _sentence_scorer(kind: str) -> Any:
    from sacrebleu.metrics import BLEU, CHRF  # half a second to import

    return BLEU(effective_order=True) if kind == "bleu" else CHRF()


def _rouge(variant: str, prediction: str, references: Sequence[str]) -> float:
    _check_references(references)
    scorer = _rouge_scorer(variant)
    return max(scorer.score(target=reference, prediction=prediction)[variant].fmeasure for reference in references)


@lru_cache
def _rouge_scorer(variant: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer  # seconds to import

    return RougeScorer([variant], use_stemmer=True)
