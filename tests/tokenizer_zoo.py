"""Small tokenizers of every kind that matters, and chat templates written in the manner of well-known models."""

import functools
import json

import numpy as np
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from distill.tokenizer import ChatTemplate, SampleRules, SampleTokenizer
from distill.types import Role, Sample, TokenizedSample, Turn

CONTROLS = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|user|>", "<|eot|>", "<turn>", "[INST]", "[/INST]"]
NOTE = "<|note|>"  # an added token that isn't special
CORPUS = [
    "system user assistant model Human Assistant human\n\n### Human: hello there, how are you?\n### Assistant: fine!",
    "The quick brown fox; 2+3 is five, isn't it?  Two  spaces\tand a tab. héllo ünïcode 😀 日本語",
    "answer shorter question longer the then than this that hello world hello world",
]
BYTES = [f"<0x{value:02X}>" for value in range(256)]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "llama2": (
        "{% set head = '' %}{% if messages[0]['role'] == 'system' %}"
        "{% set head = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}{% set messages = messages[1:] %}"
        "{% endif %}{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' }}"
        "{% if loop.first %}{{ head }}{% endif %}{{ m['content'].strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<turn>{{ m['role'] }}</s>\n\n"
        "{{ m['content'] | trim }}<|eot|>{% endfor %}"
    ),
    "gemma": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% endif %}{% for m in messages %}<turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
        "{{ m['content'] | trim }}<|eot|>\n{% endfor %}"
    ),
    "zephyr": "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] + eos_token }}\n{% endfor %}",
    "phi": (
        "{% for m in messages %}{{ '<|user|>' if m['role'] != 'assistant' else '[/INST]' }}\n"
        "{{ m['content'] }}<|eot|>\n{% endfor %}{{ eos_token }}"
    ),
    "mistral": (
        "{{ bos_token }}{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
        "{% for m in messages if m['role'] != 'system' %}{% if m['role'] == 'user' %}[INST] "
        "{% if loop.index > loop.length - 2 and system %}{{ system + '\n\n' }}{% endif %}"
        "{{ m['content'] | trim }}[/INST]{% else %} {{ m['content'] | trim }}</s>{% endif %}{% endfor %}"
    ),
    "no_system": (
        "{% for m in messages if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
        "{% endfor %}"
    ),
    "human": (
        "{% for m in messages %}### {{ {'user': 'Human', 'assistant': 'Assistant'}.get(m['role'], 'System') }}: "
        "{{ m['content'] }}\n{% endfor %}"
    ),
    "noted": "{% for m in messages %}<|note|>{{ m['role'] }}\n{{ m['content'] }}<|note|>\n{% endfor %}",
}


def byte_level(trim_offsets: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(CORPUS * 3, _trainer(430, alphabet))
    return tokenizer


def sentencepiece(scheme: str) -> Tokenizer:
    """Like Llama's: BPE over ▁-words with byte fallback. ``legacy`` prepends ▁ to every segment by a normalizer."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if scheme == "legacy":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words = [word for text in CORPUS for word in text.isascii() * text.split()]
    tokenizer.train_from_iterator([" ".join(words)] * 3, _trainer(430, [], BYTES))
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in BYTES]
    return Tokenizer.from_str(json.dumps(state))


def unigram() -> Tokenizer:
    """Like T5's: control tokens are pieces of the model, with the best of all scores."""
    letters = sorted({letter for text in CORPUS for letter in text if letter not in " \n\t"})
    pieces = [(control, 0.0) for control in CONTROLS] + [(letter, -5.0) for letter in letters]
    pieces += [("▁", -3.0), ("▁hello", -4.0), ("▁the", -4.0), ("\n", -4.0), ("\t", -5.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    return tokenizer


def characters() -> Tokenizer:
    """A token a character, as in A13 of the real reports."""
    letters = sorted({letter for text in [*CORPUS, *CONTROLS, "#<>=|[]()Q/"] for letter in text})
    vocabulary = {token: token_id for token_id, token in enumerate([*CONTROLS, *letters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _trainer(size: int, alphabet: list[str], extra: list[str] | None = None) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(
        vocab_size=size + len(extra or []),
        special_tokens=[*CONTROLS, *(extra or [])],
        initial_alphabet=alphabet,
        show_progress=False,
    )


KINDS = {
    "bytes": functools.partial(byte_level, False),
    "bytes-trimmed": functools.partial(byte_level, True),
    "metaspace-always": functools.partial(sentencepiece, "always"),
    "metaspace-first": functools.partial(sentencepiece, "first"),
    "legacy": functools.partial(sentencepiece, "legacy"),
    "unigram": unigram,
    "characters": characters,
}


@functools.cache
def _state(kind: str) -> str:
    tokenizer = KINDS[kind]()
    tokenizer.add_special_tokens([AddedToken(control, special=True) for control in CONTROLS])
    tokenizer.add_tokens([AddedToken(NOTE, special=False, normalized=False)])
    return tokenizer.to_str()


@functools.cache
def make(kind: str, template: str | None = None, adds_bos: bool = False, named: bool = True) -> PreTrainedTokenizerFast:
    """A tokenizer of one of the ``KINDS``; ``adds_bos`` by its post-processor; not ``named``: no BOS, no EOS."""
    backend = Tokenizer.from_str(_state(kind))
    if adds_bos:
        post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
        before = [backend.post_processor] if backend.post_processor else []
        backend.post_processor = processors.Sequence([*before, post_processor])
    names = {"bos_token": "<s>", "eos_token": "</s>"} if named else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    tokenizer.chat_template = None if template is None else TEMPLATES.get(template, template)
    return tokenizer


# -- samples ----------------------------------------------------------------------------------------------------------

FORMAT = {
    "SYS_START": "### System:\n",
    "SYS_END": "\n",
    "USER_START": "### User:\n",
    "USER_END": "\n",
    "ASSISTANT_START": "### Assistant:\n",
    "ASSISTANT_END": "</s>\n",
}
ALL_ROLES: frozenset[Role] = frozenset({"system", "user", "assistant"})


def rules(**changes: object) -> SampleRules:
    return SampleRules(**{"context_len": 4096, "crop": 1 << 20, **changes})


@functools.cache
def build(kind: str, template: str | None = None, *, adds_bos: bool = False, **changes: object) -> SampleTokenizer:
    tokenizer = make(kind, template, adds_bos)
    return SampleTokenizer(tokenizer, ChatTemplate.of(tokenizer, "model") if template else None, rules(**changes))


def talk(*contents: str, system: str | None = None) -> Sample:
    roles: list[Role] = ["user", "assistant"] * len(contents)
    turns = tuple(Turn(role, content) for role, content in zip(roles, contents, strict=False))
    return Sample("data.jsonl:7", turns=(*([Turn("system", system)] if system else []), *turns))


def text(value: str) -> Sample:
    return Sample("data.jsonl:8", text=value)


def one(samples: list[TokenizedSample]) -> TokenizedSample:
    [sample] = samples
    return sample


def tokens(kind: str, ids: np.ndarray) -> list[str]:
    return make(kind).convert_ids_to_tokens([int(token_id) for token_id in ids])


def contents(kind: str, sample: TokenizedSample) -> list[str]:
    return [make(kind).decode(sample.token_ids[span.start : span.end]) for span in sample.spans]


WORDS = ["<|im_", "end|>", "hello", " the ", "a", "?", "\n", "\n\n", "  ", "\t", "é", "😀", "日本", "x\u0301"]


def joined(pieces: list[str]) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(pieces), min_size=1, max_size=6).map("".join).filter(str.strip)


ANY_TEXT = joined([*WORDS, *CONTROLS, NOTE])
ORDINARY_TEXT = joined(WORDS).filter(lambda content: "<|im_end|>" not in content)


@st.composite
def conversations(draw: st.DrawFn, content: st.SearchStrategy[str]) -> Sample:
    system = draw(st.none() | content)
    return talk(*draw(st.lists(content, min_size=2, max_size=4)), system=system)
