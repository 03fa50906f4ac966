"""The Lua scripts, one file per command, called by name.

A Redis that was restarted has forgotten them; `NOSCRIPT` is answered by sending the script itself.
"""

from hashlib import sha1
from pathlib import Path

from redis.exceptions import NoScriptError

from app.store.keys import SEEN, WOKE

_FOLDER = Path(__file__).parent / "lua"
#: What stands before a script, and before which.
_PRELUDES = {
    "absence": ("claim", "lease", "orphaned", "renew_claims", "renew_leases", "staged", "turned"),
    "shares": ("lease", "publish", "release_lease", "renew_leases", "staged", "turned"),
}


def _read() -> dict[str, str]:
    def text(path: Path) -> str:
        return path.read_text(encoding="utf-8").replace("{SEEN}", SEEN).replace("{WOKE}", WOKE)

    preludes = {name: text(_FOLDER / "prelude" / f"{name}.lua") for name in _PRELUDES}
    return {
        path.stem: "".join(preludes[name] for name, of in _PRELUDES.items() if path.stem in of) + text(path)
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
