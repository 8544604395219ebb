"""Where the files of a tokenizer declare tokens and settings; each function changes one folder in one way."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

START, STOP, TOOL = "<|im_start|>", "<|im_end|>", "<tool>"
CHATML = (
    "{{ bos_token }}{{ image_token }}{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + "
    "message.content + '<|im_end|>' + '\n' }}{% endfor %}{{ eos_token }}{{ start_token }}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(read(path) | values))


def config(folder: Path, **values: Any) -> None:
    change(folder / "tokenizer_config.json", **values)


def token(content: str, *, typed: bool = False, **flags: Any) -> dict[str, Any]:
    defaults = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": content} | defaults | flags | ({"__type": "AddedToken"} if typed else {})


def next_id(folder: Path) -> int:
    content = read(folder / "tokenizer.json")
    if not content:
        return 340
    return max([len(content["model"]["vocab"]), *(entry["id"] + 1 for entry in content["added_tokens"])])


def _decoder(folder: Path) -> None:
    first = next_id(folder)
    more = [token(START), token(STOP), token(TOOL, special=False, lstrip=True)]
    listed = read(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    listed |= {str(first + place): entry for place, entry in enumerate(more)}
    config(folder, added_tokens_decoder=listed, eos_token=STOP)


def _decoder_of_other_ids(folder: Path) -> None:
    first = next_id(folder) + 100
    config(folder, added_tokens_decoder={str(first + 1): token(START), str(first): token(STOP)})


def _added_tokens(folder: Path) -> None:
    first = next_id(folder)
    (folder / "added_tokens.json").write_text(json.dumps({STOP: first, START: first + 1, TOOL: first + 2}))


def _added_tokens_and_names(folder: Path) -> None:
    _added_tokens(folder)
    config(folder, eos_token=STOP, additional_special_tokens=[START])


def _special_tokens_map(folder: Path) -> None:
    change(
        folder / "special_tokens_map.json",
        eos_token=token(STOP),
        additional_special_tokens=[START],
        pad_token="<pad>",
    )


def _map_and_added_tokens(folder: Path) -> None:
    _special_tokens_map(folder)
    _added_tokens(folder)


def _tokenizer_json(folder: Path) -> None:
    if not (path := folder / "tokenizer.json").exists():
        return
    first, listed = next_id(folder), read(path)["added_tokens"]
    more = [token(START), token(STOP, special=False, single_word=True), token("lazy", special=False, normalized=True)]
    change(path, added_tokens=[*listed, *({"id": first + n, **entry} for n, entry in enumerate(more))])


def _cut_and_padded(folder: Path) -> None:
    if (path := folder / "tokenizer.json").exists():
        cut = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
        padding = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
        change(path, truncation=cut, padding=padding | {"pad_type_id": 0, "pad_token": "<pad>"})


def _no_post_processor(folder: Path) -> None:
    if (path := folder / "tokenizer.json").exists():
        change(path, post_processor=None)
    config(folder, add_bos_token=True)


def _no_class(folder: Path) -> None:
    content = read(path := folder / "tokenizer_config.json")
    content.pop("tokenizer_class", None)
    path.write_text(json.dumps(content))


def _setting(**values: Any) -> Callable[[Path], None]:
    return lambda folder: config(folder, **values)


DECLARATIONS: dict[str, Callable[[Path], None]] = {
    "nothing more": lambda folder: None,
    "added_tokens_decoder": _decoder,
    "added_tokens_decoder with other ids": _decoder_of_other_ids,
    "added_tokens.json": _added_tokens,
    "added_tokens.json and names": _added_tokens_and_names,
    "special_tokens_map.json": _special_tokens_map,
    "special_tokens_map.json and added_tokens.json": _map_and_added_tokens,
    "additional_special_tokens": _setting(additional_special_tokens=[START, STOP]),
    "extra_special_tokens, a list": _setting(
        extra_special_tokens=[START, token(STOP, typed=True, rstrip=True), token(TOOL, typed=True, lstrip=True)]
    ),
    "extra_special_tokens, named": _setting(extra_special_tokens={"start_token": START, "tool_token": TOOL}),
    "names of the model": _setting(model_specific_special_tokens={"image_token": TOOL, "x": token(START, typed=True)}),
    "names of its own": _setting(image_token=START, turn_token=token(TOOL, typed=True), eos_token=STOP),
    "begin and end": _setting(bos_token=START, eos_token=token(STOP, typed=True, normalized=True)),
    "no begin": _setting(bos_token=None, add_bos_token=False),
    "begin and end are added": _setting(add_bos_token=True, add_eos_token=True),
    "legacy": _setting(legacy=True),
    "no space in front": _setting(add_prefix_space=False),
    "special tokens are split": _setting(split_special_tokens=True, eos_token=STOP),
    "tokenizer.json": _tokenizer_json,
    "truncation and padding": _cut_and_padded,
    "no post_processor": _no_post_processor,
    "no class": _no_class,
    "no tokenizer_config.json": lambda folder: (folder / "tokenizer_config.json").unlink(missing_ok=True),
    "LlamaTokenizer": _setting(tokenizer_class="LlamaTokenizerFast"),
    "Qwen2Tokenizer": _setting(tokenizer_class="Qwen2Tokenizer"),
    "GPT2Tokenizer": _setting(tokenizer_class="GPT2TokenizerFast"),
    "a class that nobody has": _setting(tokenizer_class="TheirTokenizer"),
}
