"""ask and export: a model out of a sweep."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from latent_sweep.commands.command import Commands, Parser, add_command, add_json, print_json
from latent_sweep.errors import ConfigError
from latent_sweep.security import printable, quoted

if TYPE_CHECKING:
    from latent_sweep.deploy.model import Answered, ContinualModel

BEST = "best"
KINDS = ("peft", "merged", "model")
"""What `--to` writes."""


def add(commands: Commands) -> None:
    """Add the commands of this file."""
    ask = add_command(
        commands,
        "ask",
        _ask,
        "ask the model that a sweep has found, or one that was exported",
        'ask runs/lambda "The soup was cold." --task mood',
        "Print the answer, the task that the text was routed to, the weights over tasks, and whether it belongs to a "
        "learned task at all. A sweep's best finished trial answers, or the one that --trial names.",
    )
    ask.add_argument("folder", help="a sweep's folder or its URI, e.g. runs/lambda, or the folder of an exported model")
    ask.add_argument("texts", nargs="+", metavar="TEXT", help="what is asked")
    ask.add_argument(
        "--task", help="put this task's instruction before the text, as in training; routing still decides who answers"
    )
    ask.add_argument("--trial", default=BEST, help="of a sweep: as for export; default: best")
    _add_device(ask)
    add_json(ask)

    export = add_command(
        commands,
        "export",
        _export,
        "write the model that a trial has become for others to load: peft, merged weights, or a folder of our own",
        "export runs/lambda best --to peft adapters/lambda",
        "peft: a LoRA adapter for each task that peft, vLLM and TGI load, or one of all that are summed. merged: a "
        "folder of transformers with the adapter added to the weights. model: our own folder with the router and every "
        "snapshot, which `ask` and ContinualModel.from_folder open. The card in each says what it loses.",
    )
    export.add_argument(
        "folder", help="a sweep's folder or its URI, e.g. runs/lambda, or the folder of an exported model"
    )
    export.add_argument(
        "trial",
        nargs="?",
        default=BEST,
        help="best (the finished trial with the highest AP; the default), an id, the beginning of one, or a trial's "
        "name in tables, as 'lambda=0.1 seed=0', or a part of it that no other has",
    )
    export.add_argument(
        "--to",
        required=True,
        nargs="+",
        metavar=("KIND", "FOLDER"),
        help="one of peft, merged and model, and a new or an empty folder",
    )
    export.add_argument("--task", help="of merged: whose adapter, where the model has one for each task")
    _add_device(export)


def _add_device(parser: Parser) -> None:
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help="default: what the trial says")


def _opened(folder: str, trial: str, device: str | None) -> ContinualModel:
    """Open an exported model, or take one out of a sweep."""
    from latent_sweep.deploy.folder import is_model
    from latent_sweep.deploy.model import ContinualModel

    if "://" in folder or not is_model(folder):
        return ContinualModel.from_sweep(folder, trial, device)  # type: ignore[arg-type]
    if trial != BEST:
        raise ConfigError(f"{folder} is an exported model, of one trial; found the trial {trial!r}. Leave it out")
    return ContinualModel.from_folder(folder, device)  # type: ignore[arg-type]


def _ask(options: argparse.Namespace) -> int:
    model = _opened(options.folder, options.trial, options.device)
    answers = model.answer(options.texts, options.task)
    if options.json:
        print_json([answered.record() for answered in answers])
    else:
        print(printable("\n\n".join("\n".join(_lines(answered)) for answered in answers)))
    return 0


def _lines(answered: Answered) -> list[str]:
    weights = "  ".join(f"{name} {weight:.3g}" for name, weight in answered.weights.items())
    lines = [answered.answer, f"  weights   {weights}"]
    if answered.task is not None:
        lines.append(f"  routed to {answered.task}")
    if answered.novelty is not None:
        belongs = {True: "", False: ": it belongs to no learned task", None: ""}[answered.known]
        lines.append(f"  novelty   {answered.novelty:.4g}{belongs}")
    return lines


def _export(options: argparse.Namespace) -> int:
    kind, folder = _target(options.to)
    if options.task is not None and kind != "merged":
        raise ConfigError(f"--task {options.task}: only --to merged takes one adapter; leave it out with --to {kind}")
    model = _opened(options.folder, options.trial, options.device)
    if kind == "model":
        written = [model.save(folder)]
    elif kind == "merged":
        from latent_sweep.deploy.merged import export_merged

        written = [export_merged(model, folder, options.task)]
    else:
        from latent_sweep.deploy.peft_folders import export_peft

        written = export_peft(model, folder)
    print(printable("\n".join(map(str, written))))
    return 0


def _target(words: Sequence[str]) -> tuple[str, str]:
    """Read what stands behind `--to`.

    Raises:
        ConfigError: it is no kind of export, or not one folder.
    """
    kind, *folders = words
    if kind not in KINDS:
        raise ConfigError(f"--to: found {quoted(kind)}; expected one of {', '.join(KINDS)}, and a folder")
    if len(folders) != 1:
        raise ConfigError(f"--to {kind}: found {len(folders)} folders; expected one, e.g. --to {kind} exported/{kind}")
    return kind, folders[0]
