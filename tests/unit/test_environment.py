"""Tests pass whatever a user's environment has set: some of them run in one that has everything set at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clean_environment import clean

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = """
HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_HOME=/nonexistent HF_HUB_CACHE=/nonexistent
HF_ENDPOINT=http://127.0.0.1:9 HF_TOKEN=hf_bad HTTP_PROXY=http://127.0.0.1:9 HTTPS_PROXY=http://127.0.0.1:9
http_proxy=http://127.0.0.1:9 https_proxy=http://127.0.0.1:9 ALL_PROXY=socks5://127.0.0.1:9 NO_PROXY=example.org
NO_COLOR=1 FORCE_COLOR=1 CLICOLOR_FORCE=1 COLUMNS=20 LINES=5 TERM=dumb
LC_ALL=tr_TR.ISO-8859-9 LANG=de_DE.ISO-8859-1 LANGUAGE=de TZ=Asia/Kathmandu
OMP_NUM_THREADS=3 MKL_NUM_THREADS=2 TORCH_LOGS=+dynamo,dist TORCH_DISTRIBUTED_DEBUG=DETAIL CUBLAS_WORKSPACE_CONFIG=:16:8
PYTHONWARNINGS=error PYTHONHASHSEED=7 HOME=/nonexistent XDG_CACHE_HOME=/nonexistent MPLBACKEND=none
PYTORCH_ALLOC_CONF=max_split_size_mb:64 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False CUDA_VISIBLE_DEVICES=
LOG_RANK=7 NGPU=99 CONFIG_FILE=/nonexistent TRAIN_FILE=my.train COMM_MODE=local_tensor TORCHFT_LIGHTHOUSE=x
RANK=3 WORLD_SIZE=8 LOCAL_RANK=3 LOCAL_WORLD_SIZE=8 SLURM_LOCALID=5 MASTER_ADDR=10.255.255.1 MASTER_PORT=1
GLOO_SOCKET_IFNAME=none0 TITAN_IMPORT=/nonexistent TITAN_LAUNCH=1 TIKTOKEN_CACHE_DIR=/nonexistent
"""
FEW = ("titan_tools/test_download.py::test_into_a_plain_folder", "titan_tools/terminal/test_console.py")
MORE = (
    "titan_tools/test_config_command.py",
    *("titan_tools/test_cli.py", "titan_tools/test_download.py", "titan_tools/test_data_command.py"),
    *("titan_tools/launch/test_launch.py", "titan_tools/test_train_devices.py", "titan_tools/test_dry_run_command.py"),
    *(
        "titan_tools/memory/test_command.py",
        "titan_tools/test_convert_command.py",
        "titan_tools/infer/test_command.py",
    ),
    *(
        "titan_tools/infer/tasks/test_chat.py",
        "titan_tools/infer/test_ranks.py",
        "trainer/observability/test_flight_recorder.py",
    ),
    *("trainer/observability/test_throughput.py", "trainer/ranks/test_process_group.py", "trainer/test_build.py"),
    *("trainer/test_runtime.py", "trainer/data/test_text.py", "converters/tokenizers/test_tokenizers.py"),
    *("converters/source/test_open.py", "converters/store/test_commit.py", "../dist/test_launch_scripts.py"),
)


def passes(files: tuple[str, ...], tmp_path: Path) -> None:
    other = tmp_path / "other" / "trainer"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('a trainer package of somebody else')\n")
    temporary = tmp_path / "a folder with spaces"
    temporary.mkdir()
    environment = clean(dict(os.environ)) | dict(setting.split("=", 1) for setting in HOSTILE.split())
    environment |= {"PYTHONPATH": str(other.parent), "TMPDIR": str(temporary)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    paths = [str(ROOT / "tests" / "unit" / file) for file in files]
    done = subprocess.run([*command, *paths], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def test_the_listed_files_exist():
    assert [file for file in MORE if not (ROOT / "tests" / "unit" / file).is_file()] == []


def test_a_few_tests_pass_in_a_hostile_environment(tmp_path):
    passes(FEW, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("file", MORE)
def test_more_tests_pass_in_a_hostile_environment(file, tmp_path):
    passes((file,), tmp_path)
