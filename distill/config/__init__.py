"""The configuration: every key once (sections.py), strict files with line numbers, generated reference."""

from distill.config.extra import Extra
from distill.config.files import Override, load_config, load_with_origins
from distill.config.keys import Decides, Key, show, suggest
from distill.config.kinds import OBSERVING
from distill.config.reader import JsonError, ParseError, read_json
from distill.config.reference import (
    explain,
    json_schema,
    keys_by_section,
    reference_markdown,
    value_text,
    write_generated,
)
from distill.config.root import Config, LoadedConfig, RunOptions, Setting, find_key, resolve, section_model
from distill.config.sections import Cache, Collection, Model, Paths, Pipeline, Student, Training
from distill.config.spelling import canonical, other_names
from distill.config.values import memory_bytes
from distill.config.words import NUMBER, key_value
from distill.config.yaml_reader import read_yaml

__all__ = [
    "NUMBER",
    "OBSERVING",
    "Cache",
    "Collection",
    "Config",
    "Decides",
    "Extra",
    "JsonError",
    "Key",
    "LoadedConfig",
    "Model",
    "Override",
    "ParseError",
    "Paths",
    "Pipeline",
    "RunOptions",
    "Setting",
    "Student",
    "Training",
    "canonical",
    "explain",
    "find_key",
    "json_schema",
    "key_value",
    "keys_by_section",
    "load_config",
    "load_with_origins",
    "memory_bytes",
    "other_names",
    "read_json",
    "read_yaml",
    "reference_markdown",
    "resolve",
    "section_model",
    "show",
    "suggest",
    "value_text",
    "write_generated",
]
