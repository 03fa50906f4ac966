"""Nobody serves the run's model any more: after how long that is final, and what takes it back."""

import pytest

from app.errors import RecipeChanged
from app.store.breaker import Breaker, Why
from app.unserved import Unserved

OTHER = Breaker(0.0, "teacher → student", Why.DIFFERS)
DEAD = Breaker(0.0, "connection refused", Why.DIED)


def test_where_all_serve_something_else_it_is_final_soon():
    """Ten seconds; the sentence names endpoint and difference."""
    unserved = Unserved(600.0)
    for now in (0.0, 9.0):
        unserved.heed({"a": OTHER, "b": OTHER}, now)
    with pytest.raises(RecipeChanged, match="a: teacher → student; b: "):
        unserved.heed({"a": OTHER, "b": OTHER}, 11.0)


def test_endpoints_that_are_away_get_their_time_to_come_back():
    """Anew from each time that somebody served; a fleet that is only down is waited for without end."""
    unserved = Unserved(600.0)
    unserved.heed({"a": OTHER, "b": DEAD}, 0.0)
    unserved.heed({"a": OTHER, "b": None}, 599.0)
    unserved.heed({"a": OTHER, "b": DEAD}, 601.0)
    unserved.heed({"a": OTHER, "b": DEAD}, 1200.0)
    with pytest.raises(RecipeChanged, match="student"):
        unserved.heed({"a": OTHER, "b": DEAD}, 1202.0)
    for now in (2000.0, 9000.0):
        unserved.heed({"a": DEAD, "b": DEAD}, now)
