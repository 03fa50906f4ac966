"""docs/datasets.md says what the code does with every row of 18 published files."""

from app.tokenization import Renderer, RenderOptions
from tests.datasets_table import EXCERPTS, PAGE, table, with_table


def test_the_table_is_what_the_code_does(demo_tokenizer):
    """File, format, shape, rows, rows that run, rows rejected by reason. `python -m tests.datasets_table` writes it."""
    page = PAGE.read_text("utf-8")
    made = table(EXCERPTS, Renderer(RenderOptions(str(demo_tokenizer))))
    assert made.count("\n") == 18 + 2
    assert with_table(page, "excerpts", made) == page


def test_every_row_of_the_whole_files_is_accounted_for():
    """In the table over the whole files: rows = run + rejected, for 18 files and 6,868 rows."""
    part = PAGE.read_text("utf-8").split("<!-- whole files")[1]
    lines = [line.split("|")[1:-1] for line in part.splitlines() if line.startswith("| ")][1:]
    counts = [[int(cell.replace(",", "")) for cell in line[3:5]] for line in lines]
    rejected = [sum(int(word) for word in line[5].replace(",", "").split() if word.isdecimal()) for line in lines]
    assert len(lines) == 18
    assert [rows for rows, _ in counts] == [run + gone for (_, run), gone in zip(counts, rejected, strict=True)]
    assert sum(rows for rows, _ in counts) == 6_868
