"""`run --dry-run` says what would be sent and leaves no trace."""

import json

from tests.acceptance.harness import headrace


def test_a_dry_run_counts_rows_and_leaves_nothing(tmp_path, demo_tokenizer):
    """Nobody listens at the endpoint, and OUT is not made."""
    data = tmp_path / "d.jsonl"
    rows = [{"prompt": f"Question {n}?"} for n in range(30)] + [{"prompt": ""}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = headrace("run", str(data), "--endpoint", "http://127.0.0.1:9", "--tokenizer", str(demo_tokenizer),
                    "--out", str(tmp_path / "out"), "--samples", "2", "--dry-run")  # fmt: skip
    assert done.returncode == 0, done.stderr
    cells = next(line.split() for line in done.stdout.splitlines() if line.startswith("d "))
    assert cells[1:4] == ["31", "60", "0"]
    assert "1 of 31 sampled rows would be rejected: empty_prompt" in done.stdout
    assert "nothing was sent" in done.stderr
    assert not (tmp_path / "out").exists()
