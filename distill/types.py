"""Frozen values that cross a module or process boundary, and the identity of a sample.

Shapes use: B samples in a batch, L padded length, N targets, K entries a record, E entries in all, V vocabulary.
"""

import hashlib
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Role = Literal["system", "user", "assistant", "completion"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "completion")

IntArray = npt.NDArray[np.integer]
FloatArray = npt.NDArray[np.float32]

_KEY_TAG = b"distill-sample-1\0"


@dataclass(frozen=True, slots=True)
class Turn:
    """One message of a conversation."""

    role: Role
    content: str


@dataclass(frozen=True, slots=True)
class Sample:
    """One item of the text dataset: either ``turns`` (a conversation) or ``text`` (a completion).

    ``where`` is ``file:line`` and goes into every message about this sample.
    """

    where: str
    turns: tuple[Turn, ...] = ()
    text: str | None = None

    @property
    def is_completion(self) -> bool:
        """Whether this is plain text and not a conversation."""
        return self.text is not None


@dataclass(frozen=True, slots=True)
class Span:
    """Half-open range [start, end) of content tokens in a sample's token_ids."""

    start: int
    end: int
    role: Role


@dataclass(frozen=True, slots=True, eq=False)
class TokenizedSample:
    """A sample as the models see it.

    token_ids: int32 [L]. targets: int32 [R], ascending token positions >= 1 that are to be predicted.
    """

    where: str
    is_completion: bool
    token_ids: npt.NDArray[np.int32]
    spans: tuple[Span, ...]
    targets: npt.NDArray[np.int32]
    key: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Records:
    """Distributions of R targets, ragged and flat, as they are read from and written to the cache.

    entry_counts: int64 [R], each at least 1. entry_ids: int64 [E], each record's likeliest first, the others in any
    order. entry_logprobs: float32 [E], natural logs at temperature 1, all finite. tail_logprobs: float32 [R], log of
    the mass outside the entries (-inf if there is none). label_logprobs: float32 [R], of the token that really
    follows; NaN if unknown. entropies: float32 [R], nats, of the whole distribution; NaN if unknown.
    """

    entry_counts: npt.NDArray[np.int64]
    entry_ids: npt.NDArray[np.int64]
    entry_logprobs: FloatArray
    tail_logprobs: FloatArray
    label_logprobs: FloatArray
    entropies: FloatArray

    def __len__(self) -> int:
        return len(self.entry_counts)


def sample_key(token_ids: IntArray) -> bytes:
    """The sample's identity in the cache: 32 bytes, sha256 over a format tag, the length and the ids."""
    ids = np.ascontiguousarray(token_ids, dtype="<u4")
    digest = hashlib.sha256(_KEY_TAG)
    digest.update(len(ids).to_bytes(8, "little"))
    digest.update(ids.tobytes())
    return digest.digest()
