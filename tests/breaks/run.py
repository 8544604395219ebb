"""Apply each deliberate break to a copy of the tree and check that the tests that should see it fail.

    python tests/breaks/run.py [--only NAME …] [--jobs 2] [--table FILE]

The breaks are in the TOML files of this folder; breaks.py describes an entry. First the tests run on the unbroken tree,
where all must pass. Then each break is applied alone, its tests run until the first failure, and it is reverted. Each
run of pytest is forked from this process, which has imported torch once. Exits with 1 unless every break is seen,
except those that state why they are not.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # Python put this file's folder there

from tests.breaks.breaks import Break, broken, find_tests, load_breaks  # noqa: E402

PASSED, FAILED = 0, 1  # exit codes of pytest
LIMIT_SECS = 1200  # of the tests of one break; pytest has its own limit of a test, which is a failure
PRELOADED = ("numpy", "torch", "torch.distributed.tensor", "torch.distributed.checkpoint", "transformers")


@dataclass(frozen=True)
class Result:
    name: str
    package: str
    outcome: str
    secs: float


class Run:
    """pytest in a forked child, in its own session and folder of temporary files."""

    def __init__(self, tree: Path, tests: list[str], log: Path):
        self.log, self._temporary = log, log.with_suffix(".tmp")
        self.started = time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(_pytest(tree, tests, log, self._temporary))

    def poll(self) -> int | None:
        """The exit code, or None while it runs; negative when it was stopped for taking too long."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        late = time.monotonic() - self.started > LIMIT_SECS
        if not pid and not late:
            return None
        self.stop()
        return os.waitstatus_to_exitcode(status) if pid else -signal.SIGKILL

    def stop(self) -> None:
        """End the child and every process that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        shutil.rmtree(self._temporary, ignore_errors=True)


def _pytest(tree: Path, tests: list[str], log: Path, temporary: Path) -> int:
    os.setsid()
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    sys.path[0] = str(tree)
    sys.path[1:] = [path for path in sys.path[1:] if path != str(ROOT)]
    sys.argv = ["pytest"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    import pytest

    options = ("-x", "-q", "-p", "no:cacheprovider", "--durations=15", f"--basetemp={temporary}")
    code = int(pytest.main([*options, *tests]))
    sys.stdout.flush()
    return code


def copy_tree(target: Path) -> None:
    """The tracked files, as they are in the working tree."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


class Applied:
    """One break in one tree; `revert` gives the file its bytes and times back."""

    def __init__(self, each: Break, tree: Path, number: int):
        self._file, text, _ = broken(each, tree)
        self.package = self._file.relative_to(tree).parent.as_posix()
        self._before, self._stat = self._file.read_bytes(), self._file.stat()
        self._file.write_text(text)
        # Cached bytecode is recognized by the whole second and the size; no two breaks share a second
        os.utime(self._file, (self._stat.st_mtime + number + 1, int(self._stat.st_mtime) + number + 1))

    def revert(self) -> None:
        self._file.write_bytes(self._before)
        os.utime(self._file, ns=(self._stat.st_atime_ns, self._stat.st_mtime_ns))


def run_breaks(breaks: list[Break], trees: list[Path], logs: Path) -> list[Result]:
    """Each break by itself, as many at once as there are trees."""
    results: list[Result] = []
    waiting, free, running = list(enumerate(breaks)), list(trees), {}
    try:
        while waiting or running:
            while waiting and free:
                number, each = waiting.pop(0)
                tree = free.pop()
                applied = Applied(each, tree, number)
                running[each] = tree, applied, Run(tree, find_tests(each, tree), logs / f"{each.name}.log")
            for each, (tree, applied, run) in list(running.items()):
                code = run.poll()
                if code is None:
                    continue
                applied.revert()
                free.append(tree)
                del running[each]
                secs = time.monotonic() - run.started
                outcome = {PASSED: "not seen", FAILED: "seen"}.get(code, f"error: pytest exited with {code}")
                results.append(Result(each.name, applied.package, outcome, secs))
                print(f"[{len(results)}/{len(breaks)}] {secs:6.1f} s  {each.name}: {outcome}", flush=True)
            time.sleep(0.05)
    finally:
        for _, _, run in running.values():
            run.stop()
    return results


def run_unbroken(breaks: list[Break], trees: list[Path], logs: Path) -> bool:
    """All tests of these breaks on the unbroken tree, as many runs at once as there are trees."""
    tests = sorted({test for each in breaks for test in find_tests(each, trees[0])})
    files = sorted({test.partition("::")[0] for test in tests})
    runs = []
    for number, tree in enumerate(trees):
        of_this_run = set(files[number :: len(trees)])
        share = [test for test in tests if test.partition("::")[0] in of_this_run]
        if share:
            runs.append(Run(tree, share, logs / f"unbroken_{number}.log"))
    passed = True
    for run in runs:
        while (code := run.poll()) is None:
            run.started = time.monotonic()  # many tests in one run: only pytest's own limit of a test holds
            time.sleep(0.1)
        if code != PASSED:
            passed = False
            print(f"the tests fail on the unbroken tree (pytest exited with {code}):")
            print(run.log.read_text()[-4000:])
    return passed


def table(breaks: list[Break], results: list[Result]) -> str:
    """One line per break, then the score."""
    by_name = {result.name: result for result in results}
    lines = []
    for each in breaks:
        result = by_name[each.name]
        outcome = result.outcome
        if each.unseen_because:
            outcome += f" (expected: {each.unseen_because})" if outcome == "not seen" else " (listed as not seen)"
        lines.append(f"{result.package:30}  {each.name:44}  {outcome}")
    num_seen = sum(result.outcome == "seen" for result in results)
    return "\n".join([*lines, f"{num_seen} of {len(results)} breaks are seen"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Check that the tests see deliberate breaks.")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="breaks to apply, default all")
    parser.add_argument("--jobs", type=int, default=1, help="runs of pytest at once")
    parser.add_argument("--table", type=Path, help="also write the table to this file")
    parser.add_argument("--logs", type=Path, help="keep the output of pytest in this folder")
    parser.add_argument("--skip-unbroken", action="store_true", help="do not run the tests on the unbroken tree")
    options = parser.parse_args()

    breaks = load_breaks()
    if unknown := set(options.only) - {each.name for each in breaks}:
        parser.error(f"no break is named {', '.join(sorted(unknown))}")
    breaks = [each for each in breaks if not options.only or each.name in options.only]
    os.environ["OMP_NUM_THREADS"] = "1"
    for module in PRELOADED:
        __import__(module)

    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="titan-breaks-") as folder:
        logs = options.logs or Path(folder) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        trees = [Path(folder) / f"tree_{number}" for number in range(options.jobs)]
        for tree in trees:
            copy_tree(tree)
        for each in breaks:  # before anything runs: the list is kept up with the code
            broken(each, trees[0])
            find_tests(each, trees[0])
        if not options.skip_unbroken:
            if not run_unbroken(breaks, trees, logs.resolve()):
                return 1
            print(f"the tests pass on the unbroken tree ({time.monotonic() - started:.0f} s)", flush=True)
        results = run_breaks(breaks, trees, logs.resolve())
    text = table(breaks, results)
    print(f"\n{text}\n{time.monotonic() - started:.0f} s")
    if options.table:
        options.table.write_text(text + "\n")
    excused = {each.name for each in breaks if each.unseen_because}
    return int(any(result.outcome != "seen" and result.name not in excused for result in results))


if __name__ == "__main__":
    sys.exit(main())
