"""What is said of a model for people: the README.md of every folder that one is written into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from latent_sweep.backbones.registry import EMBEDDED, BackboneSettings, registered_backbone
from latent_sweep.deploy.content import NOVELTY_QUANTILE, ModelContent
from latent_sweep.methods.protocol import Combination
from latent_sweep.storage import versions
from latent_sweep.training.context import Context

LICENCES: Mapping[str, str] = {
    EMBEDDED: "apache-2.0",
    "t5-large": "apache-2.0",
    "t5-3b": "apache-2.0",
    "tinyllama-1.1b": "apache-2.0",
    "llama-2-7b": "llama2",
    "llama-2-13b": "llama2",
    "llama-3-8b": "llama3",
}
"""Of the published weights of backbones that are known by name, as the hub calls them."""


ANSWERING: Mapping[Combination, str] = {
    "sum": "an adapter for each task, which answer together",
    "last": "the newest snapshot, which answers every text",
    "gates": "an adapter for each task, weighed for each text",
    **dict.fromkeys(("soft", "hard", "ngram", "oracle"), "an adapter for each task, chosen for each text"),
}
"""What answers beside the backbone, by the way of mixing."""


def base_model(settings: BackboneSettings) -> str:
    """Return where the backbone's weights come from: a hub's name or a folder, or a name that only we know."""
    known = registered_backbone(settings.name)
    if known is None or known.source == "config" or settings.name == EMBEDDED:
        return settings.name
    return known.source


def front_matter(content: ModelContent, library: str) -> list[str]:
    """The lines that a hub reads, between two lines of dashes."""
    settings = content.trial.settings.backbone
    return [
        "---",
        f"base_model: {base_model(settings)}",
        f"license: {LICENCES.get(settings.name, 'unknown')}",
        f"library_name: {library}",
        "tags: [continual-learning, latent_sweep]",
        "---",
    ]


def prompts_end(context: Context) -> str:
    """Say how a prompt ends, and an answer, where a chat template puts texts around them."""
    chat = context.chat
    if chat is None:
        return "Prompts end in `Output: `, as in training."
    end = context.backbone.tokenizer.convert_ids_to_tokens(chat.end)
    return (
        "Prompts end in `Output:` and stand in the backbone's chat template, as in training: the message of a user, by "
        f"`apply_chat_template` with `add_generation_prompt`; an answer ends at `{end}`."
    )


def provenance(content: ModelContent, context: Context) -> list[str]:
    """The sections that every card has: base model, tasks with scores, and what the model was made from and with."""
    settings, origin = content.trial.settings, content.origin
    backbone = settings.backbone
    revision = f" at revision {backbone.revision}" if backbone.revision else ""
    note = ", quantised to Q4_1 by its package and made floats again: not the published weights"
    lines = [
        "## Base model",
        "",
        f"{base_model(backbone)}{revision}{note if backbone.name == EMBEDDED else ''}, in {backbone.dtype}. "
        f"Licence of its weights: {LICENCES.get(backbone.name, 'unknown')}. Digest of its embedding table and adapted "
        f"projections: {context.backbone.weights_digest}; of its tokenizer: {context.backbone.tokenizer_digest}.",
        "",
        "## Tasks",
        "",
        "In the order of learning. Scores are those of the sweep after its last task, in per cent.",
        "",
        "| task | metric | score | snapshot |",
        "|---|---|---|---|",
    ]
    for task in content.learned:
        score = origin.scores.get(task.spec.name)
        shown = "learned since" if score is None else f"{100 * score:.2f}"
        lines.append(f"| {task.spec.name} | {task.spec.metric} | {shown} | {task.snapshot.lineage} |")
    measures = [f"{name} {100 * origin.measures[name]:.2f}" for name in ("AP", "FM") if name in origin.measures]
    return [
        *lines,
        "",
        "## Where it comes from",
        "",
        f"Sweep {origin.sweep}, trial {origin.name} ({origin.trial_id}): {', '.join(measures)} (per cent). Method "
        f"{settings.method.name}, snapshots mixed by `{settings.router.combine}`, seed {settings.seed}, benchmark "
        f"{content.trial.spec.name} (version {content.trial.spec.version}). Learned with "
        f"{_told(content.learned[-1].snapshot.facts['computed_with'])}; written with {_told(versions.installed())}.",
        "",
    ]


def model_card(content: ModelContent, context: Context) -> str:
    """The card of a model in our own folder."""
    lines = [
        *front_matter(content, "latent_sweep"),
        "",
        f"# {content.trial.settings.method.name} after {len(content.learned)} tasks",
        "",
        f"A model of latent_sweep: a frozen backbone with {ANSWERING[content.trial.settings.router.combine]}.",
        "",
        "```python",
        "from latent_sweep import ContinualModel",
        "",
        'model = ContinualModel.from_folder("this/folder")',
        f'model.answer(["..."], task="{content.tasks[-1]}")',
        "```",
        "",
        f"The backbone is not in it and must be at hand. {_rows_in_it(content)}",
        *_needs(content),
        *_limits(content),
        "",
        *provenance(content, context),
    ]
    return "\n".join(lines)


def _rows_in_it(content: ModelContent) -> str:
    # a method from outside may keep whatever it likes
    if content.trial.method().keeps_rows or content.outside_module is not None:
        return "What its method keeps of tasks' rows is in its snapshots."
    return "No rows of tasks are in it."


def _needs(content: ModelContent) -> Sequence[str]:
    if content.outside_module is None:
        return ()
    return [
        "",
        f"It needs `{content.outside_module}`, which must be importable where it is opened: the method is from outside "
        "of latent_sweep, and its code is not in this folder.",
    ]


def _limits(content: ModelContent) -> Sequence[str]:
    limits = {task.spec.name: task.farthest for task in content.learned if task.farthest is not None}
    if not limits:
        return ()
    told = ", ".join(f"{name} {limit:.4g}" for name, limit in limits.items())
    return [
        "",
        "A text belongs to no learned task where its Mahalanobis distance from all of them is above that of the task "
        f"that it was routed to, the {NOVELTY_QUANTILE:g} quantile of held-out rows: {told}.",
    ]


def _told(facts: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())
