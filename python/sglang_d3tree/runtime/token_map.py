"""The reduced draft vocabulary: which tokens the draft may propose (METHOD 5b). What is emitted never depends on it."""

from __future__ import annotations

from pathlib import Path

import torch

FLAG = "--speculative-token-map"
# Found beside the drafter without being asked for; `--speculative-token-map none` leaves it.
FILE_NAME = "hot_token_ids.pt"


def read_token_map(given: str | None, draft_path: str, vocabulary: int) -> torch.Tensor | None:
    """The tokens that the draft's head knows, ascending [n] int64, or None for all of them.

    Args:
        given: SGLang's ``--speculative-token-map``: a file, a file in a hub repository, ``none``, or None.
        draft_path: checkpoint directory of the drafter, where a map may lie.
        vocabulary: tokens of the target.

    Raises:
        ValueError: naming the flag, for a map that cannot be read or names other tokens than the target's.
    """
    if given == "none":
        return None
    source = given
    if source is None:
        beside = Path(draft_path) / FILE_NAME
        if not beside.exists():
            return None
        source = str(beside)
    from sglang.srt.speculative.spec_utils import load_token_map

    try:
        ids = load_token_map(source).flatten().unique(sorted=True)
    except Exception as error:
        # Hub clients and torch explain themselves in paragraphs.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{FLAG} {source} is no readable list of token ids ({reason}).") from error
    if ids.numel() == 0 or int(ids[0]) < 0 or int(ids[-1]) >= vocabulary:
        raise ValueError(
            f"{FLAG} {source} must name tokens between 0 and {vocabulary - 1}, the target's vocabulary; build one with "
            "'d3tree build-token-map'."
        )
    return ids
