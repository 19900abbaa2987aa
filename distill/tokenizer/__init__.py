"""Samples to token_ids, spans and targets, and what makes two tokenizers fit.

``compat`` loads tokenizers and compares their vocabularies, ``render`` turns a conversation into text and says where
its contents stand, ``encode`` turns that text into tokens and spans, ``samples`` adds BOS, EOS and targets and keeps to
the length limit.
"""

from distill.tokenizer.compat import (
    fit_vocabularies,
    is_completion_model,
    load_tokenizer,
    real_vocab_size,
    save_tokenizer,
    token_map,
    token_map_digest,
)
from distill.tokenizer.render import ChatTemplate, PromptFormat, Template, resolve_template
from distill.tokenizer.samples import (
    DatasetCounts,
    SampleRules,
    SampleTokenizer,
    TokenizedDataset,
    tokenize_dataset,
)

__all__ = [
    "ChatTemplate",
    "DatasetCounts",
    "PromptFormat",
    "SampleRules",
    "SampleTokenizer",
    "Template",
    "TokenizedDataset",
    "fit_vocabularies",
    "is_completion_model",
    "load_tokenizer",
    "real_vocab_size",
    "resolve_template",
    "save_tokenizer",
    "token_map",
    "token_map_digest",
    "tokenize_dataset",
]
