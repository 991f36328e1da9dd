"""A report as one HTML file that needs nothing beside it: offline, in light and dark, on a telephone and on paper."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

from markupsafe import Markup
from matplotlib.text import Text

from latent_sweep.labels import format_value
from latent_sweep.monitor.log_lines import time_spent
from latent_sweep.report.embedding_map import embedding_map
from latent_sweep.report.figures import Picture
from latent_sweep.report.interference_pictures import interference_pictures
from latent_sweep.report.pictures import sweep_pictures
from latent_sweep.report.router_pictures import router_pictures
from latent_sweep.report.tables import Section, counts, has_held_out, joint_sections, sections, without_comparison
from latent_sweep.results.definition import trial_name
from latent_sweep.results.flips import Flip, flips
from latent_sweep.results.summaries import Configuration, Summary, summarize_all
from latent_sweep.routing.gaussian import ROUTED
from latent_sweep.security import printable
from latent_sweep.storage.folders import SweepFolder, TrialFolder
from latent_sweep.sweep.plan import values_read


@dataclass(frozen=True)
class Part:
    """What a page tells of one sweep."""

    name: str
    counts: str
    facts: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    pictures: Sequence[tuple[Picture, Markup]]
    """Each with its image."""
    not_drawn: Sequence[str]
    """Why other pictures are not there."""
    flips: Sequence[tuple[str, Sequence[Flip]]]
    """Of trials, by what they are called: rows whose answers changed sides."""

    @property
    def contents(self) -> list[tuple[str, str]]:
        """The anchor and title of each of its headings."""
        found = [(one.name, "Results" if one.name == "main" else one.title) for one in self.sections]
        found += [("pictures", "Pictures")] * bool(self.pictures)
        found += [(f"flips-{i}", f"Answers: {name}") for i, (name, _) in enumerate(self.flips, start=1)]
        return [(f"{self.name}-{anchor}", title) for anchor, title in found]


def render_page(sweeps: Sequence[SweepFolder], over: Sequence[str] = (), baseline: Sequence[str] = ()) -> str:
    """Write the report of one or several sweeps as HTML; several are compared first.

    Args:
        over: axes that repeat a configuration as the seed does.
        baseline: settings of the configuration that the others of each sweep are compared with.

    Raises:
        ConfigError: a sweep has no such axis or configuration.
        StoreError: a sweep or a journal is missing or damaged.
    """
    from jinja2 import Environment

    summaries = summarize_all(sweeps, over, baseline)
    alone = len(sweeps) == 1
    parts = [_part(sweep, summary, alone) for sweep, summary in zip(sweeps, summaries, strict=True)]
    source = resources.files("latent_sweep.report").joinpath("page.html.j2").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    compared = [] if alone else joint_sections(summaries)
    return printable(template.render(parts=parts, compared=compared))


def all_pictures(sweep: SweepFolder, summary: Summary) -> tuple[list[Picture], list[str]]:
    """Draw every picture for which a sweep has the data.

    Returns:
        The pictures, and a line for each that its trials should have and that could not be drawn: what it shows, of
        which trial, and why.
    """
    found, not_drawn = sweep_pictures(summary)
    for draw in (router_pictures, interference_pictures):
        pictures, gaps = draw(sweep)
        found += pictures
        not_drawn += gaps
    if (best := _trial_of(sweep, summary, max)) is not None:
        embeddings = embedding_map(sweep, best)
        if not isinstance(embeddings, str):
            found += embeddings
        elif best.params.get("router.combine") in ROUTED:  # others need not have pooled anything
            not_drawn.append(f"the map of embeddings of {embeddings}")
    return found, not_drawn


def _trial_of(
    sweep: SweepFolder, summary: Summary, choose: Callable[..., tuple[float, Configuration]]
) -> TrialFolder | None:
    """The first finished trial of the configuration that has the highest AP (`max`) or the lowest (`min`).

    What a scheduler has left of a configuration is taken where there is nothing else.
    """
    scores = [(one.average_performance.mean, one) for one in summary.configurations if one.average_performance]
    if not scores:
        return None
    _, chosen = choose([pair for pair in scores if not pair[1].n_stopped] or scores, key=lambda pair: pair[0])
    return next(trial for trial in sweep if trial.trial_id == chosen.finished_ids[0])


def _part(sweep: SweepFolder, summary: Summary, alone: bool) -> Part:
    """Draw a sweep; its differences from a baseline have a table here where it is `alone` on the page."""
    drawn, not_drawn = all_pictures(sweep, summary)
    pictures = [(picture, _image(picture)) for picture in drawn]
    facts = _facts(sweep, summary)
    found = sections(summary if alone else without_comparison(summary))
    return Part(summary.name, counts(summary), facts, found, pictures, not_drawn, _worth_reading(sweep, summary))


def _worth_reading(sweep: SweepFolder, summary: Summary) -> list[tuple[str, Sequence[Flip]]]:
    """Answers of the trials with the highest and the lowest AP that changed sides."""
    trials: dict[str, tuple[str, TrialFolder]] = {}
    for which, choose in (("highest AP", max), ("lowest AP", min)):
        if (trial := _trial_of(sweep, summary, choose)) is not None:
            trials.setdefault(
                trial.trial_id, (f"{trial_name(sweep, trial)}, of the configuration with the {which}", trial)
            )
    found = [(name, flips(sweep, trial)) for name, trial in trials.values()]
    return [(name, rows) for name, rows in found if rows]


_SHOWN = (
    *("method.name", "backbone.name", "backbone.dtype", "benchmark.name", "benchmark.order", "training.epochs"),
    *("benchmark.tasks", "benchmark.train_per_task", "benchmark.test_per_task", "benchmark.score_on"),
)


def _facts(sweep: SweepFolder, summary: Summary) -> list[tuple[str, str]]:
    """What was run, what varies, and what it took."""
    trials = list(sweep)
    read = [values_read(trial) for trial in trials]
    values = {axis: dict.fromkeys(format_value(each[axis]) for each in read) for axis in sweep.axes}
    varies = [f"{axis}: {', '.join(found)}" for axis, found in values.items()]
    told = [path for path in _SHOWN if path not in sweep.axes]
    if has_held_out(summary):
        told = [path for path in told if path != "benchmark.test_per_task"]  # no test row is read
    found = {path: dict.fromkeys(format_value(trial.params.get(path)) for trial in trials) for path in told}
    fixed = {path: next(iter(each)) for path, each in found.items() if len(each) == 1 and each.keys() != {"-"}}
    follows = [f"{path}: {', '.join(each)}" for path, each in found.items() if len(each) > 1]
    cost = summary.cost
    facts = [("varies", "; ".join(varies) or "nothing")]
    facts += [("the same for all", "; ".join(f"{path} {value}" for path, value in fixed.items()))]
    facts += [("follows from these", "; ".join(follows))]
    took = f"{time_spent(cost.seconds_learning)} learning, {time_spent(cost.seconds_answering)} answering"
    facts += [("took", f"{took}, all trials together")]
    facts += [("stages", f"{cost.learned} learned, {cost.reused} shared with other trials or there already")]
    if cost.generated_share is not None:
        generated = f"{100 * cost.generated_share:.0f} % generated"
        facts += [("answers", f"{generated}; the others were known already")]
    return [(name, text) for name, text in facts if text]


def _image(picture: Picture) -> Markup:
    """The picture as an image element with its data inside, at a size at which its smallest letters can be read."""
    content = io.BytesIO()
    picture.figure.savefig(content, format="svg", metadata={"Date": None})
    data = base64.b64encode(content.getvalue()).decode()
    width = round(96 * picture.figure.get_figwidth() * max(1.0, _SMALLEST_LETTERS / _smallest_letters(picture)))
    return Markup('<img src="data:image/svg+xml;base64,{}" width="{}" alt="{}">').format(data, width, picture.title)


_SMALLEST_LETTERS = 7.0
"""Points that letters of pictures have on a page, at least."""


def _smallest_letters(picture: Picture) -> float:
    """The size of the smallest letters of a picture, in points."""
    sizes = [float(text.get_fontsize()) for text in picture.figure.findobj(Text) if text.get_text().strip()]
    return min(sizes, default=_SMALLEST_LETTERS)
