"""The files of a tokenizer's directory: which decide about ids, and what is in them; those of a name
on the hub are fetched here. Knows no library of tokenizers."""

import json
from hashlib import blake2b
from pathlib import Path
from typing import Any

from app.errors import UsageError

#: what decides about ids; chat templates are taken as text, `*.py` only if the tokenizer runs it
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "merges.txt", "vocab.txt", "*.model", "*.tiktoken")  # fmt: skip
OTHER_FILES = ("config.json", "generation_config.json", "*.jinja", "chat_template.json", "*.py")
#: keys of tokenizer_config.json that say where it came from, or stand in the fingerprint by themselves
_VOLATILE_KEYS = ("name_or_path", "_name_or_path", "_commit_hash", "transformers_version", "chat_template")


def own_code(directory: Path) -> str | None:
    """The class of its own that a tokenizer's configuration asks for, or None."""
    asked = json_file(directory / "tokenizer_config.json").get("auto_map")
    asked = asked.get("AutoTokenizer") if isinstance(asked, dict) else asked
    names = asked if isinstance(asked, list) else [asked]
    return next((name for name in names if isinstance(name, str)), None)


def directory_of(tokenizer: str) -> Path:
    """Where the files lie; those of a name on the hub are fetched, or found in its cache. Raises UsageError."""
    path = Path(tokenizer).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UsageError(f"--tokenizer {tokenizer} is a file; name the directory that it lies in.")
    if path.is_absolute() or tokenizer.startswith(".") or tokenizer.count("/") > 1:
        raise UsageError(f"--tokenizer {tokenizer}: no such directory.")
    name, _, revision = tokenizer.partition("@")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = [*TOKENIZER_FILES, *OTHER_FILES]
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as exc:
        raise UsageError(
            f"--tokenizer {tokenizer}: no such directory here, and the hub gave nothing under that name "
            f"({type(exc).__name__}); name a local directory, or check the name and the network."
        ) from exc


def refuse_untrusted_code(directory: Path, tokenizer: str, *, trusted: bool) -> None:
    """Raises UsageError for a tokenizer that is nothing without code of its own, unless that is trusted."""
    code = own_code(directory)
    if code and not trusted and not (directory / "tokenizer.json").exists():
        raise UsageError(
            f"The tokenizer {tokenizer} comes with its own code ({code}); "
            "read it, and pass --trust-remote-code if you trust it."
        )


def content_digest(path: Path) -> str:
    """Of what the file says about ids; where it came from is left out."""
    data = path.read_bytes()
    if path.name == "tokenizer_config.json":
        config = {key: value for key, value in json_file(path).items() if key not in _VOLATILE_KEYS}
        data = json.dumps(config, sort_keys=True).encode()
    return blake2b(data, digest_size=16).hexdigest()


def json_file(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is none."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path} cannot be read: {one_line(exc)}.") from exc
    return found if isinstance(found, dict) else {}


def one_line(error: Exception) -> str:
    """What an error says, for the middle of a sentence."""
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."
