"""The table of what truncations cost, on one task of the public data."""

import os
from pathlib import Path

import pytest
from tools.truncation import counts

from latent_sweep.data.schema import load_benchmark

TOKENIZER = Path(os.environ.get("LATENT_SWEEP_DATA", "nowhere"), "t5_tokenizer")


@pytest.mark.skipif(not TOKENIZER.exists(), reason="LATENT_SWEEP_DATA does not name the data with T5's tokenizer")
def test_quorefs_questions_survive_where_both_ends_stay():
    from transformers import AutoTokenizer

    spec = load_benchmark("superni")
    task = next(task for task in spec.tasks if task.name == "task002")
    rows, cut, lost = counts(spec, task, "test", AutoTokenizer.from_pretrained(TOKENIZER), 512)
    assert (rows, cut) == (100, 68)
    assert lost == {"keep_cue": 68, "keep_ends": 0, "official": 65}
