"""Where prompts are rendered: a small input where the producer is, a large one in other processes too."""

import os

from app.records import Conversation
from app.tokenization import RenderOptions
from producers import rendering
from producers.rendering import RenderPool, Row
from tests.belt import manifest


def rows(numbers: range) -> list[Row]:
    return [
        Row("d", f"{n:024x}", "", n, Conversation([{"role": "user", "content": f"What is {n} plus 7?"}], None), (0,))
        for n in numbers
    ]  # fmt: skip


def where(items, renderer, run, fit_output):
    """In which process it is done."""
    return os.getpid()


def test_a_small_input_starts_no_process_and_a_large_one_does(demo_tokenizer, monkeypatch):
    """The parcels are the same and in order, wherever they were made; while processes start, work goes on here."""
    options, run = RenderOptions(str(demo_tokenizer)), manifest("http://a")
    alone, together = RenderPool(options, run, False), RenderPool(options, run, False)
    assert alone.apply(where, []).result() == os.getpid()
    monkeypatch.setattr(rendering, "_ALONE_SECONDS", 0.0)
    monkeypatch.setattr(rendering, "POOL_PROCESSES", 2)
    try:
        together.apply(where, [])
        assert together.apply(where, []).result() == os.getpid()
        for one in together._starting:
            one.result(60)
        assert together.apply(where, []).result(60) != os.getpid()
        for start in range(0, 60, 10):
            together.submit(rows(range(start, start + 10)))
        found = [parcel for chunk in together.results(wait=True) for parcel in chunk]
    finally:
        together.close()
    alone.submit(rows(range(60)))
    assert [found] == list(alone.results(wait=True))
    assert [parcel.number for parcel in found] == list(range(60))
