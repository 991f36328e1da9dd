"""ask and export: a model out of a sweep."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from latent_sweep.cli.command import Commands, Parser, add_command, add_json, add_tracker, print_json
from latent_sweep.errors import ConfigError
from latent_sweep.security import printable, quoted, redact

if TYPE_CHECKING:
    from latent_sweep.deploy.model import Answered, ContinualModel, Device

BEST = "best"
KINDS = ("peft", "merged", "model", "mlflow")
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
        "snapshot, which `ask` and ContinualModel.from_folder open. mlflow: the same in the sweep's run, for "
        "mlflow.pyfunc and `mlflow models serve`. A card in each folder says what it loses.",
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
        help="one of peft, merged and model, and a new or an empty folder; or mlflow",
    )
    export.add_argument("--task", help="of merged: whose adapter, where the model has one for each task")
    _add_device(export)
    add_tracker(export)


def _add_device(parser: Parser) -> None:
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help="default: what the trial says")


def _opened(folder: str, trial: str, device: Device | None) -> ContinualModel:
    """Open an exported model, or take one out of a sweep."""
    from latent_sweep.deploy.folder import is_model
    from latent_sweep.deploy.model import ContinualModel

    if "://" in folder or not is_model(folder):
        return ContinualModel.from_sweep(folder, trial, device)
    if trial != BEST:
        raise ConfigError(f"{folder} is an exported model, of one trial; found the trial {trial!r}. Leave it out")
    return ContinualModel.from_folder(folder, device)


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
    if kind != "mlflow" and (options.uri is not None or options.allow_insecure):
        given = "--allow-insecure" if options.uri is None else f"--uri {redact(options.uri)}"
        raise ConfigError(f"{given}: only --to mlflow has a tracker; leave it out with --to {kind}")
    if kind == "mlflow":
        written = _into_mlflow(options)
    else:
        written = _into_folder(options, kind, folder)
    print(printable("\n".join(written)))
    return 0


def _into_folder(options: argparse.Namespace, kind: str, folder: str) -> list[str]:
    """Write one of the kinds of folders; returns what was written."""
    from latent_sweep.deploy.merged import export_merged
    from latent_sweep.deploy.peft_folders import export_peft

    model = _opened(options.folder, options.trial, options.device)
    if kind == "model":
        written, needed = str(model.save(folder)), model.content.outside_module
        return [written, *([f"needs {needed}, which must be importable"] if needed else [])]
    if kind == "merged":
        return [str(export_merged(model, folder, options.task))]
    return list(map(str, export_peft(model, folder)))


def _into_mlflow(options: argparse.Namespace) -> list[str]:
    """Log a trial's model in the run of its sweep; returns the address that MLflow loads it from."""
    from latent_sweep.deploy.model import ContinualModel
    from latent_sweep.storage.folders import open_sweep
    from latent_sweep.tracking.mlflow import MlflowTracker, tracker_for
    from latent_sweep.tracking.mlflow_model import write_mlflow_model

    sweep = open_sweep(options.folder)
    mirror = tracker_for(options.uri or sweep.tracking_uri, sweep, options.allow_insecure)
    if not isinstance(mirror, MlflowTracker):
        raise ConfigError(f"{options.folder}: its sweep file says tracking.uri: none; name a tracker with --uri")
    write_mlflow_model(ContinualModel.from_sweep(options.folder, options.trial, options.device), sweep)
    mirror.close()
    return [mirror.model_uri()]


def _target(words: Sequence[str]) -> tuple[str, str]:
    """Read what stands behind `--to`: a kind, and a folder where one is written.

    Raises:
        ConfigError: it is no kind of export, or it has not as many folders as it takes.
    """
    kind, *folders = words
    if kind not in KINDS:
        raise ConfigError(f"--to: found {quoted(kind)}; expected one of {', '.join(KINDS)}")
    wanted = 0 if kind == "mlflow" else 1
    if len(folders) != wanted:
        told = "none: it goes into the sweep's run" if not wanted else f"one, e.g. --to {kind} exported/{kind}"
        raise ConfigError(f"--to {kind}: found {len(folders)} folders; expected {told}")
    return kind, folders[0] if folders else ""
