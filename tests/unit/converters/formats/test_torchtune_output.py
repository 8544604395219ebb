"""A folder for torchtune: its recipe builds transformers' model, its tokenizer opens, the rest is reported."""

import base64
import json
import os
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from torchtune import config
from torchtune.training import FullModelHFCheckpointer
from transformers import AutoModelForCausalLM, AutoTokenizer

from converters.common.errors import CheckpointError, ConfigError, UnsupportedError
from converters.formats.base import OutputOptions
from converters.formats.torchtune import default_device
from converters.source.open import open_checkpoint
from converters.source.weights import open_native
from converters.store.manifest import read_manifest
from converters.tokenizers.tiktoken_model import write_hf_tokenizer
from converters.verify import verify
from tests.checkpoint_forms import write_byte_ranks
from tests.doors import convert
from tests.models.llama import write as write_llama
from tests.models.llama import write_tokenizer
from tests.unit.converters.samples import save_dcp
from tests.unit.converters.torchtune.torchtune_folders import KINDS, STYLES, load, make_case

# Near positions and far ones: only the far ones see RoPE's scaling (9e-3 against 2.4 in the logits)
POSITIONS = torch.stack([torch.arange(48), torch.linspace(0, 16383, 48).long()])
TEXTS = ["What's 12345 + 1?", "  two  spaces\n\n\tand ünïcode 漢字 🙂 ", "def f(x):\r\n    return x"]


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # tiktoken keeps files by path, and a path of ours may come again


@pytest.fixture(scope="module", params=list(KINDS), ids=lambda kind: f"llama {kind}")
def case(request, tmp_path_factory):
    return make_case(tmp_path_factory.mktemp("torchtune"), request.param)


@torch.no_grad()
def logits_of(model, tokens):
    return model(tokens, position_ids=POSITIONS, attention_mask=torch.ones_like(tokens)).logits


@pytest.mark.parametrize("style", ["hf", *(pytest.param(style, marks=pytest.mark.slow) for style in STYLES[1:])])
def test_the_recipe_builds_transformers_model(case, style, tmp_path):
    vocab_size = case.model.config.vocab_size
    tokens = torch.randint(0, vocab_size, POSITIONS.shape, generator=torch.Generator().manual_seed(2))
    expected = logits_of(case.model, tokens)
    noise = (logits_of(deepcopy(case.model).double(), tokens) - expected).abs().max().item()
    ours = load(case.recipe(style, tmp_path))
    with torch.no_grad():
        found = ours(tokens, input_pos=POSITIONS)
    assert expected.abs().max() > 1
    assert (found - expected).abs().max().item() <= min(3 * noise, 1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("style", STYLES)
def test_it_is_verified_and_comes_back(case, style, tmp_path):
    report = verify(case.root / style)
    assert report.ok and {check.outcome for check in report.checks} == {"ok"}
    convert(case.root / style, tmp_path / "dcp", to="dcp", source="torchtune")
    assert read_manifest(tmp_path / "dcp").tensors == read_manifest(case.root / "dcp").tensors
    if style == "hf":
        theirs, ours = case.model.state_dict(), AutoModelForCausalLM.from_pretrained(case.root / style).state_dict()
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    ours, theirs = (json.loads((p / "titan_model.json").read_text()) for p in (tmp_path / "dcp", case.root / "dcp"))
    assert ours == theirs


@pytest.mark.parametrize("style", STYLES)
def test_the_recipe_names_what_is_there(case, style, tmp_path):
    folder = case.root / style
    recipe = OmegaConf.load(folder / "torchtune.yaml")
    assert OmegaConf.missing_keys(recipe) == set()
    assert ("TIKTOKEN_CACHE_DIR" in (folder / "torchtune.yaml").read_text()) == (case.kind != "2")
    assert recipe.output_dir == f"{folder}-finetuned" and recipe.checkpointer.output_dir == recipe.output_dir
    assert (recipe.device, recipe.dtype, recipe.optimizer.fused) == ("cpu", "fp32", False)
    assert isinstance(recipe.optimizer.lr, float) and isinstance(recipe.model.norm_eps, float)
    for path in (recipe.tokenizer.path, recipe.dataset.data_files, recipe.checkpointer.checkpoint_dir):
        assert Path(path).is_absolute() and Path(path).exists()
    tokenizer = config.instantiate(recipe.tokenizer)
    for text in TEXTS if case.kind != "2" else ["What is the capital of France?"]:
        assert tokenizer.decode(tokenizer.encode(text, add_bos=False, add_eos=False)) == text
    dataset = config.instantiate(recipe.dataset, tokenizer)
    assert len(dataset) >= 4
    sample = dataset[0]
    assert max(sample["tokens"]) < recipe.model.vocab_size and tokenizer.pad_id < recipe.model.vocab_size
    assert {False, True} == {*sample["mask"]}, "questions are not trained on, answers are"


@pytest.mark.parametrize("style", STYLES)
def test_recipe_and_conversations_may_be_edited(case, style, tmp_path):
    shutil.copytree(case.root / style, tmp_path / "mine")
    for name in ("torchtune.yaml", "chat.jsonl"):
        with (tmp_path / "mine" / name).open("a") as file:
            file.write("# mine\n")
    assert verify(tmp_path / "mine").ok
    (tmp_path / "mine" / "chat.jsonl").unlink()
    assert verify(tmp_path / "mine").ok
    (tmp_path / "mine" / "assets" / "tokenizer.model").unlink()
    assert not verify(tmp_path / "mine").ok


def test_what_an_epoch_gets_is_no_manifest(case):
    """torchtune copies its checkpoint_dir into each epoch; a manifest there would vouch for other weights."""
    for style in STYLES:
        recipe = OmegaConf.load(case.root / style / "torchtune.yaml")
        copied = {path.name for path in Path(recipe.checkpointer.checkpoint_dir).rglob("*")}
        assert "titan_manifest.json" not in copied and "tokenizer.model" in copied
        assert {"hf": "config.json", "meta": "params.json", "torchtune": "titan_model.json"}[style] in copied


@pytest.fixture
def source(tmp_path):
    """A checkpoint that torchtune can build, with a tokenizer.model."""
    write_llama(tmp_path / "src", **KINDS["3.1"], vocab_size=302)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "src" / name).unlink()
    write_byte_ranks(tmp_path / "src" / "tokenizer.model")
    return tmp_path / "src"


def export(source, name="out", **options):
    return convert(source, source.parent / name, to="torchtune", options=OutputOptions(**options))


def refused(source, error, match, **options):
    """Refused by a dry run and by a real one, and nothing is left behind."""
    before = sorted(source.parent.iterdir())
    for dry_run in (True, False):
        with pytest.raises(error, match=match) as caught:
            convert(source, source.parent / "out", to="torchtune", options=OutputOptions(**options), dry_run=dry_run)
    assert sorted(source.parent.iterdir()) == before
    return caught.value


def test_wrong_options(source):
    error = refused(source, ConfigError, "--style llama", style="llama")
    assert error.tries == ("--style hf", "--style meta", "--style torchtune")
    refused(source, ConfigError, "--device tpu", device="tpu")
    for style in ("meta", "torchtune"):
        refused(source, ConfigError, "--shard-size is not supported by", style=style, shard_bytes=10_000)
    refused(source, ConfigError, "--num-shards is not supported by", num_shards=2)


def test_the_device(source, tmp_path):
    export(source, device="cuda")
    recipe = OmegaConf.load(tmp_path / "out" / "torchtune.yaml")
    assert (recipe.device, recipe.dtype, recipe.optimizer.fused) == ("cuda", "bf16", True)
    assert recipe.enable_activation_checkpointing
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidiactl").touch()  # the driver without a GPU
    assert default_device(tmp_path / "dev") == "cpu"
    (tmp_path / "dev" / "nvidia0").touch()
    assert default_device(tmp_path / "dev") == "cuda"


def test_many_files(source, tmp_path):
    export(source, shard_bytes=20_000)
    recipe = OmegaConf.load(tmp_path / "out" / "torchtune.yaml")
    assert len(recipe.checkpointer.checkpoint_files) > 2
    recipe.output_dir = str(tmp_path / "finetuned")
    load(recipe)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("hello\n", "line 1: Expecting value"),
        ("", "no conversation"),
        ("[]", "no conversation"),
        ('{"text": "hello"}\n', "line 1: has no list of messages"),
        ('[{"messages": []}]', "conversation 1: has fewer than two"),
        ('{"messages": [{"role": "human", "content": "a"}, {"role": "assistant", "content": "b"}]}', "role 'human'"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}', "both the user's"),
        ('{"messages": [{"role": "user", "content": 1}, {"role": "assistant", "content": "b"}]}', "no text"),
        ('{"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]}', "follows none"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]}', "system message"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}]}', "no answer"),
    ],
)
def test_what_is_no_chat_file(source, tmp_path, content, problem):
    (tmp_path / "mine.json").write_text(content)
    error = refused(source, ConfigError, "is not a chat file", dataset=tmp_path / "mine.json")
    assert problem in error.message and '"messages"' in error.hint


def test_a_chat_file_that_is_not_there(source, tmp_path):
    refused(source, ConfigError, "cannot be read", dataset=tmp_path / "mine.json")
    refused(source, ConfigError, "cannot be read", dataset=tmp_path)


def test_every_bad_conversation_is_reported(source, tmp_path):
    good = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    (tmp_path / "mine.jsonl").write_text("\n".join([good, "{}", "", good, "[]"]))
    error = refused(source, ConfigError, "is not a chat file", dataset=tmp_path / "mine.jsonl")
    assert "line 2: " in error.message and "line 5: " in error.message and "line 4" not in error.message


@pytest.mark.parametrize("form", ["lines", "list"])
def test_a_chat_file_of_one_s_own(source, tmp_path, form):
    turns = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "Ciao")]
    item = {"messages": [{"role": role, "content": text} for role, text in turns]}
    text = json.dumps(item) + "\n" if form == "lines" else json.dumps([item], indent=1)
    (tmp_path / "config.json").write_text(text)  # a name that the folder has another use for
    export(source, dataset=tmp_path / "config.json")
    recipe = OmegaConf.load(tmp_path / "out" / "torchtune.yaml")
    assert recipe.batch_size == 1, "torchtune drops a batch that is not full"
    assert Path(recipe.dataset.data_files).read_text() == text
    dataset = config.instantiate(recipe.dataset, config.instantiate(recipe.tokenizer))
    assert len(dataset) == 1 and dataset[0]["mask"].count(False) > len("HelloCiao")


@pytest.mark.parametrize("name", ["with space [1] and 'quotes'", "ünï-漢🙂"])
def test_odd_and_relative_places(source, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    convert(os.path.relpath(source), f"src/../{name}", to="torchtune", options=OutputOptions())
    recipe = OmegaConf.load(tmp_path / name / "torchtune.yaml")
    assert recipe.checkpointer.checkpoint_dir == str(tmp_path / name / "assets")
    monkeypatch.chdir("/")
    load(recipe)
    assert len(config.instantiate(recipe.dataset, config.instantiate(recipe.tokenizer))) >= 4


@pytest.mark.parametrize("name", ["${HOME}", "a::b", "bell\a"])
def test_places_that_torchtune_would_misread(source, name):
    with pytest.raises(ConfigError, match="cannot read this path"):
        export(source, name)
    assert [path.name for path in source.parent.iterdir()] == ["src"]


def test_models_that_torchtune_cannot_build(tmp_path):
    write_llama(tmp_path / "src", head_dim=16)  # and the RoPE scaling of a short context
    error = refused(tmp_path / "src", UnsupportedError, "cannot build this model")
    assert "head_dim 16" in error.message and "original_max_position_embeddings 64" in error.message


def test_qwen_3_is_not_in_torchtune(tmp_path):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    numbers = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    Qwen3ForCausalLM(Qwen3Config(**numbers, **heads)).save_pretrained(tmp_path / "src")
    write_tokenizer(tmp_path / "src")
    for style in STYLES:
        error = refused(tmp_path / "src", UnsupportedError, "torchtune 0.6.1 has no qwen3 models", style=style)
        assert error.hint == "it has llama2, llama3"


def test_a_checkpoint_without_a_tokenizer(source, tmp_path):
    (source / "tokenizer.model").unlink()
    error = refused(source, CheckpointError, "has no tokenizer")
    assert error.tries[0].startswith("--model-from") and "convert to hf" in error.hint
    write_tokenizer(source)  # GPT-2's way to cut text, which torchtune's tokenizer does not know
    error = refused(source, UnsupportedError, "does not split text by Llama 3's pattern")
    assert "tokenizer.model" in error.tries[0]


def test_a_tokenizer_json_becomes_a_tokenizer_model(source, tmp_path):
    write_hf_tokenizer(source, source / "tokenizer.model", vocab_size=302, max_seq_len=128)
    (source / "tokenizer.model").unlink()
    export(source)
    recipe = OmegaConf.load(tmp_path / "out" / "torchtune.yaml")
    torchtune, transformers = config.instantiate(recipe.tokenizer), AutoTokenizer.from_pretrained(source)
    for text in TEXTS:
        ids = torchtune.encode(text, add_bos=False, add_eos=False)
        assert ids == transformers.encode(text, add_special_tokens=False)
    special = {"eot_id": "<|eot_id|>", "bos_id": "<|begin_of_text|>", "pad_id": "<|finetune_right_pad_id|>"}
    for name, token in special.items():
        assert getattr(torchtune, name) == transformers.convert_tokens_to_ids(token)


def test_special_tokens_that_a_tokenizer_lacks_get_free_rows(source, tmp_path):
    write_hf_tokenizer(source, source / "tokenizer.model", vocab_size=258, max_seq_len=128)  # two of them
    export(source)
    recipe = OmegaConf.load(tmp_path / "out" / "torchtune.yaml")
    ids = config.instantiate(recipe.tokenizer).special_tokens
    assert (ids["<|begin_of_text|>"], ids["<|end_of_text|>"]) == (256, 257)
    assert sorted(ids.values()) == list(range(256, 266))


def test_the_ids_of_a_release_are_torchtune_s_own(tmp_path):
    """128000 ranks: then no file of special tokens is needed, as in torchtune's own recipes."""
    write_llama(tmp_path / "src", **KINDS["3.1"], vocab_size=128256, hidden_size=8, num_attention_heads=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "src" / name).unlink()
    tokens = [bytes([byte]) for byte in range(256)] + [number.to_bytes(3) for number in range(127744)]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    (tmp_path / "src" / "tokenizer.model").write_text("".join(lines))
    export(tmp_path / "src")
    recipe = OmegaConf.load(tmp_path / "out" / "torchtune.yaml")
    assert "special_tokens_path" not in recipe.tokenizer
    torchtune, transformers = (
        config.instantiate(recipe.tokenizer),
        AutoTokenizer.from_pretrained(tmp_path / "out/assets"),
    )
    for name in ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|finetune_right_pad_id|>"):
        assert torchtune.special_tokens[name] == transformers.convert_tokens_to_ids(name) >= 128000


def test_no_room_for_special_tokens(tmp_path):
    write_llama(tmp_path / "src", **KINDS["3.1"], vocab_size=259)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "src" / name).unlink()
    write_byte_ranks(tmp_path / "src" / "tokenizer.model")
    error = refused(tmp_path / "src", UnsupportedError, "no room for tokens")
    assert "<|eot_id|>" in error.message and "<|image|>" not in error.message


@pytest.fixture
def sharded(source, tmp_path):
    """What torchtune's checkpointer saves with safe_serialization off: several .bin files and their index."""
    export(source, shard_bytes=20_000)
    recipe = OmegaConf.load(tmp_path / "out" / "torchtune.yaml").checkpointer
    checkpointer = FullModelHFCheckpointer(
        checkpoint_dir=recipe.checkpoint_dir,
        checkpoint_files=list(recipe.checkpoint_files),
        model_type=recipe.model_type,
        output_dir=str(tmp_path / "run"),
        safe_serialization=False,
    )
    checkpointer.save_checkpoint(checkpointer.load_checkpoint(), epoch=0)
    return tmp_path / "run" / "epoch_0"


def test_torch_files_with_an_index(sharded, source, tmp_path):
    assert len(list(sharded.glob("*.bin"))) > 2
    convert(sharded, tmp_path / "back", to="dcp", source="torchtune")
    convert(source, tmp_path / "dcp", to="dcp")
    assert read_manifest(tmp_path / "back").tensors == read_manifest(tmp_path / "dcp").tensors


def test_an_index_that_the_files_belie(sharded):
    some = sorted(sharded.glob("*.bin"))[0]
    moved = some.rename(some.with_name("moved.bin"))
    with pytest.raises(CheckpointError, match="(?s)index and the files disagree.*missing"):
        open_checkpoint(sharded)
    moved.rename(some)
    index = sharded / "pytorch_model.bin.index.json"
    content = json.loads(index.read_text())
    files = list(content["weight_map"].values())
    dropped = next(name for name, file in content["weight_map"].items() if files.count(file) > 1)
    del content["weight_map"][dropped]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"{dropped}: in .*, but not in the index"):
        open_checkpoint(sharded)
    with pytest.raises(CheckpointError, match="a part of a checkpoint"):
        open_checkpoint(index)


@pytest.mark.parametrize("style", STYLES)
def test_adapters_and_run_state_are_not_weights(source, tmp_path, style):
    export(source, style=style)
    with open_native(tmp_path / "out") as weights:
        expected = weights.source.tensors
    (tmp_path / "out" / "titan_manifest.json").unlink()
    lora = {"layers.0.attn.q_proj.lora_a.weight": torch.zeros(2, 32)}
    torch.save(lora, tmp_path / "out" / "adapter_model.pt")
    torch.save({"seed": 1, "optimizer": {}}, tmp_path / "out" / "recipe_state.pt")
    with open_native(tmp_path / "out") as weights:
        assert weights.source.tensors == expected
    report = convert(tmp_path / "out", tmp_path / "dcp", to="dcp", source="torchtune")
    assert any(remark.startswith("adapter_model.pt is not read: a LoRA adapter") for remark in report.remarks)


def test_torchtune_s_names_in_a_dcp(source, tmp_path):
    """Its DistributedCheckpointer saves them below `model`, beside numbers of the run."""
    export(source, style="torchtune")
    state = torch.load(tmp_path / "out" / "model.pt", weights_only=True)
    save_dcp(tmp_path / "theirs", {"model": state, "epochs_run": 1, "seed": 42})
    convert(tmp_path / "theirs", tmp_path / "dcp", to="dcp", model_from=source)
    convert(source, tmp_path / "expected", to="dcp")
    assert read_manifest(tmp_path / "dcp").tensors == read_manifest(tmp_path / "expected").tensors


def test_an_adapter_alone_is_refused(tmp_path):
    torch.save({"layers.0.attn.q_proj.lora_a.weight": torch.zeros(2, 32)}, tmp_path / "adapter_model.pt")
    with pytest.raises(UnsupportedError, match="holds a LoRA adapter .adapter_model.pt., not a model"):
        open_checkpoint(tmp_path)


def test_a_run_names_its_latest_epochs(tmp_path):
    for name in ("epoch_0", "epoch_9", "epoch_10", "logs", "recipe_state"):
        (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match="a run of torchtune") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.tries == (str(tmp_path / "epoch_9"), str(tmp_path / "epoch_10"))
