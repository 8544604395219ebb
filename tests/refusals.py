"""What a refused command prints."""

import json


def refusal_of(done, *, as_json: bool) -> str:
    """The stderr of a command that exits with 2. Its stdout is empty or, with --json, one object of the same error."""
    code, out, err = done
    assert code == 2, err
    if not as_json:
        assert out == ""
        return err
    printed = json.loads(out)
    assert [*printed] == ["error"] and printed["error"]["exit_code"] == 2
    _, _, lines = f"\n{err}".partition("\nerror: ")
    error = [text for key in ("message", "hint") if (text := printed["error"][key])]
    assert lines.replace("\nhint: ", "\n", 1) == "\n".join(error) + "\n"
    return err
