"""Lanes: two queues by expected token footprint, so that a few long rows do not stand in the way of many short ones."""

from enum import StrEnum

#: SGLang's own estimate of an output nobody has measured yet (SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION).
EXPECTED_OUTPUT_CLIP = 4096
#: From this expected footprint on, a prompt is long.
LONG_FROM_TOKENS = 8192


class Lane(StrEnum):
    """The two lanes."""

    SHORT = "short"
    LONG = "long"

    @property
    def queue(self) -> str:
        """Name of its Celery queue (Celery's prefix comes before it)."""
        return f"lane.{self.value}"


def expected_output_tokens(max_new_tokens: int) -> int:
    """Expected length of an answer before any has been seen."""
    return min(max_new_tokens, EXPECTED_OUTPUT_CLIP)


def lane_of(num_prompt_tokens: int, max_new_tokens: int) -> Lane:
    """The lane of a prompt, by what it is expected to hold in the KV pool at its end."""
    footprint = num_prompt_tokens + expected_output_tokens(max_new_tokens)
    return Lane.LONG if footprint >= LONG_FROM_TOKENS else Lane.SHORT
