"""A method on a backbone, trained on random rows: what the checks of numerics and of speed measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from latent_sweep.adapters.bank import AdapterBank
    from latent_sweep.backbones.loading import Backbone
    from latent_sweep.backbones.outputs import Example
    from latent_sweep.methods.protocol import Learner, Method, TaskData


@dataclass(frozen=True)
class Workshop:
    """A method, bound to a backbone and its bank, and a folder for its files."""

    method: Method
    backbone: Backbone
    bank: AdapterBank
    folder: Path

    def task(self, rows: Sequence[Example], position: int = 0, n_tasks: int = 1) -> TaskData:
        from latent_sweep.methods.protocol import TaskData
        from latent_sweep.training.trainer import generators

        return TaskData(f"task{position}", position, n_tasks, rows, generators("doctor", position))

    def train(
        self,
        learner: Learner,
        rows: Sequence[Example],
        training: Mapping[str, Any],
        on_step: Callable[[int, int, Mapping[str, float]], None] = lambda step, steps, losses: None,
    ) -> None:
        """Train with these settings of `training:`, and write no checkpoint before the end."""
        from latent_sweep.sweep.schema import TrainingSettings
        from latent_sweep.training.loop import train_one

        settings = TrainingSettings.model_validate({"checkpoint_every": training["max_steps"] + 1, **training})
        checkpoint = self.folder / "none.safetensors"
        train_one(learner, rows, self.backbone, self.bank, settings, checkpoint, ("doctor",), on_step=on_step)


@contextmanager
def workshop(method: Method, backbone: Backbone) -> Iterator[Workshop]:
    """Bind a method to a backbone, which is as before at the end of the block."""
    from latent_sweep.adapters.bank import AdapterBank
    from latent_sweep.methods.protocol import MethodContext

    bank = AdapterBank(backbone.targets, backbone.prompt_embedding)
    try:
        with TemporaryDirectory(prefix="latent-sweep-doctor-") as folder:
            context = MethodContext(backbone, bank, Path(folder), max(1, method.rank()))
            yield Workshop(type(method)(method.settings, context), backbone, bank, Path(folder))
    finally:
        bank.remove()


def random_rows(seed: int, count: int, prompt: tuple[int, int], target: tuple[int, int]) -> list[Example]:
    """Return examples of random bytes, with the fewest and the most tokens of prompts and targets."""
    import torch

    source = torch.Generator().manual_seed(seed)

    def ids(shortest: int, longest: int) -> list[int]:
        length = int(torch.randint(shortest, longest + 1, (), generator=source))
        return torch.randint(4, 259, (length,), generator=source).tolist()

    prompts = [ids(*prompt) for _ in range(count)]
    return [{"prompt_ids": prompt, "input_ids": prompt[1:], "target_ids": ids(*target)} for prompt in prompts]
