"""Run titan command lines under an audit hook and tell what they did: `python hostile_child.py FILE` (JSON)."""

import json
import os
import sys
from functools import lru_cache
from pathlib import Path


def main() -> None:
    """FILE: {"allowed": folders that may be written to, "commands": [[arguments]], …}. Prints one JSON list."""
    task = json.loads(Path(sys.argv[1]).read_text())
    run(task["warm_up"], task["log"])  # what the commands import and compile to do their work is no news
    seen: list[str] = []
    allowed = tuple(task["allowed"])
    watched = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "socket.connect",
               "socket.bind")  # fmt: skip

    def hook(event: str, arguments: tuple) -> None:
        if event in watched:
            seen.append(f"{event} {arguments!r:.100}")
        elif event in ("exec", "compile"):
            code = arguments[0]
            name = getattr(code, "co_filename", None) or (arguments[1] if len(arguments) > 1 else "")
            name = name.decode() if isinstance(name, bytes) else str(name)
            if not name.startswith((sys.prefix, sys.base_prefix, os.getcwd(), "<frozen", "<attrs", "<__array")):
                seen.append(f"{event} {name} {code!r:.100}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            writes = any(c in str(arguments[1]) for c in "wax+") or bool(
                (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
            )
            if writes and not path.startswith((*allowed, "/dev/null")) and not path.endswith(".pyc"):
                seen.append(f"written {path}")
            elif path in task.get("untouched", ()):
                seen.append(f"opened {path}")

    sys.addaudithook(hook)
    results = []
    for arguments in task["commands"]:
        seen.clear()
        ((code, said),) = run([arguments], task["log"])
        results.append({"command": arguments, "code": code, "said": said, "seen": list(seen)})
    print(json.dumps(results))


def run(commands: list[list[str]], log_path: str) -> list[tuple[int, str]]:
    """(exit code, everything printed) of each command line."""
    import typer

    from titan_tools import cli

    typer.main.get_command = lru_cache(typer.main.get_command)  # the same each time, and a third of a command line
    done = []
    for arguments in commands:
        sys.argv = ["titan", *arguments]
        stdout, stderr = os.dup(1), os.dup(2)
        with open(log_path, "w+") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            try:
                code = cli.run()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os.dup2(stdout, 1)
                os.dup2(stderr, 2)
                os.close(stdout)
                os.close(stderr)
            log.seek(0)
            done.append((code, log.read()))
    return done


if __name__ == "__main__":
    main()
