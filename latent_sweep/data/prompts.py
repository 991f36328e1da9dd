"""How a row becomes token ids: prompt formats, and what long prompts lose.

A prompt has three parts, `head` (instruction), `input` (the row) and `cue` (what asks for the answer):

superni         `Definition: <instruction>`, blank line, `Now complete the following example -`, newline,
                `Input: <input>`, newline, `Output: `
long_sequence   `<instruction>`, newline, `<input>`, newline, `Output: `
plain           `<instruction>`, blank line, `<input>`, newline, `Output: `

Where a task has no instruction, the last two begin with the input. Test prompts may have a paraphrase in its place, or
none at all (`benchmark.prompts.definition`), of `superni` then without `Definition:` and the blank line.
The first two are the strings of the SAPT and GainLoRA code, the same for T5 and Llama and ending in a space; `plain`
serves the package's own and users' benchmarks.

The default truncation, `keep_cue`, is the released code's but for the cue: that code cuts from the right, and every
long prompt loses the words that ask for the answer. Where a task asks behind a passage, `keep_cue` loses the question,
or its end: of T5's prompts of 512 tokens in 68 of the 100 test rows of Quoref (task002) and 185 of 1,000 of MultiRC.
`keep_ends` keeps them. It is not the default because it departs from the published protocol in what is learned: 3,372
training rows of the two benchmarks are cut, 2,024 of them of tasks without a question. Counts by task are in
benchmarks/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from latent_sweep.data.schema import BenchmarkSettings, BenchmarkSpec, Split, TaskSpec, Truncation
from latent_sweep.data.text_tokens import TextIds, tokenize
from latent_sweep.errors import DataError
from latent_sweep.security import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from latent_sweep.data.chat import Chat

Family = Literal["t5", "llama"]

CUE = "\nOutput: "
"""What asks for the answer in every format, unless the benchmark's file names another `cue`."""


@dataclass(frozen=True)
class Frame:
    """What stands around the token ids of a text."""

    ends: bool
    """Whether prompts end with EOS."""
    keeps_eos: bool
    """Whether a target that is too long keeps its EOS."""
    one_space: bool
    """Whether tokenizers make one space of a line break."""
    read_again: bool
    """Whether the released code tokenizes the text of a cut prompt's tokens again."""


FRAMES: Mapping[Family, Frame] = {
    "t5": Frame(ends=True, keeps_eos=True, one_space=True, read_again=True),
    "llama": Frame(ends=False, keeps_eos=False, one_space=False, read_again=False),
}
"""By the paper's two families: encoder-decoders take T5's, other models Llama's."""

LOST: dict[Truncation, str] = {
    "keep_cue": "the end of their input",
    "keep_ends": "the middle of their input",
    "official": "their end, the cue first",
}
"""What prompts lose that are too long."""


class PromptParts(NamedTuple):
    """The three texts of a prompt; the prompt is their concatenation."""

    head: str
    input: str
    cue: str


class PromptIds(NamedTuple):
    """The token ids of a prompt by part, special tokens included; the prompt is their concatenation."""

    head: list[int]
    input: list[int]
    cue: list[int]


def split_prompts(
    spec: BenchmarkSpec, task: TaskSpec, split: Split, settings: BenchmarkSettings, texts: Iterable[str]
) -> list[PromptParts]:
    """The prompts of a split's inputs, all of them in their order: row i reads definition i mod their number."""
    wordings = definitions(task, split, settings)
    return [prompt_parts(spec, task, text, wordings[i % len(wordings)]) for i, text in enumerate(texts)]


def definitions(task: TaskSpec, split: Split, settings: BenchmarkSettings) -> tuple[str | None, ...]:
    """The definitions that the prompts of a split take in turn; None is the task's instruction, verbatim.

    A task without an instruction has the same prompts whatever `benchmark.prompts.definition` says, and so have rows
    that are held out of the training rows and scored in the place of test rows.
    """
    wanted, of_test = settings.prompts.definition, split == "test" and settings.score_on == "test"
    if not of_test or wanted == "verbatim" or not task.instruction.strip():
        return (None,)
    return task.paraphrases if wanted == "paraphrase" else ("",)


def prompt_parts(spec: BenchmarkSpec, task: TaskSpec, text: str, definition: str | None = None) -> PromptParts:
    """The prompt of the input `text` of `task`, in the benchmark's format.

    Args:
        definition: stands in place of the task's instruction; "" leaves it out with what surrounds it.
    """
    instruction = (task.instruction if definition is None else definition).strip()
    if spec.prompt == "superni":
        told = f"Definition: {instruction}\n\n" if instruction or definition is None else ""
        head = f"{told}Now complete the following example -\nInput: "
    elif instruction:
        head = instruction + ("\n" if spec.prompt == "long_sequence" else "\n\n")
    else:
        head = ""
    return PromptParts(head, text, cue_of(spec, task))


def bare_prompt(spec: BenchmarkSpec, text: str) -> PromptParts:
    """The prompt of a text that has its instruction in it, or none: the benchmark's cue is all that is added."""
    return PromptParts("", text, cue_of(spec))


def cue_of(spec: BenchmarkSpec, task: TaskSpec | None = None) -> str:
    """Return what asks for the answer: the task's own cue, or the benchmark's, or `CUE`."""
    own = spec.cue if task is None or task.cue is None else task.cue
    return CUE if own is None else own


def in_chat(parts: PromptParts, chat: Chat) -> PromptParts:
    """The same prompt as a user's message: the template belongs to what surrounds the input."""
    head, text, cue = parts
    if chat.strips:  # what the message begins with, wherever it begins
        head = head.lstrip()
        text = text if head else text.lstrip()
        cue = cue if head or text else cue.lstrip()
    return PromptParts(chat.before + head, text, cue.rstrip() + chat.after)


def encode_prompt(
    parts: PromptParts,
    tokenizer: PreTrainedTokenizerBase,
    family: Family,
    max_source_length: int,
    truncation: Truncation = "keep_cue",
    bos: Literal["auto", "off"] = "auto",
    chat: Chat | None = None,
) -> list[int]:
    """The token ids of a prompt, at most `max_source_length` of them; see `encode_parts`."""
    head, kept, cue = encode_parts(parts, tokenizer, family, max_source_length, truncation, bos, chat)
    return head + kept + cue


def encode_parts(
    parts: PromptParts,
    tokenizer: PreTrainedTokenizerBase,
    family: Family,
    max_source_length: int,
    truncation: Truncation = "keep_cue",
    bos: Literal["auto", "off"] = "auto",
    chat: Chat | None = None,
) -> PromptIds:
    """The token ids of a prompt by part, at most `max_source_length` in all.

    The whole prompt is tokenized at once, so what fits is exactly what the tokenizer makes of the string, and what
    does not fit only loses tokens: the last ones of the input (`keep_cue`), its middle ones (`keep_ends`: as many stay
    of its beginning as of its end, or one more), or the last ones of the prompt (`official`: of T5's prompts the text
    that is left is tokenized again, as in the released code, and parts keep their numbers of tokens). A token that
    reaches into the input from the head belongs to the input, one that reaches into the cue to the cue. Prompts begin
    with BOS where the tokenizer itself adds one and `bos` is `auto`: Llama's does, T5's has none. T5 prompts end with
    EOS, Llama prompts do not. Inside a chat template they have the special tokens that it writes, and no others. Text
    that spells a special token stays text (`text_tokens.py`).

    Raises:
        DataError: Head and cue leave no room for the input (not under `official`).
    """
    parts, (ids, offsets) = _tokenized(parts, tokenizer, chat)
    input_start, input_end = len(parts.head), len(parts.head) + len(parts.input)
    n_head = sum(end <= input_start for _, end in offsets)
    n_cue = sum(end > input_end for _, end in offsets[n_head:])
    head, kept, cue = ids[:n_head], ids[n_head : len(ids) - n_cue], ids[len(ids) - n_cue :]

    first = [tokenizer.bos_token_id] if chat is None and bos == "auto" and _adds_bos(tokenizer) else []
    last = [tokenizer.eos_token_id] if chat is None and FRAMES[family].ends else []
    room = max_source_length - len(first) - len(last)
    if len(ids) > room and truncation == "official":
        if FRAMES[family].read_again and chat is None:  # which keeps as many tokens as with EOS, before it adds that
            ids = _tokenized_again(ids[:max_source_length], tokenizer)
        ids, n_both = ids[:room], n_head + len(kept)
        head, kept, cue = ids[:n_head], ids[n_head:n_both], ids[n_both:]
    elif len(ids) > room:
        kept = _cut(kept, _input_room(room - n_head - n_cue, max_source_length, parts), truncation)
    return PromptIds(first + head, kept, cue + last)


def _tokenized_again(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens of the text of these tokens, as the released collator makes them of a cut prompt for T5.

    Special tokens are lost, the unknown one among them, and blanks before punctuation, as transformers 4 cleans up what
    it decodes.
    """
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for spaced in CLEANED_UP:
        text = text.replace(spaced, spaced.strip())
    found: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found


CLEANED_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""What loses the blanks around it, one after another."""


def is_cut(
    parts: PromptParts,
    tokenizer: PreTrainedTokenizerBase,
    family: Family,
    max_source_length: int,
    bos: Literal["auto", "off"] = "auto",
    chat: Chat | None = None,
) -> bool:
    """Whether a prompt has more than `max_source_length` tokens, so that `encode_parts` leaves some out."""
    return len(encode_prompt(parts, tokenizer, family, sys.maxsize, bos=bos, chat=chat)) > max_source_length


def encode_target(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    family: Family,
    max_target_length: int,
    chat: Chat | None = None,
) -> list[int]:
    """The token ids of a target and what ends it, EOS or a chat template's end, at most `max_target_length` in all.

    As in the released code, a target that is too long keeps its EOS for T5 and loses it for Llama.
    """
    ids = tokenize(tokenizer, text).ids
    room = max_target_length - 1 if FRAMES[family].keeps_eos else max_target_length
    end = tokenizer.eos_token_id if chat is None else chat.end
    return [*ids[:room], end][:max_target_length]


def _tokenized(
    parts: PromptParts, tokenizer: PreTrainedTokenizerBase, chat: Chat | None
) -> tuple[PromptParts, TextIds]:
    """Return a prompt's texts, inside the chat template if there is one, with their token ids."""
    if chat is None:
        return parts, tokenize(tokenizer, "".join(parts))
    whole = in_chat(parts, chat)
    message = "".join(whole)[len(chat.before) :].removesuffix(chat.after)
    return whole, tokenize(tokenizer, message, (chat.before, chat.after))


def _cut(ids: list[int], room: int, truncation: Truncation) -> list[int]:
    """Return `room` tokens of an input that has more."""
    of_the_end = room // 2 if truncation == "keep_ends" else 0
    return ids[: room - of_the_end] + ids[len(ids) - of_the_end :]


def _input_room(room: int, max_source_length: int, parts: PromptParts) -> int:
    if room < 1:
        raise DataError(
            f"benchmark.max_source_length: the instruction that begins with {quoted(parts.head, 40)} and the cue take "
            f"all of its {max_source_length} tokens; expected room for the input. "
            f"Raise it to {max_source_length + 1 - room} or more, or shorten the instruction."
        )
    return room


def _adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
