"""A checkpoint's chat template: find it and render the messages of a conversation."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from converters.common.errors import CheckpointError, ConfigError, UnsupportedError
from converters.common.names import TIKTOKEN_MODEL, TOKENIZER_CONFIG, TOKENIZER_JSON
from converters.store.json_file import read_json
from converters.tokenizers.assets import CHAT_TEMPLATES, find_assets
from converters.tokenizers.reader import is_metas, read_folder_tokenizer, vocabulary_file
from converters.tokenizers.tiktoken_model import (
    BEGIN,
    END,
    is_llama4,
    looks_like_tiktoken,
    read_ranks,
    require_of_llama,
)
from titan_tools.infer.text.template_sandbox import TemplateRejection, render_template

Message = Mapping[str, str]  # role, content

_JINJA, _PROCESSOR = "chat_template.jinja", "chat_template.json"
_SPECIAL = re.compile(r"<\|\w+\|>")
_NOW = "strftime_now"  # as templates call it

# The message formats of Meta's own code (llama-models, models/llama3/chat_format.py and models/llama4/chat_format.py),
# whose releases have no template
_LLAMA3_HEADERS = """\
{{ bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
_LLAMA4_HEADERS = """\
{{ bos_token }}
{%- for message in messages %}
    {{- '<|header_start|>' + message.role + '<|header_end|>\n\n' + message.content + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header_start|>assistant<|header_end|>\n\n' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A Jinja template, the special tokens that it may use, its path for messages, and its current time."""

    source: str
    special_tokens: Mapping[str, str]
    where: str = "memory"
    moment: datetime = field(default_factory=datetime.now)

    @property
    def depends_on_current_time(self) -> bool:
        """Whether the rendered text may differ on another day."""
        return _NOW in self.source

    @property
    def identity(self) -> str:
        """Equal for equal templates, regardless of path and time."""
        content = json.dumps([self.source, dict(self.special_tokens)], sort_keys=True)
        return blake2b(content.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """The text of `messages`; `answer`: with the beginning of the model's next message.

        Raises ConfigError if the template rejects the messages, CheckpointError if it is broken.
        """
        names = {
            **self.special_tokens,
            _NOW: self.moment.strftime,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": answer,
        }
        try:
            return render_template(self.source, names, where=self.where)
        except TemplateRejection as rejection:
            raise ConfigError(f"the checkpoint's chat template rejects these messages: {rejection}") from None


def read_template(folder: Path) -> ChatTemplate:
    """The template of a checkpoint's folder; for a release of Meta, which has none, that of Llama 3 or 4.

    The files of templates, if there is any, hide what tokenizer_config.json has. Raises CheckpointError if there is
    none, UnsupportedError where Llama's do not fit the tokenizer.
    """
    assets = find_assets(folder)
    names, settings = _declared(assets)
    names_of_files = [_JINJA, *sorted(name for name in assets if name.startswith(f"{CHAT_TEMPLATES}/"))]
    files = {name: assets[name] for name in names_of_files if name in assets}
    if files:  # a default one in the folder of templates precedes the file beside it
        by_name = {"default" if name == _JINJA else Path(name).stem: path for name, path in files.items()}
        if (path := by_name.get("default")) is not None:
            return ChatTemplate(_read_text(path), names, str(path))
        raise _no_template(folder, f"there is {', '.join(sorted(files))}, but no default template")
    processor = read_json(assets[_PROCESSOR]) if _PROCESSOR in assets else {}
    for place, content in ((TOKENIZER_CONFIG, settings), (_PROCESSOR, processor)):
        if content.get("chat_template") is not None:
            where = str(assets.get(place, folder))
            return ChatTemplate(_default_of(content["chat_template"], where), names, where)
    if TIKTOKEN_MODEL in assets and TOKENIZER_CONFIG not in assets and looks_like_tiktoken(assets[TIKTOKEN_MODEL]):
        headers = _headers_of_meta(assets)
        return ChatTemplate(headers, {"bos_token": BEGIN, "eos_token": END}, "titan's own for Meta's releases")
    raise _no_template(folder, "base models have none")


def _no_template(folder: Path, hint: str) -> CheckpointError:
    return CheckpointError(
        f"{folder} has no chat template: neither a {_JINJA} nor a chat_template in a {TOKENIZER_CONFIG}",
        hint=hint,
        tries=["--prompt TEXT without --chat", "--model-from FOLDER, with the template and the same tokenizer"],
    )


def _declared(assets: Mapping[str, Path]) -> tuple[Mapping[str, str], Mapping[str, Any]]:
    """The special tokens that a template may use, and the settings of the tokenizer."""
    if vocabulary_file(assets) is None:
        return {}, read_json(assets[TOKENIZER_CONFIG]) if TOKENIZER_CONFIG in assets else {}
    if is_metas(assets):
        return {}, {}
    tokenizer = read_folder_tokenizer(assets)
    return tokenizer.named, tokenizer.settings


def has_template(folder: Path) -> bool:
    """Whether a checkpoint's folder has a chat template."""
    try:
        read_template(folder)
    except (CheckpointError, UnsupportedError):
        return False
    return True


def _headers_of_meta(assets: Mapping[str, Path]) -> str:
    """The template for the tokens that the tokenizer has. Raises CheckpointError if it has neither's."""
    model = assets[TIKTOKEN_MODEL]
    if TOKENIZER_JSON not in assets:  # the special tokens follow from the number of ranks
        require_of_llama(model, num_ranks := len(read_ranks(model)))
        return _LLAMA4_HEADERS if is_llama4(num_ranks) else _LLAMA3_HEADERS
    names = read_folder_tokenizer(assets).tokenizer.get_vocab()
    for headers in (_LLAMA4_HEADERS, _LLAMA3_HEADERS):
        if {BEGIN, *_SPECIAL.findall(headers)} <= names.keys():
            return headers
    raise CheckpointError(
        f"{assets[TOKENIZER_JSON]} has the tokens of neither Llama 3's nor Llama 4's messages, and {model} no template",
        tries=["--prompt TEXT without --chat", "--model-from FOLDER, with the template and the same tokenizer"],
    )


def _default_of(found: Any, where: str) -> str:
    """A single template, or the one named "default" of several."""
    if isinstance(found, list) and all(isinstance(item, dict) for item in found):
        found = {item.get("name"): item.get("template") for item in found}
    if isinstance(found, dict):
        if found.get("default") is None:
            named = sorted(map(str, found))
            raise CheckpointError(f'{where}: none of its chat templates {named} is named "default"')
        found = found["default"]
    if not isinstance(found, str):
        raise CheckpointError(f"{where}: chat_template must be a string or named templates, not {found!r:.80}")
    return found


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
