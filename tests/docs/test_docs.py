"""Links lead somewhere, every page is found, the reference is current. (Commands: test_commands.py.)"""

import re

import pytest

from app.cli.reference import reference
from tests.docs.pages import READ, REFERENCE, ROOT

_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", [*READ, REFERENCE], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_are_there(page):
    targets = [target for target in _LINK.findall(page.read_text(encoding="utf-8")) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_every_page_is_linked_from_somewhere():
    """A page that nobody links is found by nobody."""
    linked = {
        (page.parent / target).resolve() for page in READ for target in _LINK.findall(page.read_text(encoding="utf-8"))
    }
    assert [page for page in READ if page.is_relative_to(ROOT / "docs" / "operating") and page not in linked] == []


def test_the_reference_is_what_the_code_says():
    """`make reference` writes it again."""
    assert REFERENCE.read_text(encoding="utf-8") == reference() + "\n"
