"""Mutants: small wrongs, written by hand into the code that decides results, each of which some test must notice.

    PYTHONPATH=tests python -m tools.mutants [WORD ...] [--jobs N]

Copies the package and its tests into a temporary folder, runs the named tests there as they are, and then once for
every mutant, one change at a time. Prints a Markdown table. Exit code 0 where every mutant was killed, 1 where one has
survived, 2 where a mutant does not fit the code any more or its tests fail without it. The working tree is only read.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.pool import Pool
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = "latent_sweep"
COPIED = (PACKAGE, "tests", "sweeps", "pyproject.toml")
PASSED, FAILED = 0, 1
"""Exit codes of pytest; every other one says that it could not run the tests as asked."""
LONGEST_SECONDS = 120.0
"""A test that takes longer than this hangs, and fails."""
PRELOADED = [
    "datasets",
    "pytest",
    "rouge_score.rouge_scorer",
    "scipy.stats",
    "sklearn.cluster",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
]
"""What most tests import, and takes seconds."""


@dataclass(frozen=True)
class Mutant:
    """One wrong, and who notices it."""

    wrong: str
    """What it does, in words."""
    file: str
    """Below the package."""
    old: str
    """Text that is in the file exactly once."""
    new: str
    """What replaces it."""
    tests: tuple[str, ...]
    """Of which at least one fails then: `file::test` below `tests/`, without `test_` and `.py` of the file."""

    def source(self, root: Path = ROOT) -> Path:
        """The file that it changes, below a copy of the repository."""
        return root / PACKAGE / self.file

    def misfits(self, root: Path = ROOT) -> int:
        """0 where `old` is there exactly once, else how often it was found less once."""
        return self.source(root).read_text(encoding="utf-8").count(self.old) - 1

    def nodes(self) -> list[str]:
        """Its tests as pytest names them."""
        files = {path.name: path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
        return [f"{files[f'test_{file}.py']}::{name}" for file, name in (test.split("::") for test in self.tests)]


def _mutant(file: str, wrong: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(wrong, file, old, new, tests)


MUTANTS: tuple[Mutant, ...] = (
    # --- metrics
    _mutant(
        "metrics/answers.py",
        "references are compared as they are written",
        "answer == _normalised_or_whole(reference)",
        "answer == reference",
        "metrics::test_exact_match",
    ),
    _mutant("metrics/answers.py", "case counts", "text.lower().trans", "text.trans", "metrics::test_normalise_answer"),
    _mutant(
        "metrics/answers.py",
        "the worst reference counts",
        "max(scorer.score",
        "min(scorer.score",
        "metrics::test_rouge_edges",
    ),
    _mutant(
        "metrics/answers.py",
        "Rouge without stemming",
        "use_stemmer=True",
        "use_stemmer=False",
        "metrics::test_rouge_by_hand",
    ),
    _mutant(
        "metrics/answers.py",
        "SARI counts what is added once for each way to say it",
        "added, addable = c.keys() - s.keys(), r.keys() - s.keys()",
        "added, addable = c.keys(), r.keys()",
        "metrics::test_sari_gives_the_published_numbers",
    ),
    _mutant(
        "metrics/numerals.py",
        "the first number of an answer counts",
        'numbers[-1]["body"]',
        'numbers[0]["body"]',
        "metrics::test_number_match",
    ),
    _mutant(
        "metrics/answers.py",
        "the policies of references are swapped",
        'last = 1 if refs_policy == "single_first"',
        'last = 1 if refs_policy != "single_first"',
        "metrics::test_score_rows_reference_policies",
    ),
    _mutant(
        "metrics/matrix.py",
        "AP of the first row",
        "_lower()[-1].mean()",
        "_lower()[0].mean()",
        "metrics::test_measures_by_hand",
    ),
    _mutant(
        "metrics/matrix.py",
        "FM from the diagonal",
        "lower.max(axis=0) - lower[-1]",
        "lower.diagonal() - lower[-1]",
        "metrics::test_forgetting_looks_at_every_row_not_only_the_diagonal",
    ),
    _mutant(
        "metrics/matrix.py",
        "the scorer's FM with the final row",
        "lower[:-1].max(axis=0, initial=0.0)",
        "lower.max(axis=0, initial=0.0)",
        "metrics::test_measures_by_hand",
    ),
    _mutant(
        "metrics/matrix.py",
        "BWT with the other sign",
        "lower[-1] - lower.diagonal()",
        "lower.diagonal() - lower[-1]",
        "metrics::test_measures_by_hand",
    ),
    _mutant(
        "metrics/matrix.py",
        "the last task counts as an earlier one",
        "values[:-1].mean()",
        "values.mean()",
        "metrics::test_measures_by_hand",
    ),
    # --- choosing
    _mutant(
        "data/loaders.py",
        "held-out rows are learned from",
        'return ("train", True) if split == "train"',
        'return ("train", False) if split == "train"',
        "benchmarks::test_scores_on_validation_rows_read_no_test_row",
    ),
    _mutant(
        "sweep/tuning.py",
        "candidates are scored on test rows",
        '{"score_on": "validation", ',
        '{"score_on": "test", ',
        "tuning::test_tuning_trials_learn_the_first_tasks_and_are_scored_on_held_out_rows",
    ),
    _mutant(
        "sweep/tuning.py",
        "candidates learn the whole stream",
        '"tasks": names[: tune.tasks]} | held_out\n    else',
        '"tasks": names} | held_out\n    else',
        "tuning::test_tuning_trials_learn_the_first_tasks_and_are_scored_on_held_out_rows",
    ),
    _mutant(
        "sweep/tuning.py",
        "the worst candidate wins",
        "-round(tried.score, EXACT),",
        "round(tried.score, EXACT),",
        "tuning::test_selection_is_by_score_then_loss_then_smallest_values",
    ),
    _mutant(
        "sweep/tuning.py",
        "of equals the highest loss wins",
        "else tried.loss,",
        "else -tried.loss,",
        "tuning::test_selection_is_by_score_then_loss_then_smallest_values",
    ),
    _mutant(
        "sweep/tuning.py",
        "a candidate that was lost counts as beaten",
        'not_finite = end == "failed" and events[-1]["kind"] == "non_finite"',
        'not_finite = end == "failed"',
        "tuning::test_no_selection_while_a_tuning_trial_may_still_win",
    ),
    _mutant(
        "sweep/tuning.py",
        "an edge of what was tried is not told",
        "value in (others[0], others[-1])",
        "value in (others[0],)",
        "tuning::test_remarks_report_edges_ties_and_failures",
    ),
    _mutant(
        "sweep/tuning.py",
        "the order of a sum breaks ties",
        "-round(tried.score, EXACT),",
        "-tried.score,",
        "tuning::test_rounding_errors_break_no_tie",
    ),
    _mutant(
        "sweep/tuning.py",
        "of a choice only the first trial's stream is spared",
        "if (stream := (b.name, b.order, b.tasks)) not in judged:",
        "if not judged and (stream := (b.name, b.order, b.tasks)):",
        "tuning::test_no_trial_is_judged_on_rows_used_for_tuning",
    ),
    _mutant(
        "sweep/tuning.py",
        "what the first trial does not read is chosen for others",
        "sorted(unread[key] - _unread(tune, settings))",
        "sorted(unread[key] - unread[key])",
        "tuning::test_the_first_trial_of_a_selection_must_read_the_tuned_settings",
    ),
    _mutant(
        "sweep/plan.py",
        "epochs are chosen by the rows that are scored",
        's.benchmark.score_on == "validation" and s.training.select',
        's.benchmark.score_on == "nothing" and s.training.select',
        "tuning::test_epochs_are_not_selected_on_the_rows_that_score_a_tuning_trial",
    ),
    # --- comparisons
    _mutant(
        "results/bootstrap.py",
        "equal differences are certain",
        "return (0.0, 0.0) if abs(mean) < ROUNDING else None",
        "return mean, mean",
        "bootstrap::test_students_interval_is_scipys",
    ),
    _mutant(
        "results/summaries.py",
        "what is left of stopped trials may be the best",
        "one.average_performance is not None and not one.n_stopped:\n                place",
        "one.average_performance is not None:\n                place",
        "report::test_numbers_worked_by_hand",
    ),
    _mutant(
        "results/published.py",
        "any stream of fifteen tasks is the paper's",
        'or settings.get("benchmark.name") != streams.get(order)',
        "or False",
        "published::test_a_configuration_is_a_cell_of_the_paper_or_none",
    ),
    _mutant(
        "report/tables.py",
        "of configurations with one label the last has its rank",
        "return {name: alike[0] for name, alike in found.items() if len(alike) == 1}",
        "return {name: alike[-1] for name, alike in found.items()}",
        "page::test_a_label_of_several_configurations_has_no_rank",
    ),
    _mutant(
        "report/pictures.py",
        "orders are averaged by position",
        "if key(matrix.tasks) == wanted",
        "if matrix.tasks",
        "pictures::test_only_trials_of_one_stream_have_a_mean_by_task",
    ),
    _mutant(
        "adapters/factors.py",
        "randomised factors are a prefix of a larger rank's",
        "if cached == rank or (cached > rank and exact)]",
        "if cached >= rank]",
        "factors::test_randomised_factors_are_those_of_their_rank_whatever_else_is_there",
    ),
    _mutant(
        "training/trainer.py",
        "a resumed task replays what it draws now",
        '_named(self._checkpointed[0], "drawn.")',
        '_named(self._checkpointed[0], "nothing.")',
        "lfpt5::test_what_a_task_has_drawn_is_what_it_replays_after_a_cut",
    ),
    _mutant(
        "results/bootstrap.py",
        "tasks weigh as many rows as they have",
        "/ rows.shape[1] * shares",
        "* shares",
        "bootstrap::test_resamples_are_as_likely_as_when_all_are_counted",
    ),
    _mutant(
        "results/bootstrap.py",
        "repetitions are not drawn again",
        "(counts * means[block]).sum(axis=1)",
        "means[block].sum(axis=1)",
        "bootstrap::test_resamples_are_as_likely_as_when_all_are_counted",
    ),
    _mutant(
        "results/bootstrap.py",
        "an interval of 90 %",
        "[(1 - LEVEL) / 2, (1 + LEVEL) / 2]",
        "[1 - LEVEL, LEVEL]",
        "bootstrap::test_the_interval_is_that_of_loops",
    ),
    _mutant(
        "results/bootstrap.py",
        "Student's t with a degree of freedom too many",
        "len(differences) - 1)",
        "len(differences))",
        "bootstrap::test_students_interval_is_scipys",
    ),
    _mutant(
        "results/comparison.py",
        "rows are paired by position, whatever their ids",
        "row_ids(mine.rows) != row_ids(other.rows)",
        "mine.rows.keys() != other.rows.keys()",
        "comparison::test_the_same_number_of_other_test_rows_is_no_pair",
    ),
    _mutant(
        "results/comparison.py",
        "an order is compared with another",
        '"benchmark.order", "benchmark.tasks", ',
        '"benchmark.tasks", ',
        "comparison::test_each_configuration_is_compared_on_what_it_is_tested_on",
    ),
    _mutant(
        "results/comparison.py",
        "the difference has the other sign",
        "own.scores - other.rows[task].scores",
        "other.rows[task].scores - own.scores",
        "comparison::test_differences_are_those_of_pairs",
    ),
    _mutant(
        "results/outcomes.py",
        "what was forgotten is counted from when a task was new",
        "position + scores.index(max(scores)) + 1",
        "position + 1",
        "comparison::test_every_measure_has_the_interval_of_its_rows",
    ),
    _mutant(
        "results/outcomes.py",
        "learning accuracy takes the last answers",
        "{task: by_stage[seen, task] for seen, task in enumerate",
        '{task: rows["AP"][task] for seen, task in enumerate',
        "comparison::test_every_measure_has_the_interval_of_its_rows",
    ),
    _mutant(
        "results/outcomes.py",
        "answers of some stages are taken for those of all",
        "return found if {place: scores.shape for place, scores in found.items()} == expected else {}",
        "return found if len(found) > 1 or not expected else {}",
        "comparison::test_answers_of_some_stages_do_not_tell_of_forgetting",
    ),
    _mutant(
        "results/outcomes.py",
        "of equally good stages the last one counts",
        "scores.index(max(scores))",
        "(len(scores) - 1 - scores[::-1].index(max(scores)))",
        "comparison::test_the_first_of_equally_good_stages_counts",
    ),
    _mutant(
        "results/outcomes.py",
        "backward transfer has the other sign",
        'rows["AP"][task] - rows["LA"][task] for',
        'rows["LA"][task] - rows["AP"][task] for',
        "comparison::test_every_measure_has_the_interval_of_its_rows",
    ),
    _mutant(
        "results/bootstrap.py",
        "repetitions are drawn anew for each comparison",
        "np.random.default_rng((seed, 1))",
        "generator",
        "comparison::test_what_is_equal_has_equal_intervals",
    ),
    _mutant(
        "results/summaries.py",
        "every seed is paired with any",
        "tuple(_repeat(one.trial, axis) for axis in repeats): outcomes(",
        "(str(len(members)),): outcomes(",
        "comparison::test_differences_are_those_of_pairs",
    ),
    _mutant(
        "results/comparison.py",
        "what one of the two does not read is paired like what both read",
        "in _by_place(ours, theirs) if None not in values]",
        "in _by_place(ours, theirs)]",
        "comparison::test_what_does_not_read_what_repeats_is_compared_with_the_mean_over_it",
    ),
    _mutant(
        "report/tables.py",
        "what is tested on other tasks is ranked together",
        "(_place(first[name]), _place(second[name]))",
        '("", "")',
        "page::test_rankings_on_other_tasks_are_no_agreement",
    ),
    _mutant(
        "storage/journal.py",
        "a worker is at work until somebody notices that it is not",
        'return not (isinstance(event, (Lost, Stopped)) or (isinstance(event, Failed) and event.kind == "lost"))',
        "return True",
        "prices::test_hours_by_hardware",
    ),
    _mutant(
        "execution/driver.py",
        "results of other rows stay beside new ones",
        "return final_event(events) is not None and len(recorded_rows(",
        "return final_event(events) is None and len(recorded_rows(",
        "run::test_a_changed_example_repeats_only_dependent_stages",
    ),
    _mutant(
        "storage/trial_files.py",
        "answers are taken without their digest",
        "digest is None or _fault(folder / name, digest) is not None",
        "digest is None",
        "comparison::test_rows_that_are_not_as_the_journal_says_are_not_read",
    ),
    # --- router
    _mutant(
        "routing/gaussian.py",
        "the covariance is divided by the number of tasks",
        "covariance /= denominator",
        "covariance /= tasks",
        "gaussian::test_pooled_covariance_by_fold_and_by_concatenation",
    ),
    _mutant(
        "routing/gaussian.py",
        "the degrees of freedom are swapped",
        'if settings.cov.ddof == "tasks"',
        'if settings.cov.ddof != "tasks"',
        "gaussian::test_pooled_covariance_by_fold_and_by_concatenation",
    ),
    _mutant(
        "routing/gaussian.py",
        "the scatter between components is added",
        "dsyrk(-1.0, between.T",
        "dsyrk(1.0, between.T",
        "gaussian::test_posterior_equals_bayes_rule_on_densities",
    ),
    _mutant(
        "routing/gaussian.py",
        "epsilon is relative to the trace, not to the mean variance",
        "ridge *= trace / d",
        "ridge *= trace",
        "gaussian::test_epsilon_is_relative_or_absolute",
    ),
    _mutant(
        "routing/gaussian.py",
        "epsilon's modes are swapped",
        'settings.epsilon_mode == "relative":\n        ridge',
        'settings.epsilon_mode == "absolute":\n        ridge',
        "gaussian::test_epsilon_is_relative_or_absolute",
    ),
    _mutant(
        "routing/gaussian.py",
        "a fold of other tasks is not started again",
        "self.names, self.count = [], 0",
        "self.names = []",
        "combination::test_weights_do_not_depend_on_interruptions",
    ),
    _mutant(
        "routing/gaussian.py",
        "the offsets lack a half",
        "- 0.5 * np.einsum",
        "- np.einsum",
        "gaussian::test_posterior_equals_bayes_rule_on_densities",
    ),
    _mutant(
        "routing/gaussian.py",
        "a task's likelihood is its best component's",
        "np.logaddexp.reduceat",
        "np.maximum.reduceat",
        "gaussian::test_posterior_equals_bayes_rule_on_densities",
    ),
    _mutant(
        "routing/gaussian.py",
        "the prior is never read",
        'if self.settings.prior == "n_t"',
        "if False",
        "gaussian::test_posterior_equals_bayes_rule_on_densities",
    ),
    _mutant(
        "routing/gaussian.py",
        "the temperature multiplies",
        ") / self.settings.temperature",
        ") * self.settings.temperature",
        "gaussian::test_temperature_divides_the_log_posterior",
    ),
    _mutant(
        "routing/gaussian.py",
        "the unlikeliest task wins",
        "log_posterior.argmax(axis=1)",
        "log_posterior.argmin(axis=1)",
        "gaussian::test_hard_and_soft_weights",
    ),
    _mutant(
        "routing/gaussian.py", "soft is hard", 'if mode == "hard":', "if True:", "gaussian::test_hard_and_soft_weights"
    ),
    _mutant(
        "routing/gaussian.py",
        "pruned weights do not sum to one",
        "return weights / weights.sum(axis=1, keepdims=True)",
        "return weights",
        "gaussian::test_prune",
    ),
    _mutant(
        "routing/gaussian.py",
        "pruning may leave nothing of a row's largest weight",
        " | (weights == weights.max(axis=1, keepdims=True))",
        "",
        "gaussian::test_prune",
    ),
    _mutant(
        "routing/gaussian.py",
        "K-means has one seed",
        "np.random.MT19937(seed)",
        "np.random.MT19937(0)",
        "gaussian::test_seeds_repeat_and_differ",
    ),
    _mutant(
        "routing/gaussian.py",
        "nothing is pruned",
        "return prune(np.exp(log_posterior), self.settings.prune_below)",
        "return np.exp(log_posterior)",
        "gaussian::test_hard_and_soft_weights",
    ),
    _mutant(
        "routing/gaussian.py",
        "the farthest component counts",
        "cdist(rows, self.whitened_).min(axis=1)",
        "cdist(rows, self.whitened_).max(axis=1)",
        "gaussian::test_distances_are_to_the_nearest_component_of_any_task",
    ),
    _mutant(
        "routing/gaussian.py",
        "distances are whitened with the factor, not its transpose",
        'centred.T, trans="T"',
        'centred.T, trans="N"',
        "gaussian::test_distances_are_to_the_nearest_component_of_any_task",
    ),
    # --- what is measured of the router
    _mutant(
        "routing/metrics.py",
        "calibration counts bins, not rows",
        "np.abs(gaps).sum() / len(confidence)",
        "np.abs(gaps).mean()",
        "routing_metrics::test_calibration_by_hand",
    ),
    _mutant(
        "routing/metrics.py",
        "calibration without bins",
        "np.abs(gaps).sum()",
        "np.abs(gaps.sum())",
        "routing_metrics::test_every_measure_is_its_definition",
    ),
    _mutant(
        "routing/metrics.py",
        "a log loss without an end",
        "np.maximum(log_posterior[:, task], np.log(LEAST_PROBABILITY))",
        "log_posterior[:, task]",
        "routing_metrics::test_a_log_loss_has_an_end",
    ),
    _mutant(
        "routing/metrics.py",
        "one-hot before pruning",
        "np.count_nonzero(weights, axis=1)",
        "np.count_nonzero(np.exp(log_posterior), axis=1)",
        "routing_metrics::test_every_measure_is_its_definition",
    ),
    _mutant(
        "routing/metrics.py",
        "seen rows are the positive ones",
        "near = np.sort(seen)",
        "seen, unseen = unseen, seen; near = np.sort(seen)",
        "routing_metrics::test_the_area_is_the_share_of_pairs_in_order",
    ),
    _mutant(
        "routing/metrics.py",
        "equal distances count as farther",
        'np.searchsorted(near, unseen, side="left")',
        'np.searchsorted(near, unseen, side="right")',
        "routing_metrics::test_the_area_is_the_share_of_pairs_in_order",
    ),
    _mutant(
        "routing/combination.py",
        "only the next task is unseen",
        "to_come = range(self._tasks_seen, combiner.n_tasks)",
        "to_come = [self._tasks_seen]",
        "combination::test_unseen_tasks_of_other_tokens_are_novel_and_of_the_same_tokens_are_not",
        "combination::test_every_task_to_come_is_unseen",
    ),
    # --- kept answers
    _mutant(
        "storage/predictions.py",
        "an answer whose score alone has changed is not kept",
        "answer != known[row]",
        "answer.prediction != known[row].prediction",
        "predictions::test_a_score_alone_may_change",
    ),
    _mutant(
        "storage/predictions.py",
        "a gap is not noticed",
        ".read_bytes()) if saves_answers(event) else {}",
        ".read_bytes()) if saves_answers(event) else answers",
        "predictions::test_nothing_is_taken_over_a_gap",
    ),
    _mutant(
        "results/rescore.py",
        "a score is compared with itself",
        "found.append(Cell(seen, task, len(scores), stored, float(np.mean(scores))))",
        "found.append(Cell(seen, task, len(scores), stored, stored))",
        "rescore::test_a_score_that_is_not_that_of_its_answers_is_told",
    ),
    # --- pictures of evidence
    _mutant(
        "results/routing.py",
        "any router is taken for the trial's own",
        "if 1 - np.mean(alike) > _MAY_DIFFER:",
        "if False:",
        "router_pictures::test_a_router_that_gives_other_weights_is_not_taken_for_the_trials_own",
    ),
    _mutant(
        "results/interference.py",
        "singular values stand on the other side",
        "return singular_values[:, :, None] * R",
        "return singular_values[:, None, :] * R",
        "interference::test_overlaps_are_what_the_penalty_measures",
    ),
    _mutant(
        "results/interference.py",
        "the scale of deltas counts once in a product",
        "scale**2 * np.array(found)",
        "scale * np.array(found)",
        "interference::test_no_direction_exceeds_the_bound_and_the_largest_is_reached",
    ),
    _mutant(
        "results/flips.py",
        "the row that gained counts as lost",
        "for was_right in (True, False)",
        "for was_right in (False, True)",
        "router_pictures::test_rows_that_cross_one_half_are_chosen_by_change_and_then_by_place",
    ),
    # --- mixing
    _mutant(
        "routing/gaussian.py",
        "embeddings are known without their backbone",
        ' "weights": weights,',
        "",
        "combination::test_another_backbone_has_embeddings_and_records_of_its_own",
    ),
    _mutant(
        "routing/gaussian.py",
        "embeddings are known without how they were pooled",
        ', "pool": pooling}',
        "}",
        "combination::test_other_pooling_has_embeddings_and_records_of_its_own",
    ),
    _mutant(
        "routing/gaussian.py",
        "mixtures of all seeds are one",
        "settings.record_identity(), seed, versions",
        "settings.record_identity(), versions",
        "combination::test_embeddings_and_records_are_computed_once",
    ),
    _mutant(
        "routing/combination.py",
        "the covariance never reads tasks to come",
        "pooled_tasks = self.settings.cov.pooled_tasks(tasks_seen, self.n_tasks)",
        "pooled_tasks = self.settings.cov.pooled_tasks(tasks_seen, tasks_seen)",
        "combination::test_a_covariance_of_all_tasks_reads_those_to_come",
    ),
    _mutant(
        "routing/combination.py",
        "test rows are routed by the training rows",
        '.log_posterior(self.embeddings(task, "test"))',
        '.log_posterior(self.embeddings(task, "train"))',
        "combination::test_the_posterior_is_bayes_rule_over_gaussian_densities",
    ),
    _mutant(
        "routing/combination.py",
        "test rows are weighed by the training rows where nothing is routed",
        'self._rows(task, "test")',
        'self._rows(task, "train")',
        "combination::test_the_string_match_takes_the_nearest_definition",
        "combination::test_gates_read_the_prompts_of_the_test_rows",
    ),
    _mutant(
        "backbones/features.py",
        "phi is a sum",
        ".float().mean(0)",
        ".float().sum(0)",
        "combination::test_phi_is_the_mean_of_the_embeddings_that_count",
    ),
    _mutant(
        "routing/combination.py",
        "the oracle answers with the newest",
        '[-1 if mode == "last" else task]',
        "[-1]",
        "combination::test_weights_without_a_router",
    ),
    _mutant(
        "routing/combination.py",
        "a sum is a mean",
        "np.ones((rows.count, known.tasks_seen))",
        "np.full((rows.count, known.tasks_seen), 1 / known.tasks_seen)",
        "combination::test_weights_without_a_router",
    ),
    # --- the latent adapter and its method
    _mutant(
        "adapters/latent.py",
        "s is left out",
        "LatentDeltas(self, R, self.scale,",
        "LatentDeltas(self, R, 1.0,",
        "latent_adapter::test_the_bank_answers_like_the_changed_weight",
    ),
    _mutant(
        "adapters/latent.py",
        "members of a pack pay for what the first one interferes with",
        "joined.G = torch.stack([penalty.G for penalty, _ in runs])",
        "joined.G = torch.stack([runs[0][0].G for _ in runs])",
        "latent_adapter::test_several_penalties_together_are_each_its_own",
    ),
    _mutant(
        "adapters/low_rank.py",
        "members of a pack lose the scale that they have in common",
        "return [tensor for tensor, _ in scaled], scales.pop()",
        "return [tensor for tensor, _ in scaled], 1.0",
        "packs::test_every_member_ends_as_it_would_alone",
    ),
    _mutant(
        "backbones/outputs.py",
        "a learner of a pack has the first one's loss",
        "self.cross_entropy.sums[self.place]",
        "self.cross_entropy.sums[0]",
        "packs::test_every_member_ends_as_it_would_alone",
    ),
    _mutant(
        "adapters/latent.py",
        "Sigma is missing on the output side",
        "left = left * f.S",
        "left = left * 1.0",
        "latent_adapter::test_the_bank_answers_like_the_changed_weight",
    ),
    _mutant(
        "adapters/latent.py",
        "Sigma is missing on the input side",
        "right = right * f.S",
        "right = right * 1.0",
        "latent_adapter::test_the_bank_answers_like_the_changed_weight",
    ),
    _mutant(
        "adapters/latent.py",
        "R of a row stands transposed",
        "self.R.transpose(-1, -2)",
        "self.R",
        "latent_adapter::test_each_row_answers_with_its_own_blend",
    ),
    _mutant(
        "adapters/latent.py",
        "R stands transposed",
        "lefts.unsqueeze(1)) @ own",
        "lefts.unsqueeze(1)) @ own.transpose(-1, -2)",
        "latent_adapter::test_the_bank_answers_like_the_changed_weight",
    ),
    _mutant(
        "adapters/latent.py",
        "the penalty is not that of equation (10)",
        "new * (self.G @ new)",
        "(self.G @ new).square()",
        "latent_adapter::test_the_trace_form_is_the_double_loop",
    ),
    _mutant(
        "adapters/latent.py",
        "the penalty forgets which side Sigma stands on",
        'if self.side == "in"',
        "if False",
        "latent_adapter::test_the_trace_form_is_the_double_loop",
    ),
    _mutant(
        "adapters/latent.py",
        "the penalty's scale is not counted",
        "S = scale * S",
        "S = 1.0 * S",
        "latent_adapter::test_the_trace_form_is_the_double_loop",
    ),
    _mutant(
        "adapters/latent.py",
        "sum and mean over projections are swapped",
        'if self.reduce == "sum"',
        'if self.reduce != "sum"',
        "latent_adapter::test_the_trace_form_is_the_double_loop",
    ),
    _mutant(
        "adapters/latent.py",
        "every snapshot that is weighed has all the weight",
        "weights.to(stacked)",
        "weights.sign().to(stacked)",
        "latent_adapter::test_each_row_answers_with_its_own_blend",
    ),
    _mutant(
        "methods/latent_lora.py",
        "s is alpha",
        "return self.alpha / self.rank",
        "return self.alpha",
        "latent_lora::test_alpha_acts_through_the_scale_alone",
        "latent_lora::test_the_papers_defaults",
    ),
    _mutant(
        "methods/latent_lora.py",
        "the penalty has no weight",
        "self._lambda * self._penalty",
        "self._penalty",
        "latent_lora::test_a_learner_adds_the_penalty_with_its_weight",
    ),
    _mutant(
        "methods/latent_lora.py",
        "a penalty reads no history",
        "(bool(s.ortho_lambda) or ",
        "(",
        "latent_lora::test_history_is_read_only_where_something_reads_it",
    ),
    _mutant(
        "methods/latent_lora.py",
        "the first task is learned again for every lambda",
        "if position == 0 or not s.ortho_lambda:",
        "if not s.ortho_lambda:",
        "latent_lora::test_the_first_task_is_shared_by_all_lambdas",
    ),
    # --- LoRA
    _mutant(
        "adapters/lora.py",
        "s is left out",
        "else self.scale * self.B",
        "else self.B",
        "lora_adapter::test_the_bank_answers_like_the_changed_weights",
    ),
    _mutant(
        "adapters/lora.py",
        "s is left out where branches are folded",
        "(scale * b @ a)",
        "(b @ a)",
        "lora_adapter::test_the_sum_of_branches_is_exact_whichever_way_is_cheaper",
    ),
    _mutant(
        "adapters/lora.py",
        "every row weighs the branches alike",
        "((h @ A[:, : h.shape[-1]].T) * w)",
        "(h @ A.T)",
        "lora_adapter::test_branches_of_different_ranks_blend_row_by_row",
    ),
    _mutant(
        "adapters/low_rank.py",
        "left factors get no gradient",
        "g_z = g.transpose(-1, -2) @ z",
        "g_z = torch.zeros_like(left)",
        "low_rank::test_gradients_are_those_of_finite_differences",
    ),
    _mutant(
        "adapters/low_rank.py",
        "right factors get the gradient of other blocks",
        "g_right = _blocks(h, ctx.blocks)",
        "g_right = _blocks(h.flip(0), ctx.blocks)",
        "low_rank::test_gradients_are_those_of_finite_differences",
    ),
    _mutant(
        "adapters/low_rank.py",
        "nothing goes back to the inputs",
        "g_h = (g_left @ right.transpose(-1, -2))",
        "g_h = (0 * g_left @ right.transpose(-1, -2))",
        "low_rank::test_gradients_are_those_of_finite_differences",
    ),
    _mutant(
        "backbones/layouts.py",
        "what rows say of shared tokens is not added up",
        "front = front + _split_front(whole[:, : layout.shared], layout)",
        "front = front + 0",
        "layouts::test_the_prefixs_gradient_is_the_sum_over_rows",
    ),
    _mutant(
        "backbones/layouts.py",
        "a row sees one token of itself too many",
        "hidden.triu(self.shared + 1)",
        "hidden.triu(self.shared + 2)",
        "layouts::test_losses_and_gradients_are_those_of_padded_rows",
    ),
    _mutant(
        "backbones/layouts.py",
        "padding of rests has gradients",
        "rest.index_fill_(0, layout.rest_padding, 0)",
        "pass",
        "layouts::test_losses_and_gradients_are_those_of_padded_rows",
    ),
    _mutant(
        "backbones/layouts.py",
        "every token of a rest is at its first position",
        "self.shared + steps[self._real]",
        "self.shared + 0 * steps[self._real]",
        "layouts::test_losses_and_gradients_are_those_of_padded_rows",
    ),
    _mutant(
        "backbones/layouts.py",
        "shared tokens count once for all rows",
        "np.array(self.rows)[:, None]",
        "1",
        "layouts::test_moments_count_shared_tokens_once_for_every_row",
    ),
    _mutant(
        "training/optimizers.py",
        "the second moment is not corrected",
        "(1 - BETAS[1] ** step) ** 0.5",
        "1.0",
        "optimizers::test_every_member_is_stepped_as_torch_would_alone",
    ),
    _mutant(
        "training/optimizers.py",
        "all members are clipped by one norm",
        "torch.linalg.vector_norm(gradient, dim=1)",
        "torch.linalg.vector_norm(gradient).expand(len(gradient))",
        "optimizers::test_every_member_is_stepped_as_torch_would_alone",
    ),
    _mutant(
        "training/optimizers.py",
        "epsilon before the correction is not corrected",
        "size * decay, epsilon / correction[1]",
        "size * decay, epsilon",
        "optimizers::test_epsilon_before_the_correction_gives_the_numbers_of_transformers_4",
    ),
    _mutant(
        "backbones/batches.py",
        "a released decoder pads at once",
        '[[start, *row["target_ids"]][:longest] for row in rows]',
        '[[start, *row["target_ids"][:-1]] for row in rows]',
        "released::test_memories_grow_as_released",
    ),
    _mutant(
        "backbones/batches.py",
        "released padding attends to nothing",
        'inputs |= {"attention_mask": _masked_by_a_minimum(mask, backbone.model.dtype)}',
        "pass",
        "released::test_memories_grow_as_released",
    ),
    _mutant(
        "methods/_gate.py",
        "later keys are leading directions too",
        'return "random_direction" if position else "svd"',
        'return "svd"',
        "gain_lora::test_a_key_is_the_leading_direction_at_first_and_later_random",
    ),
    # --- training
    _mutant(
        "training/loop.py",
        "a mean over rows is a mean over tokens",
        '"sequence_mean": len(rows)',
        '"sequence_mean": targets',
        "loop::test_the_loss_is_reduced_as_its_name_says",
    ),
    _mutant(
        "training/trainer.py",
        "all purposes of one seed draw the same",
        "repr(parts).encode()",
        "repr(parts[:1]).encode()",
        "loop::test_seeds_are_derived_from_their_purpose",
    ),
    _mutant(
        "training/trainer.py",
        "every epoch has the same batches",
        '"batches", epoch))',
        '"batches"))',
        "loop::test_every_epoch_has_an_order_of_its_own",
    ),
    _mutant(
        "backbones/batches.py",
        "the order of the data depends on what was drawn before",
        "torch.randperm(len(lengths), generator=generator)",
        "torch.randperm(len(lengths))",
        "loop::test_an_epoch_takes_every_row_once",
    ),
    _mutant(
        "training/trainer.py",
        "every step draws the same dropout",
        '"step", self.step, *rank',
        '"step", *rank',
        "loop::test_every_step_draws_a_mask_of_its_own",
    ),
    _mutant(
        "training/trainer.py",
        "the optimizer starts anew when a task goes on",
        'optimizer.load_state(index, _named(tensors, "engine.optimizer."))',
        "pass",
        "loop::test_a_cut_task_goes_on_with_the_same_bits",
    ),
    _mutant(
        "training/trainer.py",
        "losses before a cut are forgotten",
        'facts["terms"], tensors["history"].tolist()',
        'facts["terms"], []',
        "loop::test_a_cut_task_goes_on_with_the_same_bits",
    ),
    _mutant(
        "training/trainer.py",
        "the last epoch is kept, not the best",
        "if loss < self.loss:",
        "if True:",
        "loop::test_the_best_epoch_on_validation_is_kept",
    ),
    _mutant(
        "training/trainer.py",
        "first and last losses are swapped",
        "self.rows[-tenth:] if last else",
        "self.rows[-tenth:] if not last else",
        "loop::test_the_summary_holds_the_first_and_the_last_losses",
    ),
    _mutant(
        "training/trainer.py",
        "a gradient that is not finite is applied",
        "if not math.isfinite(norm):",
        "if False:",
        "loop::test_a_gradient_that_is_not_finite_stops_before_it_is_saved",
    ),
    _mutant(
        "training/optimizers.py",
        "nothing is clipped",
        "s.gradient_clip or math.inf\n            rows",
        "math.inf\n            rows",
        "optimizers::test_clipping_bounds_the_gradient_of_all_parameters_together",
    ),
    _mutant(
        "training/trainer.py",
        "no warm-up",
        "if step < warmup:",
        "if False:",
        "optimizers::test_warm_up_is_linear_then_constant",
    ),
    _mutant(
        "training/trainer.py",
        "a linear schedule stays where it is",
        'if settings.schedule != "linear":',
        "if True:",
        "optimizers::test_a_linear_schedule_falls_to_zero_at_the_end",
    ),
    _mutant(
        "training/trainer.py",
        "the schedule starts anew when a task goes on",
        'self.step = int(facts["step"])',
        "self.step = 0",
        "loop::test_a_cut_task_goes_on_with_the_same_bits",
    ),
    # --- evaluation and generation
    _mutant(
        "training/evaluation.py",
        "answers stay in the order of their batches",
        "zip(part, texts, strict=True)",
        "zip(sorted(part), texts, strict=True)",
        "evaluation::test_rows_come_back_in_their_own_order",
        "evaluation::test_rows_of_one_batch_answer_with_their_own_blends",
    ),
    _mutant(
        "training/evaluation.py",
        "rows of several paths share a batch",
        "apart.setdefault(path_of(weights[row]), [])",
        "apart.setdefault(None, [])",
        "evaluation::test_the_path_of_a_row_does_not_depend_on_its_neighbours",
    ),
    _mutant(
        "routing/ngram.py",
        "the farthest definition answers",
        ".argmax(axis=1)",
        ".argmin(axis=1)",
        "ngram::test_similarities_are_scikit_learns_cosines",
    ),
    _mutant(
        "training/evaluation.py",
        "answers are known whatever the weights",
        "for w in row] for row in batch.weights]",
        "for w in row] for row in batch.weights[:0]]",
        "evaluation::test_whatever_can_change_an_answer_asks_for_a_new_one",
    ),
    _mutant(
        "training/evaluation.py",
        "answers are known whatever the snapshots",
        '"snapshots": batch.lineages,',
        "",
        "evaluation::test_whatever_can_change_an_answer_asks_for_a_new_one",
    ),
    _mutant(
        "training/evaluation.py",
        "answers are known whatever the limit",
        '"max_new_tokens": batch.max_new_tokens,',
        "",
        "evaluation::test_whatever_can_change_an_answer_asks_for_a_new_one",
    ),
    _mutant(
        "training/evaluation.py",
        "answers are known whatever the stop strings",
        '"stop": batch.stop,',
        "",
        "evaluation::test_whatever_can_change_an_answer_asks_for_a_new_one",
    ),
    _mutant(
        "training/evaluation.py",
        "one batch's adapter answers another",
        "key = tuple(batch.lineages), mix[0].tobytes()",
        "key = len(batch.lineages)",
        "evaluation::test_the_blends_of_another_batch_are_others",
    ),
    _mutant(
        "training/evaluation.py",
        "answers in halves are known as those of whole batches",
        'content["passes"] = batch.passes',
        "pass",
        "retries::test_out_of_memory_while_answering_halves_batches",
    ),
    _mutant(
        "backbones/generation.py",
        "blanks before an answer may end it",
        "skip_special_tokens=True).lstrip()\n    return any",
        "skip_special_tokens=True)\n    return any",
        "generation::test_a_stop_string_before_the_answer_does_not_end_it",
    ),
    _mutant(
        "metrics/answers.py",
        "only the first stop string cuts",
        "for mark in stop:",
        "for mark in stop[:1]:",
        "generation::test_the_text_of_an_answer_is_cut_at_the_first_stop",
    ),
    _mutant(
        "backbones/generation.py",
        "padding ends an answer, EOS does not",
        "eos = backbone.eos_id",
        "eos = backbone.pad_id",
        "generation::test_one_adapter_for_a_ragged_batch",
    ),
    _mutant(
        "backbones/generation.py",
        "an answer may be one token longer",
        "_extend(answers[row], new[i], backbone, stop)",
        "_extend(answers[row], [*new[i], *new[i][:1]], backbone, stop)",
        "generation::test_a_shorter_limit_gives_a_prefix",
    ),
    _mutant(
        "backbones/generation.py",
        "rows that go on get adapters of those that ended",
        "bank.select(kept)",
        "pass",
        "generation::test_an_adapter_for_every_row",
    ),
    _mutant(
        "backbones/generation.py",
        "positions stand still",
        "found[:, -1:] + torch.arange(1, longest",
        "found[:, -1:] + 0 * torch.arange(1, longest",
        "generation::test_one_adapter_for_a_ragged_batch",
    ),
    _mutant(
        "backbones/generation.py",
        "rows that go on read past the padding of those that ended",
        "self._added = self._added[kept]",
        "self._added = self._added[: len(kept)]",
        "generation::test_an_adapter_for_every_row",
    ),
    _mutant(
        "backbones/generation.py",
        "rows that go on read keys of those that ended",
        "self._buffer.index_select(1, indices)",
        "self._buffer[:, : len(indices)]",
        "generation::test_an_adapter_for_every_row",
    ),
    _mutant(
        "backbones/generation.py",
        "what is written past an answer's end begins it again",
        "        if token == eos:\n            return False",
        "        if token == eos:\n            continue",
        "generation::test_answers_do_not_depend_on_the_hosts_checks",
    ),
    # --- identities
    _mutant(
        "sweep/plan.py",
        "a snapshot is known without its parents",
        "lineages[:position] if method.reads_history(position) else []",
        "[]",
        "plan::test_a_changed_row_of_the_first_task_changes_what_reads_its_snapshot",
    ),
    _mutant(
        "sweep/plan.py",
        "a snapshot is known without its data",
        '"data": json_list(data[i] for i in learned)',
        '"data": json_list([])',
        "plan::test_a_changed_training_row_changes_what_learned_it_and_what_came_after",
    ),
    _mutant(
        "sweep/plan.py",
        "a snapshot is known without how it was trained",
        '"training": s.training.training_identity(),',
        "",
        "latent_lora::test_what_training_reads_names_every_snapshot",
    ),
    _mutant(
        "sweep/plan.py",
        "a row is known without its test rows",
        '"tests": t})',
        '"tests": "[]"})',
        "plan::test_a_changed_test_row_changes_scores_alone",
    ),
    _mutant(
        "sweep/plan.py",
        "a row is known without its router",
        '"router": router_identity(s),',
        "",
        "plan::test_inference_only_axes_share_one_training",
    ),
    _mutant(
        "sweep/plan.py",
        "trials that differ in inference are one",
        "json_list([training, inference])",
        "json_list([training])",
        "plan::test_inference_only_axes_share_one_training",
    ),
    _mutant(
        "sweep/plan.py",
        "trials that differ in training are one training",
        '"training": once("training", (s.training,), lambda: canonical_json(s.training.training_identity())),',
        "",
        "plan::test_a_setting_that_changes_a_score_changes_every_id",
    ),
    # --- what lies on disk
    _mutant(
        "storage/snapshots.py",
        "a snapshot that was changed is used",
        "digests == (hashlib.sha256(content).hexdigest(), _facts_digest(facts))",
        "digests",
        "snapshots::test_what_does_not_check_is_set_aside_and_made_again",
    ),
    _mutant(
        "storage/snapshots.py",
        "a snapshot is used under another's name",
        'found["lineage"] == lineage and ',
        "",
        "snapshots::test_what_does_not_check_is_set_aside_and_made_again",
    ),
    _mutant(
        "storage/snapshots.py",
        "a snapshot that was changed since it was checked is used",
        "(state := state_of(self._path)) != self._state",
        "(state := state_of(self._path)) is None",
        "snapshots::test_what_is_recalled_is_held_against_its_digest_where_the_file_is_another",
    ),
    _mutant(
        "storage/checksummed.py",
        "a checksummed file that was changed is used",
        "return content[start : start + 64] == _digest_without(content, start)",
        "return True",
        "snapshots::test_sealed_json_comes_back_and_only_whole",
    ),
    _mutant(
        "storage/snapshots.py",
        "a damaged checkpoint is used",
        "if not verified(self.path):",
        "if False:",
        "snapshots::test_a_damaged_checkpoint_is_set_aside_counts_as_none_and_says_so",
    ),
    _mutant(
        "storage/snapshots.py",
        "a committed snapshot is replaced",
        "if snapshot.lineage in self and ",
        "if False and ",
        "snapshots::test_a_committed_snapshot_never_changes",
    ),
    _mutant(
        "storage/trial_files.py",
        "rows of changed data are kept",
        "(event.tasks_seen, event.key) != (len(rows) + 1, key)",
        "event.tasks_seen != len(rows) + 1",
        "run::test_a_changed_example_repeats_only_dependent_stages",
    ),
    _mutant(
        "storage/trial_files.py",
        "predictions that have changed stay as they were",
        "if self._written.get(name) != self.digests[name]:",
        "if name not in self._written:",
        "trial_files::test_predictions_are_written_where_an_answer_has_changed",
    ),
    _mutant(
        "storage/journal.py",
        "a torn line counts",
        'return content[: content.rfind(b"\\n") + 1]',
        "return content",
        "journal::test_a_torn_last_line_does_not_count_and_is_cut_at_the_next_append",
    ),
    _mutant(
        "storage/journal.py",
        "a torn line stays before the next",
        "file.truncate(end)",
        "pass",
        "journal::test_a_torn_last_line_does_not_count_and_is_cut_at_the_next_append",
    ),
    _mutant(
        "storage/journal.py",
        "of two equal stages the earlier wins",
        "            latest[seen] = event\n",
        "            latest.setdefault(seen, event)\n",
        "journal::test_a_repeated_stage_counts_once_and_the_later_wins",
    ),
    _mutant(
        "storage/journal.py",
        "a lost worker ends its trial",
        '"lost": "running"',
        '"lost": "failed"',
        "journal::test_status_is_what_the_last_event_left_behind",
    ),
    # --- rows and prompts
    _mutant(
        "data/loaders.py",
        "every subset seed takes the same rows",
        'f"{settings.subset_seed}/{row.id}"',
        'f"{row.id}"',
        "benchmarks::test_subsets_are_nested_and_in_the_files_order",
    ),
    _mutant(
        "data/loaders.py",
        "validation rows are trained on",
        "else slice(0, taken - held_out)",
        "else slice(0, taken)",
        "benchmarks::test_validation_rows_come_out_of_the_training_subset",
    ),
    _mutant(
        "data/loaders.py",
        "test rows are the training rows",
        'return "test" if split == "test"',
        'return "train" if split == "test"',
        "benchmarks::test_each_split_has_a_file_of_its_own",
    ),
    _mutant(
        "data/loaders.py",
        "a subset has the digest of the whole",
        '"limit": limit,',
        "",
        "benchmarks::test_digest_names_the_rows_and_the_texts",
    ),
    _mutant(
        "data/loaders.py",
        "test instances are learned from",
        'if tests is not None and (position < tests) != (split == "test"):',
        "if False:",
        "sources::test_a_task_of_super_natural_instructions_is_cut_from_its_file",
    ),
    _mutant(
        "data/loaders.py",
        "other templates have the same digest",
        "return content_hash([found, decides], length=64) if decides else found",
        "return found",
        "sources::test_the_digest_covers_content_and_mapping",
    ),
    _mutant(
        "data/mapping.py",
        "any row fits that has one of the values asked for",
        "return all(\n            text_of(",
        "return any(\n            text_of(",
        "sources::test_every_kind_of_file_gives_the_same_rows",
    ),
    _mutant(
        "data/examples.py",
        "training always takes the first reference",
        'int.from_bytes(digest[:8], "big") % len(self.references)',
        "0",
        "benchmarks::test_training_picks_one_reference_by_the_rows_id",
    ),
    _mutant(
        "data/prompts.py",
        "a long input loses its beginning",
        "return ids[: room - of_the_end] + ids[len(ids) - of_the_end :]",
        "return ids[len(ids) - room :]",
        "benchmarks::test_truncation_cuts_the_input_and_keeps_the_cue",
        "benchmarks::test_truncation_keeps_both_ends_of_the_input",
    ),
    _mutant(
        "data/prompts.py",
        "of a long input no end is kept",
        'room // 2 if truncation == "keep_ends" else 0',
        "0",
        "benchmarks::test_truncation_keeps_both_ends_of_the_input",
    ),
    _mutant(
        "data/prompts.py",
        "training prompts are paraphrased too",
        'not of_test or wanted == "verbatim"',
        'wanted == "verbatim"',
        "definitions::test_test_rows_cycle_through_paraphrases_and_training_rows_do_not",
    ),
    _mutant(
        "data/prompts.py",
        "every row reads the first paraphrase",
        "wordings[i % len(wordings)]",
        "wordings[0]",
        "definitions::test_test_rows_cycle_through_paraphrases_and_training_rows_do_not",
    ),
    _mutant(
        "data/prompts.py",
        "the cue comes before the input",
        "return head + kept + cue",
        "return head + cue + kept",
        "benchmarks::test_prompt_that_fits_is_the_tokenized_string",
    ),
    _mutant(
        "data/prompts.py",
        "special tokens find no room",
        "room = max_source_length - len(first) - len(last)",
        "room = max_source_length",
        "benchmarks::test_truncation_cuts_the_input_and_keeps_the_cue",
    ),
    _mutant(
        "data/prompts.py",
        "a cut prompt is not tokenized again",
        "ids = _tokenized_again(ids[:max_source_length], tokenizer)",
        "ids = ids[:max_source_length]",
        "released_prompts::test_what_is_left_of_a_cut_prompt_is_tokenized_again",
    ),
    _mutant(
        "data/prompts.py",
        "targets end without EOS",
        "[*ids[:room], end][:max_target_length]",
        "[*ids[:room]][:max_target_length]",
        "benchmarks::test_target_ends_with_eos_and_is_cut",
    ),
    # --- tries
    _mutant(
        "execution/retries.py",
        "one death fewer is allowed",
        "if died > max_failures:",
        "if died >= max_failures:",
        "retries::test_deaths_in_a_row_are_limited",
    ),
    _mutant(
        "execution/retries.py",
        "a finished task does not begin a new row of deaths",
        '"stage":\n            died = 0',
        '"stage":\n            died += 0',
        "retries::test_a_finished_task_resets_the_count_of_deaths",
    ),
    _mutant(
        "execution/retries.py",
        "out of memory is tried for ever",
        "if len(ran_out) > len(set(ran_out)):",
        "if False:",
        "retries::test_out_of_memory_is_retried_once_with_half_the_rows",
    ),
    _mutant(
        "execution/retries.py",
        "out of memory is tried with as many rows",
        "max(1, rows // 2)",
        "max(1, rows)",
        "retries::test_half_the_rows_are_half_of_a_workers_share",
    ),
    _mutant(
        "execution/retries.py",
        "a fault of the trial is tried again",
        'if isinstance(last, Failed) and last.kind != "out_of_memory":',
        "if False:",
        "retries::test_an_error_of_the_trial_is_not_retried",
    ),
    _mutant(
        "storage/failures.py",
        "whatever ran out of memory was learning",
        'error.__dict__.setdefault("during", phase)',
        'error.__dict__.setdefault("during", "learning")',
        "retries::test_out_of_memory_while_answering_halves_batches",
    ),
    _mutant(
        "training/run.py",
        "a pack goes on although its GPU is lost",
        'if failure_kind(error) == "device_lost":',
        "if False:",
        "retries::test_a_lost_gpu_ends_all_runs_of_a_pack",
    ),
    _mutant(
        "execution/ray_tune.py",
        "a node that was taken back is called a worker's death",
        'return "preempted"',
        'return "worker_died"',
        "ray::test_losses_are_classified_by_rays_error",
    ),
    # --- the loop over tasks
    _mutant(
        "training/run.py",
        "a warning of every penalty that does not rule",
        "if task_loss and loss > PENALTY_WARNING * task_loss:",
        "if loss < PENALTY_WARNING * task_loss:",
        "latent_lora::test_a_penalty_that_rules_the_training_is_said_aloud",
    ),
    _mutant(
        "training/stage.py",
        "a checkpoint outlives its snapshot",
        "store.checkpoint(lineage).remove()  # whoever",
        "pass  # whoever",
        "resume::test_a_kill_between_a_snapshot_and_the_end_of_its_checkpoint_leaves_no_checkpoint",
    ),
    # --- methods, checkpoints and metrics from outside
    _mutant(
        "training/engine.py",
        "a backbone that a method has written to goes on",
        "(id(parameter), parameter._version)",
        "(id(parameter),)",
        "outside::test_what_would_spoil_results_is_named_and_nothing_of_it_is_kept",
    ),
    _mutant(
        "training/engine.py",
        "hooks that a method has left go on",
        "*module._forward_hooks.values(),",
        "",
        "outside::test_what_would_spoil_results_is_named_and_nothing_of_it_is_kept",
    ),
    _mutant(
        "methods/checked.py",
        "gates that are not finite mix answers",
        "weights.shape != shape or not np.isfinite(weights).all()",
        "weights.shape != shape",
        "outside::test_what_would_spoil_results_is_named_and_nothing_of_it_is_kept",
    ),
    _mutant(
        "methods/protocol.py",
        "answers of a method from outside are named by the marked settings alone",
        "self.inference_identity() if source is None else self.identity()",
        "self.inference_identity()",
        "outside::test_a_setting_that_learning_is_said_not_to_read_names_answers",
    ),
    _mutant(
        "sweep/plan.py",
        "a stage of a method from outside is the same at every position",
        '{} if self.method_source is None else {"position": str(position)}',
        "{}",
        "outside::test_a_stage_at_another_position_is_another",
    ),
    _mutant(
        "training/loop.py",
        "NumPy's generator is left unseeded",
        "    np.random.seed(seed % 2**32)\n",
        "",
        "outside::test_every_generator_is_seeded",
    ),
    _mutant(
        "backbones/loading.py",
        "weights that a checkpoint lacks are random",
        'sorted(told["missing_keys"])',
        "[]",
        "backbones::test_a_folder_without_all_weights_is_refused",
    ),
    _mutant(
        "training/run.py",
        "what was learned is stored although it is not finite",
        "if not bool(values.isfinite().all())",
        "if False",
        "outside::test_a_snapshot_that_is_not_finite_is_not_stored",
    ),
    _mutant(
        "training/context.py",
        "rows may be longer than the positions that a backbone embeds",
        "needed > backbone.positions",
        "False",
        "families::test_rows_beyond_the_position_table_are_refused",
    ),
    _mutant(
        "deploy/adapters.py",
        "a blend of a method's own is exported as a sum",
        "issubclass(pairs, blends)",
        "True",
        "exports::test_overridden_combinations_are_not_exported_as_sums",
    ),
)


# --- running them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What the tests made of a mutant."""

    mutant: Mutant
    result: str
    """`killed`, `SURVIVED`, or what went wrong."""
    by: str
    """The first test that failed."""
    seconds: float

    def row(self, number: int) -> str:
        """A row of the table."""
        cells = (str(number), self.mutant.file, self.mutant.wrong, self.result, self.by, f"{self.seconds:.0f}")
        return f"| {' | '.join(cells)} |"


HEADER = """\
| | file | wrong | result | by | s |
|---|---|---|---|---|---|"""


def copied(folder: Path) -> Path:
    """A copy of the package and its tests."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder)
    return folder


def run_tests(folder: Path, nodes: Sequence[str]) -> tuple[int, str]:
    """Run tests of a copy in this process, which is a fresh one, until one fails; pytest's exit code and its output."""
    import pytest

    os.chdir(folder)
    paths = [str(folder), str(folder / "tests")]
    sys.path[:0] = paths
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    gc.freeze()  # pytest collects garbage several times, and what was imported before the fork is none
    options = ["-x", "-n", "0", "--tb=short", "-rfE", f"--timeout={LONGEST_SECONDS}"]
    # without what takes a second or more and serves no test here
    options += ["--assert=plain", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    with open("printed", "w+b") as printed:
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        code = pytest.main([*options, *nodes])
        sys.stdout.flush()
        printed.seek(0)
        return int(code), printed.read().decode(errors="replace")


def tried(change: tuple[Mutant | None, Sequence[str]]) -> tuple[int, str, float]:
    """Run tests with a mutant, or with none, in a copy; pytest's exit code and output, and seconds."""
    mutant, nodes = change
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant") as name:
        folder = copied(Path(name))
        if mutant is not None:
            source = mutant.source(folder)
            source.write_text(source.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
        code, printed = run_tests(folder, nodes)
        os.chdir(ROOT)  # out of what is removed now
    return code, printed, time.monotonic() - began


def outcome_of(mutant: Mutant, code: int, printed: str, seconds: float) -> Outcome:
    """What an exit code and an output mean for a mutant."""
    result = {PASSED: "SURVIVED", FAILED: "killed"}.get(code, f"pytest ended with {code}")
    failed = [line.split()[1] for line in printed.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return Outcome(mutant, result, failed[0].rpartition("::")[2] if failed else "", seconds)


@contextmanager
def fresh_processes(jobs: int) -> Iterator[Pool]:
    """Processes for one task each, forked from one that has imported what takes long and is no part of the package."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with context.Pool(jobs, maxtasksperchild=1) as pool:
        yield pool
        pool.close()
        pool.join()


def misfits(mutants: Sequence[Mutant]) -> list[str]:
    """The mutants whose old text is not in its file exactly once."""
    return [
        f"{mutant.file}, {mutant.wrong!r}: found {mutant.old!r} {found + 1} times; expected it once"
        for mutant in mutants
        if (found := mutant.misfits())
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mutants and print what became of them; returns the exit code."""
    parser = argparse.ArgumentParser(description="Run hand-written mutants against the tests that must notice them.")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only mutants with all of these in file or wrong")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTANTS if all(word in f"{m.file} {m.wrong}" for word in options.words)]
    if not chosen:
        parser.error(f"found no mutant with {' and '.join(map(repr, options.words))}")
    if faults := misfits(chosen):
        print("\n".join(faults))
        return 2
    nodes = list(dict.fromkeys(node for mutant in chosen for node in mutant.nodes()))
    with fresh_processes(options.jobs) as pool:
        code, printed, _ = pool.apply(tried, [(None, nodes)])
        if code != PASSED:
            print(f"without any mutant, the tests do not pass:\n{printed}")
            return 2
        print(f"{len(chosen)} mutants, {len(nodes)} tests that pass without them\n\n{HEADER}", flush=True)
        outcomes = []
        found = pool.imap(tried, [(mutant, mutant.nodes()) for mutant in chosen])
        for number, mutant in enumerate(chosen, start=1):
            outcomes.append(outcome_of(mutant, *found.next(timeout=2 * LONGEST_SECONDS)))
            print(outcomes[-1].row(number), flush=True)
    bad = [outcome for outcome in outcomes if not outcome.result.startswith("killed")]
    print("\n".join(["", *(f"{o.mutant.file}, {o.mutant.wrong}: {o.result}" for o in bad)]) if bad else "\nall killed")
    return max((1 if outcome.result == "SURVIVED" else 2 for outcome in bad), default=0)


if __name__ == "__main__":
    sys.exit(main())
