"""Loading a model folder's tokenizer, and whether two tokenizers fit.

Teacher and student fit if every id below the crop stands for the same token in both. Which ids are BOS, EOS or padding,
ids above the crop, and heads that are wider than the tokenizer may differ: they are masked before any softmax.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from distill.errors import InputError
from distill.files import read_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DIGEST_TAG = b"distill-token-map-1\0"


def load_tokenizer(folder: Path, trust_remote_code: bool) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder; nothing is ever downloaded.

    Raises InputError if there is none, if it doesn't load, or if it can't tell where in the text a token stands.
    """
    from transformers import AutoTokenizer

    if not folder.is_dir():
        raise InputError(f"{folder}: no such model folder")
    # The library raises a bare Exception for JSON that isn't a tokenizer; this is what such files lack.
    path = folder / "tokenizer.json"
    if path.exists() and not isinstance(read_object(path).get("model"), dict):
        raise InputError(f"{path}: not a tokenizer (it has no model); is the download complete?")
    packed = [] if (path.exists() or (folder / "tokenizer_config.json").exists()) else sorted(folder.glob("*.gguf"))
    # A lone GGUF file brings its tokenizer along.
    where = {"gguf_file": packed[0].name} if packed else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=trust_remote_code, **where
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InputError(f"{folder}: its tokenizer can't be loaded ({reason}); is tokenizer.json whole?") from error
    if not tokenizer.is_fast:
        raise InputError(f"{folder}: its tokenizer has no offsets; save it as a fast one (tokenizer.json)")
    loaded: PreTrainedTokenizerBase = tokenizer
    return loaded


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Write the tokenizer's files into an existing folder; OSError for whatever the disk says."""
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:
        # The tokenizers library has no class for it, and tells of it in Rust's words.
        told = re.search(r"\(os error (\d+)\)", str(error))
        if type(error) is not Exception or told is None:
            raise
        raise OSError(int(told[1]), os.strerror(int(told[1]))) from error


def token_map(tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """Every id that the tokenizer knows and its token, added tokens included, by rising id."""
    pairs = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return dict(pairs)


def token_map_digest(tokenizer: "PreTrainedTokenizerBase", crop: int) -> str:
    """sha256 (hex) over the ids below ``crop`` and their tokens: equal for tokenizers that fit."""
    digest = hashlib.sha256(_DIGEST_TAG)
    for token_id, token in token_map(tokenizer).items():
        if token_id < crop:
            name = token.encode("utf-8")
            digest.update(token_id.to_bytes(8, "little") + len(name).to_bytes(8, "little") + name)
    return digest.hexdigest()


def real_vocab_size(tokenizer: "PreTrainedTokenizerBase") -> int:
    """The highest id that the tokenizer knows, plus one; a model's head may be wider."""
    return max(tokenizer.get_vocab().values()) + 1


def fit_vocabularies(
    teacher_tokenizer: "PreTrainedTokenizerBase",
    student_tokenizer: "PreTrainedTokenizerBase",
    crop: int | None,
    name: str = "",
) -> int:
    """How many ids, counted from 0, teacher and student share: ``crop``, or the smaller real vocabulary for ``None``.

    A crop beyond both vocabularies is cut to them: the rows that heads have up there stand for nothing. ``name`` is the
    teacher's, for the message.

    Raises InputError with the first id below the crop that isn't the same token in both (absent in both is the same).
    """
    teacher, student = token_map(teacher_tokenizer), token_map(student_tokenizer)
    sizes = 1 + max(teacher), 1 + max(student)
    wanted = min(sizes) if crop is None else min(crop, max(sizes))
    for token_id in range(wanted):
        theirs, ours = teacher.get(token_id), student.get(token_id)
        if theirs != ours:
            raise InputError(
                f"teacher{name and ' '}{name} and student don't fit: id {token_id} is {_named(theirs)} for the teacher "
                f"and {_named(ours)} for the student; take models of one vocabulary, or set crop_distr_to_size to "
                f"{token_id} or less"
            )
    return wanted


def _named(token: str | None) -> str:
    return "no token" if token is None else repr(token)


def is_completion_model(tokenizer: "PreTrainedTokenizerBase", said: bool | None) -> bool:
    """Whether a model continues plain text: what its ``pipeline_config.json`` ``said``, else if it has no template."""
    return not tokenizer.chat_template if said is None else said
