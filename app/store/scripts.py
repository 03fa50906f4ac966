"""The Lua scripts, one file per command, called by name.

A Redis that was restarted has forgotten them; `NOSCRIPT` is answered by sending the script itself.
"""

from hashlib import sha1
from pathlib import Path

from redis.exceptions import NoScriptError

from app.store.keys import SEEN, WOKE

_FOLDER = Path(__file__).parent / "lua"
_JUDGES_EXPIRY = ("claim", "lease", "orphaned", "renew_claims", "renew_leases", "turned")


def _read() -> dict[str, str]:
    absence = (_FOLDER / "prelude" / "absence.lua").read_text(encoding="utf-8")
    absence = absence.replace("{SEEN}", SEEN).replace("{WOKE}", WOKE)
    return {
        path.stem: (absence if path.stem in _JUDGES_EXPIRY else "") + path.read_text(encoding="utf-8")
        for path in sorted(_FOLDER.glob("*.lua"))
    }


SOURCES: dict[str, str] = _read()
SHAS: dict[str, str] = {name: sha1(text.encode(), usedforsecurity=False).hexdigest() for name, text in SOURCES.items()}


def call(client, name: str, keys: list[str], args: list) -> object:
    """Run a script on a synchronous client. `client` may not be a pipeline."""
    try:
        return client.evalsha(SHAS[name], len(keys), *keys, *args)
    except NoScriptError:
        return client.eval(SOURCES[name], len(keys), *keys, *args)
