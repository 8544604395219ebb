"""Tokens and settings that a folder declares for its tokenizer, with the precedence of transformers.

A token can be declared in tokenizer_config.json (by its role, in `added_tokens_decoder`, in a list of additional
tokens, or under a name of the model's own), special_tokens_map.json, added_tokens.json and tokenizer.json.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from converters.common.errors import CheckpointError
from converters.common.names import ADDED_TOKENS, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG
from converters.store.json_file import read_json

Token = str | AddedToken
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA, _ADDITIONAL = "extra_special_tokens", "additional_special_tokens"
_OF_MODEL = "model_specific_special_tokens"


@dataclass(frozen=True, slots=True)
class Declared:
    """Settings of the tokenizer's class, and the tokens by id that are added to the vocabulary in this order."""

    settings: dict[str, Any]
    added: dict[int, AddedToken]
    named: dict[str, Token] = field(default_factory=dict)  # of the model's own: image_token, …; for chat templates


def read_declared(assets: Mapping[str, Path], described: Iterable[Any] | None) -> Declared:
    """`described`: the added_tokens of tokenizer.json; None if there is none. Raises CheckpointError."""
    where = assets.get(TOKENIZER_CONFIG) or assets.get(SPECIAL_TOKENS_MAP) or assets.get(ADDED_TOKENS)
    try:
        return _read_declared(assets, described)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where}: its tokens cannot be read ({type(error).__name__}: {error})",
            hint="transformers cannot open this tokenizer either",
        ) from None


def _read_declared(assets: Mapping[str, Path], described: Iterable[Any] | None) -> Declared:
    settings = read_json(assets[TOKENIZER_CONFIG]) if TOKENIZER_CONFIG in assets else {}
    if described is not None:  # its post-processor decides
        settings.pop("add_bos_token", None)
        settings.pop("add_eos_token", None)
    if _ADDITIONAL in settings and not settings.get(_EXTRA):
        settings[_EXTRA] = settings.pop(_ADDITIONAL)
    own_keys = [
        key for key in settings if key.endswith("_token") and key not in ROLES and isinstance(settings[key], str)
    ]
    named = {key: settings.pop(key) for key in own_keys}
    if isinstance(settings.get(_EXTRA), dict):
        named |= settings.pop(_EXTRA)
    of_model = settings.pop(_OF_MODEL, None)
    named = named or dict(of_model or {})

    added: dict[int, AddedToken] = {}
    if "added_tokens_decoder" in settings:
        added = {int(id): AddedToken(**token) for id, token in settings.pop("added_tokens_decoder").items()}
    else:
        if SPECIAL_TOKENS_MAP in assets:
            _merge_special_tokens_map(settings, read_json(assets[SPECIAL_TOKENS_MAP]))
            if isinstance(settings.get(_EXTRA), dict):
                named |= settings.pop(_EXTRA)
        if ADDED_TOKENS in assets:
            special = {str(settings[key]) for key in ROLES if settings.get(key)}
            special |= {str(token) for token in settings.get(_EXTRA) or []}
            for text, id in read_json(assets[ADDED_TOKENS]).items():
                added[int(id)] = AddedToken(text, normalized=text not in special, special=text in special)
        for token in described or []:
            properties = {key: value for key, value in token.items() if key != "id"}
            added[token["id"]] = AddedToken(**properties)
    settings = {key: _as_tokens(value) for key, value in settings.items()}
    by_text = {str(token): token for token in added.values()}
    for key in ROLES:
        if isinstance(token := settings.get(key), dict):
            settings[key] = token = AddedToken(**{**token, "special": True})
        if token is not None:
            settings[key] = by_text.get(str(token), token)
    named = {key: _as_tokens(value) for key, value in named.items()}
    # a token with properties, under a name of the model's own
    named = {k: v for k, v in settings.items() if _is_own_token(k, v)} | named
    for key in named:
        settings.pop(key, None)
    return Declared(settings, added, named)


def _merge_special_tokens_map(settings: dict[str, Any], content: Mapping[str, Any]) -> None:
    for key, value in content.items():
        if key == _EXTRA and isinstance(value, list):
            known = list(settings.get(_EXTRA) or [])
            tokens = [AddedToken(**{**t, "special": True}) if isinstance(t, dict) else t for t in value]
            value = known + [token for token in tokens if token not in known]
        elif key != _EXTRA and isinstance(value, dict):
            value = AddedToken(**{**value, "special": True})
        settings[key] = value


def _is_own_token(key: str, value: Any) -> bool:
    return key.endswith("_token") and key not in ROLES and isinstance(value, str | AddedToken)


def _as_tokens(value: Any) -> Any:
    """Tokens with properties out of their JSON, wherever transformers looks for them."""
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return AddedToken(**{key: item for key, item in value.items() if key != "__type"})
    if isinstance(value, list):
        return [_as_tokens(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_tokens(item) for key, item in value.items()}
    return value
