"""Every error a user can meet, each with the exit code that scripts rely on.

    HeadraceError                 1  an internal error that we can at least word
    ├── UsageError                2  bad settings or input; also a directory held by another run
    ├── Incomplete                3  stopped with rows pending
    ├── StorageError              4  Redis or disk
    ├── RecipeChanged             6  the recipe or a server differs from what the run was started with
    └── VerificationFailed        7  `verify` found something

The message is one sentence for a person: what is wrong, where, and what to do about it.
"""

OK = 0
INTERNAL = 1
USAGE = 2
INCOMPLETE = 3
STORAGE = 4
SOME_REJECTED = 5  # complete, some rows rejected: not an error, so it has no class
RECIPE_CHANGED = 6
VERIFICATION_FAILED = 7


class HeadraceError(Exception):
    """Base of all errors that reach a user as one sentence instead of a traceback."""

    exit_code = INTERNAL


class UsageError(HeadraceError):
    """Bad settings or input, found before anything was enqueued."""

    exit_code = USAGE


class Incomplete(HeadraceError):
    """The run stopped with rows pending; the same command resumes it."""

    exit_code = INCOMPLETE


class StorageError(HeadraceError):
    """Redis or the disk is away, full, or not what we need."""

    exit_code = STORAGE


class RecipeChanged(HeadraceError):
    """The recipe or a server differs from what the run was started with."""

    exit_code = RECIPE_CHANGED


class VerificationFailed(HeadraceError):
    """`headrace verify` found a broken promise."""

    exit_code = VERIFICATION_FAILED


def error_of(exit_code: int, message: str) -> HeadraceError:
    """The error that ends with this code, for a message that came from another process."""
    kinds = {kind.exit_code: kind for kind in (UsageError, Incomplete, StorageError, RecipeChanged)}
    return kinds.get(exit_code, HeadraceError)(message)
