"""app.urls: one spelling per endpoint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UsageError
from app.urls import endpoint_key, normalise


@pytest.mark.parametrize(
    ("given_url", "expected"),
    [
        ("localhost:30000", "http://localhost:30000"),
        (" http://Host:30000/ ", "http://host:30000"),
        ("HTTP://h:80", "http://h"),
        ("https://h:443//", "https://h"),
        ("http://h:443", "http://h:443"),
        ("http://h:1/v1", "http://h:1"),
        ("http://h:1/generate", "http://h:1"),
        ("http://h:1/v1/chat/completions", "http://h:1"),
        ("http://gateway/team-a/v1/", "http://gateway/team-a"),
        ("http://h:1/myv1", "http://h:1/myv1"),
        ("10.0.0.1:8", "http://10.0.0.1:8"),
        ("http://[0:0::1]:8", "http://[::1]:8"),
    ],
)
def test_spellings_of_one_endpoint_become_one_url(given_url, expected):
    """Scheme, case, default port, slashes and pasted tails don't make another endpoint; and twice is once."""
    assert normalise(given_url) == expected
    assert normalise(expected) == expected
    assert endpoint_key(given_url) == endpoint_key(expected)


@pytest.mark.parametrize(
    "nonsense",
    ["", " ", "http://", "30000", "http//h:1", "http:/h:1", "ftp://h", "h:99999", "h:0", "h:port", "h h", "-h",
     "999.1.1.1", "a..b", "http://[::1", "h?x=1", "h#x", "http://h:1/a//b", "http://h:1/a b"],
)  # fmt: skip
def test_nonsense_is_refused_with_the_form_that_is_wanted(nonsense):
    """What can't be an endpoint is a UsageError that shows the form."""
    with pytest.raises(UsageError, match="http://host:port"):
        normalise(nonsense)


@pytest.mark.parametrize("url", ["http://user:hunter2@h:1", "http://user:hunter2@h:99999", "http://h:1?key=hunter2"])
def test_credentials_in_a_url_are_refused_and_not_repeated(url):
    """A secret pasted into a URL stands in no message."""
    with pytest.raises(UsageError) as refusal:
        normalise(url)
    assert "hunter2" not in str(refusal.value)


@given(st.text(alphabet="hHtTpPsS:/.@[]?#-_19 av", max_size=24))
def test_normalising_is_idempotent_or_refuses(text):
    """Whatever is typed is refused, or becomes something that stays as it is."""
    try:
        url = normalise(text)
    except UsageError:
        return
    assert normalise(url) == url
    assert not url.endswith("/")
