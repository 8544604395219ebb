"""Ranks of `titan infer` do the same work on the same files: the first chooses, all compare, each checks a share."""

import io
import json
import re
import shutil
from contextlib import chdir, redirect_stderr, redirect_stdout
from datetime import datetime
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from converters.common.errors import ConfigError, TitanError
from converters.store import manifest
from tests.doors import convert
from tests.json_lines import write_lines
from tests.models.llama import write as write_llama
from titan_tools.infer import run as infer_run
from titan_tools.infer.decoding.sampling import Sampling
from titan_tools.infer.identity import check_same_inputs
from titan_tools.infer.ranks import TPRanks, _machine_group
from titan_tools.infer.request import Request
from trainer.ranks.machine import machine_identity

CPU = torch.device("cpu")
TELLS_TIME = "{{ strftime_now('%H:%M:%S.%f') }}{{ messages[0].content }}"


@pytest.fixture(scope="module")
def dcp_folder(tmp_path_factory):
    """A checkpoint with a manifest, whose chat template tells the microsecond."""
    folder = tmp_path_factory.mktemp("agreement")
    write_llama(folder / "hf", chat_template=TELLS_TIME)
    convert(folder / "hf", folder / "dcp", to="dcp")
    return folder / "dcp"


def flip(folder, share):
    """Damage the file of weights, at this share of its length."""
    file = next(folder.glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[int(share * len(data))] ^= 1
    file.write_bytes(data)
    return file.name


def infer(asked, place, num=2, part_bytes=manifest._PART_BYTES, machines=((0, 1),)):
    """What a rank prints (stdout, stderr), what it raises, and which parts of files it read for damage.

    Each of `num` works in a folder of its own in `place`, as on machines of their own, and began at another time.
    """
    rank = dist.get_rank() if num > 1 else 0
    world = dist.group.WORLD if num > 1 else None
    named = {"checkpoint": Path("model"), "sampling": Sampling(), "tp": num, "max_new_tokens": 8, "as_json": True}
    request = Request(**named | asked, moment=datetime(2026, 1, 1, microsecond=rank))
    out, err, read, wrong = io.StringIO(), io.StringIO(), [], ""
    before, sum_part = manifest._PART_BYTES, manifest._sum_part

    def noted(store, name, start, size):
        read.append((name, start))
        return sum_part(store, name, start, size)

    manifest._PART_BYTES, manifest._sum_part = part_bytes, noted
    try:
        with chdir(place / str(rank)), redirect_stdout(out), redirect_stderr(err):
            ranks = TPRanks(num, rank, CPU, world, _machine_group(machines, world))
            infer_run._run_on_rank(ranks.done_by_first(lambda: request), ranks)
    except TitanError as error:
        wrong = f"{error.message}\nhint: {error.hint}" if len(machines) > 1 else error.message
    finally:
        manifest._PART_BYTES, manifest._sum_part = before, sum_part
    return out.getvalue(), err.getvalue(), wrong, read


class Splitting:
    """Stands for an NCCL group that is bound to a device; notes the splits that a rank is asked to join."""

    supports_splitting = True

    def __init__(self):
        self.splits = []

    def perform_nocolor_split(self, device):
        self.splits.append(device)


def make_machine_group(machines):
    """Case: the sum over the ranks of this machine, and the splits of the world that making its group took."""
    bound, usual = Splitting(), distributed_c10d._get_split_source
    distributed_c10d._get_split_source = lambda *_: bound
    world = dist.group.WORLD
    world.bound_device_id = torch.device("cuda", 0)
    try:
        group = _machine_group(machines, world)
        dist.new_group([0])  # what is avoided: the rank that is not in it joins a split
    finally:
        distributed_c10d._get_split_source = usual
        world.bound_device_id = None
    numbers = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(numbers, group=group)
    return int(numbers), len(bound.splits)


def test_machines_make_their_groups_without_a_split_of_the_world(pools):
    machines = [[0, 1], [2, 3]]
    assert pools[4].run(make_machine_group, machines) == [(11, 0), (11, 1), (1100, 1), (1100, 1)]


def results(output):
    return json.loads(output[0])["results"]


def test_the_first_chooses_the_step_and_the_time_and_tells_once(pools, dcp_folder, tmp_path):
    """Where another one sees a newer step, since one was saved meanwhile, and the newest that both see is damaged."""
    for rank, steps in enumerate(([9, 10, 20], [9, 10, 20, 30])):
        for step in steps:
            copy = shutil.copytree(dcp_folder, tmp_path / str(rank) / "run" / f"step-{step}")
            if step == 20:
                flip(copy, 0.5)
        (tmp_path / str(rank) / "run" / "step-9" / ".metadata").unlink()
    asked = {"checkpoint": Path("run"), "text": "def main(", "chat": True}
    first, second = pools[2].run(infer, asked, tmp_path)
    assert results(first) == results(infer(asked | {"checkpoint": Path("run/step-10")}, tmp_path, 1))
    assert second[:3] == ("", "", "")
    output = first[1].splitlines()
    assert output[0] == "reading run/step-20" and output[-1] == "reading run/step-10"
    assert (
        sum(line.startswith("WARNING: skipping a damaged step: run/step-20: changed or damaged") for line in output)
        == 1
    )


@pytest.mark.parametrize("at", [0.3, 0.7])
def test_ranks_share_the_reading_for_damage_and_tell_it_alike(pools, dcp_folder, tmp_path, at):
    for rank in "01":
        copy = shutil.copytree(dcp_folder, tmp_path / rank / "model")
        name = flip(copy, at)
    size = (copy / name).stat().st_size
    asked = {"text": "def main("}
    output = pools[2].run(infer, asked, tmp_path, 2, size // 4 + 1)
    for out, err, wrong, _ in output:
        assert (out, err) == ("", "") and wrong.startswith("model: changed or damaged since titan wrote it:")
        assert wrong.endswith(f"\n  {name}: its bytes have changed (CRC32)")
    parts = [{start for file, start in read if file == name} for *_, read in output]
    assert len(parts[0]) == len(parts[1]) == 2 and len(parts[0] | parts[1]) == 4


def test_each_machine_reads_its_own_copy_for_damage(pools, dcp_folder, tmp_path):
    """And where one of them is damaged, all pass over that step."""
    for rank in "01":
        for step in (10, 20):
            copy = shutil.copytree(dcp_folder, tmp_path / rank / "run" / f"step-{step}")
    name = flip(copy, 0.6)
    size = (copy / name).stat().st_size
    asked, machines = {"checkpoint": Path("run/step-20"), "text": "def main("}, ((0,), (1,))
    for rank, (out, err, wrong, read) in enumerate(pools[2].run(infer, asked, tmp_path, 2, size // 4 + 1, machines)):
        assert (out, err) == ("", "") and f"\n  {name}: its bytes have changed (CRC32)\nhint: " in wrong
        assert wrong.endswith(f"; on rank 1 of {machine_identity()[0]}")
        assert len({start for file, start in read if file == name}) == 4, rank
    first, _ = pools[2].run(infer, asked | {"checkpoint": Path("run")}, tmp_path, 2, size // 4 + 1, machines)
    alone = infer(asked | {"checkpoint": Path("run/step-10")}, tmp_path, 1)
    assert results(first) == results(alone) and first[1].endswith("\nreading run/step-10\n")


def other_weights(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model" / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, folder / "model" / "model.safetensors", metadata={"format": "pt"})


def other_model(folder):
    config = folder / "model" / "config.json"
    config.write_text(re.sub(r'"rms_norm_eps": [^,]*', '"rms_norm_eps": 0.5', config.read_text()))


def other_tokenizer(folder):
    tokenizer = folder / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")


def other_ends(folder):
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": [7]}')


def other_stop_strings(folder):
    config = folder / "model" / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"stop_strings": ["###"]}))


def other_template(folder):
    (folder / "model" / "chat_template.jinja").write_text(TELLS_TIME + "!")


def other_batch(folder):
    write_lines(folder / "in.jsonl", [{"id": 0, "prompt": "def"}, {"id": 1, "prompt": "mair("}])


OTHERS = [
    ("checkpoint", other_weights),
    ("model", other_model),
    ("tokenizer", other_tokenizer),
    ("tokenizer", other_ends),
    ("tokenizer", other_stop_strings),
    ("chat template", other_template),
    ("batch", other_batch),
]


@pytest.mark.parametrize("what, change", OTHERS)
def test_ranks_that_read_something_else_are_refused(pools, tmp_path, what, change):
    write_llama(tmp_path / "0" / "model", chat_template=TELLS_TIME)
    write_lines(tmp_path / "0" / "in.jsonl", [{"id": 0, "prompt": "def"}, {"id": 1, "prompt": "main("}])
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    change(tmp_path / "1")
    output = pools[2].run(infer, {"batch": Path("in.jsonl"), "chat": True}, tmp_path)
    place = "in.jsonl" if what == "batch" else "model"
    for out, err, wrong, _ in output:
        assert (out, err) == ("", "")
        said = rf"ranks do not read the same {what}:\n  rank 0: {tmp_path}/0/{place} on (\S+)\n"
        assert re.fullmatch(rf"{said}  rank 1: {tmp_path}/1/{place} on \1 \(different\)", wrong), wrong


def test_every_rank_is_named_where_they_read_different_things():
    read = [{"batch": (identity, f"/data/in on {host}")} for identity, host in (("a", "n0"), ("a", "n1"), ("b", "n2"))]
    check_same_inputs(read[:2])
    with pytest.raises(ConfigError) as raised:
        check_same_inputs(read)
    places = ["rank 0: /data/in on n0", "rank 1: /data/in on n1", "rank 2: /data/in on n2 (different)"]
    assert raised.value.message.splitlines()[1:] == [f"  {place}" for place in places]


def test_what_only_one_rank_lacks_is_reported_by_all(pools, tmp_path):
    write_llama(tmp_path / "0" / "model")
    (tmp_path / "1").mkdir()
    output = pools[2].run(infer, {"text": "a"}, tmp_path)
    assert output[0][2] == output[1][2] and output[0][2].startswith("model: no such ")


def test_ranks_read_no_weights_where_nothing_is_left_to_do(pools, tmp_path):
    """Which the first knows alone: the results are its own."""
    write_llama(tmp_path / "0" / "model")
    write_lines(tmp_path / "0" / "in.jsonl", [{"id": 0, "prompt": "def"}])
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    asked = {"batch": Path("in.jsonl"), "out": Path("out.jsonl"), "as_json": False}
    pools[2].run(infer, asked, tmp_path)
    assert (tmp_path / "0" / "out.jsonl").is_file() and not (tmp_path / "1" / "out.jsonl").exists()
    other_weights(tmp_path / "1")  # which would be refused
    first, second = pools[2].run(infer, asked, tmp_path)
    assert first[:3] == ("", "all results are in out.jsonl already: nothing to do\n", "")
    assert second[:3] == ("", "", "")


def first_says(num):
    ranks = TPRanks(num, dist.get_rank(), CPU, dist.group.WORLD)
    return ranks.done_by_first(lambda: ranks.rank)


def test_all_have_what_the_first_says(pools):
    assert pools[2].run(first_says, 2) == [0] * 2
