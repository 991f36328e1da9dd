"""What a sweep has come to as pandas data frames, for analyses and pictures of one's own.

Scores are fractions. Every frame is made from journals, as the tables are, so that it holds what has been told so far
while a sweep runs. Its columns have the same types however little is known: texts are `string`, counts `Int64`,
measures `float64`, times `datetime64[ns, UTC]`; what is not known is missing (`pd.NA`, NaN or NaT).

A setting's column has the type that fits its values in all trials of the sweep, run or not: `string` for texts, `Int64`
for whole numbers, `float64` where others are among them, `boolean`, and `object`, with the values as the sweep file has
them, for what mixes such kinds and for lists, as tuples, which `groupby` takes. A setting that a trial does not read is
missing there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import Any, NamedTuple

import pandas as pd

from latent_sweep.errors import ConfigError, StorageError
from latent_sweep.labels import short_names
from latent_sweep.results.columns import differing, value_read
from latent_sweep.results.definition import defined_measures, defined_metrics, trial_name
from latent_sweep.results.inputs import InputTexts
from latent_sweep.results.summaries import ROUTER_MEASURES, end_reason
from latent_sweep.security import quoted
from latent_sweep.storage.folders import SweepFolder, TrialFolder
from latent_sweep.storage.journal import Event, Stage, attempts, final_metrics, repair_advice, stages, status
from latent_sweep.storage.predictions import Answer, saves_answers
from latent_sweep.storage.trial_files import PREDICTIONS, SCORES, checked_answers, prediction_lines, recorded_matrix
from latent_sweep.sweep.plan import values_read

_TIME = "datetime64[ns, UTC]"
_KEY = {"sweep": "string", "trial_id": "string"}
_TRIAL = {**_KEY, "training_id": "string", "name": "string", "status": "string"}
_PROGRESS = {
    **{"n_tasks": "Int64", "tasks_seen": "Int64"},
    **dict.fromkeys(("AP", "FM", "LA", "BWT", "seconds_train", "seconds_eval"), "float64"),
    **{"attempts": "Int64", "node": "string", "started": _TIME, "ended": _TIME, "reason": "string"},
}
_STAGE = {"tasks_seen": "Int64", "after_task": "string"}
_LEARNED = {
    **{"time": _TIME, "reused": "boolean", "steps": "Int64", "trainable_parameters": "Int64", "lineage": "string"},
    **dict.fromkeys(("AP", "FM", "FM_scorer", "BWT", "train_loss", "seconds_train", "seconds_eval"), "float64"),
    **{measure.metric: "float64" for measure in ROUTER_MEASURES},
}
_SCORE = {"task": "string", "position": "Int64", "metric": "string", "score": "float64", "is_new": "bool"}
_ANSWER = {
    **{**_KEY, **_STAGE, "task": "string", "row": "Int64", "row_id": "string", "input": "string"},
    **{"prediction": "string", "references": "object", "score": "float64", "weights": "object"},
}
_TAKEN = {*_TRIAL, *_PROGRESS, *_STAGE, *_LEARNED, *_SCORE, *_ANSWER}
"""Columns that are there in every sweep; a setting of such a short name keeps its path."""

Row = dict[str, Any]
Dtypes = dict[str, str]
WhichTrial = str | Mapping[str, Any]
"""A trial's id, the beginning of one, or settings that one trial alone has, by short name or path."""


class SweepResults:
    """One sweep, or several together, as data frames. Every call reads anew what it is asked for; nothing is changed.

    A sweep in an object store is brought here when it is opened: open it again for what has come since.

    Args:
        folders: the sweep's, or several.

    Raises:
        ConfigError: no folder is named, or one is named twice.
        StorageError: there is no sweep in one, or its `sweep.json` is damaged.
    """

    def __init__(self, *folders: SweepFolder):
        if len({folder.path.resolve() for folder in folders}) < max(1, len(folders)):
            raise ConfigError(
                f"found {len(folders)} sweep folders, none or one of them twice; expected different ones."
            )
        self._folders = folders
        several, seeds = len(folders) > 1, [folder.seed_axis for folder in folders]
        paths = dict.fromkeys(path for folder in folders for path in folder.axes)
        if several:
            settings = [[trial.params for trial in folder] for folder in folders]
            paths |= dict.fromkeys(differing(settings, [folder.axes for folder in folders]))
        self.axes: dict[str, str] = _columns(paths, _TAKEN)
        """The settings that vary, those that tuning has chosen among them, and of several sweeps those in which they
        differ: path -> column, the short name of tables."""
        names = [name for path, name in self.axes.items() if path not in seeds]
        self.configuration: list[str] = ["sweep", *names] if several or not names else names
        """The columns that tell configurations apart, for `groupby`: all axes but the seed; `sweep` where there is no
        such axis, and of several sweeps."""

    @property
    def name(self) -> str:
        """The sweep's; of several, all of them."""
        return ", ".join(folder.name for folder in self._folders)

    def __repr__(self) -> str:
        paths = ", ".join(str(folder.path) for folder in self._folders)
        return f"<SweepResults {paths}: {len(self._trials())} trials>"

    def _trials(self) -> list[_Placed]:
        """Every trial, with its sweep."""
        return [_Placed(folder, trial) for folder in self._folders for trial in folder]

    def trials(self) -> pd.DataFrame:
        """Return one row for each trial, started or not, in the order of the sweep.

        Columns, of which those of `axes` stand behind `status`:

            sweep (string): the sweep's name
            trial_id (string): names the trial and its folder; trials of several sweeps may have it in common
            training_id (string): trials that have it in common share what they learn
            name (string): its settings that vary, as `lambda=0.1 seed=0`
            status (string): pending, running, finished, failed or stopped
            n_tasks (Int64): tasks that it is to learn
            tasks_seen (Int64): tasks that it has learned and was scored after
            AP (float64): average performance, over the tasks seen
            FM (float64): forgetting measure, over the tasks seen
            LA (float64): learning accuracy, the mean score of each task when it was new
            BWT (float64): backward transfer, over the tasks seen
                FM, LA and BWT are NaN where they are not defined: of trials that do not learn task after task (joint
                training, zero-shot), and FM and BWT of those of one task
            seconds_train (float64): of learning, without what was learned elsewhere or earlier
            seconds_eval (float64): of scoring
            attempts (Int64): how often a worker took it up
            node (string): where the newest attempt ran
            started (datetime64[ns, UTC]): when its journal began
            ended (datetime64[ns, UTC]): when it finished, failed or was stopped
            reason (string): why it failed or was stopped

        Raises:
            StorageError: a journal is damaged.
        """
        dtypes = _TRIAL | self._setting_dtypes() | _PROGRESS
        return _frame(dtypes, [self._trial_row(placed) for placed in self._trials()])

    def stages(self) -> pd.DataFrame:
        """Return one row for each stage of each trial: what its journal tells of learning a task and scoring after it.

        Columns, of which those of `axes` stand behind `trial_id`:

            sweep (string): the sweep's name
            trial_id (string): names the trial
            tasks_seen (Int64): from 1
            after_task (string): the task that was learned
            time (datetime64[ns, UTC]): when the stage was done
            reused (boolean): whether the task was learned elsewhere or earlier
            steps (Int64): optimizer steps of learning it
            trainable_parameters (Int64): parameters that it trained
            lineage (string): names what was learned
            AP (float64): average performance, over the tasks seen
            FM (float64): forgetting measure, over the tasks seen
            FM_scorer (float64): forgetting as the public scorer has it
            BWT (float64): backward transfer, over the tasks seen
                these three are NaN where they are not defined, as in `trials`
            train_loss (float64): the task's own, mean over the last tenth of the steps
            seconds_train (float64): of learning, missing where it was reused
            seconds_eval (float64): of scoring
            router_p_correct (float64): mean posterior of a row's own task
            router_accuracy (float64): share of rows whose largest posterior is their own task's
            router_nll (float64): mean negative log posterior of a row's own task, in nats
            router_ece (float64): expected calibration error
            router_one_hot (float64): share of rows that pruning leaves with a single weight
            router_novelty_auroc (float64): how well distances tell rows of tasks to come

        Behind these stands every other metric that a journal tells, by its name there, as float64; one that has the
        name of another column is called `metrics.<name>`. Terms that a method adds to the loss are among them.

        Raises:
            StorageError: a journal is damaged.
        """
        told = [(placed, told, event) for placed in self._trials() for told in [placed.stages()] for event in told]
        before = _KEY | self._setting_dtypes() | _STAGE
        names = {name: name for name, dtype in _LEARNED.items() if dtype == "float64"}
        others = dict.fromkeys(name for *_, event in told for name in event.metrics if name not in names)
        names |= {name: f"metrics.{name}" if name in {*before, *_LEARNED} else name for name in others}
        dtypes = before | _LEARNED | {names[name]: "float64" for name in others}
        return _frame(dtypes, [self._stage_row(*each, names) for each in told])

    def scores(self) -> pd.DataFrame:
        """Return one row for each entry of each trial's score matrix, in the order of learning.

        Columns, of which those of `axes` stand behind `trial_id`:

            sweep (string): the sweep's name
            trial_id (string): names the trial
            tasks_seen (Int64): from 1
            after_task (string): the task learned last
            task (string): the task scored
            position (Int64): when it was learned, from 1 for the trial's first task
            metric (string): what scores it
            score (float64): a fraction
            is_new (bool): whether it is the task learned last

        Raises:
            StorageError: a journal is damaged.
        """
        dtypes = _KEY | self._setting_dtypes() | _STAGE | _SCORE
        found = ((placed, event) for placed in self._trials() for event in placed.stages())
        return _frame(dtypes, [row for placed, event in found for row in self._score_rows(placed, event)])

    def matrix(self, trial: WhichTrial) -> pd.DataFrame:
        """Return a trial's score matrix: float64, a row for each task learned so far and a column for each scored.

        The index is called `after_task`, the columns `task`; above the diagonal stands NaN.

        Args:
            trial: its id, the beginning of it, or settings that it alone has: `{"lambda": 0.1, "seed": 0}`; of several
                sweeps, `sweep` may be among them.

        Raises:
            ConfigError: no trial fits, or several do.
            StorageError: the journal is damaged.
        """
        matrix = recorded_matrix(self._find(trial).stages())
        index, columns = pd.Index(matrix.tasks, name="after_task"), pd.Index(matrix.tasks, name="task")
        rows = [[*row, *[float("nan")] * (len(matrix.tasks) - len(row))] for row in matrix.rows]
        return pd.DataFrame(rows, index=index, columns=columns, dtype="float64")

    def answers(
        self,
        task: str | None = None,
        trial: WhichTrial | None = None,
        tasks_seen: int | None = None,
        inputs: bool = False,
    ) -> pd.DataFrame:
        """Return one row for each answer that is kept, in the order of trials, stages, tasks and rows.

        Settings stand in `trials()`, to be merged on `sweep` and `trial_id`: there may be millions of answers. Files
        are read of the trials asked for, and one trial's stage at a time is held beside the rows asked for.

            sweep (string): the sweep's name
            trial_id (string): names the trial
            tasks_seen (Int64): after how many tasks it was given
            after_task (string): the task learned last
            task (string): the task scored
            row (Int64): of the task's test rows, from 0
            row_id (string): names the row in the benchmark's data, which holds its prompt
            input (string): the row's text, without the instruction before it in a prompt; missing without `inputs`
            prediction (string): what was generated
            references (object): a list of the accepted answers
            score (float64): a fraction
            weights (object): task -> its mixing weight, without those that are 0; of the newest stage alone

        Which stages keep their answers is the sweep's `run.keep_answers`. While a trial runs, or where it has failed,
        files may be ahead of its journal: what cannot be told for certain then is left out.

        Args:
            task: one task; None is all.
            trial: one trial, as in `matrix`; None is all.
            tasks_seen: one stage, from 1; None is all.
            inputs: read the text of each row from the benchmark's data, which must be the data that was answered:
                LATENT_SWEEP_DATA or the trial's `benchmark.data_dir` says where it is.

        Raises:
            ConfigError: no trial has such a task, or not exactly one trial fits.
            DataError: with `inputs`, the benchmark's data is not at hand, or has other rows than those answered.
            StorageError: a journal or a file that holds answers is damaged.
        """
        trials = self._trials() if trial is None else [self._find(trial)]
        told = [(found, found.trial.events()) for found in trials]
        if task is not None:
            _check_task(task, told)
        parts = (
            _frame(_ANSWER, rows)
            for found, events in told
            for rows in _answer_rows(found, events, task, tasks_seen, InputTexts(found.trial) if inputs else None)
        )
        return pd.concat([_frame(_ANSWER, []), *parts], ignore_index=True)

    def _setting_dtypes(self) -> Dtypes:
        trials = [placed.trial for placed in self._trials()]
        return {name: _dtype(_setting(trial, path) for trial in trials) for path, name in self.axes.items()}

    def _settings(self, trial: TrialFolder) -> Row:
        values = ((name, _setting(trial, path)) for path, name in self.axes.items())
        return {name: tuple(value) if isinstance(value, list) else value for name, value in values}

    def _trial_row(self, placed: _Placed) -> Row:
        trial = placed.trial
        events = trial.events()
        told, state, starts = stages(events), status(events), attempts(events)
        metrics: Mapping[str, float] = {}
        if told:
            metrics = defined_metrics(trial, told, final_metrics(events if state == "finished" else told))
        seconds = {
            name: sum(event.metrics.get(name, 0.0) for event in told) if told else None
            for name in ("seconds_train", "seconds_eval")
        }
        return {
            "sweep": placed.sweep.name,
            "trial_id": trial.trial_id,
            "training_id": trial.training_id,
            "name": trial_name(placed.sweep, trial),
            "status": state,
            **self._settings(trial),
            "n_tasks": trial.n_tasks,
            "tasks_seen": len(told),
            **{name: metrics.get(name) for name in ("AP", "FM", "BWT")},
            "LA": recorded_matrix(told).mean_diagonal() if told and "LA" in defined_measures(trial, told) else None,
            **seconds,
            "attempts": len(starts),
            "node": starts[-1].node if starts else None,
            "started": _time(events[0]) if events else None,
            "ended": _time(events[-1]) if state in ("finished", "failed", "stopped") else None,
            "reason": end_reason(events) or None,
        }

    def _stage_row(self, placed: _Placed, told: Sequence[Stage], event: Stage, names: Mapping[str, str]) -> Row:
        return {
            **self._stage_key(placed, event),
            "time": _time(event),
            "reused": event.reused,
            "steps": event.steps,
            "trainable_parameters": event.trainable_parameters,
            "lineage": event.lineage,
            **{names[name]: value for name, value in defined_metrics(placed.trial, told, event.metrics).items()},
        }

    def _score_rows(self, placed: _Placed, event: Stage) -> Iterator[Row]:
        for position, (task, score) in enumerate(event.scores.items(), start=1):
            metric = event.scored_by.get(task)
            scored = {"task": task, "position": position, "metric": metric, "score": score}
            yield self._stage_key(placed, event) | scored | {"is_new": task == event.task}

    def _stage_key(self, placed: _Placed, event: Stage) -> Row:
        return {**placed.key(), **self._settings(placed.trial), **_stage_cells(event)}

    def _find(self, wanted: WhichTrial) -> _Placed:
        """The one trial that is meant."""
        trials = self._trials()
        if isinstance(wanted, str):
            same = [placed for placed in trials if placed.trial.trial_id == wanted]
            found = same or [placed for placed in trials if placed.trial.trial_id.startswith(wanted)]
        else:
            named = dict(wanted)
            sweep = named.pop("sweep", None)
            found = [placed for placed in trials if sweep in (None, placed.sweep.name)]
            settings = {self._path(name): _plain(value) for name, value in named.items()}
            found = [p for p in found if all(_is(_setting(p.trial, path), value) for path, value in settings.items())]
        if len(found) == 1:
            return found[0]
        problem = f"fits {len(found)} trials" if found else "fits no trial"
        listed = [f"\n  {p.trial.trial_id}  {trial_name(p.sweep, p.trial)}" for p in found or trials]
        more = f"\n  ... and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
        raise ConfigError(
            f"sweep {self.name}: found trial {quoted(wanted)}, which {problem}; expected an id, the beginning of one, "
            f"or settings of exactly one of:{''.join(listed[:_LISTED])}{more}\n"
            "Give more of the id or further settings; `trials()` has them all."
        )

    def _path(self, name: str) -> str:
        """The path of a setting that is named by its column, its short name or itself."""
        known = {path for placed in self._trials() for path in placed.trial.params}
        called = (*short_names(known).items(), *short_names(self.axes).items(), *self.axes.items())
        path = {called_so: path for path, called_so in called}.get(name, name)
        if path not in known and path not in self.axes:
            raise ConfigError(
                f"sweep {self.name}: found setting {quoted(name)}; expected one of its axes: "
                f"{', '.join(self.axes.values()) or 'none'}; or another setting's path, such as training.learning_rate."
            )
        return path


_LISTED = 8
"""Trials that an error lists, at most."""


class _Placed(NamedTuple):
    """A trial with its sweep."""

    sweep: SweepFolder
    trial: TrialFolder

    def key(self) -> Row:
        """What names it in a frame."""
        return {"sweep": self.sweep.name, "trial_id": self.trial.trial_id}

    def stages(self) -> list[Stage]:
        """The stages of its journal."""
        return stages(self.trial.events())


def _answer_rows(
    placed: _Placed, events: Sequence[Event], wanted: str | None, tasks_seen: int | None, texts: InputTexts | None
) -> Iterator[list[Row]]:
    """Yield the rows of one trial's answers, stage by stage; with their inputs where `texts` reads them."""
    trial, told = placed.trial, stages(events)
    if not told:
        return
    tasks = [task for task in told[-1].scores if wanted in (None, task)]
    lines = {task: prediction_lines(trial.path, told[-1], task) for task in tasks}
    for task, found in lines.items():
        name = f"{PREDICTIONS}/{task}.jsonl"
        if found is None and name in told[-1].files and status(events) == "finished":
            raise StorageError(
                f"{trial.path / name}: is missing, or does not match its digest in the journal. "
                f"{repair_advice(trial.path.parent.parent)}."
            )
    newest = {
        task: [Answer(line["prediction"], line["score"]) for line in found]
        for task, found in lines.items()
        if found is not None
    }
    unkept = [] if saves_answers(told[-1]) else [(told[-1], newest)]
    last = told if tasks_seen is None else told[:tasks_seen]
    for event, answers in chain(checked_answers(trial.path, last), unkept):
        if tasks_seen in (None, event.tasks_seen):
            key = {**placed.key(), **_stage_cells(event)}
            inputs = {task: texts.of(task, lines[task]) for task in tasks if task in answers} if texts else {}
            weighed = list(event.scores) if event is told[-1] else []
            yield [
                {
                    **key,
                    **{"task": task, "row": row, "input": inputs[task][row] if texts else None},
                    **answer._asdict(),
                    **_cells_beside(line, weighed),
                }
                for task in tasks
                for row, (answer, line) in enumerate(_with_lines(answers.get(task, ()), lines[task]))
            ]


Line = Mapping[str, Any]


def _with_lines(answers: Sequence[Answer], lines: Sequence[Line] | None) -> Iterable[tuple[Answer, Line | None]]:
    """Put beside each answer of a stage what the newest stage has written of the same row, where that is known."""
    if lines is None or len(lines) != len(answers):
        return zip(answers, repeat(None), strict=False)
    return zip(answers, lines, strict=True)


def _cells_beside(line: Line | None, weighed: Sequence[str]) -> Row:
    """What else is told of a row; its mixing weights by task, where these are those of the stage: `weighed`."""
    if line is None:
        return {}
    weights = {weighed[int(position)]: weight for position, weight in line["weights"].items()} if weighed else None
    return {"row_id": line["id"], "references": line["references"], "weights": weights}


def _stage_cells(event: Stage) -> Row:
    return {"tasks_seen": event.tasks_seen, "after_task": event.task}


def _check_task(task: str, told: Iterable[tuple[_Placed, Sequence[Event]]]) -> None:
    """Refuse a task that no trial has. One that is yet to be learned stands in the score matrix's file."""
    known: dict[str, None] = {}
    for (_, trial), events in told:
        if newest := stages(events)[-1:]:
            known |= dict.fromkeys((trial.read_json(SCORES) or {}).get("tasks", ()))
            known |= dict.fromkeys(newest[0].scores)
    if known and task not in known:
        raise ConfigError(f"found task {quoted(task)}; expected one that these trials learn: {', '.join(known)}.")


def _columns(paths: Iterable[str], taken: Iterable[str]) -> dict[str, str]:
    """Map paths to columns: short names, and the whole path where another column has the name."""
    return {path: path if name in set(taken) else name for path, name in short_names(paths).items()}


def _frame(dtypes: Dtypes, rows: Sequence[Row]) -> pd.DataFrame:
    """Return a frame with these columns, whatever rows there are; what a row does not have is missing."""
    return pd.DataFrame(
        {name: pd.Series([row.get(name) for row in rows], dtype=dtype) for name, dtype in dtypes.items()}
    )


def _setting(trial: TrialFolder, path: str) -> Any:
    """A setting as the trial reads it."""
    return values_read(trial)[path] if path in trial.values else value_read(trial.params, path)


def _dtype(values: Iterable[Any]) -> str:
    """Return the type of the column that holds these settings."""
    found = [value for value in values if value is not None]
    kinds = {type(value) for value in found}
    if kinds == {int}:
        return "Int64" if all(-(2**63) <= value < 2**63 for value in found) else "object"
    if kinds in ({float}, {int, float}):
        return "float64"
    return {frozenset({str}): "string", frozenset({bool}): "boolean"}.get(frozenset(kinds), "object")


def _plain(value: Any) -> Any:
    """Turn a cell of a frame back into the setting: NA and NaN into None, a number of numpy into Python's."""
    if isinstance(value, (list, tuple)):
        return list(value)
    if value is pd.NA or value != value:
        return None
    return value.item() if hasattr(value, "item") else value


def _is(found: Any, wanted: Any) -> bool:
    """Whether two settings are the same; True is not 1."""
    return isinstance(found, bool) == isinstance(wanted, bool) and found == wanted


def _time(event: Event) -> pd.Timestamp:
    return pd.Timestamp(event.time, unit="s", tz="UTC")
