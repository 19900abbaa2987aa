"""Keys of the section ``extra``: those that users of other trainers know, declared as all others are in sections.py."""

from typing import Any, ClassVar

from distill.config.keys import Section, key
from distill.config.kinds import Count, Natural


class Extra(Section):
    """What other trainers' configurations hold besides: watching a run, special tokens, several machines."""

    title: ClassVar = "Extra Settings"

    debug_run: bool = key(
        False,
        "Show the first samples, the first batch and the whole configuration, and make a few steps.",
        available=(False,),
        aliases=("debug",),
    )
    eval_table_size: Natural = key(
        0,
        "Prompts of the validation text that teacher and student continue at each validation.",
        available=(0,),
    )
    eval_max_new_tokens: Count = key(128, "Length of such a continuation.", unit="tokens", available=(128,))
    special_tokens: dict[str, str] = key(
        {}, "Tokens of roles such as pad_token, added or mapped to existing ones.", decides="result", available=({},)
    )
    resize_token_embeddings_to_32x: bool = key(
        False,
        "Round the rows of the student's embeddings up to a multiple of 32.",
        decides="result",
        available=(False,),
    )
    tokenizer_config: dict[str, Any] | None = key(
        None, "Tokenizer of the text, if that isn't the models' own.", decides="result", available=(None,)
    )
    deepspeed: str | dict[str, Any] | None = key(None, "DeepSpeed configuration.", available=(None,))
    fsdp: str | tuple[str, ...] | None = key(None, "Parts of FSDP to switch on.", available=(None,))
    fsdp_config: dict[str, Any] | None = key(None, "Settings of FSDP.", available=(None,))
    plugins: tuple[str, ...] = key((), "Modules to import, which add components.", available=((),))
