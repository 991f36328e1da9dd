"""A model as MLflow has one: `mlflow.pyfunc` loads it, `mlflow models serve` serves it. Nothing in it is a pickle.

It lies in the sweep's folder, where it is written once for a trial, and the mirror brings it into the sweep's run like
any other file: `runs:/<run id>/model`. MLflow loads it through this module: a copy of the package goes along with it,
and of the code of a method from outside.
"""

from __future__ import annotations

import logging
import re
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latent_sweep.errors import StoreError
from latent_sweep.plugins import code_places
from latent_sweep.storage.folders import SweepFolder
from latent_sweep.storage.journal import stages
from latent_sweep.storage.versions import declared
from latent_sweep.tracking.contents import MODEL_FOLDER

if TYPE_CHECKING:
    import pandas as pd

    from latent_sweep.deploy.model import Answered, ContinualModel

NOT_NEEDED = ("ray", "deepspeed")
"""Packages of ours that answering never asks for."""

DATA = "continual_model"
"""Our own folder within MLflow's."""


def write_mlflow_model(model: ContinualModel, sweep: SweepFolder) -> Path:
    """Write a model into its sweep's folder as MLflow has it; an earlier one is replaced. Returns the folder.

    Raises:
        StoreError: it cannot be written.
    """
    folder = sweep.path / MODEL_FOLDER
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's, of type hints of its own
        import mlflow.pyfunc

        logging.getLogger("mlflow").setLevel(logging.ERROR)  # it would have an example of what is asked
        made = Path(place) / MODEL_FOLDER
        mlflow.pyfunc.save_model(
            made,
            loader_module=__name__,
            data_path=str(model.save(Path(place) / DATA)),
            code_paths=_code(model),
            pip_requirements=requirements(),
            signature=_signature(),
        )
        files = {path.relative_to(made): path for path in sorted(made.rglob("*")) if path.is_file()}
        for path in _files(folder):
            if path.relative_to(folder) not in files:
                sweep.storage.remove(path)
        for name, path in files.items():
            sweep.storage.write(folder / name, path.read_bytes())
    return folder


def log_best(sweep: SweepFolder) -> None:
    """Have the best trial's model in the sweep's folder, and none that was the best before.

    Raises:
        LatentSweepError: no trial has finished, or the model cannot be made of what it has left behind.
    """
    from latent_sweep.deploy.extraction import find_trial, origin_of
    from latent_sweep.deploy.folder import opened
    from latent_sweep.deploy.model import ContinualModel

    with suppress(StoreError):  # there is none, or none that is whole
        content, _ = opened(sweep.path / MODEL_FOLDER / "data" / DATA)
        best = find_trial(sweep)
        lineages = [task.snapshot.lineage for task in content.learned]
        same = lineages == [event["lineage"] for event in stages(best.events())]
        if same and content.origin == origin_of(sweep, best):  # else its card would tell what was scored before
            return
    model = ContinualModel.from_sweep(sweep.path)
    try:
        write_mlflow_model(model, sweep)
    finally:
        model.close()


def requirements() -> list[str]:
    """What pip installs for a model to answer: this package's own requirements, with the versions it allows."""
    found = [text for text in declared().requirements if ";" not in text]
    return sorted(text for text in found if re.split(r"[^\w.-]", text)[0] not in NOT_NEEDED)


def _code(model: ContinualModel) -> list[str]:
    """Return the folder of this package, and where the code of a method from outside lies."""
    name = model.trial.settings.method.name
    outside = code_places(name) if model.content.outside_module is not None else []
    return [str(place) for place in (Path(__file__).parents[1], *outside)]


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _signature() -> Any:
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, Schema

    asked = [ColSpec(DataType.string, "text"), ColSpec(DataType.string, "task", required=False)]
    told = [("answer", DataType.string), ("task", DataType.string)]
    told += [("novelty", DataType.double), ("known", DataType.boolean)]
    answered = [ColSpec(kind, name, required=name == "answer") for name, kind in told]
    return ModelSignature(inputs=Schema(asked), outputs=Schema(answered))


# --- loading ---------------------------------------------------------------------------------------------------------


def _load_pyfunc(data_path: str) -> FrameModel:
    """Open a model that MLflow has fetched: the name is MLflow's."""
    from latent_sweep.deploy.model import ContinualModel

    return FrameModel(ContinualModel.from_folder(data_path))


class FrameModel:
    """Answers data frames: `text`, and optionally `task`, become `answer`, `task`, `novelty` and `known`."""

    def __init__(self, model: ContinualModel):
        self.model = model

    def predict(self, frame: pd.DataFrame, params: Mapping[str, Any] | None = None) -> pd.DataFrame:
        """Answer every row of a frame, those of one task in one call.

        Args:
            frame: its column `task` may be missing, or hold nothing in some rows: then a text is the whole prompt.
            params: MLflow's; there are none.

        Raises:
            ConfigError: a task is none that was learned.
        """
        import pandas as pd

        texts = frame["text"].tolist()
        tasks = [task or None if isinstance(task, str) else None for task in frame.get("task", [None] * len(texts))]
        answers: dict[int, Answered] = {}
        for task in dict.fromkeys(tasks):
            rows = [row for row, own in enumerate(tasks) if own == task]
            answers |= dict(zip(rows, self.model.answer([texts[row] for row in rows], task), strict=True))
        told = [answers[row] for row in range(len(texts))]
        columns = ("answer", "task", "novelty", "known")
        # of type object, where None stays None: a server writes what a row does not tell as null
        return pd.DataFrame(
            {name: pd.Series([getattr(one, name) for one in told], dtype=object) for name in columns}
        ).set_axis(frame.index)
