"""The tokenizer of a finished run: the one that is named, else the one of its saved settings."""

from app.cli.prepare import render_options
from app.errors import UsageError
from app.rundir import RunDir
from app.settings import load_settings
from app.tokenization import Renderer, RenderOptions


def renderer_of(rundir: RunDir, tokenizer: str | None) -> Renderer:
    """Loads it. Raises UsageError if nobody says which."""
    saved = rundir.private / "settings.json"
    if not saved.exists():
        if tokenizer is None:
            raise UsageError(f"{rundir.out} does not say which tokenizer it was made with; give --tokenizer DIR.")
        return Renderer(RenderOptions(tokenizer))
    settings = load_settings(saved)
    return Renderer(render_options(settings.model_copy(update={"tokenizer": tokenizer or settings.tokenizer}), None))
