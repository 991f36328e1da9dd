"""What a report tells, section by section: tables of cells and notes, before they are text, Markdown, HTML or LaTeX.

Scores of a summary are fractions; in cells they are per cent with two decimals.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from latent_sweep.labels import format_value, label, short_names
from latent_sweep.results.bootstrap import RESAMPLES
from latent_sweep.results.comparison import TESTED_ON, Comparison, Difference, tested_on
from latent_sweep.results.definition import MEASURES
from latent_sweep.results.published import content, find_published
from latent_sweep.results.summaries import ROUTER_MEASURES, Configuration, RouterMeasure, Statistic, Summary, protocol
from latent_sweep.results.trial_states import counts_text
from latent_sweep.sweep.prices import items_text
from latent_sweep.sweep.tuning import EXACT

PAGE_FILE = "report.html"
"""The report as a page: its name in a sweep's folder, and of the artifact in a tracker."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    size: float | None = None
    """What the column is sorted by; None where it is no number."""
    best: bool = False


@dataclass(frozen=True)
class Table:
    """Cells under a heading each."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    keys: int = 0
    """How many columns, from the first one, name a row."""


@dataclass(frozen=True)
class Section:
    """A part of a report: a table, or notes alone."""

    name: str
    title: str
    table: Table | None
    notes: Sequence[str] = ()
    """A line each; of what a table's columns are, or all there is."""


def sections(summary: Summary) -> list[Section]:
    """Return the sections for which there is something to tell; the first one is that of the main table."""
    found = [
        Section("main", f"sweep {summary.name}: {counts(summary)}", _main(summary), _main_notes(summary)),
        Section("compared", _DIFFERENCES, _compared([summary]), how_compared([summary])),
        Section("published", "Beside the paper's numbers", _published(summary), _published_notes()),
        Section("tasks", "Final scores by task (%)", _by_task(summary), _task_notes(summary)),
        Section("router", "Router", _router(summary), (_ROUTER_NOTE,)),
    ]
    lists = {
        "tuned": ("Chosen by tuning, by average performance on rows held out of the training rows", summary.tuned),
        "ended": ("Ended early", ended_lines(summary)),
        "again": ("Started again", summary.started_again),
        "compute": ("Compute used", [items_text(summary.compute_used)] if summary.compute_used else []),
        "alike": (NOT_ALIKE, list(mixed_lines(summary))),
    }
    told = [Section(name, title, None, lines) for name, (title, lines) in lists.items() if lines]
    return [section for section in found if section.table is not None] + told


def joint_sections(summaries: Sequence[Summary]) -> list[Section]:
    """Return the sections that compare several sweeps: all configurations, and their differences from baselines."""
    differences = Section("compared", _DIFFERENCES, _compared(summaries), how_compared(summaries))
    return [together(summaries), *([differences] if differences.table else [])]


def together(summaries: Sequence[Summary]) -> Section:
    """Return the configurations of several sweeps in one table: those tested on the same together, best AP first."""
    title = f"{len(summaries)} sweeps compared"
    return Section("together", title, _all_configurations(summaries), _all_notes(summaries))


def without_comparison(summary: Summary) -> Summary:
    """Return a summary without the differences from a baseline, which are shown for several sweeps together."""
    configurations = tuple(replace(one, comparison=None) for one in summary.configurations)
    return replace(summary, configurations=configurations)


def _all_configurations(summaries: Sequence[Summary]) -> Table:
    names, rows = _Names(summaries), []
    places: dict[tuple[str, ...], int] = {}
    for summary in summaries:
        steps, rates = (_protocol_cells(summary).get(name, []) for name in ("steps", "rate"))
        for row, one in enumerate(summary.configurations):
            count = Cell(f"{one.n_finished}/{one.n_trials}", one.n_finished)
            scores = [_score(found) for found in (one.average_performance, one.learning_accuracy, one.forgetting)]
            cells = [*names.cells(summary, one), count, *scores, rates[row], steps[row]]
            rows.append(((places.setdefault(tested_on(one.settings), len(places)), *place_by_performance(one)), cells))
    rows.sort(key=lambda row: row[0])
    header = [*names.header, "n", "AP (%)", "LA (%)", "FM (%)", "rate", "steps"]
    written = [list(cells) for _, cells in rows]
    if any(name.endswith("learning_rate") for name in names.header):  # which says the same
        place = header.index("rate")
        del header[place]
        for cells in written:
            del cells[place]
    return Table(header, written, len(names.header))


def _all_notes(summaries: Sequence[Summary]) -> list[str]:
    notes = [
        f"rows that are {_TESTED_ALIKE} stand together, the highest AP first: compare no others, and these as far as "
        "backbone, steps and what has a column here are the same"
    ]
    notes += [_HELD_OUT] * any(map(has_held_out, summaries))
    if any(map(_has_survivors, summaries)):
        notes.append(f"{_SURVIVORS}, and comes last")
    notes += [_FAILED] * any(map(_has_failed, summaries))
    notes += _not_in_turn(*summaries)
    notes += [note for pair in itertools.combinations(summaries, 2) for note in _same_order(*pair)]
    return notes


_TESTED_ALIKE = "of one benchmark, order and tasks, and scored on the same (score_on),"

_HELD_OUT = (
    "score_on validation: scores are of rows held out of the training rows, on which tuning chooses among its "
    "candidates; they compare with none of test rows"
)


def has_held_out(summary: Summary) -> bool:
    """Whether scores of it are of rows held out of the training rows."""
    return any(one.settings.get("benchmark.score_on") == "validation" for one in summary.configurations)


def place_by_performance(one: Configuration) -> tuple[bool, float]:
    """Return a key that puts the highest AP first, behind all others what a scheduler has left of a configuration."""
    found = one.average_performance
    return bool(one.n_stopped), math.inf if found is None else -found.mean


_SURVIVORS = (
    "where a scheduler has stopped some trials of a row and others have finished, its means are those of the better "
    "ones: no other row compares with them"
)


_NOTHING_LEARNED = (
    "every AP is 0: nothing was learned that scores. Take a larger training.learning_rate, more steps, or a backbone "
    "with trained weights; a tiny one with random weights only shows that a sweep runs"
)


def _has_survivors(summary: Summary) -> bool:
    return any(one.n_stopped and one.n_finished for one in summary.configurations)


_FAILED = (
    "where some trials of a row have failed and others have finished, its means are those of the others: of a row some "
    "of whose trials are no longer finite (non_finite), the better ones"
)


def _has_failed(summary: Summary) -> bool:
    return any(one.n_failed and one.n_finished for one in summary.configurations)


def _not_in_turn(*summaries: Summary) -> list[str]:
    """Name the configurations (joint training, zero-shot) for which LA, FM and BWT are not defined."""
    found = [one for summary in summaries for one in summary.configurations]
    names = [str(one.settings.get("method.name") or label(one.values)) for one in found if not one.learns_in_turn]
    notes = []
    if names:
        listed = ", ".join(dict.fromkeys(names))
        notes.append(
            f"{listed}: everything is learned at the first stage, or nothing at all, so LA, FM and BWT are not defined"
        )
    if any(one.n_tasks == 1 and one.n_finished for one in found):
        notes.append("FM and BWT are means over the earlier tasks: they are not defined for a stream of one task")
    return notes


def _same_order(*pair: Summary) -> Iterator[str]:
    """Say how far two sweeps rank what both have finished alike, whatever was chosen for either by tuning.

    What is tested on other tasks is ranked apart: that some tasks are harder than others says nothing of methods.
    """
    chosen = frozenset().union(*(summary.chosen for summary in pair))
    first, second = (_by_label(summary, chosen) for summary in pair)
    groups: dict[tuple[str, str], list[tuple[Configuration, Configuration]]] = {}
    for name in (name for name in first if name in second):
        groups.setdefault((_place(first[name]), _place(second[name])), []).append((first[name], second[name]))
    for (place, _), both in groups.items():
        if len(both) >= _RANKING:
            yield from _agreement(pair, f" on {place}" if len(groups) > 1 else "", both)


def _agreement(
    pair: Sequence[Summary], place: str, both: Sequence[tuple[Configuration, Configuration]]
) -> Iterator[str]:
    """Say how far two sweeps rank these configurations alike; nothing where one of them ranks none above another."""
    from scipy.stats import kendalltau  # takes half a second

    means = [tuple(_exact_mean(one) for one in each) for each in both]
    tau = float(kendalltau(*zip(*means, strict=True)).statistic)
    swapped = sum((a - c) * (b - d) < 0 for (a, b), (c, d) in itertools.combinations(means, 2))
    finished = sorted({one.n_finished for each in both for one in each})
    if not math.isnan(tau):
        yield (
            f"{pair[0].name} and {pair[1].name} rank the {len(both)} configurations that both have{place} by AP with "
            f"Kendall's tau {tau:.2f} (1: alike, 0: unrelated, -1: reversed); {swapped} of "
            f"{math.comb(len(both), 2)} pairs swap" + (f"; n is {value_range(finished, str)}" if finished[1:] else "")
        )


def _exact_mean(configuration: Configuration) -> float:
    """Mean AP without the rounding of sums, which would tell apart what is equal."""
    assert configuration.average_performance is not None
    return round(configuration.average_performance.mean, EXACT)


def _place(configuration: Configuration) -> str:
    """What a configuration is tested on, as far as all of its trials have it in common."""
    return label({name: configuration.settings.get(path) for path, name in short_names(TESTED_ON).items()})


def _by_label(summary: Summary, chosen: Set[str]) -> dict[str, Configuration]:
    """What has a mean AP that compares, by its label without what was chosen; what shares that label has no rank."""
    found: dict[str, list[Configuration]] = {}
    for one in summary.configurations:
        if one.average_performance is not None and not one.n_stopped:
            left_out = chosen | summary.beside
            name = label({name: value for name, value in one.values.items() if name not in left_out})
            found.setdefault(name, []).append(one)
    return {name: alike[0] for name, alike in found.items() if len(alike) == 1}


_DIFFERENCES = "Differences from the baseline (percentage points)"

NOT_ALIKE = "Not all trials were computed alike"

_RANKING = 3
"""So many configurations make a ranking."""

_FEW = 5
"""So many repetitions tell a bootstrap well how they vary."""

_ROUTER_NOTE = (
    "means over the finished trials, after the last task; novelty AUROC: over the stages before it, rows of tasks not "
    "yet seen against rows of seen ones by their Mahalanobis distance"
)


def counts(summary: Summary) -> str:
    """Say how many trials there are, and how they stand."""
    found = counts_text(summary.counts, summary.driven)
    return f"{sum(summary.counts.values())} trials" + (f" ({found})" if found else "")


class _Axes:
    """The columns that tell configurations apart: one for each axis, but a common one for those that few have."""

    def __init__(self, summary: Summary):
        values = {name: [one.values[name] for one in summary.configurations] for name in summary.axes}
        few = [name for name, found in values.items() if 2 * found.count(None) > len(found)]
        self._few = few if len(few) > 1 else []
        self.header = list(dict.fromkeys(_FEW_HAVE if name in self._few else name for name in summary.axes))

    def cells(self, configuration: Configuration) -> list[Cell]:
        """The cells of a configuration's row."""
        return [self._cell(name, configuration) for name in self.header]

    def _cell(self, column: str, configuration: Configuration) -> Cell:
        if self._few and column == _FEW_HAVE:
            return Cell(label({name: configuration.read[name] for name in self._few}) or "-")
        return _setting(configuration.read[column])


class _Names:
    """The columns that tell configurations apart: of one sweep its axes, of several its name, label and differences."""

    def __init__(self, summaries: Sequence[Summary]):
        self._axes = _Axes(summaries[0]) if len(summaries) == 1 else None
        self._labels = {id(one): _own_label(summary, one) for summary in summaries for one in summary.configurations}
        self._apart = list(dict.fromkeys(name for summary in summaries for name in summary.apart))
        labels = ["configuration"] * any(self._labels.values())
        self.header = self._axes.header if self._axes else ["sweep", *labels, *self._apart]

    def cells(self, summary: Summary, configuration: Configuration) -> list[Cell]:
        """The cells of a configuration's row."""
        if self._axes:
            return self._axes.cells(configuration)
        labels = [Cell(self._labels[id(configuration)] or "-")] * ("configuration" in self.header)
        return [Cell(summary.name), *labels, *(_setting(configuration.read.get(name)) for name in self._apart)]


def _own_label(summary: Summary, configuration: Configuration) -> str:
    """The settings of a configuration that have no column of their own in a table of several sweeps."""
    return label({name: value for name, value in configuration.values.items() if name not in summary.apart})


def _setting(value: Any) -> Cell:
    return Cell(format_value(value), value if type(value) in (int, float) else None)


_FEW_HAVE = "its settings"
"""The heading of the column of what few configurations have; no axis is called so, for names have no spaces."""


def _score(statistic: Statistic | None, best: bool = False, spread: bool = True) -> Cell:
    if statistic is None:
        return Cell("-")
    mean = 100 * statistic.mean
    shown = f"{mean:.2f}" if statistic.std is None or not spread else f"{mean:.2f} ± {100 * statistic.std:.2f}"
    return Cell(shown, mean, best)


# --- the main table


def _main(summary: Summary) -> Table:
    axes, columns = _Axes(summary), _differing(_protocol_beside_axes(summary))
    rows = []
    for row, configuration in enumerate(summary.configurations):
        finished, of = configuration.n_finished, configuration.n_trials
        rows.append(
            [
                *axes.cells(configuration),
                Cell(str(of) if finished == of else f"{finished}/{of}", finished),
                _score(configuration.average_performance, summary.is_marked(configuration)),
                _score(configuration.learning_accuracy),
                _score(configuration.forgetting),
                *(cells[row] for cells in columns.values()),
            ]
        )
    return Table([*axes.header, "n", "AP (%)", "LA (%)", "FM (%)", *columns], rows, len(axes.header))


def _protocol_beside_axes(summary: Summary) -> dict[str, list[Cell]]:
    """The cells of the protocol, but the rates where the axis of the learning rate has the same in its column."""
    axes, cells = _Axes(summary), _protocol_cells(summary)
    rates = [*map(_text, cells.get("rate", ()))]
    for place, name in enumerate(axes.header):
        if name.endswith("learning_rate") and rates == [axes.cells(one)[place].text for one in summary.configurations]:
            del cells["rate"]
            break
    return cells


def _text(cell: Cell) -> str:
    return cell.text


def _differing(told: Mapping[str, list[Cell]]) -> dict[str, list[Cell]]:
    """What of it is not the same for all configurations that it is known of."""
    return {name: cells for name, cells in told.items() if len({*map(_text, cells)} - {"-"}) > 1}


def _protocol_cells(summary: Summary) -> dict[str, list[Cell]]:
    """The cells of each column of the protocol."""
    cells: dict[str, list[Cell]] = {}
    for configuration in summary.configurations:
        for name, values in protocol(configuration).items():
            text = value_range(values, format_value if name == "rate" else "{:,}".format)
            cells.setdefault(name, []).append(Cell(text or "-", values[0] if values else None))
    return cells


def value_range(values: Sequence[Any], write: Callable[[Any], str]) -> str:
    """The value that all have, or the smallest and the largest; empty where none is known."""
    return " to ".join(write(value) for value in dict.fromkeys((*values[:1], *values[-1:])))


_PROTOCOL = {
    "trained": "numbers (parameters) a task trains",
    "rate": "learning rate as run",
    "steps": "optimizer steps of a task",
}


def _main_notes(summary: Summary) -> list[str]:
    """What the columns of the main table are, and what is the same in all its rows."""
    notes = [
        f"n: finished trials, one for each {' and '.join(summary.repeats)}; mean ± sample standard deviation over them",
        "AP, average performance: mean score over all tasks after the last one",
        "LA, learning accuracy: mean score of each task when it was new, right after it was learned",
        "FM, forgetting measure: mean over the earlier tasks of the best score ever minus the last one",
    ]
    notes += [_HELD_OUT] * has_held_out(summary)
    notes += [_NOTHING_LEARNED] * summary.nothing_learned
    if len({tested_on(one.settings) for one in summary.configurations}) > 1:
        notes.append(f"the highest AP is marked among rows that are {_TESTED_ALIKE} for no others compare")
    if _has_survivors(summary):
        notes.append(f"{_SURVIVORS}, and it is never the best")
    notes += [_FAILED] * _has_failed(summary)
    notes += _not_in_turn(summary)
    if shared := _shared_trainings(summary):
        notes.append(f"{shared}: the deviation is not one of as many trainings")
    told = _protocol_beside_axes(summary)
    differing = _differing(told)
    notes.append("; ".join(f"{name}: {meaning}" for name, meaning in _PROTOCOL.items() if name in told))
    alike = {
        name: next((cell.text for cell in cells if cell.text != "-"), "unknown")
        for name, cells in told.items()
        if name not in differing
    }
    found = ", ".join(f"{name} {text}" for name, text in alike.items())
    return notes + ([f"the same in all rows: {found}"] if alike else [])


def _shared_trainings(*summaries: Summary) -> str:
    """Say that n counts trials of one training more than once; empty where it does not."""
    configurations = [one for summary in summaries for one in summary.configurations]
    shared = [one for one in configurations if one.n_trainings < one.n_finished]
    counts = dict.fromkeys(f"{one.n_trainings} of n {one.n_finished}" for one in shared)
    return f"trials of a row have trainings in common ({', '.join(counts)})" if shared else ""


# --- against a baseline


def _compared(summaries: Sequence[Summary]) -> Table | None:
    """A row for each configuration that was compared; the intervals' source has a column where it differs."""
    names, rows, sources = _Names(summaries), [], []
    for summary, found in _comparisons(summaries):
        comparison = found.comparison
        assert comparison is not None
        differences = [_difference(comparison.differences.get(measure)) for measure in MEASURES]
        rows.append([*names.cells(summary, found), Cell(str(comparison.n), comparison.n), *differences])
        sources.append(_resampled(comparison))
    header = [*names.header, "n", *MEASURES]
    if len(set(sources)) > 1:
        header.append("resampled")
        rows = [[*row, Cell(source)] for row, source in zip(rows, sources, strict=True)]
    return Table(header, rows, len(names.header)) if rows else None


def _comparisons(summaries: Sequence[Summary]) -> list[tuple[Summary, Configuration]]:
    """The configurations that were compared, each with its sweep."""
    found = [(summary, one) for summary in summaries for one in summary.configurations]
    return [(summary, one) for summary, one in found if one.comparison is not None]


def _resampled(comparison: Comparison) -> str:
    """What the intervals are from, once where it is the same for all."""
    found: dict[str, list[str]] = {}
    for measure, difference in comparison.differences.items():
        found.setdefault(difference.resampled, []).append(measure)
    if len(found) < 2:
        return next(iter(found), "nothing")
    return "; ".join(f"{', '.join(measures)}: {sources}" for sources, measures in found.items())


def _difference(difference: Difference | None) -> Cell:
    if difference is None:
        return Cell("-")
    if difference.interval is None:
        return Cell(points(difference.mean), difference.mean)
    verdict = "" if difference.told_apart else " n.s."
    return Cell(f"{points(difference.mean)} [{', '.join(map(points, difference.interval))}]{verdict}", difference.mean)


def points(fraction: float) -> str:
    """Write a difference of fractions in percentage points."""
    return f"{round(100 * fraction, 2) + 0.0:+.2f}"  # no -0.00


def how_compared(summaries: Sequence[Summary]) -> list[str]:
    """Say what the differences of a comparison are, and how far they can be trusted."""
    found = [one.comparison for _, one in _comparisons(summaries) if one.comparison]
    if not found:
        return []
    repeats = summaries[0].repeats
    pairs = sorted({comparison.n for comparison in found})
    notes = [
        f"baseline: {'; '.join(dict.fromkeys(comparison.baseline for comparison in found))}",
        f"n: pairs of finished trials with the same {' and '.join(repeats)}, {value_range(pairs, str)}; in "
        "brackets 95 % intervals",
        "BWT, backward transfer: mean over the earlier tasks of the last score minus that when new",
        "FM counts from the best stage, so answers that change without a trend have some: beside a baseline whose "
        "answers never change, a small difference of FM is no evidence of forgetting where BWT has none",
        "n.s., not significant: 0 lies in the interval",
    ]
    if len(kinds := {_resampled(comparison) for comparison in found}) == 1:
        (kind,) = kinds
        notes.append(
            "no intervals: nothing says how far these differences vary"
            if kind == "nothing"
            else f"intervals are from {kind}"
        )
    sources = [
        (difference.resampled, comparison.n) for comparison in found for difference in comparison.differences.values()
    ]
    if any("rows" in source for source, _ in sources):
        notes.append(
            f"from rows: hierarchical bootstrap, {RESAMPLES:,} resamples of repetitions and test rows, alike for both"
        )
    if any(source == "repetitions" for source, _ in sources):
        notes.append("from repetitions alone: Student's t over them, for no scores of the same rows are at hand")
    if any(source == "nothing" and n > 1 for source, n in sources):
        notes.append("without brackets: all pairs have the same difference, which does not say how far it varies")
    if any(source == "repetitions and rows" and n < _FEW for source, n in sources):
        notes.append("two to four pairs: too narrow an interval from rows where seeds matter far more than test rows")
    if any(map(_has_survivors, summaries)):
        notes.append(
            "a scheduler has stopped some trials, the worse ones: a difference of what is left of a configuration to "
            "what is left of another says little"
        )
    notes += [_FAILED] * any(map(_has_failed, summaries))
    notes += _not_in_turn(*summaries)
    if averaged := sorted({place for comparison in found for place in comparison.averaged}):
        names = " and ".join(repeats[place] for place in averaged)
        notes.append(
            f"where only one of the two reads {names}, the trials of the other are averaged over it, if all of them "
            "have finished"
        )
    if shared := _shared_trainings(*summaries):
        notes.append(f"{shared}: pairs are fewer than they seem, and intervals too narrow")
    if any(comparison.n == 1 for comparison in found):
        notes.append("with one pair, an interval tells of other test rows, and nothing of another seed")
    intervals = sum(
        difference.interval is not None for comparison in found for difference in comparison.differences.values()
    )
    if intervals > 1:
        notes.append(
            f"{intervals} intervals, not corrected for their number: of those without a true difference, at least one "
            "in twenty excludes 0 by chance, and more with few pairs"
        )
    return notes


# --- beside the paper

_LESS = ("benchmark.train_per_task", "benchmark.test_per_task", "training.max_steps")
"""Settings that make less of the paper's cell."""


def _published(summary: Summary) -> Table | None:
    axes, rows = _Axes(summary), []
    for configuration in summary.configurations:
        found = find_published(configuration.settings, configuration.n_tasks)
        if found is None or configuration.n_stopped:  # whose mean is not one of all seeds
            continue
        settings = configuration.settings
        less = {path: value for path in _LESS if (value := settings.get(path)) is not None}
        less |= {path: settings[path] for path, value in found.protocol.items() if settings.get(path, value) != value}
        pairs = (
            (configuration.average_performance, found.average_performance),
            (configuration.forgetting, found.forgetting),
        )
        rows.append(
            [
                *axes.cells(configuration),
                Cell(str(found.table), found.table),
                *(cell for ours, theirs in pairs for cell in _beside(ours, theirs)),
                Cell(label(less) or "-"),
            ]
        )
    columns = ["table", *(f"{name} {part}" for name in ("AP", "FM") for part in ("paper", "ours", "gap"))]
    return Table([*axes.header, *columns, "other settings"], rows, len(axes.header)) if rows else None


def _published_notes() -> list[str]:
    return [
        f"paper: {content()['source']}; ours: this sweep's mean; gap: ours minus the paper's, in percentage points",
        "other settings: limits that make less of the paper's cell, and other numbers of epochs and rows in a batch",
    ]


def _beside(ours: Statistic | None, paper: float) -> list[Cell]:
    gap = None if ours is None else ours.mean - paper
    return [
        Cell(f"{100 * paper:.2f}", 100 * paper),
        _score(ours, spread=False),
        Cell("-" if gap is None else points(gap), gap),
    ]


# --- tasks and router


def tasks_of(summary: Summary) -> list[str]:
    """Every task that a finished trial was scored on, in the order of learning."""
    return list(dict.fromkeys(task for configuration in summary.configurations for task in configuration.task_scores))


def _by_task(summary: Summary) -> Table | None:
    tasks, axes = tasks_of(summary), _Axes(summary)
    baselines = list(_constants(summary))
    unnamed = not axes.header and bool(baselines)
    header = ["answers"] if unnamed else axes.header
    rows = [
        [
            *([Cell("trials")] if unnamed else axes.cells(configuration)),
            *(_score(configuration.task_scores.get(task), spread=False) for task in tasks),
        ]
        for configuration in summary.configurations
    ]
    for name, constants in baselines:
        scores = [Cell("-") if (found := constants.get(task)) is None else _fraction(found) for task in tasks]
        rows.append([Cell(name), *[Cell("-")] * (len(header) - 1), *scores])
    return (
        Table([*header, *(f"T{number}" for number in range(1, len(tasks) + 1))], rows, len(header)) if tasks else None
    )


def _fraction(score: float) -> Cell:
    return Cell(f"{100 * score:.2f}", 100 * score)


def _constants(summary: Summary) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield the scores of constant answers, by task; by the axes they depend on where they are not the same for all."""
    groups: dict[tuple[tuple[str, float], ...], list[Configuration]] = {}
    for configuration in summary.configurations:
        if configuration.constants:
            groups.setdefault(tuple(configuration.constants.items()), []).append(configuration)
    for scores, members in groups.items():
        alike = {
            axis: value
            for axis, value in members[0].values.items()
            if len(groups) > 1 and all(one.values[axis] == value for one in members)
        }
        yield f"constant{f' ({label(alike)})' if alike else ''}", dict(scores)


def _task_notes(summary: Summary) -> list[str]:
    notes = [f"T{number} = {task}" for number, task in enumerate(tasks_of(summary), start=1)]
    if any(configuration.constants for configuration in summary.configurations):
        notes.append("constant: the most frequent training answer of a task as the answer to all its test rows")
    return notes


def _router(summary: Summary) -> Table | None:
    """A row for each configuration of which something is known of its router."""
    axes, rows = _Axes(summary), []
    for configuration in summary.configurations:
        if configuration.router:
            values = [router_value(configuration, measure) for measure in ROUTER_MEASURES]
            cells = [Cell("-" if value is None else f"{value:.2f}", value) for value in values]
            rows.append([*axes.cells(configuration), *cells])
    header = [*axes.header, *(measure.heading for measure in ROUTER_MEASURES)]
    return Table(header, rows, len(axes.header)) if rows else None


def router_value(configuration: Configuration, measure: RouterMeasure) -> float | None:
    """A measure of the router as tables show it; None where nothing is known of it."""
    statistic = configuration.router.get(measure.metric)
    return None if statistic is None else measure.factor * statistic.mean


# --- lines


def mixed_lines(summary: Summary) -> Iterator[str]:
    """A line for each library, device or type that was not the same for all trials: which ones had which."""
    for name, values in summary.mixed.items():
        users = (f"{value} ({_counted(trials)})" for value, trials in values.items())
        yield f"{name}: {'; '.join(users)}"


def _counted(trials: Sequence[str], shown: int = 4) -> str:
    listed = ", ".join([*trials[:shown], *(["..."] if len(trials) > shown else [])])
    return f"{len(trials)} trial{'s' if len(trials) > 1 else ''}: {listed}"


def ended_lines(summary: Summary) -> list[str]:
    """A line for each trial that ended without finishing, and why."""
    return [f"{label(end.values)} {end.status}: {end.reason}" for end in summary.ended_early]
