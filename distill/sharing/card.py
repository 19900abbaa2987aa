"""The card of a shared cache: what it is, what it contains, how to read it and how to train from it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from distill.cache import LayerSpec, ShardInfo


@dataclass(frozen=True, slots=True)
class CardEntry:
    """One layer of the folder: where it is in it, what it is, and the sums over its shards."""

    folder: str
    spec: LayerSpec
    shards: int
    total: ShardInfo
    size: int


def card(entries: Sequence[CardEntry]) -> str:
    """README.md of a folder with these layers, in Markdown with the front matter that model hubs read."""
    top_k = entries[0].spec.top_k
    kinds = {(entry.spec.mode, entry.spec.cache_precision): entry for entry in reversed(entries)}
    codes = "\n".join(_loader(entry.spec, entry.folder) for _, entry in sorted(kinds.items()))
    return f"""---
license: # TO FILL IN: it follows from the licences of the texts and of the teacher
tags:
- distillation
- knowledge-distillation
---

# Next-token distributions of {", ".join(dict.fromkeys(entry.spec.teacher for entry in entries))}

What a teacher model said at every target of a text dataset, kept for training students without the teacher.

**It contains the text itself, as token ids: whoever has this folder and the tokenizer can read the dataset.**

Licence: TO FILL IN

## What is in it

{chr(10).join(_table(entries))}

- K: how many tokens are kept at each target, the likeliest ones; "full" keeps all. The mass of the others is stored.
- kept mass: the mean share of probability that the kept tokens have.
- All values are natural logs at temperature 1. NaN is "unknown".
- Teachers: {"; ".join(dict.fromkeys(_teacher(entry.spec) for entry in entries))}
- Tokenizer: ids are those of a tokenizer whose token map has the SHA-256
  {", ".join(f"`{token_map}`" for token_map in dict.fromkeys(entry.spec.token_map for entry in entries))}.

## Reading it

Every `.h5` file holds whole samples as flat arrays; any HDF5 reader opens them. From within this folder, the
distribution of the first target:

{codes}
`python run.py export --cache_folder THIS_FOLDER --layer SPLIT/NAME --out x.h5` writes a layer as one file of decoded
arrays.

## Training from it

This folder is a cache folder of distill, the program that wrote it. With a student of the same tokenizer and
these keys in a file `mine.json` of your own, `python run.py train --config mine.json`:

```json
{{"cache_folder": "THIS_FOLDER", "use_teachers": false, "student_path": "STUDENT", "save_topK": {top_k}}}
```
"""


def _table(entries: Sequence[CardEntry]) -> Iterator[str]:
    names = ("folder", "mode", "K", "of ids", "precision", "kept mass", "samples", "tokens", "targets", "bytes")
    yield f"| {' | '.join(names)} |"
    yield f"| {' | '.join('---' for _ in names)} |"
    for entry in entries:
        spec, total = entry.spec, entry.total
        mass = total.kept_mass_sum / max(total.targets, 1)
        cells = (
            *(f"`{entry.folder}`", spec.mode, f"{spec.top_k:,}", f"{spec.vocab_size:,}", spec.cache_precision),
            *(f"{mass:.4f}", f"{total.samples:,}", f"{total.tokens:,}", f"{total.targets:,}", f"{entry.size:,}"),
        )
        yield f"| {' | '.join(cells)} |"


def _teacher(spec: LayerSpec) -> str:
    return f"{spec.teacher} (weights `{spec.weights[:16]}`, computed in {spec.dtype}, quantisation {spec.quantisation})"


def _loader(spec: LayerSpec, folder: str) -> str:
    code = _HEAD.replace("FOLDER", folder) + _RECORDS[spec.mode, spec.cache_precision] + _FOOT
    return f"```python\n{code}```\n"


_HEAD = """\
import glob, h5py, numpy as np
f = h5py.File(sorted(glob.glob("FOLDER/*.h5"))[0])
tokens, target = f["tokens"][: f["token_counts"][0]], f["target_positions"][0]  # the first sample and its first target
"""
_FOOT = """\
print(tokens, target, ids, p, 1 - p.sum())
"""
_STORED = """\
p = np.exp(f["entry_logprobs"][:k].astype(float))  # what the teacher gave each of them, up to rounding
p *= (1 - np.exp(f["tail_logprobs"][0])) / p.sum()  # the mass outside them is stored
"""
_LEVELS = """\
p = np.where(levels, (levels * 2.0 ** -(COARSEST + f["steps"][0] / 4)) ** POWER, np.exp(f["floors"][0] / -8))
p /= p.sum() * (1 + np.exp(f["tail_odds"][0] / 128))  # the odds of the mass outside them are stored
"""
_ROOTS = _LEVELS.replace("COARSEST", "7").replace("POWER", "2")
_FOURTH_ROOTS = _LEVELS.replace("COARSEST", "8").replace("POWER", "4")
_ROW = 'np.argsort(f["entropies"][: f["levels"].chunks[0]], kind="stable").argmin()  # each block by rising entropy'
_RECORDS: Mapping[tuple[str, str], str] = {
    ("topk", "exact"): f"""\
k = f["entry_counts"][0]
ids = f["entry_ids"][:k]  # the kept tokens
{_STORED}""",
    ("full", "exact"): f"""\
ids = np.arange(f["entry_logprobs"].shape[1])  # a column a token
{_STORED.replace("[:k]", "[0]")}""",
    ("topk", "compact"): f"""\
k, order, row = f["entry_counts"][0], f["record_orders"][0], {_ROW}
gaps, levels = f["gaps"][:k, 0].astype(int), f["levels"][row, :k].astype(int)
for low, more in ((gaps, "gap_excess"), (levels, "level_excess")): low[low == 255] += f[more][: (low == 255).sum()]
ids = np.cumsum(f["order_deltas"][:], dtype=f["order_deltas"].dtype)[f["order_lengths"][:order].sum() :]
ids = ids[np.cumsum(gaps) - 1]  # the kept tokens
{_ROOTS}""",
    ("full", "compact"): f"""\
levels = f["levels"][{_ROW.split("  #", maxsplit=1)[0]}].astype(int)
levels[levels == 255] += f["level_excess"][: (levels == 255).sum()]
ids = np.arange(len(levels))  # a column a token
{_FOURTH_ROOTS}""",
}
"""What reads the record of the first target in a shard, by mode and precision (docs/cache-format.md)."""
